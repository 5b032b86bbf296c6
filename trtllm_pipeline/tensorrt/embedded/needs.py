"""Memory and disk needs of the embedded toolchain's stages: pure functions of a model's numbers and a cell.

The constants were measured with SmolLM2-135M and a model of 182 million random weights (docs/project/estimates.md).
"""

from __future__ import annotations

from typing import Final

from trtllm_pipeline.base import Cell, Machine, Needs
from trtllm_pipeline.tensorrt.embedded.params import CHUNK_TOKENS, CONTEXT_STEP
from trtllm_pipeline.tensorrt.toolchains.model_shape import Shape, kv_bytes_per_token

_BITS: Final = {"fp32": (32.0, 32.0), "fp16": (16.0, 16.0), "bf16": (16.0, 16.0), "int8_wo": (8.5, 8.5)}
"""Precision -> bits of a weight of the layers, and of embedding and head. A block of 32 has a 16-bit scale."""
_FOUR_BITS: Final = (4.5, 8.5)
"""The same of all other precisions."""
_CONVERTER: Final = 55_000_000
"""Python with numpy and gguf."""
_CONVERTED_TOKEN: Final = 1060
"""An entry of the vocabulary in Python's own objects."""
_LOADED: Final = 6
"""Bytes of each weight of the tensor that is converted: as stored, and as float32."""
_ENCODED: Final = {"fp16": 2, "bf16": 6}
"""Additional bytes for the converted form. Blocks are encoded a few rows at a time."""
_RUNTIME: Final = 41_000_000
"""Python with llama.cpp, before weights."""
_VOCABULARY: Final = 114
"""Bytes of an entry of the vocabulary in llama.cpp."""
_SERVER: Final = 205_000_000
"""Triton and its Python models, before the engine and the tokenizer."""
_SERVED_TOKEN: Final = 3000
"""An entry of the vocabulary in the tokenizers of all models."""
_SERVER_SHARED: Final = 4 << 20
"""Part of /dev/shm: a region for each Python model, which grows with its tensors."""


def weights_bytes(shape: Shape, precision: str) -> int:
    """The GGUF file, in bytes: `(layers * bits + tables * bits of tables) / 8`."""
    layer_bits, table_bits = _BITS.get(precision, _FOUR_BITS)
    tables = shape.weights - shape.layer_weights
    return int((shape.layer_weights * layer_bits + tables * table_bits) / 8)


def runtime_bytes(cell: Cell) -> int:
    """A loaded engine, in bytes, without its Python process: weights, KV cache, logits, vocabulary.

    4-bit weights of the layers are in memory twice: llama.cpp makes a copy in its kernels' order.
    """
    shape = Shape.of(cell.recipe)
    repacked = shape.layer_weights * _FOUR_BITS[0] / 8 if cell.precision not in _BITS else 0.0
    slot = -(-(cell.isl + cell.osl) // CONTEXT_STEP) * CONTEXT_STEP
    cache = kv_bytes_per_token(shape, 2.0, 1, 1) * slot * cell.max_batch_size
    logits = 4 * shape.vocab_size * max(CHUNK_TOKENS, 2 * cell.max_batch_size)
    return int(weights_bytes(shape, cell.precision) + repacked + cache + logits + _VOCABULARY * shape.vocab_size)


def converting(cell: Cell, _machine: Machine) -> Needs:
    """The largest tensor two or three times, and the vocabulary."""
    shape = Shape.of(cell.recipe)
    hidden, inner = shape.hidden_size, shape.intermediate_size
    table = shape.vocab_size * hidden
    work = max(table, hidden * inner) * (_LOADED + _ENCODED.get(cell.precision, 0))
    host = _CONVERTER + _CONVERTED_TOKEN * shape.vocab_size + work
    return Needs(host=host, leaves=weights_bytes(shape, cell.precision))


def building(cell: Cell, _machine: Machine) -> Needs:
    """The engine loaded once. Its weights are the checkpoint's, linked."""
    return Needs(host=_RUNTIME + runtime_bytes(cell))


def serving(cell: Cell, _machine: Machine) -> Needs:
    """Triton, its Python models, and the engine in one of them."""
    tokenizers = _SERVED_TOKEN * Shape.of(cell.recipe).vocab_size
    return Needs(host=_SERVER + tokenizers + runtime_bytes(cell), shared=_SERVER_SHARED)
