"""Scores, and the drift between two sets of answers, as text and as CSV."""

from __future__ import annotations

from collections.abc import Iterator

from trtllm_pipeline.base import csv_table, plain_table
from trtllm_pipeline.measure import MEAN_INTERVAL, AccuracyResult, Drift


def _scores_rows(found: AccuracyResult) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name, score in found.scores.items():
        low, high = found.intervals.get(name) or (None, None)
        rows.append({"metric": name, "score": score, "low": low, "high": high, "questions": found.questions.get(name)})
    return rows


def scores_text(found: AccuracyResult) -> str:
    """A table with a row for each metric, and the definitions below it."""
    definitions = (f"{name}: {definition}" for name, definition in found.definitions.items())
    table = plain_table(_scores_rows(found), digits=3, missing="")
    asked = [] if found.asked is None else [f"asked at {found.asked}"]
    return "\n".join([table, "", *asked, f"low to high: {found.interval_method}", *definitions])


def scores_csv(found: AccuracyResult) -> str:
    """The same as CSV."""
    return csv_table(_scores_rows(found))


def _drift_rows(found: Drift) -> list[dict[str, object]]:
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
        for name, of in found.scores.items()
    ]


def drift_csv(found: Drift) -> str:
    """A row for each metric."""
    return csv_table(_drift_rows(found))


def drift_text(found: Drift) -> str:
    """Agreement, where answers part, and the differences of the scores."""
    return "\n".join(_drift_lines(found))


def _drift_lines(found: Drift) -> Iterator[str]:
    low, high = found.interval
    alone = f", {found.unpaired} answers without a counterpart" if found.unpaired else ""
    yield f"agreement  {found.agreement:.3f} ({low:.3f} to {high:.3f}) of {found.pairs} answers{alone}"
    for unit, where in (("chars", found.first_divergence_chars), ("tokens", found.first_divergence_tokens)):
        if where is not None and where["n"]:
            yield f"parts at   {unit}: median {where['p50']:g}, from {where['min']:g} to {where['max']:g}"
    yield ""
    yield plain_table(_drift_rows(found), digits=3, missing="")
    yield f"\nlow to high, of the difference: {MEAN_INTERVAL}"
