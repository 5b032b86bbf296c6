"""`pipeline status`: how far each cell is, what runs right now, and what failed."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence

from trtllm_pipeline.cli import options
from trtllm_pipeline.cli.output import emit_json, emit_rendered
from trtllm_pipeline.domain import Json, StageRunId, StageStatus
from trtllm_pipeline.errors import UsageError, in_brackets
from trtllm_pipeline.planning.plan_file import Outline, OutlineCell
from trtllm_pipeline.planning.stage_status import StageState, stage_states
from trtllm_pipeline.store.store import Store
from trtllm_pipeline.terminal import clean


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `status`."""
    parser.description = (
        "Show how far each cell is, of the latest run or of a matrix: a symbol for each stage, what runs right now in "
        "whichever invocation, and why something failed."
    )
    parser.epilog = "examples:\n  pipeline status\n  pipeline status --cells 'qwen2*/fp8' --format json"
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run's id or its beginning (default: the latest)")
    options.add_matrix(parser)
    options.add_workspace(parser)
    options.add_format(parser, "text", "json")


def run(args: argparse.Namespace) -> int:
    """Show the status."""
    store = options.existing_store(args)
    run_id, outline = _outline(args, store)
    cells = outline.cells
    if args.cells and args.matrix is None:
        from trtllm_pipeline.config.expand import select

        cells = select(cells, args.cells)
    seen = stage_states(outline, store)
    if args.format == "json":
        emit_json(to_json(run_id, outline, cells, seen))
    else:
        emit_rendered(to_text(run_id, outline, cells, seen))
    return 0


def _outline(args: argparse.Namespace, store: Store) -> tuple[str | None, Outline]:
    from trtllm_pipeline.planning.plan_file import outline
    from trtllm_pipeline.planning.runs import find_run, read_run

    if args.run is not None and args.matrix is not None:
        raise UsageError("give a RUN or a --matrix, not both")
    if args.matrix is None:
        folder = find_run(store, args.run)
        return folder.name, read_run(folder)
    from trtllm_pipeline import flow

    return None, outline(flow.plan_of(options.request_of(args), store))


def to_json(
    run_id: str | None, outline: Outline, cells: Sequence[OutlineCell], seen: Mapping[StageRunId, StageState]
) -> dict[str, Json]:
    """The status as JSON values, see docs/formats.md."""

    def stage(run_id: StageRunId) -> dict[str, Json]:
        standing = seen[run_id]
        return {
            "stage": outline.stage_runs[run_id].stage,
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
        "run": run_id,
        "cells": [
            {"id": cell.id, "reason": cell.reason, "stages": [stage(run) for run in cell.stage_runs]} for cell in cells
        ],
    }


def to_text(
    run_id: str | None, outline: Outline, cells: Sequence[OutlineCell], seen: Mapping[StageRunId, StageState]
) -> str:
    """The picture of cells x stages, then what runs, what failed and what can never work."""
    from trtllm_pipeline.planning.names import count, duration, path_from_here, shared_parts, without
    from trtllm_pipeline.planning.stage_status import running_s
    from trtllm_pipeline.progress.grid import grid, legend, styled
    from trtllm_pipeline.progress.words import told

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
    lines = [f"run {run_id}" if run_id else "as the matrix stands now"]
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
