"""Cells for several types of GPU in one matrix: ids, machines of their own, what they share, where stage runs go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trtllm_pipeline.base.errors import MatrixError, UsageError
from trtllm_pipeline.base.machine.assume import describe, parse
from trtllm_pipeline.base.machine.model import Gpu, Machine
from trtllm_pipeline.orchestrate import flow
from trtllm_pipeline.orchestrate.memory import estimates
from trtllm_pipeline.orchestrate.plan import planner
from trtllm_pipeline.orchestrate.plan.plan import Plan
from trtllm_pipeline.orchestrate.plan.planner import Request
from trtllm_pipeline.orchestrate.run.forecast import forecast, plan_json
from trtllm_pipeline.orchestrate.run.order import capacities
from trtllm_pipeline.orchestrate.store.index import Peak

H100, L40S, A100 = (
    f"tensorrt_llm==0.16.0,gpus=4,sm={sm},gpu={gpu}" for sm, gpu in ((90, "H100"), (89, "L40S"), (80, "A100"))
)
MATRIX = """\
name: types
axes:
  model: [qwen2-7b-instruct]
  precision: [fp16, fp8]
  max_batch_size: [4]
  lengths: ["128,64"]
  gpu: [H100, L40S]
"""
AT_H100, AT_L40S = (f"qwen2-7b-instruct/{{}}/tp1pp1/bs4/isl128-osl64/{gpu}" for gpu in ("H100", "L40S"))


@pytest.fixture
def matrix(tmp_path: Path) -> Path:
    path = tmp_path / "matrix.yaml"
    path.write_text(MATRIX)
    return path


def plan_of(matrix: Path, assume: str, *sets: str) -> Plan:
    return planner.plan_of(Request(matrix, sets=sets, assume=assume), None, guess=True)


def stage_runs(plan: Plan, cell: str) -> dict[str, str]:
    return {plan.stage_runs[run].stage.name: run for run in plan.by_cell[cell]}


def test_an_engine_is_built_for_each_type_and_what_needs_none_is_shared(matrix: Path) -> None:
    plan = plan_of(matrix, f"{H100}; {L40S}")
    assert [cell.id for cell in plan.feasible] == [
        cell.format(precision) for precision in ("fp16", "fp8") for cell in (AT_H100, AT_L40S)
    ]
    one, other = (stage_runs(plan, cell.format("fp16")) for cell in (AT_H100, AT_L40S))
    shared = {stage for stage in one if one[stage] == other[stage]}
    assert {"download", "convert"} <= shared
    assert shared.isdisjoint({"build", "launch", "perf"})
    types = {
        cell: plan.resources(plan.stage_runs[runs["build"]]).accelerator for cell, runs in (("1", one), ("2", other))
    }
    assert types == {"1": "h100", "2": "l40s"}
    assert plan.resources(plan.stage_runs[one["download"]]).accelerator is None
    seen = forecast(plan, None)
    assert seen.total_s > 0
    faster, slower = (seen.times[runs["perf"]].value for runs in (one, other))  # type: ignore[index]
    assert faster < slower, "each by the speed of its own"


def test_what_a_type_cannot_do_is_infeasible_there_alone(matrix: Path) -> None:
    plan = plan_of(matrix, f"{H100}; {A100}", "axes.gpu=[H100,a100,B200]")
    reasons = {
        cell.id.rpartition("/tp1pp1")[0].rpartition("/")[2] + cell.gpu: cell.reason for cell in plan.cells if cell.gpu
    }
    assert reasons["fp16H100"] is reasons["fp8H100"] is reasons["fp16a100"] is None
    assert "precision fp8 needs SM 89" in str(reasons["fp8a100"])
    assert reasons["fp16B200"] == "it is for GPUs of type B200; there are a100, h100"


def test_on_one_machine_cells_of_another_type_are_infeasible(matrix: Path) -> None:
    plan = plan_of(matrix, H100)
    assert {cell.gpu: cell.reason for cell in plan.cells if cell.precision == "fp16"} == {
        "H100": None,
        "L40S": "it is for GPUs of type L40S; there are H100",
    }
    run = plan.stage_runs[stage_runs(plan, AT_H100.format("fp16"))["build"]]
    assert plan.resources(run).accelerator is None, "a machine of one type has no other to tell it from"
    without = plan_of(matrix, H100, "axes.gpu=null")
    assert {run.key for run in without.stage_runs.values()} == {run.key for run in plan.stage_runs.values()}


@pytest.mark.parametrize(
    ("names", "asked", "right"),
    [
        (["NVIDIA H100 80GB HBM3"] * 2, "h100", True),
        (["NVIDIA A100-SXM4-80GB"], "A100-SXM4", True),
        (["NVIDIA L40S"], "L40", False),
        (["NVIDIA H100 80GB HBM3", "NVIDIA L40S"], "H100", False),
        ([], "H100", False),
    ],
)
def test_a_type_is_a_part_of_the_name(names: list[str], asked: str, right: bool) -> None:
    machine = Machine(4, "c", tuple(Gpu(n, str(n), name, 1 << 36, 90) for n, name in enumerate(names)))
    assert (machine.lacks(asked) is None) == right
    assert ("CUDA_VISIBLE_DEVICES" in str(machine.lacks(asked))) == (len(set(names)) > 1)


def test_what_takes_no_gpu_is_for_none(matrix: Path) -> None:
    cells = planner.select_cells(
        Request(matrix, sets=("axes.precision=[fp16]",), toolchain="embedded"),
        planner.load(Request(matrix)),
        parse(H100),
    )
    assert {cell.reason for cell in cells if cell.gpu == "H100"} == {
        "it is for GPUs of type H100, and its server uses no GPU"
    }


def test_settings_and_rules_by_type(matrix: Path) -> None:
    more = "override: [{where: {gpu: L40S}, settings: {build: {max_num_tokens: 2048}}}]\nexclude: [{gpu: L40S, precision: fp8}]\n"
    added = "add: [{model: qwen2-7b-instruct, precision: int8_wo, max_batch_size: 1, lengths: '1,1', gpu: H100}]\n"
    matrix.write_text(MATRIX + more + added)
    cells = planner.select_cells(Request(matrix), planner.load(Request(matrix)), parse(f"{H100};{L40S}"))
    told = {cell.id.partition("/")[2]: cell.settings["build"]["max_num_tokens"] for cell in cells}
    assert told == {
        "fp16/tp1pp1/bs4/isl128-osl64/H100": None,
        "fp16/tp1pp1/bs4/isl128-osl64/L40S": 2048,
        "fp8/tp1pp1/bs4/isl128-osl64/H100": None,
        "int8_wo/tp1pp1/bs1/isl1-osl1/H100": None,
    }


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        (
            MATRIX + "add: [{model: qwen2-7b-instruct, precision: fp8, max_batch_size: 1, lengths: '1,1'}]\n",
            "add[0].gpu",
            "is required",
        ),
        (
            MATRIX.replace("  gpu: [H100, L40S]\n", "exclude: [{gpu: H100}]\n"),
            "exclude[0].gpu",
            "the matrix has no axis gpu",
        ),
    ],
)
def test_rules_name_types_of_the_axis(matrix: Path, text: str, key: str, message: str) -> None:
    matrix.write_text(text)
    with pytest.raises(MatrixError) as caught:
        plan_of(matrix, H100)
    (fault,) = caught.value.faults
    assert fault.key == key
    assert message in fault.message


def test_several_types_need_a_matrix_that_says_which(matrix: Path) -> None:
    with pytest.raises(UsageError, match=r"several types of GPU \(h100, l40s\)") as caught:
        plan_of(matrix, f"{H100}; {L40S}", "axes.gpu=null")
    assert caught.value.hint == "--set 'axes.gpu=[h100, l40s]'"


def test_several_machines_are_assumed_in_one_line() -> None:
    machine = parse(f"{H100}; {L40S}")
    assert parse(describe(machine)) == machine
    assert machine.of("H100") == parse(H100)
    assert [(each.node, each.accelerator, len(each.gpus)) for each in capacities(machine)] == [
        ("", None, 0),
        ("h100", "h100", 4),
        ("l40s", "l40s", 4),
    ]
    assert parse(f"{H100}; {L40S};") == machine
    named = parse("2xH100,tensorrt_llm==1.2; 2xL40S,tensorrt_llm==1.2")
    assert [name for name, _ in named.types] == ["h100", "l40s"]
    assert named.lacks("L40S") is None
    assert parse(describe(named)) == named
    for wrong in (f"{H100}; {H100}", f"{H100}; gpus=0"):
        with pytest.raises(UsageError, match="expected machines with GPUs of different names"):
            parse(wrong)


def test_a_gpu_is_called_by_part_of_its_name_or_as_in_an_assumed_machine() -> None:
    machine = parse("2xRTX4090")
    assert [machine.lacks(name) for name in ("RTX4090", "RTX 4090", "GeForce RTX 4090")] == [None] * 3
    assert machine.lacks("RTX3090") == "it is for GPUs of type RTX3090; there are NVIDIA GeForce RTX 4090"


def test_what_was_measured_on_a_type_corrects_what_is_expected_there_alone() -> None:
    machine = parse(f"{H100}; {L40S}")
    label, system = "build/tensorrt_llm/m/fp16", estimates.system(machine.of("L40S"))
    known = estimates.Corrections(iter([Peak(f"{label}/L40S", system, {"host": 100}, {"host": 300})]), machine)
    assert known.on("L40S").of(f"{label}/L40S", estimates.HOST, 10, 0.5).value == 30
    assert known.on("H100").of(f"{label}/H100", estimates.HOST, 10, 0.5).value == 10


def test_the_plan_shows_the_type(matrix: Path) -> None:
    plan, seen = flow.outlook(Request(matrix, assume=f"{H100}; {L40S}"), None, matrix.parent)
    told = json.loads("".join(plan_json(plan, None, seen)))
    assert [cell["axes"]["gpu"] for cell in told["cells"]] == ["H100", "L40S"] * 2
    types = {run["resources"]["accelerator"] for run in told["stage_runs"] if run["stage"] == "build"}
    assert types == {"h100", "l40s"}
