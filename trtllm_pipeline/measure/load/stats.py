"""Statistics of samples: percentiles, summaries, and 95% intervals of means and of relative differences.

Intervals have two sources. Repeats of a measurement include the variation between repeats. The requests of one repeat only
include the variation between requests, so their interval is narrower.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from statistics import fmean, variance
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np

    Matrix = np.ndarray[Any, np.dtype[np.float64]]

PERCENTILES: Final = (50, 75, 90, 95, 99)
STATISTICS: Final = ("min", "mean", *(f"p{share}" for share in PERCENTILES), "max")
PERCENTILE_METHOD: Final = "linear interpolation between closest ranks (numpy's default; Hyndman and Fan type 7)"
CONFIDENCE: Final = 0.95
RESAMPLES: Final = 2000
LEAST_P99: Final = 100
"""Minimum requests for a p99. With fewer, it would be little more than their maximum."""
LEAST_REPEATS: Final = 3
"""Minimum repeats of a level for a usable interval: Student's t of two is 12.7."""
LEAST_REQUESTS: Final = 5
"""Minimum requests for meaningful resampling."""
MEAN_INTERVAL: Final = (
    f"{CONFIDENCE:.0%} percentile bootstrap of the mean over questions, {RESAMPLES} resamples. If all values are "
    "equal, resampling would claim certainty: then the share that this number of questions can rule out at that confidence"
)
BATCHES: Final = 10
"""Maximum number of parts of a measurement whose means give an interval."""
LEAST_BATCHES: Final = 5
"""Fewer parts give no interval of a rate."""
_NORMAL: Final = 1.96
_LEAST_MIXED: Final = 3
_NEWTON: Final = 100
_FLAT: Final = 30.0
"""The logistic function is constant beyond it."""
_WIDEST: Final = math.log(1000)
"""Half-width of the log rate's interval at which no curve fits."""
_HELD: Final = 2_000_000
"""Maximum numbers in memory at a time."""
# Student's t, 0.975 quantile, for 1 to 30 degrees of freedom; beyond that the last value is used, which is 4% too wide.
T_QUANTILES: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)

Summary = dict[str, float | int | None]
"""`n` and STATISTICS -> value."""
Interval = tuple[float, float]
Statistic = Callable[["Matrix"], "Matrix"]
"""Maps rows of resampled requests, [resamples, requests, columns], to one value each, [resamples]."""


def percentile(ordered: Sequence[float], share: float) -> float:
    """The `share` (0 to 1) quantile of samples in ascending order, see PERCENTILE_METHOD. Needs one sample."""
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summary(samples: Iterable[float], *, requests: int | None = None, digits: int = 3) -> Summary:
    """`n` and STATISTICS of `samples`, rounded. Without samples, all but `n` are None.

    `requests` is the number of requests that the samples are from, by default one each. p99 is None if it is below
    LEAST_P99.
    """
    ordered = sorted(samples)
    if not ordered:
        return {"n": 0, **dict.fromkeys(STATISTICS)}
    mean = math.fsum(ordered) / len(ordered)
    values = (ordered[0], mean, *(percentile(ordered, share / 100) for share in PERCENTILES), ordered[-1])
    rounded = {name: round(value, digits) for name, value in zip(STATISTICS, values, strict=True)}
    enough = (len(ordered) if requests is None else requests) >= LEAST_P99
    return {"n": len(ordered), **rounded, **({} if enough else {"p99": None})}


def mean_interval(values: Sequence[float], *, low: float, high: float) -> Interval | None:
    """Interval of the population mean of `values` in [low, high]. None without values.

    Percentile bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, 13.3). If all n values are
    equal, resampling gives only that value. Other values with a share of up to 1 - ((1 - CONFIDENCE) / 2)^(1/n) can be
    missed by n draws. For right and wrong answers, this is the interval of Clopper and Pearson (1934).
    """
    import numpy as np

    samples = np.asarray(values, dtype=float)
    count = len(samples)
    if count == 0:
        return None
    if samples.min() == samples.max():
        unseen = 1 - ((1 - CONFIDENCE) / 2) ** (1 / count)
        certain = float(samples[0]) * (1 - unseen)
        return round(certain + low * unseen, 6), round(certain + high * unseen, 6)
    drawn = _drawn(count) if count * RESAMPLES <= _HELD else _draw(count)
    means = np.concatenate([times @ samples for times in drawn]) / count
    tail = (1 - CONFIDENCE) / 2
    lower, upper = np.quantile(means, [tail, 1 - tail])
    return round(float(lower), 6), round(float(upper), 6)


