"""How long a stage takes of a model's size, in seconds: bytes over bandwidth, operations over rate.

Pure functions of a cell and a machine; docs/memory.md has them in a table, with what they were compared with. What is the same
for every model is a stage's `expected_s`.
"""

from __future__ import annotations

from typing import Final

from trtllm_pipeline.base import FP8, Cell, Machine, speeds
from trtllm_pipeline.models import AS_IS
from trtllm_pipeline.tensorrt.toolchains.model_shape import (
    Shape,
    computed,
    kv_bytes_per_token,
    weight_bits,
    weights_bytes,
)

_NETWORK: Final = 50e6
"""Bytes a second from a hub: an assumption."""
READ: Final = 2e9
"""Bytes a second from files to memory, as one reader gets them from the page cache. Measured (docs/performance.md)."""
_ALL_REDUCE_S: Final = 1e-5
"""Of an array as small as decoding's, between GPUs of one host; there are two in each layer: an assumption."""
_FEWER_BITS: Final = frozenset({"fp8", "int8_sq", "w4a8_awq", "nvfp4"})
"""Precisions whose matrix products are of 8 bits or fewer."""


def fetching_s(size_bytes: float) -> float:
    """So many bytes from a hub."""
    return size_bytes / _NETWORK


def source_bytes(cell: Cell) -> int:
    """A model's files as its owner has them: in 16 bits, unless they are quantized."""
    precision = computed(cell.precision, cell.recipe) if cell.precision == AS_IS else "bf16"
    shape = Shape.of(cell.recipe)
    return weights_bytes(shape, precision, 1, 1) + shape.tower_bytes


def downloading(cell: Cell, _machine: Machine) -> float:
    """A model's files from a hub; those of a local directory are read."""
    size, source = source_bytes(cell), cell.recipe.get("source")
    return size / READ if isinstance(source, dict) and "local" in source else fetching_s(size)


def token_s(cell: Cell, machine: Machine, requests: int) -> float:
    """One output token of each of so many requests at the same time.

    The larger of reading weights and KV cache once and of the arithmetic, `max(bytes / bandwidth, 2 * weights * requests /
    rate)` (Williams, Waterman and Patterson, Roofline, CACM 52(4), 2009), and what GPUs tell each other. Pipeline stages
    take turns, so they make no token faster.
    """
    shape, has, tp = Shape.of(cell.recipe), speeds(machine), cell.tp
    read = shape.read_weights(requests) * weight_bits(computed(cell.precision, cell.recipe)) / 8 / tp
    read += requests * (cell.isl + cell.osl / 2) * kv_bytes_per_token(shape, 2.0, tp, 1)
    computing = 2.0 * shape.computed_weights * requests / tp / has.operations
    exchanged = 2 * shape.num_hidden_layers * _ALL_REDUCE_S if tp > 1 else 0.0
    return max(read / has.bandwidth, computing) + exchanged


def prompt_s(cell: Cell, machine: Machine, tokens: float) -> float:
    """Reading a prompt: `2 * weights * tokens / rate`."""
    has = speeds(machine)
    operations = has.operations * has.prompts * (FP8 if machine.gpus and cell.precision in _FEWER_BITS else 1.0)
    return 2.0 * Shape.of(cell.recipe).computed_weights * tokens / cell.tp / operations


def answering_s(cell: Cell, machine: Machine, requests: float, at_once: int, *, prompt: float, answer: int) -> float:
    """So many requests, `at_once` of them in flight, of which the server works on as many as its batch has."""
    together = max(1, min(at_once, cell.max_batch_size))
    tokens = requests / together * answer * token_s(cell, machine, together)
    return tokens + requests * prompt_s(cell, machine, prompt)
