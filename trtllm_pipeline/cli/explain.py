"""`pipeline explain`: why a cell's stages have to run, and what their fingerprints are made of."""

from __future__ import annotations

import argparse
import json
from typing import Final

from trtllm_pipeline.cli import options
from trtllm_pipeline.cli.output import emit, emit_json
from trtllm_pipeline.domain import Json
from trtllm_pipeline.errors import UsageError
from trtllm_pipeline.planning.names import count

_ACTIONS: Final = {"run": "run", "up_to_date": "up to date", "skip": "not needed"}
"""What becomes of a stage run, as in a plan's JSON, in words."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `explain`."""
    parser.description = "For each stage of a cell: its fingerprint, whether it has to run, and what changed since the cell's last result."
    parser.epilog = (
        "examples:\n  pipeline explain 'smollm2*/fp16/*' build\n"
        "  pipeline explain 'smollm2*/fp16/*' --set axes.max_batch_size=[16]"
    )
    parser.add_argument("cell", help="id of a cell, or a pattern that matches it")
    parser.add_argument("stage", nargs="?", help="only this stage, with everything its fingerprint is made of")
    options.add_matrix(parser, cells=False)
    options.add_workspace(parser)
    options.add_format(parser, "text", "json")


def run(args: argparse.Namespace) -> int:
    """Explain one cell or several; the matrix is the latest run's unless one is given."""
    from trtllm_pipeline import flow
    from trtllm_pipeline.execution.forecast import forecast

    args.cells = [args.cell]
    store = options.open_store(args)
    request = options.request_or_latest(args, store)
    plan = flow.plan_of(request, store)
    seen = forecast(plan, store)
    explained: list[Json] = []
    for cell in plan.cells:
        stages: list[Json] = []
        for run_id in plan.by_cell[cell.id]:
            found = plan.stage_runs[run_id]
            if args.stage not in {None, found.stage.name}:
                continue
            needed = run_id in seen.to_run
            stages.append(
                {
                    "stage": found.stage.name,
                    "id": run_id,
                    "fingerprint": found.fingerprint,
                    "action": "run" if needed else "up_to_date" if run_id in seen.present else "skip",
                    "reason": seen.reasons.get(run_id),
                    "shared_with": len(found.cells) - 1,
                    "key": json.loads(found.key),
                }
            )
        explained.append({"id": cell.id, "reason": cell.reason, "stages": stages})
    if args.stage is not None and not any(_stages(cell) for cell in explained):
        raise UsageError(
            f"there is no stage {args.stage!r} in this plan", hint="pipeline explain CELL shows all of them"
        )
    if args.format == "json":
        emit_json({"schema": 1, "cells": explained})
    else:
        for each in explained:
            emit("\n".join(_text(each, full=args.stage is not None)))
    return 0


def _stages(cell: Json) -> list[dict[str, Json]]:
    assert isinstance(cell, dict)
    stages = cell["stages"]
    assert isinstance(stages, list)
    return [stage for stage in stages if isinstance(stage, dict)]


def _text(cell: Json, *, full: bool) -> list[str]:
    assert isinstance(cell, dict)
    lines = [str(cell["id"])]
    if cell["reason"]:
        lines.append(f"  infeasible: {cell['reason']}")
    for stage in _stages(cell):
        others = stage["shared_with"]
        shared = f", shared with {count(others, 'other cell')}" if isinstance(others, int) and others else ""
        lines.append(f"  {stage['stage']:<11} {_ACTIONS[str(stage['action'])]:<11} {stage['fingerprint']}{shared}")
        if stage["reason"]:
            lines.append(f"{'':<14}{stage['reason']}")
        if full:
            key = json.dumps(stage["key"], indent=2, ensure_ascii=False)
            lines += ["", "  made of:", *(f"    {line}" for line in key.splitlines())]
    return lines
