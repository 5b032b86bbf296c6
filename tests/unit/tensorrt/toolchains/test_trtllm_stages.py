"""The tables of stages of both lanes: who has which, what merges, what is made again, what is run and on how much."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.trtllm_cells import (
    ENGINES,
    PYTORCH,
    cell,
    commands,
    infeasible,
    machine,
    plan,
    settings_of,
    stage_run,
    stages,
    values,
)
from tests.standins import templates
from trtllm_pipeline.base.domain import Cell, Exclusive, Json, Resources
from trtllm_pipeline.base.machine import probe
from trtllm_pipeline.base.machine.assume import parse
from trtllm_pipeline.base.machine.model import Machine
from trtllm_pipeline.orchestrate.plan.plan import Plan
from trtllm_pipeline.orchestrate.run.order import section
from trtllm_pipeline.tensorrt.stage.params import key
from trtllm_pipeline.tensorrt.toolchains import catalog as toolchains
from trtllm_pipeline.tensorrt.toolchains.common_stages import PERF
from trtllm_pipeline.tensorrt.toolchains.model_shape import Shape
from trtllm_pipeline.tensorrt.trtllm import llmapi, needs
from trtllm_pipeline.tensorrt.trtllm import program_options as options

SERVED = ["launch", "smoke", "perf", "accuracy"]
FP8_CACHE = {"quantize.kv_cache_precision": "fp8"}


def made(planned: Plan, *names: str) -> list[int]:
    """How many stage runs there are of each stage."""
    return [sum(run.stage.name == name for run in planned.stage_runs.values()) for name in names]


def changed(before: Plan, after: Plan) -> set[str]:
    """Stages whose fingerprints two plans of one cell do not share."""
    known = {run.stage.name: run.fingerprint for run in before.stage_runs.values()}
    return {run.stage.name for run in after.stage_runs.values() if known.get(run.stage.name) != run.fingerprint}


# ---------------------------------------------------------------------------------------------------------------- flow


@pytest.mark.parametrize(
    ("precision", "settings", "stage"),
    [
        ("fp16", {}, "convert"),
        ("fp8", {}, "quantize"),
        ("fp16", FP8_CACHE, "quantize"),
    ],
)
def test_engines_come_from_whichever_stage_can_make_the_checkpoint(
    precision: str, settings: dict[str, Any], stage: str
) -> None:
    asked = cell(precision, settings=settings)
    planned = plan(asked)
    assert stages(planned, asked) == ["download", stage, "build", "check", "repository", *SERVED]
    assert stage_run(planned, "build").inputs["checkpoint"] == stage_run(planned, stage).id
    assert stage_run(planned, "repository").after == (stage_run(planned, "check").id,)
    assert stage_run(planned, "smoke").inputs["engine"] == stage_run(planned, "build").id


@pytest.mark.parametrize(
    ("precision", "settings", "source"),
    [
        ("fp16", {}, "download"),
        ("fp8", {}, "quantize"),
        ("fp16", FP8_CACHE, "quantize"),
    ],
)
def test_pytorch_serves_weights_as_they_are_unless_something_is_to_be_quantized(
    precision: str, settings: dict[str, Any], source: str
) -> None:
    asked = cell(precision, toolchain=PYTORCH, settings=settings)
    planned = plan(asked)
    assert stages(planned, asked) == [*dict.fromkeys(("download", source)), "repository", *SERVED]
    model = stage_run(planned, source).id
    assert stage_run(planned, "repository").inputs == {"model": model}
    assert stage_run(planned, "launch").inputs == {"repository": stage_run(planned, "repository").id, "model": model}
    assert stage_run(planned, "perf").inputs["engine"] == model


# -------------------------------------------------------------------------------------------------- sharing, and again


def test_a_checkpoint_is_for_a_precision_and_a_layout_not_for_a_batch_size() -> None:
    cells = [cell("fp8", tp=tp, batch=batch, osl=osl) for tp in (1, 2) for batch in (4, 8) for osl in (32, 64)]
    assert made(plan(*cells), "download", "quantize", "build", "check") == [1, 2, 8, 8]


def test_a_hugging_face_checkpoint_is_for_every_layout() -> None:
    cells = [cell("fp8", tp=tp, batch=batch, toolchain=PYTORCH) for tp in (1, 2) for batch in (4, 8)]
    assert made(plan(*cells), "download", "quantize", "repository", "launch") == [1, 1, 4, 4]


def test_lanes_share_the_download_and_nothing_else() -> None:
    planned = plan(cell("fp8"), cell("fp8", toolchain=PYTORCH))
    assert made(planned, "download", "quantize", "repository", "launch", "perf") == [1, 2, 2, 2, 2]
    (download,) = (run for run in planned.stage_runs.values() if run.stage.name == "download")
    assert len(download.cells) == 2


def test_other_rows_of_calibration_make_what_was_calibrated_again() -> None:
    after = {"quantize", "build", "check", "repository", *SERVED}
    asked = cell("fp8")
    assert changed(plan(asked), plan(asked, content="other rows")) == after | {"perf"}
    reseeded = replace(asked, settings=settings_of({"quantize.calibration.seed": 7}))
    assert changed(plan(asked), plan(reseeded)) == after
    plain = cell("fp16")
    assert "convert" not in changed(plan(plain), plan(plain, content="other rows"))
    assert changed(plan(plain), plan(replace(plain, settings=reseeded.settings))) == set()


def test_rows_at_a_time_and_where_rows_lie_change_nothing() -> None:
    for toolchain in (ENGINES, PYTORCH):
        asked = cell("fp8", toolchain=toolchain)
        for other in ({"quantize.batch_size": 64}, {"quantize.calibration.data": "elsewhere/rows.jsonl"}):
            assert changed(plan(asked), plan(replace(asked, settings=settings_of(other)))) == set()


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        ({"build.max_num_tokens": 1024}, "build"),
        ({"build.tokens_per_block": 32}, "build"),
        ({"repository.batching_strategy": "V1"}, "repository"),
        ({"serve.frontend": "trtllm_serve"}, "repository"),
    ],
)
def test_a_setting_changes_its_own_stage_and_what_reads_that(settings: dict[str, Any], first: str) -> None:
    flow = ["build", "check", "repository", *SERVED]
    after = set(flow[flow.index(first) :])
    assert changed(plan(cell()), plan(cell(settings=settings))) == after


def test_what_a_machine_has_is_in_the_fingerprints_of_what_depends_on_it() -> None:
    asked = cell("fp8")

    def differs(on: Machine) -> set[str]:
        return changed(plan(asked, on=machine()), plan(asked, on=on))

    made_here = {"quantize", "build", "check", "repository", *SERVED}
    assert differs(machine("1.1.0")) == made_here
    assert differs(machine(more=",gpu=Another Hopper")) == {"check", *SERVED}
    assert differs(machine(more=",triton=25.03")) == set(SERVED)
    assert differs(machine(more=",examples=no")) == made_here, "Model Optimizer makes another checkpoint"
    here = machine()
    moved = replace(here, tensorrt_llm=replace(here.tensorrt_llm, examples="/elsewhere", python="/opt/python3"))
    assert differs(replace(moved, gpus=moved.gpus[4:], cpus=here.cpus)) == set(), "places and numbers are not"


# ------------------------------------------------------------------------------------------------------- command lines


def test_quantizing_writes_its_rows_first_and_ours_looks_last() -> None:
    rows, quantize, ours = commands(plan(cell("fp8", tp=2, settings={"quantize.calibration.samples": 32})), "quantize")
    helper = "trtllm_pipeline.tensorrt.trtllm.dataset:run"
    assert rows == [sys.executable, "-m", "trtllm_pipeline.tensorrt.worker", "/attempt/job.json", helper]
    assert quantize[:2] == ["python3", "/app/examples/quantization/quantize.py"]
    given = values(quantize)
    assert given["--calib_dataset"] == "/attempt/calibration"
    assert (given["--model_dir"], given["--output_dir"]) == ("/model", "/attempt/out")
    assert (given["--calib_size"], given["--batch_size"], given["--tp_size"]) == ("32", "16", "2")
    assert ours == [sys.executable, "-m", "trtllm_pipeline.tensorrt.worker", "/attempt/job.json"]


def test_the_matrix_says_how_many_rows_at_a_time() -> None:
    _, quantize, _ = commands(plan(cell("fp8", settings={"quantize.batch_size": 4})), "quantize")
    assert values(quantize)["--batch_size"] == "4"


def test_a_release_that_takes_no_rows_is_given_none() -> None:
    quantize, ours = commands(plan(cell("fp8"), on=machine("0.9.0")), "quantize")
    assert "--calib_dataset" not in quantize
    assert ours[2] == "trtllm_pipeline.tensorrt.worker"


def test_options_of_the_matrix_reach_the_script_that_runs() -> None:
    awq = cell("int4_awq", settings={"quantize.options": {"awq_block_size": 64}})
    assert values(commands(plan(awq), "quantize")[1])["--awq_block_size"] == "64"
    sharded = cell(tp=2, settings={"quantize.options": {"use_parallel_embedding": True}})
    convert, _ = commands(plan(sharded), "convert")
    assert "--use_parallel_embedding" in convert
    assert values(convert)["--tp_size"] == "2"


def test_the_first_script_for_phi_3_is_told_how_long_its_model_is() -> None:
    def model_type(positions: int) -> str:
        code = {"configuration_phi3.py": "0" * 64}
        repository: dict[str, Any] = {
            "source": {"code": code},
            "code": {"files": code, "page": "https://hub.example/phi"},
        }
        shape = {"family": "phi3", "num_key_value_heads": 32, "max_position_embeddings": positions}
        phi = cell(recipe=repository | shape, settings={"download.trust_remote_code": {"model": code}})
        return values(commands(plan(phi, on=machine("0.10.0")), "convert")[0])["--model_type"]

    assert (model_type(4096), model_type(131072)) == ("Phi-3-mini-4k-instruct", "Phi-3-mini-128k-instruct")


def test_building_takes_its_sizes_from_the_cell() -> None:
    asked = cell("fp8", tp=2, pp=2, batch=16, osl=200, settings={"build.max_num_tokens": 2048, "build.workers": 3})
    reason = infeasible(asked)
    assert reason is not None, "workers are ours to say"
    assert "workers" in reason
    asked = replace(asked, settings=settings_of({"build.max_num_tokens": 2048, "build.gemm_plugin": "fp8"}))
    planned = plan(asked)
    build = commands(planned, "build")[0]
    given = values(build)
    assert build[0] == "trtllm-build"
    assert (given["--checkpoint_dir"], given["--output_dir"]) == ("/checkpoint", "/attempt/out")
    limits = [given[f"--max_{name}"] for name in ("batch_size", "input_len", "seq_len", "num_tokens")]
    assert limits == ["16", "128", "328", "2048"]
    assert given["--workers"] == "4"
    assert build.count("--gemm_plugin") == 1
    assert given["--gemm_plugin"] == "fp8"
    assert stage_run(planned, "build").params.max_seq_len == 328


@pytest.mark.parametrize(("asked", "built"), [(4096, "768"), (769, "768"), (768, "768"), (767, "767")])
def test_more_tokens_than_a_full_batch_are_not_asked_for(asked: int, built: str) -> None:
    """The engine would be that of 4 x 192 in any case."""
    planned = plan(cell(batch=4, settings={"build.max_num_tokens": asked}))
    assert values(commands(planned, "build")[0])["--max_num_tokens"] == built


@pytest.mark.parametrize(
    ("asked", "declared"),
    [(None, None), (127, None), (128, 128), (512, 512), (513, None), (768, None), (4096, None)],
)
def test_perf_declares_tokens_of_a_pass_that_the_builder_leaves_alone(asked: int | None, declared: int | None) -> None:
    params = PERF.read(cell(batch=4, settings={"build.max_num_tokens": asked}))
    assert params.declared["max_num_tokens"] == declared


@pytest.mark.parametrize("toolchain", [ENGINES, PYTORCH])
@pytest.mark.parametrize(("chunked", "tokens"), [(None, 65536), (False, 65536), (True, 8192)])
def test_a_prompt_that_may_be_split_needs_no_pass_of_its_length(
    toolchain: str, chunked: bool | None, tokens: int
) -> None:
    asked = replace(cell(toolchain=toolchain, settings={"repository.enable_chunked_context": chunked}), isl=65536)
    assert stage_run(plan(asked), "build" if toolchain == ENGINES else "repository").params.max_num_tokens == tokens


@pytest.mark.parametrize(("tp", "ranks"), [(1, None), (4, "4")])
def test_the_check_starts_a_process_for_each_rank(tp: int, ranks: str | None) -> None:
    check, _ = commands(plan(cell(tp=tp)), "check")
    assert (check[0] == "mpirun") is (ranks is not None)
    assert ranks is None or check[check.index("-n") + 1] == ranks
    given = values(check)
    assert (given["--engine_dir"], given["--tokenizer_dir"]) == ("/engine", "/model")
    assert given["--input_text"]


def test_without_the_scripts_an_engine_is_checked_by_its_files() -> None:
    (ours,) = commands(plan(cell(), on=machine(more=",examples=no")), "check")
    assert ours[1:3] == ["-m", "trtllm_pipeline.tensorrt.worker"]


@pytest.mark.parametrize(
    ("precision", "toolchain", "more"),
    [("fp8", ENGINES, ",examples=no"), ("fp16", ENGINES, ",examples=no"), ("fp8", PYTORCH, "")],
)
def test_without_the_scripts_and_for_pytorch_model_optimizer_makes_the_checkpoint(
    precision: str, toolchain: str, more: str
) -> None:
    stage = "convert" if precision == "fp16" else "quantize"
    worker, ours = commands(plan(cell(precision, toolchain=toolchain), on=machine(more=more)), stage)
    assert worker[0] == "python3", "that of TensorRT-LLM, which has Model Optimizer"
    assert "modelopt" in worker[1]
    assert ours[1:3] == ["-m", "trtllm_pipeline.tensorrt.worker"]


def test_programs_are_those_that_were_found() -> None:
    here = machine()
    found = replace(here.tensorrt_llm, build="/opt/bin/trtllm-build", python="/opt/bin/python3")
    planned = plan(cell("fp8", tp=2), on=replace(here, tensorrt_llm=found, mpirun="/opt/bin/mpirun"))
    assert commands(planned, "build")[0][0] == "/opt/bin/trtllm-build"
    assert commands(planned, "quantize")[1][0] == "/opt/bin/python3"
    assert commands(planned, "check")[0][0] == "/opt/bin/mpirun"


def test_pytorch_is_told_its_limits_when_the_repository_is_written() -> None:
    given = stage_run(plan(cell(tp=4, pp=2, batch=16, osl=200, toolchain=PYTORCH)), "repository").params
    given = key(given)
    assert [given[f"{name}_parallel_size"] for name in ("tensor", "pipeline")] == [4, 2]
    assert [given[f"max_{name}"] for name in ("batch_size", "seq_len", "num_tokens")] == [16, 328, 5248]


def test_data_parallel_attention_gives_each_gpu_its_own_requests() -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2}
    plain, groups = (cell(tp=4, ep=4, dp=dp, batch=10, toolchain=PYTORCH, recipe=experts) for dp in (1, 4))
    params = [stage_run(plan(each), "repository").params for each in (plain, groups)]
    assert [each.max_batch_size for each in params] == [10, 3]
    assert [each.enable_attention_dp for each in params] == [False, True]
    assert "enable_attention_dp" not in key(params[0])
    assert llmapi.serve_settings(params[1], "1.2.0")["enable_attention_dp"] is True
    assert llmapi.yaml_settings(Path("/m"), params[1], "1.2.0")["enable_attention_dp"] is True
    on = machine()
    split, whole = needs.served(plain, on), needs.served(groups, on)
    # Keys and values of all 8 heads instead of 2, and all of the attention instead of a quarter.
    assert whole.kv_token == 4 * split.kv_token
    shape = Shape.of(groups.recipe)
    copies = 2 * shape.num_hidden_layers * shape.attention_weights * 3 / 4
    assert whole.weights - split.weights == pytest.approx(copies, rel=0.01)
    assert "on single GPUs, which is dp4 for tp4" in str(infeasible(replace(groups, dp=2)))


@pytest.mark.parametrize(("dtype", "share"), [("auto", 1), ("fp8", 1 / 2), ("nvfp4", 9 / 32)])
def test_a_cache_takes_the_memory_of_its_type_in_the_arguments_of_the_llm_api(dtype: str, share: float) -> None:
    arguments = {"repository.llm_args": {"kv_cache_config": {"dtype": dtype}}}
    plain, typed = (cell(toolchain=PYTORCH, settings=settings) for settings in ({}, arguments))
    assert needs.served(typed, machine()).kv_token == share * needs.served(plain, machine()).kv_token


def test_a_frontend_gets_its_own_options_and_no_others() -> None:
    options = {"num_postprocess_workers": 2}
    served = cell(settings={"serve.frontend": "trtllm_serve", "serve.options": options})
    params = key(stage_run(plan(served), "repository").params)
    assert (params["frontend"], params["options"]) == ("trtllm_serve", options)
    params = key(stage_run(plan(cell()), "repository").params)
    assert params["frontend"] == "triton"
    assert "options" not in params
    assert key(stage_run(plan(served), "launch").params) == {"frontend": "trtllm_serve"}


# ----------------------------------------------------------------------------------------------------------- resources


LAYERS_OF_70B = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "parameters": None,  # a local directory's config.json does not have it
}


@pytest.mark.parametrize(
    ("recipe", "gpus", "taken"),
    [
        ({}, 8, 1),
        ({"parameters": 70_553_706_496}, 8, 3),
        ({"parameters": 70_553_706_496}, 2, 2),
        ({"parameters": None}, 8, 1),
        (LAYERS_OF_70B, 8, 3),
    ],
)
def test_quantizing_takes_the_gpus_that_hold_the_weights(recipe: dict[str, Json], gpus: int, taken: int) -> None:
    asked = cell("fp8", recipe=recipe)
    for name in (ENGINES, PYTORCH):
        stage = toolchains.load(name).stage("quantize")
        assert stage.resources(asked, machine(gpus=gpus)) == Resources(gpus=taken)


def test_the_script_gets_the_gpus_that_it_needs() -> None:
    """It takes half the weights beside them, our worker less."""
    on = parse("tensorrt_llm==1.0.0,sm=90,gpus=8,gpu_memory_gib=20")
    stages = {name: toolchains.load(name).stage("quantize") for name in (ENGINES, PYTORCH)}
    taken = [stage.resources(replace(cell("fp8"), toolchain=name), on).gpus for name, stage in stages.items()]
    assert taken == [2, 1]


def test_ranks_take_a_gpu_each_and_converting_takes_one() -> None:
    engines, asked, on = toolchains.load(ENGINES), cell(tp=2, pp=2), machine()
    taken = {name: engines.stage(name).resources(asked, on).gpus for name in ("convert", "build", "check", "launch")}
    assert taken == {"convert": 1, "build": 4, "check": 4, "launch": 4}


def test_a_server_has_the_cpus_of_its_gpus_and_the_machine_if_it_is_measured_alone() -> None:
    on = machine(more=",cpus=96")
    shared = {"perf.exclusive": "none"}
    for toolchain in (ENGINES, PYTORCH):
        launch = toolchains.load(toolchain).stage("launch")
        assert launch.resources(cell(tp=2, settings=shared), on) == Resources(cpus=24, gpus=2)
        assert launch.resources(cell(), on) == Resources(cpus=12, gpus=1, exclusive=Exclusive.MACHINE)


# -------------------------------------------------------------------------------------------------- what is not there


@pytest.mark.parametrize(
    ("toolchain", "on", "words"),
    [
        (ENGINES, "gpus=0", "TensorRT-LLM is not installed"),
        (ENGINES, "tensorrt_llm==1.0.0,gpus=0", "there is no NVIDIA GPU"),
        (ENGINES, "tensorrt_llm==1.3.0,sm=90", "TensorRT-LLM 1.3.0 is installed, but no trtllm-build is on PATH"),
        (PYTORCH, "gpus=0", "TensorRT-LLM is not installed"),
        (PYTORCH, "tensorrt_llm==1.0.0,gpus=0", "there is no NVIDIA GPU"),
        (PYTORCH, "tensorrt_llm==0.16.0,sm=90", "its PyTorch runtime is a preview before 1.0"),
    ],
)
def test_what_a_machine_lacks_is_said(toolchain: str, on: str, words: str) -> None:
    assert words in str(toolchains.load(toolchain).missing(parse(on)))


@pytest.mark.parametrize(
    ("release", "expected"),
    [("0.16.0", ENGINES), ("1.0.0", ENGINES), ("1.3.0", PYTORCH)],
)
def test_the_lane_of_a_machine_is_the_first_it_has_all_of(release: str, expected: str) -> None:
    assert toolchains.detect(machine(release)).name == expected


SERVE = {"serve.frontend": "trtllm_serve"}
TRITON_OPENAI = {"serve.frontend": "triton_openai"}


def test_a_repository_is_the_same_with_either_front_end_of_triton() -> None:
    ours, theirs = (stage_run(plan(cell(settings=each)), "repository") for each in ({}, TRITON_OPENAI))
    assert ours.fingerprint == theirs.fingerprint
    ours, theirs = (stage_run(plan(cell(settings=each)), "launch") for each in ({}, TRITON_OPENAI))
    assert key(theirs.params) == {"frontend": "triton_openai"}
    assert ours.fingerprint != theirs.fingerprint


@pytest.mark.parametrize(
    ("asked", "on", "words"),
    [
        (
            cell(settings=SERVE),
            machine("0.12.0"),
            "frontend trtllm_serve: TensorRT-LLM 0.12.0 here has no trtllm-serve",
        ),
        (
            cell(settings={**SERVE, "serve.options": {"num_postproces_workers": 2}}),
            machine(),
            "settings.serve.options.num_postproces_workers",
        ),
        (
            cell(settings={"serve.options": {"num_postprocess_workers": 2}}),
            machine(),
            "settings.serve.options are trtllm-serve's: settings.serve.frontend: trtllm_serve",
        ),
        (
            cell(),
            machine(more=",triton=no"),
            "Triton is not installed; settings.serve.frontend: trtllm_serve needs none",
        ),
        (cell(tp=2, settings=TRITON_OPENAI), machine(), "it is one process, but mpirun starts 2 ranks"),
        (
            cell(settings={**TRITON_OPENAI, "repository.decoupled": False}),
            machine(),
            "it streams answers, which requires settings.repository.decoupled: true",
        ),
        (
            cell(settings=TRITON_OPENAI),
            replace(machine(), assumed=False),
            "Triton here has no python/openai/openai_frontend/main.py; NVIDIA's images have it",
        ),
        (
            cell(toolchain=PYTORCH, settings=TRITON_OPENAI),
            machine(),
            "it serves engines; settings.serve.frontend: trtllm_serve serves PyTorch's models over OpenAI",
        ),
        (
            cell(settings={**TRITON_OPENAI, "serve.options": {"num_postprocess_workers": 2}}),
            machine(),
            "settings.serve.options are trtllm-serve's",
        ),
        (cell(), machine(more=",templates=no"), "the Triton templates of the release (all_models) were not found"),
        (cell(toolchain=PYTORCH), machine(more=",triton=no"), "Triton is not installed"),
        (
            cell("fp8", toolchain=PYTORCH),
            machine(more=",model_optimizer=no"),
            "is created with Model Optimizer, but Model Optimizer is not installed: MODEL_OPTIMIZER_PYTHON names",
        ),
        (
            cell("fp16", toolchain=PYTORCH, settings=FP8_CACHE),
            machine(more=",model_optimizer=no"),
            "is created with Model Optimizer",
        ),
        (cell(settings={"build.tokens_per_blok": 32}), machine(), "settings.build.tokens_per_blok"),
        (
            cell("fp8"),
            machine(more=",examples=no,model_optimizer=no"),
            "the example scripts of TensorRT-LLM are missing, and Model Optimizer is not installed",
        ),
        (
            cell("int4_awq", recipe={"family": "mixtral", "num_experts": 8}),
            machine(more=",examples=no"),
            "mixtral in int4_awq: the example scripts of TensorRT-LLM are missing, and Model Optimizer writes mixtral only in fp16",
        ),
        (
            cell(tp=2),
            replace(machine(), mpirun=None),
            "2 ranks are started by mpirun, which is not on PATH: apt-get install openmpi-bin",
        ),
        (cell(tp=2, settings=SERVE), replace(machine(), mpirun=None), "2 ranks are started by mpirun"),  # for the check
        (
            cell(settings={"repository.llm_args": {"print_iter_log": True}}),
            machine(),
            "settings.repository.llm_args: tensorrt_llm does not read it with the frontend triton",
        ),
        (
            cell(settings={**SERVE, "repository.accumulate_tokens": True}),
            machine(),
            "accumulate_tokens: tensorrt_llm does not read it with the frontend trtllm_serve",
        ),
        (
            cell(toolchain=PYTORCH, settings={"repository.accumulate_tokens": True}),
            machine(),
            "accumulate_tokens: tensorrt_llm_pytorch does not read it with the frontend triton",
        ),
        (
            cell(toolchain=PYTORCH, settings={"repository.parameters": {"any": 1}}),
            machine(),
            "settings.repository.parameters: tensorrt_llm_pytorch does not read it",
        ),
    ],
)
def test_what_cannot_be_served_or_made_here_is_infeasible_in_words(asked: Cell, on: Machine, words: str) -> None:
    assert words in str(infeasible(asked, on))


@pytest.mark.parametrize(
    "asked",
    [
        cell(settings={**SERVE, "repository.kv_cache_free_gpu_mem_fraction": 0.5}),
        cell(settings={"repository.parameters": {"any": 1}, "repository.accumulate_tokens": True}),
        cell(toolchain=PYTORCH, settings={"repository.enable_kv_cache_reuse": True, "repository.retries": 1}),
        cell(toolchain=PYTORCH, settings={**SERVE, "repository.llm_args": {"print_iter_log": True}}),
        cell(toolchain=PYTORCH, settings={"repository.accumulate_tokens": False}),  # the default says nothing
        cell(settings={**SERVE, "repository.enable_kv_cache_reuse": False}),
    ],
)
def test_settings_that_are_read_are_taken(asked: Cell) -> None:
    assert infeasible(asked) is None


def repository_settings(**settings: Any) -> dict[str, Any]:
    return {f"repository.{name}": value for name, value in settings.items()}


@pytest.mark.parametrize("installed_here", [True, False])
@pytest.mark.parametrize(
    ("release", "settings", "words"),
    [
        (
            "0.16.0",
            {"lookahead_window_size": 4},
            "has ${lookahead_window_size}, which are known to have it from 0.19.0",
        ),
        (
            "0.19.0",
            {"visual_model_path": "v"},
            "has ${visual_model_path}, which are known to have it from 0.12.0 on and up to 0.18.2",
        ),
        (
            "0.16.0",
            {"parameters": {"max_beam_width": 2}},
            "parameters.max_beam_width: use settings.repository.max_beam",
        ),
        ("0.16.0", {"parameters": {"engine_dir": "/e"}}, "parameters.engine_dir: it follows from the engine"),
        ("0.16.0", {"lookahead_window_size": None}, None),
        ("0.19.0", {"lookahead_window_size": 4}, None),
    ],
)
def test_settings_without_a_place_are_found_before_anything_is_built(
    tmp_path: Path, release: str, settings: dict[str, Any], words: str | None, installed_here: bool
) -> None:
    on = with_templates(tmp_path, release) if installed_here else machine(release)
    reason = infeasible(cell(settings=repository_settings(**settings)), on)
    assert (reason is None) if words is None else (words in str(reason))


@pytest.mark.parametrize(
    ("name", "hint"),
    [("foo", "; remove it"), ("max_tokens_in_pagd_kv_cache", "; did you mean 'max_tokens_in_paged_kv_")],
)
def test_the_installed_templates_decide_on_parameters(tmp_path: Path, name: str, hint: str) -> None:
    asked = cell(settings=repository_settings(parameters={name: 1}))
    on = with_templates(tmp_path, "0.16.0")
    assert f"parameters.{name}: no template of TensorRT-LLM 0.16.0 has ${{{name}}}{hint}" in str(infeasible(asked, on))
    assert infeasible(asked, machine("0.16.0")) is None, "what files there are is not known"
    served = cell(settings={**repository_settings(parameters={}), **SERVE})
    assert infeasible(served, on) is None


def with_templates(folder: Path, release: str) -> Machine:
    """A machine that is not assumed, with the files of a release."""
    here = machine(release)
    found = replace(here.tensorrt_llm, templates=str(templates.install(folder, release)))
    return replace(here, assumed=False, tensorrt_llm=found)


@pytest.mark.parametrize("release", ["0.8.0", "0.18.0", "1.2.0"])
def test_one_rank_needs_no_mpirun_and_neither_does_pytorch(release: str) -> None:
    without = replace(machine(release), mpirun=None)
    assert infeasible(cell(), without) is None
    assert infeasible(cell(settings=TRITON_OPENAI), machine(release)) is None
    if release == "1.2.0":
        assert infeasible(cell(tp=2, toolchain=PYTORCH), without) is None
    assert probe.identity(without) == probe.identity(machine(release)), "no key depends on it"


def test_inside_a_job_the_plan_says_that_mpirun_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    here = replace(machine(), assumed=False)
    for asked in (cell(tp=2), cell(tp=2, settings=SERVE)):  # for the launch; for the engine's check alone
        reason = str(infeasible(asked, here))
        assert "inside a parallel job (SLURM_JOB_ID is set)" in reason
        assert 'docs/clusters.md, "In a Slurm allocation"' in reason
    assert infeasible(cell(), here) is None, "one rank runs without mpirun"
    assert infeasible(cell(tp=2, toolchain=PYTORCH), here) is None
    assert infeasible(cell(tp=2), machine()) is None, "a machine that is only described is another one"


@pytest.mark.parametrize("toolchain", [ENGINES, PYTORCH])
def test_trtllm_serve_needs_neither_triton_nor_templates(toolchain: str) -> None:
    on = machine(more=",triton=no,templates=no")
    assert infeasible(cell(toolchain=toolchain, settings=SERVE), on) is None
    assert infeasible(cell("fp16", toolchain=toolchain), machine(more=",model_optimizer=no")) is None


def test_batches_of_triton_beside_those_of_the_engine() -> None:
    settings = {
        "repository.triton_max_batch_size": 4,
        "repository.preferred_batch_size": [2, 4],
        "repository.instance_kinds": {"preprocessing": "KIND_GPU"},
        "repository.triton_parameters": {"tensorrt_llm": {"mine": 1}},
    }
    asked = cell(batch=8, settings=settings)
    planned, plain = plan(asked), plan(cell(batch=8))
    runs = {run.stage.name: run for run in planned.stage_runs.values()}
    assert runs["repository"].params.max_batch_size == 4
    assert runs["build"].fingerprint in {run.fingerprint for run in plain.stage_runs.values()}
    declared = runs["perf"].params.declared
    assert (declared["max_batch_size"], declared["triton_max_batch_size"]) == (8, 4)
    for path, value, words in (
        ("triton_max_batch_size", 16, "16 is more than the engine's 8"),
        ("preferred_batch_size", [16], "16 is more than Triton's max_batch_size, 8"),
        ("triton_parameters", {"tensorrt_llm": {"max_beam_width": 2}}, "use settings.repository.max_beam_width"),
    ):
        reason = infeasible(cell(batch=8, settings={f"repository.{path}": value}))
        assert words in reason


def test_the_question_of_the_check_is_settable_and_makes_nothing_else_stale() -> None:
    plain = cell()
    asked = cell(settings={"check.prompt": "Two and two is", "check.max_tokens": 3, "check.timeout_s": 9.0})
    assert changed(plan(plain), plan(asked)) == {"check"}
    run = stage_run(plan(asked), "check")
    assert (run.params.prompt, run.params.max_tokens) == ("Two and two is", 3)
    assert section(run)["timeout_s"] == 9.0


# ------------------------------------------------------------------------------------ what installed programs say


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Shows its help and notes that it was asked."""
    path = tmp_path / "trtllm-build"
    path.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n'
        "echo 'usage: trtllm-build [-h] [--of_tomorrow N]'\necho 'options:'\necho '  --of_tomorrow N  new'\n"
    )
    path.chmod(0o755)
    options.installed_help.cache_clear()
    return path


