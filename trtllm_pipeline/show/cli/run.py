"""`pipeline run`, `pipeline resume` and `pipeline plan`: execute or preview a matrix."""

from __future__ import annotations

import inspect
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from trtllm_pipeline.base import UsageError, count, terminal
from trtllm_pipeline.orchestrate import Request, Store, check_feasible, flow, load
from trtllm_pipeline.show.cli import options
from trtllm_pipeline.show.cli.output import emit, emit_blocks, note, terminal_width
from trtllm_pipeline.show.phrases import wrapped


@options.grouped
def run(
    ctx: typer.Context,
    matrix: options.OptionalMatrix = None,
    cells: options.Cells = None,
    sets: options.Sets = None,
    until: options.Until = None,
    toolchain: options.Toolchain = None,
    workspace: options.Workspace = options.WORKSPACE,
    assume: options.Assume = None,
    executor: options.Executor = None,
    ray_address: options.RayAddress = None,
    resume: Annotated[bool, options.switch("--resume", "Continue the latest run of this workspace.")] = False,
    dry_run: Annotated[bool, options.switch("--dry-run", "Only show the plan, like pipeline plan.")] = False,
    fail_fast: Annotated[
        bool, options.switch("--fail-fast", "Start no further stages after the first failure.")
    ] = False,
    retry_infeasible: Annotated[bool, options.switch("--retry-infeasible", "Retry infeasible cells.")] = False,
    rerun: Annotated[
        str | None,
        options.option(
            "--rerun", "STAGE,...", "Measure again although results are up to date: perf, accuracy, tasks, smoke."
        ),
    ] = None,
    refresh: Annotated[bool, options.switch("--refresh", "Resolve branches to revisions again.")] = False,
    name: Annotated[
        str | None, options.option("--name", "NAME", "Name of the run for later commands, e.g. nightly-1234.")
    ] = None,
    progress: options.Progress = "auto",
    format: options.RunFormat = "table",
    *,
    pulling: options.Pulling,
    verbose: options.Verbose = False,
) -> int:
    """Run every cell of a matrix that is not done yet, and show the results.

    You can interrupt it at any time. Completed stages stay. pipeline resume is short for pipeline run --resume.

    examples:
      pipeline run matrices/quickstart.yaml
      pipeline run --resume
      pipeline run my.yaml --cells 'qwen*/int8_wo/*' --until build
      pipeline run my.yaml --set settings.perf.concurrency=[1,8]
      pipeline run my.yaml --rerun perf,accuracy
    """
    from trtllm_pipeline.orchestrate import runs
    from trtllm_pipeline.show.progress import observer
    from trtllm_pipeline.show.report.report_formats import Report, write

    if resume:
        options.known_store(workspace)
    elif matrix is None:
        raise UsageError(
            "pipeline run: no matrix given",
            hint="pipeline run FILE, or pipeline run --resume; create a matrix with pipeline matrix init",
        )
    # Only a valid request creates a workspace.
    called = None if name is None else runs.check_name(name)
    workspace_store = options.store_at(workspace)
    request = pulling.of(options.request_or_latest(ctx, workspace_store, matrix, cells, sets, until, toolchain, assume))
    again = tuple(filter(None, map(str.strip, (rerun or "").split(","))))
    request = request.changed(Request(Path(), executor=executor, ray_address=ray_address, rerun=again))
    if dry_run:
        return _show_plan(request, workspace_store, Path(workspace), format, verbose=verbose)
    if workspace_store is None:
        load(request)
    store = workspace_store or Store(Path(workspace))
    if retry_infeasible:
        store.index.forget_infeasible()
    if refresh:
        store.index.forget_pins()
    progress_observer = observer(sys.stderr, mode=progress)
    result = flow.run(request, store, progress_observer, command=tuple(sys.argv), keep_going=not fail_fast, name=called)
    report = Report(
        rows=result.rows,
        run_id=result.run_id,
        matrix=str(request.matrix),
        workspace=store.workspace,
        reported=progress_observer.reported if terminal.same_place(sys.stdout, sys.stderr) else (),
        verbose=verbose,
        forecast=result.forecast,
    )
    write(report, format)
    if result.untried:
        note(f"--fail-fast: {count(result.untried, 'cell')} not retried despite settings.retry")
    continued = f"pipeline resume{options.typed_again(workspace)}" + (f" --rerun {','.join(again)}" if again else "")
    if result.outcome.interrupted:
        note(f"interrupted; to continue: {continued}")
    elif result.outcome.exit_code:
        settings = {row.setting for row in result.rows if row.failed_stage is not None}
        change = settings.pop() if len(settings) == 1 else None
        words = f"{continued} --set {shlex.quote(change)}" if change else continued
        note(f"some cells failed; fix the cause, then: {words}")
    return result.outcome.exit_code


