from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.helpers import trtllm_cells
from trtllm_pipeline.base.domain import Cell, Json
from trtllm_pipeline.base.machine.assume import parse
from trtllm_pipeline.base.machine.model import Gpu, Machine, TensorRTLLM
from trtllm_pipeline.tensorrt.toolchains import catalog as toolchains
from trtllm_pipeline.tensorrt.toolchains import model_shape
from trtllm_pipeline.tensorrt.toolchains.model_shape import Shape
from trtllm_pipeline.tensorrt.trtllm.rules import infeasible

GIB = 1 << 30
QWEN2_7B: dict[str, Json] = {
    "family": "qwen2",
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "parameters": 7_615_616_512,
}
LLAMA_70B: dict[str, Json] = {
    **QWEN2_7B,
    "family": "llama",
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "parameters": 70_553_706_496,
}


def _machine(
    release: str = "1.0.0",
    sm: int = 90,
    gpus: int = 8,
    gib: int = 80,
    build: str | None = "trtllm-build",
    examples: str | None = "examples",
) -> Machine:
    return Machine(
        cpus=8,
        cpu="test",
        gpus=tuple(Gpu(index, f"GPU-{index}", "test", gib * GIB, sm) for index in range(gpus)),
        tensorrt_llm=TensorRTLLM(release, build=build, examples=examples),
    )


def _cell(
    model: dict[str, Json] = QWEN2_7B,
    *,
    precision: str = "fp16",
    isl: int = 2048,
    osl: int = 1024,
    kv: str | None = None,
    chunked: bool | None = None,
    **changed: Any,
) -> Cell:
    settings = {f"build.{name}": value for name, value in changed.pop("build", {}).items()}
    settings |= {"quantize.kv_cache_precision": kv, "quantize.options": changed.pop("script_options", {})}
    settings |= {"repository.enable_chunked_context": chunked, **changed.pop("settings", {})}
    recipe = {**model, **changed.pop("recipe", {})}
    return replace(trtllm_cells.cell(precision, osl=osl, settings=settings, **changed), isl=isl, recipe=recipe)


def _pytorch(**changed: Any) -> Cell:
    return _cell(toolchain="tensorrt_llm_pytorch", **changed)


@pytest.mark.parametrize("release", ["0.9.0", "0.12.0", "0.16.0", "1.0.0", "1.2.1", "1.3.0rc3"])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp8", "int8_wo", "int4_wo", "int8_sq", "int4_awq", "w4a8_awq"])
def test_what_works_on_hopper(release: str, precision: str) -> None:
    assert infeasible(_cell(precision=precision, tp=4), _machine(release)) is None


@pytest.mark.parametrize("precision", ["fp16", "fp8", "int4_awq"])
def test_what_works_with_pytorch(precision: str) -> None:
    assert infeasible(_pytorch(precision=precision, tp=4), _machine("1.3.0", build=None)) is None


