"""The meaning of a cell's precision: Model Optimizer's `fp8` is not the `fp8` that a server creates when it loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from trtllm_pipeline.base import Cell
from trtllm_pipeline.models import AS_IS

UNKNOWN: Final = "not known"
PLAIN: Final = ("fp32", "fp16", "bf16")
_HALF: Final = "16-bit"
_DYNAMIC: Final = "fp8, scaled at run time"
_OF_PRECISION: Final = {
    "fp8": ("fp8", "fp8"),
    "int8_wo": ("int8", _HALF),
    "int4_wo": ("int4", _HALF),
    "int8_sq": ("int8", "int8"),
    "int4_awq": ("int4", _HALF),
    "w4a8_awq": ("int4", "fp8"),
    "nvfp4": ("nvfp4", "nvfp4"),
}
"""Precision -> weights and activations."""
_OF_FORM: Final = {
    **_OF_PRECISION,
    "fp8_block": ("fp8 blocks", _DYNAMIC),
    "fbgemm_fp8": ("fp8", _DYNAMIC),
    "mxfp4": ("mxfp4", UNKNOWN),
    "awq": ("int4", _HALF),
    "gptq": ("int4", _HALF),
    "gptq_desc_act": ("int4", _HALF),
}
"""The same for forms of published weights."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """Formats of a cell's numbers, and how its weights were made."""

    weights: str
    activations: str
    kv_cache: str
    made: str


def numerics(cell: Cell, *, kv_cache: str | None, made: str) -> Numerics:
    """The numerics of a cell whose weights were `made` in some way. A `kv_cache` of None is not quantized."""
    if cell.precision in PLAIN:
        return Numerics(cell.precision, cell.precision, kv_cache or cell.precision, "not quantized")
    form = cell.recipe.get("quantization")
    if cell.precision == AS_IS:
        weights, activations = _OF_FORM.get(str(form), (str(form or UNKNOWN), UNKNOWN))
        return Numerics(weights, activations, kv_cache or _HALF, "quantized by its publisher")
    return Numerics(*_OF_PRECISION[cell.precision], kv_cache or _HALF, made)


def loaded_as_fp8(cell: Cell, kv_cache: str | None) -> Numerics:
    """The numerics of a server that quantizes to FP8 without calibration when it loads 16-bit weights."""
    if cell.precision != "fp8":
        return numerics(cell, kv_cache=kv_cache, made=UNKNOWN)
    return Numerics("fp8", _DYNAMIC, kv_cache or _HALF, "quantized by the server when it loads, without calibration")


def unknown(cell: Cell) -> Numerics:
    """The numerics of a server that was started or configured elsewhere."""
    return Numerics(f"{cell.precision}, as in the matrix", UNKNOWN, UNKNOWN, UNKNOWN)
