"""The request of a command line, and its plan: its cells and if they can work on a machine, their pinned models and
their stage runs.

A cell that ran out of memory is planned again with changes, as far as its matrix allows them: `settings.retry`. The
only state is the failed attempts. If the newest attempt at a stage run of a cell ran out of memory, the cell is planned
with the next allowed change, and so on until a stage run that succeeded or was not tried yet. So all commands plan the
same, a killed run continues, and artifacts have the key of the settings that they were built with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from trtllm_pipeline.base import (
    USUAL_KV_SHARE,
    USUAL_NUM_TOKENS,
    Cell,
    CellId,
    FailureClass,
    Fingerprint,
    Json,
    PlanError,
    Scope,
    SettingChange,
    UsageError,
    reading,
    user_files,
)
from trtllm_pipeline.models import AS_IS
from trtllm_pipeline.orchestrate.plan import plan as planning
from trtllm_pipeline.orchestrate.plan.plan import Plan, StageRun
from trtllm_pipeline.orchestrate.store.index import AttemptRow
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.tensorrt import beyond_lengths, command_lines, lacks_for_tasks, load_levels
from trtllm_pipeline.tensorrt import catalog as toolchains

if TYPE_CHECKING:
    from trtllm_pipeline.base import Machine
    from trtllm_pipeline.orchestrate.matrix.validate import LoadedMatrix
    from trtllm_pipeline.orchestrate.plan.pins import Pins

logger = logging.getLogger(__name__)

REQUEST_FILE: Final = "request.json"
LOCAL: Final = "local"
"""The executor on this machine."""
RAY: Final = "ray"
SLURM: Final = "slurm"

SECTIONS: Final[Mapping[str, str]] = {
    "max_num_tokens": "build",
    "kv_cache_free_gpu_mem_fraction": "repository",
    "max_tokens_in_paged_kv_cache": "repository",
}
"""Settings that a retry may change, and their sections. They affect memory, not the results of a cell."""
_UNSET: Final[Mapping[str, int | float]] = {
    "max_num_tokens": USUAL_NUM_TOKENS,
    "kv_cache_free_gpu_mem_fraction": USUAL_KV_SHARE,
}
"""Value of an unset setting, unless a stage run has one."""
_SMS: Final = (80, 89, 90, 100, 120)
"""Compute capabilities of the machines that a cell could work on."""
Attempts: TypeAlias = Callable[[Iterable[Fingerprint]], Mapping[Fingerprint, AttemptRow]]


@dataclass(frozen=True, slots=True)
class Request:
    """The request of a command line."""

    matrix: Path
    sets: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()
    until: str | None = None
    toolchain: str | None = None
    assume: str | None = None
    """Machine to plan for, as in `--assume`. Default: this machine."""
    remote: str | None = None
    """Remote store to pull artifacts from. Default: the matrix's."""
    allow_other_gpu: bool = False
    """Also pull engines that were built on another type of GPU."""
    require_signed: bool = False
    trusted_keys: str | None = None
    """(with `require_signed`) Policy for pulled artifacts."""
    rerun: tuple[str, ...] = ()
    """Measuring stages to run again although their results are up to date. `resume` does not repeat them."""
    executor: str | None = None
    """Executor of stage runs: local, ray or slurm. Default: local."""
    ray_address: str | None = None

    @property
    def whole(self) -> bool:
        """True if it is for all cells and stages of the matrix."""
        return not self.cells and self.until is None

    def changed(self, other: Request) -> Request:
        """This request updated by `other`. `--set` changes of `other` are appended, its other values replace these."""
        return replace(
            self,
            sets=(*self.sets, *other.sets),
            cells=other.cells or self.cells,
            until=other.until or self.until,
            toolchain=other.toolchain or self.toolchain,
            assume=other.assume or self.assume,
            rerun=other.rerun,
            executor=other.executor or self.executor,
            ray_address=other.ray_address or self.ray_address,
        )

    def to_json(self) -> dict[str, Json]:
        """The JSON that `resume` reads, with the matrix's absolute path."""
        known = {name: value for name, value in asdict(self).items() if name != "rerun"}
        return {**known, "matrix": str(self.matrix.absolute())}


