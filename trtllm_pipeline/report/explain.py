"""Why a cell's stages have to run, and what their fingerprints are made of: `pipeline explain`, as JSON and as text."""

from __future__ import annotations

import json
from typing import Any, Final

from trtllm_pipeline.domain import Json, StageRunId
from trtllm_pipeline.errors import UsageError
from trtllm_pipeline.execution.forecast import Forecast
from trtllm_pipeline.planning.names import count
from trtllm_pipeline.planning.plan import Plan

_ACTIONS: Final = {"run": "run", "up_to_date": "up to date", "skip": "not needed"}
"""What becomes of a stage run, as in a plan's JSON, in words."""


def to_json(plan: Plan, seen: Forecast, stage: str | None) -> dict[str, Any]:
    """The stages of each cell, or only `stage`. Raises UsageError for a stage that no cell has."""

    def explained(run_id: StageRunId) -> dict[str, Json]:
        run = plan.stage_runs[run_id]
        return {
            "stage": run.stage.name,
            "id": run_id,
            "fingerprint": run.fingerprint,
            "action": "run" if run_id in seen.to_run else "up_to_date" if run_id in seen.present else "skip",
            "reason": seen.reasons.get(run_id),
            "shared_with": len(run.cells) - 1,
            "key": json.loads(run.key),
        }

    cells = []
    for cell in plan.cells:
        runs = [run for run in plan.by_cell[cell.id] if stage in {None, plan.stage_runs[run].stage.name}]
        cells.append({"id": cell.id, "reason": cell.reason, "stages": [explained(run) for run in runs]})
    if stage is not None and not any(cell["stages"] for cell in cells):
        raise UsageError(f"there is no stage {stage!r} in this plan", hint="pipeline explain CELL shows all of them")
    return {"schema": 1, "cells": cells}


def to_text(explained: dict[str, Any], *, full: bool) -> str:
    """The same for people; `full` adds everything that a fingerprint is made of."""
    return "\n".join(line for cell in explained["cells"] for line in _lines(cell, full=full))


def _lines(cell: dict[str, Any], *, full: bool) -> list[str]:
    lines = [cell["id"]]
    if cell["reason"]:
        lines.append(f"  infeasible: {cell['reason']}")
    for stage in cell["stages"]:
        others = stage["shared_with"]
        shared = f", shared with {count(others, 'other cell')}" if others else ""
        lines.append(f"  {stage['stage']:<11} {_ACTIONS[stage['action']]:<11} {stage['fingerprint']}{shared}")
        if stage["reason"]:
            lines.append(f"{'':<14}{stage['reason']}")
        if full:
            key = json.dumps(stage["key"], indent=2, ensure_ascii=False)
            lines += ["", "  made of:", *(f"    {line}" for line in key.splitlines())]
    return lines
