"""The flow from a matrix to a report, in order. Each step is one function with one plain type on either side.

    loaded = load(request)                    matrix + recipes, checked
    machine = machine_of(request)             what it is for: this machine, or an assumed one
    cells = select_cells(request, loaded, machine)     -> cells
    plan = plan_cells(cells, store, machine)  -> plan, with models pinned and files digested
    result = run(request, ...)                all of it: plan -> stage runs -> artifacts -> report

`bring_up_to_date` is the same for a command that wants artifacts only; `served_cell` is what all of it left of one cell.
"""

from __future__ import annotations

import logging
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trtllm_pipeline.domain import Cell, CellId, Fingerprint, Scope, StageRunId
from trtllm_pipeline.errors import MatrixError, PlanError, StateError, UsageError
from trtllm_pipeline.files.quantization import AS_IS
from trtllm_pipeline.files.writing import write_json, write_lines
from trtllm_pipeline.planning import plan as planning
from trtllm_pipeline.planning import retries, runs
from trtllm_pipeline.planning.plan import Plan, StageRun
from trtllm_pipeline.planning.request import LOCAL, RAY, REQUEST_FILE, SLURM, Request, read_request
from trtllm_pipeline.planning.runs import run_folders
from trtllm_pipeline.serving.command_lines import reachable
from trtllm_pipeline.stages.base import SERVICE_FILE
from trtllm_pipeline.store.index import Artifact
from trtllm_pipeline.store.store import Store
from trtllm_pipeline.toolchains import base as toolchains

if TYPE_CHECKING:
    from trtllm_pipeline.config.loaded import LoadedMatrix
    from trtllm_pipeline.execution.cluster import Cluster
    from trtllm_pipeline.execution.executor import Executor
    from trtllm_pipeline.execution.forecast import Forecast
    from trtllm_pipeline.execution.loop import Observer, Outcome
    from trtllm_pipeline.execution.pulling import RemoteSource
    from trtllm_pipeline.execution.scheduler import Capacity
    from trtllm_pipeline.machine.model import Machine
    from trtllm_pipeline.planning.pins import Pins
    from trtllm_pipeline.report.fits import Fits
    from trtllm_pipeline.report.forecast_check import ForecastCheck
    from trtllm_pipeline.report.plan_difference import PlanDifference
    from trtllm_pipeline.report.rows import CellResult

logger = logging.getLogger(__name__)

PLAN_FILE: Final = "plan.json"
REPORT_FILE: Final = "report.json"
BY_HAND: Final = "by-hand"
"""Stands for a run where single stages were asked for."""
_SAME_SECOND_S: Final = 0.05


def load(request: Request) -> LoadedMatrix:
    """The matrix with the recipes it names. Raises MatrixError, UsageError."""
    from trtllm_pipeline.config.validate import load_matrix

    return load_matrix(request.matrix, request.sets)


def machine_of(request: Request) -> Machine:
    """The machine that the request is for: an assumed one, or this one. Raises UsageError."""
    if request.assume is not None:
        from trtllm_pipeline.machine.assume import parse

        return parse(request.assume)
    from trtllm_pipeline.machine.probe import this_machine

    return this_machine()


@dataclass(frozen=True, slots=True)
class Placement:
    """Where stage runs go."""

    machine: Machine
    """What plans are made for: this machine, or a node of a cluster."""
    nodes: Sequence[Capacity]
    """What there is to hand out; the first is this machine."""
    executor: Callable[[], Executor]
    """A new one, for one run of a plan."""


@contextmanager
def place_of(request: Request, loaded: LoadedMatrix) -> Iterator[Placement]:
    """Where the request's stage runs go. Raises UsageError where there is no such cluster."""
    from trtllm_pipeline.execution.forecast import capacities
    from trtllm_pipeline.execution.scheduler import Capacity

    if request.ray_address is not None and request.executor != RAY:
        raise UsageError("--ray-address needs --executor ray")
    if request.executor in (None, LOCAL):
        machine = machine_of(request)
        yield Placement(machine, capacities(machine), _executor_here)
        return
    if request.assume is not None:
        raise UsageError(
            "--assume describes a machine, --executor asks a cluster for one", hint="leave one of them out"
        )
    from trtllm_pipeline.execution.cluster import ClusterExecutor
    from trtllm_pipeline.execution.exchange import Exchange

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
    from trtllm_pipeline.execution.executor import Executor  # a plan needs none

    return Executor()


