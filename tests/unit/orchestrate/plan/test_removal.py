"""The artifacts and runs that `store rm` removes, and those that stay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import fabricated
from tests.unit.conftest import Refused
from trtllm_pipeline.orchestrate.plan.plan import Plan
from trtllm_pipeline.orchestrate.plan.plan_file import plan_lines
from trtllm_pipeline.orchestrate.plan.removal import choose
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.show.cli.app import main

FP16, INT8, INT4 = (fabricated.cell(precision) for precision in ("fp16", "int8_wo", "int4_wo"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A first run of int4_wo, and a second of fp16 and int8_wo, which share the download."""
    store = Store(tmp_path / "ws")
    for cell in (FP16, INT8, INT4):
        fabricated.publish_all(store, fabricated.plan(cell), cell)
    for place, (name, plan) in enumerate({"old": fabricated.plan(INT4), "new": fabricated.plan(FP16, INT8)}.items()):
        folder = store.runs_dir / f"20260101-00000{place}-{name}"
        folder.mkdir()
        lines = plan_lines(plan, present=(), to_run=(), reasons={}, times=lambda _run: None, commands=lambda _run: [])
        (folder / "plan.json").write_text("\n".join(lines))
    yield store
    store.close()


def of(store: Store, plan: Plan) -> set[str]:
    wanted = {run.fingerprint for run in plan.stage_runs.values()}
    return {each.fingerprint for each in store.index.all_artifacts() if each.fingerprint in wanted}


def rm(store: Store, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["store", "rm", *words, "-w", str(store.workspace), "--format", "json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_cell_goes_and_what_another_cell_shares_stays(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    of_int8, of_fp16 = of(store, fabricated.plan(INT8)), of(store, fabricated.plan(FP16))
    for words in ((str(INT8.id),), ("*/int8_wo/*",), ("int8_wo",)):
        found = rm(store, capsys, *words, "--dry-run")
        assert {each["fingerprint"] for each in found["artifacts"]} == of_int8 - of_fp16 != set()
        assert {each["why"] for each in found["kept"]} == {f"cell {FP16.id} shares it"}
    assert of(store, fabricated.plan(INT8)) == of_int8
    assert rm(store, capsys, "int8_wo", "--yes")["freed_bytes"] > 0
    assert of(store, fabricated.plan(INT8)) == of_int8 & of_fp16
    assert of(store, fabricated.plan(FP16)) == of_fp16
    assert not any((store.workspace / "store" / "build" / each).exists() for each in of_int8 - of_fp16)


def test_a_stage_and_an_artifact_are_meant_themselves(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    (download,) = [each for each in store.index.all_artifacts() if each.stage == "download"]
    builds = {each.fingerprint for each in store.index.all_artifacts() if each.stage == "build"}
    found = rm(store, capsys, f"download-{download.fingerprint[:12]}", "build", "--dry-run")
    assert {each["fingerprint"] for each in found["artifacts"]} == {download.fingerprint, *builds}


def test_a_run_goes_with_what_no_other_run_used(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    of_old, of_new = of(store, fabricated.plan(INT4)), of(store, fabricated.plan(FP16, INT8))
    found = rm(store, capsys, "--run", "old", "--yes")
    assert found["run"] == "20260101-000000-old"
    assert {each["fingerprint"] for each in found["artifacts"]} == of_old - of_new
    assert {each["why"] for each in found["kept"]} == {"run 20260101-000001-new used it"}
    assert [each.name for each in store.runs_dir.iterdir()] == ["20260101-000001-new"]
    assert of(store, fabricated.plan(FP16, INT8)) == of_new
    assert main(["store", "rm", "--run", "old", "--yes", "-w", str(store.workspace)]) == 2


def test_names_with_a_run_select_from_it_and_leave_the_run(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    found = rm(store, capsys, "build", "--run", "old", "--yes")
    assert found["run"] is None
    expected = fabricated.stage_run(fabricated.plan(INT4), INT4, "build").fingerprint
    assert [each["fingerprint"] for each in found["artifacts"]] == [expected]
    assert len(list(store.runs_dir.iterdir())) == 2


def test_protected_artifacts_and_those_of_a_managed_server_stay(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    build = fabricated.stage_run(fabricated.plan(INT8), INT8, "build").fingerprint
    repository = fabricated.stage_run(fabricated.plan(INT4), INT4, "repository").fingerprint
    assert main(["store", "keep", f"build-{build[:12]}", "-w", str(store.workspace)]) == 0
    served = store.workspace / "serve" / "chat"
    served.mkdir(parents=True)
    (served / "job.json").write_text(json.dumps({"inputs": {"r": str(store.folder("repository", repository))}}))
    capsys.readouterr()
    found = rm(store, capsys, "build", "download", "convert", "repository", "--yes")
    why = {each["fingerprint"]: each["why"] for each in found["kept"]}
    assert why[build].startswith("kept (pipeline store keep")
    assert why[repository] == "a managed server serves it"
    assert {each["stage"] for each in found["kept"]} == {"build", "convert", "download", "repository"}
    assert {each.fingerprint for each in store.index.all_artifacts()} >= set(why)


def test_without_yes_nothing_is_removed_where_no_one_can_be_asked(
    store: Store, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(store.index.all_artifacts())
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert "skip the prompt with --yes" in refused("store", "rm", "build", "-w", str(store.workspace))
    for answer, code in ((False, 130), (True, 0)):
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)

        def confirm(_question: str, *, abort: bool, err: bool, answer: bool = answer) -> None:
            import typer

            if not answer:
                raise typer.Abort

        monkeypatch.setattr("typer.confirm", confirm)
        assert main(["store", "rm", "build", "-w", str(store.workspace)]) == code
        assert (len(store.index.all_artifacts()) == before) is not answer


def test_nothing_is_removed_while_something_runs(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    with store.in_use():
        assert main(["store", "rm", "--run", "old", "--yes", "-w", str(store.workspace)]) == 2
    assert "a run in this workspace may need" in capsys.readouterr().err
    assert len(list(store.runs_dir.iterdir())) == 2
    assert choose(store, (), "old").removed
