"""The PyTorch backend of TensorRT-LLM, 1.0 and later: weights are served as they are. Newer releases have no other.

download -> quantize (to a Hugging Face checkpoint, or not at all) -> repository -> launch -> smoke, perf, accuracy
         -> trtllm_bench, if requested
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import Cell, Machine
from trtllm_pipeline.models import AS_IS, model_config
from trtllm_pipeline.tensorrt.modelopt import job
from trtllm_pipeline.tensorrt.servers.disaggregated import planned
from trtllm_pipeline.tensorrt.stage.base import Stage, StageContext
from trtllm_pipeline.tensorrt.stage.calibration_rows import with_true_samples
from trtllm_pipeline.tensorrt.stage.params import DRAFT_LENGTHS, load, table
from trtllm_pipeline.tensorrt.stage.repository_settings import LlmApi
from trtllm_pipeline.tensorrt.toolchains import companions, vision
from trtllm_pipeline.tensorrt.toolchains.catalog import Toolchain, lacks_tensorrt_llm
from trtllm_pipeline.tensorrt.toolchains.common_stages import (
    ACCURACY,
    DOWNLOAD,
    PERF,
    SCORE,
    SMOKE,
    listening,
    planned_server,
)
from trtllm_pipeline.tensorrt.toolchains.standard_tasks import TASKS
from trtllm_pipeline.tensorrt.trtllm import backends, case, durations, engine_bench, llm_args, llmapi, needs, rules
from trtllm_pipeline.tensorrt.trtllm.installation import installed
from trtllm_pipeline.tensorrt.trtllm.params import (
    FRONTEND_DISAGGREGATED,
    FRONTEND_TRITON,
    HuggingFaceCheckpoint,
    WeightsRepository,
)
from trtllm_pipeline.tensorrt.trtllm.releases import FIRST_PYTORCH, at_least

_UNQUANTIZED: Final = ("fp16", "bf16")
_SETTINGS: Final = frozenset({*(each.name for each in table(LlmApi)), "llm_args"})
_SERVED: Final = _SETTINGS - {"decoupled"}
_READ: Final = {"triton": _SETTINGS, "trtllm_serve": _SERVED, "disaggregated": _SERVED}
"""Frontend -> the repository settings that have an effect."""


def _quantized(cell: Cell) -> bool:
    """True if we quantize the weights or the cache."""
    return cell.precision != AS_IS and (cell.precision not in _UNQUANTIZED or case.kv_cache(cell) is not None)


def _quantize(context: StageContext[HuggingFaceCheckpoint], machine: Machine) -> Sequence[Sequence[str]]:
    return (job.command(context, backends.quantizing_python(machine)),)


def _repository(cell: Cell) -> WeightsRepository:
    own = {
        **backends.frontend(cell),
        "max_seq_len": cell.isl + cell.osl,
        "max_num_tokens": case.num_tokens(cell),
        **_layout(cell),
        **_disaggregated(cell),
        "unquantized": cell.precision != AS_IS and not _quantized(cell),
        **_speculation(cell),
    }
    return load(WeightsRepository, own, cell.settings["repository"])


def _disaggregated(cell: Cell) -> dict[str, Any]:
    servers = backends.disaggregated(cell)
    if servers is None:
        return {}
    context = {"llm_args": servers["context_llm_args"]} if servers["context_llm_args"] else {}
    if servers["context_parallel"] is not None:
        context |= _layout(backends.context_cell(cell))
    return {
        "context_servers": servers["context_servers"],
        "generation_servers": servers["generation_servers"],
        "context": context,
    }


def _layout(cell: Cell) -> dict[str, Any]:
    return {
        "max_batch_size": cell.group_batch_size,
        "tensor_parallel_size": cell.tp,
        "pipeline_parallel_size": cell.pp,
        "moe_expert_parallel_size": backends.expert_parallel(cell),
        "enable_attention_dp": cell.dp > 1,
    }


def _speculation(cell: Cell) -> dict[str, Any]:
    speculation = companions.speculation(cell)
    if speculation is None:
        return {}
    method = str(speculation["method"])
    length = companions.beyond_default(speculation, {"max_draft_len": DRAFT_LENGTHS.get(method, 0)})
    return {"speculative": method, **length, "max_ngram_size": speculation["max_ngram_size"]}


def _server(cell: Cell, context: StageContext[Any], machine: Machine) -> Sequence[Sequence[str]]:
    if context.params.frontend == FRONTEND_TRITON:
        return (planned_server(context, machine),)
    inputs = context.inputs
    if context.params.frontend == FRONTEND_DISAGGREGATED:
        servers = llmapi.disaggregated_lines(_repository(cell), inputs, installed(machine), inputs["repository"])
        return planned(servers, context.attempt, context.params.ready_timeout_s)
    command = llmapi.serve_line(_repository(cell), inputs, installed(machine), inputs["repository"])
    return (listening(command, context.params),)


QUANTIZE: Final = Stage(
    name="quantize",
    version=1,
    summary="quantize a model into a Hugging Face checkpoint, calibrating activations if the precision needs it",
    program="trtllm_pipeline.tensorrt.trtllm.checkpoint:run_hugging_face",
    commands=_quantize,
    inputs={"model": "download"},
    applies=lambda cell, _machine: _quantized(cell),
    params=HuggingFaceCheckpoint,
    read=lambda cell: load(
        HuggingFaceCheckpoint,
        backends.checkpoint_params(cell),
        {"calibration": backends.calibration(cell)},
        cell.settings["quantize"],
    ),
    file_names=("calibration_data",),
    files=backends.calibration_data,
    settle=with_true_samples,
    resources=backends.quantizing_takes,
    gpus=backends.all_visible,
    identity=("model_optimizer",),
    expected_s=20.0,
    takes=durations.quantizing,
    needs=needs.quantizing,
    timeout_s=6 * 3600.0,
)

REPOSITORY: Final = Stage(
    name="repository",
    version=2,
    summary="write what the PyTorch runtime is served from: the release's llmapi model, or trtllm-serve's settings",
    program="trtllm_pipeline.tensorrt.trtllm.frontends:run_pytorch",
    inputs={"model": ("quantize", "download"), **{name: name for name in companions.NAMES}},
    optional=frozenset(companions.NAMES),
    params=WeightsRepository,
    read=_repository,
    identity=("tensorrt_llm", "templates"),
    expected_s=2.0,
)


BENCH: Final = engine_bench.stage(
    lambda cell: engine_bench.params(cell, _repository(cell)), {"model": ("quantize", "download")}
)


def _missing(machine: Machine) -> str | None:
    if lacks := lacks_tensorrt_llm(machine):
        return lacks
    release = installed(machine).release
    if not at_least(release, FIRST_PYTORCH):
        return f"TensorRT-LLM {release} is installed; its PyTorch runtime is a preview before {FIRST_PYTORCH}"
    return None


def _adapter_unasked(cell: Cell, machine: Machine) -> str | None:
    """The reason why requests to Triton cannot select a cell's LoRA adapter, by the installed template. None if they can."""
    templates = installed(machine).templates
    if not companions.adapters(cell) or not backends.in_triton(cell) or machine.assumed or templates is None:
        return None
    try:
        takes = llmapi.takes_adapters(llmapi.template(Path(templates)))
    except (OSError, model_config.ModelConfigError):
        return None  # the repository stage reports the fault
    if takes:
        return None
    return (
        f"settings.lora.adapter: the LLM API's model in {templates} has no input {llmapi.ADAPTER_INPUT}; "
        "settings.serve.frontend: trtllm_serve supports adapters"
    )


