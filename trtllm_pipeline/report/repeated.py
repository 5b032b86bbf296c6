"""A run that finds everything as the run before it had left it: its plan, lock and report are that run's.

A run that did all that was asked leaves the digest of what it was asked, and of what there was in the end: cells as they were
planned, and artifacts with the time at which they were made. All that it wrote follows from these.
"""

from __future__ import annotations

import json
import os
import shutil
from array import array
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trtllm_pipeline import __version__
from trtllm_pipeline.domain import Fingerprint
from trtllm_pipeline.errors import StateError
from trtllm_pipeline.files.writing import read_object, write_json
from trtllm_pipeline.planning.plan import Plan
from trtllm_pipeline.planning.plan_file import NAME as PLAN
from trtllm_pipeline.planning.plan_file import OUTLINE
from trtllm_pipeline.planning.request import Request
from trtllm_pipeline.report.rows import CellResult, CellStatus
from trtllm_pipeline.report.writers import NAME as REPORT
from trtllm_pipeline.report.writers import read_report
from trtllm_pipeline.store.index import Artifact
from trtllm_pipeline.store.store import Store

if TYPE_CHECKING:
    from trtllm_pipeline.config.loaded import LoadedMatrix

NAME: Final = "digest.json"
LOCK: Final = "lock"
_FILES: Final = (OUTLINE, PLAN, REPORT)


def digest(request: Request, loaded: LoadedMatrix, plan: Plan, present: Mapping[Fingerprint, Artifact]) -> str:
    """Of all that follows from a request where nothing of its `plan` is to run."""
    installed = plan.machine.tensorrt_llm
    matrix = loaded.written, loaded.command_line, loaded.defaults, loaded.recipes, loaded.written_recipes
    asked = request.to_json(), matrix, installed and installed.release
    cells = [
        (cell.id, cell.toolchain, cell.recipe.get("quantization"), cell.reason, *map(astuple, cell.changes))
        for cell in plan.cells
    ]
    runs = [run.fingerprint for run in plan.stage_runs.values()]
    there = array("d", [-1.0 if (found := present.get(run)) is None else found.published_s for run in runs])
    text = [json.dumps((__version__, asked, cells)), *map(" ".join, plan.by_cell.values()), *runs]
    whole = "\n".join(text).encode(errors="surrogatepass")
    return blake2b(whole + there.tobytes(), digest_size=16).hexdigest()


def leave(folder: Path, found: str, *, idle: bool) -> None:
    """Write into a run's folder the digest of what there is at its end; `idle` if it made nothing."""
    write_json(folder / NAME, {"schema": 1, "digest": found, "idle": idle})


def unchanged(store: Store, found: str) -> Path | None:
    """The folder of the newest run, if it left just what was `found` now."""
    newest = store.index.newest_run()
    if newest is None or (read_object(store.runs_dir / newest / NAME) or {}).get("digest") != found:
        return None
    return store.runs_dir / newest


def forget(store: Store) -> None:
    """Have the next run look at everything, whatever the newest one left."""
    newest = store.index.newest_run()
    if newest is not None:
        (store.runs_dir / newest / NAME).unlink(missing_ok=True)


def rows(earlier: Path) -> tuple[CellResult, ...] | None:
    """The rows of a run that finds what the `earlier` one left. None where they cannot be read."""
    with suppress(StateError):
        found, _ = read_report(earlier / REPORT, json.loads)
        return tuple(
            replace(row, status=CellStatus.UP_TO_DATE) if row.status is CellStatus.DONE else row for row in found
        )
    return None


def take(earlier: Path, folder: Path) -> bool:
    """Link what the `earlier` run wrote into the folder of one that finds the same. False if that made something, or there
    are no links on this file system.
    """
    if not (read_object(earlier / NAME) or {}).get("idle"):
        return False
    try:
        shutil.copytree(earlier / LOCK, folder / LOCK, copy_function=os.link)
        for name in _FILES:
            os.link(earlier / name, folder / name)
        os.utime(folder / PLAN)  # by which `store gc` tells how long ago a run was: both wanted the same
    except OSError:
        shutil.rmtree(folder / LOCK, ignore_errors=True)
        for name in _FILES:
            (folder / name).unlink(missing_ok=True)
        return False
    return True