def _exchange(request: Request, loaded: LoadedMatrix) -> str | None:
    """Where files pass between the pipeline and nodes that do not see the workspace; None where they do."""
    url: str | None = loaded.of_cluster("exchange")
    if url is not None and request.executor == SLURM:
        raise UsageError(
            "settings.cluster.exchange is for --executor ray", hint="nodes of Slurm need the workspace at the same path"
        )
    return url if url is None or "://" in url else str((loaded.path.parent / Path(url).expanduser()).absolute())


def _cluster(request: Request, loaded: LoadedMatrix) -> Cluster:
    accelerators = _gpu_types(loaded)
    if accelerator := loaded.of_cluster("accelerator"):
        if accelerators:
            raise UsageError(
                "the matrix has the types of GPU among its axes, and settings.cluster.accelerator names one for all cells",
                hint="leave one of them out",
            )
        accelerators = (accelerator,)
    if request.executor == SLURM:
        from trtllm_pipeline.execution.slurm_cluster import SlurmCluster

        return SlurmCluster(loaded.of_cluster("sbatch"), accelerators)
    try:
        from trtllm_pipeline.execution.ray_cluster import RayCluster
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--executor ray needs the package {error.name}", hint="pip install 'trtllm-pipeline[ray]'"
        ) from error
    return RayCluster(request.ray_address, accelerators)


def _gpu_types(loaded: LoadedMatrix) -> tuple[str, ...]:
    """The types of GPU that cells are for; none where the matrix says nothing of them."""
    added = [str(cell["gpu"]) for cell in loaded.added if cell["gpu"] is not None]
    return tuple(dict.fromkeys((*(loaded.axes["gpu"] or ()), *added)))


def default_toolchain(request: Request, loaded: LoadedMatrix, machine: Machine) -> str:
    """The toolchain of cells that name none: the request's, the matrix's, or what `machine` has."""
    if asked := request.toolchain or loaded.written.get("toolchain"):
        return toolchains.load(asked).name
    named = loaded.axes["toolchain"]
    return toolchains.detect(machine).name if named is None or "auto" in named else str(named[0])


def select_cells(
    request: Request, loaded: LoadedMatrix, machine: Machine, store: Store | None = None
) -> tuple[Cell, ...]:
    """The cells of the matrix that the request selects, with why one cannot work, if that is so.

    What needs more memory than the machine has is known by estimates, corrected by what `store` has of measurements.
    Raises MatrixError, UsageError, PlanError.
    """
    memory = _memory(store, machine)

    def infeasible(cell: Cell) -> str | None:
        return _lacks_gpu(cell, machine) or _infeasible(cell, machine) or memory(cell)

    return _expanded(request, loaded, machine, infeasible)


def _infeasible(cell: Cell, machine: Machine) -> str | None:
    """Why its toolchain cannot make or serve a cell on `machine`."""
    return toolchains.load(cell.toolchain).infeasible(cell, machine.of(cell.gpu))


def _lacks_gpu(cell: Cell, machine: Machine) -> str | None:
    """Why a cell that is for a type of GPU cannot have one."""
    if cell.gpu is None:
        return None
    if (lacks := machine.lacks(cell.gpu)) is not None:
        return lacks
    servers = [each for each in toolchains.load(cell.toolchain).stages if each.scope is Scope.SERVICE]
    if any(each.resources(cell, machine.of(cell.gpu)).gpus for each in servers):
        return None
    return f"it is for GPUs of type {cell.gpu}, and its server takes none"


def _memory(store: Store | None, machine: Machine) -> Callable[[Cell], str | None]:
    """Tells why a cell cannot work on `machine` for want of memory. What `store` has of measurements is read once, when asked."""
    from trtllm_pipeline.planning import needs

    @cache
    def corrections() -> needs.Corrections:
        return needs.Corrections(() if store is None else store.index.peaks(), machine)

    return lambda cell: needs.infeasible(cell, toolchains.load(cell.toolchain).stages, machine, corrections())


