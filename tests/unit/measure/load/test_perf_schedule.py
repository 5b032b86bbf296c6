from __future__ import annotations

import asyncio
import math
from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from trtllm_pipeline.measure.load import load
from trtllm_pipeline.measure.load.load import Load, schedule
from trtllm_pipeline.measure.load.prompts import Prompt


def test_a_constant_rate_is_even() -> None:
    assert schedule(4, 10, "constant") == pytest.approx((0, 0.1, 0.2, 0.3))


@pytest.mark.parametrize(("distribution", "burstiness", "spread"), [("poisson", 1.0, 1.0), ("gamma", 4.0, 0.5)])
def test_random_rates_have_their_mean_and_their_spread(distribution: str, burstiness: float, spread: float) -> None:
    times = schedule(20_000, 50, distribution, burstiness=burstiness, seed=3)  # type: ignore[arg-type]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert fmean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(spread, rel=0.05)


def test_waiting_for_a_due_time_is_exact_and_leaves_the_processor_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns, spun = 0, 0

    async def sleep(delay_s: float) -> None:
        # An event loop's timers round up to whole milliseconds. Yielding takes a few microseconds.
        nonlocal now_ns, spun
        now_ns += math.ceil(delay_s * 1e3) * 1_000_000 if delay_s else 5_000
        spun += not delay_s

    monkeypatch.setattr(load.time, "monotonic_ns", lambda: now_ns)
    monkeypatch.setattr(load.asyncio, "sleep", sleep)
    due_ns = 0
    for _ in range(80):
        due_ns += 4_300_000
        asyncio.run(load._until(due_ns))
        assert 0 <= now_ns - due_ns < 5_000, "never early, and not later than a turn of the loop"
    assert spun * 5_000 < 0.3 * due_ns, "most of it asleep"


def test_the_same_seed_gives_the_same_times_and_each_repeat_others() -> None:
    prompts = [Prompt(str(number), "text") for number in range(8)]
    plan = Load(request_rate=(5, 10), requests=6, warmup_requests=2, repeats=2, seed=1).levels(prompts)
    assert [(level.request_rate, level.repeat) for level in plan] == [(5, 0), (10, 0), (5, 1), (10, 1)]
    assert plan[0].at_s != plan[2].at_s
    again = Load(request_rate=(5,), requests=6, warmup_requests=2, seed=1).levels(prompts)
    assert plan[0].at_s == again[0].at_s
    assert len(plan[0].at_s) == len(plan[0].planned) == 8
    assert plan[0].key == {"concurrency": None, "request_rate": 5, "repeat": 0}
