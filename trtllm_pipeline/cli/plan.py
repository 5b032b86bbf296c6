"""`pipeline plan`: what would run, what is shared, why, and how long it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtllm_pipeline import flow
from trtllm_pipeline.cli import options
from trtllm_pipeline.cli.output import emit

if TYPE_CHECKING:
    from trtllm_pipeline.planning.request import Request
    from trtllm_pipeline.store.store import Store


def plan(
    matrix: options.Matrix,
    cells: options.Cells = None,
    sets: options.Sets = None,
    until: options.Until = None,
    toolchain: options.Toolchain = None,
    workspace: options.Workspace = options.WORKSPACE,
    assume: options.Assume = None,
    verbose: options.Verbose = False,
    form: options.TextOrJson = "text",
) -> int:
    """Show what run would do: what is shared between cells, what has to run and why, how long it takes.

    examples:
      pipeline plan --matrix matrices/quickstart.yaml
      pipeline plan -m my.yaml --cells 'qwen*/fp8/*' --format json | jq '.stage_runs[].argv'
      pipeline plan -m matrices/qwen2.yaml --assume tensorrt_llm==1.0.0,sm=90,gpus=8,gpu_memory_gib=80
    """
    request = options.request(matrix, cells, sets, until, toolchain, assume)
    return show(request, options.store_at(workspace), as_json=form == "json", verbose=verbose)


def show(request: Request, store: Store | None, *, as_json: bool, verbose: bool) -> int:
    """Print the plan for a request. Raises PlanError, after it is printed, when no cell can work."""
    from trtllm_pipeline.execution.forecast import forecast
    from trtllm_pipeline.report.plan_text import plan_text

    found = flow.plan_of(request, store, guess=True)
    seen = forecast(found, store)
    if as_json:
        for line in flow.plan_json(found, store, seen):
            emit(line)
    else:
        emit(plan_text(found, seen, verbose=verbose))
    flow.check_feasible(found)
    return 0
