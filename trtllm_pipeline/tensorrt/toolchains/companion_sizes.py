"""Sizes of a cell's companion models in bytes: from their files, from their recipe, or from the cell's model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import Cell, Json
from trtllm_pipeline.tensorrt.toolchains.model_shape import Shape, kv_bytes_per_token

_DRAFT_VOCABULARY: Final = 32_000
"""Vocabulary of an EAGLE-3 head, in published ones."""
_INPUTS: Final[Mapping[str, tuple[str, ...]]] = {"attn_dense": ("heads", "hidden"), "mlp_4h_to_h": ("inner", "hidden")}
_OUTPUTS: Final[Mapping[str, str]] = {"attn_q": "heads", "attn_k": "kv", "attn_v": "kv"}


def adapter_bytes(companion: Mapping[str, Json], cell: Cell) -> int:
    """Size of a LoRA adapter in 16 bits: `2 * r * (in + out)` for each matrix that it changes, with the rank `r`.

    Source: the paper on LoRA, 4.1. From its files if it is a directory. 0 if neither is known.
    """
    rank, modules = companion.get("max_lora_rank"), companion.get("lora_target_modules")
    if not isinstance(rank, int) or not isinstance(modules, list):
        return _weights_bytes(str(companion["folder"])) if companion.get("folder") else 0
    shape = Shape.of(cell.recipe)
    width = {
        "hidden": shape.hidden_size,
        "inner": shape.intermediate_size,
        "heads": shape.num_attention_heads * shape.head_dim,
        "kv": shape.num_key_value_heads * shape.head_dim,
    }
    ends = [_INPUTS.get(str(module), ("hidden", _OUTPUTS.get(str(module), "inner"))) for module in modules]
    return 2 * rank * shape.num_hidden_layers * sum(width[into] + width[out] for into, out in ends)


def draft_bytes(companion: Mapping[str, Json], cell: Cell) -> int:
    """Size of a draft model: from its files, from its recipe, or for an EAGLE-3 head from the cell's model.

    0 if unknown.
    """
    if companion.get("folder"):
        return _weights_bytes(str(companion["folder"]))
    if (known := _shape(companion)) is not None:
        return 2 * known.weights
    return 2 * _head_weights(Shape.of(cell.recipe)) if cell.settings["speculative"]["method"] == "eagle3" else 0


def draft_kv_bytes_per_token(companion: Mapping[str, Json], cell: Cell) -> int:
    """KV cache of one token of the drafter, in bytes on each GPU: all layers of a draft model, one layer of a head."""
    if (known := _shape(companion)) is not None:
        return kv_bytes_per_token(known, 2.0, cell.attention_tp, 1)
    shape = Shape.of(cell.recipe)
    return kv_bytes_per_token(shape, 2.0, cell.attention_tp, 1) // shape.kv_layers


def _head_weights(shape: Shape) -> int:
    """Weights of an EAGLE-3 head: a fusion of three hidden states, a layer that also reads the embedding, and an output head.

    `3 h² + 2h d (n + 2k) + n d h + 3 h i + V h`. Source: the paper on EAGLE-3, and the published head for Llama 3.1 8B, which
    has 425 million.
    """
    hidden, heads = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    attention = 2 * hidden * (heads + 2 * shape.num_key_value_heads * shape.head_dim) + heads * hidden
    return 3 * hidden**2 + attention + 3 * hidden * shape.intermediate_size + _DRAFT_VOCABULARY * hidden


def _shape(companion: Mapping[str, Json]) -> Shape | None:
    """The shape of a draft model, if its numbers are known."""
    numbers = companion.get("numbers", companion.get("recipe"))
    return Shape.of(numbers) if isinstance(numbers, dict) else None


@lru_cache(maxsize=64)
def _weights_bytes(folder: str) -> int:
    """Size of the weights in a directory of files. Links are followed."""
    try:
        files = [path for pattern in ("*.safetensors", "*.bin") for path in Path(folder).glob(pattern)]
        return sum(path.stat().st_size for path in files)
    except OSError:
        return 0
