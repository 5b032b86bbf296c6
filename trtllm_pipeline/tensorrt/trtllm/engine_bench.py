"""trtllm-bench as a second measurement: perf's prompts, sent to the engine in the program's own process.

It loads the engine itself, so it runs after the server has released the GPUs. The difference between its numbers and
those of perf is the server's overhead.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from trtllm_pipeline.base import Cell, FailureClass, Machine, MatrixError, StageError
from trtllm_pipeline.measure import EVENTS_FILE, engine_report
from trtllm_pipeline.tensorrt.stage.base import JOB, Stage, StageContext
from trtllm_pipeline.tensorrt.toolchains import companions
from trtllm_pipeline.tensorrt.toolchains.common_stages import image_setting, load_levels
from trtllm_pipeline.tensorrt.trtllm import backends, case, commands, durations, llmapi, needs
from trtllm_pipeline.tensorrt.trtllm.installation import installed
from trtllm_pipeline.tensorrt.trtllm.params import EngineBench, EngineRepository, WeightsRepository
from trtllm_pipeline.tensorrt.trtllm.releases import FIRST_BENCH, at_least

_ASKED: Final = "settings.perf.trtllm_bench"
_DATASET: Final = "dataset.jsonl"
_SETTINGS: Final = "settings.yaml"
_CACHE: Final = "kv_cache_config"
_SHARE: Final = "free_gpu_memory_fraction"


def params(cell: Cell, params: EngineRepository | WeightsRepository) -> EngineBench:
    """Parameters for a cell whose repository has these settings."""
    weights = isinstance(params, WeightsRepository)
    settings = llmapi.of_settings(params)
    share = case.kv_share(cell)
    if settings.get(_CACHE):
        settings[_CACHE] = {_SHARE: share, **settings[_CACHE]}
    return EngineBench(
        name=cell.model,
        concurrency=max(load_levels(cell), default=1),  # without any, the cell is infeasible
        backend="pytorch" if weights else "engine",
        tp=cell.tp,
        pp=cell.pp,
        ep=backends.expert_parallel(cell),
        max_batch_size=cell.group_batch_size if weights else None,
        max_seq_len=cell.isl + cell.osl if weights else None,
        max_num_tokens=case.num_tokens(cell) if weights else None,
        kv_cache_free_gpu_mem_fraction=share,
        settings=settings,
    )


def unfit(cell: Cell, machine: Machine) -> str | None:
    """The reason why trtllm-bench cannot run a cell's load. None if it can, or is not requested."""
    perf, installation = cell.settings["perf"], installed(machine)
    if not perf["trtllm_bench"]:
        return None
    if not at_least(installation.release, FIRST_BENCH):
        return f"{_ASKED}: trtllm-bench is known to write reports from {FIRST_BENCH} on, this is {installation.release}"
    if backends.disaggregated(cell) is not None:
        return f"{_ASKED}: it does not run disaggregated servers"
    if installation.bench is None:
        return f"{_ASKED}: TensorRT-LLM {installation.release} here has no trtllm-bench"
    if not load_levels(cell):
        return f"{_ASKED}: it keeps a fixed number of requests in flight, but settings.perf.concurrency has none"
    if image_setting(cell) or companions.adapters(cell) or companions.speculation(cell) or cell.recipe.get("images"):
        return f"{_ASKED}: not for images, LoRA adapters and drafted tokens, which it handles differently"
    return None


def _commands(context: StageContext[EngineBench], machine: Machine) -> Sequence[Sequence[str]]:
    installation, attempt = installed(machine), context.attempt
    prepare = [sys.executable, "-m", "trtllm_pipeline.tensorrt.worker", str(attempt / JOB), f"{__name__}:prepare"]
    engine = context.inputs.get("engine")
    command = commands.bench(
        installation.release,
        context.params,
        installation.bench or "trtllm-bench",
        model=str(context.inputs["model"]),
        engine=None if engine is None else str(engine),
        dataset=str(context.out / _DATASET),
        report=str(context.out / engine_report.ENGINE_REPORT_FILE),
        workspace=str(attempt),
        config=str(context.out / _SETTINGS) if context.params.settings else None,
    )
    return (prepare, command)


def prepare(context: StageContext[EngineBench]) -> None:
    """Write the input of trtllm-bench. Raises StageError if perf has no closed loop."""
    count = engine_report.write_dataset(context.inputs["perf"] / EVENTS_FILE, context.out / _DATASET)
    if context.params.settings:
        (context.out / _SETTINGS).write_text(llmapi.to_yaml(context.params.settings), encoding="utf-8")
    print(f"{count} requests")  # noqa: T201 - the stage's log


def run(context: StageContext[EngineBench]) -> None:
    """Check the report. Raises StageError for another file."""
    try:
        report = engine_report.EngineReport.read(context.out / engine_report.ENGINE_REPORT_FILE)
    except MatrixError as error:
        raise StageError(str(error), failure=FailureClass.CHECK) from error
    print(f"{report.values['output_tokens_per_s']:.1f} output tokens/s")  # noqa: T201 - the stage's log


def stage(read: Any, inputs: Mapping[str, str | tuple[str, ...]]) -> Stage:
    """The stage of a backend. `read` returns the parameters of a cell, `inputs` are the served artifacts."""
    return Stage(
        name="trtllm_bench",
        version=1,
        summary="run perf's prompts with trtllm-bench, on the engine in the program's process",
        program=f"{__name__}:run",
        commands=_commands,
        inputs={"perf": "perf", **inputs},
        applies=lambda cell, _machine: bool(cell.settings["perf"]["trtllm_bench"]),
        params=EngineBench,
        read=read,
        section="perf",
        resources=backends.serving_takes,
        gpus=lambda context: context.params.tp * context.params.pp,
        identity=("tensorrt_llm", "gpu"),
        expected_s=60.0,
        takes=durations.checking,
        needs=needs.checking,
        timeout_s=6 * 3600.0,
    )
