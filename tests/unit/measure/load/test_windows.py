"""The steady window and its rates, on engines whose throughput at full concurrency is known."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

import pytest

from tests.helpers.simulated_engine import MS, Engine, timed
from trtllm_pipeline.measure.load.load import Level, Load
from trtllm_pipeline.measure.load.prompts import Prompt
from trtllm_pipeline.measure.load.requests import TimedRequest
from trtllm_pipeline.measure.load.windows import WAVES, Window, at_full_concurrency, headline, least_requests, spans

PROMPTS = [Prompt(str(number), "text") for number in range(8)]


def level(concurrency: int, requests: int = 192, warmup: int | None = None) -> Level:
    (planned,) = Load(concurrency=(concurrency,), requests=requests, warmup_requests=warmup).levels(PROMPTS)
    return planned


def windows(requests: list[TimedRequest], concurrency: int | None) -> dict[str, Window | None]:
    result = spans(requests, concurrency)
    return {name: None if span is None else span.window(requests) for name, span in result.items()}


def steady_and_whole(engine: Engine, planned: Level, tokens: Callable[[int], int]) -> tuple[float, float]:
    """Output tokens per second; the headline is steady."""
    result = windows(engine.run(planned, tokens), planned.concurrency)
    steady, whole = result["steady"], result["whole"]
    assert headline([result])[0] == "steady"
    return steady.output_tokens_per_s, whole.output_tokens_per_s


def lengths(least: int, most: int, seed: int) -> Callable[[int], int]:
    draw = random.Random(seed)
    drawn = [draw.randint(least, most) for _ in range(5000)]
    return drawn.__getitem__


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("warmup", [None, 0, 1])
@pytest.mark.parametrize(
    ("concurrency", "requests"), [(1, 1), (1, 5), (4, 1), (4, 192), (16, 192), (16, 200), (64, 1), (64, 192)]
)
def test_answers_of_one_length_come_in_waves(
    concurrency: int, requests: int, warmup: int | None, streamed: bool
) -> None:
    engine = Engine()
    planned = level(concurrency, requests, warmup)
    result = windows(engine.run(planned, lambda _: 128, streamed=streamed), concurrency)
    steady, right = result["steady"], engine.tokens_per_s(concurrency, 128)
    assert headline([result])[0] == "steady"
    assert steady.output_tokens_per_s == pytest.approx(right, rel=0.01)
    assert steady.requests_per_s == pytest.approx(right / 128, rel=0.01)
    assert steady.input_tokens_per_s == pytest.approx(right / 128, rel=0.01)


@pytest.mark.timeout(300)  # it computes for seconds, and a busy machine for longer than a unit test may take
@pytest.mark.parametrize(
    ("concurrency", "least", "most", "prefill_ms", "each"),
    [
        (16, 115, 141, 27.0, 0.02),
        (64, 115, 141, 0.0, 0.02),
        pytest.param(64, 115, 141, 27.0, 0.02, marks=pytest.mark.thorough),
        pytest.param(16, 16, 240, 3.0, 0.03, marks=pytest.mark.thorough),
        pytest.param(64, 16, 240, 3.0, 0.03, marks=pytest.mark.thorough),
        # Prefill is 70% of the work, and few requests have about its mean length.
        pytest.param(64, 16, 240, 27.0, 0.10, marks=pytest.mark.thorough),
    ],
)
def test_a_short_run_agrees_with_a_long_one(
    concurrency: int, least: int, most: int, prefill_ms: float, each: float
) -> None:
    engine = Engine(prefill_ms=prefill_ms)
    long, _ = steady_and_whole(engine, level(concurrency, 40 * concurrency), lengths(least, most, 0))
    short = [steady_and_whole(engine, level(concurrency), lengths(least, most, seed))[0] for seed in range(1, 9)]
    assert short == pytest.approx([long] * len(short), rel=each)
    assert fmean(short) == pytest.approx(long, rel=0.02)


@pytest.mark.thorough
def test_ramp_up_and_drain_are_in_the_whole_window_alone() -> None:
    """Unequal lengths, three waves: a fifth of the throughput is missing from first to last."""
    engine = Engine(prefill_ms=0.0)
    long, _ = steady_and_whole(engine, level(64, 40 * 64), lengths(16, 240, 0))
    steady, whole = steady_and_whole(engine, level(64), lengths(16, 240, 1))
    assert steady == pytest.approx(long, rel=0.01)
    assert whole < 0.85 * long


@pytest.mark.parametrize("turns", [1, 3, 10])
@pytest.mark.parametrize("warmup", [0, 1, 5, 8, 40])
def test_as_many_requests_as_a_steady_window_needs(turns: int, warmup: int) -> None:
    talks = [Prompt(f"{talk}.{turn}", "text", turn=turn + 1) for talk in range(5) for turn in range(turns)]
    (planned,) = Load(concurrency=(4,), requests=1, warmup_requests=warmup).levels(talks)
    least = least_requests(4, warmup, turns)
    assert least <= len(planned.measured) < least + turns
    (planned,) = Load(concurrency=(4,), requests=500, warmup_requests=warmup).levels(talks)
    assert 500 <= len(planned.measured) < 500 + turns


def one_after_another(count: int, *, gap_ms: float = 0.0, slot: int = 0) -> list[TimedRequest]:
    """Requests of one slot: 100 ms each, a token every 10 ms."""
    starts = [number * (100 + gap_ms) for number in range(count)]
    return [timed(slot, at, [at + 10 * each for each in range(1, 11)]) for at in starts]


def test_a_window_that_is_cut_short_gives_no_headline() -> None:
    requests = one_after_another(3)
    result = windows(requests, 1)
    assert result["steady"] == Window(0.2, 2, 20, 2, 10.0, 100.0, 10.0, waves=2.0)
    assert headline([result]) == (
        "whole",
        "the steady window of 0.2 s holds 2.0 waves of requests, fewer than 3: ramp-up and drain are included",
    )
    assert headline([windows(one_after_another(4), 1)])[0] == "steady"
    assert headline([windows(one_after_another(4), 1), result])[0] == "whole", "every repeat needs one"
    assert headline([windows(one_after_another(9), 2)]) == (
        "whole",
        "no steady window: the requests in flight never reached the target",
    )


def test_a_slot_may_take_five_percent_to_send_again_and_not_more() -> None:
    (quick, slow) = (windows(one_after_another(6, gap_ms=gap_ms), 1)["steady"] for gap_ms in (5, 6))
    assert quick.waves == 5
    assert quick.output_tokens_per_s == pytest.approx(1e3 * 10 / 105, rel=0.01)
    assert slow.waves == 1


def test_warm_up_does_not_count_in_the_whole_window() -> None:
    """A response that started before the window would count with the work before it."""
    warm = timed(0, 0, [10.0 * each for each in range(1, 101)], phase="warmup")
    measured = [timed(1, at, [at + 10 * each for each in range(1, 101)]) for at in (500, 1500)]
    for name in ("whole", "active"):
        window = windows([warm, *measured], 2)[name]
        assert (window.duration_s, window.input_tokens, window.output_tokens, window.requests) == (2.0, 2, 200, 2)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(("concurrency", "requests"), [(4, 8), (16, 32), (16, 48), (64, 192)])
def test_the_whole_window_never_shows_more_than_the_server_can_do(
    concurrency: int, requests: int, streamed: bool
) -> None:
    """The last warm-up responses end just after the first measured request was sent."""
    engine = Engine(prefill_ms=0.0)
    planned = level(concurrency, requests)
    planned = replace(planned, measured=planned.measured[:requests])
    most = engine.tokens_per_s(concurrency, 128)
    result = windows(engine.run(planned, lambda number: 127 + number % 2, streamed=streamed), concurrency)
    for window in (result["whole"], result["active"]):
        assert window.output_tokens_per_s <= most
        assert window.requests_per_s <= most / 127
        assert window.input_tokens_per_s <= most / 127


def test_the_whole_window_of_an_open_loop_counts_the_measured_requests() -> None:
    """10 requests a second, a second each: warm-up responses that end in the window were sent before it."""
    starts = [100.0 * number for number in range(20)]
    phases = ["warmup"] * 10 + ["measured"] * 10
    requests = [timed(0, at, [at + 1000], 100, phase=phase) for at, phase in zip(starts, phases, strict=True)]
    whole = windows(requests, None)["whole"]
    assert (whole.duration_s, whole.requests, whole.output_tokens) == (1.9, 10, 1000)


def test_the_whole_window_holds_the_last_text_of_a_request_that_failed() -> None:
    (good,) = one_after_another(1)
    whole = windows([good, timed(0, 100, [120.0, 150.0], error="gone")], 1)["whole"]
    assert (whole.duration_s, whole.requests) == (0.15, 1)


@pytest.mark.parametrize("concurrency", [1, None])
def test_the_steady_window_is_within_the_whole_one(concurrency: int | None) -> None:
    """The last requests fail without a text."""
    refused = [timed(0, at, [at + 90.0], error="gone") for at in (500.0, 600.0, 700.0)]
    for each in refused:
        each.record["events"] = []
    result = windows([*one_after_another(5), *refused], concurrency)
    whole, steady = result["whole"], result["steady"]
    assert (whole.duration_s, steady.duration_s) == (0.5, 0.4)


def test_tokens_after_the_last_text_arrive_with_it() -> None:
    (one,) = one_after_another(1)
    whole = windows([replace(one, output_tokens=12)], 1)["whole"]
    assert whole.output_tokens == 12


def test_at_full_concurrency() -> None:
    slots = [[(0, 10 * MS), (12 * MS, 30 * MS), (40 * MS, 100 * MS)]]
    ends = {"not_before_ns": 0, "not_after_ns": 200 * MS}
    assert at_full_concurrency(slots, 1, **ends) == (40 * MS, 100 * MS), "a gap of 2 ms is bridged, one of 10 is not"
    assert at_full_concurrency(slots, 1, not_before_ns=90 * MS, not_after_ns=95 * MS) == (90 * MS, 95 * MS)
    assert at_full_concurrency(slots, 2, **ends) is None
    # 19 of 20 are 95%.
    assert at_full_concurrency([[(0, 10)]] * 19, 20, **ends) == (0, 10)
    assert at_full_concurrency([[(0, 10)]] * 18, 20, **ends) is None


@pytest.mark.parametrize(("seconds", "expected"), [(2.0, "whole"), (10.0, "steady")])
def test_an_open_loop_counts_when_as_many_are_in_flight_as_later(seconds: float, expected: str) -> None:
    """10 requests a second, a second each with 100 tokens: 1,000 tokens a second from the second second on."""
    starts = [100.0 * number for number in range(round(10 * seconds) + 1)]
    result = windows([timed(0, at, [at + 10 * each for each in range(1, 101)]) for at in starts], None)
    steady, whole = result["steady"], result["whole"]
    assert steady.output_tokens_per_s == pytest.approx(1000, rel=0.01)
    assert whole.output_tokens_per_s < 950
    assert steady.waves == pytest.approx(seconds - 1)
    assert headline([result])[0] == expected


def test_three_waves_are_the_least() -> None:
    assert WAVES == 3
    assert [least_requests(4, warmup) for warmup in (0, 1, 4, 8)] == [16, 15, 12, 12]
