"""The runs of a workspace: `pipeline runs`, as JSON and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from trtllm_pipeline.domain import Json
from trtllm_pipeline.errors import PipelineError
from trtllm_pipeline.planning.names import duration
from trtllm_pipeline.planning.runs import read_run
from trtllm_pipeline.report.rows import CellStatus, rows_of
from trtllm_pipeline.report.tables import plain_table
from trtllm_pipeline.report.writers import NAME, read_report
from trtllm_pipeline.store.index import RunRow
from trtllm_pipeline.store.store import Store


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run. `counts` has its cells by their status; it is empty where nothing of them is left."""

    row: RunRow
    counts: dict[str, int]

    @property
    def cells(self) -> int:
        """All cells it was for."""
        return sum(self.counts.values())

    @property
    def done(self) -> int:
        """Cells with all results."""
        return self.counts.get(CellStatus.DONE.value, 0) + self.counts.get(CellStatus.UP_TO_DATE.value, 0)

    @property
    def seconds(self) -> float | None:
        """How long it took; None of one that goes on or was killed, and where the clock was set back meanwhile."""
        if self.row.ended_s is None or self.row.ended_s < self.row.started_s:
            return None
        return self.row.ended_s - self.row.started_s


def summaries(store: Store) -> tuple[RunSummary, ...]:
    """All runs, the last that began first."""
    return tuple(RunSummary(row, _counts(store, store.runs_dir / row.id)) for row in store.index.runs())


def _counts(store: Store, folder: Path) -> dict[str, int]:
    try:
        if (folder / NAME).is_file():
            return {name: int(number) for name, number in read_report(folder / NAME)[1]["counts"].items()}
        return dict(Counter(row.status.value for row in rows_of(read_run(folder), store)))
    except PipelineError:
        return {}


def to_json(runs: Sequence[RunSummary]) -> dict[str, Json]:
    """The runs as JSON values, see docs/formats.md."""
    return {
        "schema": 1,
        "runs": [
            {
                "id": run.row.id,
                "matrix": run.row.matrix,
                "command": list(run.row.command),
                "started_s": run.row.started_s,
                "duration_s": run.seconds,
                "exit_code": run.row.exit_code,
                "cells": run.cells,
                "counts": dict(sorted(run.counts.items())),
            }
            for run in runs
        ],
    }


def to_text(runs: Sequence[RunSummary]) -> str:
    """The same for people: one line each."""
    return plain_table(
        [
            {
                "run": run.row.id,
                "started": datetime.fromtimestamp(run.row.started_s).astimezone().strftime("%Y-%m-%d %H:%M"),
                "matrix": Path(run.row.matrix).name,
                "cells": run.cells,
                "done": run.done,
                "failed": run.counts.get(CellStatus.FAILED.value, 0),
                "duration": "-" if run.seconds is None else duration(run.seconds),
            }
            for run in runs
        ]
    )
