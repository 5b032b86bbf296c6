from __future__ import annotations

from typing import Any

import pytest

from trtllm_pipeline.tensorrt.stage.params import Selection
from trtllm_pipeline.tensorrt.trtllm import commands
from trtllm_pipeline.tensorrt.trtllm.params import (
    Checkpoint,
    EngineBuild,
    EngineCheck,
    EngineRepository,
    WeightsRepository,
)


def _build(release: str, *, sm: int | None = 90, kv: str | None = None, **changed: Any) -> list[str]:
    asked: dict[str, Any] = {"family": "llama", "precision": "fp16", "tp": 4, "max_batch_size": 8}
    asked |= {"max_input_len": 2048, "max_seq_len": 3072, "kv_cache_precision": kv or "none"}
    return commands.build(release, EngineBuild(**(asked | changed)), checkpoint="C", output="O", sm=sm)


def _value(argv: list[str], name: str) -> str | None:
    return argv[argv.index(name) + 1] if name in argv else None


@pytest.mark.parametrize("release", ["0.8.0", "0.12.0", "1.2.0"])
def test_the_engine_is_the_same_in_every_release(release: str) -> None:
    argv = _build(release, precision="bf16")
    assert _value(argv, "--gpt_attention_plugin") == "bfloat16"
    assert _value(argv, "--gemm_plugin") == "bfloat16"
    assert _value(argv, "--max_num_tokens") == "8192"
    assert _value(argv, "--use_paged_context_fmha") == "enable"


@pytest.mark.parametrize(
    ("release", "precision", "kv", "sm", "paged", "fp8"),
    [
        ("0.10.0", "fp8", "fp8", 90, "disable", "disable"),
        ("0.12.0", "fp8", "fp8", 90, "enable", "enable"),
        ("0.12.0", "fp8", "fp8", 89, "enable", "enable"),
        ("0.12.0", "fp8", None, 90, "enable", "disable"),
        ("0.16.0", "int8_wo", "fp8", 90, "disable", "disable"),
        ("0.19.0", "int8_wo", "fp8", 90, "enable", "disable"),
        ("1.0.0", "fp16", "int8", 90, "disable", "disable"),
        ("1.0.0", "nvfp4", "fp8", 100, "enable", "enable"),
        ("0.19.0", "fp8", "fp8", 120, "disable", "disable"),
        ("0.20.0", "fp8", "fp8", 120, "enable", "enable"),
        ("1.0.0", "fp8", "fp8", None, "disable", "disable"),
    ],
)
def test_attention_over_prompts(
    release: str, precision: str, kv: str | None, sm: int | None, paged: str, fp8: str
) -> None:
    argv = _build(release, precision=precision, kv=kv, sm=sm)
    assert _value(argv, "--use_paged_context_fmha") == paged
    assert _value(argv, "--use_fp8_context_fmha") == fp8


def test_fused_layers_are_a_switch_first_and_a_word_later() -> None:
    assert _value(_build("0.13.0"), "--use_fused_mlp") == "enable"
    assert "--use_fused_mlp" in _build("0.12.0", precision="fp8", kv="fp8")
    assert "enable" not in _build("0.12.0")[_build("0.12.0").index("--use_fused_mlp") + 1 :][:1]
    assert "--use_fused_mlp" not in _build("0.12.0", precision="int4_awq")


def test_a_users_options_win_over_ours_and_stand_once() -> None:
    argv = _build("1.0.0", options={"tokens_per_block": 32, "fast_build": True, "reduce_fusion": "enable"})
    assert argv.count("--tokens_per_block") == 1
    assert argv[-5:] == ["--tokens_per_block", "32", "--fast_build", "--reduce_fusion", "enable"]


