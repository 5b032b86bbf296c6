"""What tensor parallelism leaves each rank of quantized weights, on every route, against layouts whose outcome is reported.

Numbers of config.json and outcomes: issues 729, 1636, 1833 and 2445 of TensorRT-LLM, 566 of tensorrtllm_backend, 5675, 21695 and 25292
of vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest

from tests.helpers.trtllm_cells import ENGINES, PYTORCH, cell, infeasible
from trtllm_pipeline.base.domain import Cell
from trtllm_pipeline.base.machine.assume import parse
from trtllm_pipeline.models.files.quantization import quantization
from trtllm_pipeline.tensorrt.toolchains import tiles

QWEN2_72B: Final[dict[str, Any]] = {
    "family": "qwen2",
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "parameters": 72_706_203_648,
}
LLAMA_2_7B: Final[dict[str, Any]] = {"num_key_value_heads": 32, "intermediate_size": 11008, "parameters": 6_738_415_616}
LLAMA_2_13B: Final[dict[str, Any]] = {
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "parameters": 13_015_864_320,
}
LLAMA_3_8B: Final[dict[str, Any]] = {}
QWEN3_30B: Final[dict[str, Any]] = {
    "family": "qwen3_moe",
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "parameters": 30_532_122_624,
}
TPS: Final = (1, 2, 4, 8)


def asked(precision: str, recipe: Mapping[str, Any], tp: int, toolchain: str = ENGINES, **more: Any) -> Cell:
    return cell(precision, tp=tp, toolchain=toolchain, recipe=recipe, **more)


def working(
    precision: str, recipe: Mapping[str, Any], release: str, toolchain: str = ENGINES, more: str = "", **other: Any
) -> list[int]:
    """The tp of TPS with which no rank gets a part of a tile. Another reason is a fault of the test."""
    machine = parse(f"tensorrt_llm=={release},sm=90,gpus=8,gpu_memory_gib=640{more}")
    said = {tp: infeasible(asked(precision, recipe, tp, toolchain, **other), machine) for tp in TPS}
    assert all(words is None or "which must be a multiple of" in words for words in said.values()), said
    return [tp for tp, words in said.items() if words is None]


@pytest.mark.parametrize("release", ["0.10.0", "0.16.0", "1.2.0"])
@pytest.mark.parametrize("cache", [None, "int8"])
@pytest.mark.parametrize("precision", ["int8_wo", "int4_wo"])
def test_weight_only_takes_64_of_a_rank(precision: str, cache: str | None, release: str) -> None:
    settings = {"quantize.kv_cache_precision": cache}
    assert working(precision, QWEN2_72B, release, settings=settings) == [1, 2]
    assert working(precision, LLAMA_2_7B, release, settings=settings) == [1, 2, 4]
    assert working(precision, LLAMA_3_8B, release, settings=settings) == [1, 2, 4, 8]


@pytest.mark.parametrize("more", ["", ",examples=no,model_optimizer=0.47"])
@pytest.mark.parametrize("release", ["0.11.0", "0.14.0", "1.2.0"])
@pytest.mark.parametrize("precision", ["int4_awq", "w4a8_awq"])
def test_awq_takes_whole_groups(precision: str, release: str, more: str) -> None:
    assert working(precision, QWEN2_72B, release, more=more) == [1]
    assert working(precision, LLAMA_2_7B, release, more=more) == [1, 2]
    assert working(precision, LLAMA_2_13B, release, more=more) == [1, 2, 4]
    assert working(precision, LLAMA_3_8B, release, more=more) == [1, 2, 4, 8]


@pytest.mark.parametrize("name", ["awq_block_size", "--awq_block_size"])
def test_smaller_groups_are_split_further(name: str) -> None:
    settings = {"quantize.options": {name: 64}}
    assert working("int4_awq", QWEN2_72B, "0.14.0", settings=settings) == [1, 2]
    assert working("int4_awq", LLAMA_2_7B, "0.14.0", settings=settings) == [1, 2, 4]


@pytest.mark.parametrize(
    ("precision", "tp", "toolchain", "words"),
    [
        ("int8_wo", 8, ENGINES, "gives each GPU 3696, which must be a multiple of 64 for int8_wo; tp2 fits"),
        (
            "int4_awq",
            2,
            ENGINES,
            "multiple of 128 for int4_awq; tp1 fits, and tp2 with settings.quantize.options.awq_block_size: 64",
        ),
        ("int4_awq", 4, ENGINES, "gives each GPU 7392, which must be a multiple of 128 for int4_awq; tp1 fits"),
        ("int4_awq", 2, PYTORCH, "multiple of 128 for int4_awq; tp1 fits"),
    ],
)
def test_the_reason_names_what_fits(precision: str, tp: int, toolchain: str, words: str) -> None:
    said = infeasible(asked(precision, QWEN2_72B, tp, toolchain), parse("tensorrt_llm==1.2.0,sm=90,gpus=8"))
    assert str(said).endswith(words), said


@pytest.mark.parametrize("form", ["awq", "gptq"])
def test_files_in_groups_are_split_by_their_own(form: str) -> None:
    for size, fits in ((None, [1]), (128, [1]), (64, [1, 2])):
        recipe = {**QWEN2_72B, "quantization": form, "quantization_group_size": size}
        assert working("as_is", recipe, "0.17.0") == fits
        for server in ("vllm", "sglang"):
            assert working("as_is", recipe, "1.2.0", server) == fits
    whole = {**QWEN2_72B, "quantization": form, "quantization_group_size": -1}
    assert working("as_is", whole, "1.2.0", "vllm") == list(TPS)


@pytest.mark.parametrize("toolchain", [PYTORCH, "vllm", "sglang"])
def test_files_in_fp8_blocks_are_split_in_whole_ones(toolchain: str) -> None:
    blocks = {"quantization": "fp8_block"}
    assert working("as_is", {**LLAMA_2_7B, **blocks}, "1.2.0", toolchain) == [1, 2]
    assert working("as_is", {**QWEN3_30B, **blocks}, "1.2.0", toolchain) == [1, 2]
    small_heads = {**blocks, "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8}
    assert working("as_is", small_heads, "1.2.0", toolchain) == [1, 2, 4], "64 keys are half a block"


def test_whole_experts_are_not_split() -> None:
    experts = {**QWEN3_30B, "quantization": "fp8_block"}
    options = {"openai.options": {"enable_expert_parallel": True}}
    assert working("as_is", experts, "1.2.0", "vllm", settings=options) == list(TPS)
    machine = parse("tensorrt_llm==1.2.0,sm=90,gpus=8,gpu_memory_gib=640")
    assert infeasible(asked("as_is", experts, 8, PYTORCH, ep=8), machine) is None
    assert infeasible(asked("int8_wo", QWEN3_30B, 8, ep=8), machine) is None
    assert "width of an expert 768 gives each GPU 96" in str(infeasible(asked("int8_wo", QWEN3_30B, 8), machine))


def test_a_latent_cache_has_no_heads_to_split() -> None:
    """DeepSeek V3 over two hosts."""
    recipe = {
        "family": "deepseek_v3",
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1536,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "parameters": 671_026_419_200,
        "quantization": "fp8_block",
    }
    for toolchain in (PYTORCH, "vllm", "sglang"):
        machine = parse("tensorrt_llm==1.2.0,sm=90,gpus=32,gpu_memory_gib=640")
        assert infeasible(asked("as_is", recipe, 8, toolchain, pp=2), machine) is None
        assert infeasible(asked("as_is", recipe, 16, toolchain), machine) is None
        part = "expert 2048 gives each GPU 64" if toolchain == PYTORCH else "intermediate_size 18432 gives each GPU 576"
        assert part in str(infeasible(asked("as_is", recipe, 32, toolchain), machine))


@pytest.mark.parametrize(
    ("toolchain", "precision", "form"),
    [
        (ENGINES, "fp8", None),
        (ENGINES, "int8_sq", None),
        (ENGINES, "fp16", None),
        (PYTORCH, "fp8", None),
        (PYTORCH, "as_is", "mxfp4"),
        ("vllm", "fp8", None),
        ("vllm", "as_is", "fp8"),
    ],
)
def test_formats_without_tiles_are_split_freely(toolchain: str, precision: str, form: str | None) -> None:
    recipe = {**QWEN2_72B, "quantization": form}
    assert working(precision, recipe, "1.2.0", toolchain) == list(TPS)


def test_the_size_of_groups_is_read_from_the_files() -> None:
    said = {
        "awq": {"quant_method": "awq", "bits": 4, "group_size": 64},
        "gptq": {"quant_method": "gptq", "bits": 4, "group_size": -1},
        "int4_awq": {"quant_method": "awq", "bits": 4, "q_group_size": 128},
    }
    sizes = [quantization({"config.json": {"quantization_config": found}}) for found in said.values()]
    assert [found.group_size for found in sizes if found is not None] == [64, -1, 128]
    own = quantization({"hf_quant_config.json": {"quantization": {"quant_algo": "W4A16_AWQ", "group_size": 128}}})
    assert own is not None
    assert own.group_size == 128


def test_every_row_is_of_a_format_that_exists() -> None:
    assert tiles.grouped(tiles.ENGINES["awq"], None) == tiles.ENGINES["awq"]
    assert {*tiles.PYTORCH, *tiles.SERVERS, *tiles.ENGINES} <= {
        *("int8_wo", "int4_wo", "int4_awq", "w4a8_awq", "awq", "gptq", "gptq_desc_act", "nvfp4", "fp8_block"),
    }
