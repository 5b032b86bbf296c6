"""Cells and toolchains made by hand, for tests of what stands above them."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

from trtllm_pipeline.base.domain import Cell, CellId, Exclusive, Resources, Scope
from trtllm_pipeline.base.machine.model import Machine
from trtllm_pipeline.show.cli.app import main
from trtllm_pipeline.tensorrt.stage.base import Stage
from trtllm_pipeline.tensorrt.stage.params import Param
from trtllm_pipeline.tensorrt.toolchains.catalog import Toolchain

MACHINE = Machine(cpus=2, cpu="test")


def make_cell(precision: str = "fp16", batch: int = 4, *, model: str = "m", **changes: Any) -> Cell:
    settings: dict[str, Any] = {name: {"timeout_s": None, "retries": None} for name in ("get", "make", "serve", "look")}
    settings["look"]["depth"] = 1
    values: dict[str, Any] = {
        "id": CellId(f"{model}/{precision}/bs{batch}"),
        "model": model,
        "toolchain": "toy",
        "precision": precision,
        "tp": 1,
        "pp": 1,
        "max_batch_size": batch,
        "isl": 8,
        "osl": 8,
        "recipe": {"source": {"local": model}},
        "settings": settings,
    }
    return Cell(**{**values, **changes})


@dataclass(frozen=True, kw_only=True)
class Get:
    source: Annotated[dict[str, Any], Param("where from")]


@dataclass(frozen=True, kw_only=True)
class Make:
    precision: Annotated[str, Param("of weights")]
    batch: Annotated[int, Param("size", ge=1)] = 1


@dataclass(frozen=True, kw_only=True)
class Serve:
    pass


@dataclass(frozen=True, kw_only=True)
class Look:
    depth: Annotated[int, Param("how deep", ge=1)] = 1


STAGES = (
    Stage(
        name="get",
        version=1,
        summary="fetch",
        program="x:run",
        shared=True,
        params=Get,
        read=lambda cell: Get(source=cell.recipe["source"]),
        resources=lambda _cell, _machine: Resources(cpus=0, downloads=1),
    ),
    Stage(
        name="make",
        version=1,
        summary="make",
        program="x:run",
        inputs={"model": "get"},
        params=Make,
        read=lambda cell: Make(precision=cell.precision, batch=cell.max_batch_size),
        identity=("tool",),
    ),
    Stage(
        name="serve",
        version=1,
        summary="serve",
        program="x:run",
        inputs={"engine": "make"},
        scope=Scope.SERVICE,
        params=Serve,
        read=lambda _cell: Serve(),
        resources=lambda _cell, _machine: Resources(exclusive=Exclusive.MACHINE),
    ),
    Stage(
        name="look",
        version=1,
        summary="look",
        program="x:run",
        inputs={"service": "serve", "engine": "make"},
        scope=Scope.IN_SERVICE,
        params=Look,
        read=lambda cell: Look(depth=cell.settings["look"]["depth"]),
        file_names=("data",),
        files=lambda _cell: {"data": "data.jsonl"},
    ),
)


def make_toolchain(version: str = "1") -> Toolchain:
    return Toolchain(
        name="toy",
        summary="for tests",
        stages=STAGES,
        missing=lambda _machine: None,
        identity=lambda _machine: {"tool": version},
        infeasible=lambda _cell, _machine: None,
    )


@pytest.fixture
def toolchain() -> Toolchain:
    return make_toolchain()


Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Types a command that is refused with exit code 2; what it says."""

    def typed(*words: str) -> str:
        assert main(words) == 2
        return capsys.readouterr().err

    return typed


Pipeline = Callable[..., tuple[int, str, str]]


@pytest.fixture
def pipeline(capsys: pytest.CaptureFixture[str]) -> Pipeline:
    """Types a command; its exit code, its output and its messages."""
    return lambda *words: (main(words), *capsys.readouterr())


@pytest.fixture
def make() -> Callable[[Path, str], None]:
    """Puts a directory or a named pipe in the place of a file, which need not be there."""

    def put(path: Path, kind: str) -> None:
        path.unlink(missing_ok=True)
        (os.mkdir if kind == "directory" else os.mkfifo)(path)

    return put
