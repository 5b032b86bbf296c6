"""The flow from a matrix to a report, in order. Each step is one function with one plain type on either side.

    cells = select_cells(request)           matrix + recipes -> cells
    plan = plan_cells(cells, store)         cells -> plan, with models pinned and files digested
    outcome = run_plan(plan, store, ...)    plan -> stage runs -> artifacts
    report.rows(plan, store, outcome)       artifacts -> table
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final, Protocol

from trtllm_pipeline import plan as planning
from trtllm_pipeline import scheduler as scheduling
from trtllm_pipeline.domain import Cell, Fingerprint, Json, Scope, StageRunId, StageStatus
from trtllm_pipeline.errors import FailureClass, PlanError, StageError, UsageError
from trtllm_pipeline.executors.base import Ended, Executor, Job, Ready, Usage
from trtllm_pipeline.plan import Plan, StageRun
from trtllm_pipeline.stages.base import PROGRESS_FILE, SERVICE_FILE
from trtllm_pipeline.stages.verbs import to_argv
from trtllm_pipeline.store.claims import Claim, lease_machine
from trtllm_pipeline.store.manifest import Manifest
from trtllm_pipeline.store.store import JOB, OUT, Artifact, Attempt, Store
from trtllm_pipeline.toolchains import base as toolchains

_POLL_S: Final = 0.2
"""How often to look for what tells nobody: claims of other invocations, progress of stages, the user's interrupt."""
_SEAL_IN_THREAD_BYTES: Final = 32 << 20
_UNKNOWN_DURATION_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Request:
    """What a command line asks for."""

    matrix: Path
    workspace: Path
    sets: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()
    until: str | None = None
    toolchain: str | None = None


def select_cells(request: Request) -> tuple[Cell, ...]:
    """The cells of the matrix that the request selects. Raises MatrixError, UsageError, PlanError."""
    from trtllm_pipeline.matrix.expand import expand, select
    from trtllm_pipeline.matrix.load import load_matrix

    loaded = load_matrix(request.matrix, request.sets)
    default = request.toolchain
    if default is None:
        named = loaded.matrix.axes.toolchain
        default = toolchains.detect().name if named is None or "auto" in named else named[0]
    else:
        toolchains.load(default)
    cells = expand(loaded, default_toolchain=default, feasibility=_infeasible)
    return select(cells, request.cells) if request.cells else cells


def _infeasible(cell: Cell) -> str | None:
    if cell.toolchain not in toolchains.names():
        return f"toolchain {cell.toolchain}: not part of this release"
    return toolchains.load(cell.toolchain).infeasible(cell)


def plan_cells(cells: Sequence[Cell], store: Store | None, *, until: str | None = None) -> Plan:
    """The plan for `cells`, with every model pinned to one revision. Asks hubs only for what the store has not pinned."""
    pinned = _pin_models(cells, store)
    used = {cell.toolchain for cell in cells if cell.reason is None}
    files = _Files(None if store is None else store.workspace / "digests.db")
    return planning.make_plan(
        [pinned(cell) for cell in cells],
        {name: toolchains.load(name) for name in sorted(used)},
        digest=files.digest,
        until=until,
    )


def _pin_models(cells: Sequence[Cell], store: Store | None) -> Callable[[Cell], Cell]:
    """A function that puts the pinned source of its model into a cell's recipe."""
    from trtllm_pipeline.fingerprint import canonical

    recipes: dict[tuple[int, int], Mapping[str, Json]] = {}

    def pin(cell: Cell) -> Cell:
        if cell.reason is not None:
            return cell
        same = (id(cell.recipe), id(cell.settings["download"]))
        recipe = recipes.get(same)
        if recipe is None:
            sources, wanted = cell.recipe["sources"], cell.settings["download"]
            request = canonical({"sources": sources, "source": wanted["source"]})
            source = store.index.pin(request) if store is not None else None
            if source is None:
                from trtllm_pipeline.hub.sources import resolve

                assert isinstance(sources, list)
                source = resolve(
                    sources,
                    prefer=str(wanted["source"]),
                    offline=bool(wanted["offline"]),
                    base_dir=Path(cell.base_dir),
                    cache=None if store is None else store.workspace / "digests.db",
                )
                # A local folder may change under the same name; what it holds is looked at each time.
                if store is not None and "local" not in source:
                    store.index.set_pin(request, source)
            recipe = recipes[same] = {**cell.recipe, "source": dict(source)}
        return dataclasses.replace(cell, recipe=recipe)

    return pin


class _Files:
    """Paths and content digests of the files that settings name; each file is looked at once."""

    def __init__(self, cache: Path | None) -> None:
        self._cache = cache
        self._known: dict[tuple[str, str], tuple[str, str]] = {}

    def digest(self, name: str, cell: Cell) -> tuple[str, str]:
        """Path and digest of `name`: "builtin:NAME", or a path from the matrix file's folder."""
        found = self._known.get((name, cell.base_dir))
        if found is None:
            from trtllm_pipeline.digest import digest_file

            path = data_file(name, Path(cell.base_dir))
            try:
                found = (str(path), digest_file(path))
            except OSError as error:
                raise UsageError(
                    f"{path}: cannot be read: {error.strerror}",
                    hint="the matrix names it; paths start at the matrix file's folder",
                ) from error
            self._known[name, cell.base_dir] = found
        return found


def data_file(name: str, base_dir: Path) -> Path:
    """The file a setting means. Raises UsageError for a built-in data set that does not exist."""
    if not name.startswith("builtin:"):
        return (base_dir / name).absolute()
    folder = Path(__file__).parent / "data" / "builtin"
    path = folder / f"{name.removeprefix('builtin:')}.jsonl"
    if not path.is_file():
        known = ", ".join(sorted(f"builtin:{file.stem}" for file in folder.glob("*.jsonl")))
        raise UsageError(f"there is no data set {name}", hint=f"built in are {known}; or name a JSONL file of yours")
    return path


