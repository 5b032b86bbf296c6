"""Bandwidth and compute rate of a machine: data sheets of NVIDIA's GPUs, and the shares of them that were measured."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from trtllm_pipeline.base.machine import gpu_types
from trtllm_pipeline.base.machine.model import Gpu, Machine


@dataclass(frozen=True, slots=True)
class Speeds:
    """For one GPU, or for all CPUs together."""

    bandwidth: float
    """Memory bandwidth in bytes per second."""
    operations: float
    """Floating-point operations per second of 16-bit matrix products. On CPUs, for one token at a time."""
    prompts: float = 1.0
    """Speed for the tokens of a prompt, processed together, relative to `operations`."""


_SHEETS: Final[list[tuple[str, float, float]]] = gpu_types.TABLES["sheets"]
"""Words of a GPU's name, GB/s, TFLOP/s (dense, 32-bit accumulation). The first row with all words in a name applies."""
_BY_SM: Final[dict[int, str]] = {int(sm): words for sm, words in gpu_types.TABLES["sheet_of_sm"].items()}
"""Compute capability -> words of the row that stands for other GPUs of it."""
_USED: Final = (0.76, 0.78)
"""Shares of bandwidth and operations that decoding and matrix products achieve. Measured on an H200
(docs/project/quantizing.md).
"""
FP8: Final = 1.64
"""Operations of 8-bit matrix products, relative to 16 bits. Measured there."""
_CPU: Final = Speeds(2e10, 1.6e10, 3.0)
"""All CPUs' bandwidth, each CPU's operations. Measured with llama.cpp, 2 EPYC vCPUs (docs/project/quantizing.md)."""


@lru_cache(maxsize=64)
def speeds(machine: Machine) -> Speeds:
    """Speed of each GPU of a machine, the slowest if they differ. Without GPUs, of all CPUs."""
    if not machine.gpus:
        return replace(_CPU, operations=_CPU.operations * max(1, machine.cpus))
    rates = [_of(gpu) for gpu in machine.gpus]
    return Speeds(min(each.bandwidth for each in rates), min(each.operations for each in rates))


def sheet_bandwidth(name: str) -> float | None:
    """Memory bandwidth of a GPU in bytes per second, from its data sheet. None if it is not in the table."""
    named = _sheet(name)
    return None if named is None else named[1] * 1e9


def _sheet(name: str) -> tuple[str, float, float] | None:
    return next((sheet for sheet in _SHEETS if re.search(rf"\b{sheet[0]}\b", name)), None)


def _of(gpu: Gpu) -> Speeds:
    named = _sheet(gpu.name)
    if named is None:
        same = _BY_SM.get(max((sm for sm in _BY_SM if sm <= gpu.sm), default=min(_BY_SM)))
        named = next(sheet for sheet in _SHEETS if sheet[0] == same)
    _, bandwidth, operations = named
    return Speeds(_USED[0] * bandwidth * 1e9, _USED[1] * operations * 1e12)
