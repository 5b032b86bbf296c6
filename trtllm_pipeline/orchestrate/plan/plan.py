"""Plans cells: a graph of stage runs. Equal fingerprints merge equal work.

All fingerprints of a matrix are known before anything runs. Keys contain the fingerprints of inputs, not their bytes, except
for the files of a model that a stage reads, whose digests are known in advance. This is the hot path of a large matrix, so it
uses plain objects and shared parts, no model classes.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple

from trtllm_pipeline.base import (
    SCHEMA,
    Cell,
    CellId,
    Fingerprint,
    Json,
    Machine,
    Resources,
    Scope,
    StageRunId,
    UsageError,
    canonical,
    fingerprint,
)
from trtllm_pipeline.models import ModelPart, files_of
from trtllm_pipeline.orchestrate.memory.estimates import DISK, Corrections, Estimate, Need, expected, label_of, of_stage
from trtllm_pipeline.tensorrt import Stage, catalog

_LAST_OF_DRAFTER: Final = "build"

_NOTHING: Final[Mapping[str, Any]] = {}
"""Shared empty mapping: most stage runs read no user files and no parts of models."""
SELECTED: Final = "files"
"""Key of an input that is read in part: the digest of the files that are read, instead of the input's fingerprint."""


class SelectedFiles(NamedTuple):
    """Files of a model that a stage run reads."""

    names: tuple[str, ...]
    key: dict[str, Json]
    """Their part of the stage run's key."""


@dataclass(slots=True)
class StageRun:
    """One piece of work, shared by all cells that need it."""

    id: StageRunId
    stage: Stage
    toolchain: str
    fingerprint: Fingerprint
    key: str
    """Canonical text. Its hash is the fingerprint."""
    params: Any
    """Parameters, an object of the stage's parameter class."""
    files: Mapping[str, str]
    """Name -> path of the user's files on this machine."""
    inputs: Mapping[str, StageRunId]
    reads: Mapping[str, tuple[str, ...]]
    """Input name -> names of the files that are read, for inputs that are read in part."""
    contents: Mapping[str, str] | None
    """Name -> digest of each output file, if known in advance."""
    after: tuple[StageRunId, ...]
    first_cell: Cell
    cells: list[CellId] = field(default_factory=list)

    @property
    def label(self) -> str:
        """Label for durations and memory, see `memory/labels.py`."""
        return label_of(self.stage, self.first_cell)

    @property
    def needs(self) -> tuple[StageRunId, ...]:
        """Stage runs that must succeed before this one starts."""
        return (*self.inputs.values(), *self.after)


@dataclass(frozen=True, slots=True)
class Plan:
    """The stage runs of a set of cells, in dependency order."""

    cells: tuple[Cell, ...]
    stage_runs: Mapping[StageRunId, StageRun]
    by_cell: Mapping[CellId, tuple[StageRunId, ...]]
    """In the order of the flow. Empty for infeasible cells."""
    machine: Machine
    """The machine that the plan is for."""

    @property
    def feasible(self) -> tuple[Cell, ...]:
        """Feasible cells."""
        return tuple(cell for cell in self.cells if cell.reason is None)

    def resources(self, run: StageRun) -> Resources:
        """Resources that a stage run occupies while it runs."""
        cell = run.first_cell
        need = run.stage.resources(cell, self.machine.of(cell.gpu))
        if need.gpus and cell.gpu is not None and self.machine.types:
            need = replace(need, accelerator=cell.gpu.lower())
        return need


def make_plan(
    cells: Sequence[Cell],
    toolchains: Mapping[str, catalog.Toolchain],
    machine: Machine,
    *,
    digest: Callable[[str, Cell], tuple[str, str]],
    until: str | None = None,
) -> Plan:
    """The plan for `cells` on `machine`, up to and including the stage `until`.

    `digest(path, cell)` returns the path on this machine and the content digest of a file named in a cell's settings.
    Infeasible cells are kept without stage runs. Raises UsageError if a toolchain, or every cell, lacks the stage `until`.
    """
    forms: dict[tuple[str, str | None], list[_Form]] = {}
    for name, gpu in dict.fromkeys((cell.toolchain, cell.gpu) for cell in cells if cell.reason is None):
        forms[name, gpu] = _forms(toolchains[name], toolchains[name].identity(machine.of(gpu)), until)
    from trtllm_pipeline.tensorrt import params as stage_params  # readers of a written plan need no keys

    graph = _Graph(machine, digest, stage_params.key)
    runs = graph.runs
    by_cell: dict[CellId, tuple[StageRunId, ...]] = {}
    for cell in cells:
        of_cell: dict[str, StageRunId] = {}
        of_drafter: dict[str, StageRunId] = {}
        if cell.reason is None:
            if (drafter := toolchains[cell.toolchain].drafter(cell)) is not None:
                needed = {stage.name for stage in _stages_until(toolchains[cell.toolchain], _LAST_OF_DRAFTER)}
                of_engine = [form for form in forms[cell.toolchain, cell.gpu] if form.stage.name in needed]
                graph.add(of_engine, drafter, of_drafter, cell.id)
                if _LAST_OF_DRAFTER in of_drafter:
                    of_cell[catalog.DRAFTER] = of_drafter[_LAST_OF_DRAFTER]
            graph.add(forms[cell.toolchain, cell.gpu], cell, of_cell, cell.id)
        # If a stage occurs twice, the cell's own run is the last.
        by_cell[cell.id] = tuple(dict.fromkeys((*of_drafter.values(), *of_cell.values())))
    if until is not None and runs and all(run.stage.name != until for run in runs.values()):
        raise UsageError(
            f"none of these cells has the stage {until!r}",
            hint="their settings exclude it. `pipeline plan` shows all stages",
        )
    return Plan(tuple(cells), runs, by_cell, machine)


