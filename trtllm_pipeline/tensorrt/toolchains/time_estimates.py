"""Time of the stages that depends on the model's size, in seconds: bytes over bandwidth, operations over rate.

Pure functions of a cell and a machine. docs/project/estimates.md lists them with the measurements that they were
compared with. The part that is the same for every model is a stage's `expected_s`.
"""

from __future__ import annotations

from typing import Final

from trtllm_pipeline.base import Cell, Machine, speeds
from trtllm_pipeline.models import AS_IS
from trtllm_pipeline.tensorrt.toolchains.model_shape import (
    WEIGHT_BITS,
    Shape,
    computed,
    kv_bytes_per_token,
    weights_bytes,
)

_NETWORK: Final = 50e6
"""Bytes per second from a hub: an assumption."""
READ: Final = 2e9
"""Bytes per second from files to memory, for one reader of the page cache. Measured (docs/project/quantizing.md)."""
_ALL_REDUCE_S: Final = 1e-5
"""Time for a small array, as in decoding, between GPUs of one host. Each layer has two. An assumption."""
_FEWER_BITS: Final = frozenset({"fp8", "int8_sq", "w4a8_awq", "nvfp4"})
"""Precisions whose matrix products use 8 bits or fewer."""


def fetching_s(size_bytes: float) -> float:
    """Seconds to fetch this many bytes from a hub."""
    return size_bytes / _NETWORK


def source_bytes(cell: Cell) -> int:
    """Size of a model's published files: in 16 bits, unless they are quantized."""
    precision = computed(cell) if cell.precision == AS_IS else "bf16"
    shape = Shape.of(cell.recipe)
    return weights_bytes(shape, precision, 1, 1) + shape.tower_bytes


def downloading(cell: Cell, _machine: Machine) -> float:
    """Seconds to fetch a model's files from a hub, or to read those of a local directory."""
    size, source = source_bytes(cell), cell.recipe.get("source")
    return size / READ if isinstance(source, dict) and "local" in source else fetching_s(size)


def token_s(cell: Cell, machine: Machine, requests: int) -> float:
    """Seconds per output token of each of `requests` concurrent requests.

    The larger of one read of weights and KV cache and of the arithmetic, `max(bytes / bandwidth, 2 * weights * requests /
    rate)` (Williams, Waterman and Patterson, Roofline, CACM 52(4), 2009), plus the exchange between GPUs. Pipeline stages
    take turns, so they do not speed up a token.
    """
    shape, has, tp = Shape.of(cell.recipe), speeds.speeds(machine), cell.tp
    read = shape.read_weights(requests) * WEIGHT_BITS[computed(cell)] / 8 / tp
    read += requests * (cell.isl + cell.osl / 2) * kv_bytes_per_token(shape, 2.0, cell.attention_tp, 1) / cell.dp
    computing = 2.0 * shape.computed_weights * requests / tp / has.operations
    exchanged = 2 * shape.num_hidden_layers * _ALL_REDUCE_S if tp > 1 else 0.0
    return max(read / has.bandwidth, computing) + exchanged


def prompt_s(cell: Cell, machine: Machine, tokens: float) -> float:
    """Seconds to read a prompt: `2 * weights * tokens / rate`."""
    has = speeds.speeds(machine)
    operations = has.operations * has.prompts * (speeds.FP8 if machine.gpus and cell.precision in _FEWER_BITS else 1.0)
    return 2.0 * Shape.of(cell.recipe).computed_weights * tokens / cell.tp / operations


def answering_s(cell: Cell, machine: Machine, requests: float, at_once: int, *, prompt: float, answer: int) -> float:
    """Seconds for this many requests, `at_once` of them in flight. The server processes at most a batch at a time."""
    together = max(1, min(at_once, cell.max_batch_size))
    tokens = requests / together * answer * token_s(cell, machine, together)
    return tokens + requests * prompt_s(cell, machine, prompt)
