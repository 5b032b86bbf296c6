"""cells -> plan: the graph of stage runs, with equal work merged by equal fingerprints.

Every fingerprint of the whole matrix is known before anything runs, since keys are made of inputs' fingerprints, and of
bytes only where these are known before: of the files that a stage reads of a model. This is the hot path of a large matrix: plain objects, shared parts, no model classes.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Mapping, Sequence
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
    uncollected,
)
from trtllm_pipeline.models import ModelPart, files_of
from trtllm_pipeline.orchestrate.memory.labels import label_of
from trtllm_pipeline.tensorrt import DRAFTER, Stage, Toolchain

_LAST_OF_DRAFTER: Final = "build"

_NOTHING: Final[Mapping[str, Any]] = {}
"""What most stage runs read of files and parts of models: one for all of them."""
SELECTED: Final = "files"
"""Key of an input that is not read whole: the digest of the files that are, instead of the input's fingerprint."""


class SelectedFiles(NamedTuple):
    """What a stage run reads of a model."""

    names: tuple[str, ...]
    key: dict[str, Json]
    """The part of the stage run's key."""


@dataclass(slots=True)
class StageRun:
    """One piece of work, for however many cells need it."""

    id: StageRunId
    stage: Stage
    toolchain: str
    fingerprint: Fingerprint
    key: str
    """Canonical text whose hash the fingerprint is."""
    params: Any
    """Of the stage's class of parameters."""
    files: Mapping[str, str]
    """Name -> path of user's files, as found on this machine."""
    inputs: Mapping[str, StageRunId]
    reads: Mapping[str, tuple[str, ...]]
    """Input name -> names of the files that it reads there, of inputs that are not read whole."""
    contents: Mapping[str, str] | None
    """Name -> digest of each file that it leaves, where that is known before it runs."""
    after: tuple[StageRunId, ...]
    first_cell: Cell
    cells: list[CellId] = field(default_factory=list)

    @property
    def label(self) -> str:
        """What durations are learnt by, coarse to fine."""
        return label_of(self.stage, self.first_cell)

    @property
    def needs(self) -> tuple[StageRunId, ...]:
        """What must have succeeded before this can start."""
        return (*self.inputs.values(), *self.after)


@dataclass(frozen=True, slots=True)
class Plan:
    """The stage runs for a set of cells, each after everything it needs."""

    cells: tuple[Cell, ...]
    stage_runs: Mapping[StageRunId, StageRun]
    by_cell: Mapping[CellId, tuple[StageRunId, ...]]
    """In the order of the flow; empty for infeasible cells."""
    machine: Machine
    """What the plan is for."""

    @property
    def feasible(self) -> tuple[Cell, ...]:
        """The cells that can work."""
        return tuple(cell for cell in self.cells if cell.reason is None)

    def resources(self, run: StageRun) -> Resources:
        """What a stage run occupies while it runs."""
        cell = run.first_cell
        need = run.stage.resources(cell, self.machine.of(cell.gpu))
        if need.gpus and cell.gpu is not None and self.machine.types:
            need = replace(need, accelerator=cell.gpu.lower())
        return need


@uncollected()
def make_plan(
    cells: Sequence[Cell],
    toolchains: Mapping[str, Toolchain],
    machine: Machine,
    *,
    digest: Callable[[str, Cell], tuple[str, str]],
    until: str | None = None,
) -> Plan:
    """The plan for `cells` on `machine`, up to and including the stage `until`.

    `digest(path, cell)` gives path on this machine and content digest of a file that a cell's settings name.
    Cells with a reason are kept and get no stage runs. Raises UsageError when a toolchain, or every cell, lacks the
    stage `until`.
    """
    forms: dict[tuple[str, str | None], list[_Form]] = {}
    for name, gpu in dict.fromkeys((cell.toolchain, cell.gpu) for cell in cells if cell.reason is None):
        forms[name, gpu] = _forms(toolchains[name], toolchains[name].identity(machine.of(gpu)), until)
    from trtllm_pipeline.tensorrt import key  # who looks at a plan that was written makes no keys

    graph = _Graph(machine, digest, key)
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
                    of_cell[DRAFTER] = of_drafter[_LAST_OF_DRAFTER]
            graph.add(forms[cell.toolchain, cell.gpu], cell, of_cell, cell.id)
        # Of two of the same stage the cell's own is the last.
        by_cell[cell.id] = tuple(dict.fromkeys((*of_drafter.values(), *of_cell.values())))
    if until is not None and runs and all(run.stage.name != until for run in runs.values()):
        raise UsageError(
            f"none of these cells has the stage {until!r}",
            hint="their settings leave it out: `pipeline plan` shows all",
        )
    return Plan(tuple(cells), runs, by_cell, machine)


