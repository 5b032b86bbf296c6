"""What a command imports is part of what it costs: heavy packages come in only where they are used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trtllm_pipeline.config.recipes import matrices_folder

HEAVY = {
    "asyncio",
    "blake3",
    "concurrent.futures",
    "ctypes",
    "gguf",
    "grpc",
    "http",
    "httpx",
    "huggingface_hub",
    "jinja2",
    "modelscope_hub",
    "multiprocessing",
    "numpy",
    "pydantic",
    "rich",
    "socket",
    "sqlite3",
    "ssl",
    "subprocess",
    "tokenizers",
    "tritonclient",
    "urllib.request",
    "xllamacpp",
    "yaml",
}
OF_TYPER = {"subprocess"}
"""What Typer imports of these when it is imported; pydantic comes with the first option that has a value."""
NEEDED_TO_PLAN = {"blake3", "concurrent.futures", "pydantic", "socket", "sqlite3", "yaml"}
"""Reading the matrix, digesting the files it names, looking into the workspace, and the scheduler's forecast."""
_CALL = """
import sys
from trtllm_pipeline.cli.app import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
print(*sys.modules, file=sys.stderr)
sys.exit(code)
"""


def imported(*words: str) -> set[str]:
    # Measuring coverage imports things of its own.
    env = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    done = subprocess.run([sys.executable, "-c", _CALL, *words], capture_output=True, text=True, check=True, env=env)
    return set(done.stderr.splitlines()[-1].split())


def test_the_probe_sees_what_is_imported() -> None:
    assert {"typer", "trtllm_pipeline.cli.app"} <= imported("--version")


@pytest.mark.parametrize("words", [("--help",), ("--version",), ("matrix",)], ids=" ".join)
def test_help_imports_nothing_heavy_and_almost_nothing_of_ours(words: tuple[str, ...]) -> None:
    modules = imported(*words)
    assert modules & HEAVY <= OF_TYPER
    assert {name for name in modules if name.startswith("trtllm_pipeline.")} == {
        "trtllm_pipeline.cli",
        "trtllm_pipeline.cli.app",
        "trtllm_pipeline.terminal",
    }


def test_only_the_module_of_the_command_is_imported() -> None:
    modules = imported("report", "--help")
    assert "trtllm_pipeline.cli.report" in modules
    assert not {"trtllm_pipeline.cli.run", "trtllm_pipeline.cli.stage"} & modules


def test_planning_imports_no_server_no_model_and_no_terminal(tmp_path: Path) -> None:
    matrix = matrices_folder() / "tiny.yaml"
    modules = imported("plan", "--matrix", str(matrix), "--toolchain", "embedded", "--workspace", str(tmp_path / "w"))
    assert modules & HEAVY <= NEEDED_TO_PLAN | OF_TYPER
