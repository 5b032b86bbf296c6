"""Progress of each cell, running stages, and failures: `pipeline status` as text and JSON."""

from __future__ import annotations

import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Final

from trtllm_pipeline.base import (
    Json,
    StageRunId,
    StageStatus,
    count,
    duration,
    in_brackets,
    shared_parts,
    shorten,
    terminal,
)
from trtllm_pipeline.orchestrate import LOG, Outline, OutlineCell, OutlineRun, StageState, Store, stage_status
from trtllm_pipeline.show.phrases import groups, without
from trtllm_pipeline.show.progress import views

if TYPE_CHECKING:
    from rich.text import Text

    from trtllm_pipeline.orchestrate import ForecastCheck

_MAX_CELLS: Final = 200
_BESIDE_CELLS: Final = 6
"""Lines reserved for title, headers, legend and running stages."""
DONE: Final = (StageStatus.UP_TO_DATE, StageStatus.SKIPPED)
_MENTIONED: Final = (StageStatus.RUNNING, StageStatus.FAILED)


@dataclass(frozen=True, slots=True)
class MatrixStatus:
    """Progress of the cells of a matrix."""

    title: str
    run: str | None
    """The newest run of the cells, or None for the current matrix."""
    outline: Outline
    cells: Sequence[OutlineCell]
    states: Mapping[StageRunId, StageState]
    """State of attempts without artifacts."""
    artifacts_dir: Path
    """Locations of these attempts."""
    left: tuple[float, bool] | None = None
    """Time left of an active run by its own estimate, in seconds, and whether it is reliable."""
    goes_on: bool = False
    """True if a run of these cells is active, including one that waits for other processes."""
    took: ForecastCheck | None = None
    """Expected and actual time of the newest run, if it has ended."""

    @property
    def stage_runs(self) -> dict[StageRunId, OutlineRun]:
        ids = dict.fromkeys(chain.from_iterable(cell.stage_runs for cell in self.cells))
        return {run: self.outline.stage_runs[run] for run in ids}


def status_of(
    store: Store,
    outline: Outline,
    title: str,
    run: str | None = None,
    cells: Sequence[str] = (),
    *,
    left: tuple[float, bool] | None = None,
    goes_on: bool = False,
    took: ForecastCheck | None = None,
) -> MatrixStatus:
    """Progress of the cells of `outline` that match `cells`. Raises UsageError if none does."""
    shown: Sequence[OutlineCell] = outline.cells
    if cells:
        from trtllm_pipeline.orchestrate import select  # it reads matrices, which most calls do not

        shown = select(outline.cells, cells)
    states = stage_status.stage_states(outline, store, artifacts=False)
    return MatrixStatus(title, run, outline, shown, states, store.artifacts_dir, left, goes_on, took)


def to_json(status: MatrixStatus) -> dict[str, Json]:
    """The status in JSON, see docs/reference/formats.md."""

    def stage(run_id: StageRunId) -> dict[str, Json]:
        state, run = status.states[run_id], status.outline.stage_runs[run_id]
        up_to_date = state.status is StageStatus.UP_TO_DATE
        log = status.artifacts_dir / run.stage / run.fingerprint / LOG if up_to_date else state.log
        return {
            "stage": run.stage,
            "id": run_id,
            "status": state.status.value,
            **{name: getattr(state, name) for name in ("failure", "message", "hint", "line", "setting")},
            "log": None if log is None else str(log),
            **{name: getattr(state, name) for name in ("started_s", "progress")},
        }

    return {
        "schema": 1,
        "run": status.run,
        "left_s": None if status.left is None else round(status.left[0], 3),
        "left_complete": None if status.left is None else status.left[1],
        "forecast": None if status.took is None else status.took.to_json(),
        "cells": [
            {
                "id": cell.id,
                "reason": cell.reason,
                "changes": [asdict(change) for change in cell.changes],
                "stages": [stage(run) for run in cell.stage_runs],
            }
            for cell in status.cells
        ],
    }