def _stages_until(toolchain: Toolchain, until: str | None) -> tuple[Stage, ...]:
    """The stages up to `until`: it and all it needs, for services and what is inside them too."""
    if until is None:
        return toolchain.stages
    wanted = {toolchain.stage(until).name}
    for stage in reversed(toolchain.stages):
        if stage.name in wanted:
            wanted.update(stage.after, *map(stage.upstream, stage.inputs))
    return tuple(stage for stage in toolchain.stages if stage.name in wanted)


class _Taken:
    """What a stage takes of a cell: the same for all cells from which it takes the same. Nobody changes it but `runs`."""

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
        """The part of a key that they are."""
        self.files = files
        self.of_files = of_files
        self.parts = parts
        self.runs: dict[object, StageRun] = {}
        """The stage runs with it, by their inputs."""


class _Watched(Cell):
    """A cell that notes which of its values a stage asks for. What the stage takes follows from these alone."""

    __slots__ = ("asked", "cell")

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.asked: dict[str, None] = {}

    def __getattr__(self, name: str) -> Any:  # it has no values of its own
        value = getattr(self.cell, name)
        self.asked[name] = None
        return value


_BY_IDENTITY: Final = ("recipe", "settings", "companions", "changes")
"""What cells share, and cannot be looked up by."""
_VALUES: Final = tuple(name for name in Cell.__dataclass_fields__ if name not in _BY_IDENTITY)
_PLACES: Final = {name: place for place, name in enumerate((*_VALUES, *_BY_IDENTITY))}
_plain_values: Final = attrgetter(*_VALUES)


def _values(cell: Cell) -> tuple[object, ...]:
    """The values of a cell, by `_PLACES`. Equal ones are the same only as long as both cells are there."""
    companions, changes = cell.companions, cell.changes
    of_others = id(companions) if companions else 0, id(changes) if changes else 0
    return (*_plain_values(cell), id(cell.recipe), id(cell.settings), *of_others)


@dataclass(frozen=True, slots=True)
class _Form:
    """A stage, with what is the same in the keys of all its stage runs, and what is known of cells. Large plans come by here for
    every stage of every cell.
    """

    stage: Stage
    toolchain: str
    inputs: tuple[tuple[str, tuple[str, ...]], ...]
    """Names of inputs, with the stages that each can come from."""
    upstream: str | None
    """The stage of the only input, where there is one that every cell has from there; the others take longer."""
    before: str
    """What is in every key between files and inputs."""
    behind: str
    """What is in every key behind the parameters, which follow the inputs."""
    known: dict[tuple[str, ...], tuple[Callable[[tuple[object, ...]], object], dict[object, _Taken | None]]] = field(
        default_factory=dict
    )
    """Names of the values that were asked for -> what takes them out of a cell's, and what a stage takes of cells with these
    values: None of one that does not have it."""
    taken: dict[tuple[object, ...], _Taken] = field(default_factory=dict)
    """By exact parameters, files and parts."""


def _forms(toolchain: Toolchain, identity: Mapping[str, Json], until: str | None) -> list[_Form]:
    found = []
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
        found.append(_Form(stage, toolchain.name, inputs, only, before.removeprefix("{"), behind))
    return found


