"""Time of TensorRT-LLM's stages that depends on the model's size, in seconds: see
`tensorrt/toolchains/time_estimates.py`.

For comparison: `tests/data/tensorrt_llm/durations.json` (builds and conversions) and `quantizing.json`.
"""

from __future__ import annotations

from typing import Final

from trtllm_pipeline.base import Cell, Machine, speeds
from trtllm_pipeline.tensorrt.modelopt.calibration_memory import SATURATING_TOKENS
from trtllm_pipeline.tensorrt.modelopt.formats import precision
from trtllm_pipeline.tensorrt.toolchains.catalog import ENGINES
from trtllm_pipeline.tensorrt.toolchains.model_shape import Shape, computed, weights_bytes
from trtllm_pipeline.tensorrt.toolchains.time_estimates import READ, token_s
from trtllm_pipeline.tensorrt.trtllm import backends, needs
from trtllm_pipeline.tensorrt.trtllm.case import kv_cache
from trtllm_pipeline.tensorrt.trtllm.installation import installed
from trtllm_pipeline.tensorrt.trtllm.releases import at_least

_GB: Final = 1e9
_BUILD_PER_GB: Final = 1.1
_QUICK_BUILDER: Final = "0.9"
_TUNING_S: Final = 75.0
"""Seconds that a build took longer before that release."""
_CONVERT_PER_GB: Final = 1.0
_ENCODE_PER_GB: Final = 5.0
"""Seconds of weight-only quantization, on the host."""
_TO_GPU: Final = 5e9
_EXPORT: Final = 3.5e9
"""Bytes of 16-bit weights per second that our worker loads, packs and writes."""
_EXPORT_EXPERT_S: Final = 2.4e-3
"""Seconds per matrix of an expert."""
_CALIBRATE: Final = 1.1
"""Multiple of the lower bound, in batches."""
_BATCH_EXPERT_S: Final = 1e-3
"""Seconds per expert of each layer, in each batch."""
_ROW_BY_ROW: Final = 14.0
"""Multiple of the lower bound for one row at a time, as in the release's script."""
_SEARCHES: Final = 9
"""AWQ in forward passes: one for statistics, one plus eleven candidates for the search, most of which are cheaper."""
_SEARCH_KERNELS_S: Final = 50.0
"""Compiling its kernels, once per machine."""


def converting(cell: Cell, _machine: Machine) -> float:
    """convert_checkpoint.py: reads and writes the weights, and quantizes them on the host."""
    weights = weights_bytes(Shape.of(cell.recipe), "bf16", 1, 1) / _GB
    encodes = computed(cell) not in {"fp32", "fp16", "bf16"} and cell.precision != "as_is"
    return weights * (_CONVERT_PER_GB + (_ENCODE_PER_GB if encodes else 0.0))


def building(cell: Cell, machine: Machine) -> float:
    """trtllm-build, by the size of one rank's engine: each rank has a separate worker."""
    engine = needs.engine_bytes(Shape.of(cell.recipe), computed(cell), cell.tp, cell.pp) / _GB
    quick = at_least(installed(machine).release, _QUICK_BUILDER)
    return engine * _BUILD_PER_GB + (0.0 if quick else _TUNING_S)


def quantizing(cell: Cell, machine: Machine) -> float:
    """The release's script, or our own worker: reading, forward passes of `2 * weights * tokens / rate` each, writing."""
    shape = Shape.of(cell.recipe)
    weights = weights_bytes(shape, "bf16", 1, 1)
    made = precision(cell.precision)
    measured = made.calibrated or kv_cache(cell) is not None
    rows = needs.calibration_rows(cell)
    tokens = rows["samples"] * rows["max_length"] if measured else 0
    without_head = shape.computed_weights - shape.vocab_size * shape.hidden_size
    floor = 2.0 * without_head * tokens * (_SEARCHES if made.searches else 1) / speeds.speeds(machine).operations
    if backends.quantizes_by_script(cell, machine):
        return weights / _TO_GPU + floor * _ROW_BY_ROW + weights / _EXPORT
    experts = shape.mixture_layers * (shape.num_experts or 0)
    batches = -(-tokens // SATURATING_TOKENS)
    calibrating = (
        floor * _CALIBRATE + batches * experts * _BATCH_EXPERT_S + (_SEARCH_KERNELS_S if made.searches else 0.0)
    )
    return weights / _TO_GPU + calibrating + weights / _EXPORT + 3 * experts * _EXPORT_EXPERT_S


def checking(cell: Cell, machine: Machine) -> float:
    """Loading an engine and generating one response."""
    return loading(cell, machine) + cell.osl * token_s(cell, machine, 1)


def loading(cell: Cell, _machine: Machine) -> float:
    """Loading weights from files to GPUs: all ranks read from the same disk."""
    if cell.toolchain == ENGINES:
        size = needs.engine_bytes(Shape.of(cell.recipe), computed(cell), cell.tp, cell.pp) * cell.tp * cell.pp
    else:
        size = weights_bytes(Shape.of(cell.recipe), computed(cell), 1, 1)
    return size / READ
