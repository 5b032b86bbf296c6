"""Windows of a repeat over which rates are computed, and how many requests a level needs for a steady one.

A wave is one request per slot. A steady window starts when every slot is on its second request or later, and ends when
the first slot runs out of requests, which excludes ramp-up and drain. Servers often process a wave in lockstep, so a
window that starts or ends within a wave contains too much or too little of its prefill. A steady rate is therefore the
mean over all windows that start in the first wave and end in the last one: what happens in the first wave counts with a
weight that rises from 0 to 1, in the last one with a weight that falls to 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Final

from trtllm_pipeline.base import Json
from trtllm_pipeline.measure.load.stats import BATCHES

if TYPE_CHECKING:
    from trtllm_pipeline.measure.load.requests import TimedRequest

WAVES: Final = 3
"""Minimum waves of a steady window for the headline. Rounded: slots that end together hand over after its end."""
HANDOVER_NS: Final = 5_000_000
HANDOVER_SHARE: Final = 0.05
"""Share of the next request's time."""
STEADY_SHARE: Final = 0.95
DEFAULT_REQUESTS_EACH: Final = 8
"""Requests per slot of a level without a given number: the first and the last are not in the steady window."""
DEFAULT_LEAST_REQUESTS: Final = 32
DEFAULT_BUDGET_S: Final = 300.0
Happened = tuple[int, int]
"""Time in ns, and the number of things that happened then."""


def levels_up_to(batch_size: int) -> tuple[int, ...]:
    """Default concurrencies for a server that processes at most `batch_size` requests at a time: 1, 4, 16 ... `batch_size`."""
    levels, level = [], 1
    while level < batch_size:
        levels.append(level)
        level *= 4
    return (*levels, batch_size)


def requests_of(requests: int | None, concurrency: int | None, warmup: int | None = None, turns: int = 1) -> int:
    """Measured requests of a level: the given number or the default; for a closed loop at least `least_requests`.

    `concurrency` is None for an open loop. `warmup` None: two for each in flight.
    """
    wanted = requests
    if wanted is None:
        wanted = max(DEFAULT_LEAST_REQUESTS, DEFAULT_REQUESTS_EACH * (concurrency or 0))
    if concurrency is None:
        return wanted
    return max(wanted, least_requests(concurrency, 2 * concurrency if warmup is None else warmup, turns))


def level_budget(budget_s: float | None, requests: int | None) -> float | None:
    """Time limit of a level: the given one or the default. None for no limit."""
    return DEFAULT_BUDGET_S if budget_s is None and requests is None else budget_s


def least_requests(concurrency: int, warmup: int, turns: int = 1) -> int:
    """Measured requests of a closed loop whose steady window has WAVES waves.

    The first request of each slot is ramp-up. It is a measured one if the warmup has fewer conversations than slots.
    """
    empty_slots = max(0, concurrency - math.ceil(warmup / turns))
    return WAVES * concurrency + empty_slots * turns


@dataclass(frozen=True, slots=True)
class Window:
    """A time span of a repeat, with its totals."""

    duration_s: float
    input_tokens: int | None
    output_tokens: int
    requests: int
    input_tokens_per_s: float | None
    output_tokens_per_s: float
    requests_per_s: float
    waves: float | None = None
    """Only for a steady window."""

    def to_json(self) -> dict[str, Json]:
        """As in perf.json. Fields that do not apply are left out."""
        return {name: value for name, value in asdict(self).items() if name != "waves" or value is not None}