def _expanded(
    request: Request,
    loaded: LoadedMatrix,
    machine: Machine,
    feasibility: Callable[[Cell], str | None] = lambda _cell: None,
) -> tuple[Cell, ...]:
    """The cells that the request selects, with the toolchains of `machine`; see `expand`. What is not selected is not judged."""
    from trtllm_pipeline.config.expand import expand, judged, select, with_control

    if len(machine.types) > 1 and not _gpu_types(loaded):
        types = ", ".join(name for name, _ in machine.types)
        raise UsageError(
            f"there are several types of GPU ({types}), and the matrix does not say which its cells are for",
            hint=f"--set 'axes.gpu=[{types}]'",
        )
    toolchain, installed = default_toolchain(request, loaded, machine), machine.tensorrt_llm
    release = None if installed is None else installed.release
    told = request.toolchain or loaded.written.get("toolchain")
    cells = expand(
        loaded,
        default_toolchain=toolchain,
        instead=None if told else lambda cell: toolchains.load(toolchain).instead(cell, machine.of(cell.gpu)),
        release=release,
    )
    cells = with_control(cells, lambda cell: len(machine.of(cell.gpu).gpus), feasibility)
    return tuple([judged(cell, feasibility) for cell in select(cells, request.cells)])


def plan_of(request: Request, store: Store | None, *, guess: bool = False) -> Plan:
    """The plan for all that the request selects. Raises MatrixError, UsageError, PlanError."""
    return _plan(request, load(request), store, machine_of(request), guess=guess)


def outlook(request: Request, store: Store | None, workspace: Path) -> tuple[Plan, Forecast]:
    """The plan, and what running it would do. Where there is no store yet, `workspace` is where it would be. Raises as `plan_of`."""
    from trtllm_pipeline.execution.forecast import forecast

    loaded = load(request)
    with place_of(request, loaded) as place:
        machine, nodes = place.machine, place.nodes
    plan = _plan(request, loaded, store, machine, guess=True)
    present = {} if store is None else _present(plan, store)
    source = _source(request, loaded, plan.machine)
    offers = None if source is None else source.offers(plan, present)
    return plan, forecast(plan, store, present, workspace=workspace, offers=offers, nodes=nodes)


def _source(request: Request, loaded: LoadedMatrix, machine: Machine) -> RemoteSource | None:
    """The remote store that artifacts are pulled from: the request's, or the matrix's. Raises UsageError."""
    of_matrix: str | None = loaded.written.get("remote")
    if of_matrix is not None and "://" not in of_matrix:
        of_matrix = str(loaded.path.parent / Path(of_matrix).expanduser())
    url = request.remote if request.remote is not None else of_matrix
    if url is None:
        return None
    from trtllm_pipeline.execution.pulling import RemoteSource

    return RemoteSource(url, request, () if machine.assumed else {gpu.name for gpu in machine.gpus})


def plan_cells(
    cells: Sequence[Cell], store: Store | None, machine: Machine, *, until: str | None = None, guess: bool = False
) -> Plan:
    """The plan for `cells` on `machine`, with every model pinned to one revision.

    Asks a hub only for what the store has not pinned before. Cells that ran out of memory are planned with the changes that
    their `settings.retry` allows. With `guess`, a model whose sources cannot be reached now
    is planned as its recipe lists it. Raises DownloadError.
    """
    from trtllm_pipeline.planning.pins import Pins  # status and the like read no matrix

    pins = Pins(store, guess=guess)
    memory = _memory(store, machine)
    cells = [_judged_again(pins.pin(cell), machine, memory) if cell.reason is None else cell for cell in cells]
    plan = _make(cells, machine, pins, until)
    return plan if store is None else _with_retries(plan, store, pins, until)


def _make(cells: Sequence[Cell], machine: Machine, pins: Pins, until: str | None) -> Plan:
    known = {name: toolchains.load(name) for name in sorted({cell.toolchain for cell in cells if cell.reason is None})}
    return planning.make_plan(cells, known, machine, digest=pins.digest, until=until)


def _with_retries(plan: Plan, store: Store, pins: Pins, until: str | None) -> Plan:
    """`plan` with the changes that its cells allow after the attempts so far; `plan` itself where there are none."""

    def make(cells: Sequence[Cell]) -> Plan:
        return _make(cells, plan.machine, pins, until)

    return retries.followed(plan, make, store.index.attempts, lambda cell: _infeasible(cell, plan.machine))


