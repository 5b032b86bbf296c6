"""`pipeline run` and `pipeline resume`."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from trtllm_pipeline import terminal
from trtllm_pipeline.cli import options
from trtllm_pipeline.cli.output import note
from trtllm_pipeline.flow import Request
from trtllm_pipeline.store.store import Store


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `run` and `resume`."""
    resume = parser.get_default("command") == "resume"
    parser.description = (
        "Go on with what the latest run of this workspace was asked for."
        if resume
        else "Do everything a matrix asks for that is not done yet, and show what came out. Interrupt it whenever you "
        "like: what is finished stays finished."
    )
    parser.epilog = (
        "example:\n  pipeline resume"
        if resume
        else "examples:\n  pipeline run --matrix matrices/quickstart.yaml\n"
        "  pipeline run -m my.yaml --cells 'qwen*/int8_wo/*' --until build --set settings.perf.concurrency=[1,8]"
    )
    options.add_matrix(parser)
    options.add_workspace(parser)
    options.add_assume(parser)
    parser.add_argument("--until", metavar="STAGE", help="stop after this stage, e.g. build")
    parser.add_argument("--dry-run", action="store_true", help="only show what would be done, as `pipeline plan` does")
    parser.add_argument("--fail-fast", action="store_true", help="start nothing new after the first failure")
    parser.add_argument("--retry-infeasible", action="store_true", help="try again what was found never to work")
    parser.add_argument("--refresh", action="store_true", help="ask the hubs again which revision a branch is at")
    parser.add_argument(
        "--progress",
        choices=("auto", "live", "plain", "json", "quiet"),
        default="auto",
        help="on stderr: a live picture, plain lines, JSON lines, or failures only (default auto: live in a terminal, "
        "else plain)",
    )
    options.add_format(parser, "table", "json", "csv", "markdown")


def run(args: argparse.Namespace) -> int:
    """Run, then print the report."""
    from trtllm_pipeline import flow
    from trtllm_pipeline.progress import observer
    from trtllm_pipeline.report.writers import print_report

    # Looking at a workspace never makes one: that is left to a request that can be understood.
    found = options.existing_store(args) if args.command == "resume" else options.open_store(args)
    request = _request(args, found)
    if args.dry_run:
        from trtllm_pipeline.cli.plan import show

        return show(request, found, as_json=args.format == "json", verbose=False)
    store = found or Store(Path(args.workspace))
    if args.retry_infeasible:
        store.index.forget_infeasible()
    if args.refresh:
        store.index.forget_pins()
    seen = observer(sys.stderr, mode=args.progress)
    result = flow.run(
        request,
        store,
        seen,
        command=tuple(sys.argv),
        keep_going=not args.fail_fast,
    )
    print_report(
        result.rows,
        args.format,
        run_id=result.run_id,
        matrix=str(request.matrix),
        workspace=store.workspace,
        told=seen.told if terminal.same_place(sys.stdout, sys.stderr) else (),
    )
    if result.outcome.interrupted:
        note("interrupted; go on with: pipeline resume" + _workspace(args))
    elif result.outcome.exit_code:
        note("some cells failed; after mending the cause: pipeline resume" + _workspace(args))
    return result.outcome.exit_code


def _request(args: argparse.Namespace, store: Store | None) -> Request:
    if args.command == "resume":
        return options.request_or_latest(args, store)
    return options.request_of(args, until=args.until)


def _workspace(args: argparse.Namespace) -> str:
    return "" if args.workspace == options.WORKSPACE else f" --workspace {shlex.quote(args.workspace)}"
