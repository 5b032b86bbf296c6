"""Plans a request: its cells with pinned models and their stage runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trtllm_pipeline.base import Cell, PlanError, Scope, UsageError
from trtllm_pipeline.orchestrate.plan import plan as planning
from trtllm_pipeline.orchestrate.plan import retries
from trtllm_pipeline.orchestrate.plan.plan import Plan
from trtllm_pipeline.orchestrate.plan.request import Request
from trtllm_pipeline.orchestrate.plan.selection import (
    infeasible,
    judged_again,
    lacks_memory_alone,
    load,
    machine_of,
    memory_check,
    select_cells,
)
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.tensorrt import catalog as toolchains
from trtllm_pipeline.tensorrt import load_levels, reachable

if TYPE_CHECKING:
    from trtllm_pipeline.base import Machine
    from trtllm_pipeline.orchestrate.plan.pins import Pins

logger = logging.getLogger(__name__)


def plan_of(request: Request, store: Store | None, *, guess: bool = False) -> Plan:
    """The plan of the selected cells. Raises MatrixError, UsageError, PlanError."""
    machine = machine_of(request)
    cells = select_cells(request, load(request), machine, store)
    return plan_cells(cells, store, machine, until=request.until, guess=guess)


def plan_cells(
    cells: Sequence[Cell], store: Store | None, machine: Machine, *, until: str | None = None, guess: bool = False
) -> Plan:
    """The plan for `cells` on `machine`, with every model pinned to one revision.

    Sends requests to a hub only for models that the store has not pinned yet. Cells that ran out of memory are planned with the
    changes that their `settings.retry` allows. With `guess`, a model without a reachable source is planned as in its recipe.
    Raises DownloadError.
    """
    from trtllm_pipeline.orchestrate.plan.pins import Pins  # status and similar commands read no matrix

    pins = Pins(store, guess=guess)
    memory = memory_check(store, machine)
    cells = [judged_again(pins.pin(cell), machine, memory) if cell.reason is None else cell for cell in cells]
    plan = _make(cells, machine, pins, until)
    return plan if store is None else replanned(plan, store, pins, until)


def _make(cells: Sequence[Cell], machine: Machine, pins: Pins, until: str | None) -> Plan:
    known = {name: toolchains.load(name) for name in sorted({cell.toolchain for cell in cells if cell.reason is None})}
    return planning.make_plan(cells, known, machine, digest=pins.digest, until=until)


def replanned(plan: Plan, store: Store, pins: Pins, until: str | None) -> Plan:
    """`plan` with the changes that its cells allow after the attempts so far, or `plan` itself."""

    def make(cells: Sequence[Cell]) -> Plan:
        return _make(cells, plan.machine, pins, until)

    return retries.followed(plan, make, store.index.attempts, lambda cell: infeasible(cell, plan.machine))


def check_feasible(plan: Plan) -> None:
    """Raise PlanError if no cell can work."""
    if not plan.feasible:
        from trtllm_pipeline.tensorrt import HUB_UNREACHED

        reasons = sorted({str(cell.reason) for cell in plan.cells})
        fit = (
            "; pipeline plan --fit proposes what fits into its memory"
            if any(lacks_memory_alone(cell, plan.machine) for cell in plan.cells)
            else ""
        )
        if any("\n" in reason for reason in reasons):
            hint = "with these lines in the matrix the same command continues"
        elif all(HUB_UNREACHED in reason for reason in reasons):
            hint = (
                "plan with access to the hub, list trusted files with their SHA-256 in "
                "settings.download.trust_remote_code, or use a local directory: model: [./FOLDER]; "
                "a newer transformers may support the model without code: --assume with transformers=VERSION"
            )
        else:
            hint = f"run pipeline doctor to see this machine; --assume MACHINE plans for another one{fit}"
        raise PlanError("no cell can work:\n  " + "\n  ".join(reasons[:10]), hint=hint)


def runnable_plan(cells: Sequence[Cell], store: Store, machine: Machine, *, until: str | None) -> Plan:
    """Like `plan_cells`, for a run. Raises PlanError if `machine` lacks a program of a toolchain, or if no cell can work."""
    if machine.assumed:
        raise UsageError(
            "--assume is for planning only, nothing can run on such a machine",
            hint="use pipeline plan, or run --dry-run",
        )
    from trtllm_pipeline.base import allow_open_files  # not needed for planning

    plan = plan_cells(cells, store, machine, until=until)
    check_feasible(plan)
    allow_open_files(_connections(plan))
    for name, gpu in sorted({(cell.toolchain, cell.gpu or "") for cell in plan.feasible}):
        missing = toolchains.load(name).missing(machine.of(gpu))
        if missing is not None:
            where = f"on nodes with {gpu}" if gpu and machine.types else "on this machine"
            raise PlanError(f"toolchain {name} cannot run {where}: {missing}", hint="`pipeline plan` works without it")
    for warning in (*exposed(plan), *toolchains.caveats(plan.feasible)):
        logger.warning("%s", warning)
    return plan


def _connections(plan: Plan) -> int:
    """Connections of the plan's largest load."""
    cells = [run.first_cell for run in plan.stage_runs.values() if run.stage.scope is Scope.IN_SERVICE]
    scored = [count for cell in cells if isinstance(count := cell.settings["accuracy"]["concurrency"], int)]
    return max((*scored, *(level for cell in cells for level in load_levels(cell))), default=0)


def exposed(plan: Plan) -> list[str]:
    """Warnings about server addresses that other machines can reach."""
    services = [run for run in plan.stage_runs.values() if run.stage.scope is Scope.SERVICE]
    hosts = {str(run.first_cell.settings["serve"]["host"]) for run in services}
    return [warning for host in sorted(hosts) if (warning := reachable(host))]
