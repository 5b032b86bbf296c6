"""Summaries of samples: which numbers, by which method, of how many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

PERCENTILES: Final = (50, 75, 90, 95, 99)
PERCENTILE_METHOD: Final = "linear interpolation between closest ranks (numpy's default; Hyndman and Fan type 7)"

Summary = dict[str, float | int | None]


def percentile(ordered: Sequence[float], share: float) -> float:
    """The `share` (0 to 1) quantile of samples in ascending order, see PERCENTILE_METHOD. Needs one sample."""
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summary(samples: Iterable[float], *, digits: int = 3) -> Summary:
    """n, min, mean, p50, p75, p90, p95, p99 and max of `samples`; all None but n when there are none.

    With n samples no percentile above 1 - 1/n says anything that the maximum does not: n stands beside.
    """
    ordered = sorted(samples)
    names = ("min", "mean", *(f"p{share}" for share in PERCENTILES), "max")
    if not ordered:
        return {"n": 0, **dict.fromkeys(names)}
    values = (
        ordered[0],
        math.fsum(ordered) / len(ordered),
        *(percentile(ordered, share / 100) for share in PERCENTILES),
        ordered[-1],
    )
    return {"n": len(ordered), **{name: round(value, digits) for name, value in zip(names, values, strict=True)}}