@dataclass(frozen=True, slots=True)
class Span:
    """Start and end of a window, and how its rates are computed."""

    start_ns: int
    end_ns: int
    idle_ns: int = 0
    """Part of it that does not count."""
    edge_ns: float = 0.0
    """Length of the parts at its start and end that have less weight in a rate."""
    waves: float | None = None
    with_warmup: bool = False
    """True if warmup responses count. From the first measured request, also what arrives of them before it would."""

    @property
    def duration_ns(self) -> int:
        """Time that counts."""
        return self.end_ns - self.start_ns - self.idle_ns

    def answered(self, requests: Iterable[TimedRequest]) -> list[TimedRequest]:
        """The successful requests that count in it."""
        return [each for each in requests if each.answered and (each.measured or self.with_warmup)]

    def rate(self, happened: Iterable[Happened]) -> float:
        """Events per second."""
        counted_ns = self.duration_ns - self.edge_ns
        total = math.fsum(number * self._weight(time_ns) for time_ns, number in happened)
        return round(total * 1e9 / counted_ns, 3) if counted_ns > 0 else 0.0

    def batches(self, happened: Iterable[Happened], number: int) -> list[float]:
        """Rates per second in `number` parts of equal length. Idle time counts."""
        length_ns = (self.end_ns - self.start_ns) / number
        totals = [0] * number
        for time_ns, count in happened:
            if self._holds(time_ns):
                totals[min(int((time_ns - self.start_ns) / length_ns), number - 1)] += count
        return [total * 1e9 / length_ns for total in totals]

    def parts(self, answered: int, concurrency: int | None) -> int:
        """Number of equal parts to compare with each other: at most BATCHES. A server may process a wave in step, so parts
        shorter than a wave differ by what it does then.
        """
        waves = answered / (concurrency or answered or 1) if self.waves is None else self.waves
        return min(BATCHES, max(1, int(waves)))

    def window(self, requests: Iterable[TimedRequest]) -> Window:
        """Totals in it: each token counts at its own time."""
        good = self.answered(requests)
        prefilled = [request for request in good if self._holds(request.times_ns[0])]
        known = [(each.times_ns[0], count) for each in prefilled if (count := each.input_tokens) is not None]
        tokens = [each for request in good for each in written(request)]
        ended = [(request.times_ns[-1], 1) for request in good]
        all_known = len(known) == len(prefilled)
        return Window(
            duration_s=round(self.duration_ns / 1e9, 6),
            input_tokens=self._sum(known) if all_known else None,
            output_tokens=self._sum(tokens),
            requests=self._sum(ended),
            input_tokens_per_s=self.rate(known) if all_known else None,
            output_tokens_per_s=self.rate(tokens),
            requests_per_s=self.rate(ended),
            waves=None if self.waves is None else round(self.waves, 3),
        )

    def _holds(self, time_ns: int) -> bool:
        return self.start_ns < time_ns <= self.end_ns

    def _weight(self, time_ns: int) -> float:
        if not self._holds(time_ns):
            return 0.0
        return min(1.0, min(time_ns - self.start_ns, self.end_ns - time_ns) / self.edge_ns) if self.edge_ns else 1.0

    def _sum(self, happened: Iterable[Happened]) -> int:
        return sum(number for time_ns, number in happened if self._holds(time_ns))


def written(request: TimedRequest) -> Iterator[Happened]:
    """Output tokens of a request. Tokens without text after the last event are added to it."""
    yield from zip(request.times_ns, request.tokens, strict=True)
    yield request.times_ns[-1], request.output_tokens - sum(request.tokens)


def spans(requests: Sequence[TimedRequest], concurrency: int | None) -> dict[str, Span | None]:
    """The windows of a repeat: "whole", "active" and "steady". A missing one is None.

    `requests` are all of the repeat, including warmup. `concurrency` is None for an open loop.
    """
    measured = [request for request in requests if request.measured]
    start_ns = min((request.sent_ns for request in measured), default=0)
    end_ns = max((request.times_ns[-1] for request in measured if request.times_ns), default=start_ns)
    idle_ns, until_ns = 0, start_ns
    for sent_ns, last_ns in sorted((request.sent_ns, request.record["end_ns"]) for request in measured):
        idle_ns += max(0, min(sent_ns, end_ns) - until_ns)
        until_ns = max(until_ns, last_ns)
    steady = None
    if measured:
        within = start_ns, end_ns
        steady = _open(requests, *within) if concurrency is None else _closed(requests, concurrency, *within)
    return {"whole": Span(start_ns, end_ns), "active": Span(start_ns, end_ns, idle_ns), "steady": steady}


