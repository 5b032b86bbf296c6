"""How sure a mean is: percentile bootstrap intervals (Efron and Tibshirani, An Introduction to the Bootstrap, 13.3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np

    Matrix = np.ndarray[Any, np.dtype[np.float64]]

CONFIDENCE: Final = 0.95
RESAMPLES: Final = 2000
METHOD: Final = (
    f"{CONFIDENCE:.0%} percentile bootstrap of the mean over questions, {RESAMPLES} resamples; where all values are "
    "equal, and resampling would claim certainty, what so many questions can rule out at that confidence"
)
_KEPT: Final = 2_000_000
"""Numbers held at a time; resamples of fewer are kept for the next interval of as many values."""

Interval = tuple[float, float]


def mean_interval(values: Sequence[float], *, low: float, high: float) -> Interval | None:
    """Interval of the mean of what `values` were drawn from, which lie in [low, high]; None without values.

    Of n equal values resampling knows nothing but that value, while others can have a share of up to
    1 - ((1 - CONFIDENCE) / 2)^(1/n) and be missed by n draws; for right and wrong answers that is the interval of
    Clopper and Pearson (1934).
    """
    import numpy as np

    samples = np.asarray(values, dtype=float)
    count = len(samples)
    if count == 0:
        return None
    if samples.min() == samples.max():
        unseen = 1 - ((1 - CONFIDENCE) / 2) ** (1 / count)
        seen = float(samples[0]) * (1 - unseen)
        return round(seen + low * unseen, 6), round(seen + high * unseen, 6)
    drawn = _drawn(count) if count * RESAMPLES <= _KEPT else _draw(count)
    means = np.concatenate([times @ samples for times in drawn]) / count
    tail = (1 - CONFIDENCE) / 2
    lower, upper = np.quantile(means, [tail, 1 - tail])
    return round(float(lower), 6), round(float(upper), 6)


def _draw(count: int) -> Iterator[Matrix]:
    """How often each of `count` values is drawn, a row for each resample: the same for every call, block by block."""
    import numpy as np

    generator = np.random.default_rng(0)  # the same answers give the same interval
    rows = max(1, _KEPT // count)
    shares = np.full(count, 1 / count)
    for done in range(0, RESAMPLES, rows):
        yield generator.multinomial(count, shares, min(rows, RESAMPLES - done)).astype(float)


@lru_cache(maxsize=4)
def _drawn(count: int) -> tuple[Matrix, ...]:
    return tuple(_draw(count))
