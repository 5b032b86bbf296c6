from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import fabricated
from tests.unit.conftest import Pipeline, Refused
from trtllm_pipeline.base.errors import StageError
from trtllm_pipeline.measure.load.result import levels_of
from trtllm_pipeline.orchestrate.plan.plan_file import plan_lines
from trtllm_pipeline.orchestrate.results.report_file import CellResult, CellStatus, report_json, rows
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.show.progress.left import TimeLeft

DONE, FAILED, LATER = (fabricated.cell(precision) for precision in ("fp16", "int8_wo", "int4_wo"))
NEVER = fabricated.cell("fp8", reason="precision fp8: not here")
PLAN = fabricated.plan(DONE, FAILED, LATER, NEVER)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "ws")
    fabricated.publish_all(store, PLAN, DONE)
    fabricated.fail(
        store,
        fabricated.stage_run(PLAN, FAILED, "convert"),
        StageError("convert: no such tensor", hint="another model"),
    )
    for run in ("20260101-000000-aa", "20260102-000000-bb"):
        store.index.begin_run(run, "/m/quick.yaml", ("pipeline", "run"))
        folder = store.runs_dir / run
        folder.mkdir()
        lines = plan_lines(
            PLAN, present=(), to_run=(), reasons={}, times=lambda _run: None, commands=lambda _run: [], run_id=run
        )
        (folder / "plan.json").write_text("\n".join(lines))
    yield store
    store.close()