def test_a_program_is_asked_once_and_only_when_there_is_something_to_ask(program: Path) -> None:
    asked = program.parent / "asked"
    on = replace(machine(), assumed=False)
    assert options.help_for(on, {}, str(program)) is None
    assert options.help_for(on, {"x": 1}, None) is None
    assert options.help_for(machine(), {"x": 1}, str(program)) is None, "an assumed machine's is not this one's"
    assert not asked.exists()
    for _ in range(2):
        said = options.help_for(on, {"x": 1}, str(program), "serve")
        assert "--of_tomorrow" in said
    assert asked.read_text() == "serve --help\n"


@pytest.mark.parametrize("text", [None, "#!/bin/sh\necho broken\nexit 1\n", "#!/bin/sh\n"])
def test_a_program_that_does_not_answer_leaves_it_to_the_table(program: Path, text: str | None) -> None:
    if text is None:
        program.unlink()
    else:
        program.write_text(text)
    assert options.help_for(replace(machine(), assumed=False), {"x": 1}, str(program)) is None


def test_the_installed_programs_decide_on_a_matrix_s_options(program: Path) -> None:
    here = machine()
    found = replace(here.tensorrt_llm, build=str(program), serve=str(program))
    on = replace(here, assumed=False, tensorrt_llm=found)
    assert infeasible(cell(settings={"build.of_tomorrow": 1}), on) is None
    assert "settings.build.tokens_per_block" in str(infeasible(cell(settings={"build.tokens_per_block": 32}), on))
    served = {**SERVE, "serve.options": {"of_tomorrow": 1}}
    assert infeasible(cell(settings=served), on) is None
    assert (program.parent / "asked").read_text().splitlines() == ["--help", "serve --help"]
