from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_pipeline.measure.load.stats import (
    CONFIDENCE,
    PERCENTILES,
    RESAMPLES,
    STATISTICS,
    batch_interval,
    crossing_interval,
    mean_interval,
    paired_change,
    percentile_interval,
    repeats_interval,
    resampled_change,
    summary,
    unpaired_change,
)
from trtllm_pipeline.show.report.comparison import alternate


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=110))
def test_percentiles_are_numpys(samples: list[float]) -> None:
    got = summary(samples, digits=9)
    assert (got["p99"] is None) == (len(samples) < 100), "the p99 of few requests is little more than their maximum"
    for share in PERCENTILES if len(samples) >= 100 else PERCENTILES[:-1]:
        assert np.isclose(got[f"p{share}"], np.percentile(samples, share), atol=1e-8)
    assert got["n"] == len(samples)
    assert (got["min"], got["max"]) == (round(min(samples), 9), round(max(samples), 9))


def test_gaps_of_few_requests_have_no_p99() -> None:
    gaps = [float(number) for number in range(640)]
    assert summary(gaps, requests=40)["p99"] is None
    assert summary(gaps, requests=100)["p99"] == pytest.approx(632.61)


def test_intervals_of_one_measurement_hold_the_truth() -> None:
    """Rates in parts of a window, and medians by order statistics, each of 400 simulated measurements."""
    rates = percentiles = 0
    for seed in range(400):
        draw = random.Random(seed)
        low, high = batch_interval([draw.gauss(100, 5) for _ in range(10)]) or (0, 0)
        rates += low <= 100 <= high
        low, high = percentile_interval([draw.expovariate(1.0) for _ in range(64)], 0.5) or (0, 0)
        percentiles += low <= math.log(2) <= high
    assert rates >= 370
    assert percentiles >= 370
    assert percentile_interval(range(100), 0.99) is None, "its upper end is beyond the slowest of 100"
    assert percentile_interval(range(1000), 0.99) is not None
    assert batch_interval([1.0, 9.0]) is None, "it would reach 0"
    assert repeats_interval([100.0, 101.0]) is None


def test_the_interval_of_right_and_wrong_is_near_the_normal_one() -> None:
    values = [1.0] * 120 + [0.0] * 80
    low, high = mean_interval(values, low=0, high=1) or (0, 0)
    half = 1.96 * (0.6 * 0.4 / 200) ** 0.5
    assert low == pytest.approx(0.6 - half, abs=0.01)
    assert high == pytest.approx(0.6 + half, abs=0.01)
    assert mean_interval(values, low=0, high=1) == (low, high), "the same answers, the same interval"


@pytest.mark.parametrize(
    ("value", "low", "expected"),
    [(1.0, 0, (0.025 ** (1 / 28), 1)), (0.0, 0, (0, 1 - 0.025 ** (1 / 28))), (0.0, -1, (-0.1234, 0.1234))],
)
def test_equal_values_are_not_certainty(value: float, low: float, expected: tuple[float, float]) -> None:
    assert mean_interval([value] * 28, low=low, high=1) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_intervals_hold_the_truth_as_often_as_they_claim(share: float) -> None:
    draw = random.Random(7)
    trials = 200
    held = 0
    for _ in range(trials):
        low, high = mean_interval([float(draw.random() < share) for _ in range(60)], low=0, high=1) or (0, 0)
        held += low <= share <= high
    # 200 trials of a 95% interval hold 180 or more with a chance of 99.9%; the percentile bootstrap of 60 is a bit short
    assert held / trials > CONFIDENCE - 0.06
    assert held / trials < 1


@pytest.mark.thorough
def test_many_values_are_done_in_blocks() -> None:
    values = [index % 2 for index in range(20_001)]
    low, high = mean_interval(values, low=0, high=1) or (0, 0)
    assert 0.49 < low < 0.5 < high < 0.51


def means(rows: Any) -> Any:
    return rows[..., 0].mean(axis=1)


