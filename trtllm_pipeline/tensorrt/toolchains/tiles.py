"""The part of a quantized weight on each rank of tensor parallelism: whole tiles, groups or blocks of its format.

Quantized weights share scales in groups or blocks and are stored in tiles. A rank whose part ends inside one cannot be
converted, exported or loaded. One table covers all routes. Each row names the program that rejects such a part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from trtllm_pipeline.base import Json
from trtllm_pipeline.tensorrt.toolchains.model_shape import Shape


@dataclass(frozen=True, slots=True)
class Tile:
    """Numbers that must divide each rank's part."""

    inputs: int = 1
    """Inputs of the layers that are split along them: attention output and MLP output."""
    outputs: int = 1
    """Outputs of the layers that are split along outputs: queries, keys and values, MLP input."""
    joined: bool = True
    """True if queries, keys and values are one matrix with whole tiles. Otherwise each of the three has whole tiles, and the
    model on one rank may end inside a tile."""
    experts: bool = True
    """True if the rule includes experts. Otherwise their kernels pad the part, or choose smaller groups."""


_GROUPS: Final = 128
"""Weights that share a scale in AWQ and GPTQ, unless a script or the files say otherwise."""
_WEIGHT_ONLY_GROUPS: Final = Tile(inputs=_GROUPS, outputs=64)
"""AWQ and GPTQ by TensorRT-LLM's kernels. The groups: the export of AMMO and Model Optimizer (issue 1636 of TensorRT-LLM for
0.9, 2445 for 0.11 and 0.14), `create_weights` of both AWQ methods in linear.py (PyTorch). The outputs: as for int4_wo."""
ENGINES: Final[Mapping[str, Tile]] = {
    # Issue 729 of TensorRT-LLM: 64 for each rank. Issue 1833 is int8_wo of Qwen2 72B over tp4; issue 566 of tensorrtllm_backend has
    # the words of the assertion for 4 bits, "bytes for rows and cols must be a multiple of 32" (cutlass_preprocessors.cpp).
    # Release notes of 0.13 name padding of such parts in convert_checkpoint.py. No report of an engine made that way was found, and
    # quantize.py and trtllm-build do not pad, so the rule holds for every release and route.
    "int8_wo": Tile(inputs=64, outputs=32),
    "int4_wo": Tile(inputs=64, outputs=64),
    "int4_awq": _WEIGHT_ONLY_GROUPS,
    "w4a8_awq": _WEIGHT_ONLY_GROUPS,
    "awq": _WEIGHT_ONLY_GROUPS,
    "gptq": _WEIGHT_ONLY_GROUPS,
    "nvfp4": Tile(inputs=16),
}
"""By target precision, or by the form of already quantized weights."""
PYTORCH: Final[Mapping[str, Tile]] = {
    "int4_awq": replace(_WEIGHT_ONLY_GROUPS, experts=False),
    "w4a8_awq": replace(_WEIGHT_ONLY_GROUPS, experts=False),
    # `NVFP4LinearMethod` of linear.py asserts it. Kernels of experts pad.
    "nvfp4": Tile(inputs=16, experts=False),
    # `load_weight_shard` cuts the scales into equal numbers of blocks, and `create_weights` of the FP8 block methods
    # counts the blocks of the part. These differ for parts of blocks.
    "fp8_block": Tile(inputs=128, outputs=128, joined=False),
}
SERVERS: Final[Mapping[str, Tile]] = {
    # vLLM and SGLang both: "The input size is not aligned with the quantized weight shape" (issues 5675 and 21695 of
    # vLLM) or
    # `verify_marlin_supports_shape`. Experts get smaller groups (moe_wna16).
    "awq": Tile(inputs=_GROUPS, experts=False),
    "gptq": Tile(inputs=_GROUPS, experts=False),
    "gptq_desc_act": Tile(inputs=_GROUPS, experts=False),
    # "in features size is not multiple of 16", ModelOptNvFp4LinearMethod.
    "nvfp4": Tile(inputs=16, experts=False),
    # `validate_fp8_block_shape`. For experts "The output_size of gate's and up's weight" (issue 25292 of vLLM). Pull request 52915,
    # which pads, was open in August 2026.
    "fp8_block": Tile(inputs=128, outputs=128, joined=False),
}


