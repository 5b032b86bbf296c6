"""Models whose layers keep a recurrent state in place of a KV cache: Mamba-2 (Nemotron-H) and gated DeltaNet (Qwen3.5)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest

from tests.helpers.trtllm_cells import PYTORCH, cell, machine
from trtllm_pipeline.base.domain import Cell
from trtllm_pipeline.models.files.model_files import hybrid_layers, shared_experts
from trtllm_pipeline.orchestrate.matrix.recipe_files import load_recipe, recipes_folder
from trtllm_pipeline.tensorrt.toolchains.model_shape import (
    Shape,
    attention_copies,
    kv_bytes_per_token,
    least_bytes,
    state_bytes,
)
from trtllm_pipeline.tensorrt.trtllm import needs

MAMBA: Final[dict[str, Any]] = {
    "num_hidden_layers": 6,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
}
DELTA: Final[dict[str, Any]] = {
    "num_hidden_layers": 8,
    "linear_num_value_heads": 64,
    "linear_value_head_dim": 128,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_conv_kernel_dim": 4,
}
NEMOTRON_STATE: Final = 2 * (64 * 64 + 2 * 8 * 128) * 3 + 4 * 64 * 64 * 128
"""Bytes of one layer: three steps of a convolution in 16 bits, and a matrix for each head in 32."""


def of(name: str) -> dict[str, Any]:
    return load_recipe(recipes_folder() / f"{name}.yaml").model_dump(mode="json")


def served(name: str, *, batch: int, osl: int = 64, tp: int = 1) -> needs.ServerParts:
    asked: Cell = cell("bf16", toolchain=PYTORCH, batch=batch, osl=osl, tp=tp)
    return needs.served(replace(asked, recipe={**asked.recipe, **of(name)}), machine("1.3.0rc29", gpus=8))


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({**MAMBA, "hybrid_override_pattern": "MEM*E-"}, {"attention_layers": 1, "expert_layers": 2}),
        (
            {**MAMBA, "layers_block_type": ["mamba", "moe", "mamba", "attention", "moe", "mlp"]},
            {"attention_layers": 1, "expert_layers": 2},
        ),
    ],
)
def test_a_pattern_of_blocks_is_counted(config: dict[str, Any], layers: dict[str, int]) -> None:
    recurrent = {"layers": 2, "heads": 64, "head_dim": 64, "state_size": 128, "groups": 8, "conv_kernel": 4}
    assert hybrid_layers(config) == {**layers, "recurrent": recurrent}


@pytest.mark.parametrize(
    "kinds",
    [
        {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2},
        {"full_attention_interval": 4},
    ],
)
def test_linear_attention_is_counted(kinds: dict[str, Any]) -> None:
    recurrent = {"layers": 6, "heads": 64, "head_dim": 128, "state_size": 128, "groups": 16, "conv_kernel": 4}
    assert hybrid_layers({**DELTA, **kinds}) == {"attention_layers": 2, "recurrent": recurrent}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
        {"num_hidden_layers": 4, "hybrid_override_pattern": "M*M*"},
    ],
)
def test_other_models_have_no_such_layers(config: dict[str, Any]) -> None:
    assert hybrid_layers(config) == {}


def test_a_wide_shared_expert_counts_as_several() -> None:
    assert shared_experts({"moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712}) == 2
    assert shared_experts({"moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024}) == 1
    assert shared_experts({"moe_intermediate_size": 1024}) is None


def test_only_attention_has_a_cache_and_the_state_does_not_grow() -> None:
    shape = Shape.of(of("nemotron-3-nano-30b-a3b"))
    assert kv_bytes_per_token(shape, 2.0, 1, 1) == 2 * 6 * 2 * 128 * 2
    assert kv_bytes_per_token(shape, 2.0, 1, 4) == 2 * 2 * 2 * 128 * 2, "the stage with most of six layers"
    assert state_bytes(shape, 1, 1) == 23 * NEMOTRON_STATE
    assert state_bytes(shape, 2, 1) == 23 * (NEMOTRON_STATE // 2)
    assert state_bytes(shape, 1, 4) == 6 * NEMOTRON_STATE
    short, long = (
        least_bytes(shape, precision="bf16", kv=None, tp=1, pp=1, tokens=tokens)[1] for tokens in (1000, 3000)
    )
    assert long - short == 2000 * kv_bytes_per_token(shape, 2.0, 1, 1)
    assert short == 1000 * kv_bytes_per_token(shape, 2.0, 1, 1) + state_bytes(shape, 1, 1)


def test_data_parallel_attention_copies_recurrent_layers() -> None:
    shape = Shape.of(of("nemotron-3-nano-30b-a3b"))
    recurrent = 23 * 2688 * (3 * 64 * 64 + 2 * 8 * 128 + 64)
    assert attention_copies(shape, 8, 8) == (6 * shape.attention_weights + recurrent) * 7 / 8


def test_a_server_keeps_a_state_for_each_request_at_a_time() -> None:
    one, eight = served("nemotron-3-nano-30b-a3b", batch=1), served("nemotron-3-nano-30b-a3b", batch=8)
    assert (one.state, eight.state) == (23 * NEMOTRON_STATE, 8 * 23 * NEMOTRON_STATE)
    assert eight.fixed - one.fixed >= 7 * 23 * NEMOTRON_STATE
    assert served("nemotron-3-nano-30b-a3b", batch=8, osl=8192).state == eight.state
    assert served("nemotron-3-nano-30b-a3b", batch=8, tp=2).state == 8 * 23 * (NEMOTRON_STATE // 2)
    assert served("qwen3-8b", batch=8).state == 0


def test_layers_with_both_an_expert_and_attention_keep_their_experts() -> None:
    shape = Shape.of(of("qwen3.5-397b-a17b"))
    assert (shape.kv_layers, shape.mixers, shape.mixture_layers, shape.apart) == (15, 60, 60, False)
    assert kv_bytes_per_token(shape, 2.0, 1, 1) == 2 * 15 * 2 * 256 * 2
