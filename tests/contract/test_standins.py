"""The stand-ins for TensorRT-LLM's programs take what a release took, and refuse the rest in its words.

How they work is shown by the tests that use them; here they are held against what was recorded of the releases.
"""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from tests.standins import releases
from tests.standins.installation import Installation, install
from trtllm_pipeline.tensorrt.trtllm import program_options as options


def run(installed: Installation, tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(installed.program(tool)), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=installed.folder,
        env={**os.environ, **installed.environment},
        check=False,
    )


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
            {"serve", "embeddings", "mm_embedding_serve", "disaggregated", "disaggregated_mpi_worker"},
            ["pytorch"],
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
