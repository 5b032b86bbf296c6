"""The stand-ins for TensorRT-LLM's programs take what a release took, and refuse the rest in its words.

How they work is shown by the tests that use them; here they are held against what was recorded of the releases.
"""

from __future__ import annotations

import os
import subprocess
from itertools import product
from pathlib import Path

import pytest

from tests.standins import releases
from tests.standins.installation import install
from trtllm_pipeline.tensorrt.trtllm import program_options as options

CONVERTERS = tuple(f"convert_checkpoint.py:{family}" for family in ("llama", "qwen", "gpt", "phi"))


@pytest.mark.parametrize(
    ("tool", "release"),
    [
        *product(("trtllm-build",), ("0.8.0", "0.9.0", "0.11.0", "0.12.0", "0.15.0", "0.16.0", "0.19.0", "1.2.0")),
        *product(CONVERTERS, ("0.12.0", "0.16.0", "1.2.0")),
        *product((releases.SERVE,), ("0.15.0", "0.18.2", "0.19.0", "1.0.0", "1.1.0")),
    ],
)
def test_a_program_has_the_options_that_the_table_says_of_its_release(tool: str, release: str) -> None:
    table = releases.table(tool, release)
    assert table is not None
    found = table["serve"] if "serve" in table else table[tool]
    assert {*found} == {name for name in options.load()[tool].options if options.exists(tool, release, name)}


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
    done = subprocess.run(
        [str(installed.program(tool)), *(required.get(tool, []) if arguments else []), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=installed.folder,
        env={**os.environ, **installed.environment},
        check=False,
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.lower().startswith("usage: ")
    assert "Traceback" not in done.stderr
    assert [(start.tool, start.exit) for start in installed.invocations()] == [(tool, 2)]
