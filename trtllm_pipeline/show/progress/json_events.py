"""Lines of JSON about a run: what `pipeline run --progress json` and `pipeline status --watch --format json` have in common."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Final

from trtllm_pipeline.base import CellId, Json, StageRunId

SCHEMA: Final = 2
"""In 1 each line about a stage run had all its cells: ten thousand ids a second, of a download that as many share."""


def event(name: str, **fields: Json) -> str:
    """One line."""
    return json.dumps({"event": name, "time_s": round(time.time(), 3), **fields}, ensure_ascii=False)


class StageRuns:
    """How stage runs are named: the first time with their cells."""

    def __init__(self) -> None:
        self._told: set[StageRunId] = set()

    def named(self, run: StageRunId, stage: str, cells: Sequence[CellId]) -> dict[str, Json]:
        """The fields of one."""
        first = run not in self._told
        self._told.add(run)
        return {"stage_run": run, "stage": stage, **({"cells": list(cells)} if first else {})}


def left(seconds: float, complete: bool) -> dict[str, Json]:
    """The fields of the time left."""
    return {"seconds": round(seconds), "complete": complete}
