"""`pipeline run` and `pipeline resume`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from trtllm_pipeline import flow, terminal
from trtllm_pipeline.cli import options
from trtllm_pipeline.cli.output import note
from trtllm_pipeline.cli.plan import show
from trtllm_pipeline.planning.request import Request
from trtllm_pipeline.progress import observer
from trtllm_pipeline.store.store import Store

DryRun = Annotated[
    bool, typer.Option("--dry-run/--no-dry-run", help="only show what would be done, as pipeline plan does")
]
FailFast = Annotated[bool, typer.Option("--fail-fast/--no-fail-fast", help="start nothing new after the first failure")]
RetryInfeasible = Annotated[
    bool, typer.Option("--retry-infeasible/--no-retry-infeasible", help="retry what was found never to work")
]
Refresh = Annotated[
    bool, typer.Option("--refresh/--no-refresh", help="ask the hubs again which revision a branch is at")
]
Mode = Literal["auto", "live", "plain", "json", "quiet"]
Progress = Annotated[
    Mode,
    typer.Option(
        "--progress",
        envvar="PIPELINE_PROGRESS",
        help="on stderr: a live picture, plain lines, JSON lines, or failures only; auto is live on a terminal",
    ),
]


def run(
    matrix: options.Matrix,
    cells: options.Cells = None,
    sets: options.Sets = None,
    until: options.Until = None,
    toolchain: options.Toolchain = None,
    workspace: options.Workspace = options.WORKSPACE,
    assume: options.Assume = None,
    dry_run: DryRun = False,
    fail_fast: FailFast = False,
    retry_infeasible: RetryInfeasible = False,
    refresh: Refresh = False,
    progress: Progress = "auto",
    form: options.TableFormat = "table",
    verbose: options.Verbose = False,
) -> int:
    """Run everything in a matrix that is not done yet, and show the results.

    You can interrupt it at any time: what is finished stays finished.

    examples:
      pipeline run --matrix matrices/quickstart.yaml
      pipeline run -m my.yaml --cells 'qwen*/int8_wo/*' --until build
      pipeline run -m my.yaml --set settings.perf.concurrency=[1,8]
    """
    request = options.request(matrix, cells, sets, until, toolchain, assume)
    # Looking at a workspace never makes one: that is left to a request that can be understood.
    found = options.store_at(workspace)
    if dry_run:
        return show(request, found, as_json=form == "json", verbose=verbose)
    store = found or Store(Path(workspace))
    _forget(store, infeasible=retry_infeasible, pins=refresh)
    return _run(request, store, workspace, progress, form, verbose=verbose, keep_going=not fail_fast)


def resume(
    ctx: typer.Context,
    matrix: options.MatrixOrLatest = None,
    cells: options.Cells = None,
    sets: options.Sets = None,
    until: options.Until = None,
    toolchain: options.Toolchain = None,
    workspace: options.Workspace = options.WORKSPACE,
    assume: options.Assume = None,
    dry_run: DryRun = False,
    fail_fast: FailFast = False,
    retry_infeasible: RetryInfeasible = False,
    refresh: Refresh = False,
    progress: Progress = "auto",
    form: options.TableFormat = "table",
    verbose: options.Verbose = False,
) -> int:
    """Continue what the latest run of this workspace was asked for.

    examples:
      pipeline resume
      pipeline resume --retry-infeasible --workspace /data/results
    """
    store = options.known_store(workspace)
    request = options.request_or_latest(ctx, store, matrix, cells, sets, until, toolchain, assume)
    if dry_run:
        return show(request, store, as_json=form == "json", verbose=verbose)
    _forget(store, infeasible=retry_infeasible, pins=refresh)
    return _run(request, store, workspace, progress, form, verbose=verbose, keep_going=not fail_fast)


def _forget(store: Store, *, infeasible: bool, pins: bool) -> None:
    if infeasible:
        store.index.forget_infeasible()
    if pins:
        store.index.forget_pins()


def _run(
    request: Request, store: Store, workspace: str, progress: Mode, form: str, *, verbose: bool, keep_going: bool
) -> int:
    from trtllm_pipeline.report.writers import print_report

    seen = observer(sys.stderr, mode=progress)
    result = flow.run(request, store, seen, command=tuple(sys.argv), keep_going=keep_going)
    print_report(
        result.rows,
        form,
        run_id=result.run_id,
        matrix=str(request.matrix),
        workspace=store.workspace,
        told=seen.told if terminal.same_place(sys.stdout, sys.stderr) else (),
        verbose=verbose,
    )
    if result.outcome.interrupted:
        note(f"interrupted; to continue: {_resume(workspace)}")
    elif result.outcome.exit_code:
        note(f"some cells failed; fix the cause, then: {_resume(workspace)}")
    return result.outcome.exit_code


def _resume(workspace: str) -> str:
    return "pipeline resume" if workspace == options.WORKSPACE else f"pipeline resume -w {shlex.quote(workspace)}"
