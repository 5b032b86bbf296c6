"""Finding what a person means: a run of the workspace, a cell of its plan, a stage of the cell."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Sequence
from pathlib import Path

from trtllm_pipeline.domain import CellId
from trtllm_pipeline.errors import UsageError
from trtllm_pipeline.planning.plan_file import NAME, Outline, OutlineCell, OutlineRun, read_plan
from trtllm_pipeline.store.store import Store


def find_run(store: Store, wanted: str | None) -> Path:
    """The folder of a run: the latest, or the one whose id begins with `wanted`. Raises UsageError."""
    known = [path.parent.name for path in store.runs_dir.glob(f"*/{NAME}") if path.is_file()]
    order = {run.id: -place for place, run in enumerate(store.index.runs())}
    # Ids begin with their time, so runs that the index has lost are still in order, after those it knows.
    known.sort(key=lambda run: (run not in order, -order.get(run, 0), run))
    if not known:
        raise UsageError(f"{store.workspace}: there was no run yet", hint="pipeline run --matrix FILE")
    if wanted is None:
        return store.runs_dir / known[0]
    found = [wanted] if wanted in known else [run for run in known if run.startswith(wanted)]
    if len(found) == 1:
        return store.runs_dir / found[0]
    if found:
        raise UsageError(f"{wanted!r} begins the ids of {len(found)} runs", hint=f"they are {_some(found)}")
    raise UsageError(f"there is no run {wanted!r}", hint=_near(wanted, known, "runs"))


def read_run(folder: Path) -> Outline:
    """The plan of a run, by its folder."""
    return read_plan(folder / NAME)


def find_cell(outline: Outline, wanted: str) -> OutlineCell:
    """The one cell that `wanted` means: its id, a pattern, or a part of the id. Raises UsageError."""
    ids = {str(cell.id): cell for cell in outline.cells}
    for matches in (
        lambda cell: cell == wanted,
        lambda cell: fnmatch.fnmatchcase(cell, wanted) or fnmatch.fnmatchcase(cell, f"{wanted.rstrip('/*')}/*"),
        lambda cell: wanted in cell,
    ):
        found = [cell for cell in ids if matches(cell)]
        if len(found) == 1:
            return ids[found[0]]
        if found:
            raise UsageError(f"{wanted!r} fits {len(found)} cells", hint=f"they are {_some(found)}")
    raise UsageError(f"{wanted!r} fits none of the {len(ids)} cells", hint=_near(wanted, ids, "cells"))


def find_stage(outline: Outline, cell: OutlineCell, stage: str) -> OutlineRun:
    """The stage run of a cell. Raises UsageError."""
    runs = {outline.stage_runs[run].stage: outline.stage_runs[run] for run in cell.stage_runs}
    if cell.reason is not None:
        raise UsageError(f"{cell.id} has no stages, it can never work: {cell.reason}")
    if stage not in runs:
        raise UsageError(f"{cell.id} has no stage {stage!r}", hint=_near(stage, runs, "stages"))
    return runs[stage]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _near(wanted: str, known: Iterable[str | CellId], what: str) -> str:
    """A hint: the nearest names, or what there is."""
    names = list(known)
    close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.4)
    return f"near are {', '.join(close)}" if close else f"the {what} are {_some(names)}"
