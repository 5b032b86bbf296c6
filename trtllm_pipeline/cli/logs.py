"""`pipeline logs`: what a stage of a cell printed, of its latest attempt."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Final

from trtllm_pipeline.cli import options
from trtllm_pipeline.cli.output import emit, emit_json, note
from trtllm_pipeline.domain import Json, Scope, StageRunId, StageStatus
from trtllm_pipeline.errors import UsageError
from trtllm_pipeline.planning.plan_file import Outline, OutlineCell, OutlineRun
from trtllm_pipeline.store.store import LOG, Store
from trtllm_pipeline.terminal import clean

SERVER_LOG: Final = "server.log"
_POLL_S: Final = 0.2


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `logs`."""
    parser.description = (
        "Print the log of a cell's stage: of the attempt that runs now, or else of the latest. Without a stage, of the "
        "one that failed or runs; where there is none, list the logs there are."
    )
    parser.epilog = (
        "examples:\n  pipeline logs 'qwen2*/fp8/*' build\n  pipeline logs int4_wo launch --server --lines 50\n"
        "  pipeline logs build-1a2b3c4d5e6f --follow"
    )
    parser.add_argument("cell", metavar="CELL", help="a cell's id, a pattern or part of it; or the id of a stage run")
    parser.add_argument("stage", nargs="?", metavar="STAGE", help="download, build, launch, ...")
    parser.add_argument("--run", metavar="RUN", help="a run's id or its beginning (default: the latest)")
    options.add_workspace(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on printing until the attempt ends")
    parser.add_argument("-n", "--lines", metavar="N", type=int, help="only the last N lines")
    parser.add_argument("--server", action="store_true", help="the log of the server that the launch stage started")
    options.add_format(parser, "text", "json")


def run(args: argparse.Namespace) -> int:
    """Print a log."""
    from trtllm_pipeline.planning.runs import find_run, read_run

    if args.lines is not None and args.lines < 1:
        raise UsageError(f"--lines {args.lines}: must be 1 or more")
    store = options.existing_store(args)
    outline = read_run(find_run(store, args.run))
    if args.follow and args.format == "json":
        raise UsageError("--follow prints text as it comes", hint="leave out --format json")
    planned = _stage_run(outline, store, args)
    if planned is None:
        return 0
    log = _log(store, planned, SERVER_LOG if args.server else LOG)
    if args.format == "json":
        text = log.read_text(encoding="utf-8", errors="replace").splitlines()
        lines: list[Json] = list(text if args.lines is None else text[-args.lines :])
        emit_json({"schema": 1, "id": planned.id, "stage": planned.stage, "path": str(log), "lines": lines})
        return 0
    _print(log, args.lines, follow=args.follow, store=store, planned=planned)
    return 0


def _stage_run(outline: Outline, store: Store, args: argparse.Namespace) -> OutlineRun | None:
    """The stage run whose log is wanted, or None after the logs there are have been listed."""
    from trtllm_pipeline.planning.runs import find_cell, find_stage

    by_id = outline.stage_runs.get(StageRunId(args.cell))
    if by_id is not None and args.stage is None:
        return by_id
    cell = find_cell(outline, args.cell)
    if args.stage is not None:
        return find_stage(outline, cell, args.stage)
    if args.server:
        service = next((run for run in _runs(outline, cell) if run.scope is Scope.SERVICE), None)
        if service is None:
            raise UsageError(f"{cell.id} has no server in this plan")
        return service
    return _telling(outline, store, cell, as_json=args.format == "json")


def _telling(outline: Outline, store: Store, cell: OutlineCell, *, as_json: bool) -> OutlineRun | None:
    """The stage of a cell that runs or failed, or None after the cell's logs have been listed."""
    from trtllm_pipeline.planning.stage_status import stage_states

    if cell.reason is not None:
        raise UsageError(f"{cell.id} has no logs, it can never work: {cell.reason}")
    seen = stage_states(outline, store)
    runs = _runs(outline, cell)
    for status in (StageStatus.FAILED, StageStatus.RUNNING):
        # Of a server and what runs inside it, the latter says more.
        found = [run for run in runs if seen[run.id].status is status]
        if found:
            chosen = found[0] if status is StageStatus.FAILED else found[-1]
            note(f"{chosen.stage} {'failed' if status is StageStatus.FAILED else 'runs now'}: {chosen.id}")
            return chosen
    there = [(run.stage, path) for run in runs if (path := _find(store, run, LOG)) is not None]
    if not there:
        raise UsageError(f"{cell.id} has no logs yet", hint="pipeline status shows how far it is")
    width = max(len(stage) for stage, _ in there)
    if as_json:
        logs: dict[str, Json] = {stage: str(path) for stage, path in there}
        emit_json({"schema": 1, "cell": cell.id, "logs": logs})
        return None
    for stage, path in there:
        emit(f"{stage:<{width}}  {path}")
    note(f"one of them: pipeline logs {cell.id} STAGE")
    return None


def _runs(outline: Outline, cell: OutlineCell) -> list[OutlineRun]:
    return [outline.stage_runs[run] for run in cell.stage_runs]


def _log(store: Store, planned: OutlineRun, name: str) -> Path:
    found = _find(store, planned, name)
    if found is not None:
        return found
    if name == SERVER_LOG and planned.scope is not Scope.SERVICE:
        raise UsageError(f"{planned.stage} starts no server", hint="--server is for the stage launch")
    raise UsageError(f"{planned.id} has no {name} here", hint="it has not run in this workspace; see pipeline status")


def _find(store: Store, planned: OutlineRun, name: str) -> Path | None:
    """The file of the newest attempt that still has it, or of the artifact."""
    folders = []
    attempt = store.index.attempts([planned.fingerprint]).get(planned.fingerprint)
    if attempt is not None:
        folders.append(attempt.folder)
    # What the index does not know, because it was lost or the pipeline was killed between rename and row.
    numbered = [path for path in store.work_dir.glob(f"{planned.fingerprint}.*") if path.suffix[1:].isdigit()]
    folders += sorted(numbered, key=lambda path: int(path.suffix[1:]), reverse=True)
    folders.append(store.folder(planned.stage, planned.fingerprint))
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _print(log: Path, lines: int | None, *, follow: bool, store: Store, planned: OutlineRun) -> None:
    """Copy the log to stdout; when following, until nobody works on the stage run any more."""
    out = sys.stdout
    with log.open(encoding="utf-8", errors="replace", newline="") as file:
        text = clean(file.read())
        if lines is not None:
            text = "".join(text.splitlines(keepends=True)[-lines:])
        out.write(text)
        while follow:
            # Looked at before reading: what was written before the end is still read after it.
            goes_on = store.is_claimed(planned.fingerprint)
            more = clean(file.read())
            text = more or text
            out.write(more)
            out.flush()
            if not goes_on:
                break
            time.sleep(_POLL_S)
    if text and not text.endswith("\n"):
        out.write("\n")
