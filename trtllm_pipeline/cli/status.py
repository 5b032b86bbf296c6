"""`pipeline status` and `pipeline runs`: how far each cell is, and which runs there were."""

from __future__ import annotations

from trtllm_pipeline import flow
from trtllm_pipeline.cli import options
from trtllm_pipeline.cli.output import emit, emit_json, emit_rendered
from trtllm_pipeline.errors import UsageError


def status(
    cells: options.Cells = None,
    run: options.Run = None,
    matrix: options.MatrixOrLatest = None,
    sets: options.Sets = None,
    toolchain: options.Toolchain = None,
    workspace: options.Workspace = options.WORKSPACE,
    format: options.TextOrJson = "text",
) -> None:
    """Show the progress of each cell, what is running in any invocation, and why something failed.

    The cells are all of the latest run's matrix, including those that this run left out.

    examples:
      pipeline status
      pipeline status --cells 'qwen2*/fp8' --format json
      pipeline status --run latest~1
    """
    from trtllm_pipeline.planning.plan_file import outline
    from trtllm_pipeline.planning.runs import newest_cells
    from trtllm_pipeline.progress.status import status_of, to_json, to_text

    if run is not None and matrix is not None:
        raise UsageError("give --run or --matrix, not both")
    store = options.known_store(workspace)
    if matrix is None:
        newest = newest_cells(store, run)
        found = status_of(store, newest.outline, newest.title, newest.newest.name, cells or ())
    else:
        plan = flow.plan_of(options.request(matrix, cells, sets, None, toolchain, None), store)
        found = status_of(store, outline(plan), "as the matrix stands now")
    emit_json(to_json(found)) if format == "json" else emit_rendered(to_text(found))


def runs(workspace: options.Workspace = options.WORKSPACE, format: options.TextOrJson = "text") -> None:
    """List the runs of a workspace, the newest first.

    examples:
      pipeline runs
      pipeline runs --format json
    """
    from trtllm_pipeline.report.runs import to_json, to_text

    found = to_json(options.known_store(workspace))
    emit_json(found) if format == "json" else emit(to_text(found))