@pytest.mark.parametrize(
    ("cell", "machine", "expected"),
    [
        (_cell(), _machine("1.3.0", build=None), "TensorRT-LLM 1.3.0 here has no trtllm-build"),
        (_cell(), _machine("0.7.1"), "engines are built this way from 0.8 on"),
        (_cell(), _machine("0.8.0"), "family qwen2: TensorRT-LLM converts it from 0.9 on, this is 0.8.0"),
        (_cell(recipe={"family": "gpt2"}), _machine("0.8.0"), "family gpt2: TensorRT-LLM converts it from 0.9 on"),
        (
            _cell(recipe={"family": "qwen3"}),
            _machine("0.19.0"),
            "family qwen3: TensorRT-LLM converts it from 0.20 on",
        ),
        (_cell(recipe={"family": "mamba"}), _machine(), "family mamba: no known script of TensorRT-LLM"),
        (_cell(recipe={"family": "phi3"}, tp=2), _machine("0.10.0"), "tp2: phi3 can be split over GPUs from 0.11 on"),
        (_cell(recipe={"family": "phi3"}, pp=2), _machine(), "pp2: TensorRT-LLM has no pipeline stages for phi3"),
        (_cell(recipe={"family": "gpt2"}, pp=2), _machine("0.9.0"), "pp2: gpt2 has pipeline stages from 0.10 on"),
        (_cell(precision="nvfp4"), _machine("0.16.0", sm=100), "precision nvfp4: TensorRT-LLM 0.16.0 makes fp8"),
        (_cell(precision="nvfp4"), _machine("1.0.0"), "precision nvfp4 needs SM 100 or newer, this is SM 90"),
        (_cell(precision="fp8"), _machine(sm=80), "precision fp8 needs SM 89 or newer, this is SM 80"),
        (_cell(precision="w4a8_awq"), _machine(sm=80), "precision w4a8_awq needs SM 89 or newer"),
        (_cell(precision="w4a8_awq"), _machine("0.9.0", sm=89), "TensorRT-LLM supports it on SM 89 from 0.10 on"),
        (_cell(precision="bf16"), _machine("0.12.0", sm=75), "precision bf16 needs SM 80 or newer"),
        (_cell(kv="fp8"), _machine(sm=80), "kv_cache_precision fp8 needs SM 89 or newer"),
        (
            _pytorch(settings={"repository.llm_args": {"kv_cache_config": {"dtype": "fp8"}}}),
            _machine("1.3.0", sm=80, build=None),
            "settings.repository.llm_args.kv_cache_config.dtype fp8 needs SM 89 or newer",
        ),
        (_cell(precision="int8_wo"), _machine(sm=100), "precision int8_wo: TensorRT-LLM refuses it on SM 100"),
        (_cell(precision="int8_sq"), _machine(sm=103), "precision int8_sq: TensorRT-LLM refuses it on SM 100"),
        (_cell(kv="int8"), _machine(sm=100), "kv_cache_precision int8: TensorRT-LLM refuses it on SM 100"),
        (_cell(), _machine("0.16.0", sm=100), "SM 100: TensorRT-LLM supports it from 0.17 on, this is 0.16.0"),
        (
            _cell(),
            _machine("0.16.0", sm=70),
            (
                "SM 70: TensorRT-LLM does not support it from 0.16 on, this is 0.16.0; releases 0.9 to 0.15 convert qwen2 and "
                "support it; use a GPU of SM 75 or newer"
            ),
        ),
        (_cell(recipe={"family": "qwen3"}), _machine("1.0.0", sm=70), "this is 1.0.0; use a GPU of SM 75 or newer"),
        (_cell(kv="bf16"), _machine(), "kv_cache_precision bf16: an unquantized cache is float16"),
        (_cell(tp=8), _machine(), "tp8: 28 attention heads cannot be split evenly over 8 GPUs"),
        (_cell(LLAMA_70B, pp=3, tp=2), _machine(), "pp3: 80 layers cannot be split evenly into 3 stages"),
        (_cell(tp=7), _machine(), "tp7: 4 KV heads can neither be split over 7 GPUs nor copied to them evenly"),
        (_cell(tp=4, pp=4), _machine(), "tp4pp4 needs 16 GPUs, this machine has 8"),
        (_cell(isl=32000, osl=1000), _machine(), "lengths 32000,1000 are 33000 tokens, model has 32768 positions"),
        (_cell(build={"max_num_tokens": 1024}), _machine(), "max_num_tokens 1024 is less than a prompt of 2048"),
        (_cell(build={"max_num_tokens": 1024}, chunked=False), _machine(), "enable_chunked_context: true would split"),
        (
            _cell(kv="int8", build={"max_num_tokens": 1024}, chunked=True),
            _machine(),
            "use_paged_context_fmha, which is off for fp16 with int8 cache here",
        ),
        (
            _cell(build={"max_num_tokens": 1024, "use_paged_context_fmha": "disable"}, chunked=True),
            _machine(),
            "enable_chunked_context: it needs use_paged_context_fmha, which is off by settings.build.use_paged_context_fmha",
        ),
        (
            _cell(script_options={"awq_block_size": 64}),
            _machine(),
            "options.awq_block_size is an option of quantize.py, but convert_checkpoint.py creates this cell's checkpoint; use an `override`",
        ),
        (
            _cell(precision="fp8", script_options={"use_parallel_embedding": True}),
            _machine(),
            "options.use_parallel_embedding is an option of convert_checkpoint.py, but quantize.py creates this cell",
        ),
        (_cell(script_options={"use_parallel_embeding": True}), _machine(), "did you mean 'use_parallel_embedding'?"),
        (
            _cell(build={"multi_block_mode": "enable"}),
            _machine(),
            "settings.build.multi_block_mode: trtllm-build 1.0.0",
        ),
        (_cell(build={"max_seq_len": 8}), _machine(), "settings.build.max_seq_len: is set from the axis lengths"),
        (_cell(build={"use_fp8_context_fmha": "enable"}), _machine(), "this is fp16 with no quantized cache on SM 90"),
        (
            _cell(precision="fp8", build={"use_fp8_context_fmha": True}),
            _machine("0.11.0", sm=89),
            "an FP8 cache on SM 90; this is fp8 with fp8 cache on SM 89",
        ),
        (_cell(LLAMA_70B), _machine(), "needs 132.4 GiB on each GPU (131.4 of weights, 0.9 of KV cache"),
        (
            _cell(recipe={"precisions": {"tensorrt_llm": ["fp8"]}}),
            _machine(),
            "precision fp16: the recipe of model lists for tensorrt_llm: fp8",
        ),
        (_cell(recipe={"precisions": []}), _machine(), "the recipe of model lists for tensorrt_llm: none"),
        (
            _cell(recipe={"releases": {"tensorrt_llm": ">=0.10,<1.0"}}),
            _machine("0.9.0"),
            "model: TensorRT-LLM supports it in releases >=0.10,<1.0, this is 0.9.0",
        ),
        (
            _cell(precision="fp8", recipe={"precision_releases": {"tensorrt_llm": {"fp8": ">=0.11"}}}),
            _machine("0.10.0"),
            "precision fp8: works with model in releases >=0.11, this is 0.10.0",
        ),
        (
            _cell(precision="fp8", script_options={"calib_size": 8}),
            _machine(),
            "settings.quantize.options.calib_size: is set from settings.quantize.calibration.samples",
        ),
        (
            _cell(script_options={"use_embedding_sharing": True}),
            _machine("0.16.0"),
            "convert_checkpoint.py 0.16.0 has no such option: gone since 0.16",
        ),
        (
            _cell(script_options={"use_embedding_sharing": True}),
            _machine("0.15.0", examples=None),
            "settings.quantize.options are for TensorRT-LLM's example scripts",
        ),
        (_pytorch(script_options={"awq_block_size": 64}), _machine(), "settings.quantize.options are for the scripts"),
        (_pytorch(), _machine("0.21.0"), "its PyTorch backend is a preview before 1.0"),
        (_pytorch(precision="int8_wo"), _machine(), "precision int8_wo: the PyTorch backend supports fp16, bf16, fp8"),
        (_pytorch(kv="int8"), _machine(), "kv_cache_precision int8: the PyTorch backend supports fp8"),
        (_pytorch(build={"fast_build": True}), _machine(), "fast_build: the PyTorch backend does not build engines"),
        (_pytorch(tp=3), _machine(), "tp3: 28 attention heads"),
    ],
)
def test_what_cannot_work_says_why(cell: Cell, machine: Machine, expected: str) -> None:
    reason = infeasible(cell, machine)
    assert expected in reason