def _judged_again(cell: Cell, machine: Machine, memory: Callable[[Cell], str | None]) -> Cell:
    """A pinned cell: only now is it known how the weights of one that takes them as they are were quantized, what its
    draft model and adapters are, what `memory` these take, and what code loads it.
    """
    if cell.reason is not None:
        return cell
    toolchain, reason = toolchains.load(cell.toolchain), None
    drafter = toolchain.drafter(cell)
    if drafter is not None:
        reason = _infeasible(drafter, machine)
        reason = None if reason is None else f"settings.speculative.model {drafter.model}: {reason}"
    elif cell.precision == AS_IS or "code" in cell.recipe:
        reason = _infeasible(cell, machine)
    if reason is None and cell.companions:
        reason = memory(cell)
    return cell if reason is None else replace(cell, reason=reason)


def _lacks_memory_alone(cell: Cell, machine: Machine) -> bool:
    """Whether a cell that cannot work here could with more memory."""
    from trtllm_pipeline.planning.needs import without_limits

    asked = replace(cell, reason=None)
    return _infeasible(asked, machine) is not None and not _infeasible(asked, without_limits(machine))


def check_feasible(plan: Plan) -> None:
    """Raise PlanError when no cell can work."""
    if not plan.feasible:
        from trtllm_pipeline.toolchains.tensorrt_llm.rules import HUB_UNASKED

        reasons = sorted({str(cell.reason) for cell in plan.cells})
        fit = (
            "; pipeline plan --fit proposes what fits into its memory"
            if any(_lacks_memory_alone(cell, plan.machine) for cell in plan.cells)
            else ""
        )
        if any("\n" in reason for reason in reasons):
            hint = "with these lines in the matrix the same command goes on"
        elif all(HUB_UNASKED in reason for reason in reasons):
            hint = (
                "plan where the hub can be reached, name the files that you trust with their SHA-256 in "
                "settings.download.trust_remote_code, or name a folder that has the model: model: [./FOLDER]; "
                "--assume takes transformers=VERSION, which may have the model itself"
            )
        else:
            hint = f"pipeline doctor shows what this machine has; --assume MACHINE plans for another one{fit}"
        raise PlanError("no cell can work:\n  " + "\n  ".join(reasons[:10]), hint=hint)


def check_room(seen: Forecast, store: Store) -> None:
    """Raise PlanError where what is to be made does not fit on the workspace's disk, even if less than expected is written."""
    from trtllm_pipeline.planning.names import size
    from trtllm_pipeline.planning.needs import DISK

    for need in seen.needs:
        if need.resource == DISK and need.impossible and need.has is not None:
            raise PlanError(
                f"{store.workspace}: what is to be made takes about {size(need.estimate.value)} of disk, "
                f"{size(need.has)} are free",
                hint="choose a --workspace on a larger disk, or free some: `pipeline store gc --dry-run` says what is unused",
            )


def plan_json(plan: Plan, store: Store | None, seen: Forecast, *, run_id: str | None = None) -> Iterator[str]:
    """Lines of the plan in its documented form, with real command lines; `{attempt}` stands for what is known only when it runs."""
    from trtllm_pipeline.planning.needs import of_run
    from trtllm_pipeline.planning.plan_file import plan_lines

    artifacts = "{workspace}/store" if store is None else str(store.artifacts_dir)
    return plan_lines(
        plan,
        present=seen.present,
        to_run=seen.to_run,
        reasons=seen.reasons,
        times=seen.durations.estimate,
        needs=lambda run: of_run(run, plan.machine, seen.corrections),
        commands=_commands(plan, lambda run: f"{artifacts}/{run.stage.name}/{run.fingerprint}/out"),
        pulls=seen.pulls,
        run_id=run_id,
    )