@pytest.fixture
def pipeline(pipeline: Pipeline, store: Store, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    monkeypatch.setenv("PIPELINE_WORKSPACE", str(store.workspace))
    monkeypatch.setenv("COLUMNS", "100")
    return pipeline


def test_report_of_a_run_that_goes_on(pipeline: Pipeline, store: Store) -> None:
    told = TimeLeft(store.runs_dir / "20260102-000000-bb")
    assert "20260102-000000-bb is still running: these are the results so far" in pipeline("report")[2]
    told.close()


def test_a_page_that_cannot_be_written_is_not_said_to_be_there(pipeline: Pipeline, store: Store) -> None:
    (store.runs_dir / "20260102-000000-bb" / "report.html").mkdir()
    code, out, err = pipeline("report", "--format", "html")
    assert (code, out) == (2, "")
    assert "report.html: cannot be written" in err


def test_report_of_a_run_that_was_killed(pipeline: Pipeline) -> None:
    code, out, err = pipeline("report")
    assert code == 0
    assert "20260102-000000-bb did not finish" in err
    assert "4 cells: 1 up to date, 1 failed, 1 infeasible, 1 not run; all: smollm2 tp1pp1 bs4 isl128-osl64" in out
    assert "convert: no such tensor" in out
    data = json.loads(pipeline("report", "--format", "json")[1])
    assert data["run"] == {
        "id": "20260102-000000-bb",
        "matrix": "/m/quick.yaml",
        "finished": False,
        "counts": {"failed": 1, "infeasible": 1, "not_run": 1, "up_to_date": 1},
        "forecast": None,
    }


def test_report_of_a_run_that_ended_is_the_one_it_left(pipeline: Pipeline, store: Store, tmp_path: Path) -> None:
    report = "\n".join(report_json(rows(PLAN, store), "20260101-000000-aa", "quick.yaml"))
    (store.runs_dir / "20260101-000000-aa" / "report.json").write_text(report)
    code, out, err = pipeline("report", "--run", "20260101", "--format", "json")
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads(report)
    for form in ("table", "csv", "markdown"):
        file = tmp_path / form
        code, out, _ = pipeline("report", "--run", "20260101", "--format", form, "--output", str(file))
        assert (code, out) == (0, "")
        assert "fp16" in file.read_text()


def test_report_says_which_runs_there_are(pipeline: Pipeline, tmp_path: Path, refused: Refused) -> None:
    code, out, err = pipeline("report", "--run", "20260103-000000-bb")
    assert (code, out) == (2, "")
    assert "there is no run '20260103-000000-bb'" in err
    assert "try: 2026010" in err
    assert "no such workspace" in refused("report", "--workspace", str(tmp_path / "typo"))
    assert not (tmp_path / "typo").exists()
    Store(tmp_path / "new").close()
    assert "no runs in this workspace yet" in refused("report", "--workspace", str(tmp_path / "new"))


def test_status_shows_symbols_and_reasons(pipeline: Pipeline) -> None:
    code, out, _ = pipeline("status")
    assert code == 0
    assert out.splitlines() == [
        "run 20260102-000000-bb, all cells: smollm2 tp1pp1 bs4 isl128-osl64",
        "        download convert build repository launch smoke perf accuracy",
        "fp16       =        =      =       =        -      =    =      =",
        "int8_wo    =        ✗      #       #        #      #    #      #",
        "int4_wo    =        ·      ·       ·        ·      ·    ·      ·",
        "· to do   = up to date   - not needed   ✗ failed   # blocked",
        "",
        f"failed: convert, {FAILED.id}",
        "  convert: no such tensor",
        out.splitlines()[9],
        "  try: another model",
        "",
        "1 cell can never work:",
        f"  {NEVER.id}: precision fp8: not here",
    ]
    assert out.splitlines()[9].startswith("  log: ")
    _, out, _ = pipeline("status", "--cells", "smollm2/int8_wo")
    assert "int4_wo" not in out
    code, _, err = pipeline("status", "--cells", "qwen*")
    assert code == 2
    assert "matches none of the 4 cells" in err


def test_status_shows_what_runs_now(pipeline: Pipeline, store: Store) -> None:
    run = fabricated.stage_run(PLAN, LATER, "convert")
    claim = store.claim(run.fingerprint)
    attempt = fabricated.begin(store, run)
    (attempt.folder / "progress.json").write_text('{"done": 1000000, "total": 4000000, "unit": "bytes"}')
    _, out, _ = pipeline("status")
    assert f"running: convert, {LATER.id}: 0." in out
    assert "1.0/4.0 MB (25%)" in out
    data = json.loads(pipeline("status", "--format", "json")[1])
    cell = next(cell for cell in data["cells"] if cell["id"] == LATER.id)
    stage = next(stage for stage in cell["stages"] if stage["stage"] == "convert")
    assert (stage["status"], stage["progress"]["done"]) == ("running", 1000000)
    again = store.claim(run.fingerprint)
    assert again is None, "looking leaves the claim alone"
    claim.release()
    assert "running:" not in pipeline("status")[1]


def test_logs_of_a_stage(pipeline: Pipeline, store: Store) -> None:
    assert pipeline("logs", "fp16", "build") == (0, "hello\n", "")
    assert pipeline("logs", "smollm2/int8*", "convert", "--lines", "1")[1] == "no such tensor\n"
    assert pipeline("logs", fabricated.stage_run(PLAN, DONE, "build").id)[1] == "hello\n"
    code, out, err = pipeline("logs", "int8_wo")
    assert (code, out) == (0, "loading\nno such tensor\n")
    assert "convert failed" in err
    code, out, err = pipeline("logs", "fp16")
    assert [line.split()[0] for line in out.splitlines()] == [
        *("download", "convert", "build", "repository", "smoke", "perf", "accuracy")
    ]
    assert all(Path(line.split()[1]).is_file() for line in out.splitlines())
    assert err == f"to print one: pipeline logs {DONE.id} STAGE -w {store.workspace}\n"


def test_the_servers_own_log(pipeline: Pipeline, store: Store) -> None:
    attempt = fabricated.begin(store, fabricated.stage_run(PLAN, DONE, "launch"))
    (attempt.folder / "server.log").write_text("I1121 started")
    store.fail(attempt, "stopped", None)
    assert pipeline("logs", "fp16", "--server") == (0, "I1121 started\n", "")
    assert pipeline("logs", "fp16", "launch", "--server")[1] == "I1121 started\n"
    assert pipeline("logs", "fp16", "launch")[1] == "hello\n"
    code, _, err = pipeline("logs", "fp16", "build", "--server")
    assert code == 2
    assert "build starts no server" in err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("tp1pp1", "build"), "matches 4 cells"),
        (("qwen", "build"), "matches none of the 4 cells"),
        (("fp16", "biuld"), "try: build"),
        (("fp8",), "infeasible: precision fp8"),
        (("fp8", "build"), ": precision fp8"),
        (("int4_wo", "build"), "has not run in this workspace"),
        (("fp16", "build", "--lines", "0"), "greater than or equal to 1"),
        (("fp16", "build", "--run", "x"), "there is no run 'x'"),
    ],
)
def test_logs_says_what_is_wrong(pipeline: Pipeline, argv: tuple[str, ...], words: str) -> None:
    code, out, err = pipeline("logs", *argv)
    assert (code, out) == (2, "")
    assert words in err


