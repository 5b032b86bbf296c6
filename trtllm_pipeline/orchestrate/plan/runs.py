"""Finds runs, cells, stages and artifacts by the names that users type."""

from __future__ import annotations

import difflib
import fnmatch
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from trtllm_pipeline.base import CellId, StageRunId, UsageError, count, in_order
from trtllm_pipeline.orchestrate.plan.plan_file import NAME, Outline, OutlineCell, OutlineRun, read_plan
from trtllm_pipeline.orchestrate.plan.planner import REQUEST_FILE, Request, read_request
from trtllm_pipeline.orchestrate.store.index import Artifact
from trtllm_pipeline.orchestrate.store.store import Store

if TYPE_CHECKING:
    from trtllm_pipeline.orchestrate.store.remote_store import ArtifactKey

_ARTIFACT: Final = re.compile(r"(?:([a-z][a-z0-9_]*)[-/])?([0-9a-f]{4,32})")
LATEST: Final = "latest"
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,99}")
_BACK: Final = re.compile(r"(.+?)(?:~(\d+))?")


def check_name(name: str) -> str:
    """`name`, if it is valid for a run. It must differ from prefixes of ids. Raises UsageError."""
    if not _NAME.fullmatch(name) or name == LATEST:
        raise UsageError(
            f"--name {name}: invalid name of a run",
            hint="use a letter, then up to 99 letters, digits, '.', '_' and '-', such as nightly-1234",
        )
    return name


