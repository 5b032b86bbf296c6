"""What another release changes in a plan, without a GPU and without TensorRT-LLM."""

from __future__ import annotations

import json

import pytest

from tests.helpers import trtllm_cells
from trtllm_pipeline.base.text_blocks import as_markdown
from trtllm_pipeline.orchestrate.matrix.recipe_files import matrices_folder
from trtllm_pipeline.orchestrate.plan.planner import Request
from trtllm_pipeline.orchestrate.results import plan_difference
from trtllm_pipeline.orchestrate.results.plan_difference import PlanDifference, StageCount
from trtllm_pipeline.show.cli.app import main

MATRIX = matrices_folder() / "tiny.yaml"


def machine(release: str, more: str = "") -> str:
    return f"tensorrt_llm=={release},sm=90,gpus=1{more}"


def compared(new: str, base: str, *sets: str) -> PlanDifference:
    return plan_difference.compare_plans(Request(MATRIX, sets=sets, assume=machine(new)), machine(base), None)


def test_the_same_machine_changes_nothing() -> None:
    found = compared("1.2.0", "1.2.0")
    assert found.feasible == (2, 2)
    assert (found.cells, found.reasons, found.commands) == ((), (), ())
    assert all(each.same and not each.changed for each in found.stages)
    assert "2 feasible cells. The plans are the same: no fingerprint differs" in as_markdown(found.blocks())


def test_a_release_makes_engines_again_and_says_why_and_how() -> None:
    found = compared("1.0.0", "0.16.0")
    stages = {each.stage: each for each in found.stages}
    assert stages["download"] == StageCount("download", 1, 0, 0, 0)
    assert stages["build"] == StageCount("build", 0, 2, 0, 0)
    assert found.reasons[0][0] == 'changed: identity.tensorrt_llm "0.16.0" -> "1.0.0"'
    moved = next(each for each in found.commands if each.stage == "convert")
    assert moved.removed == ("/app/examples/llama/convert_checkpoint.py",)
    assert moved.added == ("/app/examples/models/core/llama/convert_checkpoint.py",)
    text = as_markdown(found.blocks())
    assert "- convert (2 stage runs): without /app/examples/llama/convert" in text
    assert "| `build` | 0 | 2 | 0 | 0 |" in text


def test_a_release_without_engines_takes_the_other_backend() -> None:
    found = compared("1.3.0", "1.2.0")
    fp16, int8 = found.cells
    assert (fp16.change, fp16.reason) == ("toolchain", f"{trtllm_cells.PYTORCH}, before {trtllm_cells.ENGINES}")
    assert int8.change == "lost"
    assert int8.reason.startswith("precision int8_wo: the PyTorch backend supports")
    assert {each.stage for each in found.stages if each.only_base} >= {"convert", "build", "check"}


def test_cells_that_can_no_longer_work_are_told_with_their_reason() -> None:
    fp8 = "axes.precision=[fp16,fp8]"
    new, base = (f"tensorrt_llm==1.0.0,sm={sm},gpus=1" for sm in (80, 90))
    lost = plan_difference.compare_plans(Request(MATRIX, sets=(fp8,), assume=new), base, None)
    assert lost.feasible[0] < lost.feasible[1]
    assert {each.change for each in lost.cells} == {"lost"}
    assert all("fp8" in each.cell and each.reason for each in lost.cells)
    gained = plan_difference.compare_plans(Request(MATRIX, sets=(fp8,), assume=base), new, None)
    assert [(each.cell, each.change) for each in gained.cells] == [(each.cell, "gained") for each in lost.cells]
    assert gained.cells[0].reason == f"before: {lost.cells[0].reason}"


def test_stages_are_in_the_order_of_the_flow() -> None:
    """The first cell becomes an engine by convert, the second by quantize."""
    found = compared("1.2.0", "1.0.0", "axes.precision=[fp16,fp8]")
    order = ["download", "convert", "quantize", "build", "check", "repository", "launch", "smoke", "perf", "accuracy"]
    assert [each.stage for each in found.stages] == order


@pytest.mark.parametrize(("new", "base", "words"), [(80, 80, "no cell can work on either"), (80, 90, "can no longer")])
def test_the_exit_code_is_3_if_no_cell_can_work(
    new: int, base: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = [f"tensorrt_llm==1.0.0,sm={sm},gpus=1" for sm in (new, base)]
    argv = [
        "plan",
        "--matrix",
        str(MATRIX),
        "--set",
        "axes.precision=[fp8]",
        "--assume",
        sides[0],
        "--compare",
        sides[1],
    ]
    assert main(argv) == 3
    text = capsys.readouterr().out
    assert words in text
    assert "The plans are the same" not in text


def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--assume", machine("1.0.0"), "--compare", machine("0.16.0"), "--format", "json"]
    assert main(["plan", "--matrix", str(MATRIX), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1
    assert (found["new"], found["base"]) == (machine("1.0.0"), machine("0.16.0"))
    assert found["commands"][0].keys() == {"stage", "stage_runs", "removed", "added"}


def test_a_plan_as_a_job_summary(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--matrix", str(MATRIX), "--assume", machine("1.0.0"), "--format", "markdown"]
    assert main(plan) == 0
    text = capsys.readouterr().out
    assert text.startswith("### Plan of tiny.yaml\n\n2 cells; ")
    assert "\nload: 192 in, 16 out, 1/2 in flight, 4 to 7 requests\n" in text
    assert "| `build` | 2 | 0 | 2 | " in text
    assert "**Why**" in text
    assert "stage runs: not made yet" in text
    assert main([*plan, "--set", "axes.max_batch_size=[2,16]", "--set", "settings.perf.concurrency=null"]) == 0
    text = capsys.readouterr().out
    assert "load of 2 cells, bs2: 192 in, 16 out, 1/2 in flight, " in text
    assert "load of 2 cells, bs16: 192 in, 16 out, 1/4/16 in flight, " in text
    assert main([*plan, "--set", "axes.parallel=[tp1,tp8]"]) == 0
    assert "<details><summary>2 cells can never work</summary>" in capsys.readouterr().out
