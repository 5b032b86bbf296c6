"""The file `report.json`: a run's results as JSON, written and read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import StateError, decode_mapping, json_lines, reading, uncollected
from trtllm_pipeline.measure import DRIFT, LOAD_METRICS, MEAN_INTERVAL, NORMALISATION, SCORE_METRICS, MetricDefinition
from trtllm_pipeline.orchestrate.results.forecast_check import ForecastCheck
from trtllm_pipeline.orchestrate.results.rows import CellResult

SCHEMA: Final = 1
NAME: Final = "report.json"
METRICS: Final = (
    *LOAD_METRICS,
    *(MetricDefinition(name, "0 to 1", metric.definition) for name, metric in SCORE_METRICS.items()),
    MetricDefinition("normalisation", "", NORMALISATION),
    MetricDefinition("interval", "", MEAN_INTERVAL),
    MetricDefinition(
        "agreement", "0 to 1", f"compared with the otherwise equal unquantized cell: {DRIFT['agreement']}"
    ),
    MetricDefinition(
        "difference", "-1 to 1", f"compared with the otherwise equal unquantized cell: {DRIFT['difference']}"
    ),
    MetricDefinition("first_divergence", "", DRIFT["first_divergence"]),
    MetricDefinition(
        "trtllm_bench",
        "tokens/s",
        "output tokens / s of the engine in the process of trtllm-bench, without a server: the prompts of the most requests "
        "in flight",
    ),
    MetricDefinition("tokens_per_gpu", "tokens/s", "output tokens per second / GPUs that the cell's model spans"),
    MetricDefinition("tokens_per_user", "tokens/s", "1 / median TPOT: the rate of one request after its first token"),
    MetricDefinition("engine_size_bytes", "bytes", "sum of the engine's files, each hard link counted once"),
    MetricDefinition(
        "seconds", "s", "wall-clock time a stage took when its artifact was made, in whichever run that was"
    ),
)
"""All metrics, and the terms of their formulas."""


def report_json(
    rows: Sequence[CellResult],
    run_id: str,
    matrix: str,
    *,
    finished: bool = True,
    forecast: ForecastCheck | None = None,
) -> Iterator[str]:
    """Lines of the report as JSON, see docs/reference/formats.md. `finished` is False until the run has written its own report."""
    counts = Counter(row.status.value for row in rows)
    return json_lines(
        schema=SCHEMA,
        run={
            "id": run_id,
            "matrix": matrix,
            "finished": finished,
            "counts": dict(sorted(counts.items())),
            "forecast": None if forecast is None else forecast.to_json(),
        },
        metrics=({"name": metric.name, "unit": metric.unit, "formula": metric.formula} for metric in METRICS),
        cells=(row.to_json() for row in rows),
    )


@uncollected()
def read_report(
    path: Path, decode: Callable[[bytes], dict[str, Any]] = decode_mapping
) -> tuple[tuple[CellResult, ...], dict[str, Any]]:
    """Rows and `run` of a report file, with its `forecast`. Raises StateError if the file is not a report.

    The file is untrusted input.
    """
    try:
        data = decode(reading.read_bytes(path))
        if data["schema"] != SCHEMA:
            raise StateError(f"{path}: report of schema {data['schema']}, this release reads {SCHEMA}")
        run = dict(data["run"])
        if (forecast := run.get("forecast")) is not None:  # older reports have none
            run["forecast"] = ForecastCheck.from_json(forecast)
        return tuple(CellResult.from_json(cell) for cell in data["cells"]), run
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateError(f"{path}: not a report: {error}", hint="`pipeline run` writes one when it ends") from error