def run_id(started_s: float, name: str) -> str:
    """The id of a run. Ids sort by time."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(started_s))}-{name}"


def run_folders(store: Store) -> tuple[Path, ...]:
    """Directories of all runs, the latest first. Raises UsageError if there is none."""
    known = [path.parent.name for path in store.runs_dir.glob(f"*/{NAME}") if path.is_file()]
    order = {run.id: place for place, run in enumerate(store.index.runs())}
    # Ids start with the time. Runs that are not in the index follow those that are, in order.
    known.sort(reverse=True)
    known.sort(key=lambda run: order.get(run, len(order)))
    if not known:
        raise UsageError(f"{store.workspace}: no runs in this workspace yet", hint="pipeline run --matrix FILE")
    return tuple(store.runs_dir / run for run in known)


def find_run(store: Store, wanted: str | None) -> Path:
    """Directory of a run: `latest` or None, an id, a prefix of an id, or a name. Raises UsageError.

    `latest~2` is the run two before the latest, `NAME~1` the one before the latest run with the name NAME.
    """
    wanted = wanted or LATEST
    folders = run_folders(store)
    known = [folder.name for folder in folders]
    back = _BACK.fullmatch(wanted)
    called = [] if back is None else [each for each in folders if back[1] in {LATEST, each.name.split("-", 2)[-1]}]
    if back is not None and called:
        place = int(back[2] or 0)
        if place < len(called):
            return called[place]
        runs = "is 1 run" if len(called) == 1 else f"are {len(called)} runs"
        raise UsageError(
            f"{wanted}: there {runs}{'' if back[1] == LATEST else f' called {back[1]}'} in {store.workspace}",
            hint="pipeline status --runs lists them",
        )
    matches = [wanted] if wanted in known else [run for run in known if run.startswith(wanted)]
    if len(matches) == 1:
        return store.runs_dir / matches[0]
    if matches:
        raise UsageError(f"{wanted!r} is the prefix of {len(matches)} run ids", hint=f"one of {_some(matches)}")
    raise UsageError(f"there is no run {wanted!r}", hint=_near(wanted, known, "runs"))


@dataclass(frozen=True, slots=True)
class NewestCells:
    """Cells of a matrix, each as planned by the newest run with this cell."""

    outline: Outline
    origins: Mapping[CellId, Path]
    """Cell -> directory of the run with all its stages. Cells that several runs share are missing."""
    folders: tuple[Path, ...]
    """Directories of the runs that were read, the newest first."""

    @property
    def newest(self) -> Path:
        return self.folders[0]

    @property
    def title(self) -> str:
        earlier = len(self.folders) - 1
        more = f" and {count(earlier, 'earlier run')} of its matrix" if earlier else ""
        return f"run {self.newest.name}{more}"


def newest_cells(store: Store, wanted: str | None = None) -> NewestCells:
    """Cells of the latest run's matrix, or only those of the `wanted` run. Raises UsageError.

    A partial run (`--cells`, `--until`) does not hide the rest: earlier runs count too, back to the last run of the whole
    matrix. A cell is as in the newest run, extended by later stages from an earlier run with the same stage runs.
    """
    folders = [find_run(store, wanted)]
    request = _request(folders[0])
    if wanted is None and request is not None and not request.whole:
        for folder in run_folders(store)[1:]:
            other = _request(folder)
            if other is not None and other.matrix == request.matrix:
                folders.append(folder)
                if other.whole:
                    break
    return _merged({folder: read_run(folder) for folder in folders})


def _request(folder: Path) -> Request | None:
    try:
        return read_request(folder / REQUEST_FILE)
    except UsageError:
        return None  # the run was killed before it wrote a plan, or the plan is damaged


def _merged(outlines: Mapping[Path, Outline]) -> NewestCells:
    """Merge outlines of runs, the newest first."""
    order = dict.fromkeys(cell.id for outline in reversed(tuple(outlines.values())) for cell in outline.cells)
    cells: dict[CellId, OutlineCell] = {}
    origins: dict[CellId, Path] = {}
    for folder, outline in outlines.items():
        for cell in outline.cells:
            if cell.id not in cells:
                cells[cell.id], origins[cell.id] = cell, folder
            elif set(cell.stage_runs) > set(cells[cell.id].stage_runs) > set():
                cells[cell.id] = cell
                origins.pop(cell.id, None)
    if len(outlines) == 1:
        return NewestCells(outline, origins, tuple(outlines))
    used: dict[StageRunId, list[CellId]] = {}
    for cell_id in order:
        for run in cells[cell_id].stage_runs:
            used.setdefault(run, []).append(cell_id)
    whole = {
        run.id: replace(run, cells=tuple(used[run.id]))
        for outline in outlines.values()
        for run in outline.stage_runs.values()
        if run.id in used
    }
    return NewestCells(Outline(tuple(cells[cell] for cell in order), whole), origins, tuple(outlines))


def read_run(folder: Path) -> Outline:
    """The plan of a run, by its directory."""
    return read_plan(folder / NAME)


def find_cell(outline: Outline, wanted: str, stage: str | None = None) -> OutlineCell:
    """The cell for `wanted`: its id, a pattern, a part of the id, or segments of it. Raises UsageError.

    With `stage`, the first of several cells if all share the run of this stage.
    """
    ids = {str(cell.id): cell for cell in outline.cells}
    for test in (
        lambda cell: cell == wanted,
        lambda cell: fnmatch.fnmatchcase(cell, wanted) or fnmatch.fnmatchcase(cell, f"{wanted.rstrip('/*')}/*"),
        lambda cell: wanted in cell,
        lambda cell: in_order(cell.split("/"), wanted.split("/")),
    ):
        matches = [cell for cell in ids if test(cell)]
        if len(matches) == 1 or (stage and _share(outline, [ids[cell] for cell in matches], stage)):
            return ids[matches[0]]
        if matches:
            raise UsageError(f"{wanted!r} matches {len(matches)} cells", hint=f"one of {_some(matches)}")
    raise UsageError(f"{wanted!r} matches none of the {len(ids)} cells", hint=_near(wanted, ids, "cells"))


def find_artifacts(store: Store, wanted: str | None) -> tuple[Artifact, ...]:
    """The artifacts for `wanted`: one, by the id of its stage run or a prefix of its fingerprint, or all of a stage or
    cell.

    None means all artifacts. Raises UsageError.
    """
    return find_named(store, [each for each in store.index.all_artifacts() if each.folder.is_dir()], wanted)


N = TypeVar("N", "Artifact", "ArtifactKey")


def find_named(store: Store, known: Sequence[N], wanted: str | None) -> tuple[N, ...]:
    """Like `find_artifacts`, among the `known` artifacts of this workspace or a remote store."""
    of_stage = tuple(each for each in known if wanted in (None, each.stage))
    if wanted is None or of_stage:
        return of_stage
    named = _ARTIFACT.fullmatch(wanted)
    if named is not None:
        matches = [each for each in known if each.fingerprint.startswith(named[2]) and named[1] in (None, each.stage)]
        if len(matches) == 1:
            return (matches[0],)
        if matches:
            raise UsageError(
                f"{wanted!r} is the prefix of {len(matches)} artifacts",
                hint=f"one of {_some([each.fingerprint for each in matches])}",
            )
    try:
        outline = newest_cells(store).outline
        cell = find_cell(outline, wanted)
    except UsageError as error:
        raise UsageError(
            f"{wanted!r} is neither an artifact nor a stage nor a cell: {error.message}",
            hint=f"pipeline store list shows the artifacts; {error.hint}",
        ) from error
    made = {each.fingerprint: each for each in known}
    matches = [
        made[fingerprint] for run in cell.stage_runs if (fingerprint := outline.stage_runs[run].fingerprint) in made
    ]
    if not matches:
        raise UsageError(f"{cell.id} has no artifacts yet", hint=f"pipeline run --cells '{cell.id}'")
    return tuple(matches)


def find_stage(outline: Outline, cell: OutlineCell, stage: str) -> OutlineRun:
    """The stage run of a cell. Raises UsageError."""
    runs = {outline.stage_runs[run].stage: outline.stage_runs[run] for run in cell.stage_runs}
    if cell.reason is not None:
        raise UsageError(f"{cell.id} has no stages, it is infeasible: {cell.reason}")
    if stage not in runs:
        raise UsageError(f"{cell.id} has no stage {stage!r}", hint=_near(stage, runs, "stages"))
    return runs[stage]


def _share(outline: Outline, cells: Sequence[OutlineCell], stage: str) -> bool:
    """True if all `cells` share one run of `stage`."""
    runs = [[run for run in cell.stage_runs if outline.stage_runs[run].stage == stage] for cell in cells]
    return bool(runs) and all(each and each == runs[0] for each in runs)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _near(wanted: str, known: Iterable[str | CellId], what: str) -> str:
    """A hint: the nearest names, or all names."""
    names = list(known)
    close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.4)
    return " or ".join(close) if close else f"the {what} are {_some(names)}"
