"""How sure a relative difference of two measurements is.

Two sources of noise, two intervals, both of 95 %. From repeats: what changes between two times of doing the same. From
the requests of one repeat: what other requests of the same kind would have given, had nothing else changed; so these
are narrower than the truth. Functions of samples; 0.1 means 10 % more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, variance
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np

    Matrix = np.ndarray[Any, np.dtype[np.float64]]

CONFIDENCE: Final = 0.95
RESAMPLES: Final = 2000
LEAST_REQUESTS: Final = 5
"""Fewer cannot be resampled to anything worth saying."""
_BLOCK: Final = 2_000_000
"""Numbers held at a time."""
# Student's t, 0.975 quantile, for 1 to 30 degrees of freedom; beyond that the last is taken, which is 4 % too wide.
_T: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)

Interval = tuple[float, float]


def from_pairs(base: Sequence[float], new: Sequence[float]) -> Interval | None:
    """Interval of new/base - 1 from repeats that belong together, one after the other; None with fewer than two.

    Student's t on the logarithms of the ratios: Kalibera and Jones, Rigorous Benchmarking in Reasonable Time, 2013.
    """
    if len(base) != len(new) or len(base) < 2 or min(*base, *new) <= 0:
        return None
    ratios = [math.log(after / before) for before, after in zip(base, new, strict=True)]
    half = _t(len(ratios) - 1) * math.sqrt(variance(ratios) / len(ratios))
    return math.expm1(fmean(ratios) - half), math.expm1(fmean(ratios) + half)


def from_repeats(base: Sequence[float], new: Sequence[float]) -> Interval | None:
    """Interval of new/base - 1 from independent repeats; None where either has fewer than two.

    Welch's t interval (Biometrika 34, 1947) of the difference of the means of logarithms.
    """
    if min(len(base), len(new)) < 2 or min(*base, *new) <= 0:
        return None
    before, after = ([math.log(value) for value in values] for values in (base, new))
    parts = [variance(values) / len(values) for values in (before, after)]
    centre, spread = fmean(after) - fmean(before), sum(parts)
    if spread == 0:
        return math.expm1(centre), math.expm1(centre)
    free = spread**2 / sum(part**2 / (len(values) - 1) for part, values in zip(parts, (before, after), strict=True))
    half = _t(math.floor(free)) * math.sqrt(spread)
    return math.expm1(centre - half), math.expm1(centre + half)


def _t(free: int) -> float:
    return _T[min(max(free, 1), len(_T)) - 1]


Statistic = Callable[["Matrix"], "Matrix"]
"""Rows of resampled requests, [resamples, requests, columns], to one value each, [resamples]."""


def from_requests(
    base: Sequence[Sequence[float]], new: Sequence[Sequence[float]], statistic: Statistic, *, paired: bool
) -> Interval | None:
    """Interval of statistic(new)/statistic(base) - 1 by the percentile bootstrap over requests, rows of numbers.

    Paired: row i of both is the same prompt, and rows are drawn together. None with too few requests.
    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13.
    """
    import numpy as np

    if min(len(base), len(new)) < LEAST_REQUESTS:
        return None
    before, after = np.asarray(base, dtype=float), np.asarray(new, dtype=float)
    generator = np.random.default_rng(0)  # the same files give the same interval
    rows = max(1, _BLOCK // (max(len(before), len(after)) * before.shape[1]))
    ratios = []
    for done in range(0, RESAMPLES, rows):
        count = min(rows, RESAMPLES - done)
        drawn = generator.integers(0, len(before), (count, len(before)))
        also = drawn if paired else generator.integers(0, len(after), (count, len(after)))
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios.append(statistic(after[also]) / statistic(before[drawn]))
    found = np.concatenate(ratios)
    found = found[np.isfinite(found)]
    if len(found) < RESAMPLES // 2:
        return None
    low, high = np.quantile(found, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low) - 1, float(high) - 1
