"""The runs of a workspace: `pipeline status --runs`, as JSON and as text."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

from trtllm_pipeline.base import PipelineError, duration, text_tables
from trtllm_pipeline.orchestrate import CellStatus, Store, report_file
from trtllm_pipeline.orchestrate import runs as run_folders


def runs_json(store: Store) -> dict[str, Any]:
    """All runs, the latest first, see docs/reference/formats.md."""
    runs = []
    for row in store.index.runs():
        if not (store.runs_dir / row.id).is_dir():
            continue  # removed by `store rm`
        counts = _counts(store, store.runs_dir / row.id)
        run = {"id": row.id, "matrix": row.matrix, "command": row.command, "started_s": row.started_s}
        ended = {"duration_s": row.seconds, "exit_code": row.exit_code}
        runs.append({**run, **ended, "cells": sum(counts.values()), "counts": dict(sorted(counts.items()))})
    return {"schema": 1, "runs": runs}


def _counts(store: Store, folder: Path) -> dict[str, int]:
    """Number of cells of a run by status. Empty if none are left."""
    try:
        if (folder / report_file.NAME).is_file():
            return {
                name: int(number)
                for name, number in report_file.read_report(folder / report_file.NAME)[1]["counts"].items()
            }
        return dict(Counter(row.status.value for row in report_file.rows_of(run_folders.read_run(folder), store)))
    except PipelineError:
        return {}


def to_text(data: dict[str, Any]) -> str:
    if not data["runs"]:
        return "no runs in this workspace yet"
    good = (CellStatus.DONE.value, CellStatus.UP_TO_DATE.value)
    return text_tables.plain_table(
        [
            {
                "run": run["id"],
                "started": datetime.fromtimestamp(run["started_s"]).astimezone().strftime("%Y-%m-%d %H:%M"),
                "matrix": Path(run["matrix"]).name,
                "cells": run["cells"],
                "done": sum(run["counts"].get(status, 0) for status in good),
                "failed": run["counts"].get(CellStatus.FAILED.value, 0),
                "duration": "-" if run["duration_s"] is None else duration(run["duration_s"]),
            }
            for run in data["runs"]
        ]
    )
