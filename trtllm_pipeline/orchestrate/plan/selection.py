"""Selects the cells of a request and checks if they can work on a machine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from trtllm_pipeline.base import Cell, Scope, UsageError
from trtllm_pipeline.models import AS_IS
from trtllm_pipeline.orchestrate.plan.request import Request
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.tensorrt import catalog as toolchains

if TYPE_CHECKING:
    from trtllm_pipeline.base import Machine
    from trtllm_pipeline.orchestrate.matrix.validate import LoadedMatrix

logger = logging.getLogger(__name__)


def load(request: Request) -> LoadedMatrix:
    """The matrix with its recipes. Raises MatrixError, UsageError."""
    from trtllm_pipeline.orchestrate.matrix.validate import load_matrix

    return load_matrix(request.matrix, request.sets)


def machine_of(request: Request) -> Machine:
    """The machine of the request: an assumed one, or this one. Warns if its release of TensorRT-LLM is unknown.

    Raises UsageError.
    """
    if request.assume is not None:
        from trtllm_pipeline.base import parse

        machine = parse(request.assume)
    else:
        from trtllm_pipeline.base import this_machine

        machine = this_machine()
    for release in {
        each.tensorrt_llm.release for each in (machine, *dict(machine.types).values()) if each.tensorrt_llm
    }:
        from trtllm_pipeline.tensorrt import releases

        if (warning := releases.unknown(release)) is not None:
            logger.warning("%s", warning)
    return machine


def default_toolchain(request: Request, loaded: LoadedMatrix, machine: Machine) -> str:
    """Default toolchain of cells: the request's, the matrix's, or that of `machine`."""
    if toolchain := request.toolchain or loaded.written.get("toolchain"):
        return toolchains.load(toolchain).name
    named = loaded.axes["toolchain"]
    return toolchains.detect(machine).name if named is None or "auto" in named else str(named[0])


def select_cells(
    request: Request, loaded: LoadedMatrix, machine: Machine, store: Store | None = None
) -> tuple[Cell, ...]:
    """The selected cells. Infeasible cells have a reason.

    Memory is estimated, corrected by measurements in `store`. Raises MatrixError, UsageError, PlanError.
    """
    memory = memory_check(store, machine)
    return expanded(
        request,
        loaded,
        machine,
        lambda cell: lacks_gpu(cell, machine) or infeasible(cell, machine) or memory(cell),
    )


def expanded(
    request: Request,
    loaded: LoadedMatrix,
    machine: Machine,
    feasibility: Callable[[Cell], str | None] = lambda _cell: None,
) -> tuple[Cell, ...]:
    """The selected cells with the toolchains of `machine`, see `expand`. Only selected cells are checked."""
    from trtllm_pipeline.orchestrate.matrix.expand import expand, judged, select, with_control

    if len(machine.types) > 1 and not loaded.gpu_types:
        types = ", ".join(name for name, _ in machine.types)
        raise UsageError(
            f"there are several types of GPU ({types}), and the matrix does not select one",
            hint=f"--set 'axes.gpu=[{types}]'",
        )
    toolchain, installed = default_toolchain(request, loaded, machine), machine.tensorrt_llm
    release = None if installed is None else installed.release
    fixed = request.toolchain or loaded.written.get("toolchain")
    cells = expand(
        loaded,
        default_toolchain=toolchain,
        instead=None if fixed else lambda cell: toolchains.load(toolchain).instead(cell, machine.of(cell.gpu)),
        release=release,
    )
    cells = with_control(cells, lambda cell: len(machine.of(cell.gpu).gpus), feasibility)
    return tuple([judged(cell, feasibility) for cell in select(cells, request.cells)])


def infeasible(cell: Cell, machine: Machine) -> str | None:
    """The reason why the toolchain cannot build or serve a cell on `machine`, or None."""
    return toolchains.load(cell.toolchain).infeasible(cell, machine.of(cell.gpu))


def lacks_gpu(cell: Cell, machine: Machine) -> str | None:
    """The reason why a cell cannot use the requested type of GPU, or None."""
    if cell.gpu is None:
        return None
    if (lacks := machine.lacks(cell.gpu)) is not None:
        return lacks
    servers = [each for each in toolchains.load(cell.toolchain).stages if each.scope is Scope.SERVICE]
    if any(each.resources(cell, machine.of(cell.gpu)).gpus for each in servers):
        return None
    return f"it is for GPUs of type {cell.gpu}, and its server uses no GPU"


def memory_check(store: Store | None, machine: Machine) -> Callable[[Cell], str | None]:
    """Returns a function for the reason why `machine` lacks memory for a cell. Measurements in `store` are read once, on first use."""
    from trtllm_pipeline.orchestrate.memory import estimates

    @cache
    def corrections() -> estimates.Corrections:
        return estimates.Corrections(() if store is None else store.index.peaks(), machine)

    return lambda cell: estimates.infeasible(cell, toolchains.load(cell.toolchain).stages, machine, corrections())


def judged_again(cell: Cell, machine: Machine, memory: Callable[[Cell], str | None]) -> Cell:
    """Check a pinned cell. Only pinning reveals the quantization of its weights, its draft model and adapters, the `memory` of
    these, and the code that loads it.
    """
    if cell.reason is not None:
        return cell
    toolchain, reason = toolchains.load(cell.toolchain), None
    drafter = toolchain.drafter(cell)
    if drafter is not None:
        reason = infeasible(drafter, machine)
        reason = None if reason is None else f"settings.speculative.model {drafter.model}: {reason}"
    elif cell.precision == AS_IS or "code" in cell.recipe:
        reason = infeasible(cell, machine)
    if reason is None and cell.companions:
        reason = memory(cell)
    return cell if reason is None else replace(cell, reason=reason)


def lacks_memory_alone(cell: Cell, machine: Machine) -> bool:
    """True if a cell that cannot work here could work with more memory."""
    from trtllm_pipeline.orchestrate.memory.estimates import without_limits

    unjudged = replace(cell, reason=None)
    return infeasible(unjudged, machine) is not None and not infeasible(unjudged, without_limits(machine))