@pytest.mark.parametrize(
    ("batch", "isl", "osl", "expected"),
    [(8, 2048, 1024, 8192), (1, 128, 128, 256), (1, 16000, 16, 16000), (10_000, 64, 64, 10_000)],
)
def test_tokens_of_a_pass(batch: int, isl: int, osl: int, expected: int) -> None:
    assert commands.max_num_tokens(batch, isl, osl) == expected
    assert _value(_build("1.0.0", max_num_tokens=4096), "--max_num_tokens") == "4096"


# ------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    ("release", "family", "precision", "asked", "expected"),
    [
        ("1.0.0", "llama", "fp16", None, "convert"),
        ("1.0.0", "llama", "int8_wo", None, "convert"),
        ("1.0.0", "llama", "int8_wo", "int8", "quantize"),
        ("1.0.0", "llama", "fp16", "fp8", "quantize"),
        ("1.0.0", "llama", "fp16", "fp16", "convert"),
        ("1.0.0", "llama", "fp8", None, "quantize"),
        ("1.0.0", "llama", "int8_sq", None, "quantize"),
        ("0.10.0", "phi3", "int8_wo", None, "quantize"),
        ("0.11.0", "phi3", "int8_wo", None, "convert"),
        ("0.13.0", "gemma2", "int4_wo", None, "convert"),
    ],
)
def test_which_script_makes_the_checkpoint(
    release: str, family: str, precision: str, asked: str | None, expected: str
) -> None:
    assert commands.route(release, family, precision, commands.kv_precision(precision, asked)) == expected


def test_fp8_weights_get_an_fp8_cache_unless_told_otherwise() -> None:
    assert commands.kv_precision("fp8", None) == "fp8"
    assert commands.kv_precision("fp8", "fp16") is None
    assert commands.kv_precision("int4_awq", None) is None
    assert commands.kv_precision("int4_awq", "int8") == "int8"


def _convert(release: str, **changed: Any) -> list[str]:
    asked: dict[str, Any] = {"family": "qwen2", "precision": "fp16", "tp": 4, "pp": 2}
    program = ("python3", "convert_checkpoint.py")
    return commands.convert_checkpoint(release, Checkpoint(**(asked | changed)), program, model="M", output="O")


def test_converting_weight_only() -> None:
    assert _convert("1.0.0", precision="int8_wo") == [
        *(
            "python3",
            "convert_checkpoint.py",
            "--model_dir",
            "M",
            "--output_dir",
            "O",
            "--tp_size",
            "4",
            "--pp_size",
            "2",
        ),
        *("--dtype", "float16", "--use_weight_only", "--weight_only_precision", "int8", "--workers", "1"),
    ]


@pytest.mark.parametrize("release", ["0.13.0", "1.2.0"])
def test_gemma_has_spellings_of_its_own(release: str) -> None:
    argv = _convert(release, family="gemma2", precision="int4_wo", pp=1)
    assert argv[2:10] == ["--ckpt-type", "hf", "--model-dir", "M", "--output-model-dir", "O", "--world-size", "4"]
    assert _value(argv, "--dtype") == "bfloat16"
    assert _value(argv, "--use-weight-only-with-precision") == "int4"


def test_the_first_script_for_phi_3_asks_which_of_the_minis_it_is() -> None:
    argv = _convert("0.10.0", family="phi3", tp=1, pp=1, max_position_embeddings=131072)
    assert _value(argv, "--model_type") == "Phi-3-mini-128k-instruct"
    assert "--tp_size" not in argv
    assert "--model_type" not in _convert("0.11.0", family="phi3", pp=1, max_position_embeddings=131072)


@pytest.mark.parametrize("release", ["0.12.0", "1.2.0"])
def test_glm_4_is_not_looked_for_in_the_name_of_the_folder(release: str) -> None:
    assert _value(_convert(release, family="chatglm", pp=1), "--chatglm_version") == "glm4"


def _quantize(release: str, precision: str, kv: str = "none", **changed: Any) -> list[str]:
    rows = Selection(samples=64, max_length=256, seed=7)
    asked = {"family": "llama", "tp": 2, "batch_size": 4, "calibration": rows, "kv_cache_precision": kv} | changed
    dataset = "D" if commands.takes_dataset(release) else None
    program = ("python3", "quantize.py")
    asked = Checkpoint(precision=precision, **asked)
    return commands.quantize(release, asked, program, model="M", output="O", dataset=dataset)