def fits(request: Request, store: Store | None) -> Fits:
    """Which cells of the request need more memory than the machine has, and with which change they fit. Raises as `plan_of`."""
    from trtllm_pipeline.planning import fitting, needs
    from trtllm_pipeline.planning.pins import Pins
    from trtllm_pipeline.report.fits import Fit, Fits
    from trtllm_pipeline.toolchains import companions

    machine, loaded = machine_of(request), load(request)
    corrections = needs.Corrections(() if store is None else store.index.peaks(), machine)
    pins = Pins(store, guess=True)
    cells = [
        pins.pin(cell) if cell.reason is None and companions.asked_for(cell) else cell
        for cell in _expanded(request, loaded, machine)
    ]
    roomy = needs.without_limits(machine)
    found = []

    @lru_cache
    def with_(axes: tuple[str, ...]) -> frozenset[CellId]:
        changed = replace(request, sets=(*request.sets, *axes), cells=())
        try:
            return frozenset(cell.id for cell in _expanded(changed, load(changed), machine))
        except MatrixError:  # its rules leave no cell
            return frozenset()

    able = [cell for cell in cells if not (cell.reason or _lacks_gpu(cell, machine) or _infeasible(cell, roomy))]
    for cell in able:  # what cannot work for another reason is the plan's to tell
        toolchain = toolchains.load(cell.toolchain)
        need, reason = needs.lacking(cell, toolchain.stages, machine, corrections), _infeasible(cell, machine)
        if need is not None or reason is not None:
            works = reason is None and need is not None and need.verdict == needs.LESS
            fit = Fit(cell, str(reason) if need is None else needs.in_words(need), works, tuple(loaded.axes))

            def wrong(changed: Cell, fit: Fit = fit) -> bool:
                """Whether it lacks memory, cannot work, or is nothing that the matrix can be made to have."""
                stages = toolchains.load(changed.toolchain).stages
                if needs.lacking(changed, stages, machine, corrections) or _infeasible(changed, machine):
                    return True
                as_asked = fit.with_change((), changed)
                cells = with_(as_asked.axes)
                return not {as_asked.changed_id, fit.cell.id} & cells

            proposal = fitting.fit(cell, machine.of(cell.gpu), wrong, same_batch=works)
            fit = fit if proposal is None else fit.with_change(*proposal)
            found.append(replace(fit, added=fit.changed_id not in with_(fit.axes)))
    return Fits(len(able), tuple(found), selected=bool(request.cells))


def compare_plans(request: Request, base: str, store: Store | None) -> PlanDifference:
    """The plan of `request` against that for the machine `base`, as `--assume` describes one. Raises as `plan_of`."""
    from trtllm_pipeline.report.plan_difference import difference

    new, old = (plan_of(each, store, guess=True) for each in (request, replace(request, assume=base)))
    commands = _commands(new, _input), _commands(old, _input)
    return difference(new, old, names=(request.assume or "this machine", base), commands=commands)


def _input(run: StageRun) -> str:
    return f"{{{run.stage.name}}}"


