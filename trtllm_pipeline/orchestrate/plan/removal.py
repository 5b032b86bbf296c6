"""Removal of artifacts and runs by name, except for those that must stay."""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtllm_pipeline.base import CellId, Fingerprint
from trtllm_pipeline.orchestrate.plan import unused
from trtllm_pipeline.orchestrate.plan.plan_file import Outline, OutlineCell
from trtllm_pipeline.orchestrate.plan.runs import (
    find_artifacts,
    find_cell,
    find_run,
    newest_cells,
    read_run,
    run_folders,
)
from trtllm_pipeline.orchestrate.store.index import Artifact
from trtllm_pipeline.orchestrate.store.store import Store


@dataclass(frozen=True, slots=True)
class Removal:
    """Artifacts to remove, artifacts that stay with the reason, and the run whose directory is removed."""

    removed: tuple[Artifact, ...]
    kept: tuple[tuple[Artifact, str], ...]
    run: Path | None


def choose(store: Store, names: Sequence[str], run: str | None) -> Removal:
    """The artifacts of `names`, of a run, or of `names` in a run. Raises UsageError, and StateError for damaged lists."""
    folder = None if run is None else find_run(store, run)
    artifacts = {each.fingerprint: each for each in store.index.all_artifacts()}
    stays: dict[Fingerprint, str] = {}
    for why, fingerprints in unused.protected(store, {each: artifacts[each].stage for each in artifacts}):
        stays |= dict.fromkeys(fingerprints, why)
    if folder is not None and not names:
        chosen = _fingerprints(read_run(folder))
        shared = _of_other_runs(store, folder)
    else:
        chosen, shared = _named(store, names, run)
    stays = {**shared, **stays}
    named = [artifacts[each] for each in artifacts if each in chosen]
    return Removal(
        tuple(each for each in named if each.fingerprint not in stays),
        tuple((each, stays[each.fingerprint]) for each in named if each.fingerprint in stays),
        None if names else folder,
    )


def remove(store: Store, names: Sequence[str], run: str | None) -> list[Artifact]:
    """Remove the result of `choose` when nothing runs in the workspace. Returns the artifacts. Raises StateError, UsageError."""
    folder = choose(store, names, run).run
    removed = store.remove(lambda: choose(store, names, run).removed)
    if folder is not None:
        shutil.rmtree(folder)
    return removed


def _named(store: Store, names: Sequence[str], run: str | None) -> tuple[set[Fingerprint], dict[Fingerprint, str]]:
    """Fingerprints for names, and those that other cells share, with the reason. Raises UsageError."""
    direct: set[Fingerprint] = set()
    cells: set[CellId] = set()
    outline: Outline | None = None
    for name in names:
        artifacts = () if set("*?[") & set(name) else find_artifacts(store, name)
        start = name.rpartition("-")[2].rpartition("/")[2]
        if artifacts and all(name == each.stage or each.fingerprint.startswith(start) for each in artifacts):
            direct |= {each.fingerprint for each in artifacts}
        else:
            outline = outline or newest_cells(store, run).outline
            cells |= {each.id for each in _cells(outline, name)}
    if outline is None:
        in_run = None if run is None else _fingerprints(read_run(find_run(store, run)))
        return direct if in_run is None else direct & in_run, {}
    if run is not None:
        direct &= _fingerprints(outline)
    of_cells = {each for cell in outline.cells if cell.id in cells for each in _of_cell(outline, cell)}
    shared = {
        each: f"cell {cell.id} shares it"
        for cell in outline.cells
        if cell.id not in cells
        for each in _of_cell(outline, cell)
        if each not in direct
    }
    return direct | of_cells, shared


def _cells(outline: Outline, name: str) -> list[OutlineCell]:
    """All cells that match a pattern, or the cell with a name. Raises UsageError if there is none."""
    cells = [each for each in outline.cells if fnmatch.fnmatchcase(each.id, name)]
    return cells or [find_cell(outline, name)]


def _of_cell(outline: Outline, cell: OutlineCell) -> Iterator[Fingerprint]:
    return (outline.stage_runs[each].fingerprint for each in cell.stage_runs)


def _fingerprints(outline: Outline) -> set[Fingerprint]:
    return {each.fingerprint for each in outline.stage_runs.values()}


def _of_other_runs(store: Store, folder: Path) -> dict[Fingerprint, str]:
    """Artifacts used by runs other than the one in `folder`, each with one of these runs."""
    return {
        each: f"run {other.name} used it"
        for other in run_folders(store)
        if other != folder
        for each in _fingerprints(read_run(other))
    }