def _stages_until(toolchain: catalog.Toolchain, until: str | None) -> tuple[Stage, ...]:
    """`until` and all stages that it needs, including services."""
    if until is None:
        return toolchain.stages
    wanted = {toolchain.stage(until).name}
    for stage in reversed(toolchain.stages):
        if stage.name in wanted:
            wanted.update(stage.after, *map(stage.upstream, stage.inputs))
    return tuple(stage for stage in toolchain.stages if stage.name in wanted)


class _Taken:
    """The values that a stage uses of a cell, shared by all cells with equal values. Only `runs` changes."""

    __slots__ = ("files", "of_files", "of_params", "params", "parts", "runs")

    def __init__(
        self,
        params: Any,
        of_params: str,
        files: Mapping[str, str],
        of_files: str,
        parts: Mapping[str, frozenset[ModelPart]],
    ) -> None:
        self.params = params
        self.of_params = of_params
        """Their part of the key."""
        self.files = files
        self.of_files = of_files
        self.parts = parts
        self.runs: dict[object, StageRun] = {}
        """Stage runs with these values, by their inputs."""


class _Watched(Cell):
    """A cell that records which of its values a stage reads. Only these affect the stage."""

    __slots__ = ("asked", "cell")

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.asked: dict[str, None] = {}

    def __getattr__(self, name: str) -> Any:  # only for values of the cell
        value = getattr(self.cell, name)
        self.asked[name] = None
        return value


_BY_IDENTITY: Final = ("recipe", "settings", "companions", "changes")
"""Values that cells share and that are not hashable."""
_VALUES: Final = tuple(name for name in Cell.__dataclass_fields__ if name not in _BY_IDENTITY)
_PLACES: Final = {name: place for place, name in enumerate((*_VALUES, *_BY_IDENTITY))}
_plain_values: Final = attrgetter(*_VALUES)


def _values(cell: Cell) -> tuple[object, ...]:
    """The values of a cell, by `_PLACES`. Identities are only valid while both cells exist."""
    companions, changes = cell.companions, cell.changes
    of_others = id(companions) if companions else 0, id(changes) if changes else 0
    return (*_plain_values(cell), id(cell.recipe), id(cell.settings), *of_others)


@dataclass(frozen=True, slots=True)
class _Form:
    """A stage with the constant parts of its keys and a cache by values of cells. Large plans use it for every stage of every
    cell.
    """

    stage: Stage
    toolchain: str
    inputs: tuple[tuple[str, tuple[str, ...]], ...]
    """Input name -> stages that can produce it."""
    upstream: str | None
    """The stage of the only input, if all cells have the same one. A faster path."""
    before: str
    """Constant part of a key between files and inputs."""
    behind: str
    """Constant part of a key after the parameters, which follow the inputs."""
    known: dict[tuple[str, ...], tuple[Callable[[tuple[object, ...]], object], dict[object, _Taken | None]]] = field(
        default_factory=dict
    )
    """Names of the values that a stage reads -> their getter, and forms by these values. None if a cell lacks the stage."""
    taken: dict[tuple[object, ...], _Taken] = field(default_factory=dict)
    """Forms by exact parameters, files and parts."""


def _forms(toolchain: catalog.Toolchain, identity: Mapping[str, Json], until: str | None) -> list[_Form]:
    forms = []
    for stage in _stages_until(toolchain, until):
        parts: dict[str, Json] = {"schema": SCHEMA, "stage": stage.name, "version": stage.version}
        if not stage.shared:
            parts["toolchain"] = stage.of or toolchain.name
        if stage.identity:
            parts["identity"] = {name: identity[name] for name in stage.identity}
        inputs = tuple((name, stage.upstream(name)) for name in stage.inputs)
        before, behind = canonical({**parts, "inputs": None, "params": None}).split('"inputs":null,"params":null')
        upstreams = [upstream for name, each in inputs for upstream in each if name not in stage.optional]
        only = upstreams[0] if len(upstreams) == len(inputs) == 1 else None
        forms.append(_Form(stage, toolchain.name, inputs, only, before.removeprefix("{"), behind))
    return forms


