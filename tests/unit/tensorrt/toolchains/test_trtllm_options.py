from __future__ import annotations

import argparse
from typing import Any

import pytest

from trtllm_pipeline.base.errors import UsageError
from trtllm_pipeline.tensorrt.trtllm import program_options
from trtllm_pipeline.tensorrt.trtllm.program_options import Installed, check_extra, known, parse_help, render
from trtllm_pipeline.tensorrt.trtllm.releases import at_least, convert_script, parse

BUILD = "trtllm-build"
CONVERT = "convert_checkpoint.py:llama"
SERVE = "trtllm-serve"
CLICK_HELP = """\
Usage: trtllm-serve serve [OPTIONS] MODEL

  Running an OpenAI API compatible server

  - not an option, a list in the description
Options:
  --tokenizer TEXT                Path | Name of the tokenizer.Specify this
                                  value only if using TensorRT engine as
                                  model.
  --host TEXT                     Hostname of the server.
  --backend [pytorch|tensorrt|_autodeploy]
                                  Set to '--backend x' for another one.
  --tp_size, --tensor_parallel_size INTEGER
                                  Tensor parallelism size.
  --kv_cache_free_gpu_memory_fraction FLOAT RANGE
                                  [0<=x<=1]
  --trust_remote_code             Flag for HF transformers.
  --telemetry / --no-telemetry    Tell about use.  [default: telemetry]
  -m, --metadata_server_config_file TEXT
  --help                          Show this message and exit.
"""


# ----------------------------------------------------------------------------------------------------------- releases


@pytest.mark.parametrize(
    ("release", "since", "expected"),
    [
        ("0.9.0", "0.10", False),
        ("0.10.0", "0.9", True),
        ("0.17.0.dev2024121700", "0.17", True),
        ("0.17.0.dev2024121700", "0.17.0", False),
        ("0.17.0", "0.17.0", True),
        ("1.3.0rc3", "1.3", True),
        ("1.3.0rc3", "1.3.0", False),
        ("1.3.0rc10", "1.3.0rc9", True),
        ("1.2.1", "1.2", True),
    ],
)
def test_releases_compare_as_versions_and_two_numbers_are_a_whole_line(
    release: str, since: str, expected: bool
) -> None:
    assert at_least(release, since) is expected


def test_what_is_no_release_is_a_users_mistake() -> None:
    with pytest.raises(UsageError, match="'newest' is not a TensorRT-LLM release"):
        parse("newest")


@pytest.mark.parametrize("name", ["served_model_name", "kv_cache_dtype"])
def test_options_are_dated_by_candidates(name: str) -> None:
    (problem,) = check_extra("trtllm-serve", "1.3.0rc6", {name: "auto"})
    assert "it exists from 1.3.0rc7 on" in problem
    assert check_extra("trtllm-serve", "1.3.0rc7", {name: "auto"}) == ()
    assert program_options.accepts("trtllm-serve", "1.3.0rc20", "--backend", "tensorrt")
    assert not program_options.accepts("trtllm-serve", "1.3.0rc21", "--backend", "tensorrt")


def test_scripts_moved_in_0_20() -> None:
    assert convert_script("0.19.0", "qwen2") == "qwen/convert_checkpoint.py"
    assert convert_script("0.20.0", "mixtral") == "models/core/llama/convert_checkpoint.py"


# ------------------------------------------------------------------------------------------------------ extra options


