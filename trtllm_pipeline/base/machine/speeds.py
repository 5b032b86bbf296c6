"""Bandwidth and compute rate of a machine: data sheet values of NVIDIA's GPUs, and the shares of them that were
measured.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

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


_SHEETS: Final[tuple[tuple[str, float, float], ...]] = (
    ("GB300", 8000, 2500),
    ("B300", 7750, 2250),
    ("GB200", 8000, 2500),
    ("B200", 7700, 2250),
    ("GB10", 273, 213),
    ("GH200", 4000, 989),
    ("H200 NVL", 4800, 835),
    ("H200", 4800, 989),
    ("H100 NVL", 3900, 835),
    ("H100 PCIe", 2000, 756),
    ("H100", 3350, 989),
    ("H800", 3350, 989),
    ("H20", 4000, 148),
    ("A100-SXM4-40GB", 1555, 312),
    ("A100-PCIE-40GB", 1555, 312),
    ("A100 80GB PCIe", 1935, 312),
    ("A100", 2039, 312),
    ("A800", 2039, 312),
    ("A40", 696, 149.7),
    ("A30", 933, 165),
    ("A10G", 600, 70),
    ("A10", 600, 125),
    ("L40S", 864, 362.05),
    ("L40", 864, 181),
    ("L20", 864, 119.5),
    ("L4", 300, 121),
    ("RTX PRO 6000", 1792, 467.8),
    ("RTX 6000 Ada", 960, 364),
    ("RTX A6000", 768, 155),
    ("RTX 5090", 1792, 209.5),
    ("RTX 4090", 1008, 165),
    ("RTX 3090", 936, 71),
    ("V100S", 1134, 130),
    ("V100-PCIE", 900, 112),
    ("V100", 900, 125),
    ("T4", 320, 65),
)
"""Words of a GPU's name, GB/s, and TFLOP/s without sparsity and with 32-bit accumulation. The first row whose words are
all in a name applies.

Sources: A100, H100 (SXM, PCIe), V100, A40, A30, A10, A10G, L40S, L40: NVIDIA's data sheets as cited by TensorRT-LLM in
`auto_parallel/cluster_info.py`. L4, L20, H200, H20, A800, NVL, T4, GH200, GB200, RTX A6000, 5090, 4090, 3090: public copies
of data sheets. B300, H800, GB10 (operations as measured there), RTX PRO 6000: `systems/` of NVIDIA's
github.com/ai-dynamo/aiconfigurator. B200: its driver (github.com/pytorch/ao/pull/4002). Not found: RTX 6000 Ada, GB300.
"""
_BY_SM: Final = {
    70: "V100",
    75: "T4",
    80: "A100",
    86: "A10",
    89: "L40S",
    90: "H100",
    100: "B200",
    103: "B300",
    120: "RTX PRO 6000",
    121: "GB10",
}
"""Compute capability -> a GPU that stands for others of it."""
_USED: Final = (0.76, 0.78)
"""Shares of bandwidth and operations that decoding and matrix products achieve. Measured on an H200
(docs/project/quantizing.md).
"""
FP8: Final = 1.64
"""Operations of 8-bit matrix products, relative to 16 bits. Measured there."""
_CPU: Final = Speeds(2e10, 1.6e10, 3.0)
"""Bandwidth of all CPUs together, operations of each CPU. Measured with llama.cpp on two virtual CPUs of an AMD EPYC
(docs/project/quantizing.md).
"""


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
