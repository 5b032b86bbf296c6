"""The flow from a matrix to a report, in order. Each step is one function with one plain type as input and one as output.

    loaded = load(request)                              matrix and recipes, checked
    place = place_of(request, loaded)                   machine, nodes and executor: here, or a cluster
    cells = select_cells(request, loaded, machine)      cells, with a reason if they cannot work
    plan = runnable_plan(cells, store, machine)         stage runs, with models pinned and files digested
    done = run_with_retries(work)                       artifacts
    result = _report(done)                              rows, report.json

`bring_up_to_date` is the same for a command that only needs artifacts. `outlook` ends before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trtllm_pipeline.base import UsageError, writing
from trtllm_pipeline.orchestrate.plan.planner import (
    LOCAL,
    RAY,
    SLURM,
    Request,
    default_toolchain,
    load,
    machine_of,
    plan_cells,
    runnable_plan,
    select_cells,
)

if TYPE_CHECKING:
    from trtllm_pipeline.base import Machine
    from trtllm_pipeline.orchestrate.clusters.cluster import Cluster
    from trtllm_pipeline.orchestrate.matrix.validate import LoadedMatrix
    from trtllm_pipeline.orchestrate.plan.plan import Plan
    from trtllm_pipeline.orchestrate.results.report_file import CellResult
    from trtllm_pipeline.orchestrate.run.executor import Executor
    from trtllm_pipeline.orchestrate.run.forecast import Forecast, ForecastCheck
    from trtllm_pipeline.orchestrate.run.loop import Observer, Outcome
    from trtllm_pipeline.orchestrate.run.run_folder import RunFolder
    from trtllm_pipeline.orchestrate.run.scheduler import Capacity
    from trtllm_pipeline.orchestrate.run.work import Done
    from trtllm_pipeline.orchestrate.store.store import Store

BY_HAND: Final = "by-hand"
"""Run id of stages that run outside a run."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Machine, nodes and executor for stage runs."""

    machine: Machine
    """The machine that plans are made for: this one, or a node of a cluster."""
    nodes: Sequence[Capacity]
    """Capacities of the nodes. The first is this machine."""
    executor: Callable[[], Executor]
    """Creates an executor for one run of a plan."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a run."""

    run_id: str
    plan: Plan
    outcome: Outcome
    rows: tuple[CellResult, ...]
    untried: int = 0
    """Cells that ran out of memory and were not retried, because the run was about to stop."""
    forecast: ForecastCheck | None = None
    """The forecast compared with the run; None if nothing ran."""


def run(
    request: Request,
    store: Store,
    observer: Observer,
    *,
    command: tuple[str, ...] = (),
    keep_going: bool = True,
    name: str | None = None,
) -> Result:
    """Run everything in the request that is not up to date. Writes plan, report and lock file to the run's directory.

    The run's id ends with `name`, which later commands accept in its place.
    """
    from trtllm_pipeline.orchestrate.run.run_folder import begun, write_lock
    from trtllm_pipeline.orchestrate.run.work import run_with_retries, work_of

    store.check_writable()
    loaded = load(request)
    with store.in_use(), place_of(request, loaded) as place:
        cells = select_cells(request, loaded, place.machine, store)
        plan = runnable_plan(cells, store, place.machine, until=request.until)
        store.sweep()
        work = work_of(request, loaded, plan, store, place.nodes, place.executor)
        forecast = work.forecast()  # before the run exists: a run without a plan must not become the latest
        with begun(request, store, observer, command=command, name=name) as folder:
            folder.write_plan(plan, forecast)
            observer.planned(plan, forecast)
            toolchain = default_toolchain(request, loaded, plan.machine)
            write_lock(request, loaded, plan, folder.path / "lock", default_toolchain=toolchain)
            done = run_with_retries(
                work,
                observer,
                run_id=folder.id,
                keep_going=keep_going,
                expected_s=forecast.expected_s,
                until=request.until,
                replan=folder.write_plan,
            )
            return _report(request, done, forecast, folder)


def _report(request: Request, done: Done, forecast: Forecast, folder: RunFolder) -> Result:
    """The rows of all cells, written as report.json."""
    from trtllm_pipeline.orchestrate.results.report_file import NAME, report_json, rows
    from trtllm_pipeline.orchestrate.run.forecast import checked

    store, plan, outcome = folder.store, done.plan, done.outcome
    check = checked(plan, forecast, store.index.taken(folder.id), done.seconds, comparable=outcome.comparable)
    folder.forecast = None if check is None else check.to_json()
    table = rows(plan, store, outcome)
    writing.write_lines(folder.path / NAME, report_json(table, folder.id, str(request.matrix), forecast=check))
    folder.exit_code = outcome.exit_code
    return Result(folder.id, plan, outcome, table, done.untried, check)