def to_text(status: MatrixStatus, *, height: int | None = None) -> str:
    """The grid of cells x stages, then running stages, failures and infeasible cells.

    `height` limits the number of lines. If not all cells fit, there is one line per stage, followed by running stages and
    failures.
    """
    states, runs = status.states, status.stage_runs
    feasible = [cell for cell in status.cells if cell.reason is None]
    parts = shared_parts([cell.id for cell in feasible])
    listed, rest = _listed(feasible, states)
    rows = [
        (without(cell.id, parts), {runs[run].stage: states[run].status for run in cell.stage_runs}) for cell in listed
    ]
    width = shutil.get_terminal_size((120, 0)).columns
    ascii_only = not (sys.stdout.encoding or "").lower().startswith("utf")
    shown: Iterable[StageStatus] = (status for _, of_cell in rows for status in of_cell.values())
    if height is None or len(feasible) + _BESIDE_CELLS <= height:
        stages = [stage for stage in status.outline.stages if any(stage in of_cell for _, of_cell in rows)]
        drawn = views.grid(rows, stages, width=width, ascii_only=ascii_only) if rows else []
    else:
        drawn = _counted(status, runs, feasible, parts, height, width=width, ascii_only=ascii_only)
        shown, rest = (states[run].status for run in runs), ""  # included in the lines of the stages
    drawn += views.legend(shown, width=width, ascii_only=ascii_only)
    titles = [status.title, *([f"all cells: {' '.join(parts)}"] if parts else ())]
    if len(together := ", ".join(titles)) <= width:
        titles = [together]
    below = [rest] if rest else []
    mentioned = [(run, states[run_id]) for run_id, run in runs.items() if states[run_id].status in _MENTIONED]
    if status.goes_on and not any(state.status is StageStatus.RUNNING for _, state in mentioned):
        below += [
            "the run is active, but no stage is running; if it waits for another process, its own terminal shows which one"
        ]
    below += [line for run, state in mentioned for line in _events(run, state)]
    for more in (views.retries(status.cells), views.infeasible(status.cells, set(), whole=True)):
        below += ["", *more] if more else []
    if height is None:
        below[:0] = (
            [views.time_left(*status.left)] if status.left else wrap(status.took.line() if status.took else "", width)
        )
    else:  # one line each, running stages first
        below = sorted((line for line in below if line[:1].strip()), key=lambda line: not line.startswith("running"))
        below = [shorten(line, width - 1) for line in below]
    lines = (*map(terminal.clean, titles), *views.styled(drawn, sys.stdout), *map(terminal.clean, below))
    return "".join(f"{line}\n" for line in lines[:height])


def _counted(
    status: MatrixStatus,
    runs: Mapping[StageRunId, OutlineRun],
    cells: Sequence[OutlineCell],
    shared: Sequence[str],
    height: int,
    *,
    width: int,
    ascii_only: bool,
) -> list[Text]:
    """One line per stage, then one per group of cells if groups fit."""
    states = status.states
    counts: dict[str, Counter[StageStatus]] = defaultdict(Counter)
    for run in runs.values():
        counts[run.stage][states[run.id].status] += 1
    stages = [stage for stage in status.outline.stages if stage in counts]
    name_width = max(map(len, stages), default=0)
    most = max((each.total() for each in counts.values()), default=0)
    drawn = [
        views.stage_line(stage, counts[stage], name_width=name_width, most=most, width=width, ascii_only=ascii_only)
        for stage in stages
    ]
    named = groups([without(cell.id, shared) for cell in cells], height - _BESIDE_CELLS - len(counts))
    if named:
        of_groups = {(group, run) for cell, group in zip(cells, named, strict=True) for run in cell.stage_runs}
        by_group = Counter((group, runs[run].stage, states[run].status) for group, run in of_groups)
        rows = [views.group_line(group, number, stages, by_group) for group, number in Counter(named).items()]
        drawn += views.grid(rows, stages, width=width, ascii_only=ascii_only, title=views.GROUPS)
    return drawn


def _listed(cells: Sequence[OutlineCell], states: Mapping[StageRunId, StageState]) -> tuple[Sequence[OutlineCell], str]:
    """The cells that the grid shows, and a summary of the others. Very large matrices show only unfinished cells."""
    if len(cells) <= _MAX_CELLS:
        return cells, ""
    done = {run for run, state in states.items() if state.status in DONE}
    left = [cell for cell in cells if not done.issuperset(cell.stage_runs)]
    listed = left[:_MAX_CELLS]
    lines = [f"{count(len(cells) - len(left), 'cell')} done"] if len(left) < len(cells) else []
    lines += [f"{count(len(left) - len(listed), 'cell')} more unfinished or failed"] if len(left) > len(listed) else []
    return listed, f"and {', '.join(lines)} (show them with --cells PATTERN or --format json)" if lines else ""


def _events(run: OutlineRun, state: StageState) -> list[str]:
    who = f"{run.stage}, {run.cells[0]}" + (f" (for {len(run.cells)} cells)" if len(run.cells) > 1 else "")
    if state.status is StageStatus.RUNNING:
        seconds = stage_status.running_s(state)
        details = filter(None, (None if seconds is None else duration(seconds), views.progress_text(state.progress)))
        return ["", ": ".join(filter(None, (f"running: {who}", ", ".join(details))))]
    lines = ["", f"failed{in_brackets(state.failure)}: {who}", f"  {state.message}"]
    return [*lines, *(f"  {line}" for line in state.details)]