def _draw(count: int) -> Iterator[Matrix]:
    """How often each of `count` values is drawn, one row per resample: the same for every call, in blocks."""
    import numpy as np

    generator = np.random.default_rng(0)  # deterministic intervals
    rows = max(1, _HELD // count)
    shares = np.full(count, 1 / count)
    for done in range(0, RESAMPLES, rows):
        yield generator.multinomial(count, shares, min(rows, RESAMPLES - done)).astype(float)


@lru_cache(maxsize=4)
def _drawn(count: int) -> tuple[Matrix, ...]:
    return tuple(_draw(count))


def paired_change(base: Sequence[float], new: Sequence[float]) -> Interval | None:
    """Interval of new/base - 1 from paired consecutive repeats. None with fewer than two.

    Student's t on the logarithms of the ratios: Kalibera and Jones, Rigorous Benchmarking in Reasonable Time, 2013.
    """
    if len(base) != len(new) or len(base) < 2 or min(*base, *new) <= 0:
        return None
    ratios = [math.log(after / before) for before, after in zip(base, new, strict=True)]
    half = _t(len(ratios) - 1) * math.sqrt(variance(ratios) / len(ratios))
    return math.expm1(fmean(ratios) - half), math.expm1(fmean(ratios) + half)


def unpaired_change(base: Sequence[float], new: Sequence[float]) -> Interval | None:
    """Interval of new/base - 1 from independent repeats. None if either has fewer than two.

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


def relative_half_width(values: Sequence[float]) -> float | None:
    """Half-width of the interval of the mean of independent repeats, as a share of the mean. None with fewer than two.

    Student's t on their logarithms. Returns the larger side.
    """
    if len(values) < 2 or min(values) <= 0:
        return None
    return math.expm1(_t(len(values) - 1) * math.sqrt(variance([math.log(value) for value in values]) / len(values)))


def batch_interval(batches: Sequence[float]) -> Interval | None:
    """Interval of the mean of equally long batches of one measurement, such as the rates in parts of a window. None if it
    would reach 0. Method of batch means, Student's t: Law, Simulation Modeling and Analysis, 2015, 9.5.3.
    """
    if len(batches) < 2:
        return None
    half = _t(len(batches) - 1) * math.sqrt(variance(batches) / len(batches))
    mean = fmean(batches)
    return (mean - half, mean + half) if mean > half else None


def percentile_interval(samples: Iterable[float], share: float) -> Interval | None:
    """Interval of the `share` quantile by order statistics, for any distribution of independent samples. None if its ends
    would lie beyond the samples. Conover, Practical Nonparametric Statistics, 1999, 3.2.
    """
    ordered = sorted(samples)
    centre, half = len(ordered) * share, _NORMAL * math.sqrt(len(ordered) * share * (1 - share))
    low, high = math.floor(centre - half) - 1, math.ceil(centre + half)
    return (ordered[low], ordered[high]) if low >= 0 and high < len(ordered) else None


def repeats_interval(values: Sequence[float]) -> Interval | None:
    """Interval of the mean of independent repeats. None with fewer than LEAST_REPEATS. Student's t on their logarithms."""
    if len(values) < LEAST_REPEATS or min(values) <= 0:
        return None
    logs = [math.log(value) for value in values]
    half = _t(len(logs) - 1) * math.sqrt(variance(logs) / len(logs))
    return math.exp(fmean(logs) - half), math.exp(fmean(logs) + half)


def change_of_intervals(base: tuple[float, Interval], new: tuple[float, Interval]) -> Interval | None:
    """Interval of new/base - 1 from two independent values with their intervals: half-widths of logarithms, added in
    quadrature. None if any value is not positive.
    """
    if min(base[0], new[0], *base[1], *new[1]) <= 0:
        return None
    half = math.hypot(*(math.log(high / low) / 2 for _, (low, high) in (base, new)))
    centre = math.log(new[0] / base[0])
    return math.expm1(centre - half), math.expm1(centre + half)


def share_interval(successes: Sequence[bool]) -> Interval:
    """Interval of the share of successes of requests in the order in which they were sent.

    Consecutive requests in a queue are correlated, so the effective sample size is smaller: it follows from the means of
    BATCHES batches, compared with independent requests (Law, Simulation Modeling and Analysis, 2015, 9.5.3). Then Wilson's
    score interval (JASA 22, 1927), with Student's t for the batches. Without failures the correlation is unknown.
    Needs one request.
    """
    count = len(successes)
    share = sum(successes) / count
    size, effective, z = count // BATCHES, float(count), _NORMAL
    if size > 1 and 0 < share < 1:
        means = [fmean(successes[first : first + size]) for first in range(0, size * BATCHES, size)]
        alone = count * share * (1 - share) / max(size * variance(means), 1e-12)
        effective, z = (alone, _t(BATCHES - 1)) if alone < count else (effective, z)
    centre = (share + z * z / (2 * effective)) / (1 + z * z / effective)
    half = z / (1 + z * z / effective) * math.sqrt(share * (1 - share) / effective + (z / (2 * effective)) ** 2)
    return max(0.0, centre - half), min(1.0, centre + half)


def crossing_interval(rounds: Sequence[tuple[float, int, int]], share: float) -> Interval | None:
    """Interval of the rate at which a share of successes that falls with the rate crosses `share`, of rounds of (rate,
    requests, successes); None if fewer than _LEAST_MIXED rounds have both successes and failures, or no curve fits.

    Quasi-binomial logistic regression on the log rate. Overdispersion of the rounds widens the interval (McCullagh and
    Nelder, Generalized Linear Models, 1989, 4.5). Delta method for the crossing, Student's t.
    """
    import numpy as np

    if sum(0 < met < count for _, count, met in rounds) < _LEAST_MIXED:
        return None
    logs, counts, met = (np.asarray(column, dtype=float) for column in zip(*rounds, strict=True))
    logs = np.log(logs)
    centre = logs.mean()
    terms = np.stack([np.ones_like(logs), logs - centre], axis=1)
    fitted = np.array([0.0, -1.0])
    for _ in range(_NEWTON):
        expected = 1 / (1 + np.exp(-np.clip(terms @ fitted, -_FLAT, _FLAT)))
        weights = np.maximum(counts * expected * (1 - expected), 1e-9)
        information = terms.T @ (terms * weights[:, None])
        step = np.linalg.lstsq(information, terms.T @ (met - counts * expected), rcond=None)[0]
        fitted = fitted + np.clip(step, -2, 2)
        if np.abs(step).max() < 1e-8:
            break
    else:
        return None
    if fitted[1] >= 0:
        return None
    free = len(rounds) - 2
    spread = max(1.0, float(((met - counts * expected) ** 2 / weights).sum()) / free)
    wanted = math.log(share / (1 - share)) if share < 1 else _FLAT
    log_rate = (wanted - fitted[0]) / fitted[1]
    slope = np.array([1.0, log_rate]) / fitted[1]
    half = _t(free) * math.sqrt(spread * float(slope @ np.linalg.inv(information) @ slope))
    if not half < _WIDEST:
        return None
    return round(math.exp(log_rate + centre - half), 4), round(math.exp(log_rate + centre + half), 4)


def _t(free: int) -> float:
    return T_QUANTILES[min(max(free, 1), len(T_QUANTILES)) - 1]


def resampled_change(
    base: Sequence[Sequence[float]], new: Sequence[Sequence[float]], statistic: Statistic, *, paired: bool
) -> Interval | None:
    """Interval of statistic(new)/statistic(base) - 1 by the percentile bootstrap over requests, rows of numbers.

    Paired: row i of both is the same prompt, and rows are drawn together. None with fewer than LEAST_REQUESTS.
    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13.
    """
    import numpy as np

    if min(len(base), len(new)) < LEAST_REQUESTS:
        return None
    before, after = np.asarray(base, dtype=float), np.asarray(new, dtype=float)
    generator = np.random.default_rng(0)  # the same files give the same interval
    rows = max(1, _HELD // (max(len(before), len(after)) * before.shape[1]))
    ratios = []
    for done in range(0, RESAMPLES, rows):
        count = min(rows, RESAMPLES - done)
        drawn = generator.integers(0, len(before), (count, len(before)))
        also = drawn if paired else generator.integers(0, len(after), (count, len(after)))
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios.append(statistic(after[also]) / statistic(before[drawn]))
    changes = np.concatenate(ratios)
    changes = changes[np.isfinite(changes)]
    if len(changes) < RESAMPLES // 2:
        return None
    low, high = np.quantile(changes, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low) - 1, float(high) - 1