@dataclass(slots=True)
class _Graph:
    """The stage runs of a plan, as it is made."""

    machine: Machine
    digest: Callable[[str, Cell], tuple[str, str]]
    key: Callable[[Any], dict[str, Json]]
    """The part of a key that parameters are."""
    runs: dict[StageRunId, StageRun] = field(default_factory=dict)
    selected: dict[tuple[StageRunId, frozenset[ModelPart]], SelectedFiles] = field(default_factory=dict)
    alive: list[Cell] = field(default_factory=list)
    """The cells by which forms know what stages take: no others have the identities of what these have."""

    def add(self, forms: Sequence[_Form], cell: Cell, done: dict[str, StageRunId], user: CellId) -> None:
        """The stage runs of `cell`, used by the cell `user`; those that are `done` are noted by stage."""
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
        """What a stage takes of `cell`, and of all that agree in the values that decide it."""
        watched = _Watched(cell)
        taken = self._taken(form, watched, self.machine.of(cell.gpu))
        names = ("toolchain", *watched.asked)  # two at least: what takes out one gives no tuple
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
        if told := stage.files(cell):
            files, digests = {}, {}
            for name, path in told.items():
                files[name], digests[name] = self.digest(path, cell)
        params = stage.settle(stage.read(cell), files, machine)
        exact = _exact(params)
        of_files = f'"files":{canonical(digests)},' if digests else ""
        same = None if exact is None else (exact, *parts.items(), *files.items(), of_files)
        found = None if same is None else form.taken.get(same)
        if found is None:
            found = _Taken(params, canonical(self.key(params)), files, of_files, parts)
            if same is not None:
                form.taken[same] = found
        return found

    def _stage_run(self, form: _Form, taken: _Taken, cell: Cell, of_cell: Mapping[str, StageRunId]) -> StageRun:
        if form.upstream is not None:
            only = of_cell[form.upstream]
            found = taken.runs.get(only)
            if found is None:
                inputs = {form.inputs[0][0]: only}
                found = taken.runs[only] = self._made(form, taken, cell, inputs, of_cell)
            return found
        inputs = {}
        for name, upstreams in form.inputs:
            for upstream in upstreams:
                if upstream in of_cell:
                    inputs[name] = of_cell[upstream]
                    break
            else:
                assert name in form.stage.optional, f"{form.stage.name} has no {name}"
        same = tuple(inputs.items())
        found = taken.runs.get(same)
        if found is None:
            found = taken.runs[same] = self._made(form, taken, cell, inputs, of_cell)
        return found

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
        found = runs.get(run_id)
        if found is None:
            after = tuple([of_cell[name] for name in stage.after if name in of_cell])
            contents = None if stage.contents is None else stage.contents(cell)
            found = runs[run_id] = StageRun(
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
        return found


def _exact(params: Any) -> bytes | None:
    """Equal only for equal values of equal types: a key tells 1 from 1.0. None if that cannot be told."""
    try:
        return marshal.dumps(vars(params), 2)
    except ValueError:
        return None


def _selection(contents: Mapping[str, str], parts: frozenset[ModelPart]) -> SelectedFiles:
    names = files_of(contents, parts)
    return SelectedFiles(names, {SELECTED: fingerprint(canonical({name: contents[name] for name in names}))})


def part(plan: Plan, cells: Sequence[Cell]) -> Plan:
    """Of `plan`, these of its cells and what they are made of."""
    kept: set[StageRunId] = set()
    pending = [run for cell in cells for run in plan.by_cell[cell.id]]
    while pending:  # what models have in common may be read from that of another cell
        run_id = pending.pop()
        if run_id not in kept:
            kept.add(run_id)
            pending += plan.stage_runs[run_id].inputs.values()
    runs = {run_id: run for run_id, run in plan.stage_runs.items() if run_id in kept}
    return Plan(tuple(cells), runs, {cell.id: plan.by_cell[cell.id] for cell in cells}, plan.machine)


def wanted(plan: Plan) -> set[StageRunId]:
    """The stage runs whose results people use, see `is_result`. Services leave none.

    What they read is made only when one of them has to be: an intermediate that is gone stays gone.
    """
    read: set[StageRunId] = set()
    for run in plan.stage_runs.values():
        read.update(run.inputs.values())
    return {run.id for run in plan.stage_runs.values() if is_result(run.stage.scope, read=run.id in read)}


def is_result(scope: Scope, *, read: bool) -> bool:
    """Whether somebody may look at what such a stage run leaves: nothing reads it, or it was measured on a server."""
    return scope is Scope.IN_SERVICE or (scope is Scope.ARTIFACT and not read)


def to_run(plan: Plan, present: Callable[[StageRun], bool]) -> set[StageRunId]:
    """The stage runs that running `plan` would run: what is wanted and not there, and what that reads and is not there."""
    found: set[StageRunId] = set()
    read: set[StageRunId] = set()
    asked: set[StageRunId] = set()
    for run in reversed([*plan.stage_runs.values()]):  # after all that reads it
        run_id, scope = run.id, run.stage.scope
        if (run_id in asked or is_result(scope, read=run_id in read)) and (scope is Scope.SERVICE or not present(run)):
            found.add(run_id)
            asked.update(run.needs)
        read.update(run.inputs.values())
    return found
