"""The load of a cell in words, before it is measured: its lengths, levels and requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trtllm_pipeline.base import Cell
from trtllm_pipeline.measure import prompts, windows
from trtllm_pipeline.tensorrt.stage.params import PerfParams
from trtllm_pipeline.tensorrt.toolchains import catalog
from trtllm_pipeline.tensorrt.toolchains.common_stages import PERF


def load_words(cell: Cell) -> str:
    """`2048 in, 512 out, 1/4/16/64 in flight, 32 to 512 requests`."""
    known = cell.toolchain in catalog.every_name()
    params: PerfParams = (catalog.load(cell.toolchain).stage(PERF.name) if known else PERF).read(cell)
    return ", ".join((_lengths(cell, params), *_levels(params)))


def levels_words(concurrency: Sequence[int], rates: Sequence[float], requests: Sequence[int]) -> str:
    """`1/4/16/64 in flight, 32 to 512 requests`."""
    parts = [f"{'/'.join(map(str, concurrency))} in flight"] if concurrency else []
    parts += [f"{'/'.join(f'{rate:g}' for rate in rates)} requests/s"] if rates else []
    low, high = min(requests, default=0), max(requests, default=0)
    parts += [f"{low} requests" if low == high else f"{low} to {high} requests"] if requests else []
    return ", ".join(parts)


def _lengths(cell: Cell, params: PerfParams) -> str:
    settings = cell.settings["perf"]
    if params.workload == "prompts":
        return f"prompts of {settings['input_data'] or prompts.BUILT_IN_PROMPTS}, up to {params.max_tokens} out"
    if settings["lengths_data"]:
        return f"lengths of {settings['lengths_data']}"
    spread = f"±{params.input_tokens_stddev:g}" if params.input_tokens_stddev else ""
    out = f"±{params.output_tokens_stddev:g}" if params.output_tokens_stddev else ""
    limit = "up to " if params.ignore_eos is False else ""
    return f"{params.input_tokens}{spread} in, {limit}{params.max_tokens}{out} out"


def _levels(params: PerfParams) -> Iterator[str]:
    levels = params.concurrency or ()
    timed = params.measurement_interval_ms
    counts = [windows.requests_of(params.requests, level, params.warmup_requests, params.turns) for level in levels]
    counts += [windows.requests_of(params.requests, None)] if params.request_rate else []
    if words := levels_words(levels, params.request_rate, () if timed else counts):
        yield words
    if params.trace_speed:
        yield f"replayed at {'/'.join(f'{speed:g}x' for speed in params.trace_speed)} speed"
    if timed:
        yield f"{timed / 1e3:g} s each"
    elif params.level_budget_s is not None:
        yield f"{params.level_budget_s:g} s each at most"
    if params.repeats > 1:
        yield f"{params.repeats} times"
    if params.find_rate is not None:
        yield f"the highest rate at which {params.find_rate:.0%} meet the SLO"
    if params.find_concurrency is not None:
        yield f"the most in flight at which {params.find_concurrency:.0%} meet the SLO"