def bring_up_to_date(request: Request, store: Store, observer: Observer) -> tuple[Plan, Outcome]:
    """Like `run`, for a command that only needs artifacts. The workspace's latest run, plan and report stay unchanged."""
    from trtllm_pipeline.orchestrate.run.executor import Executor
    from trtllm_pipeline.orchestrate.run.order import capacity
    from trtllm_pipeline.orchestrate.run.work import work_of

    loaded, machine = load(request), machine_of(request)
    plan = runnable_plan(select_cells(request, loaded, machine, store), store, machine, until=request.until)
    store.sweep()
    with store.in_use():
        work = work_of(request, loaded, plan, store, [capacity(machine)], Executor)
        return plan, work.run(observer, run_id=BY_HAND)


def outlook(request: Request, store: Store | None, workspace: Path) -> tuple[Plan, Forecast]:
    """The plan and its forecast. If there is no store yet, `workspace` is its future directory. Raises like `run`."""
    from trtllm_pipeline.orchestrate.run.forecast import forecast
    from trtllm_pipeline.orchestrate.run.work import present_of, rerun_of, source_of

    loaded = load(request)
    with place_of(request, loaded) as place:
        machine, nodes = place.machine, place.nodes
    plan = plan_cells(select_cells(request, loaded, machine, store), store, machine, until=request.until, guess=True)
    present = {} if store is None else present_of(plan, store)
    source = source_of(request, loaded, machine)
    offers = None if source is None else source.offers(plan, present)
    rerun = rerun_of(plan, request.rerun)
    return plan, forecast(plan, store, present, workspace=workspace, offers=offers, nodes=nodes, rerun=rerun)


@contextmanager
def place_of(request: Request, loaded: LoadedMatrix) -> Iterator[Placement]:
    """Yield the placement of the request's stage runs. Raises UsageError if there is no such cluster."""
    if request.ray_address is not None and request.executor != RAY:
        raise UsageError("--ray-address needs --executor ray")
    if request.executor in (None, LOCAL):
        from trtllm_pipeline.orchestrate.run.order import capacities

        machine = machine_of(request)
        yield Placement(machine, capacities(machine), _executor_here)
        return
    if request.assume is not None:
        raise UsageError(
            "--assume describes a machine, --executor uses those of a cluster", hint="leave one of them out"
        )
    from trtllm_pipeline.orchestrate.clusters.cluster import ClusterExecutor
    from trtllm_pipeline.orchestrate.clusters.exchange import Exchange
    from trtllm_pipeline.orchestrate.run.scheduler import Capacity

    exchange = _exchange(request, loaded)
    cluster = _cluster(request, loaded)
    try:
        yield Placement(
            cluster.machine,
            [Capacity(0), *cluster.nodes],
            lambda: ClusterExecutor(cluster, None if exchange is None else Exchange(exchange)),
        )
    finally:
        cluster.close()


def _executor_here() -> Executor:
    from trtllm_pipeline.orchestrate.run.executor import Executor  # not needed by a plan

    return Executor()


def _exchange(request: Request, loaded: LoadedMatrix) -> str | None:
    """Return the URL for files of nodes that do not share the workspace. None if they share it."""
    url: str | None = loaded.of_cluster("exchange")
    if url is not None and request.executor == SLURM:
        raise UsageError(
            "settings.cluster.exchange is for --executor ray", hint="Slurm nodes need the workspace at the same path"
        )
    return url if url is None or "://" in url else str((loaded.path.parent / Path(url).expanduser()).absolute())


def _cluster(request: Request, loaded: LoadedMatrix) -> Cluster:
    accelerators = loaded.gpu_types
    if accelerator := loaded.of_cluster("accelerator"):
        if accelerators:
            raise UsageError(
                "the matrix has an axis of GPU types, but settings.cluster.accelerator sets one type for all cells",
                hint="leave one of them out",
            )
        accelerators = (accelerator,)
    if request.executor == SLURM:
        from trtllm_pipeline.orchestrate.clusters.slurm_cluster import SlurmCluster

        return SlurmCluster(loaded.of_cluster("sbatch"), accelerators)
    try:
        from trtllm_pipeline.orchestrate.clusters.ray_cluster import RayCluster
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--executor ray needs the package {error.name}", hint="pip install 'trtllm-pipeline[ray]'"
        ) from error
    return RayCluster(request.ray_address, accelerators)
