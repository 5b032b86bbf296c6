"""JSON lines about a run, shared by `pipeline run --progress json` and `pipeline status --watch --format json`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Final

from trtllm_pipeline.base import CellId, Json, StageRunId

SCHEMA: Final = 2
"""In version 1, each line about a stage run listed all its cells: ten thousand ids per second for a shared download."""


def event(name: str, **fields: Json) -> str:
    return json.dumps({"event": name, "time_s": round(time.time(), 3), **fields}, ensure_ascii=False)


class StageRuns:
    """Names stage runs, the first time with their cells."""

    def __init__(self) -> None:
        self._named: set[StageRunId] = set()

    def named(self, run: StageRunId, stage: str, cells: Sequence[CellId]) -> dict[str, Json]:
        first = run not in self._named
        self._named.add(run)
        return {"stage_run": run, "stage": stage, **({"cells": list(cells)} if first else {})}


def left(seconds: float, complete: bool) -> dict[str, Json]:
    return {"seconds": round(seconds), "complete": complete}
