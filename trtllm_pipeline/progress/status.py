"""How far each cell is, what runs right now, and what failed: `pipeline status`, as text and as JSON."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trtllm_pipeline.domain import Json, StageRunId, StageStatus
from trtllm_pipeline.errors import in_brackets
from trtllm_pipeline.planning.plan_file import Outline, OutlineCell
from trtllm_pipeline.planning.stage_status import StageState, stage_states
from trtllm_pipeline.store.store import Store
from trtllm_pipeline.terminal import clean


@dataclass(frozen=True, slots=True)
class MatrixStatus:
    """How far the cells of a matrix are."""

    title: str
    """What the cells are of, for people."""
    run: str | None
    """The newest run they are of; None where they are of a matrix as it stands."""
    outline: Outline
    cells: tuple[OutlineCell, ...]
    states: Mapping[StageRunId, StageState]


def status_of(
    store: Store, outline: Outline, title: str, run: str | None = None, cells: Sequence[str] = ()
) -> MatrixStatus:
    """How far the cells of `outline` are that fit the patterns `cells`. Raises UsageError where none does."""
    from trtllm_pipeline.config.expand import select

    shown = select(outline.cells, cells) if cells else outline.cells
    return MatrixStatus(title, run, outline, shown, stage_states(outline, store))


def to_json(status: MatrixStatus) -> dict[str, Json]:
    """The status as JSON values, see docs/formats.md."""

    def stage(run_id: StageRunId) -> dict[str, Json]:
        standing = status.states[run_id]
        return {
            "stage": status.outline.stage_runs[run_id].stage,
            "id": run_id,
            "status": standing.status.value,
            "failure": standing.failure,
            "message": standing.message,
            "hint": standing.hint,
            "log": None if standing.log is None else str(standing.log),
            "started_s": standing.started_s,
            "progress": None if standing.progress is None else dict(standing.progress),
        }

    return {
        "schema": 1,
        "run": status.run,
        "cells": [
            {"id": cell.id, "reason": cell.reason, "stages": [stage(run) for run in cell.stage_runs]}
            for cell in status.cells
        ],
    }


def to_text(status: MatrixStatus) -> str:
    """The picture of cells x stages, then what runs, what failed and what can never work."""
    from trtllm_pipeline.planning.names import count, duration, path_from_here, shared_parts, without
    from trtllm_pipeline.planning.stage_status import running_s
    from trtllm_pipeline.progress.grid import grid, legend, styled
    from trtllm_pipeline.progress.words import told

    outline, cells, seen = status.outline, status.cells, status.states
    runs = {run: outline.stage_runs[run] for cell in cells for run in cell.stage_runs}
    feasible = [cell for cell in cells if cell.reason is None]
    parts = shared_parts([cell.id for cell in feasible])
    names = [without(cell.id, parts) for cell in feasible]
    statuses = [{runs[run].stage: seen[run].status for run in cell.stage_runs} for cell in feasible]
    width = shutil.get_terminal_size((120, 0)).columns
    ascii_only = not (sys.stdout.encoding or "").lower().startswith("utf")
    stages = [stage for stage in outline.stages if any(stage in of_cell for of_cell in statuses)]
    drawn = grid(list(zip(names, statuses, strict=True)), stages, width=width, ascii_only=ascii_only)
    counts = Counter(seen[run].status for run in runs)
    drawn += legend((status for status in StageStatus if counts[status]), width=width, ascii_only=ascii_only)
    lines = [status.title]
    lines[0] += f", all cells: {' '.join(parts)}" if parts else ""
    above = [clean(lines.pop()), *styled(drawn, sys.stdout)]
    for run, planned in runs.items():
        standing = seen[run]
        who = f"{planned.stage}, {planned.cells[0]}" + (
            f" (for {len(planned.cells)} cells)" if len(planned.cells) > 1 else ""
        )
        if standing.status is StageStatus.RUNNING:
            seconds = running_s(standing)
            details = [duration(seconds)] if seconds is not None else []
            details += [text] if (text := told(standing.progress)) else []
            lines.append(f"\nrunning: {who}" + (f": {', '.join(details)}" if details else ""))
        elif standing.status is StageStatus.FAILED:
            lines.append(f"\nfailed{in_brackets(standing.failure)}: {who}\n  {standing.message}")
            lines += [f"  log: {path_from_here(standing.log)}"] if standing.log else []
            lines += [f"  try: {standing.hint}"] if standing.hint else []
    never = [cell for cell in cells if cell.reason is not None]
    if never:
        lines.append(f"\n{count(len(never), 'cell')} can never work:")
        lines += [f"  {cell.id}: {cell.reason}" for cell in never]
    return "".join(f"{line}\n" for line in (*above, clean("\n".join(lines))) if line)
