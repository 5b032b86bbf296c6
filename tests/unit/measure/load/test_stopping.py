"""When a measurement has seen enough, on simulated servers whose truth is known."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict
from statistics import fmean, median
from typing import get_args

import pytest

from trtllm_pipeline.base.errors import UsageError
from trtllm_pipeline.measure.load.load import Flatness, Load
from trtllm_pipeline.measure.load.metric_names import LEVEL_METRICS
from trtllm_pipeline.measure.load.objectives import LEAST_SEARCHED
from trtllm_pipeline.measure.load.prompts import Prompt
from trtllm_pipeline.measure.load.result import HighestConcurrency, HighestRate, read_record
from trtllm_pipeline.measure.load.stats import relative_half_width, share_interval
from trtllm_pipeline.measure.load.stopping import (
    LEAST_REPEATS,
    ConcurrencySearch,
    LoadProgress,
    Probe,
    RateSearch,
    Rounds,
    StopRule,
    parse_precisions,
)
from trtllm_pipeline.tensorrt.stage.params import StopMetric

PROMPTS = [Prompt(str(number), f"prompt number {number}") for number in range(8)]


# Repeats


def repeats_until_narrow(draw: random.Random, spread: float, wanted: float, most: int = 40) -> list[float]:
    """Throughputs of the repeats that a rule requires, for a server with a true value of 100."""
    values = [draw.gauss(100, spread) for _ in range(LEAST_REPEATS)]
    rule = StopRule(precisions={"output_tps": wanted}, max_repeats=most)
    while len(values) < most and not rule.narrow([{"output_tps": value} for value in values]):
        values.append(draw.gauss(100, spread))
    return values


@pytest.mark.thorough
@pytest.mark.parametrize(("spread", "wanted"), [(3, 0.03), (5, 0.03), (10, 0.05), (1, 0.03)])
def test_intervals_that_end_the_repeats_hold_the_truth(spread: float, wanted: float) -> None:
    """A rule that stops when an interval is narrow prefers those that are so by chance: at least 90% instead of 95%."""
    draw, held, counts = random.Random(1), 0, []
    for _ in range(1000):
        values = repeats_until_narrow(draw, spread, wanted)
        width = relative_half_width(values)
        assert width <= wanted or len(values) == 40
        centre = math.exp(fmean(map(math.log, values)))
        held += centre / (1 + width) <= 100 <= centre * (1 + width)
        counts.append(len(values))
    assert held >= 900
    assert LEAST_REPEATS <= median(counts) < 40


def test_a_steadier_server_takes_fewer_repeats() -> None:
    draw = random.Random(2)
    taken = [fmean(len(repeats_until_narrow(draw, spread, 0.03)) for _ in range(200)) for spread in (1, 4, 8)]
    assert taken[0] == LEAST_REPEATS
    assert taken[0] < taken[1] < taken[2]


def test_rounds_go_on_until_every_level_is_narrow_or_the_repeats_or_the_seconds_are_spent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = Load(concurrency=(1, 4), requests=8)
    rounds = Rounds(load, PROMPTS, StopRule(precisions={"output_tps": 0.03}, max_repeats=6))
    assert [level.repeat for level in rounds.levels] == [n for n in range(LEAST_REPEATS) for _ in "ab"]
    narrow = [{"output_tps": 100 + number / 10} for number in range(5)]
    wide = [{"output_tps": value} for value in (50.0, 100.0, 80.0, 120.0, 70.0)]
    more = rounds.next(LoadProgress((narrow, wide)))
    assert [(level.concurrency, level.repeat) for level in more] == [(1, 5), (4, 5)]
    assert rounds.next(LoadProgress((narrow, wide))) == [], "six repeats are the most"
    assert Rounds(load, PROMPTS, StopRule(precisions={"output_tps": 0.03})).next(LoadProgress((narrow, narrow))) == []
    now_s = 0.0
    monkeypatch.setattr("trtllm_pipeline.measure.load.stopping.time.monotonic", lambda: now_s)
    short = Rounds(load, PROMPTS, StopRule(precisions={"output_tps": 0.03}, budget_s=10))
    now_s = 9.0
    assert short.next(LoadProgress((wide,)))
    now_s = 10.0
    assert short.next(LoadProgress((wide,))) == []


def test_there_are_never_more_repeats_than_the_most() -> None:
    rule = StopRule(precisions={"output_tps": 0.03}, max_repeats=2)
    rounds = Rounds(Load(concurrency=(1,), requests=8), PROMPTS, rule)
    assert [level.repeat for level in rounds.levels] == [0, 1]
    assert rounds.next(LoadProgress(([{"output_tps": 1.0}, {"output_tps": 9.0}],))) == []


def test_nothing_waits_for_a_metric_that_no_repeat_has() -> None:
    rule = StopRule(precisions={"tpot_p50": 0.5, "output_tps": 0.03})
    steady = [{"tpot_p50": None, "output_tps": 100.0 + number / 10} for number in range(LEAST_REPEATS)]
    assert rule.narrow(steady)
    assert not rule.narrow([*steady, {"tpot_p50": 4.0, "output_tps": 100.0}]), "one repeat has no interval"
    assert not rule.narrow([])
    assert StopRule(precisions={"tpot_p50": 0.5}).narrow([{"tpot_p50": 4.0}] * 2)


def test_an_interval_of_a_rate_plans_a_million_requests_at_most() -> None:
    """Rates of a search are not known before, and what is planned is in memory."""
    assert len(Load(interval_s=1e6).level(PROMPTS, 0, None, 10.0).measured) == 1_000_000


@pytest.mark.parametrize("text", ["", "output_tps", "output_tps=0", "output_tps=100%", "speed=3%", "output_tps=3%,,"])
def test_precisions_that_mean_nothing_are_named(text: str) -> None:
    with pytest.raises(UsageError, match="--stop-when"):
        parse_precisions(text, LEVEL_METRICS)


def test_precisions_are_percents_or_shares() -> None:
    assert parse_precisions("output_tps=3%, ttft_p50=0.05", LEVEL_METRICS) == {"output_tps": 0.03, "ttft_p50": 0.05}
    assert {*get_args(StopMetric)} <= {*LEVEL_METRICS}


# The highest rate


def sojourns(draw: random.Random, rate: float, count: int, *, served: float = 10.0, warm: int = 200) -> list[float]:
    """Seconds from arrival to end of requests to one server that takes 1/`served` s on average: the queue M/M/1."""
    now = free = 0.0
    times = []
    for _ in range(warm + count):
        now += draw.expovariate(rate)
        free = max(now, free) + draw.expovariate(served)
        times.append(free - now)
    return times[warm:]


def found_rate(
    draw: random.Random, answered: Callable[[float], list[bool]], wanted: float, first: float
) -> tuple[float | None, tuple[float | None, float | None], int]:
    search, met = RateSearch(wanted=wanted, first=first), {}
    probes: list[Probe] = []
    for tries in range(200):
        rate = search.next(probes)
        if rate is None:
            return search.bounds(probes)[0], search.interval(probes), tries
        met.setdefault(rate, []).append(answered(rate))
        probes = [Probe(rate, tuple(map(tuple, rounds))) for rate, rounds in met.items()]
    raise AssertionError("the search did not end")


@pytest.mark.thorough
def test_bisection_finds_the_known_rate_of_a_queue() -> None:
    """Of M/M/1 the time in the system is exponential with mu - lambda: 95% within 1 s up to lambda = mu - ln 20."""
    truth, held, off, tries = 10 - math.log(20), 0, [], []
    for seed in range(40):
        draw = random.Random(seed)

        def answered(rate: float, draw: random.Random = draw) -> list[bool]:
            return [time_s <= 1 for time_s in sojourns(draw, rate, 1500)]

        rate, (low, high), asked = found_rate(draw, answered, 0.95, 1.0)
        assert (low or 0) <= rate <= (high or math.inf), "the result is in its interval"
        held += (low or 0) <= truth <= (high or math.inf)
        off.append(abs(rate / truth - 1))
        tries.append(asked)
    assert median(off) < 0.06
    assert max(off) < 0.2
    assert held >= 36, "the interval holds the truth"
    assert max(tries) < 40


@pytest.mark.parametrize(
    ("rate", "low", "high", "reason", "words"),
    [
        (7.2, 7.0, 7.6, None, "7.2 requests/s meet ttft 300 ms for 99.5% of requests (95% interval 7 to 7.6)"),
        (7.2, 7.2, None, None, "7.2 requests/s meet ttft 300 ms for 99.5% of requests (no higher rate was tried)"),
        (None, None, 5.0, None, "no rate tried meets ttft 300 ms for 99.5% of requests; the lowest was 5/s"),
        (
            None,
            None,
            None,
            None,
            "unknown rate at which 99.5% of requests meet ttft 300 ms: the search was cut short at 5/s",
        ),
        (
            None,
            None,
            None,
            "too few requests",
            "unknown rate at which 99.5% of requests meet ttft 300 ms: too few requests",
        ),
    ],
)
def test_the_highest_rate_in_words(
    rate: float | None, low: float | None, high: float | None, reason: str | None, words: str
) -> None:
    highest = HighestRate(0.995, {"ttft": 300.0}, rate, low, high, {"5": {}, "12": {}}, reason)
    assert str(highest) == words
    assert read_record(HighestRate, json.loads(json.dumps(asdict(highest)))) == highest


def test_a_sharp_limit_is_found_within_a_step() -> None:
    for limit in (0.07, 1.0, 3.3, 480.0):
        rate, (low, high), tries = found_rate(
            random.Random(0), lambda rate, limit=limit: [rate <= limit] * 100, 0.95, 1.0
        )
        assert low == rate
        assert rate <= limit < high <= rate * 1.0502
        assert tries < 24


def test_a_search_that_finds_no_end_gives_up() -> None:
    assert found_rate(random.Random(0), lambda _: [True] * 100, 0.95, 1.0)[1] == (1024.0, None)
    assert found_rate(random.Random(0), lambda _: [False] * 100, 0.95, 1.0)[:2] == (
        None,
        (None, pytest.approx(2**-10, rel=0.01)),
    )


def test_rounds_search_after_their_levels_and_begin_at_what_a_closed_loop_managed() -> None:
    rounds = Rounds(Load(concurrency=(4,), requests=8), PROMPTS, StopRule(), 0.95)
    (level,) = rounds.next(LoadProgress((), (), (), 10.0))
    assert (level.request_rate, level.repeat, level.probes) == (7.0, 0, True)
    unsure = Probe(7.0, ((True,) * 19 + (False,),))
    (again,) = rounds.next(LoadProgress((), (unsure,), (), 10.0))
    assert (again.request_rate, again.repeat) == (7.0, 1)
    (higher,) = rounds.next(LoadProgress((), (Probe(7.0, ((True,) * 200,)),), (), 10.0))
    assert higher.request_rate == 14.0


def test_a_rate_that_is_tried_lasts_until_a_queue_would_be_long() -> None:
    (level,) = Rounds(Load(interval_s=2.0), PROMPTS, StopRule(), 0.95).next(LoadProgress((), (), (), 10.0))
    assert len(level.measured) == LEAST_SEARCHED
    (level,) = Rounds(Load(interval_s=200.0), PROMPTS, StopRule(), 0.95).next(LoadProgress((), (), (), 10.0))
    assert len(level.measured) == 1400


def test_a_rate_that_was_asked_for_is_not_mixed_up_with_one_that_is_tried() -> None:
    (level,) = Rounds(Load(request_rate=(1.0,), requests=8), PROMPTS, StopRule(), 0.95).next(LoadProgress())
    assert level.request_rate == pytest.approx(1.001)


# The highest concurrency


def found_concurrency(
    kept: Callable[[int], bool], rps: Callable[[int], float], start: tuple[int, ...] = ()
) -> tuple[int | None, int | None, int | None, list[int]]:
    """Lower and upper bound, saturation, and all that was tried, of a server that answers alike."""
    search, tried = ConcurrencySearch(wanted=0.95), list(start)
    for _ in range(100):
        probes = [Probe(each, ((kept(each),) * 200,), (rps(each),)) for each in tried]
        chosen = search.next(probes)
        if chosen is None:
            return *search.bounds(probes), search.saturated(probes), tried
        assert chosen not in tried
        tried.append(chosen)
    raise AssertionError("the search did not end")


@pytest.mark.parametrize("limit", [1, 2, 3, 11, 48, 200, 1000])
@pytest.mark.parametrize("start", [(), (1, 4, 16)])
def test_the_most_in_flight_is_found_within_a_step(limit: int, start: tuple[int, ...]) -> None:
    low, high, saturated, tried = found_concurrency(lambda each: each <= limit, float, start)
    assert low <= limit < high
    assert high - low <= max(1, 0.05 * low)
    assert saturated is None
    assert len(tried) < 24


def test_a_search_ends_at_saturation_or_at_the_most() -> None:
    assert found_concurrency(lambda _: True, lambda each: min(each, 40.0)) == (
        128,
        None,
        64,
        [1, 2, 4, 8, 16, 32, 64, 128],
    )
    assert found_concurrency(lambda _: True, float)[:3] == (4096, None, None)
    assert found_concurrency(lambda _: False, float) == (None, 1, None, [1])
    assert found_concurrency(lambda _: False, float, (4, 16)) == (None, 1, None, [4, 16, 2, 1])


def test_requested_levels_count_and_more_rounds_of_them_stay_levels() -> None:
    rounds = Rounds(Load(concurrency=(4,), requests=8), PROMPTS, StopRule(), None, 0.95)
    assert rounds.open_end
    unsure = Probe(4, ((True,) * 19 + (False,),), (10.0,))
    (again,) = rounds.next(LoadProgress((), (), (unsure,)))
    assert (again.concurrency, again.repeat, again.probes) == (4, 1, False)
    (more,) = rounds.next(LoadProgress((), (), (Probe(4, ((True,) * 200,), (10.0,)),)))
    assert (more.concurrency, more.request_rate, more.repeat, more.probes) == (8, None, 0, True)
    assert len(more.measured) >= 24, "three waves"


@pytest.mark.parametrize(
    ("low", "high", "saturated", "words"),
    [
        (
            48,
            52,
            32,
            "48 requests in flight meet ttft 300 ms for 95% of requests (52 do not); the server is saturated at 32",
        ),
        (
            64,
            None,
            None,
            "64 requests in flight meet ttft 300 ms for 95% of requests (no higher concurrency was tried)",
        ),
        (None, 1, None, "no concurrency tried meets ttft 300 ms for 95% of requests; the lowest was 1"),
        (
            None,
            None,
            None,
            "unknown concurrency at which 95% of requests meet ttft 300 ms: the search was cut short at 1",
        ),
    ],
)
def test_the_most_in_flight_in_words(low: int | None, high: int | None, saturated: int | None, words: str) -> None:
    assert str(HighestConcurrency(0.95, {"ttft": 300.0}, low, high, saturated, {"1": {}})) == words


# Intervals of shares


@pytest.mark.parametrize(("share", "alike"), [(0.5, 1), (0.9, 1), (0.99, 1), (0.5, 10), (0.9, 10)])
def test_intervals_of_shares_hold_the_truth_where_neighbours_are_alike(share: float, alike: int) -> None:
    draw, held = random.Random(3), 0
    for _ in range(400):
        runs = [draw.random() < share for _ in range(400 // alike)]
        low, high = share_interval([met for met in runs for _ in range(alike)])
        held += low <= share <= high
    assert held >= 360


# Warm-up


def warmed_up_after(draw: random.Random, ttft_ms: Callable[[int], float], least: int, window: int, most: int) -> int:
    flat = Flatness(least, window)
    return next((count for count in range(1, most + 1) if flat.add(ttft_ms(count))), most)


def test_a_warm_up_ends_when_times_are_flat() -> None:
    draw = random.Random(4)

    def settled(_count: int) -> float:
        return 100 * draw.lognormvariate(0, 0.1)

    def falling(count: int) -> float:
        return (100 + 900 * math.exp(-count / 12)) * draw.lognormvariate(0, 0.1)

    at_once = [warmed_up_after(draw, settled, 8, 4, 64) for _ in range(200)]
    later = [warmed_up_after(draw, falling, 8, 4, 64) for _ in range(200)]
    assert median(at_once) == 16, "two windows of eight"
    assert sum(count == 64 for count in at_once) == 0
    assert fmean(at_once) < fmean(later)
    left = [900 * math.exp(-count / 12) / 100 for count in later]
    assert median(left) < 0.25, "what is left of the fall"
    assert warmed_up_after(draw, lambda count: 1000 / count, 8, 4, 64) == 64


def test_requests_without_text_tell_nothing_of_a_warm_up() -> None:
    flat = Flatness(8, 4)
    assert not any(flat.add(None) for _ in range(100))