def _context_infeasible(cell: Cell, machine: Machine) -> str | None:
    """The reason why the disaggregated servers that read prompts cannot have their parallelism."""
    servers = backends.disaggregated(cell)
    if servers is None or servers["context_parallel"] is None:
        return None
    reason = rules.infeasible(backends.context_cell(cell), machine)
    return None if reason is None else f"settings.disaggregated.context_parallel: {reason}"


def _unknown_arguments(cell: Cell, release: str, schema: llm_args.Schema) -> str | None:
    """The parts of a cell's YAML file that a schema does not have, in words, or None."""
    params, folder = _repository(cell), Path("model")
    if backends.in_triton(cell):
        written = llmapi.yaml_settings(folder, params, release, folder)
        del written[llmapi.OF_TRITON]
    elif backends.disaggregated(cell) is not None:
        written = {
            **llmapi.disaggregated_settings(llmapi.context_params(params), release, folder, context=True),
            **llmapi.disaggregated_settings(params, release, folder, context=False),
        }
    else:
        written = llmapi.serve_settings(params, release, folder)
    return "; ".join(schema.problems(written)) or None


def _refused_arguments(cell: Cell, machine: Machine) -> str | None:
    """Why the LLM API of the release refuses a cell's YAML file, by its own schema. None if it does not, or if that is unknown."""
    release, schema = installed(machine).release, llm_args.of_machine(machine)
    if schema is None or schema.release != release or not schema.whole:
        return None
    if (problems := _unknown_arguments(cell, release, schema)) is None:
        return None
    return f"settings.repository.llm_args: {problems}, by the schema of TensorRT-LLM {release} ({schema.source})"


