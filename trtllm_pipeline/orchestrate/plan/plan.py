"""Plans cells: a graph of stage runs. Equal fingerprints merge equal work.

All fingerprints of a matrix are known before anything runs. Keys contain the fingerprints of inputs, not their bytes, except
for the files of a model that a stage reads, whose digests are known in advance. This is the hot path of a large matrix, so it
uses plain objects and shared parts, no model classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

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

SELECTED: Final = "files"
"""Key of an input that is read in part: the digest of the files that are read, instead of the input's fingerprint."""


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
        """Label for durations and memory."""
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


@dataclass(frozen=True, slots=True)
class _Form:
    """A stage of a toolchain with the parts of its keys that all cells share."""

    stage: Stage
    toolchain: str
    constant: Mapping[str, Json]


def _forms(toolchain: catalog.Toolchain, identity: Mapping[str, Json], until: str | None) -> list[_Form]:
    forms = []
    for stage in _stages_until(toolchain, until):
        constant: dict[str, Json] = {"schema": SCHEMA, "stage": stage.name, "version": stage.version}
        if not stage.shared:
            constant["toolchain"] = stage.of or toolchain.name
        if stage.identity:
            constant["identity"] = {name: identity[name] for name in stage.identity}
        forms.append(_Form(stage, toolchain.name, constant))
    return forms


@dataclass(slots=True)
class _Graph:
    """Builder of a plan's stage runs."""

    machine: Machine
    digest: Callable[[str, Cell], tuple[str, str]]
    key: Callable[[Any], dict[str, Json]]
    """Parameters -> their part of a key."""
    runs: dict[StageRunId, StageRun] = field(default_factory=dict)
    selected: dict[tuple[StageRunId, frozenset[ModelPart]], tuple[tuple[str, ...], Json]] = field(default_factory=dict)
    """Model and its parts -> the files that a stage run reads, and their part of its key."""

    def add(self, forms: Sequence[_Form], cell: Cell, done: dict[str, StageRunId], user: CellId) -> None:
        """The stage runs of `cell`, used by the cell `user`. Records them in `done` by stage."""
        machine = self.machine.of(cell.gpu)
        for form in forms:
            if form.stage.applies(cell, machine):
                run = self._stage_run(form, cell, machine, done)
                if run.cells[-1:] != [user]:
                    run.cells.append(user)
                done[form.stage.name] = run.id

    def _stage_run(self, form: _Form, cell: Cell, machine: Machine, done: Mapping[str, StageRunId]) -> StageRun:
        runs, stage = self.runs, form.stage
        inputs: dict[str, StageRunId] = {}
        for name in stage.inputs:
            upstream = next((each for each in stage.upstream(name) if each in done), None)
            assert upstream is not None or name in stage.optional, f"{stage.name} has no {name}"
            if upstream is not None:
                inputs[name] = done[upstream]
        reads: dict[str, tuple[str, ...]] = {}
        of_inputs: dict[str, Json] = {name: runs[run].fingerprint for name, run in inputs.items()}
        for name, parts in ({} if stage.parts is None else stage.parts(cell)).items():
            if name in inputs and (contents := runs[inputs[name]].contents) is not None:
                same_files = inputs[name], parts
                if same_files not in self.selected:
                    names = files_of(contents, parts)
                    selected = fingerprint(canonical({each: contents[each] for each in names}))
                    self.selected[same_files] = names, {SELECTED: selected}
                reads[name], of_inputs[name] = self.selected[same_files]
        digested = {name: self.digest(path, cell) for name, path in stage.files(cell).items()}
        files = {name: path for name, (path, _) in digested.items()}
        params = stage.settle(stage.read(cell), files, machine)
        parts_of_key = {**form.constant, "inputs": of_inputs, "params": self.key(params)}
        if digested:
            parts_of_key["files"] = {name: digest for name, (_, digest) in digested.items()}
        key = canonical(parts_of_key)
        hashed = fingerprint(key)
        run_id = StageRunId(f"{stage.name}-{hashed[:12]}")
        if run_id not in runs:
            after = tuple(done[name] for name in stage.after if name in done)
            contents = None if stage.contents is None else stage.contents(cell)
            runs[run_id] = StageRun(
                run_id, stage, form.toolchain, hashed, key, params, files, inputs, reads, contents, after, cell
            )
        return runs[run_id]


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


def stages_in_order(*plans: Plan) -> list[str]:
    """The stages of plans in dependency order, otherwise in order of appearance."""
    needs: dict[str, set[str]] = {}
    for plan in plans:
        for run in plan.stage_runs.values():
            of_stage = needs.setdefault(run.stage.name, set())
            for each in run.needs:
                of_stage.add(plan.stage_runs[each].stage.name)
    ordered: list[str] = []
    while left := [name for name in needs if name not in ordered]:
        # Two toolchains can disagree on the order of two stages. Then the first remaining stage is next.
        ordered.append(next((name for name in left if needs[name] <= set(ordered)), left[0]))
    return ordered


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