def test_welch_agrees_with_a_worked_example() -> None:
    # Logarithms 1, 2, 3 against 2, 4, 6: difference 2, variances 1/3 and 4/3, 2.94 degrees of freedom, t of 2.
    interval = unpaired_change([math.e**x for x in (1, 2, 3)], [math.e**x for x in (2, 4, 6)])
    assert interval is not None
    half = 4.303 * math.sqrt(5 / 3)
    assert interval == (pytest.approx(math.expm1(2 - half)), pytest.approx(math.expm1(2 + half)))


def test_pairs_take_out_what_both_have() -> None:
    drifting, faster = [100.0, 150.0, 220.0], [91.0, 134.0, 199.0]
    paired, apart = paired_change(drifting, faster), unpaired_change(drifting, faster)
    assert paired[1] < 0, "always a tenth less, whatever the machine did"
    assert apart[0] < 0 < apart[1]


@pytest.mark.parametrize("last", [49, 48])
def test_a_share_that_hardly_falls_with_the_rate_gives_no_interval(last: int) -> None:
    assert crossing_interval([(1.0, 100, 50), (1.02, 100, 50), (1.1, 100, 50), (1.12, 100, last)], 0.95) is None


def test_too_little_gives_no_interval() -> None:
    assert summary([]) == {"n": 0, **dict.fromkeys(STATISTICS)}
    assert mean_interval([], low=0, high=1) is None
    assert paired_change([1.0], [2.0]) is None
    assert paired_change([1.0, 2.0], [1.0]) is None
    assert unpaired_change([1.0], [2.0, 3.0]) is None
    assert unpaired_change([0.0, 1.0], [2.0, 3.0]) is None
    assert resampled_change([(1.0,)] * 4, [(1.0,)] * 9, means, paired=False) is None


@pytest.mark.parametrize("repeats", [2, 3, 5])
def test_repeats_hold_the_truth_as_often_as_they_say(repeats: int) -> None:
    draw = random.Random(repeats)

    def held(interval: tuple[float, float] | None) -> bool:
        return interval is not None and interval[0] <= 0 <= interval[1]

    def series() -> list[float]:
        return [draw.lognormvariate(3, 0.1) for _ in range(repeats)]

    trials = 1000
    pairs = sum(held(paired_change(series(), series())) for _ in range(trials)) / trials
    apart = sum(held(unpaired_change(series(), series())) for _ in range(trials)) / trials
    assert 0.93 < pairs < 0.97
    assert 0.94 < apart <= 1, "rounding the degrees of freedom down makes it wide, never narrow"


def test_requests_hold_the_truth_about_as_often_as_they_say() -> None:
    generator = np.random.default_rng(5)
    held = 0
    for _ in range(100):
        base, new = generator.gamma(4, 10, (2, 60, 1))
        interval = resampled_change(base.tolist(), new.tolist(), means, paired=False)
        held += interval[0] <= 0 <= interval[1]
    assert 88 <= held <= 99


def test_pairing_requests_takes_out_the_prompts() -> None:
    generator = np.random.default_rng(6)
    base = generator.gamma(2, 50, 40)
    new = base * generator.normal(0.9, 0.02, 40)
    rows = [[[value] for value in side] for side in (base, new)]
    paired = resampled_change(*rows, means, paired=True)
    apart = resampled_change(*rows, means, paired=False)
    assert -0.12 < paired[0] < paired[1] < -0.08
    assert apart[0] < 0 < apart[1]
    assert resampled_change(*rows, means, paired=True) == paired, "the same files, the same interval"
    assert RESAMPLES >= 1000


@pytest.mark.parametrize(
    ("base", "new", "expected"),
    [
        ([1, 3, 5], [2, 4, 6], True),
        ([1, 4, 5], [2, 3, 6], True),  # base new, new base, base new
        ([1, 2, 3], [4, 5, 6], False),
        ([1, 2, 5], [3, 4, 6], False),
        ([1], [2], False),
        ([1, 3], [2], False),
        ([], [], False),
    ],
)
def test_what_counts_as_measured_in_turn(base: list[float], new: list[float], expected: bool) -> None:
    assert alternate(base, new) is expected
