"""cells -> plan: the graph of stage runs, with equal work merged by equal fingerprints.

Every fingerprint of the whole matrix is known before anything runs, since keys are made of inputs' fingerprints, and of
bytes only where these are known before: of the files that a stage reads of a model. This is the hot path of a large matrix: plain objects, shared parts, no model classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from trtllm_pipeline.domain import Cell, CellId, Fingerprint, Json, Scope, StageRunId
from trtllm_pipeline.errors import UsageError
from trtllm_pipeline.files.model_parts import ModelPart, files_of
from trtllm_pipeline.fingerprint import SCHEMA, canonical, fingerprint
from trtllm_pipeline.machine.model import Machine
from trtllm_pipeline.stages.base import Stage
from trtllm_pipeline.stages.params import key as params_key
from trtllm_pipeline.toolchains.base import DRAFTER, Toolchain

_LAST_OF_DRAFTER: Final = "build"

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
        return f"{self.stage.name}/{self.toolchain}/{self.first_cell.model}/{self.first_cell.precision}"

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
    identities = {name: toolchain.identity(machine) for name, toolchain in toolchains.items()}
    stages = {name: _stages_until(toolchain, until) for name, toolchain in toolchains.items()}
    runs: dict[StageRunId, StageRun] = {}
    by_cell: dict[CellId, tuple[StageRunId, ...]] = {}
    selected: dict[tuple[StageRunId, frozenset[ModelPart]], SelectedFiles] = {}
    for cell in cells:
        of_cell: dict[str, StageRunId] = {}
        of_drafter: dict[str, StageRunId] = {}

        def add(stage: Stage, of: Cell, done: dict[str, StageRunId], cell: Cell = cell) -> None:
            if stage.applies(of, machine):
                run = _stage_run(stage, of, machine, done, runs, identities[of.toolchain], digest, selected)
                if cell.id not in run.cells[-1:]:
                    run.cells.append(cell.id)
                done[stage.name] = run.id

        if cell.reason is None:
            toolchain = toolchains[cell.toolchain]
            if (drafter := toolchain.drafter(cell)) is not None:
                for stage in _common(stages[cell.toolchain], _stages_until(toolchain, _LAST_OF_DRAFTER)):
                    add(stage, drafter, of_drafter)
                if _LAST_OF_DRAFTER in of_drafter:
                    of_cell[DRAFTER] = of_drafter[_LAST_OF_DRAFTER]
            for stage in stages[cell.toolchain]:
                add(stage, cell, of_cell)
        # Of two of the same stage the cell's own is the last.
        by_cell[cell.id] = tuple(dict.fromkeys((*of_drafter.values(), *of_cell.values())))
    if until is not None and runs and all(run.stage.name != until for run in runs.values()):
        raise UsageError(
            f"none of these cells has the stage {until!r}",
            hint="their settings leave it out: `pipeline plan` shows all",
        )
    return Plan(tuple(cells), runs, by_cell, machine)


def _common(stages: Sequence[Stage], others: Sequence[Stage]) -> list[Stage]:
    names = {stage.name for stage in others}
    return [stage for stage in stages if stage.name in names]


def _stages_until(toolchain: Toolchain, until: str | None) -> tuple[Stage, ...]:
    """The stages up to `until`: it and all it needs, for services and what is inside them too."""
    if until is None:
        return toolchain.stages
    wanted = {toolchain.stage(until).name}
    for stage in reversed(toolchain.stages):
        if stage.name in wanted:
            wanted.update(stage.after, *map(stage.upstream, stage.inputs))
    return tuple(stage for stage in toolchain.stages if stage.name in wanted)


def _stage_run(
    stage: Stage,
    cell: Cell,
    machine: Machine,
    of_cell: Mapping[str, StageRunId],
    runs: dict[StageRunId, StageRun],
    identity: Mapping[str, Json],
    digest: Callable[[str, Cell], tuple[str, str]],
    selected: dict[tuple[StageRunId, frozenset[ModelPart]], SelectedFiles],
) -> StageRun:
    inputs: dict[str, StageRunId] = {}
    for name, upstream in stage.inputs.items():  # plain, since every stage of every cell comes by here
        ups = (upstream,) if isinstance(upstream, str) else upstream
        for up in ups:
            if up in of_cell:
                inputs[name] = of_cell[up]
                break
        else:
            assert name in stage.optional, f"{stage.name} has no {name}"
    reads: dict[str, tuple[str, ...]] = {}
    read: dict[str, Json] = {name: runs[run].fingerprint for name, run in inputs.items()}
    for name, parts_read in () if stage.parts is None else stage.parts(cell).items():
        if name in inputs and (contents := runs[inputs[name]].contents) is not None:
            same = inputs[name], parts_read
            found_files = selected.get(same)
            if found_files is None:
                found_files = selected[same] = _selection(contents, parts_read)
            reads[name], read[name] = found_files
    files: dict[str, str] = {}
    digests: dict[str, Json] = {}
    for name, path in stage.files(cell).items():
        files[name], digests[name] = digest(path, cell)
    params = stage.settle(stage.read(cell), files, machine)
    parts: dict[str, Json] = {
        "schema": SCHEMA,
        "stage": stage.name,
        "version": stage.version,
        "params": params_key(params),
        "inputs": read,
    }
    if not stage.shared:
        parts["toolchain"] = stage.of or cell.toolchain
    if digests:
        parts["files"] = digests
    if stage.identity:
        parts["identity"] = {name: identity[name] for name in stage.identity}
    key = canonical(parts)
    hashed = fingerprint(key)
    run_id = StageRunId(f"{stage.name}-{hashed[:12]}")
    found = runs.get(run_id)
    if found is None:
        after = tuple(of_cell[name] for name in stage.after if name in of_cell)
        contents = None if stage.contents is None else stage.contents(cell)
        found = StageRun(
            run_id, stage, cell.toolchain, hashed, key, params, files, inputs, reads, contents, after, cell
        )
        runs[run_id] = found
    return found


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
    pending = list(wanted(plan))
    found: set[StageRunId] = set()
    while pending:
        run = plan.stage_runs[pending.pop()]
        if run.id in found or (run.stage.scope is not Scope.SERVICE and present(run)):
            continue
        found.add(run.id)
        pending += run.needs
    return found