def _closed(requests: Sequence[TimedRequest], concurrency: int, start_ns: int, end_ns: int) -> Span | None:
    """The time at full concurrency: every slot has sent a request before it, and has another one at its end."""
    sent = sorted(request.sent_ns for request in requests)
    if len(sent) <= concurrency:
        return None
    slots: dict[int, list[tuple[int, int]]] = {}
    for request in requests:
        slots.setdefault(request.record["slot"], []).append((request.sent_ns, request.record["end_ns"]))
    reached = at_full_concurrency(
        slots.values(),
        concurrency,
        not_before_ns=max(start_ns, sent[concurrency]),
        not_after_ns=min(end_ns, *(max(ended_ns for _, ended_ns in spans) for spans in slots.values())),
    )
    if reached is None:
        return None
    waves = sum(reached[0] <= sent_ns < reached[1] for sent_ns in sent) / concurrency
    edge_ns = (reached[1] - reached[0]) / max(waves, 2.0)
    return Span(*reached, edge_ns=edge_ns, waves=waves, with_warmup=True)


def at_full_concurrency(
    slots: Iterable[Iterable[tuple[int, int]]], concurrency: int, *, not_before_ns: int, not_after_ns: int
) -> tuple[int, int] | None:
    """Longest time in which at least 95% of `concurrency` slots were busy, as (start, end) in ns. None without one.

    `slots` gives each slot's (sent, ended) times in order. The short time between two requests of a slot counts as
    busy, or every request would end the window.
    """
    changes: list[tuple[int, int]] = []
    for spans in slots:
        busy: list[list[int]] = []
        for start_ns, end_ns in spans:
            if busy and start_ns - busy[-1][1] <= max(HANDOVER_NS, HANDOVER_SHARE * (end_ns - start_ns)):
                busy[-1][1] = end_ns
            else:
                busy.append([start_ns, end_ns])
        for span in busy:
            start_ns, end_ns = (min(max(each, not_before_ns), not_after_ns) for each in span)
            changes += [(start_ns, 1), (end_ns, -1)]
    wanted = math.ceil(STEADY_SHARE * concurrency)
    best: tuple[int, int] | None = None
    level, since_ns = 0, 0
    for now_ns, change in sorted(changes):
        before, level = level, level + change
        if before < wanted <= level:
            since_ns = now_ns
        elif level < wanted <= before and (best is None or now_ns - since_ns > best[1] - best[0]):
            best = (since_ns, now_ns)
    return best if best is not None and best[1] > best[0] else None


def _open(requests: Sequence[TimedRequest], start_ns: int, end_ns: int) -> Span | None:
    """From first to last measured send of an open loop, without the first request's time, when fewer are in flight."""
    times_ns = [request.times_ns[-1] - request.sent_ns for request in requests if request.answered]
    if not times_ns:
        return None
    start_ns = max(start_ns, min(request.sent_ns for request in requests) + round(fmean(times_ns)))
    end_ns = min(end_ns, max(request.sent_ns for request in requests if request.measured))
    if end_ns <= start_ns:
        return None
    return Span(start_ns, end_ns, waves=(end_ns - start_ns) / fmean(times_ns), with_warmup=True)


def headline(repeats: Sequence[Mapping[str, Window | None]]) -> tuple[str, str]:
    """The window used for the rates of a level, and why."""
    for windows in repeats:
        steady = windows["steady"]
        if steady is None:
            return "whole", "no steady window: the requests in flight never reached the target"
        if round(steady.waves or 0.0) < WAVES:
            return "whole", (
                f"the steady window of {steady.duration_s:.1f} s holds {steady.waves:.1f} waves of requests, fewer than "
                f"{WAVES}: ramp-up and drain are included"
            )
    return "steady", f"every repeat has a steady window of {WAVES} waves of requests or more"