def test_a_users_options_of_the_scripts_come_last() -> None:
    assert _convert("0.15.0", options={"use_embedding_sharing": True})[-1] == "--use_embedding_sharing"
    argv = _quantize("1.0.0", "int4_awq", options={"awq_block_size": 64})
    assert argv.count("--awq_block_size") == 1
    assert argv[-2:] == ["--awq_block_size", "64"]


def test_quantizing() -> None:
    assert _quantize("1.0.0", "fp8", "fp8")[2:] == [
        *("--model_dir", "M", "--output_dir", "O", "--dtype", "float16", "--qformat", "fp8", "--kv_cache_dtype", "fp8"),
        *("--tp_size", "2", "--pp_size", "1", "--calib_size", "64", "--batch_size", "4"),
        *("--calib_dataset", "D", "--calib_max_seq_length", "256", "--seed", "7"),
    ]
    plain = _quantize("1.0.0", "bf16", "int8")
    assert (_value(plain, "--qformat"), _value(plain, "--dtype")) == ("full_prec", "bfloat16")
    assert not commands.takes_dataset("0.9.0")
    assert "--calib_dataset" not in _quantize("0.9.0", "fp8")


# ------------------------------------------------------------------------------------------------------------ servers


def test_serving_an_engine() -> None:
    asked = EngineRepository(max_batch_size=8)
    argv = commands.serve_engine("1.0.0", asked, engine="E", tokenizer="T", config=None)
    assert argv == ["trtllm-serve", "serve", "E", "--tokenizer", "T", "--backend", "trt"]


def test_serving_with_pytorch() -> None:
    asked = WeightsRepository(
        tensor_parallel_size=2, max_batch_size=8, max_seq_len=3072, options={"trust_remote_code": True}
    )
    assert commands.serve_pytorch("1.2.0", asked, model="M", config="C") == [
        *("trtllm-serve", "serve", "M", "--tp_size", "2", "--pp_size", "1", "--max_batch_size", "8"),
        *("--max_seq_len", "3072", "--max_num_tokens", "8192", "--extra_llm_api_options", "C", "--trust_remote_code"),
    ]


@pytest.mark.parametrize(
    ("changed", "tokens"),
    [
        ({}, 1536),
        ({"max_batch_size": 64}, 8192),
        ({"max_seq_len": 16000}, 16000),
        ({"max_seq_len": 16000, "enable_chunked_context": True}, 8192),
        ({"max_num_tokens": 4096}, 4096),
    ],
)
def test_tokens_of_a_pass_by_hand_are_those_of_a_matrix(changed: dict[str, Any], tokens: int) -> None:
    given: dict[str, Any] = {"max_batch_size": 8, "max_seq_len": 192, **changed}
    assert commands.tokens_of_a_pass(WeightsRepository(**given)) == tokens


def test_checking_an_engine_of_several_ranks() -> None:
    asked: dict[str, Any] = {"program": ("python3", "run.py"), "engine": "E", "tokenizer": "T"}
    argv = commands.engine_check("1.0.0", EngineCheck(prompt="Hello", world_size=4), as_root=True, **asked)
    start = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--noprefix", "--mca", "plm_rsh_agent", "", "-n", "4"]
    assert argv[:10] == [*start, "python3"]
    alone = commands.engine_check("1.0.0", EngineCheck(), **asked)
    assert alone[0] == "python3"
    streamed = commands.engine_check("1.0.0", EngineCheck(gpu_weights_percent=0.25), **asked)
    assert streamed == [*alone, "--gpu_weights_percent", "0.25"]
    assert "--input_text=-hello" in commands.engine_check("1.0.0", EngineCheck(prompt="-hello"), **asked)
