from __future__ import annotations

import random

import pytest

from trtllm_pipeline.bench.stats import CONFIDENCE, mean_interval


def test_no_values_have_no_interval() -> None:
    assert mean_interval([], low=0, high=1) is None


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
    # 200 trials of a 95 % interval hold 180 or more with a chance of 99.9 %; the percentile bootstrap of 60 is a bit short
    assert held / trials > CONFIDENCE - 0.06
    assert held / trials < 1


def test_many_values_are_done_in_blocks() -> None:
    values = [index % 2 for index in range(20_001)]
    low, high = mean_interval(values, low=0, high=1) or (0, 0)
    assert 0.49 < low < 0.5 < high < 0.51
