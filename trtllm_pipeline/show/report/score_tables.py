"""Scores, and the drift between two sets of answers, as text and as CSV."""

from __future__ import annotations

from collections.abc import Iterator

from trtllm_pipeline.base import text_tables
from trtllm_pipeline.measure import AccuracyResult, Drift, stats


def _scores_rows(result: AccuracyResult) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name, score in result.scores.items():
        low, high = result.intervals.get(name) or (None, None)
        rows.append({"metric": name, "score": score, "low": low, "high": high, "questions": result.questions.get(name)})
    return rows


def scores_text(result: AccuracyResult) -> str:
    """A table with one row per metric, followed by the definitions."""
    definitions = (f"{name}: {definition}" for name, definition in result.definitions.items())
    table = text_tables.plain_table(_scores_rows(result), digits=3, missing="")
    endpoint = [] if result.asked is None else [f"asked at {result.asked}"]
    return "\n".join([table, "", *endpoint, f"low to high: {result.interval_method}", *definitions])


def scores_csv(result: AccuracyResult) -> str:
    return text_tables.csv_table(_scores_rows(result))


def _drift_rows(drift: Drift) -> list[dict[str, object]]:
    return [
        {
            "metric": name,
            "a": of.reference,
            "b": of.score,
            "difference": of.difference,
            "low": of.interval[0],
            "high": of.interval[1],
            "better": of.better,
            "worse": of.worse,
            "questions": of.questions,
        }
        for name, of in drift.scores.items()
    ]


def drift_csv(drift: Drift) -> str:
    return text_tables.csv_table(_drift_rows(drift))


def drift_lines(drift: Drift) -> Iterator[str]:
    """Agreement, the position of the first difference, and score differences."""
    low, high = drift.interval
    alone = f", {drift.unpaired} answers without a counterpart" if drift.unpaired else ""
    yield f"agreement  {drift.agreement:.3f} ({low:.3f} to {high:.3f}) of {drift.pairs} answers{alone}"
    for unit, where in (("chars", drift.first_divergence_chars), ("tokens", drift.first_divergence_tokens)):
        if where is not None and where["n"]:
            yield f"parts at   {unit}: median {where['p50']:g}, from {where['min']:g} to {where['max']:g}"
    yield ""
    yield text_tables.plain_table(_drift_rows(drift), digits=3, missing="")
    yield f"\nlow to high, of the difference: {stats.MEAN_INTERVAL}"
