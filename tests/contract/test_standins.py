"""The stand-ins for TensorRT-LLM's programs take what a release took, and refuse the rest in its words.

How they work is shown by the tests that use them; here they are held against what was recorded of the releases.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
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
from tests.standins.programs.checkpoint import safetensors
from trtllm_pipeline.tensorrt.trtllm import program_options as options

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
    """A Hugging Face directory of a few bytes."""
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
        ("0.11.0", ["--max_output_len", "--max_seq_len", "--tp_size"], ["--fast_build"]),
        ("0.12.0", ["--max_seq_len", "--builder_opt"], ["--max_output_len", "--tp_size", "--multi_block_mode"]),
        ("0.16.0", ["--user_buffer", "--auto_parallel"], ["--enable_xqa", "--norm_quant_fusion"]),
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


# --- refusing


@pytest.mark.parametrize(
    ("release", "tool", "arguments", "words"),
    [
        ("0.12.0", "trtllm-build", ["--max_output_len", "8"], "trtllm-build: error: unrecognized arguments: --max_output_len 8"),
        ("0.12.0", "trtllm-build", ["--gemm_plugin", "float8"], "error: argument --gemm_plugin: invalid choice: 'float8'"),
        ("0.12.0", "trtllm-build", ["--max_batch_size", "many"], "argument --max_batch_size: invalid int value: 'many'"),
        ("0.8.0", "quantize.py", [], "the following arguments are required: --model_dir"),
        ("0.16.0", "convert_checkpoint.py:qwen", ["--use_fp8"], "unrecognized arguments: --use_fp8"),
        ("0.12.0", "run.py", [], "run.py: error: the following arguments are required: --max_output_len"),
        ("0.18.2", "trtllm-serve", ["m", "--extra_llm_api_options", "x"], "Error: No such option: --extra_llm_api_options"),
        ("1.0.0", "trtllm-serve", ["m", "--backend", "tensorrt"], "Error: Invalid value for '--backend': 'tensorrt' is not one of 'pytorch', 'trt'."),
        ("1.2.0", "trtllm-serve", ["serve"], "Error: Missing argument 'MODEL'."),
        ("1.2.0", "trtllm-bench", ["throughput"], "Error: Missing option '--model'."),
        ("1.2.0", "trtllm-bench", ["--model", "m"], "Error: Missing command."),
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


@pytest.mark.parametrize(
    ("release", "qformat", "kv", "algorithm", "kv_algorithm"),
    [
        ("0.12.0", "fp8", "fp8", "FP8", "FP8"),
        ("0.12.0", "int4_awq", "int8", "W4A16_AWQ", "INT8"),
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


# --- faults


@pytest.mark.parametrize("kind", ["build_oom", "cuda_oom"])
def test_faults_fail_once_in_the_recorded_words(tmp_path: Path, kind: str) -> None:
    installed = install(tmp_path / "i", "0.12.0", fail={"convert_checkpoint.py": [Fault(kind)]})
    arguments = ("--model_dir", model(tmp_path / "m"), "--output_dir", tmp_path / "out")
    failed = run(installed, "convert_checkpoint.py:qwen", *arguments)
    assert failed.returncode == 1
    assert WORDS[kind].replace("{sm}", "9.0") in failed.stderr
    assert not (tmp_path / "out").exists()
    assert run(installed, "convert_checkpoint.py:qwen", *arguments).returncode == 0
    assert [start.exit for start in installed.invocations("convert_checkpoint.py")] == [1, 0]


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
        with urllib.request.urlopen(request, timeout=60) as answer:
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
