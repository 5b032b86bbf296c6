"""The stand-ins for TensorRT-LLM's programs: they take what a release took, and refuse the rest in its words."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest

from tests.standins import releases
from tests.standins.faults import WORDS, Fault
from tests.standins.installation import Installation, install
from tests.standins.programs.arguments import parse_click
from tests.standins.programs.checkpoint import safetensors
from trtllm_pipeline.toolchains.tensorrt_llm import program_options as options

QWEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "torch_dtype": "bfloat16",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
}
LLAMA = {**QWEN, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 32}
LLAMA["num_attention_heads"] = 32


def model(folder: Path, config: Mapping[str, Any] = QWEN) -> Path:
    """A Hugging Face folder of a few bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(safetensors(0))
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return folder


def run(
    installed: Installation,
    tool: str,
    *arguments: object,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(installed.program(tool)), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=cwd or installed.folder,
        env={**os.environ, **installed.environment, **(variables or {})},
        check=False,
    )


def checkpoint(installed: Installation, folder: Path, *arguments: object, family: str = "llama") -> Path:
    source = folder.parent / f"{family}-model"
    if not source.exists():
        model(source, {"llama": LLAMA, "qwen": QWEN}[family])
    done = run(installed, f"convert_checkpoint.py:{family}", "--model_dir", source, "--output_dir", folder, *arguments)
    assert done.returncode == 0, done.stderr
    return folder


def engine(installed: Installation, folder: Path, *arguments: object, tp: int = 1) -> Path:
    made = checkpoint(installed, folder.with_name(f"{folder.name}-checkpoint"), "--tp_size", tp)
    done = run(installed, "trtllm-build", "--checkpoint_dir", made, "--output_dir", folder, *arguments)
    assert done.returncode == 0, done.stderr
    return folder


