"""Cells of other OpenAI-compatible servers, and their command lines: nothing is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers.trtllm_cells import RECIPE, settings_of
from trtllm_pipeline.base.domain import Cell, CellId
from trtllm_pipeline.base.machine.assume import parse
from trtllm_pipeline.tensorrt.others.server import argv
from trtllm_pipeline.tensorrt.servers.command_lines import Ports
from trtllm_pipeline.tensorrt.toolchains import catalog as toolchains

H100S = parse("sm=90,gpus=4,gpu_memory_gib=80")
PORTS = Ports(8000, 8001, 8002)


def cell(toolchain: str = "vllm", precision: str = "bf16", **changes: Any) -> Cell:
    """A cell; `openai__url` is settings.openai.url."""
    own = {
        name: changes.pop(name)
        for name in ("tp", "pp", "ep", "dp", "isl", "osl", "max_batch_size", "recipe")
        if name in changes
    }
    given = {
        "id": CellId("small"),
        "model": "small",
        "pp": 1,
        "tp": 1,
        "max_batch_size": 4,
        "isl": 128,
        "osl": 32,
        "recipe": RECIPE,
        **own,
    }
    settings = settings_of({name.replace("__", "."): value for name, value in changes.items()})
    return Cell(toolchain=toolchain, precision=precision, settings=settings, **given)


def started(one: Cell, **inputs: str) -> list[str]:
    """The command line that starts the server of a cell, with these directories."""
    asked = toolchains.load(one.toolchain).stage("launch").read(one)
    return argv(asked, {name: Path(path) for name, path in inputs.items()}, "127.0.0.1", PORTS)
