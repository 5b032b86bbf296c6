"""What a deep examination does in about ten minutes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from trtllm_pipeline.base.domain import Scope
from trtllm_pipeline.base.errors import UsageError
from trtllm_pipeline.base.machine import assume
from trtllm_pipeline.orchestrate import flow
from trtllm_pipeline.orchestrate.matrix.models import PRECISIONS
from trtllm_pipeline.orchestrate.plan.plan import Plan
from trtllm_pipeline.orchestrate.plan.planner import Request
from trtllm_pipeline.orchestrate.run.forecast import Forecast
from trtllm_pipeline.show.proof import budget, examination, material

BOTH = ("tensorrt_llm", "tensorrt_llm_pytorch")


def outlook(folder: Path, line: str, toolchains: Sequence[str]) -> tuple[Plan, Forecast]:
    machine = assume.parse(line)
    matrix = material.write(
        folder / "doctor", machine, families=["llama"], precisions=PRECISIONS, toolchain_names=toolchains
    )
    return flow.outlook(Request(matrix, until="accuracy", assume=line), None, folder / "w")


@pytest.mark.parametrize(
    ("line", "toolchains", "first"),
    [
        pytest.param(
            "tensorrt_llm==0.12.0,sm=80,gpus=1", BOTH[:1], {"fp16", "int4_awq", "int8_sq"}, marks=pytest.mark.thorough
        ),
        pytest.param("tensorrt_llm==1.0.0,sm=90,gpus=1", BOTH, {"fp16", "fp8"}, marks=pytest.mark.thorough),
        ("tensorrt_llm==1.2.0,sm=100,gpus=2", BOTH, {"fp16", "fp8", "nvfp4"}),
        pytest.param(
            "tensorrt_llm==1.3.0,sm=90,gpus=1",
            BOTH[1:],
            {"fp16", "fp8", "int4_awq", "nvfp4"},
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_ten_minutes_are_enough_for_the_most_telling(
    tmp_path: Path, line: str, toolchains: Sequence[str], first: set[str]
) -> None:
    plan, seen = outlook(tmp_path, line, toolchains)
    taken, takes_s = budget.chosen(plan, seen)
    cells = [cell for cell in plan.feasible if cell.id in taken]
    assert takes_s == pytest.approx(budget.expected_s(plan, seen, taken))
    assert takes_s <= 600
    for toolchain in toolchains:
        assert first <= {cell.precision for cell in cells if cell.toolchain == toolchain and cell.tp * cell.pp == 1}


def test_where_there_is_time_for_all_nothing_is_left_out(tmp_path: Path) -> None:
    plan, seen = outlook(tmp_path, "tensorrt_llm==1.0.0,sm=90,gpus=1", BOTH)
    taken, takes_s = budget.chosen(plan, seen, limit_s=3600)
    assert taken == {cell.id for cell in plan.feasible}
    assert takes_s == pytest.approx(seen.total_s)


def test_one_cell_is_done_however_long_it_takes(tmp_path: Path) -> None:
    plan, seen = outlook(tmp_path, "tensorrt_llm==1.0.0,sm=90,gpus=1", BOTH)
    (only,), takes_s = budget.chosen(plan, seen, limit_s=1)
    assert only.split("/")[1] == "fp16"
    launch = next(
        run for run in map(plan.stage_runs.__getitem__, plan.by_cell[only]) if run.stage.scope is Scope.SERVICE
    )
    assert takes_s > seen.expected_s[launch.id]


def test_what_is_there_takes_no_time_so_the_next_time_goes_on(tmp_path: Path) -> None:
    plan, seen = outlook(tmp_path, "tensorrt_llm==1.0.0,sm=90,gpus=1", BOTH)
    taken, _ = budget.chosen(plan, seen)
    made = {run for cell in taken for run in plan.by_cell[cell]}
    again, takes_s = budget.chosen(plan, replace(seen, to_run=seen.to_run - made))
    assert taken < again
    assert takes_s <= 600


def test_precisions_that_no_toolchain_has_are_no_rows() -> None:
    assert examination.had(["embedded"]) == ["fp32", "fp16", "bf16", "int8_wo", "int4_wo"]
    assert examination.had(BOTH) == list(PRECISIONS)
    assert set(examination.had(BOTH[1:])) < {*PRECISIONS}


@pytest.mark.parametrize("name", ["qwen", "qwen2.5"])
def test_a_family_by_a_name_that_people_use_gets_those_that_are_meant(name: str) -> None:
    with pytest.raises(UsageError, match=r"unknown name 'qwen.*'; did you mean .*qwen2"):
        examination._check("--family", [name], ["llama", "qwen2", "qwen3", "qwen2_moe"])
