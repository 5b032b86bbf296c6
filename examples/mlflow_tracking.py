"""Logs the results of a workspace to MLflow: one MLflow run for each cell, one step for each concurrency.

    pip install mlflow
    python examples/mlflow_tracking.py [.pipeline | runs/RUN_ID | report.json]

MLFLOW_TRACKING_URI names the server or database. Change it to what your tracker needs: `load_report` has all results.
"""

from __future__ import annotations

import sys
from pathlib import Path

import mlflow

import trtllm_pipeline


def log(path: str) -> int:
    """Log every cell of the report at `path`. Returns the number of cells."""
    report = trtllm_pipeline.load_report(path)
    mlflow.set_experiment(Path(report.matrix).stem)
    for row in report.rows:
        with mlflow.start_run(run_name=row.id, tags={"pipeline.run": report.run}):
            mlflow.log_params({**row.axes, "status": row.status.value})
            for step, level in enumerate(row.levels, 1):
                metrics = {
                    "output_tokens_per_s": level.output_tokens_per_s,
                    "ttft_p50_ms": level.latency("ttft_ms", "p50"),
                    "tpot_p50_ms": level.latency("tpot_ms", "p50"),
                }
                known = {name: value for name, value in metrics.items() if value is not None}
                mlflow.log_metrics(known, step=level.concurrency or step)
    return len(report.rows)


if __name__ == "__main__":
    print(f"{log(sys.argv[1] if len(sys.argv) > 1 else '.pipeline')} cells logged to {mlflow.get_tracking_uri()}")
