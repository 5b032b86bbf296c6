"""What a toolchain offers, and the table of them. To add one: a package with a `TOOLCHAIN`, a line in `_TABLE`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from trtllm_pipeline.base import Cell, Json, Machine, PlanError, UsageError
from trtllm_pipeline.tensorrt.stage.base import Stage
from trtllm_pipeline.tensorrt.stage.params import OPENAI_SERVERS

DRAFTER: Final = "drafter"
"""Input of the stages that take the engine of another cell, see `Toolchain.drafter`."""
VISUAL: Final = "visual"
"""Input of the stages that take a visual engine, and the stage that builds it."""
ENGINES: Final = "tensorrt_llm"
PYTORCH: Final = "tensorrt_llm_pytorch"
EMBEDDED: Final = "embedded"
OPENAI: Final = "openai"
_OPENAI: Final = "trtllm_pipeline.tensorrt.others.toolchain"
_TABLE: Final = {
    ENGINES: "trtllm_pipeline.tensorrt.trtllm.engine_backend",
    PYTORCH: "trtllm_pipeline.tensorrt.trtllm.pytorch_backend",
    EMBEDDED: "trtllm_pipeline.tensorrt.embedded.toolchain",
}
"""Name -> module with a `TOOLCHAIN`, the preferred first: those that are looked for on a machine."""
SERVERS: Final = (OPENAI, *OPENAI_SERVERS)
"""Toolchains that are other OpenAI-compatible servers, which are taken where a matrix names them."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """One toolchain as the planner sees it."""

    name: str
    summary: str
    stages: tuple[Stage, ...]
    """In the order of the flow: a stage's inputs come before it."""
    missing: Callable[[Machine], str | None]
    """What a machine lacks to use it, or None. Cheap; imports nothing heavy."""
    identity: Callable[[Machine], Mapping[str, Json]]
    """Versions and hardware that its stages' results depend on, by the names `Stage.identity` uses."""
    infeasible: Callable[[Cell, Machine], str | None]
    """Why a cell can never work with it on a machine, or None."""
    drafter: Callable[[Cell], Cell | None] = lambda _cell: None
    """The cell of a draft model whose engine a cell is served with beside its own, or None. It is made by the same stages, up
    to `build`, and so shared with other cells; its engine is the input DRAFTER."""
    instead: Callable[[Cell, Machine], str | None] = lambda _cell, _machine: None
    """The toolchain of a machine for a model that this one does not take, or not in the cell's precision or layout; None if it
    does, or if no other does either."""
    caveat: Callable[[Cell], str | None] = lambda _cell: None
    """What of a cell's model or settings its server leaves out, and what to set instead, or None."""

    def stage(self, name: str) -> Stage:
        """The stage called `name`. Raises UsageError when this toolchain has none."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        known = ", ".join(stage.name for stage in self.stages)
        raise UsageError(f"toolchain {self.name} has no stage {name!r}", hint=f"its stages are: {known}")


def names() -> tuple[str, ...]:
    """Names of the toolchains that are looked for on a machine, the preferred first."""
    return tuple(_TABLE)


def every_name() -> tuple[str, ...]:
    """The same, and after them the other OpenAI-compatible servers."""
    return (*_TABLE, *SERVERS)


@cache
def load(name: str) -> Toolchain:
    """The toolchain called `name`, whether or not this machine can use it. Raises UsageError for unknown names."""
    if name in SERVERS:
        servers: Mapping[str, Toolchain] = importlib.import_module(_OPENAI).TOOLCHAINS
        return servers[name]
    if name not in _TABLE:
        raise UsageError(f"there is no toolchain {name!r}", hint=f"known are: {', '.join(every_name())}")
    found: Toolchain = importlib.import_module(_TABLE[name]).TOOLCHAIN
    return found


def detect(machine: Machine) -> Toolchain:
    """The first toolchain that `machine` has all of. Raises PlanError with what each of them lacks."""
    lacks: list[str] = []
    for name in _TABLE:
        # Most of a small plan's modules of ours would be TensorRT-LLM's: they are imported where it is.
        missing = lacks_tensorrt_llm(machine) if name in (ENGINES, PYTORCH) else None
        missing = missing or load(name).missing(machine)
        if missing is None:
            return load(name)
        lacks.append(f"{name}: {missing}")
    raise PlanError(
        "no toolchain can be used on this machine\n  " + "\n  ".join(lacks),
        hint="for a machine without a GPU: pip install 'trtllm-pipeline[embedded]' (Python 3.10 to 3.12); "
        "`pipeline doctor` shows what is there",
    )


def lacks_tensorrt_llm(machine: Machine) -> str | None:
    """What both backends of TensorRT-LLM need and a machine does not have, or None."""
    if machine.tensorrt_llm is None:
        return "TensorRT-LLM is not installed"
    if not machine.gpus:
        return "there is no NVIDIA GPU"
    return None


def caveats(cells: Iterable[Cell]) -> list[str]:
    """What servers of `cells` leave out of their models, each once, after the models' names."""
    models: dict[str, dict[str, None]] = {}
    for cell in cells:
        if (said := load(cell.toolchain).caveat(cell)) is not None:
            models.setdefault(said, {})[cell.model] = None
    return [f"{', '.join(names)}: {said}" for said, names in models.items()]