def read(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


# --- which options a release has


@pytest.mark.parametrize(
    ("release", "has", "lacks"),
    [
        ("0.8.0", ["--max_output_len", "--timing_cache"], ["--max_seq_len", "--tp_size"]),
        ("0.9.0", ["--max_output_len", "--tp_size"], ["--timing_cache", "--max_seq_len", "--strip_plan"]),
        ("0.10.0", ["--max_output_len", "--strip_plan"], ["--max_seq_len"]),
        ("0.11.0", ["--max_output_len", "--max_seq_len", "--tp_size"], ["--fast_build"]),
        ("0.12.0", ["--max_seq_len", "--builder_opt"], ["--max_output_len", "--tp_size", "--multi_block_mode"]),
        ("0.13.0", ["--kv_cache_type", "--builder_opt"], ["--max_output_len"]),
        ("0.15.0", ["--monitor_memory", "--enable_xqa"], ["--lookup_plugin", "--user_buffer"]),
        ("0.16.0", ["--user_buffer", "--auto_parallel"], ["--enable_xqa", "--norm_quant_fusion"]),
        ("0.18.1", ["--auto_parallel"], ["--norm_quant_fusion"]),
        ("0.19.0", ["--norm_quant_fusion", "--auto_parallel"], ["--enable_xqa"]),
        ("1.1.0", ["--auto_parallel"], ["--tp_size"]),
        ("1.2.0", ["--norm_quant_fusion"], ["--auto_parallel", "--gpus_per_node", "--cluster_key"]),
    ],
)
def test_builders_have_the_options_of_their_release(release: str, has: list[str], lacks: list[str]) -> None:
    table = releases.table("trtllm-build", release)
    assert table is not None
    options = table["trtllm-build"]
    assert set(has) <= set(options)
    assert not set(lacks) & set(options)


@pytest.mark.parametrize("family", ["llama", "qwen", "gpt", "phi"])
@pytest.mark.parametrize("release", ["0.12.0", "0.16.0", "1.2.0"])
def test_converters_have_the_options_that_the_table_says_of_their_release(release: str, family: str) -> None:
    tool = f"convert_checkpoint.py:{family}"
    table = releases.table(tool, release)
    assert table is not None
    assert {*table[tool]} == {name for name in options.load()[tool].options if options.exists(tool, release, name)}


def test_what_a_release_note_names_leaves_nothing_but_the_next_release_s_changes() -> None:
    """Known differences of unrecorded releases lie between what was recorded before and after them."""

    def options(release: str) -> set[str]:
        return set((releases.table("trtllm-build", release) or {})["trtllm-build"])

    for before, between, after in (
        ("0.8.0", "0.9.0", "0.10.0"),
        ("0.12.0", "0.13.0", "0.14.0"),
        ("0.14.0", "0.15.0", "0.16.0"),
    ):
        first, middle, last = options(before), options(between), options(after)
        assert first & last <= middle <= first | last
        assert middle not in (first, last)


@pytest.mark.parametrize(
    ("release", "commands", "backends"),
    [
        ("0.14.0", None, None),
        ("0.15.0", {"trtllm-serve"}, None),
        ("0.18.2", {"trtllm-serve"}, ["pytorch"]),
        ("0.19.0", {"serve", "disaggregated", "disaggregated_mpi_worker"}, ["pytorch"]),
        ("0.21.0", {"serve", "disaggregated", "disaggregated_mpi_worker"}, ["pytorch"]),
        ("1.0.0", {"serve", "disaggregated", "disaggregated_mpi_worker"}, ["pytorch", "trt"]),
        (
            "1.1.0",
            {"serve", "mm_embedding_serve", "disaggregated", "disaggregated_mpi_worker"},
            ["pytorch", "tensorrt", "_autodeploy"],
        ),
        (
            "1.3.0",
            {"serve", "mm_embedding_serve", "disaggregated", "disaggregated_mpi_worker"},
            ["_autodeploy", "pytorch"],
        ),
    ],
)
def test_servers_have_the_subcommands_and_backends_of_their_release(
    release: str, commands: set[str] | None, backends: list[str] | None
) -> None:
    table = releases.table(releases.SERVE, release)
    if commands is None:
        assert table is None
        return
    assert table is not None
    assert set(table) == commands
    options = table.get("serve") or table["trtllm-serve"]
    assert options.get("--backend", {}).get("choices") == backends


@pytest.mark.parametrize(
    ("release", "programs", "scripts"),
    [
        ("0.8.0", {"trtllm-build"}, {"llama", "phi", "medusa"}),
        ("0.11.0", {"trtllm-build"}, {"llama", "qwen", "phi", "gpt", "medusa", "internlm2"}),
        (
            "0.16.0",
            {"trtllm-build", "trtllm-serve", "trtllm-bench"},
            {"llama", "qwen", "phi", "gpt", "gemma", "medusa", "internlm2"},
        ),
        (
            "1.2.0",
            {"trtllm-build", "trtllm-serve", "trtllm-bench"},
            {
                *(f"models/core/{name}" for name in ("llama", "qwen", "phi", "gpt", "gemma", "internlm2", "glm-4-9b")),
                "medusa",
                "eagle",
            },
        ),
        ("1.3.0", {"trtllm-serve", "trtllm-bench"}, None),
    ],
)
def test_an_installation_shows_what_the_release_shows(
    tmp_path: Path, release: str, programs: set[str], scripts: set[str] | None
) -> None:
    installed = install(tmp_path / "i", release, packages={"nvidia-modelopt": "0.15.0"})
    site = [installed.environment["PYTHONPATH"].split(os.pathsep)[0]]
    assert next(iter(Distribution.discover(name="tensorrt_llm", path=site))).version == release
    assert next(iter(Distribution.discover(name="nvidia-modelopt", path=site))).version == "0.15.0"
    assert {path.name for path in installed.bin.iterdir()} == programs
    there = {path.relative_to(installed.examples).as_posix() for path in installed.examples.rglob("*.py")}
    visual = {
        "0.16.0": {"multimodal/build_visual_engine.py"},
        "1.2.0": {"models/core/multimodal/build_multimodal_engine.py"},
    }
    others = {"run.py", "quantization/quantize.py"} | visual.get(release, set())
    assert there == (set() if scripts is None else {*others, *(f"{name}/convert_checkpoint.py" for name in scripts)})
    assert all(os.access(path, os.X_OK) for path in (*installed.bin.iterdir(), *installed.examples.rglob("*.py")))


def test_an_installation_can_lack_the_examples(tmp_path: Path) -> None:
    installed = install(tmp_path / "i", "0.16.0", examples=False)
    assert not installed.examples.exists()
    assert installed.program("trtllm-build").exists()


# --- refusing


@pytest.mark.parametrize(
    ("release", "tool", "arguments", "words"),
    [
        ("0.12.0", "trtllm-build", ["--max_output_len", "8"], "trtllm-build: error: unrecognized arguments: --max_output_len 8"),
        ("0.12.0", "trtllm-build", ["--tp_size", "2"], "error: unrecognized arguments: --tp_size 2"),
        ("0.10.0", "trtllm-build", ["--max_seq_len", "8"], "error: unrecognized arguments: --max_seq_len 8"),
        ("1.2.0", "trtllm-build", ["--auto_parallel", "1"], "error: unrecognized arguments: --auto_parallel 1"),
        ("0.12.0", "trtllm-build", ["--gemm_plugin", "float8"], "error: argument --gemm_plugin: invalid choice: 'float8'"),
        ("0.12.0", "trtllm-build", ["--max_batch_size", "many"], "argument --max_batch_size: invalid int value: 'many'"),
        ("0.10.0", "quantize.py", ["--device", "cuda"], "quantize.py: error: unrecognized arguments: --device cuda"),
        ("0.8.0", "quantize.py", [], "the following arguments are required: --model_dir"),
        ("0.16.0", "quantize.py", ["--qformat", "nvfp4"], "argument --qformat: invalid choice: 'nvfp4'"),
        ("0.16.0", "convert_checkpoint.py:qwen", ["--use_fp8"], "unrecognized arguments: --use_fp8"),
        ("0.12.0", "run.py", [], "run.py: error: the following arguments are required: --max_output_len"),
        ("0.18.2", "trtllm-serve", ["m", "--extra_llm_api_options", "x"], "Error: No such option: --extra_llm_api_options"),
        ("0.18.2", "trtllm-serve", ["serve", "m"], "Error: Got unexpected extra argument (m)"),
        ("1.0.0", "trtllm-serve", ["m", "--backend", "tensorrt"], "Error: Invalid value for '--backend': 'tensorrt' is not one of 'pytorch', 'trt'."),
        ("1.2.0", "trtllm-serve", ["serve"], "Error: Missing argument 'MODEL'."),
        ("1.2.0", "trtllm-serve", ["serve", "m", "--port", "x"], "Invalid value for '--port': 'x' is not a valid integer."),
        ("1.2.0", "trtllm-serve", ["serve", "m", "--port"], "Error: Option '--port' requires an argument."),
        ("1.2.0", "trtllm-bench", ["throughput"], "Error: Missing option '--model'."),
        ("1.2.0", "trtllm-bench", ["--model", "m"], "Error: Missing command."),
        ("0.16.0", "trtllm-bench", ["--model", "m", "throughput", "--concurrency", "2"], "Error: No such option: --concurrency"),
        ("0.20.0", "trtllm-bench", ["--model", "m", "throughput", "--backend", "tensorrt"], "'tensorrt' is not one of 'pytorch', 'autodeploy'."),
        ("1.2.0", "trtllm-bench", ["--model", "m", "throughput", "n"], "Error: Got unexpected extra argument (n)"),
        ("1.3.0", "trtllm-serve", ["serve", "m", "--backend", "tensorrt"], "'tensorrt' is not one of '_autodeploy', 'pytorch'."),
    ],
)  # fmt: skip
def test_what_a_release_lacks_is_refused_in_its_words(
    tmp_path: Path, release: str, tool: str, arguments: list[str], words: str
) -> None:
    required = {"convert_checkpoint.py:qwen": ["--model_dir", "m"], "quantize.py": ["--model_dir", "m"]}
    installed = install(tmp_path / "i", release)
    done = run(installed, tool, *(required.get(tool, []) if arguments else []), *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.lower().startswith("usage: ")
    assert "Traceback" not in done.stderr
    assert [(start.tool, start.exit) for start in installed.invocations()] == [(tool, 2)]


def test_servers_take_aliases_switches_and_their_opposites() -> None:
    table = releases.table(releases.SERVE, "1.3.0")
    assert table is not None
    line = ["m", "--tp_size=2", "--no-telemetry", "--trust_remote_code", "--middleware", "a", "--middleware", "b"]
    command, values = parse_click("trtllm-serve", table, line, "serve", "MODEL")
    assert (command, values["model"], values["tensor_parallel_size"]) == ("serve", "m", 2)
    assert (values["telemetry"], values["trust_remote_code"], values["middleware"]) == (False, True, ["a", "b"])


def test_input_that_is_not_there_is_refused(tmp_path: Path) -> None:
    installed = install(tmp_path / "i", "0.12.0")
    out = tmp_path / "out"
    build = run(installed, "trtllm-build", "--checkpoint_dir", tmp_path, "--output_dir", out)
    assert build.returncode == 1
    assert "FileNotFoundError" in build.stderr
    (tmp_path / "empty").mkdir()
    convert = run(installed, "convert_checkpoint.py:qwen", "--model_dir", tmp_path / "empty", "--output_dir", out)
    assert "does not appear to have a file named config.json" in convert.stderr
    pointer = model(tmp_path / "pointer")
    (pointer / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "HeaderTooLarge" in run(installed, "convert_checkpoint.py:qwen", "--model_dir", pointer).stderr
    other = run(installed, "convert_checkpoint.py:llama", "--model_dir", model(tmp_path / "qwen"), "--output_dir", out)
    assert "stand-in: examples/llama does not convert Qwen2ForCausalLM" in other.stderr
    assert not out.exists()


def test_a_checkpoint_is_only_cut_where_heads_and_layers_allow(tmp_path: Path) -> None:
    installed = install(tmp_path / "i", "0.12.0")
    source = model(tmp_path / "m")
    out = tmp_path / "out"
    for size in (["--tp_size", 8], ["--pp_size", 8]):
        done = run(installed, "convert_checkpoint.py:qwen", "--model_dir", source, "--output_dir", out, *size)
        assert done.returncode == 1
        assert "AssertionError" in done.stderr
    assert not out.exists()


def test_experts_are_only_dealt_where_sizes_allow(tmp_path: Path) -> None:
    installed = install(tmp_path / "i", "0.12.0")
    mixture = {**LLAMA, "architectures": ["MixtralForCausalLM"], "num_local_experts": 6}
    source, out = model(tmp_path / "m", mixture), tmp_path / "out"

    def convert(*sizes: object) -> subprocess.CompletedProcess[str]:
        tool = "convert_checkpoint.py:llama"
        return run(installed, tool, "--model_dir", source, "--output_dir", out, "--tp_size", 4, *sizes)

    assert "got 4 != 2 * 4" in convert("--moe_tp_size", 2, "--moe_ep_size", 4).stderr
    assert "Number of experts 6 is not a multiple of EP size 4" in convert("--moe_ep_size", 4).stderr
    assert not out.exists()
    assert convert("--moe_ep_size", 2).returncode == 0
    assert {"tp_size": 4, "moe_tp_size": 2, "moe_ep_size": 2}.items() <= read(out)["mapping"].items()


def test_the_rope_types_of_llama_3_1_need_0_12(tmp_path: Path) -> None:
    source = model(tmp_path / "m", {**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}})
    arguments = ("convert_checkpoint.py:llama", "--model_dir", source, "--output_dir", tmp_path / "out")
    assert "KeyError: 'type'" in run(install(tmp_path / "a", "0.11.0"), *arguments).stderr
    assert run(install(tmp_path / "b", "0.12.0"), *arguments).returncode == 0


def test_quantize_needs_a_gpu_and_its_calibration_data(tmp_path: Path) -> None:
    installed = install(tmp_path / "i", "0.12.0")
    source, data = model(tmp_path / "m"), tmp_path / "data"
    arguments = ("--model_dir", source, "--output_dir", tmp_path / "out", "--qformat", "fp8")
    assert "GPU is required" in run(installed, "quantize.py", *arguments, variables={"CUDA_VISIBLE_DEVICES": ""}).stderr
    assert "Couldn't reach 'cnn_dailymail'" in run(installed, "quantize.py", *arguments).stderr
    data.mkdir()
    assert "EmptyDatasetError" in run(installed, "quantize.py", *arguments, "--calib_dataset", data).stderr
    (data / "train.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    assert run(installed, "quantize.py", *arguments, "--calib_dataset", data).returncode == 0
    plain = ("--model_dir", source, "--output_dir", tmp_path / "plain", "--qformat", "int8_wo")
    assert run(installed, "quantize.py", *plain).returncode == 0
    online = install(tmp_path / "online", "0.8.0", hub_datasets=["cnn_dailymail"])
    assert run(online, "quantize.py", *arguments).returncode == 0


# --- writing


def test_a_converted_checkpoint_has_the_documented_shape(tmp_path: Path) -> None:
    installed = install(tmp_path / "i", "0.16.0")
    folder = checkpoint(installed, tmp_path / "c", "--tp_size", 2, "--pp_size", 2, "--use_weight_only", family="qwen")
    config = read(folder)
    assert config["mapping"] == {"world_size": 4, "tp_size": 2, "pp_size": 2, "moe_tp_size": 2, "moe_ep_size": 1}
    assert config["quantization"] == {"quant_algo": "W8A16", "kv_cache_quant_algo": None}
    assert (config["dtype"], config["num_key_value_heads"], config["hidden_act"]) == ("bfloat16", 4, "silu")
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        *(f"rank{i}.safetensors" for i in range(4)),
    ]
    content = (folder / "rank3.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    assert header["__metadata__"]["rank"] == "3"


def test_gemma_s_converter_has_ways_of_its_own(tmp_path: Path) -> None:
    installed = install(tmp_path / "i", "0.16.0")
    source = model(tmp_path / "m", {**LLAMA, "architectures": ["Gemma2ForCausalLM"]})
    arguments = [
        "--model-dir",
        source,
        "--output-model-dir",
        tmp_path / "out",
        "--world-size",
        2,
        "--dtype",
        "bfloat16",
    ]
    arguments += ["--use-weight-only-with-precision", "int8"]
    assert "--ckpt-type is None" in run(installed, "convert_checkpoint.py:gemma", *arguments).stderr
    done = run(installed, "convert_checkpoint.py:gemma", *arguments, "--ckpt-type", "hf")
    assert done.returncode == 0, done.stderr
    assert read(tmp_path / "out")["mapping"] == {"world_size": 2, "tp_size": 2, "pp_size": 1}
    assert read(tmp_path / "out")["quantization"]["quant_algo"] == "W8A16"


@pytest.mark.parametrize(
    ("release", "qformat", "kv", "algorithm", "kv_algorithm"),
    [
        ("0.12.0", "fp8", "fp8", "FP8", "FP8"),
        ("0.12.0", "fp8", None, "FP8", None),
        ("0.12.0", "int4_awq", "int8", "W4A16_AWQ", "INT8"),
        ("0.12.0", "w4a8_awq", None, "W4A8_AWQ", None),
        ("0.12.0", "int8_sq", None, "W8A8_SQ_PER_CHANNEL", None),
        ("0.20.0", "nvfp4", "fp8", "NVFP4", "FP8"),
        ("0.12.0", "full_prec", None, None, None),
    ],
)
def test_quantize_writes_the_algorithms_it_was_asked_for(
    tmp_path: Path, release: str, qformat: str, kv: str | None, algorithm: str | None, kv_algorithm: str | None
) -> None:
    installed = install(tmp_path / "i", release, hub_datasets=["cnn_dailymail"])
    arguments = ["--model_dir", model(tmp_path / "m"), "--output_dir", tmp_path / "out", "--qformat", qformat]
    done = run(installed, "quantize.py", *arguments, *(["--kv_cache_dtype", kv] if kv else []))
    assert done.returncode == 0, done.stderr
    quantization = read(tmp_path / "out")["quantization"]
    assert (quantization["quant_algo"], quantization["kv_cache_quant_algo"]) == (algorithm, kv_algorithm)
    assert quantization.get("group_size") == (128 if qformat.endswith("awq") else None)


def test_an_engine_has_the_documented_shape(tmp_path: Path) -> None:
    installed = install(tmp_path / "i", "0.12.0")
    folder = engine(installed, tmp_path / "e", "--max_input_len", 20, "--max_seq_len", 30, "--max_batch_size", 4, tp=2)
    config = read(folder)
    assert set(config) == {"version", "pretrained_config", "build_config"}
    assert config["version"] == "0.12.0"
    assert config["pretrained_config"] == read(tmp_path / "e-checkpoint")
    build = config["build_config"]
    assert (build["max_input_len"], build["max_seq_len"], build["max_batch_size"], build["max_num_tokens"]) == (
        20,
        30,
        4,
        120,
    )
    assert build["plugin_config"]["tokens_per_block"] == 64
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "rank0.engine", "rank1.engine"]


@pytest.mark.parametrize(
    ("release", "asked", "got"),
    [
        ("0.12.0", 8192, 120),
        ("0.12.0", 120, 120),
        ("0.12.0", 100, 100),
        ("0.12.0", 10, 64),
        ("0.10.0", 8192, 80),  # of prompts alone
    ],
)
def test_tokens_of_a_pass_are_kept_within_a_full_batch_and_a_block(
    tmp_path: Path, release: str, asked: int, got: int
) -> None:
    lengths = ["--max_output_len", 10] if release == "0.10.0" else ["--max_seq_len", 30]
    arguments = ["--max_input_len", 20, *lengths, "--max_batch_size", 4, "--max_num_tokens", asked]
    folder = engine(install(tmp_path / "i", release), tmp_path / "e", *arguments)
    assert read(folder)["build_config"]["max_num_tokens"] == got


def test_lengths_follow_the_release(tmp_path: Path) -> None:
    old = engine(install(tmp_path / "old", "0.10.0"), tmp_path / "a", "--max_output_len", 7)
    assert read(old)["build_config"]["max_output_len"] == 7
    assert "max_seq_len" not in read(old)["build_config"]
    both = install(tmp_path / "both", "0.11.0")
    summed = engine(both, tmp_path / "b", "--max_input_len", 20, "--max_output_len", 7)
    assert read(summed)["build_config"]["max_seq_len"] == 27
    from_model = engine(install(tmp_path / "new", "0.12.0"), tmp_path / "c")
    assert read(from_model)["build_config"]["max_seq_len"] == LLAMA["max_position_embeddings"]


def test_tp_at_build_time_cuts_nothing(tmp_path: Path) -> None:
    installed = install(tmp_path / "i", "0.10.0")
    folder = engine(installed, tmp_path / "e", "--tp_size", 4, "--pp_size", 2)
    assert [path.name for path in folder.glob("*.engine")] == ["rank0.engine"]


def test_workers_are_capped_by_ranks_and_visible_gpus(tmp_path: Path) -> None:
    installed = install(tmp_path / "i", "0.12.0")
    made = checkpoint(installed, tmp_path / "c", "--tp_size", 8)

    def dealt(workers: int, visible: str = "0,1,2,3,4,5,6,7") -> list[int]:
        done = run(
            installed,
            "trtllm-build",
            "--checkpoint_dir",
            made,
            "--output_dir",
            tmp_path / "e",
            "--workers",
            workers,
            variables={"CUDA_VISIBLE_DEVICES": visible},
        )
        assert done.returncode == 0, done.stderr
        return [json.loads((tmp_path / "e" / f"rank{rank}.engine").read_bytes())["gpu"] for rank in range(8)]

    assert dealt(1) == [0] * 8
    assert dealt(4) == [0, 1, 2, 3] * 2
    assert dealt(8, "3,5") == [3, 5] * 4
    done = run(installed, "trtllm-build", "--checkpoint_dir", made, variables={"CUDA_VISIBLE_DEVICES": ""})
    assert (done.returncode, "CUDA initialization failure" in done.stderr) == (1, True)


def test_under_mpi_each_rank_builds_its_own(tmp_path: Path) -> None:
    installed = install(tmp_path / "i", "0.12.0")
    made = checkpoint(installed, tmp_path / "c", "--tp_size", 2)
    for rank in ("0", "1"):
        environment = {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": "2"}
        run(installed, "trtllm-build", "--checkpoint_dir", made, "--output_dir", tmp_path / "e", variables=environment)
        assert len(list((tmp_path / "e").glob("*.engine"))) == int(rank) + 1


def test_the_timing_cache_lands_in_the_current_folder(tmp_path: Path) -> None:
    installed = install(tmp_path / "i", "0.12.0")
    made = checkpoint(installed, tmp_path / "c")
    here = tmp_path / "here"
    here.mkdir()
    run(installed, "trtllm-build", "--checkpoint_dir", made, "--output_dir", tmp_path / "e", cwd=here)
    assert [path.name for path in here.iterdir()] == ["model.cache"]


# --- hardware


@pytest.mark.parametrize(
    ("release", "sm", "code", "words"),
    [
        ("0.12.0", 80, 1, "Networks with FP8 precision require hardware"),
        ("0.11.0", 89, 1, "FP8 FMHA cannot be enabled"),
        ("0.12.0", 89, 0, ""),
        ("0.12.0", 90, 0, ""),
    ],
)
def test_fp8_needs_the_hardware_the_release_knows(tmp_path: Path, release: str, sm: int, code: int, words: str) -> None:
    installed = install(tmp_path / "i", release, sm=sm, hub_datasets=["cnn_dailymail"])
    out = tmp_path / "c"
    arguments = (
        "--model_dir",
        model(tmp_path / "m"),
        "--output_dir",
        out,
        "--qformat",
        "fp8",
        "--kv_cache_dtype",
        "fp8",
    )
    assert run(installed, "quantize.py", *arguments).returncode == 0
    done = run(installed, "trtllm-build", "--checkpoint_dir", out, "--use_fp8_context_fmha", "enable")
    assert done.returncode == code, done.stderr
    assert words in done.stderr


def test_fp8_context_fmha_is_turned_off_for_other_models(tmp_path: Path) -> None:
    installed = install(tmp_path / "i", "0.12.0")
    folder = engine(installed, tmp_path / "e", "--use_fp8_context_fmha", "enable")
    assert read(folder)["build_config"]["plugin_config"]["use_fp8_context_fmha"] == "disable"


def test_nvml_shows_the_gpus(tmp_path: Path) -> None:
    installed = install(tmp_path / "i", "0.12.0", gpus=2, sm=89, gpu_memory_gib=48)
    code = (
        "import os, json, pynvml as n; n.nvmlInit(); h = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())];"
        "print(json.dumps([[n.nvmlDeviceGetCudaComputeCapability(g), n.nvmlDeviceGetMemoryInfo(g).total >> 30] for g in h]"
        " + [n.nvmlSystemGetDriverVersion(), n.nvmlSystemGetCudaDriverVersion_v2(), os.path.exists('/dev/nvidiactl')]))"
    )
    environment = {**os.environ, **installed.environment}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[[8, 9], 48], [[8, 9], 48], "550.54.15", 12040, True]
    none = install(tmp_path / "none", "0.12.0", gpus=0)
    environment = {**os.environ, **none.environment}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "NVMLError_DriverNotLoaded: Driver Not Loaded" in done.stderr


# --- run.py


def test_run_answers_from_an_engine_of_its_own_release(tmp_path: Path) -> None:
    installed = install(tmp_path / "i", "0.12.0")
    folder = engine(installed, tmp_path / "e")
    arguments = ("--engine_dir", folder, "--tokenizer_dir", tmp_path / "llama-model", "--max_output_len", 3)
    done = run(installed, "run.py", *arguments, "--input_text", "one two")
    assert done.stdout.endswith('Input [Text 0]: "one two"\nOutput [Text 0 Beam 0]: "one two one"\n')
    assert '"-one -one -one"' in run(installed, "run.py", *arguments, "--input_text=-one").stdout
    longer = run(installed, "run.py", *arguments[:-1], 10**6, "--input_text", "one two")
    assert "Maximum input length (2) + maximum new tokens (1000000) exceeds the engine or specified" in longer.stderr
    newer = run(install(tmp_path / "newer", "0.14.0"), "run.py", *arguments)
    assert newer.returncode == 1
    assert "Version tag does not match" in newer.stderr
    elsewhere = run(install(tmp_path / "elsewhere", "0.12.0", sm=80), "run.py", *arguments)
    assert "incompatible device, expecting compute 8.0 got compute 9.0" in elsewhere.stderr
    untokenized = run(installed, "run.py", "--engine_dir", folder, "--max_output_len", 3)
    assert "Can't load tokenizer" in untokenized.stderr


def test_run_wants_as_many_ranks_as_the_engine_has(tmp_path: Path) -> None:
    installed = install(tmp_path / "i", "0.12.0")
    folder = engine(installed, tmp_path / "e", tp=2)
    arguments = ("--engine_dir", folder, "--tokenizer_dir", tmp_path / "llama-model", "--max_output_len", 3)
    alone = run(installed, "run.py", *arguments)
    assert alone.returncode == 1
    assert "mpiSize == tp * pp (1 vs 2)" in alone.stderr
    together = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
    assert run(installed, "run.py", *arguments, variables=together).returncode == 0
    (folder / "rank1.engine").write_bytes(b"{")
    assert "Failed to deserialize cuda engine" in run(installed, "run.py", *arguments, variables=together).stderr


# --- faults


@pytest.mark.parametrize("kind", sorted(WORDS))
def test_faults_fail_once_in_the_recorded_words(tmp_path: Path, kind: str) -> None:
    installed = install(tmp_path / "i", "0.12.0", fail={"convert_checkpoint.py": [Fault(kind)]})
    arguments = ("--model_dir", model(tmp_path / "m"), "--output_dir", tmp_path / "out")
    failed = run(installed, "convert_checkpoint.py:qwen", *arguments)
    assert failed.returncode == 1
    assert WORDS[kind].replace("{sm}", "9.0") in failed.stderr
    assert not (tmp_path / "out").exists()
    assert run(installed, "convert_checkpoint.py:qwen", *arguments).returncode == 0
    assert [start.exit for start in installed.invocations("convert_checkpoint.py")] == [1, 0]


def test_unknown_faults_are_refused() -> None:
    with pytest.raises(ValueError, match="no fault 'ooom'; there are build_oom"):
        Fault("ooom")


def test_a_start_that_is_refused_uses_up_no_fault(tmp_path: Path) -> None:
    installed = install(tmp_path / "i", "0.12.0", fail={"trtllm-build": [Fault("build_oom")]})
    assert run(installed, "trtllm-build", "--max_output_len", 8).returncode == 2
    made = checkpoint(installed, tmp_path / "c")
    assert "OutOfMemory" in run(installed, "trtllm-build", "--checkpoint_dir", made).stderr


def test_faults_are_counted_across_processes(tmp_path: Path) -> None:
    installed = install(tmp_path / "i", "0.12.0", fail={"quantize.py": [Fault("cuda_oom", times=2)]})
    source = model(tmp_path / "m")
    codes: list[int] = []

    def start(number: int) -> None:
        codes.append(
            run(installed, "quantize.py", "--model_dir", source, "--output_dir", tmp_path / f"o{number}").returncode
        )

    threads = [threading.Thread(target=start, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == [0, 0, 0, 0, 1, 1]
    assert len(installed.invocations("quantize.py")) == 6


def test_output_can_be_left_half_written(tmp_path: Path) -> None:
    installed = install(tmp_path / "i", "0.12.0")
    made = checkpoint(installed, tmp_path / "c", "--tp_size", 2)
    arguments = ("trtllm-build", "--checkpoint_dir", made, "--output_dir", tmp_path / "e")
    installed.fail("trtllm-build", Fault("half"), Fault("killed"))
    half = run(installed, *arguments)
    assert (half.returncode, "No space left on device" in half.stderr) == (1, True)
    assert (tmp_path / "e" / "config.json").exists()
    assert not (tmp_path / "e" / "rank1.engine").exists()
    assert run(installed, *arguments).returncode == -signal.SIGKILL
    assert [(start.exit, start.ended is None) for start in installed.invocations("trtllm-build")] == [
        (1, False),
        (None, True),
    ]


def test_hanging_ends_on_a_signal_unless_deaf(tmp_path: Path) -> None:
    installed = install(tmp_path / "i", "0.12.0")
    command = [str(installed.program("convert_checkpoint.py:qwen")), "--model_dir", str(model(tmp_path / "m"))]
    for fault, wanted in ((Fault("hang"), -signal.SIGTERM), (Fault("hang", deaf=True), -signal.SIGKILL)):
        installed.fail("convert_checkpoint.py:qwen", fault)
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"working\n"
            process.terminate()
            if fault.deaf:
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(0.5)
                process.kill()
            assert process.wait(30) == wanted


def test_programs_can_be_slow_and_builders_share_the_work(tmp_path: Path) -> None:
    installed = install(tmp_path / "i", "0.12.0", slow={"trtllm-build": 0.2})
    made = checkpoint(installed, tmp_path / "c", "--tp_size", 4)
    took = []
    for workers in (1, 4):
        run(installed, "trtllm-build", "--checkpoint_dir", made, "--output_dir", tmp_path / "e", "--workers", workers)
        last = installed.invocations("trtllm-build")[-1]
        assert last.ended is not None
        took.append(last.ended - last.started)
    assert took[0] >= 0.8
    assert 0.2 <= took[1] < took[0] - 0.3


def test_invocations_say_what_was_started_and_how(tmp_path: Path) -> None:
    installed = install(tmp_path / "i", "0.12.0")
    run(installed, "trtllm-build", "--bad", cwd=tmp_path, variables={"CUDA_VISIBLE_DEVICES": "2"})
    (start,) = installed.invocations()
    assert (start.tool, start.argv, start.cwd, start.cuda_visible_devices) == (
        "trtllm-build",
        ("--bad",),
        str(tmp_path),
        "2",
    )
    assert (start.release, start.rank, start.exit) == ("0.12.0", 0, 2)
    assert start.ended is not None
    assert start.started <= start.ended
    assert installed.invocations("quantize.py") == []


# --- trtllm-serve


@contextmanager
def serving(
    installed: Installation, *arguments: object, ready: bool = True
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(installed.program("trtllm-serve")), *map(str, arguments), "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 60
        while ready and time.monotonic() < deadline:
            try:
                assert get(f"http://127.0.0.1:{port}/health")[0] == 200
                break
            except urllib.error.URLError:
                assert process.poll() is None, process.communicate()[0]
                time.sleep(0.02)
        yield process, f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
        process.communicate()


def get(url: str, body: object = None) -> tuple[int, bytes]:
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def events(content: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in content.decode().split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_server_speaks_openai_s_protocols(tmp_path: Path) -> None:
    installed = install(tmp_path / "i", "1.2.0")
    with serving(installed, "serve", model(tmp_path / "qwen"), "--tp_size", 2, "--max_seq_len", 64) as (process, url):
        assert json.loads(get(f"{url}/version")[1]) == {"version": "1.2.0"}
        assert [entry["id"] for entry in json.loads(get(f"{url}/v1/models")[1])["data"]] == ["qwen"]
        assert isinstance(json.loads(get(f"{url}/metrics")[1]), list)
        assert get(f"{url}/nothing")[0] == 404
        ask = {"model": "qwen", "prompt": "abc", "max_tokens": 4}
        answer = json.loads(get(f"{url}/v1/completions", ask)[1])
        assert answer["choices"][0] == {"index": 0, "text": "defg", "finish_reason": "length"}
        assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        assert json.loads(get(f"{url}/v1/completions", {**ask, "stop": "f"})[1])["choices"][0]["text"] == "de"
        streamed = events(
            get(f"{url}/v1/completions", {**ask, "stream": True, "stream_options": {"include_usage": True}})[1]
        )
        assert "".join(event["choices"][0]["text"] for event in streamed[:-1]) == "defg"
        assert [event["choices"][0]["finish_reason"] for event in streamed[:-1]] == [None, None, None, "length"]
        assert (streamed[-1]["choices"], streamed[-1]["usage"]["completion_tokens"]) == ([], 4)
        chat = {"messages": [{"role": "user", "content": "ab"}], "max_completion_tokens": 3}
        assert json.loads(get(f"{url}/v1/chat/completions", chat)[1])["choices"][0]["message"]["content"] == "cde"
        streamed = events(get(f"{url}/v1/chat/completions", {**chat, "stream": True})[1])
        assert streamed[0]["choices"][0]["delta"] == {"role": "assistant"}
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in streamed) == "cde"
        status, refused = get(f"{url}/v1/completions", {**ask, "max_tokens": 64})
        assert (status, "max_seq_len (64)" in json.loads(refused)["message"]) == (400, True)
        assert get(f"{url}/v1/completions", {"max_tokens": 1})[0] == 400
        process.terminate()
        assert process.wait(30) == 0
    assert [start.exit for start in installed.invocations()] == [0]


@pytest.mark.parametrize(
    ("release", "arguments", "words"),
    [
        ("0.16.0", [], None),
        ("0.21.0", [], None),
        ("0.21.0", ["--backend", "pytorch"], "Should have a `model_type` key"),
        ("1.0.0", [], "Should have a `model_type` key"),
        ("1.0.0", ["--backend", "trt"], None),
        ("1.1.0", ["--backend", "tensorrt"], None),
        ("1.2.0", [], "Should have a `model_type` key"),
        ("1.2.0", ["--backend", "tensorrt"], None),
    ],
)
def test_an_engine_is_served_by_the_backend_its_release_wants(
    tmp_path: Path, release: str, arguments: list[str], words: str | None
) -> None:
    installed = install(tmp_path / "i", release)
    folder = engine(installed, tmp_path / "e")
    command = (folder, "--tokenizer", tmp_path / "llama-model", *arguments)
    with serving(installed, *command, ready=words is None) as (process, url):
        if words is None:
            assert get(f"{url}/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
        else:
            assert words in process.communicate(timeout=60)[0]
            assert process.returncode == 1


GPT2 = {**LLAMA, "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}


def test_a_model_or_a_form_of_weights_that_the_pytorch_runtime_lacks_is_refused(tmp_path: Path) -> None:
    installed = install(tmp_path / "i", "1.2.0")
    done = run(installed, "trtllm-serve", model(tmp_path / "gpt2", GPT2))
    assert "Unknown architecture for AutoModelForCausalLM: GPT2LMHeadModel" in done.stderr
    folder = model(tmp_path / "m")
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "W8A8_SQ_PER_CHANNEL"}}')
    done = run(installed, "trtllm-serve", folder)
    assert "unsupported quant mode" in done.stderr


JOB = {"precision": "fp8", "kv_cache_precision": None, "checkpoint_format": "hugging_face"}


def test_model_optimizer_quantizes_what_it_can(tmp_path: Path) -> None:
    installed = install(tmp_path / "i", "1.2.0", model_optimizer="0.47.0")
    program = "/x/model_optimizer/__main__.py"
    assert installed.environment["MODEL_OPTIMIZER_PYTHON"] == str(installed.program("model_optimizer"))

    def quantize(source: Path, out: str, **asked: str) -> subprocess.CompletedProcess[str]:
        job = {"params": {**JOB, **asked}, "inputs": {"model": str(source)}, "files": {}, "out": str(tmp_path / out)}
        (tmp_path / "job.json").write_text(json.dumps(job))
        return run(installed, "model_optimizer", program, tmp_path / "job.json")

    source = model(tmp_path / "m")
    assert quantize(source, "fp8").returncode == 0
    assert read(tmp_path / "fp8")["quantization_config"]["quant_method"] == "modelopt"
    stated = json.loads((tmp_path / "fp8/hf_quant_config.json").read_text())
    assert stated["quantization"] == {"quant_algo": "FP8", "kv_cache_quant_algo": None}
    with serving(installed, tmp_path / "fp8") as (_, url):
        assert get(f"{url}/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
    by_code = model(tmp_path / "code", {**QWEN, "auto_map": {"AutoModel": "ours.Model"}})
    (by_code / "ours.py").touch()
    experts = model(tmp_path / "experts", {**QWEN, "num_local_experts": 4})
    for refused, words in (
        (quantize(tmp_path / "fp8", "again"), "is quantized already"),
        (quantize(by_code, "code-fp8"), "contains custom code"),
        (quantize(experts, "awq", precision="int4_awq"), "AWQ of experts"),
        (quantize(model(tmp_path / "odd", {**QWEN, "hidden_size": 100}), "o", precision="nvfp4"), "groups of 16"),
    ):
        assert refused.returncode == 1
        assert words in refused.stderr


def test_a_taken_port_ends_the_server(tmp_path: Path) -> None:
    installed = install(tmp_path / "i", "1.2.0")
    source = model(tmp_path / "m")
    with serving(installed, source) as (_, url):
        done = run(installed, "trtllm-serve", source, "--host", "127.0.0.1", "--port", url.rpartition(":")[2])
        assert (done.returncode, "address already in use" in done.stderr) == (1, True)


def test_a_server_can_die_after_some_requests(tmp_path: Path) -> None:
    installed = install(
        tmp_path / "i", "1.2.0", fail={"trtllm-serve": [Fault("die", requests=1, signal=signal.SIGSEGV)]}
    )
    with serving(installed, model(tmp_path / "m")) as (process, url):
        assert get(f"{url}/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
        with pytest.raises((OSError, urllib.error.URLError)):
            get(f"{url}/v1/completions", {"prompt": "a", "max_tokens": 1})
        assert process.wait(30) == -signal.SIGSEGV


def test_a_server_starts_late_when_slow_and_refuses_more_ranks_than_gpus(tmp_path: Path) -> None:
    installed = install(tmp_path / "i", "1.2.0", gpus=2, slow={"trtllm-serve": 0.5})
    source = model(tmp_path / "m")
    started = time.monotonic()
    with serving(installed, source):
        assert time.monotonic() - started >= 0.5
    assert "4 ranks and 2 visible GPUs" in run(installed, "trtllm-serve", source, "--tp_size", 4).stderr