def resume(**values: Any) -> int:
    """Continue the latest run of this workspace.

    examples:
      pipeline resume
      pipeline resume --retry-infeasible --workspace /data/results
    """
    code: int = run(**values, resume=True)
    return code


_signature = inspect.signature(run)
vars(resume)["__signature__"] = _signature.replace(
    parameters=[each for name, each in _signature.parameters.items() if name != "resume"]
)


@options.grouped
def plan(
    ctx: typer.Context,
    matrix: options.MatrixOrLatest = None,
    cells: options.Cells = None,
    sets: options.Sets = None,
    until: options.Until = None,
    toolchain: options.Toolchain = None,
    workspace: options.Workspace = options.WORKSPACE,
    assume: options.Assume = None,
    compare: Annotated[
        str | None,
        options.option(
            "--compare", "MACHINE", "Only show differences from the plan for MACHINE (same syntax as --assume)."
        ),
    ] = None,
    fit: Annotated[
        bool,
        options.switch("--fit", "Only propose the smallest change that fits, for cells that need too much memory."),
    ] = False,
    *,
    pulling: options.Pulling,
    verbose: options.Verbose = False,
    format: Annotated[Literal["text", "json", "markdown"], options.option("--format", None, "Output format.")] = "text",
) -> int:
    """Show what run would do: shared stages, stages to run and why, expected times, and resources.

    Without a matrix, options change the workspace's latest run. With --compare, shows what changes on another machine or
    release: cells, stages, command lines.

    examples:
      pipeline plan matrices/quickstart.yaml
      pipeline plan my.yaml --cells 'qwen*/fp8/*' --format json | jq '.stage_runs[].argv'
      pipeline plan matrices/qwen2.yaml --assume 8xH100,tensorrt_llm==1.0
      pipeline plan my.yaml --assume here,tensorrt_llm==1.3.0 --compare here
      pipeline plan matrices/llama2.yaml --assume tensorrt_llm==1.0.0,sm=89,gpus=2,gpu_memory_gib=12 --fit
    """
    store = options.store_at(workspace)
    request = pulling.of(options.request_or_latest(ctx, store, matrix, cells, sets, until, toolchain, assume))
    if fit:
        if compare is not None:
            raise UsageError("--fit and --compare cannot be combined", hint="run two commands")
        return _show_fit(request, store, format)
    if compare is None:
        return _show_plan(request, store, Path(workspace), format, verbose=verbose)
    from trtllm_pipeline.orchestrate import plan_difference

    outcome = plan_difference.compare_plans(request, compare, store)
    emit_blocks(format, outcome)
    return 0 if outcome.feasible[0] else 3


def _show_fit(request: Request, store: Store | None, format: str) -> int:
    """Print changes that make cells fit. The exit code is 3 if some cells fit with no change."""
    from trtllm_pipeline.orchestrate import fits_of

    outcome = fits_of(request, store)
    emit_blocks(format, outcome)
    return 3 if not outcome.cells or any(each.proposal is None and not each.works for each in outcome.fits) else 0


def _show_plan(request: Request, store: Store | None, workspace: Path, format: str, *, verbose: bool) -> int:
    """Print the plan of a request. Then raises PlanError if no cell is feasible."""
    from trtllm_pipeline.orchestrate import forecast
    from trtllm_pipeline.show.report.plan_text import plan_markdown, plan_text

    fits, outlook = flow.outlook(request, store, workspace)
    if format == "json":
        for line in forecast.plan_json(fits, store, outlook):
            emit(line)
    elif format == "markdown":
        emit(plan_markdown(fits, outlook, f"Plan of {request.matrix.name}"))
    else:
        emit(wrapped(plan_text(fits, outlook, verbose=verbose), terminal_width()))
    check_feasible(fits, store)
    return 0