@dataclass(slots=True)
class _Graph:
    """Builder of a plan's stage runs."""

    machine: Machine
    digest: Callable[[str, Cell], tuple[str, str]]
    key: Callable[[Any], dict[str, Json]]
    """Parameters -> their part of a key."""
    runs: dict[StageRunId, StageRun] = field(default_factory=dict)
    selected: dict[tuple[StageRunId, frozenset[ModelPart]], SelectedFiles] = field(default_factory=dict)
    alive: list[Cell] = field(default_factory=list)
    """Keeps cells alive whose values identify forms, so that identities stay unique."""

    def add(self, forms: Sequence[_Form], cell: Cell, done: dict[str, StageRunId], user: CellId) -> None:
        """The stage runs of `cell`, used by the cell `user`. Records them in `done` by stage."""
        values = _values(cell)
        for form in forms:
            for pick, known in form.known.values():
                if (of_values := pick(values)) in known:
                    taken = known[of_values]
                    break
            else:
                taken = self._look(form, cell, values)
            if taken is None:
                continue
            run = self._stage_run(form, taken, cell, done)
            users = run.cells
            if not users or users[-1] != user:
                users.append(user)
            done[form.stage.name] = run.id

    def _look(self, form: _Form, cell: Cell, values: tuple[object, ...]) -> _Taken | None:
        """The form of a stage for `cell` and for all cells with the same relevant values."""
        watched = _Watched(cell)
        taken = self._taken(form, watched, self.machine.of(cell.gpu))
        names = ("toolchain", *watched.asked)  # at least two: itemgetter of one name returns no tuple
        if names not in form.known:
            form.known[names] = itemgetter(*[_PLACES[name] for name in names], _PLACES["gpu"]), {}
        pick, known = form.known[names]
        known[pick(values)] = taken
        self.alive.append(cell)
        return taken

    def _taken(self, form: _Form, cell: Cell, machine: Machine) -> _Taken | None:
        stage = form.stage
        if not stage.applies(cell, machine):
            return None
        parts = _NOTHING if stage.parts is None else stage.parts(cell)
        files: Mapping[str, str] = _NOTHING
        digests: Mapping[str, Json] = _NOTHING
        if paths := stage.files(cell):
            files, digests = {}, {}
            for name, path in paths.items():
                files[name], digests[name] = self.digest(path, cell)
        params = stage.settle(stage.read(cell), files, machine)
        exact = _exact(params)
        of_files = f'"files":{canonical(digests)},' if digests else ""
        same = None if exact is None else (exact, *parts.items(), *files.items(), of_files)
        form_values = None if same is None else form.taken.get(same)
        if form_values is None:
            form_values = _Taken(params, canonical(self.key(params)), files, of_files, parts)
            if same is not None:
                form.taken[same] = form_values
        return form_values

    def _stage_run(self, form: _Form, taken: _Taken, cell: Cell, of_cell: Mapping[str, StageRunId]) -> StageRun:
        if form.upstream is not None:
            only = of_cell[form.upstream]
            run = taken.runs.get(only)
            if run is None:
                inputs = {form.inputs[0][0]: only}
                run = taken.runs[only] = self._made(form, taken, cell, inputs, of_cell)
            return run
        inputs = {}
        for name, upstreams in form.inputs:
            for upstream in upstreams:
                if upstream in of_cell:
                    inputs[name] = of_cell[upstream]
                    break
            else:
                assert name in form.stage.optional, f"{form.stage.name} has no {name}"
        same = tuple(inputs.items())
        run = taken.runs.get(same)
        if run is None:
            run = taken.runs[same] = self._made(form, taken, cell, inputs, of_cell)
        return run

    def _made(
        self,
        form: _Form,
        taken: _Taken,
        cell: Cell,
        inputs: Mapping[str, StageRunId],
        of_cell: Mapping[str, StageRunId],
    ) -> StageRun:
        runs, stage = self.runs, form.stage
        reads: Mapping[str, tuple[str, ...]] = _NOTHING
        selections: Mapping[str, dict[str, Json]] = _NOTHING
        if taken.parts:
            reads, selections = {}, {}
            for name, parts_read in taken.parts.items():
                if name in inputs and (contents := runs[inputs[name]].contents) is not None:
                    same_files = inputs[name], parts_read
                    found_files = self.selected.get(same_files)
                    if found_files is None:
                        found_files = self.selected[same_files] = _selection(contents, parts_read)
                    reads[name], selections[name] = found_files
        read = [
            f'"{name}":{canonical(selections[name])}' if name in selections else f'"{name}":"{runs[run].fingerprint}"'
            for name, run in inputs.items()
        ]
        of_inputs = read[0] if len(read) == 1 else ",".join(sorted(read))
        key = f'{{{taken.of_files}{form.before}"inputs":{{{of_inputs}}},"params":{taken.of_params}{form.behind}'
        hashed = fingerprint(key)
        run_id = StageRunId(f"{stage.name}-{hashed[:12]}")
        new_run = runs.get(run_id)
        if new_run is None:
            after = tuple([of_cell[name] for name in stage.after if name in of_cell])
            contents = None if stage.contents is None else stage.contents(cell)
            new_run = runs[run_id] = StageRun(
                run_id,
                stage,
                form.toolchain,
                hashed,
                key,
                taken.params,
                taken.files,
                inputs,
                reads,
                contents,
                after,
                cell,
            )
        return new_run


