"""Durations of the embedded toolchain's stages by model size, in seconds: see `tensorrt/toolchains/time_estimates.py`."""

from __future__ import annotations

from typing import Final

from trtllm_pipeline.base import Cell, Machine
from trtllm_pipeline.tensorrt.embedded.needs import weights_bytes
from trtllm_pipeline.tensorrt.toolchains import model_shape
from trtllm_pipeline.tensorrt.toolchains.model_shape import Shape
from trtllm_pipeline.tensorrt.toolchains.time_estimates import READ, token_s

_CONVERT_PER_GB: Final = 7.0
"""For 16-bit weights, on one CPU."""
_PROOF_TOKENS: Final = 8


def converting(cell: Cell, _machine: Machine) -> float:
    """Reading, encoding and writing."""
    return _CONVERT_PER_GB * model_shape.weights_bytes(Shape.of(cell.recipe), "bf16", 1, 1) / 1e9


def building(cell: Cell, machine: Machine) -> float:
    """Loading the engine, and its first tokens."""
    return loading(cell, machine) + _PROOF_TOKENS * token_s(cell, machine, 1)


def loading(cell: Cell, _machine: Machine) -> float:
    """Mapping the weights."""
    return weights_bytes(Shape.of(cell.recipe), cell.precision) / READ