def _commands(plan: Plan, artifact: Callable[[StageRun], str]) -> Callable[[StageRun], tuple[tuple[str, ...], ...]]:
    """The command lines of a plan's stage runs; `artifact` says where the result of one is."""
    from trtllm_pipeline.execution.loop import command_lines

    def commands(run: StageRun) -> tuple[tuple[str, ...], ...]:
        # A server's command line may name what its repository was made of.
        of_inputs = [plan.stage_runs[each].inputs for each in run.inputs.values() if run.stage.starts is not None]
        upstreams = dict(item for each in (*of_inputs, run.inputs) for item in each.items())
        inputs = {
            name: f"{{attempt of {upstream}}}/{SERVICE_FILE}"
            if plan.stage_runs[upstream].stage.scope is Scope.SERVICE
            else artifact(plan.stage_runs[upstream])
            for name, upstream in upstreams.items()
        }
        return command_lines(run, inputs, "{attempt}", plan.machine, started=True)

    return commands


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to."""

    run_id: str
    plan: Plan
    outcome: Outcome
    rows: tuple[CellResult, ...]
    untried: int = 0
    """Cells that ran out of memory and were not tried with the next change of `settings.retry`: nothing new was to be started."""
    forecast: ForecastCheck | None = None
    """What was expected of it beside what it took; None where nothing ran."""


def run(
    request: Request,
    store: Store,
    observer: Observer,
    *,
    command: tuple[str, ...] = (),
    keep_going: bool = True,
    name: str | None = None,
) -> Result:
    """Do all that the request asks for and is not done yet; leave plan, report and lock file in the run's folder.

    The run's id ends with `name`, which later commands take in its place.
    """
    store.check_writable()
    loaded = load(request)
    with store.in_use(), place_of(request, loaded) as place:
        return _run(request, loaded, place, store, observer, command, keep_going=keep_going, name=name)


def _run(
    request: Request,
    loaded: LoadedMatrix,
    place: Placement,
    store: Store,
    observer: Observer,
    command: tuple[str, ...],
    *,
    keep_going: bool,
    name: str | None,
) -> Result:
    from trtllm_pipeline.execution.forecast import forecast
    from trtllm_pipeline.execution.loop import execute
    from trtllm_pipeline.planning.lock_file import write_lock
    from trtllm_pipeline.planning.pins import Pins
    from trtllm_pipeline.planning.plan_file import write_plan
    from trtllm_pipeline.report.forecast_check import checked
    from trtllm_pipeline.report.report_file import report_json
    from trtllm_pipeline.report.rows import rows

    plan = _runnable_plan(request, loaded, store, place.machine)
    present = _present(plan, store)
    _check_signed(request, present)
    source = _source(request, loaded, plan.machine)
    offers = None if source is None else source.offers(plan, present)
    seen = forecast(plan, store, present, offers=offers, nodes=place.nodes)
    check_room(seen, store)  # before there is a run: one without a plan would be the latest
    run_id, folder = _begin(store, name)
    store.index.begin_run(run_id, str(request.matrix.absolute()), command)
    observer.enter(folder)
    code, forecast_check = 1, None
    try:
        write_json(folder / REQUEST_FILE, request.to_json())
        write_plan(folder / PLAN_FILE, plan, plan_json(plan, store, seen, run_id=run_id))
        asked = default_toolchain(request, loaded, plan.machine)
        write_lock(request, loaded, plan, folder / "lock", default_toolchain=asked)

        def execute_(
            part: Plan, present: Mapping[Fingerprint, Artifact], expected_s: Mapping[StageRunId, float] | None = None
        ) -> Outcome:
            if source is not None:
                present = source.pull(part, store, present, observer)
            return execute(
                part,
                store,
                place.executor(),
                observer,
                run_id=run_id,
                nodes=place.nodes,
                present=present,
                keep_going=keep_going,
                expected_s=expected_s,
            )

        started = time.monotonic()
        outcome = execute_(plan, present, seen.expected_s)
        pins = Pins(store, guess=False)
        untried = 0
        while not outcome.interrupted:
            # Of the cells as they were pinned: nothing is asked or read anew, only what failed is planned differently.
            again = _with_retries(plan, store, pins, request.until)
            changed = retries.newly_planned(plan, again)
            if not keep_going:
                untried = len(changed)
            if not changed or not keep_going:
                break
            plan = again
            seen_again = forecast(plan, store, nodes=place.nodes)
            write_plan(folder / PLAN_FILE, plan, plan_json(plan, store, seen_again, run_id=run_id))
            observer.retrying(changed)
            part = planning.part(plan, changed)
            outcome = outcome.then(execute_(part, _present(part, store)), plan)
        took_s, of_runs = time.monotonic() - started, store.index.taken(run_id)
        forecast_check = checked(plan, seen, of_runs, took_s, comparable=outcome.comparable)
        table = rows(plan, store, outcome)
        write_lines(folder / REPORT_FILE, report_json(table, run_id, str(request.matrix), forecast=forecast_check))
        code = outcome.exit_code
        return Result(run_id, plan, outcome, table, untried, forecast_check)
    except KeyboardInterrupt:  # while artifacts are pulled; later the loop obeys it
        code = 130
        raise
    except OSError as error:
        if store.artifacts_dir.is_dir():
            raise
        raise StateError(
            f"{store.workspace}: the workspace is gone: moved or removed while it was used",
            hint="run again; this run cannot be resumed",
        ) from error
    finally:
        store.index.end_run(run_id, code)
        observer.leave(None if forecast_check is None else forecast_check.to_json())


def _begin(store: Store, name: str | None) -> tuple[str, Path]:
    """The id of a new run, and its folder. One of the same name may have begun in this second: the next one is waited for."""
    while True:
        run_id = runs.run_id(time.time(), name or os.urandom(2).hex())
        folder = store.runs_dir / run_id
        try:
            folder.mkdir()
        except FileExistsError:
            time.sleep(_SAME_SECOND_S)
        else:
            return run_id, folder


def bring_up_to_date(request: Request, store: Store, observer: Observer) -> tuple[Plan, Outcome]:
    """As `run`, for a command that wants artifacts only: the workspace's latest run, plan and report stay what they were."""
    from trtllm_pipeline.execution.executor import Executor
    from trtllm_pipeline.execution.forecast import capacity
    from trtllm_pipeline.execution.loop import execute

    loaded = load(request)
    plan = _runnable_plan(request, loaded, store, machine_of(request))
    with store.in_use():
        present: Mapping[Fingerprint, Artifact] = _present(plan, store)
        _check_signed(request, present)
        source = _source(request, loaded, plan.machine)
        if source is not None:
            present = source.pull(plan, store, present, observer)
        outcome = execute(
            plan, store, Executor(), observer, run_id=BY_HAND, nodes=[capacity(plan.machine)], present=present
        )
    return plan, outcome