@dataclass(frozen=True, slots=True)
class Widths:
    """The widths of a model that tensor parallelism splits."""

    heads: int
    kv_heads: int
    head_dim: int
    dense: int = 0
    """Width of an MLP. 0 if all layers have experts instead."""
    experts: int = 0
    """Width of an expert. 0 without experts."""
    shared: int = 0
    """Total width of the experts that every token uses. 0 without shared experts."""
    latent: bool = False
    """True if keys and values come from a latent vector, so that only heads are split."""

    @staticmethod
    def of(shape: Shape) -> Widths:
        """The widths of a model's architecture."""
        some_dense = not shape.num_experts or shape.first_k_dense_replace or shape.interleave_moe_layer_step
        experts = shape.expert_size if shape.num_experts else 0
        return Widths(
            heads=shape.num_attention_heads,
            kv_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            dense=shape.intermediate_size if some_dense else 0,
            experts=experts,
            shared=experts * (shape.n_shared_experts or 0),
            latent=shape.kv_lora_rank is not None,
        )


def uneven(heads: int, kv_heads: int, tp: int) -> str | None:
    """The heads of a model that cannot be divided over `tp` ranks, in words, or None."""
    if heads % tp:
        return f"tp{tp}: {heads} attention heads cannot be split evenly over {tp} GPUs"
    if kv_heads % tp and tp % kv_heads:
        return f"tp{tp}: {kv_heads} KV heads can neither be split over {tp} GPUs nor copied to them evenly"
    return None


def cut(tile: Tile, widths: Widths, tp: int, ep: int = 1, dp: int = 1, *, precision: str) -> str | None:
    """The width of a model whose part on each of `tp` ranks ends within a tile, and the largest smaller tp that fits,
    or None.

    `ep` ranks share whole experts; each of `dp` groups of them has all of the attention. Source: see the tables.
    """
    for name, width, ranks, multiple in _parts(tile, widths, tp, ep, dp):
        if width % (ranks * multiple):
            less = next((each for each in range(tp - 1, 0, -1) if _fits(tile, widths, each, ep, dp)), None)
            return (
                f"tp{tp}: {name} {width} gives each GPU {width / ranks:.8g}, which must be a multiple of {multiple} for "
                f"{precision}; {'no smaller tp' if less is None else f'tp{less}'} fits"
            )
    return None


def _fits(tile: Tile, widths: Widths, tp: int, ep: int, dp: int) -> bool:
    if tp % ep or tp % dp or uneven(widths.heads, widths.kv_heads, tp // dp) is not None:
        return False
    return all(width % (ranks * multiple) == 0 for _, width, ranks, multiple in _parts(tile, widths, tp, ep, dp))


def _parts(tile: Tile, widths: Widths, tp: int, ep: int, dp: int) -> Iterator[tuple[str, int, int, int]]:
    """Name and size of each width, the number of ranks that split it, and the divisor of each rank's part."""
    if tp == 1 and not tile.joined:
        return
    both = math.lcm(tile.inputs, tile.outputs)
    if widths.dense:
        yield "intermediate_size", widths.dense, tp, both
    if widths.experts and tile.experts:
        yield "width of an expert", widths.experts, max(tp // ep, 1), both
    if widths.shared:
        yield "width of the shared experts", widths.shared, tp, both
    tp //= dp
    if tp == 1 and not tile.joined:
        return
    yield "attention output", widths.heads * widths.head_dim, tp, tile.inputs
    if widths.latent:
        return
    copied = max(widths.kv_heads, tp) * widths.head_dim
    if tile.joined:
        yield "queries, keys and values", widths.heads * widths.head_dim + 2 * copied, tp, tile.outputs
    else:
        yield "keys", copied, tp, tile.outputs


def grouped(tile: Tile, size: Json) -> Tile:
    """`tile` with another group size, from a script's option or the files. -1: all inputs of a layer are one group."""
    if not isinstance(size, int) or isinstance(size, bool):
        return tile
    return replace(tile, inputs=max(size, 1))