def _infeasible(cell: Cell, machine: Machine) -> str | None:
    reason = (
        rules.infeasible(cell, machine)
        or _context_infeasible(cell, machine)
        or _refused_arguments(cell, machine)
        or backends.unservable(cell, machine, _READ)
        or _adapter_unasked(cell, machine)
        or engine_bench.unfit(cell, machine)
    )
    lacks = backends.quantizing_lacks(machine) if reason is None and _quantized(cell) else None
    return reason if lacks is None else f"precision {cell.precision} is created with Model Optimizer, but {lacks}"


def _caveat(cell: Cell, machine: Machine) -> str | None:
    caveats = []
    schema = llm_args.of_machine(machine)
    if schema is not None and (problems := _unknown_arguments(cell, installed(machine).release, schema)) is not None:
        caveats.append(f"settings.repository.llm_args: {problems}, by what is known of TensorRT-LLM {schema.release}")
    caveats += filter(None, (rules.unlisted_gpu(machine), rules.by_marlin(cell, machine)))
    if cell.settings["repository"]["sink_token_length"]:
        caveats.append("settings.repository.sink_token_length has no effect: the PyTorch backend ignores it")
    if cell.recipe.get("images") and backends.in_triton(cell):
        caveats.append(
            "checked with text alone, since Triton's model of the LLM API takes no images; "
            "settings.serve.frontend: trtllm_serve takes them"
        )
    return "; ".join(caveats) or None


TOOLCHAIN: Final = Toolchain(
    name="tensorrt_llm_pytorch",
    summary="TensorRT-LLM's PyTorch runtime, 1.0 and later, served by Triton or trtllm-serve",
    has_family=lambda family: family not in vision.PYTORCH_WITHOUT,
    stages=(
        DOWNLOAD,
        companions.FETCH_DRAFT,
        *companions.FETCH_ADAPTERS,
        QUANTIZE,
        REPOSITORY,
        replace(
            backends.launching("pytorch"),
            inputs={"repository": "repository", **REPOSITORY.inputs},
            optional=REPOSITORY.optional,
            starts=_server,
            needs=needs.serving,
            expected_s=60.0,
            takes=durations.loading,
        ),
        SMOKE,
        PERF,
        BENCH,
        ACCURACY,
        SCORE,
        TASKS,
    ),
    missing=_missing,
    identity=backends.identity,
    infeasible=_infeasible,
    gpus=backends.served_gpus,
    numerics=backends.numerics_of,
    caveat=_caveat,
)