@pytest.mark.parametrize(
    ("cell", "machine"),
    [
        (_cell(LLAMA_70B, tp=16), _machine(gpus=16)),  # 8 KV heads, each on two GPUs
        (_cell(LLAMA_70B, precision="fp8", tp=2), _machine()),
        (_cell(precision="fp8", build={"use_fp8_context_fmha": "enable"}), _machine("0.11.0")),
        (_cell(precision="fp8", build={"use_fp8_context_fmha": "enable"}), _machine("0.12.0", sm=89)),
        (_cell(precision="nvfp4"), _machine("0.17.0", sm=100)),
        (_cell(precision="int8_wo"), _machine("0.20.0", sm=120)),
        (_cell(isl=32000, osl=768), _machine()),
        (_cell(recipe={"precisions": {"embedded": ["fp32"]}}), _machine()),  # nothing said of this toolchain
        (_cell(kv="fp16"), _machine()),
        (_cell(recipe={"releases": {"tensorrt_llm": ">=1.2"}}), _machine("1.3.0rc3")),
        (_cell(precision="int4_awq", script_options={"awq_block_size": 64}), _machine()),
        (_cell(build={"max_num_tokens": 1024}, chunked=True), _machine()),
        (_cell(precision="fp8", build={"max_num_tokens": 1024}, chunked=True), _machine("0.16.0")),
        (_pytorch(build={"max_num_tokens": 1024}, chunked=True), _machine("1.3.0", build=None)),
    ],
)
def test_what_just_works(cell: Cell, machine: Machine) -> None:
    assert infeasible(cell, machine) is None


