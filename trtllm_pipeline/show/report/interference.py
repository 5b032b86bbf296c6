"""The effect of concurrent measurements, from a cell that was measured both alone and alongside others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from trtllm_pipeline.base import ALONE, count
from trtllm_pipeline.measure import LevelResult, result
from trtllm_pipeline.orchestrate import CellResult

_LEAST_SHARE: Final = 0.5
"""Minimum share of a measurement's time that another must overlap for its effect to be visible."""


def interference(rows: Sequence[CellResult]) -> Iterator[str]:
    """Rates and medians of the cell of `config.expand.with_control` alongside others and alone, one line per load.

    Nothing if either measurement is missing.
    """
    by_id = {f"{ALONE}{row.id}": row for row in rows}
    for alone in rows:
        beside = by_id.get(alone.id)
        if beside is None or not alone.levels or not beside.levels:
            continue
        shares = [_overlap(row, beside) for row in rows if row is not beside and row is not alone]
        others = sum(share >= _LEAST_SHARE for share in shares)
        if not others:
            longest = max(shares, default=0.0)
            share = f"only {longest:.0%}" if longest else "none"
            yield f"{beside.id} shared {share} of its time with another measurement: too little to show an effect"
            continue
        known = {level.key: level for level in alone.levels}
        for level in beside.levels:
            if ratios := ", ".join(_ratios(level, known.get(level.key))):
                yield f"{beside.id} alongside {count(others, 'other')} vs. alone, {result.load_words(level.key)}: {ratios}"


def _ratios(beside: LevelResult, alone: LevelResult | None) -> Iterator[str]:
    if alone is None:
        return
    pairs = {"output tokens/s": (beside.output_tokens_per_s, alone.output_tokens_per_s)}
    pairs |= {
        f"{name} p50": (beside.latency(field, "p50"), alone.latency(field, "p50"))
        for name, field in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"))
    }
    for name, (one, other) in pairs.items():
        if one is not None and other:
            yield f"{name} {one / other - 1:+.1%}"


def _overlap(other: CellResult, beside: CellResult) -> float:
    """The share of the measurement time of `beside` that the measurement of `other` overlaps."""
    begins, ends = [], []
    for row in (other, beside):
        if row.conditions.measured_s is None or "perf" not in row.seconds:
            return 0.0
        begins.append(row.conditions.measured_s)
        ends.append(row.conditions.measured_s + row.seconds["perf"])
    shared_s = max(0.0, min(ends) - max(begins))
    return shared_s / beside.seconds["perf"] if shared_s else 0.0
