from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from statistics import fmean, median, pstdev

import pytest

from trtllm_pipeline.perf import load
from trtllm_pipeline.perf.load import rate_levels, schedule
from trtllm_pipeline.perf.prompts import Prompt


def test_a_constant_rate_is_even() -> None:
    assert schedule(4, 10, "constant") == pytest.approx((0, 0.1, 0.2, 0.3))


@pytest.mark.parametrize(("distribution", "burstiness", "spread"), [("poisson", 1.0, 1.0), ("gamma", 4.0, 0.5)])
def test_random_rates_have_their_mean_and_their_spread(distribution: str, burstiness: float, spread: float) -> None:
    times = schedule(20_000, 50, distribution, burstiness=burstiness, seed=3)  # type: ignore[arg-type]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert fmean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(spread, rel=0.05)


def test_waiting_for_a_due_time_is_exact_and_leaves_the_processor_alone() -> None:
    async def wait(times: int, every_ns: int) -> list[int]:
        due_ns, late_ns = time.monotonic_ns(), []
        for _ in range(times):
            due_ns += every_ns
            await load._until(due_ns)
            late_ns.append(time.monotonic_ns() - due_ns)
        return late_ns

    cpu_ns = time.process_time_ns()
    late_ns = asyncio.run(wait(80, 4_300_000))
    assert min(late_ns) >= 0, "never early"
    assert median(late_ns) < 500_000
    assert time.process_time_ns() - cpu_ns < 0.2 * 80 * 4_300_000, "most of it asleep"


def test_the_same_seed_gives_the_same_times_and_each_repeat_others() -> None:
    prompts = [Prompt(str(number), "text") for number in range(8)]
    plan = rate_levels(prompts, [5, 10], requests=6, warmup_requests=2, repeats=2, seed=1)
    assert [(level.request_rate, level.repeat) for level in plan] == [(5, 0), (10, 0), (5, 1), (10, 1)]
    assert plan[0].at_s != plan[2].at_s
    assert plan[0].at_s == rate_levels(prompts, [5], requests=6, warmup_requests=2, repeats=1, seed=1)[0].at_s
    assert len(plan[0].at_s) == len(plan[0].planned) == 8
    assert plan[0].key == {"concurrency": None, "request_rate": 5, "repeat": 0}