@pytest.mark.parametrize(
    ("release", "extra", "expected"),
    [
        (
            "0.12.0",
            {"multi_block_mode": "enable"},
            "gone since 0.12; instead: a setting of the runtime, multi_block_mode",
        ),
        ("0.11.0", {"multi_block_mode": "enable"}, None),
        ("1.2.0", {"enable_xqa": "disable"}, "gone since 0.16"),
        ("0.18.2", {"norm_quant_fusion": "enable"}, "it exists from 0.19 on"),
        ("1.0.0", {"use_paged_context_fhma": "enable"}, "did you mean 'use_paged_context_fmha'?"),
        ("1.0.0", {"frobnicate": 1}, "trtllm-build 1.0.0 has no such option"),
        ("1.0.0", {"reduce_fusion": "on"}, "reduce_fusion: 'on' is not one of enable, disable"),
        ("1.0.0", {"reduce_fusion": True}, None),
        (
            "0.16.0",
            {"gemm_plugin": "nvfp4"},
            "'nvfp4' is not one of auto, float16, float32, bfloat16, int32, fp8, disable",
        ),
        ("1.0.0", {"tokens_per_block": "many"}, "'many' is not a whole number"),
        ("1.0.0", {"tokens_per_block": 32}, None),
        ("1.0.0", {"tokens_per_block": 0}, "tokens_per_block: must be 1 or more, not 0"),
        ("0.19.0", {"max_beam_width": "-3"}, "max_beam_width: must be 1 or more, not -3"),
        ("1.0.0", {"max_lora_rank": -1}, "max_lora_rank: must be 0 or more, not -1"),
        ("1.0.0", {"max_prompt_embedding_table_size": 0}, None),
        ("1.0.0", {"tokens_per_block": True}, "tokens_per_block: needs a value, not True"),
        ("1.0.0", {"fast_build": True}, None),
        ("1.0.0", {"fast_build": "enable"}, "fast_build: takes no value; write true or false, not 'enable'"),
        ("0.12.0", {"use_fused_mlp": True}, None),
        ("1.0.0", {"max_batch_size": 8}, "max_batch_size: is set from the axis max_batch_size"),
        ("1.0.0", {"max_decoder_seq_len": 8}, "max_decoder_seq_len: is set from the axis lengths"),
        ("1.2.0", {"tp_size": 8}, "tp_size: is set from the axis parallel"),
        ("1.0.0", {"--reduce_fusion": "enable"}, None),
        ("1.0.0", {"lora_target_modules": "attn_q attn_k"}, None),
        ("1.0.0", {"lora_target_modules": "attn_q attn_x"}, "'attn_x' is not one of attn_qkv"),
        ("1.0.0", {"max_multimodal_len": 8}, None),
    ],
)
def test_extra_options_against_the_table(release: str, extra: dict[str, object], expected: str | None) -> None:
    problems = check_extra(BUILD, release, extra)  # type: ignore[arg-type]
    if expected is None:
        assert problems == ()
    else:
        assert len(problems) == 1
        assert expected in problems[0]
        assert problems[0].startswith(f"{next(iter(extra))}: ")


def test_every_fault_is_told() -> None:
    assert len(check_extra(BUILD, "1.0.0", {"frobnicate": 1, "reduce_fusion": "on", "output_dir": "x"})) == 3


def test_the_installed_program_decides_and_the_table_explains() -> None:
    shown = (
        "options:\n  --checkpoint_dir DIR\n  --new_plugin {auto,disable}\n  --reduce_fusion {enable,disable,maybe}\n"
    )
    assert check_extra(BUILD, "1.2.0", {"new_plugin": "auto", "reduce_fusion": "maybe"}, shown) == ()
    (problem,) = check_extra(BUILD, "1.2.0", {"auto_parallel": 2}, shown)
    assert problem == "auto_parallel: is set from the axis parallel"
    (problem,) = check_extra(BUILD, "1.2.0", {"dora_plugin": "enable"}, shown)
    assert problem.startswith("dora_plugin: trtllm-build 1.2.0 has no such option")
    (problem,) = check_extra(BUILD, "1.2.0", {"new_plugins": "auto"}, shown)
    assert problem.endswith("did you mean 'new_plugin'?")
    (problem,) = check_extra(BUILD, "1.2.0", {"new_plugin": "float16"}, shown)
    assert problem == "new_plugin: 'float16' is not one of auto, disable"


def test_help_that_shows_no_options_leaves_it_to_the_table() -> None:
    assert check_extra(BUILD, "1.2.0", {"reduce_fusion": "enable"}, "Traceback (most recent call last):") == ()


def test_extra_options_as_arguments() -> None:
    extra = {"reduce_fusion": True, "fast_build": True, "dry_run": False, "opt_num_tokens": 64, "lora_dir": "a b"}
    assert render(BUILD, "1.0.0", extra) == [
        *("--reduce_fusion", "enable"),
        "--fast_build",
        *("--opt_num_tokens", "64"),
        *("--lora_dir", "a", "b"),
    ]
    assert render(BUILD, "0.12.0", {"use_fused_mlp": True}) == ["--use_fused_mlp"]
    assert render(BUILD, "0.13.0", {"use_fused_mlp": True}) == ["--use_fused_mlp", "enable"]


@pytest.mark.parametrize(
    ("tool", "release", "extra", "arguments"),
    [
        (BUILD, "1.0.0", {"lora_target_modules": ["attn_q", "attn_v"]}, "--lora_target_modules attn_q attn_v"),
        (CONVERT, "0.8.0", {"rotary_scaling": ["linear", 2]}, "--rotary_scaling linear 2"),
        (SERVE, "1.3.0", {"middleware": ["a:f", "b:g"]}, "--middleware a:f --middleware b:g"),
        (SERVE, "1.3.0", {"middleware": "a:f"}, "--middleware a:f"),
        (SERVE, "1.3.0", {"of_tomorrow": [1, 2]}, "--of_tomorrow 1 --of_tomorrow 2"),
        (BUILD, "1.0.0", {"of_tomorrow": [1, 2]}, "--of_tomorrow 1 2"),
    ],
)
def test_several_values_are_given_as_the_program_takes_them(
    tool: str, release: str, extra: dict[str, Any], arguments: str
) -> None:
    shown = "  --of_tomorrow N [N ...]  new\n" + "".join(f"  {name} X  known\n" for name in known(tool, release))
    assert check_extra(tool, release, extra, shown) == ()
    assert render(tool, release, extra) == arguments.split()


