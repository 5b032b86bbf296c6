"""What a command imports is part of what it costs: heavy packages come in only where they are used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trtllm_pipeline.orchestrate.matrix.recipe_files import matrices_folder

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
"""What Typer imports of these when it is imported."""
NEEDED_TO_PLAN = {"blake3", "concurrent.futures", "pydantic", "socket", "sqlite3", "yaml"}
"""Reading the matrix, digesting the files it names, looking into the workspace, and the scheduler's forecast."""
_CALL = """
import sys
from trtllm_pipeline.show.cli.app import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
print(*sys.modules, file=sys.stderr)
sys.exit(code)
"""


def imported(*words: str, call: str = _CALL) -> set[str]:
    # Measuring coverage imports things of its own.
    env = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    done = subprocess.run([sys.executable, "-c", call, *words], capture_output=True, text=True, check=True, env=env)
    return set(done.stderr.splitlines()[-1].split())


def test_the_probe_sees_what_is_imported() -> None:
    assert {"typer", "trtllm_pipeline.show.cli.app"} <= imported("--version")


@pytest.mark.parametrize("words", [("--help",), ("--version",), ("matrix",)], ids=" ".join)
def test_help_imports_nothing_heavy_and_almost_nothing_of_ours(words: tuple[str, ...]) -> None:
    modules = imported(*words)
    assert modules & HEAVY <= OF_TYPER
    assert {name for name in modules if name.startswith("trtllm_pipeline.")} == {
        "trtllm_pipeline.base",
        "trtllm_pipeline.doors",
        "trtllm_pipeline.show",
        "trtllm_pipeline.show.cli",
        "trtllm_pipeline.show.cli.app",
        "trtllm_pipeline.base.terminal",
    }


def test_only_the_module_of_the_command_is_imported() -> None:
    modules = imported("report", "--help")
    assert "trtllm_pipeline.show.cli.report" in modules
    assert not {"trtllm_pipeline.show.cli.run", "trtllm_pipeline.show.cli.stage"} & modules


@pytest.mark.thorough
@pytest.mark.parametrize("words", [("stage", "build", "--help"), ("--debug", "stage", "build", "--help")])
def test_commands_are_imported_wherever_their_name_stands(words: tuple[str, ...]) -> None:
    assert "trtllm_pipeline.show.cli.stage" in imported(*words)


@pytest.mark.thorough
def test_planning_imports_no_server_no_model_no_terminal_and_no_executor(tmp_path: Path) -> None:
    """Nor the command that the value of an option is called like."""
    matrix = matrices_folder() / "tiny.yaml"
    words = ("--matrix", str(matrix), "--toolchain", "embedded", "--until", "build", "--workspace", str(tmp_path / "w"))
    modules = imported("plan", *words)
    assert modules & HEAVY <= NEEDED_TO_PLAN | OF_TYPER
    assert modules >= {"trtllm_pipeline.show.cli.run", "trtllm_pipeline.orchestrate.run.forecast"}
    others = ("show.cli.stage", "tensorrt.trtllm.backends", "orchestrate.run.executor")
    assert not {f"trtllm_pipeline.{name}" for name in others} & modules


def test_looking_for_a_toolchain_imports_none_of_tensorrt_llm_where_that_is_not_installed() -> None:
    code = """
import sys
from contextlib import suppress
from dataclasses import replace
from trtllm_pipeline.base.errors import PlanError
from trtllm_pipeline.base.machine.probe import this_machine
from trtllm_pipeline.tensorrt.toolchains import catalog as base
with suppress(PlanError):
    base.detect(replace(this_machine(), tensorrt_llm=None))
print(*sys.modules)
"""
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "trtllm_pipeline.tensorrt.embedded" in modules
    assert "trtllm_pipeline.tensorrt.trtllm.backends" not in modules


EVENT_LOOP = {"asyncio", "concurrent.futures", "socket", "ssl", "subprocess"}
"""What asyncio imports, and is."""
MESSAGES = {"tritonclient"}
"""The package of Triton's messages, which come without its clients."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("program", "needed"),
    [
        ("tensorrt.stage.download", set()),
        ("tensorrt.stage.smoke", EVENT_LOOP | MESSAGES),
        ("tensorrt.stage.perf", set()),
        ("tensorrt.stage.accuracy", set()),
        ("tensorrt.stage.score", set()),
        ("tensorrt.embedded.build", {"concurrent.futures", "socket"}),
        ("tensorrt.embedded.repository", {"concurrent.futures"}),
    ],
)
def test_the_program_of_a_stage_begins_without_what_it_may_need_later(program: str, needed: set[str]) -> None:
    code = f"import sys, trtllm_pipeline.tensorrt.worker, trtllm_pipeline.{program}; print(*sys.modules)"
    env = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    modules = set(done.stdout.split())
    assert f"trtllm_pipeline.{program}" in modules
    assert modules & {*HEAVY, "typer"} <= needed


@pytest.mark.thorough
def test_messages_of_triton_come_without_its_clients_and_are_theirs_when_these_come() -> None:
    code = """
import sys
from trtllm_pipeline.models.triton_repository.triton_messages import model_config_pb2, service_pb2
print(*sys.modules)
import tritonclient.grpc
from tritonclient.grpc.model_config_pb2 import ModelConfig
assert tritonclient.grpc.InferenceServerClient
assert tritonclient.grpc.service_pb2 is service_pb2
assert ModelConfig is model_config_pb2.ModelConfig
"""
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "tritonclient.grpc.service_pb2" in modules
    assert not {"grpc", "numpy", "ml_dtypes", "tritonclient.utils"} & set(modules)


@pytest.mark.thorough
def test_messages_of_triton_are_those_of_its_clients_that_came_before() -> None:
    code = """
import tritonclient.grpc
from trtllm_pipeline.models.triton_repository.triton_messages import model_config_pb2
assert tritonclient.grpc.model_config_pb2 is model_config_pb2
assert tritonclient.grpc.InferenceServerClient
"""
    subprocess.run([sys.executable, "-c", code], check=True)
