"""The interface of a toolchain, and the table of them. To add one: a package with a `TOOLCHAIN`, a line in `_TABLE`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from trtllm_pipeline.base import Cell, Json, Machine, PlanError, UsageError
from trtllm_pipeline.tensorrt.stage.base import Stage
from trtllm_pipeline.tensorrt.stage.params import OPENAI_SERVERS
from trtllm_pipeline.tensorrt.toolchains.numerics import Numerics, unknown

DRAFTER: Final = "drafter"
"""Input of the stages that use the engine of another cell, see `Toolchain.drafter`."""
VISUAL: Final = "visual"
"""Input of the stages that use a visual engine, and the stage that builds it."""
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
"""Name -> module with a `TOOLCHAIN`, in order of preference: those that are detected on a machine."""
SERVERS: Final = (OPENAI, *OPENAI_SERVERS)
"""Toolchains that are other OpenAI-compatible servers, used if a matrix names them."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """One toolchain as the planner sees it."""

    name: str
    summary: str
    stages: tuple[Stage, ...]
    """In the order of the flow: a stage's inputs come before it."""
    missing: Callable[[Machine], str | None]
    """The requirement that a machine lacks, or None. Cheap: imports nothing heavy."""
    identity: Callable[[Machine], Mapping[str, Json]]
    """Versions and hardware that its stages' results depend on, by the names `Stage.identity` uses."""
    infeasible: Callable[[Cell, Machine], str | None]
    """Why a cell cannot work with it on a machine, or None."""
    drafter: Callable[[Cell], Cell | None] = lambda _cell: None
    """The cell of a draft model whose engine is served with a cell's own, or None. The same stages, up to `build`, build it, and
    other cells share it. Its engine is the input DRAFTER."""
    instead: Callable[[Cell, Machine], str | None] = lambda _cell, _machine: None
    """Another toolchain of a machine, for a model, precision or parallelism that this one does not support. None if this one
    does, or if no other does either."""
    gpus: Callable[[Cell], int] = lambda cell: cell.tp * cell.pp
    """GPUs of a cell's servers."""
    has_family: Callable[[str], bool] = lambda _family: True
    """False for a family of models that it serves in no release and on no machine."""
    numerics: Callable[[Cell], Numerics] = unknown
    """What a cell's precision means."""
    caveat: Callable[[Cell, Machine], str | None] = lambda _cell, _machine: None
    """The features of a cell's model or settings that its server ignores or may refuse, and an alternative, or None."""

    def stage(self, name: str) -> Stage:
        """The stage called `name`. Raises UsageError if this toolchain has none."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        known = ", ".join(stage.name for stage in self.stages)
        raise UsageError(f"toolchain {self.name} has no stage {name!r}", hint=f"its stages are: {known}")


def names() -> tuple[str, ...]:
    """Names of the toolchains that are detected on a machine, in order of preference."""
    return tuple(_TABLE)


def every_name() -> tuple[str, ...]:
    """The same, followed by the other OpenAI-compatible servers."""
    return (*_TABLE, *SERVERS)


@cache
def load(name: str) -> Toolchain:
    """The toolchain called `name`, whether or not this machine can use it. Raises UsageError for unknown names."""
    if name in SERVERS:
        servers: Mapping[str, Toolchain] = importlib.import_module(_OPENAI).TOOLCHAINS
        return servers[name]
    if name not in _TABLE:
        raise UsageError(f"unknown toolchain {name!r}", hint=f"known: {', '.join(every_name())}")
    toolchain: Toolchain = importlib.import_module(_TABLE[name]).TOOLCHAIN
    return toolchain


@cache
def with_command() -> Mapping[str, Stage]:
    """The stages that have a command, by name, each of the first toolchain that has it. Imports all toolchains."""
    found: dict[str, Stage] = {}
    for stage in (stage for name in every_name() for stage in load(name).stages if stage.examples):
        found.setdefault(stage.name, stage)
    return found


def detect(machine: Machine) -> Toolchain:
    """The first toolchain that `machine` supports. Raises PlanError with the missing requirements of each."""
    lacks: list[str] = []
    for name in _TABLE:
        # TensorRT-LLM's modules would be most of a small plan's imports. They are imported only if it is installed.
        missing = lacks_tensorrt_llm(machine) if name in (ENGINES, PYTORCH) else None
        missing = missing or load(name).missing(machine)
        if missing is None:
            return load(name)
        lacks.append(f"{name}: {missing}")
    raise PlanError(
        "no toolchain can be used on this machine\n  " + "\n  ".join(lacks),
        hint="for a machine without a GPU: pip install 'trtllm-pipeline[embedded]' (Python 3.10 to 3.12); "
        "`pipeline doctor` shows the installed programs",
    )


def serving(recipe: Mapping[str, Json]) -> list[str]:
    """The toolchains, of those that are detected on a machine, that serve a recipe's model on some machine."""
    listed, family = recipe.get("precisions"), str(recipe["family"])
    precisions = listed if isinstance(listed, Mapping) else {}
    return [name for name in _TABLE if precisions.get(name, True) and load(name).has_family(family)]


def lacks_tensorrt_llm(machine: Machine) -> str | None:
    """The requirement of both TensorRT-LLM backends that a machine lacks, or None."""
    if machine.tensorrt_llm is None:
        return "TensorRT-LLM is not installed"
    if not machine.gpus:
        return "there is no NVIDIA GPU"
    return None


def caveats(cells: Iterable[Cell], machine: Machine) -> list[str]:
    """The caveats of the servers of `cells` on a machine, each once, after the models' names."""
    models: dict[str, dict[str, None]] = {}
    for cell in cells:
        if (caveat := load(cell.toolchain).caveat(cell, machine.of(cell.gpu))) is not None:
            models.setdefault(caveat, {})[cell.model] = None
    return [f"{', '.join(names)}: {caveat}" for caveat, names in models.items()]