@pytest.mark.parametrize(
    ("tool", "extra", "problem"),
    [
        (BUILD, {"lora_target_modules": ["attn_q", "attn"]}, "'attn' is not one of"),
        (BUILD, {"opt_num_tokens": [1, 2]}, "takes one value, not a list"),
        (BUILD, {"reduce_fusion": ["enable"]}, "takes one value, not a list"),
        (BUILD, {"fast_build": [True]}, "takes no value; write true or false, not [True]"),
        (BUILD, {"of_tomorrow": [1, 2]}, "takes one value, not a list"),
        (CONVERT, {"rotary_scaling": ["linear"]}, "takes 2 values, not 1"),
        (CONVERT, {"weight_only_precision": ["int8", "int4"]}, "axis precision"),
    ],
)
def test_several_values_where_one_is_taken(tool: str, extra: dict[str, Any], problem: str) -> None:
    release = "0.8.0" if tool == CONVERT else "1.0.0"
    shown = "  --of_tomorrow N  new\n" if "of_tomorrow" in extra else None
    (found,) = check_extra(tool, release, extra, shown)
    assert problem in found


# ------------------------------------------------------------------------------------------------------------- --help


def test_help_of_argparse_as_this_python_prints_it() -> None:
    parser = argparse.ArgumentParser("trtllm-build", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--checkpoint_dir", help="the directory; see --output_dir")
    parser.add_argument("--max_seq_len", "--max_decoder_seq_len", type=int, help="prompt and answer")
    parser.add_argument("--profiling_verbosity", choices=["layer_names_only", "detailed", "none"], default="none")
    parser.add_argument("--strip_plan", action="store_true")
    parser.add_argument("--smoothquant", "-sq", type=float)
    parser.add_argument("--weight_only_precision", nargs="?", choices=["int8", "int4"])
    parser.add_argument("--dataset-cache-dir")
    group = parser.add_argument_group("LoRA arguments")
    group.add_argument("--lora_dir", nargs="+", help="- directories\n  --first is the one used")
    group.add_argument("--lora_target_modules", nargs="+", choices=["attn_q", "attn_k"])
    group.add_argument("--telemetry", action=argparse.BooleanOptionalAction)
    plain = Installed(takes_value=True, choices=None)
    switch = Installed(takes_value=False, choices=None)
    assert parse_help(parser.format_help()) == {
        "-h": switch,
        "--help": switch,
        "--checkpoint_dir": plain,
        "--max_seq_len": plain,
        "--max_decoder_seq_len": plain,
        "--profiling_verbosity": Installed(takes_value=True, choices=("layer_names_only", "detailed", "none")),
        "--strip_plan": switch,
        "--smoothquant": plain,
        "-sq": plain,
        "--weight_only_precision": Installed(takes_value=True, choices=("int8", "int4")),
        "--dataset-cache-dir": plain,
        "--lora_dir": Installed(takes_value=True, choices=None, several=True),
        "--lora_target_modules": Installed(takes_value=True, choices=("attn_q", "attn_k"), several=True),
        "--telemetry": switch,
        "--no-telemetry": switch,
    }


def test_help_of_click() -> None:
    shown = parse_help(CLICK_HELP)
    assert shown["--backend"] == Installed(takes_value=True, choices=("pytorch", "tensorrt", "_autodeploy"))
    assert shown["--tp_size"] == shown["--tensor_parallel_size"] == Installed(takes_value=True, choices=None)
    assert shown["--kv_cache_free_gpu_memory_fraction"].takes_value
    assert not shown["--trust_remote_code"].takes_value
    assert not shown["--no-telemetry"].takes_value
    assert set(shown) == {
        *("--tokenizer", "--host", "--backend", "--tp_size", "--tensor_parallel_size"),
        *("--kv_cache_free_gpu_memory_fraction", "--trust_remote_code", "--telemetry", "--no-telemetry"),
        *("-m", "--metadata_server_config_file", "--help"),
    }


def test_colours_of_newer_pythons_do_not_hide_options() -> None:
    assert set(parse_help("  \x1b[1;36m--dry_run\x1b[0m  \x1b[1mtext\x1b[0m\n")) == {"--dry_run"}
