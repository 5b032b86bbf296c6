"""`pipeline status`: the progress of each cell, and the list of runs."""

from __future__ import annotations

import sys
from typing import Annotated

from trtllm_pipeline.base import UsageError, terminal
from trtllm_pipeline.show.cli import options
from trtllm_pipeline.show.cli.output import emit, emit_json, emit_rendered


def status(
    cells: options.Cells = None,
    run: options.Run = None,
    matrix: options.MatrixOrLatest = None,
    sets: options.Sets = None,
    toolchain: options.Toolchain = None,
    watch: Annotated[bool, options.switch("--watch", "Refresh until all stages have ended or Ctrl-C.")] = False,
    runs: Annotated[
        bool, options.switch("--runs", "List runs instead, newest first: start, matrix, cells done and failed.")
    ] = False,
    workspace: options.Workspace = options.WORKSPACE,
    format: options.TextOrJson = "text",
) -> None:
    """Show the progress of each cell, running stages of all invocations, the time left, and causes of failures.

    Shows all cells of the latest run's matrix, including cells that the run left out.

    With --watch, a terminal shows a live display. A pipe gets a line (or with --format json an object) for each stage run
    whose status changes.

    examples:
      pipeline status
      pipeline status --watch
      pipeline status --cells 'qwen2*/fp8' --format json
      pipeline status --run latest~1
      pipeline status --runs
    """
    from trtllm_pipeline.orchestrate import forecast, plan_file, plan_of, report_file
    from trtllm_pipeline.orchestrate import runs as run_folders
    from trtllm_pipeline.show.progress.cell_status import MatrixStatus, status_of, to_json, to_text
    from trtllm_pipeline.show.progress.left import goes_on, read
    from trtllm_pipeline.show.progress.watching import watch as keep_showing
    from trtllm_pipeline.show.report import run_list

    if runs:
        given = {"--run": run, "MATRIX": matrix, "--cells": cells, "--set": sets, "--watch": watch or None}
        if only := next((flag for flag, value in given.items() if value is not None), None):
            raise UsageError(
                f"--runs lists all runs of the workspace and cannot be combined with {only}",
                hint="pipeline status --runs",
            )
        listed = run_list.runs_json(options.known_store(workspace))
        return emit_json(listed) if format == "json" else emit(run_list.to_text(listed))
    if run is not None and matrix is not None:
        raise UsageError("give --run or --matrix, not both")
    store = options.known_store(workspace)
    plan = None if matrix is None else plan_of(options.request(matrix, cells, sets, toolchain=toolchain), store)

    def look() -> MatrixStatus:
        if plan is not None:
            return status_of(store, plan_file.outline(plan), "the current matrix")
        newest = run_folders.newest_cells(store, run)
        left = max(filter(None, map(read, newest.folders)), default=None)
        going = any(map(goes_on, newest.folders))
        took = None if going else forecast.of_report(newest.newest / report_file.NAME)
        name = newest.newest.name
        return status_of(store, newest.outline, newest.title, name, cells or (), left=left, goes_on=going, took=took)

    if watch:
        return keep_showing(look, terminal.raw(sys.stdout), as_json=format == "json")
    state = look()
    return emit_json(to_json(state)) if format == "json" else emit_rendered(to_text(state))