def _check_signed(request: Request, present: Mapping[Fingerprint, Artifact]) -> None:
    """Raise StateError if a policy requires signatures that artifacts here lack: what is found is used like what is pulled."""
    from trtllm_pipeline import provenance

    keys = None if request.trusted_keys is None else Path(request.trusted_keys)
    policy = provenance.policy(keys, required=request.require_signed)
    if policy.required:
        provenance.require([artifact.folder for artifact in present.values()], policy)


def _present(plan: Plan, store: Store) -> dict[Fingerprint, Artifact]:
    """What the store has of a plan, every file looked at."""
    return store.present({run.fingerprint: run.stage.name for run in plan.stage_runs.values()})


def _runnable_plan(request: Request, loaded: LoadedMatrix, store: Store, machine: Machine) -> Plan:
    """The plan, with the workspace ready for it. Raises PlanError when `machine` lacks what a toolchain needs to run."""
    if machine.assumed:
        raise UsageError(
            "--assume describes a machine to plan for; nothing can run on it", hint="pipeline plan, or run --dry-run"
        )
    from trtllm_pipeline.processes.process import allow_open_files  # what only plans starts nothing

    plan = _plan(request, loaded, store, machine)
    check_feasible(plan)
    allow_open_files(_connections(plan))
    for name, gpu in sorted({(cell.toolchain, cell.gpu or "") for cell in plan.feasible}):
        missing = toolchains.load(name).missing(machine.of(gpu))
        if missing is not None:
            where = f"on nodes with {gpu}" if gpu and machine.types else "on this machine"
            raise PlanError(f"toolchain {name} cannot run {where}: {missing}", hint="`pipeline plan` works without it")
    for warning in (*exposed(plan), *toolchains.caveats(plan.feasible)):
        logger.warning("%s", warning)
    store.sweep()
    return plan


def _plan(
    request: Request, loaded: LoadedMatrix, store: Store | None, machine: Machine, *, guess: bool = False
) -> Plan:
    cells = select_cells(request, loaded, machine, store)
    return plan_cells(cells, store, machine, until=request.until, guess=guess)


def _connections(plan: Plan) -> int:
    """Connections of the largest load that a plan has."""
    loads = [
        load
        for run in plan.stage_runs.values()
        if run.stage.scope is Scope.IN_SERVICE
        for load in (run.first_cell.settings["perf"]["concurrency"], run.first_cell.settings["accuracy"]["concurrency"])
    ]
    numbers = [number for load in loads for number in (load if isinstance(load, (list, tuple)) else [load])]
    return max((number for number in numbers if isinstance(number, int)), default=0)


def exposed(plan: Plan) -> list[str]:
    """Warnings of the addresses that servers will listen on and that others reach."""
    services = [run for run in plan.stage_runs.values() if run.stage.scope is Scope.SERVICE]
    hosts = {str(run.first_cell.settings["serve"]["host"]) for run in services}
    return [warning for host in sorted(hosts) if (warning := reachable(host))]