def test_a_log_that_was_cleared_away_is_not_said_never_to_have_been(pipeline: Pipeline, store: Store) -> None:
    attempt = fabricated.begin(store, fabricated.stage_run(PLAN, LATER, "convert"))
    shutil.rmtree(attempt.folder)
    code, out, err = pipeline("logs", "int4_wo", "convert")
    assert (code, out) == (2, "")
    assert "it ran, but its files were removed" in err


def test_following_ends_with_the_attempt(store: Store) -> None:
    run = fabricated.stage_run(PLAN, LATER, "convert")
    claim = store.claim(run.fingerprint)
    assert claim is not None
    attempt = fabricated.begin(store, run, log="first\n")
    command = [sys.executable, "-m", "trtllm_pipeline", "logs", "int4_wo", "convert", "--follow"]
    with subprocess.Popen(
        [*command, "--workspace", str(store.workspace)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout.readline() == "first\n"
        with attempt.log.open("a") as file:
            file.write("second\n")
        assert process.stdout.readline() == "second\n"
        assert process.poll() is None
        # The attempt becomes the artifact while somebody reads its log.
        (attempt.out / "weights").write_bytes(b"x")
        fabricated.recorded(store, attempt, run.key, run.label, {"duration_s": 1.0})
        with (store.folder("convert", run.fingerprint) / "log").open("a") as file:
            file.write("last\n")
        claim.release()
        assert process.communicate(timeout=60)[0] == "last\n"
    assert process.returncode == 0


def test_nothing_heavy_is_imported_to_print_a_log(store: Store) -> None:
    program = (
        "import sys; from trtllm_pipeline.show.cli.app import main\n"
        f"code = main(['logs', 'fp16', 'build', '--workspace', {str(store.workspace)!r}])\n"
        "heavy = {'rich', 'numpy', 'yaml', 'huggingface_hub', 'tritonclient', 'asyncio'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr


def test_compare_and_recommend_of_runs(pipeline: Pipeline, store: Store) -> None:
    code, out, _ = pipeline("compare", "latest", "latest~1", "--format", "json", "--fail-on", "ttft_p50:+1%")
    data = json.loads(out)
    assert (data["new"], data["base"]) == ("20260102-000000-bb", "20260101-000000-aa")
    assert [(pair["cell"], pair["level"]) for pair in data["pairs"] if pair["level"]] == [
        (DONE.id, "1"),
        (DONE.id, "4"),
    ]
    assert data["pairs"][1]["metrics"]["ttft_p50"]["method"] == "same", "both runs have the very same artifact"
    assert code == 1, "cells without a figure on either side break the gate"
    assert {each["cell"] for each in data["gate"]["broken"]} == {FAILED.id, LATER.id}, "what can never work does not"
    assert pipeline("compare", "latest", "20260101", "--cells", "*/fp16", "--fail-on", "ttft_p50:+1%")[0] == 0
    few = json.loads(pipeline("compare", "latest", "20260101", "--fail-on", "ttft_p99:+1%", "--format", "json")[1])
    reasons = {each["reason"] for each in few["gate"]["broken"] if each["cell"] == DONE.id}
    assert reasons == {"missing: a p99 needs 100 requests of each side"}
    code, _, err = pipeline("compare", "latest", "latest~5")
    assert (code, "there are 2 runs" in err, "try: pipeline status --runs lists them" in err) == (2, True, True)
    code, out, _ = pipeline("recommend", "--slo", "ttft_p50=100ms", "--min-accuracy", "-1%", "--format", "json")
    assert code == 0
    candidates = {each["cell"]: each["reason"] for each in json.loads(out)["candidates"]}
    assert candidates == {
        DONE.id: None,
        FAILED.id: "convert failed: convert: no such tensor",
        LATER.id: "not run",
        NEVER.id: "precision fp8: not here",
    }


def test_a_cell_that_failed_after_its_load_run_is_never_taken(store: Store, pipeline: Pipeline, tmp_path: Path) -> None:
    """It was measured, and nothing is faster; its answers were too bad, or its smoke test failed."""
    plan = fabricated.plan(DONE, FAILED, LATER)
    low = "exact is 0.300 on 50 questions, expected at least 0.9"
    for cell, stage in ((FAILED, "accuracy"), (LATER, "smoke")):
        for name in ("convert", "build", "repository", "perf"):
            fast = {"schema": 1, "levels": [fabricated.level(4, ttft_ms=1.0, output_tokens_per_s=9e3)], "findings": []}
            files = {"perf.json": fast} if name == "perf" else {"x": b"1"}
            fabricated.publish(store, fabricated.stage_run(plan, cell, name), files)
        failed = fabricated.stage_run(plan, cell, stage)
        attempt = fabricated.begin(store, failed)
        scores = {"total": 50, "scores": {"exact": 0.3}, "intervals": {"exact": [0.2, 0.4]}}
        (attempt.out / "accuracy.json").write_text(json.dumps(scores))
        store.fail(attempt, "failed", StageError(low if stage == "accuracy" else "no answer", log=attempt.log))
    code, out, _ = pipeline("recommend", "--format", "json")
    data = json.loads(out)
    found = {each["cell"]: each for each in data["candidates"]}
    assert (code, data["recommended"]) == (
        0,
        [{"workload": {}, "cell": DONE.id, "tied": [], "why": None, "nearest": None}],
    )
    assert found[FAILED.id]["reason"] == f"accuracy failed: {low}"
    assert (found[FAILED.id]["accuracy"], found[FAILED.id]["output_tps_per_device"]) == (0.3, 9e3), "to be seen"
    assert found[LATER.id]["reason"] == "smoke failed: no answer"
    assert pipeline("recommend", "--cells", "!*/fp16/*", "--min-accuracy", "-100%")[0] == 3
    report = json.loads(pipeline("report", "--format", "json")[1])
    failing = next(cell for cell in report["cells"] if cell["id"] == FAILED.id)
    assert (failing["status"], failing["accuracy"], failing["reason"]) == ("failed", {"exact": 0.3}, low)
    code, out, _ = pipeline("compare", "--by", "precision", "--base", "fp16", "--fail-on", "ttft_p50:+10%")
    assert code == 1, "who failed is no better"
    assert f"not compared {FAILED.id}: accuracy failed: {low}" in " ".join(out.split())
    assert "✔" not in out.replace("✔ better", "")
    data = json.loads(pipeline("compare", "latest", "latest~1", "--format", "json")[1])
    assert [each["cell"] for each in data["unfit"]] == [FAILED.id, LATER.id]
    assert {pair["cell"] for pair in data["pairs"]} == {DONE.id}


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (CellStatus.FAILED, "smoke failed: no answer"),
        (CellStatus.RUNNING, "not finished: running"),
        (CellStatus.INTERRUPTED, "not finished: interrupted"),
        (CellStatus.NOT_RUN, "not finished: not run"),
        (CellStatus.UP_TO_DATE, None),
    ],
)
def test_only_what_went_through_all_its_stages_is_taken(
    status: CellStatus, reason: str | None, pipeline: Pipeline, tmp_path: Path
) -> None:
    failed = {"failed_stage": "smoke", "reason": "no answer"} if status is CellStatus.FAILED else {}
    levels = levels_of([fabricated.level(1, ttft_ms=1.0, output_tokens_per_s=1.0)])
    path = tmp_path / "report.json"
    path.write_text(
        "\n".join(report_json([CellResult(DONE.id, {"model": "m"}, status, levels=levels, **failed)], "r", "m"))
    )
    code, out, _ = pipeline("recommend", str(path), "--format", "json")
    assert [each["reason"] for each in json.loads(out)["candidates"]] == [reason]
    assert code == (0 if reason is None else 3)
    code, out, _ = pipeline("recommend", str(path), "--format", "json", "--min-accuracy", "-1%")
    assert [each["reason"] for each in json.loads(out)["candidates"]] == [reason or "accuracy was not measured"]


def test_the_latest_run_is_the_last_that_began(pipeline: Pipeline, store: Store) -> None:
    """Though the clock was set back before it, which its id and its time show."""
    folder = store.runs_dir / "20250101-000000-cc"
    shutil.copytree(store.runs_dir / "20260102-000000-bb", folder)
    store.index.begin_run(folder.name, "/m/quick.yaml", ("pipeline", "run"))
    assert json.loads(pipeline("status", "--format", "json")[1])["run"] == folder.name
    assert f"run {folder.name} did not finish" in pipeline("report")[2]
    assert "latest~3: there are 3 runs" in pipeline("compare", "latest", "latest~3")[2]
    assert pipeline("compare", "latest~2", "20260101-000000-aa")[0] == 0
