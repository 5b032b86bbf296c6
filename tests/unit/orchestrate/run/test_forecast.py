"""What a plan is expected to take: times by what was learnt, else by the model's size; disk by its weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.helpers import fabricated, trtllm_cells
from tests.unit.conftest import MACHINE
from trtllm_pipeline.base.domain import Cell, Json
from trtllm_pipeline.base.machine.assume import parse
from trtllm_pipeline.base.machine.model import Machine
from trtllm_pipeline.base.machine.speeds import speeds
from trtllm_pipeline.base.wording import size
from trtllm_pipeline.orchestrate.matrix.recipe_files import load_recipe, recipes_folder
from trtllm_pipeline.orchestrate.memory import estimates
from trtllm_pipeline.orchestrate.plan.plan import Plan
from trtllm_pipeline.orchestrate.run.forecast import Durations, forecast, guess_s
from trtllm_pipeline.orchestrate.run.forecast import durations as durations_of
from trtllm_pipeline.orchestrate.store.index import Peak
from trtllm_pipeline.show.phrases import about
from trtllm_pipeline.tensorrt.toolchains import time_estimates as durations

SMALL: dict[str, Json] = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "parameters": 134_515_008,
}


def cell(model: str = "small", precision: str = "fp16", times: int = 1) -> Cell:
    """A cell of a model with so many times the weights of SmolLM2-135M."""
    made = fabricated.cell(precision, model=model)
    numbers = {**SMALL, "parameters": 134_515_008 * times}
    return dataclasses.replace(made, recipe={**made.recipe, **numbers})


def by_stage(plan: Plan, learnt: dict[str, float]) -> dict[str, float]:
    taken = fabricated.expected(plan, learnt)
    return {run.stage.name: taken[run.id] for run in plan.stage_runs.values()}


def test_a_guess_grows_with_the_model() -> None:
    small, large = (by_stage(fabricated.plan(cell(times=times)), {}) for times in (1, 100))
    for stage in ("download", "convert", "build", "launch", "perf", "accuracy"):
        assert large[stage] > 2 * small[stage], stage
    assert large["repository"] == small["repository"]
    assert large["download"] == pytest.approx(2 + 20 * 26.9, rel=0.01), "of 50 MB a second"


def test_perf_takes_as_long_as_its_requests() -> None:
    plan = fabricated.plan(cell())
    run = fabricated.stage_run(plan, plan.cells[0], "perf")
    settings = {**run.first_cell.settings, "perf": {**run.first_cell.settings["perf"], "requests": 1600}}
    more = dataclasses.replace(run, first_cell=dataclasses.replace(run.first_cell, settings=settings))
    fixed_s = run.stage.expected_s
    assert guess_s(more, MACHINE) - fixed_s > 40 * (guess_s(run, MACHINE) - fixed_s), "32 by default"
    settings["perf"] = {**settings["perf"], "concurrency": [], "request_rate": [4.0]}
    rate = dataclasses.replace(run, first_cell=dataclasses.replace(run.first_cell, settings=settings))
    assert guess_s(rate, MACHINE) > 400


def test_what_another_model_took_says_nothing_where_size_matters() -> None:
    learnt = {"download": 9.0, "download/embedded": 9.0, "download/embedded/small": 9.0, "repository": 0.5}
    small, other = fabricated.plan(cell()), fabricated.plan(cell("other", times=50))
    assert by_stage(small, learnt)["download"] == 9.0
    assert by_stage(other, learnt)["download"] > 250
    assert by_stage(other, learnt)["repository"] == 0.5
    runs = {run.stage.name: run for run in other.stage_runs.values()}
    durations = Durations(learnt, MACHINE)
    assert (durations.of(runs["download"]), durations.of(runs["repository"])) == (None, 0.5)


def test_what_one_took_corrects_the_guesses_of_what_is_like_it_most() -> None:
    plan = fabricated.plan(cell(), cell("other", times=50))
    durations = Durations({}, MACHINE)
    build, other = (fabricated.stage_run(plan, each, "build") for each in plan.cells)
    perf = fabricated.stage_run(plan, plan.cells[0], "perf")

    def off() -> list[float]:
        return [round(durations.guessed(run) / guess_s(run, MACHINE), 3) for run in (build, other, perf)]

    assert off() == [1, 1, 1]
    durations.learn(build, 3 * guess_s(build, MACHINE))
    assert off() == [3, 3, 3], "nothing else is known of the others"
    durations.learn(other, 2 * guess_s(other, MACHINE))
    by_all = off()[2]
    assert off() == [3, 2, by_all]
    assert 2 < by_all < 3
    durations.learn(perf, 1 * guess_s(perf, MACHINE))
    assert off() == [3, 2, 1]


def measured(label: str, expected_ms: int, taken_ms: int, machine: Machine = MACHINE) -> Peak:
    return Peak(label, estimates.system(machine), {"ms": expected_ms}, {"ms": taken_ms})


def test_what_ran_on_such_a_system_corrects_the_formula() -> None:
    plan = fabricated.plan(cell())
    run = fabricated.stage_run(plan, plan.cells[0], "convert")
    formula_ms = round(1000 * guess_s(run, MACHINE))

    def estimate(*peaks: Peak, learnt: dict[str, float] | None = None) -> estimates.Estimate:
        return Durations(learnt or {}, MACHINE, estimates.Corrections(peaks, MACHINE)).estimate(run)

    assert (estimate().value, estimate().measured) == (formula_ms, 0)
    twice = [measured(run.label, 1000, 2000)] * 3
    assert (estimate(*twice).value, estimate(*twice).measured, estimate(*twice).error) == (2 * formula_ms, 3, 0.05)
    other = estimate(measured("convert/embedded/other/int8_wo", 1000, 3000))
    assert other.value == 3 * formula_ms, "another model corrects by its ratio"
    assert other.error >= 0.6, "and not for sure"
    elsewhere = dataclasses.replace(MACHINE, gpus=parse("tensorrt_llm==1.0.0,sm=90,gpus=1").gpus)
    assert estimate(measured(run.label, 1000, 9000, elsewhere)).measured == 0
    assert estimate(learnt={"convert/embedded/small": 4.0}).value == 4000, "an artifact made by others"
    assert estimate(*twice, learnt={"convert/embedded/small": 4.0}).value == 2 * formula_ms


def test_a_forecast_has_the_time_of_each_stage_run_beside_its_limit() -> None:
    plan = fabricated.plan(cell(), cell(times=3))
    seen = forecast(plan, None)
    every = durations_of(plan, seen)
    assert len(every) == len(seen.to_run)
    by_stage = {need.stage: need for need in every}
    assert by_stage["perf"].has == 6 * 3600 * 1000
    assert by_stage["launch"].has == 600_000, "until it is ready"
    assert {need.verdict for need in every} == {"fits"}


def on(gpu: str) -> Machine:
    return parse(f"tensorrt_llm==1.0.0,sm=90,gpu={gpu},gpus=8,gpu_memory_gib=141,examples=no")


def of_recipe(name: str) -> Cell:
    recipe = load_recipe(recipes_folder() / f"{name}.yaml").model_dump(mode="json")
    return dataclasses.replace(trtllm_cells.cell("bf16"), recipe=recipe, isl=1, osl=2)


def test_a_token_takes_as_long_as_reading_the_weights() -> None:
    """3.875 ms were measured on an H200 for the matrices of Qwen2-7B (docs/project/quantizing.md)."""
    qwen = of_recipe("qwen2-7b")
    assert durations.token_s(qwen, on("NVIDIA H200"), 1) == pytest.approx(3.875e-3, rel=0.03)
    assert durations.token_s(qwen, on("NVIDIA L4"), 1) == pytest.approx(16 * 3.875e-3, rel=0.03)
    split = durations.token_s(dataclasses.replace(qwen, tp=4), on("NVIDIA H200"), 1)
    assert 1 / 4 < split / durations.token_s(qwen, on("NVIDIA H200"), 1) < 1 / 2, "GPUs tell each other sums"
    fp8 = dataclasses.replace(qwen, precision="fp8")
    assert durations.token_s(fp8, on("NVIDIA H200"), 1) < 0.6 * durations.token_s(qwen, on("NVIDIA H200"), 1)
    many = durations.token_s(qwen, on("NVIDIA H200"), 4096)
    assert many > 10 * durations.token_s(qwen, on("NVIDIA H200"), 1), "arithmetic is what takes long then"


def test_a_mixture_reads_the_experts_that_its_tokens_go_to() -> None:
    mixture = of_recipe("qwen3-30b-a3b")
    one, many = (durations.token_s(mixture, on("NVIDIA H200"), requests) for requests in (1, 64))
    assert one == pytest.approx(3.04e9 * 2 / (0.76 * 4.8e12), rel=0.03)
    assert 8 < many / one < 11, "nearly all of them"


def test_gpus_are_known_by_name_and_others_by_their_capability() -> None:
    named, unnamed = (speeds(on(gpu)) for gpu in ("NVIDIA H100 80GB HBM3", "sm90"))
    assert named == unnamed
    assert speeds(on("NVIDIA H200")).bandwidth == pytest.approx(0.76 * 4.8e12)
    assert speeds(on("NVIDIA L40S")).operations == pytest.approx(0.78 * 362.05e12)
    assert speeds(on("NVIDIA RTX A4000")) != speeds(on("NVIDIA A40")), "a name is made of words"
    assert speeds(on("NVIDIA A100-SXM4-40GB")).bandwidth < speeds(on("NVIDIA A100-SXM4-80GB")).bandwidth
    assert speeds(on("Tesla V100-PCIE-32GB")).operations < speeds(on("Tesla V100-SXM2-32GB")).operations
    assert speeds(on("NVIDIA GB200")).operations > speeds(on("NVIDIA B200")).operations
    assert speeds(on("NVIDIA GB10")).bandwidth == pytest.approx(0.76 * 273e9)
    assert (
        speeds(dataclasses.replace(MACHINE, cpus=4)).operations
        == 2 * speeds(dataclasses.replace(MACHINE, cpus=2)).operations
    )


def test_disk_is_that_of_the_weights() -> None:
    plan = fabricated.plan(cell(precision="fp16"), cell(precision="int4_wo"))
    seen = forecast(plan, None)
    assert seen.guessed == len(seen.to_run) == len(plan.stage_runs)
    model = 2 * 134_515_008
    (disk,) = (need for need in seen.needs if need.resource == "disk")
    assert 2 * model < disk.estimate.value < 2.7 * model, "the model, 16 bits and 4 bits"
    assert {need.stage for need in seen.needs} == {"convert", "build", "launch", ""}


def test_a_workspace_that_is_not_there_yet_will_be_on_the_disk_of_its_folder(tmp_path: Path) -> None:
    plan = fabricated.plan(cell())
    (disk,) = (need for need in forecast(plan, None, workspace=tmp_path / "a" / "b").needs if need.resource == "disk")
    assert disk.has > 0
    assert next(need for need in forecast(plan, None).needs if need.resource == "disk").has is None


def test_what_nobody_knows_the_size_of_is_left_out() -> None:
    plan = fabricated.plan(fabricated.cell())
    assert forecast(plan, None).needs == ()


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "1 s"),
        (3.6, "4 s"),
        (48, "50 s"),
        (55, "1 min"),
        (130, "2 min"),
        (1500, "25 min"),
        (7000, "2 h"),
        (9000, "2.5 h"),
        (60_000, "17 h"),
        (260_000, "3 days"),
    ],
)
def test_guessed_times_are_rounded(seconds: float, words: str) -> None:
    assert about(seconds) == words


@pytest.mark.parametrize(
    ("size_bytes", "words"), [(5.7e6, "5.7 MB"), (270e6, "270 MB"), (1.44e9, "1.4 GB"), (145e9, "145 GB")]
)
def test_sizes_have_two_digits_that_count(size_bytes: float, words: str) -> None:
    assert size(size_bytes) == words