def read_request(path: Path) -> Request:
    """The request of an earlier run. Raises UsageError if the file is not a request."""
    try:
        data = user_files.decode_mapping(reading.read_bytes(path))
        lists = {name: tuple(data[name]) for name in ("sets", "cells")}
        return Request(**{**data, **lists, "matrix": Path(data["matrix"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path}: cannot be read: {error}", hint="pipeline run --matrix REQUEST_FILE starts over"
        ) from error


def load(request: Request) -> LoadedMatrix:
    """The matrix with its recipes. Raises MatrixError, UsageError."""
    from trtllm_pipeline.orchestrate.matrix.validate import load_matrix

    return load_matrix(request.matrix, request.sets)


def machine_of(request: Request) -> Machine:
    """The machine of the request: an assumed one, or this one. Warns of unknown releases. Raises UsageError."""
    if request.assume is not None:
        from trtllm_pipeline.base import assume

        machine = assume.parse(request.assume)
    else:
        from trtllm_pipeline.base import probe

        machine = probe.this_machine()
    for release in {
        each.tensorrt_llm.release for each in (machine, *dict(machine.types).values()) if each.tensorrt_llm
    }:
        from trtllm_pipeline.tensorrt import releases

        for warning in (releases.unknown(release), releases.hard_to_get(release) if machine.assumed else None):
            if warning is not None:
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

    Memory is estimated, corrected by measurements in `store`. Cells with `weights_unread` are checked after pinning. Raises
    MatrixError, UsageError, PlanError.
    """
    memory = memory_check(store, machine)

    def feasibility(cell: Cell) -> str | None:
        if weights_unread(cell):
            return lacks_gpu(cell, machine)
        return lacks_gpu(cell, machine) or infeasible(cell, machine) or memory(cell)

    return expanded(request, loaded, machine, feasibility)


def machine_and_cells(request: Request, store: Store | None = None) -> tuple[Machine, tuple[Cell, ...]]:
    """The machine of a request and its selected cells. Raises like `select_cells`."""
    machine = machine_of(request)
    return machine, select_cells(request, load(request), machine, store)


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
    of_type = machine.of(cell.gpu)
    return (
        toolchains.load(cell.toolchain).infeasible(cell, of_type)
        or beyond_lengths(cell)
        or lacks_for_tasks(cell, of_type)
    )


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


def weights_unread(cell: Cell) -> bool:
    """True if only pinning, which reads the model's files, reveals the format and so the size of its weights."""
    return cell.precision == AS_IS and cell.recipe.get("quantization") is None


def memory_check(store: Store | None, machine: Machine) -> Callable[[Cell], str | None]:
    """Returns a function for the reason why `machine` lacks memory for a cell. Measurements in `store` are read once, on first use."""
    from trtllm_pipeline.orchestrate.memory import estimates

    @cache
    def corrections() -> estimates.Corrections:
        return estimates.Corrections(() if store is None else store.index.peaks(), machine)

    return lambda cell: estimates.infeasible(cell, toolchains.load(cell.toolchain).stages, machine, corrections())


def judged_again(cell: Cell, machine: Machine, memory: Callable[[Cell], str | None]) -> Cell:
    """Check a pinned cell: pinning reveals quantized weights, draft model, adapters, `memory`, and loading code."""
    if cell.reason is not None:
        return cell
    toolchain, reason = toolchains.load(cell.toolchain), None
    drafter = toolchain.drafter(cell)
    if drafter is not None:
        reason = infeasible(drafter, machine)
        reason = None if reason is None else f"settings.speculative.model {drafter.model}: {reason}"
    if reason is None and (cell.precision == AS_IS or "code" in cell.recipe):
        reason = infeasible(cell, machine)
    if reason is None and (cell.companions or cell.precision == AS_IS):
        reason = memory(cell)
    return cell if reason is None else replace(cell, reason=reason)


def _would_work(cell: Cell, machine: Machine, memory: Callable[[Cell], str | None]) -> tuple[bool, bool]:
    """If a cell that cannot work on `machine` could work on another one, and with more memory alone.

    `memory` is the `memory_check` of the machine.
    """
    from trtllm_pipeline.base import assume
    from trtllm_pipeline.orchestrate.memory.estimates import without_limits
    from trtllm_pipeline.tensorrt import releases

    unjudged = replace(cell, reason=None)
    if cell.reason == lacks_gpu(unjudged, machine):
        return True, False
    refused = infeasible(unjudged, machine)
    if refused is None:
        needs_memory = cell.reason == memory(unjudged)
        return needs_memory, needs_memory
    if cell.reason != refused:  # from its recipe or its model's files
        return False, False
    known = {releases.FIRST_PYTORCH, assume.LAST_WITH_ENGINES, releases.NEWEST}
    known |= {machine.tensorrt_llm.release} if machine.tensorrt_llm else set()
    others = (f"tensorrt_llm=={release},sm={sm},gpus=64,gpu_memory_gib=9999" for sm in _SMS for release in known)
    elsewhere = any(infeasible(unjudged, assume.parse(other)) is None for other in others)
    return elsewhere, infeasible(unjudged, without_limits(machine)) is None


def plan_of(request: Request, store: Store | None, *, guess: bool = False) -> Plan:
    """The plan of the selected cells. Raises MatrixError, UsageError, PlanError."""
    machine, cells = machine_and_cells(request, store)
    return plan_cells(cells, store, machine, until=request.until, guess=guess)


def plan_cells(
    cells: Sequence[Cell], store: Store | None, machine: Machine, *, until: str | None = None, guess: bool = False
) -> Plan:
    """The plan for `cells` on `machine`, with every model pinned to one revision.

    Sends requests to a hub only for models that the store has not pinned yet. Cells that ran out of memory are planned
    with the changes that their `settings.retry` allows. With `guess`, a model without a reachable source is planned as
    in its recipe. Raises DownloadError.
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

    return followed(plan, make, store.index.attempts, lambda cell: infeasible(cell, plan.machine))


def check_feasible(plan: Plan, store: Store | None) -> None:
    """Raise PlanError if no cell can work. `store` is that of the plan."""
    if not plan.feasible:
        from trtllm_pipeline.tensorrt import HUB_UNREACHED

        by_reason = {str(cell.reason): cell for cell in plan.cells}
        reasons = sorted(by_reason)
        if any("\n" in reason for reason in reasons):
            hint = "with these lines in the matrix the same command continues"
        elif all(HUB_UNREACHED in reason for reason in reasons):
            hint = (
                "plan with access to the hub, list trusted files with their SHA-256 in "
                "settings.download.trust_remote_code, or use a local directory: model: [./FOLDER]; "
                "a newer transformers may support the model without code: --assume with transformers=VERSION"
            )
        else:
            hint = _remedies([by_reason[reason] for reason in reasons], plan.machine, memory_check(store, plan.machine))
        raise PlanError("no cell can work:\n  " + "\n  ".join(reasons[:10]), hint=hint)


def _remedies(cells: Sequence[Cell], machine: Machine, memory: Callable[[Cell], str | None]) -> str:
    """What to try if none of `cells` can work on a machine."""
    found = []
    elsewhere, with_memory = map(any, zip(*(_would_work(cell, machine, memory) for cell in cells), strict=True))
    if elsewhere:
        found += [] if machine.assumed else ["run pipeline doctor to see this machine"]
        found.append("--assume MACHINE plans for another machine")
    if with_memory:
        found.append("pipeline plan --fit looks for changes that fit into its memory")
    return "; ".join(found) or "change the matrix, or override it with --set KEY=VALUE"


def runnable_plan(cells: Sequence[Cell], store: Store, machine: Machine, *, until: str | None) -> Plan:
    """Like `plan_cells`, for a run. Raises PlanError if `machine` lacks a program of a toolchain, or if no cell can work."""
    if machine.assumed:
        raise UsageError(
            "--assume is for planning only, nothing can run on such a machine",
            hint="use pipeline plan, or run --dry-run",
        )
    from trtllm_pipeline.base import allow_open_files  # not needed for planning

    plan = plan_cells(cells, store, machine, until=until)
    check_feasible(plan, store)
    measured = [run.first_cell for run in plan.stage_runs.values() if run.stage.scope is Scope.IN_SERVICE]
    scored = [count for cell in measured if isinstance(count := cell.settings["accuracy"]["concurrency"], int)]
    allow_open_files(max((*scored, *(level for cell in measured for level in load_levels(cell))), default=0))
    for name, gpu in sorted({(cell.toolchain, cell.gpu or "") for cell in plan.feasible}):
        missing = toolchains.load(name).missing(machine.of(gpu))
        if missing is not None:
            where = f"on nodes with {gpu}" if gpu and machine.types else "on this machine"
            raise PlanError(f"toolchain {name} cannot run {where}: {missing}", hint="`pipeline plan` works without it")
    for warning in (*exposed(plan), *toolchains.caveats(plan.feasible, machine)):
        logger.warning("%s", warning)
    return plan


def exposed(plan: Plan) -> list[str]:
    """Warnings about server addresses that other machines can reach."""
    services = [run for run in plan.stage_runs.values() if run.stage.scope is Scope.SERVICE]
    hosts = {str(run.first_cell.settings["serve"]["host"]) for run in services}
    return [warning for host in sorted(hosts) if (warning := command_lines.reachable(host))]


def followed(
    plan: Plan, make: Callable[[Sequence[Cell]], Plan], attempts: Attempts, reason: Callable[[Cell], str | None]
) -> Plan:
    """`plan` with the changes that its cells allow, after the attempts so far.

    `make` plans cells. `reason` returns why a cell cannot work, and such a change is not applied.
    """

    def matters(failed: StageRun, cell: Cell) -> bool:
        """True if the failed stage run is no longer part of a cell."""
        return failed.id not in make([cell]).by_cell[cell.id]

    final: set[CellId] = set()
    while True:
        retried = [cell for cell in plan.feasible if _steps(cell) and cell.id not in final]
        runs = {run for cell in retried for run in plan.by_cell[cell.id]}
        last = attempts(plan.stage_runs[run].fingerprint for run in runs)
        changed: dict[CellId, Cell] = {}
        for cell in retried:
            failed = _out_of_memory(plan, cell, last)
            next_cell = None if failed is None else _changed(plan, cell, failed, last, partial(matters, failed), reason)
            if next_cell is None or reason(next_cell) is not None:
                final.add(cell.id)
            else:
                changed[cell.id] = next_cell
        if not changed:
            return plan
        plan = make([changed.get(cell.id, cell) for cell in plan.cells])


def newly_planned(old: Plan, new: Plan) -> list[Cell]:
    """The cells of `new` with other stage runs than in `old`."""
    return [cell for cell in new.feasible if new.by_cell[cell.id] != old.by_cell.get(cell.id)]


def _steps(cell: Cell) -> dict[str, Json]:
    """Name of a setting -> allowed changes."""
    allowed = cell.settings.get("retry", {}).get("oom")
    return {name: how for name, how in allowed.items() if how is not None} if isinstance(allowed, dict) else {}


def _out_of_memory(plan: Plan, cell: Cell, last: Mapping[Fingerprint, AttemptRow]) -> StageRun | None:
    """The first stage run of a cell whose newest attempt ran out of memory."""
    for run in (plan.stage_runs[each] for each in plan.by_cell[cell.id]):
        attempt = last.get(run.fingerprint)
        if attempt is not None and (attempt.outcome, attempt.failure) == ("failed", FailureClass.OUT_OF_MEMORY.value):
            return run
    return None


def _changed(
    plan: Plan,
    cell: Cell,
    failed: StageRun,
    last: Mapping[Fingerprint, AttemptRow],
    matters: Callable[[Cell], bool],
    reason: Callable[[Cell], str | None],
) -> Cell | None:
    """The cell with the next change of each setting that `matters` and is not refused. None if there is none left."""
    times = cell.settings["retry"]["times"]
    assert isinstance(times, int)
    if len({change.stage_run for change in cell.changes}) >= times:
        return None
    why = last[failed.fingerprint].message or "out of memory"
    next_cell = cell
    for name, how in _steps(cell).items():
        old, values = _next(plan, cell, name, how)
        refused: list[str] = []
        for new in values:
            change = SettingChange(f"settings.{SECTIONS[name]}.{name}", old, new, failed.id, why, tuple(refused))
            changed = _with(cell, name, new, change)
            if (refusal := reason(changed)) is not None:
                refused.append(f"{new} was not tried: {refusal}")
                _warn_once(cell.id, f"settings.retry.oom.{name} {refused[-1]}")
            elif matters(changed):
                next_cell = _with(next_cell, name, new, change)
                break
    return None if next_cell is cell else next_cell


@lru_cache(maxsize=256)
def _warn_once(cell: CellId, words: str) -> None:
    """Log once, since a run plans repeatedly."""
    logger.warning("%s: %s", cell, words)


def _with(cell: Cell, name: str, value: Json, change: SettingChange) -> Cell:
    section = SECTIONS[name]
    settings = {**cell.settings, section: {**cell.settings[section], name: value}}
    return replace(cell, settings=settings, changes=(*cell.changes, change))


def _next(plan: Plan, cell: Cell, name: str, how: Json) -> tuple[Json, Sequence[Json]]:
    """The current value of a setting, and the next values, starting with the first that matters."""
    params = (plan.stage_runs[run].params for run in plan.by_cell[cell.id])  # the value that a stage uses
    taken = (value for each in params if (value := getattr(each, name, None)) is not None)
    now = next(taken, cell.settings[SECTIONS[name]][name]) or _UNSET.get(name)
    if isinstance(how, (list, tuple)):
        done = [how.index(change.new) + 1 for change in cell.changes if change.setting.endswith(f".{name}")]
        return now, how[max(done, default=0) :]
    if isinstance(now, int) and now > 1:
        return now, (now // 2,)
    return now, (now / 2,) if isinstance(now, float) else ()