def _exact(params: Any) -> bytes | None:
    """Equal only for equal values of equal types, since 1 and 1.0 have different keys. None if a value cannot be marshaled."""
    try:
        return marshal.dumps(vars(params), 2)
    except ValueError:
        return None


def _selection(contents: Mapping[str, str], parts: frozenset[ModelPart]) -> SelectedFiles:
    names = files_of(contents, parts)
    return SelectedFiles(names, {SELECTED: fingerprint(canonical({name: contents[name] for name in names}))})


def part(plan: Plan, cells: Sequence[Cell]) -> Plan:
    """The part of `plan` for these cells, with everything that they are built from."""
    kept: set[StageRunId] = set()
    pending = [run for cell in cells for run in plan.by_cell[cell.id]]
    while pending:  # shared parts of models may be read from the model of another cell
        run_id = pending.pop()
        if run_id not in kept:
            kept.add(run_id)
            pending += plan.stage_runs[run_id].inputs.values()
    runs = {run_id: run for run_id, run in plan.stage_runs.items() if run_id in kept}
    return Plan(tuple(cells), runs, {cell.id: plan.by_cell[cell.id] for cell in cells}, plan.machine)


def wanted(plan: Plan) -> set[StageRunId]:
    """Stage runs with results for people, see `is_result`. Services have none.

    Their inputs are only built when one of them must run: a removed intermediate is not built again.
    """
    read: set[StageRunId] = set()
    for run in plan.stage_runs.values():
        read.update(run.inputs.values())
    return {run.id for run in plan.stage_runs.values() if is_result(run.stage.scope, read=run.id in read)}


def is_result(scope: Scope, *, read: bool) -> bool:
    """True if the output is a result: no stage reads it, or it was measured on a server."""
    return scope is Scope.IN_SERVICE or (scope is Scope.ARTIFACT and not read)


def to_run(plan: Plan, present: Callable[[StageRun], bool]) -> set[StageRunId]:
    """The stage runs that `plan` would run: missing results, and the missing inputs that they read."""
    missing: set[StageRunId] = set()
    read: set[StageRunId] = set()
    needed: set[StageRunId] = set()
    for run in reversed([*plan.stage_runs.values()]):  # readers first
        run_id, scope = run.id, run.stage.scope
        if (run_id in needed or is_result(scope, read=run_id in read)) and (scope is Scope.SERVICE or not present(run)):
            missing.add(run_id)
            needed.update(run.needs)
        read.update(run.inputs.values())
    return missing


def of_run(run: StageRun, machine: Machine, corrections: Corrections) -> list[Need]:
    """The memory that a stage run needs."""
    needs = expected(run.stage, run.first_cell, machine)
    return of_stage(needs, run.stage, run.first_cell, machine, corrections, run.label)


def of_plan(
    plan: Plan,
    runs: Iterable[StageRun],
    corrections: Corrections,
    free: int | None,
    fetched: Mapping[StageRunId, int] | None = None,
) -> list[Need]:
    """Needs of these stage runs of a plan: memory of each, and disk of all together. `free` bytes of disk are available.

    `fetched` are bytes of downloads that are already on the disk.
    """
    result: list[Need] = []
    leaves = scratch = on_disk = measured = 0
    for run in runs:
        needs = expected(run.stage, run.first_cell, plan.machine)
        result += of_stage(needs, run.stage, run.first_cell, plan.machine, corrections, run.label)
        if needs is not None and needs.leaves + needs.scratch:
            artifact = corrections.on(run.first_cell.gpu).of(run.label, DISK, needs.leaves, needs.error)
            leaves, scratch = leaves + artifact.value, max(scratch, needs.scratch)
            measured += bool(artifact.measured)
            on_disk += min((fetched or {}).get(run.id, 0), artifact.value + needs.scratch)
    if leaves + scratch:
        result.append(Need("", "", DISK, Estimate(leaves + scratch - on_disk, 0.1, measured), free))
    return result
