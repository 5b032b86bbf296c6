from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import fabricated
from tests.unit.conftest import Refused
from trtllm_pipeline.base.errors import StageError
from trtllm_pipeline.orchestrate.plan.plan_file import plan_lines
from trtllm_pipeline.orchestrate.store.index import AttemptRow
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.show.cli.app import main
from trtllm_pipeline.show.report.record import Ending, StageRecord, read_record
from trtllm_pipeline.tensorrt.stage.base import JOB

DONE, FAILED, LATER = (fabricated.cell(precision) for precision in ("fp16", "int8_wo", "int4_wo"))
PLAN = fabricated.plan(DONE, FAILED, LATER)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Run "run-1" made what DONE needs and failed at FAILED's convert."""
    store = Store(tmp_path / "ws")
    store.index.begin_run("run-1", "/m/quick.yaml", ("pipeline", "run"))
    fabricated.publish_all(store, PLAN, DONE)
    error = StageError("convert: no such tensor", hint="another model")
    fabricated.fail(store, fabricated.stage_run(PLAN, FAILED, "convert"), error)
    folder = store.runs_dir / "run-1"
    folder.mkdir()
    _write_plan(folder, present=False)
    yield store
    store.close()


def _write_plan(folder: Path, *, present: bool) -> None:
    lines = plan_lines(
        PLAN,
        present=set(PLAN.stage_runs) if present else (),
        to_run=() if present else set(PLAN.stage_runs),
        reasons=dict.fromkeys(PLAN.stage_runs, "not made yet"),
        times=lambda _run: None,
        commands=lambda run: [["pipeline", run.stage.name, "{attempt}"]],
        run_id=folder.name,
    )
    (folder / "plan.json").write_text("\n".join(lines))


def stages(store: Store, run: str = "run-1") -> dict[tuple[str, str], StageRecord]:
    """(stage, precision) -> record, for those of one cell; ("download", "") for the shared one."""
    found = {}
    for stage in read_record(store, store.runs_dir / run).stages:
        found[stage.stage, stage.cells[0].split("/")[1] if len(stage.cells) == 1 else ""] = stage
    return found


def test_how_each_stage_run_ended(store: Store) -> None:
    known = stages(store)
    assert known["download", ""].ending is Ending.MADE
    assert known["build", "fp16"].ending is Ending.MADE
    assert known["convert", "int8_wo"].ending is Ending.FAILED
    assert known["build", "int8_wo"].ending is Ending.NOT_RUN
    assert known["download", ""].name == "smollm2/tp1pp1/bs4/isl128-osl64"


def test_a_failure_with_its_log(store: Store) -> None:
    failed = stages(store)["convert", "int8_wo"]
    assert (failed.failure, failed.message, failed.hint) == ("bug", "convert: no such tensor", "another model")
    assert failed.log == "loading\nno such tensor\n"
    assert len(failed.attempts) == 1


def test_a_later_run_finds_all_up_to_date(store: Store) -> None:
    folder = store.runs_dir / "run-2"
    folder.mkdir()
    _write_plan(folder, present=True)
    built = stages(store, "run-2")["build", "fp16"]
    assert built.ending is Ending.UP_TO_DATE
    assert built.attempts == ()
    assert built.made_s == 1.5
    assert built.provenance["duration_s"] == 1.5
    assert "params" in built.key


def test_commands_as_run_or_else_as_planned(store: Store) -> None:
    run = fabricated.stage_run(PLAN, DONE, "build")
    artifact = store.get("build", run.fingerprint)
    (artifact.folder / JOB).write_text(
        json.dumps({"commands": [["trtllm-build", "--max_batch_size", 4]], "gpus": ["GPU-1"]})
    )
    known = stages(store)
    assert known["build", "fp16"].commands == (("trtllm-build", "--max_batch_size", "4"),)
    assert known["build", "fp16"].gpus == ("GPU-1",)
    assert known["build", "int4_wo"].commands == (("pipeline", "build", "{attempt}"),)


def test_logs_are_cut_to_their_end_and_lose_colours(store: Store) -> None:
    run = fabricated.stage_run(PLAN, DONE, "build")
    artifact = store.get("build", run.fingerprint)
    lines = "".join(f"\x1b[32mline {number}\x1b[0m\n" for number in range(1000))
    (artifact.folder / "log").write_text(lines)
    log = stages(store)["build", "fp16"].log
    assert log.startswith("…\nline ")
    assert log.endswith("line 999\n")
    assert "\x1b" not in log


def test_a_killed_pipeline_leaves_interrupted_attempts(store: Store) -> None:
    run = fabricated.stage_run(PLAN, LATER, "convert")
    store.begin("run-1", "convert", run.fingerprint)
    later = stages(store)["convert", "int4_wo"]
    assert later.ending is Ending.INTERRUPTED
    assert later.attempts == ()


def test_what_ends_while_the_record_is_read_was_not_interrupted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fabricated.stage_run(PLAN, LATER, "convert")
    claim = store.claim(run.fingerprint)
    assert claim is not None
    store.begin("run-1", "convert", run.fingerprint)
    attempts_of = store.index.attempts_of

    def ends(of: str) -> tuple[AttemptRow, ...]:
        found = attempts_of(of)
        claim.release()
        return found

    monkeypatch.setattr(store.index, "attempts_of", ends)
    assert stages(store)["convert", "int4_wo"].ending is Ending.RUNNING


def test_html_goes_to_the_runs_folder_and_its_path_to_stdout(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtllm_pipeline.show.report.html.page.vega", lambda: "")
    assert main(["report", "--workspace", str(store.workspace), "--format", "html"]) == 0
    path = capsys.readouterr().out.strip()
    assert path == str(store.runs_dir / "run-1" / "report.html")
    assert "no such tensor" in Path(path).read_text(encoding="utf-8")
    assert main(["report", "-w", str(store.workspace), "--format", "junit"]) == 0
    assert '<failure type="unexpected_failure" message="convert: no such tensor">' in capsys.readouterr().out


def test_limits_of_the_page(store: Store, refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[object] = []
    monkeypatch.setattr(
        "trtllm_pipeline.show.report.html.page.to_html", lambda report: given.append(report.limits) or ""
    )
    command = ["report", "-w", str(store.workspace), "-o", str(tmp_path / "x.html")]
    assert main([*command, "--format", "html", "--slo", "ttft_p99=0.3s,tpot_p99=40ms"]) == 0
    assert given == [{"ttft_ms": 300.0, "tpot_ms": 40.0, "statistic": "p99"}]
    for slo in ("ttft_p99=300ms,tpot_p50=40ms", "output_tps=100", "itl_p50=3ms", "nonsense"):
        assert main([*command, "--format", "html", "--slo", slo]) == 2
    assert "add --format html" in refused(*command, "--slo", "ttft_p99=300ms")