@dataclass(frozen=True, slots=True)
class ServedCell:
    """One cell with all that its server needs, as its stages left it in a workspace."""

    cell: Cell
    plan: Plan
    """Of this cell alone."""
    launch: StageRun
    """The stage run that serves it."""
    artifacts: Mapping[str, Artifact]
    """By stage, all that are there: also what was measured on it."""
    request: Request
    """What the cell is of."""
    drafter: Artifact | None = None
    """The engine of its draft model."""

    @property
    def inputs(self) -> dict[str, Path]:
        """What its server is started from, by the names of the launch stage: `repository`, and `engine` or `model`."""
        runs, own = self.plan.stage_runs, {} if self.drafter is None else {toolchains.DRAFTER: self.drafter}
        made = {name: own.get(name) or self.artifacts[runs[run].stage.name] for name, run in self.launch.inputs.items()}
        return {name: artifact.out for name, artifact in made.items()}

    @property
    def all_artifacts(self) -> dict[str, Artifact]:
        """Those by stage, and the engine of its draft model as DRAFTER."""
        own = {} if self.drafter is None else {toolchains.DRAFTER: self.drafter}
        return {**self.artifacts, **own}

    @property
    def repository(self) -> Path:
        """The Triton repository; for trtllm-serve, the folder with its command line."""
        return self.inputs["repository"]

    @property
    def engine(self) -> Path | None:
        """The engine; None where the weights are served as they are."""
        return self.artifacts["build"].out if "build" in self.artifacts else None

    @property
    def model_folder(self) -> Path:
        """A folder with tokenizer, chat template and generation_config.json."""
        return self.artifacts["download"].out if "download" in self.artifacts else self.inputs["model"]

    @property
    def max_seq_len(self) -> int:
        """Tokens of prompt and answer together."""
        return self.cell.isl + self.cell.osl

    def result(self, store: Store) -> CellResult:
        """What was measured on it."""
        from trtllm_pipeline.report.rows import rows

        return rows(self.plan, store)[0]


def latest_request(store: Store) -> Request:
    """What the workspace's latest run was asked for; from its lock where its matrix is gone. Raises UsageError."""
    folder = run_folders(store)[0]
    latest = read_request(folder / REQUEST_FILE)
    locked = folder / "lock" / "matrix.yaml"
    if not latest.matrix.exists() and locked.exists():
        logger.warning("%s is gone; what the latest run recorded of it is taken: %s", latest.matrix, locked)
        return replace(latest, matrix=locked, sets=())  # the lock has what was set
    return latest


def served_cell(request: Request, store: Store) -> ServedCell:
    """The one cell that the request selects, built already. Reads only; asks no hub for what is pinned.

    Raises UsageError when it selects several or the cell is not built yet, with what to type; PlanError when the cell can
    never work here; MatrixError.
    """
    machine = machine_of(request)
    cells = select_cells(request, load(request), machine, store)
    able = [cell for cell in cells if cell.reason is None]
    if len(able) > 1:
        ids = ", ".join(cell.id for cell in able[:8]) + (", ..." if len(able) > 8 else "")
        raise UsageError(f"{len(able)} cells are selected, one is served", hint=f"name one of {ids}")
    plan = plan_cells(able or cells, store, machine, guess=True)
    check_feasible(plan)
    (cell,) = plan.feasible
    runs = [plan.stage_runs[run] for run in plan.by_cell[cell.id]]
    present = store.present({run.fingerprint: run.stage.name for run in runs if run.stage.scope is not Scope.SERVICE})
    artifacts = {run.stage.name: present[run.fingerprint] for run in runs if run.fingerprint in present}
    launch = next(run for run in runs if run.stage.scope is Scope.SERVICE)
    needed = [plan.stage_runs[run] for run in launch.inputs.values()]
    if missing := [run.stage.name for run in needed if run.fingerprint not in present]:
        only = replace(request, cells=(cell.id,))
        raise UsageError(
            f"{cell.id} is not built in {store.workspace}: {missing[0]} is missing", hint=run_command(only, store)
        )
    drafter = launch.inputs.get(toolchains.DRAFTER)
    of_drafter = None if drafter is None else present[plan.stage_runs[drafter].fingerprint]
    if "download" not in artifacts and "model" not in launch.inputs:
        raise UsageError(
            f"{cell.id}: nothing with its tokenizer is left in {store.workspace}",
            hint=run_command(replace(request, cells=(cell.id,)), store),
        )
    return ServedCell(cell, plan, launch, artifacts, request, of_drafter)


def run_command(request: Request, store: Store) -> str:
    """The command line that does what the request asks for."""
    words = ["pipeline", "run", "--matrix", str(request.matrix)]
    words += [word for value in request.sets for word in ("--set", value)]
    words += [word for value in request.cells for word in ("--cells", value)]
    words += [] if request.toolchain is None else ["--toolchain", request.toolchain]
    words += [] if request.executor is None else ["--executor", request.executor]
    words += [] if request.ray_address is None else ["--ray-address", request.ray_address]
    return shlex.join([*words, "--workspace", str(store.workspace)])