def test_the_installed_builder_decides_on_options() -> None:
    shown = "options:\n  --checkpoint_dir DIR  the checkpoint\n  --brand_new {enable,disable}\n"
    cell = _cell(build={"brand_new": "enable"})
    assert infeasible(cell, _machine(), shown) is None
    assert "has no such option" in str(infeasible(cell, _machine()))


# ------------------------------------------------------------------------------------------------------------- memory


def test_cache_of_a_token() -> None:
    shape = Shape.of(QWEN2_7B)
    assert model_shape.kv_bytes_per_token(shape, 2.0, 1, 1) == 2 * 28 * 4 * 128 * 2
    assert model_shape.kv_bytes_per_token(shape, 1.0, 2, 2) == 2 * 14 * 2 * 128
    assert model_shape.kv_bytes_per_token(shape, 2.0, 4, 1) == model_shape.kv_bytes_per_token(shape, 2.0, 28, 1)


def test_weights_of_a_gpu() -> None:
    shape = Shape.of(QWEN2_7B)
    assert model_shape.weights_bytes(shape, "fp16", 1, 1) == 7_615_616_512 * 2
    assert model_shape.weights_bytes(shape, "fp16", 4, 2) == 7_615_616_512 * 2 // 8
    embeddings = 152064 * 3584
    assert model_shape.weights_bytes(shape, "fp8", 1, 1) == 7_615_616_512 - embeddings + 2 * embeddings


def test_weights_that_a_recipe_does_not_count_are_estimated() -> None:
    counted = Shape.of(LLAMA_70B).weights
    estimated = Shape.of({**LLAMA_70B, "parameters": None}).weights
    assert 0.97 < estimated / counted <= 1.0


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("context_fmha", "disable", "which is off by settings.build.context_fmha"),
        ("use_paged_context_fmha", "disable", "which is off by settings.build.use_paged_context_fmha"),
        ("kv_cache_type", "continuous", "which is off without a paged KV cache (settings.build)"),
    ],
)
def test_what_keeps_chunked_context_out_is_named(option: str, value: str, said: str) -> None:
    settings = {
        f"build.{option}": value,
        "repository.enable_chunked_context": True,
        "repository.batching_strategy": "V1",
    }
    assert said in str(
        infeasible(trtllm_cells.cell(settings=settings), parse("tensorrt_llm==1.2.0,sm=90,gpus=8,gpu_memory_gib=80"))
    )


def test_a_machine_without_a_gpu_is_told_so() -> None:
    found = infeasible(trtllm_cells.cell("fp8"), parse("tensorrt_llm==0.20.0,gpus=0"))
    assert "GPU" in str(found)
    assert "use_paged_context_fmha" not in str(found)


@pytest.mark.parametrize(
    ("release", "sm", "precision", "warns", "fits"),
    [
        ("1.3.0rc29", 107, "nvfp4", False, True),
        ("1.3.0rc29", 107, "int4_awq", False, True),
        ("1.2.1", 107, "fp8", True, True),
        ("1.2.1", 107, "int4_awq", True, False),
        ("1.2.1", 103, "int4_awq", False, True),
    ],
)
def test_rubin_is_in_the_matrix_of_1_3_0rc29(release: str, sm: int, precision: str, warns: bool, fits: bool) -> None:
    asked, there = _pytorch(precision=precision), _machine(release, sm=sm)
    assert (
        any("SM 107 is not in any known hardware matrix" in each for each in toolchains.caveats([asked], there))
        is warns
    )
    assert (infeasible(asked, there) is None) is fits


@pytest.mark.parametrize(
    ("release", "sm", "warns"),
    [("1.3.0rc29", 89, True), ("1.4.0rc1", 89, True), ("1.3.0rc29", 90, False), ("1.2.1", 100, False)],
)
def test_nvfp4_by_marlin_on_sm_89_is_a_warning(release: str, sm: int, warns: bool) -> None:
    pytorch = _pytorch(precision="nvfp4")
    machine = _machine(release, sm=sm)
    said = toolchains.caveats([pytorch], machine)
    assert any("NVFP4 weights are computed by Marlin on SM 89" in each for each in said) is warns
    mixture = _pytorch(precision="nvfp4", recipe={"num_experts": 8})
    said = toolchains.caveats([mixture], machine)
    assert any("moe_config.backend: MARLIN" in each for each in said) is warns
