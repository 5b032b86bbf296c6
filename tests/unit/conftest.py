"""Cells and toolchains made by hand, for tests of what stands above them."""

from __future__ import annotations

from typing import Any

import pytest

from trtllm_pipeline.domain import Cell, CellId, Resources, Scope
from trtllm_pipeline.machine.model import Machine
from trtllm_pipeline.stages.base import Option, Stage
from trtllm_pipeline.toolchains.base import Toolchain

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


STAGES = (
    Stage(
        name="get",
        version=1,
        summary="fetch",
        program="x:run",
        shared=True,
        options=(Option("source", "json", "where from", required=True),),
        params=lambda cell: {"source": cell.recipe["source"]},
        resources=lambda _cell, _machine: Resources(cpus=0, downloads=1),
    ),
    Stage(
        name="make",
        version=1,
        summary="make",
        program="x:run",
        inputs={"model": "get"},
        options=(Option("precision", "str", "of weights", required=True), Option("batch", "int", "size", default=1)),
        params=lambda cell: {"precision": cell.precision, "batch": cell.max_batch_size},
        identity=("tool",),
    ),
    Stage(
        name="serve",
        version=1,
        summary="serve",
        program="x:run",
        inputs={"engine": "make"},
        scope=Scope.SERVICE,
        options=(),
        params=lambda _cell: {},
        resources=lambda _cell, _machine: Resources(exclusive=True),
    ),
    Stage(
        name="look",
        version=1,
        summary="look",
        program="x:run",
        inputs={"service": "serve", "engine": "make"},
        scope=Scope.INSIDE,
        options=(Option("depth", "int", "how deep", default=1),),
        params=lambda cell: {"depth": cell.settings["look"]["depth"]},
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
