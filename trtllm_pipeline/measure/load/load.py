"""The load client: sends requests to a server and records times and outputs, without tokenizing or statistics.

Closed loop: a fixed number of requests in flight; the next is sent when one ends. Open loop: requests at times drawn in
advance, independent of the server. How late each request was sent is recorded. The first requests of a level are its
warmup. The measured ones follow without draining, so the server is never idle in between.

Event file: JSON Lines, the records of `measure/load/events.py`, described in docs/reference/formats.md. Times are
CLOCK_MONOTONIC nanoseconds. Records are written as requests end, so an interrupted run keeps its measurements. Several
processes append to the file, each record in one write.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Literal

from trtllm_pipeline.base import FailureClass, StageError
from trtllm_pipeline.measure.client.session import Answer, GenerationRequest, Session
from trtllm_pipeline.measure.load.prompts import Prompt, conversations, opened, with_text
from trtllm_pipeline.measure.load.windows import WAVES, level_budget, requests_of
from trtllm_pipeline.measure.load.workloads import MOST_MADE

if TYPE_CHECKING:
    from typing_extensions import Self

    from trtllm_pipeline.measure.load.target import AnyClient, Target

SCHEMA: Final = 1
LAG_PROBE_S: Final = 0.01
"""Interval of the event loop's lag samples."""
_SPIN_S: Final = 0.0011
"""Resolution of an event loop's timers: whole milliseconds, rounded up. The rest is spent polling the clock."""
WARMUP_REQUESTS: Final = 4
"""Default warmup requests before an open loop."""
WARMUP_ID: Final = " (warm-up)"
"""Suffix of the ids of warmup prompts."""
MOST_WARMUP: Final = 8
"""Upper limit of a warmup that continues until TTFT is flat, as a multiple of its minimum."""
FLAT: Final = 0.05
"""Maximum remaining decrease of the median, as a share of it."""
_FLAT_WINDOW: Final = 8
SATURATED_S: Final = 10.0
"""Minimum measurement of a server that has fallen behind."""
MOST_PLANNED: Final = 1_000_000
"""Maximum requests at a rate in a search: they are planned before they are sent."""
_WARM_LANES: Final = 128
_OBSERVED: Final = tuple(each.name for each in fields(Answer))

Distribution = Literal["constant", "poisson", "gamma"]


@dataclass(frozen=True, slots=True)
class Level:
    """One concurrency or request rate, measured once."""

    concurrency: int | None
    repeat: int
    warmup: tuple[Prompt, ...]
    measured: tuple[Prompt, ...]
    request_rate: float | None = None
    """Open loop: mean requests per second."""
    at_s: tuple[float, ...] = ()
    """Open loop: when each request is due, in seconds from the start. A later turn is due when the previous one has ended."""
    seconds: float | None = None
    """Closed loop: measure for this time, cycling through the prompts. None: send each once. See `openings`."""
    least_warmup: int | None = None
    """Requests after which the warmup ends once the time to first token is flat. None: it sends all of its requests."""
    max_in_flight: int | None = None
    """Open loop: due requests wait while this many are in flight."""
    turn_delay_s: float = 0.0
    """Delay between a response and the next turn of its conversation."""
    budget_s: float | None = None
    """No measured conversation starts later than this after the first one. None: no limit."""
    probes: bool = False
    """Open loop: a rate that a search tries, not a requested one."""
    openings: tuple[str, ...] = ()
    """Words that replace the first words of each conversation, in sending order. "" keeps the original."""
    trace_speed: float | None = None
    """Open loop: requests are due at their own times, sped up by this factor."""

    @property
    def planned(self) -> tuple[Prompt, ...]:
        """All prompts in sending order."""
        return (*self.warmup, *self.measured)

    @property
    def key(self) -> dict[str, Any]:
        """The fields by which its records name their level and repeat."""
        return {"concurrency": self.concurrency, "request_rate": self.request_rate, "repeat": self.repeat}


def _of_one_process() -> Any:
    """What a `multiprocessing.Value` is for several processes."""
    return SimpleNamespace(value=0, get_lock=nullcontext)


@dataclass(frozen=True, slots=True)
class Share:
    """One process's part of a level, and the state that all processes of the level share."""

    worker: int = 0
    workers: int = 1
    number: Any = field(default_factory=_of_one_process)
    """Number of a closed loop's next conversation."""
    warm: Any = field(default_factory=_of_one_process)
    """Number of processes that find the server warm."""

    def slots(self, total: int) -> range:
        """The process's slots out of `total`."""
        return range(self.worker, total, self.workers)

    def next(self) -> int:
        """The number of a closed loop's next conversation."""
        with self.number.get_lock():
            number: int = self.number.value
            self.number.value = number + 1
        return number

    def skip_to(self, number: int) -> None:
        """Skip the numbers below."""
        with self.number.get_lock():
            self.number.value = max(self.number.value, number)

    def one_is_warm(self) -> None:
        """Count one more process that finds the server warm."""
        with self.warm.get_lock():
            self.warm.value += 1

    @property
    def all_warm(self) -> bool:
        """True once all processes are warm, so that none measures while another warms up."""
        return bool(self.warm.value >= self.workers)


def warmup_prompt(prompt: Prompt) -> Prompt:
    """The warmup prompt for `prompt`: the same without its first word. It is about as long, never longer, and leaves
    nothing in a cache that `prompt` could reuse. A single word is sent unchanged, which the analysis reports.
    """
    shorter = with_text(prompt, _without_first_word)
    same = shorter.messages == prompt.messages if prompt.messages else shorter.text == prompt.text
    return prompt if same else replace(shorter, id=f"{prompt.id}{WARMUP_ID}", input_tokens=None)


def _without_first_word(text: str, shared: int) -> str:
    # Keep the leading space, so that the rest has the same tokens as before.
    _, space, rest = text[shared:].lstrip().partition(" ")
    return f"{text[:shared]}{space}{rest}" if rest.strip() else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The levels to measure: closed loops by concurrency, then open loops by request rate."""

    concurrency: tuple[int, ...] = ()
    request_rate: tuple[float, ...] = ()
    requests: int | None = None
    """Requests per level. A closed loop adds any that its window needs for WAVES waves. None: see `requests_of`."""
    warmup_requests: int | None = None
    """Warmup requests before each level. None: two for each request in flight, and WARMUP_REQUESTS before an open loop."""
    repeats: int = 1
    distribution: Distribution = "poisson"
    burstiness: float = 1.0
    seed: int = 0
    """Determines the times of an open loop. They differ between repeats."""
    until_flat: bool = False
    """The warmup continues until the time to first token is flat, up to MOST_WARMUP times as long."""
    interval_s: float | None = None
    """Measure each level for this time instead of `requests`."""
    max_in_flight: int | None = None
    """Limit of requests in flight in an open loop."""
    turn_delay_s: float = 0.0
    budget_s: float | None = None
    """Time after which a level starts no more requests. None: the default, see `level_budget`."""
    trace_speed: tuple[float, ...] = ()
    """Replay prompts at their own times, sped up by these factors."""

    def levels(self, prompts: Sequence[Prompt]) -> list[Level]:
        """The levels in measuring order, with repeats interleaved, so that drift affects all levels equally."""
        none = replace(self, concurrency=(), request_rate=(), trace_speed=())
        parts = (
            replace(none, concurrency=self.concurrency),
            replace(none, request_rate=self.request_rate),
            replace(none, trace_speed=self.trace_speed),
        )
        return [level for part in parts for repeat in range(self.repeats) for level in part.turn(prompts, repeat)]

    def most_requests(self, turns: int = 1) -> int:
        """Number of requests in all repeats of the largest closed loop, or else of a rate."""
        levels = self.concurrency or (None,)
        return self.repeats * max(requests_of(self.requests, each, self.warmup_requests, turns) for each in levels)

    def turn(self, prompts: Sequence[Prompt], repeat: int) -> list[Level]:
        return [
            *(self.level(prompts, repeat, concurrency, None) for concurrency in self.concurrency),
            *(self.level(prompts, repeat, None, rate) for rate in self.request_rate),
            *(self.replay(prompts, repeat, speed) for speed in self.trace_speed),
        ]

    def needed(self, prompts: Sequence[Prompt], turns: int = 1, *, searches: bool = False) -> tuple[Prompt, ...]:
        """The first prompts of a trace, as many as its levels send. If that depends on the server, as in a search: all that
        have a text, or else MOST_MADE or more, which are sent again.
        """
        by_server = searches or (self.interval_s is not None and bool(self.concurrency or self.request_rate))
        if by_server and not any(prompt.blocks is not None for prompt in prompts):
            return tuple(prompts)
        least = self.most_requests(turns) if by_server or self.concurrency or self.request_rate else 0
        if by_server:
            least = max(least, MOST_MADE)
        most = max((len(self._replayed(prompts, speed)) for speed in self.trace_speed), default=0)
        return _taken(conversations(prompts), 0, min(len(prompts), max(least, most)))

    def _replayed(self, prompts: Sequence[Prompt], speed: float) -> tuple[Prompt, ...]:
        """The prompts of a trace whose conversations start within a level's number of requests and time limit."""
        limit_s = level_budget(self.budget_s, self.requests) if self.interval_s is None else self.interval_s
        requests = math.inf if self.requests is None or self.interval_s is not None else self.requests
        taken: list[Prompt] = []
        for talk in conversations(prompts):
            late = limit_s is not None and _at_s(talk[0]) - _at_s(prompts[0]) >= limit_s * speed
            if late or len(taken) >= requests:
                break
            taken += talk
        return tuple(taken)

    def replay(self, prompts: Sequence[Prompt], repeat: int, speed: float) -> Level:
        """One repeat of a trace, from its start. Its rate is the mean of the times at which requests are due."""
        measured = self._replayed(prompts, speed)
        starts_s = [_at_s(talk[0]) - _at_s(measured[0]) for talk in conversations(measured)]
        mean = (len(starts_s) - 1) / starts_s[-1] if starts_s[-1] else len(starts_s)  # all at once
        rate = float(f"{speed * mean:.4g}")
        while rate in self.request_rate:
            rate *= 1.001  # a separate level
        opened = replace(self, interval_s=None, requests=len(measured), distribution="constant")
        level = opened.level(prompts, repeat, None, rate)
        begin_s = len(level.warmup) / rate
        at_s = [
            begin_s + (_at_s(talk[0]) - _at_s(measured[0])) / speed for talk in conversations(measured) for _ in talk
        ]
        return replace(
            level,
            measured=measured,
            at_s=(*level.at_s[: len(level.warmup)], *at_s),
            trace_speed=speed,
            budget_s=level_budget(self.budget_s, self.requests) if self.interval_s is None else None,
        )

    def level(
        self, prompts: Sequence[Prompt], repeat: int, concurrency: int | None, request_rate: float | None
    ) -> Level:
        requests = requests_of(self.requests, concurrency, self.warmup_requests)
        if self.interval_s is not None and request_rate is not None:
            requests = min(max(1, round(self.interval_s * request_rate)), MOST_PLANNED)
        least = self.warmup_requests
        if least is None:
            least = WARMUP_REQUESTS if concurrency is None else 2 * concurrency
        talks = conversations(prompts)
        cold = _taken(talks, 0, least)

        def taken(first: int) -> tuple[Prompt, ...]:
            if concurrency is None:
                return _taken(talks, first, requests)
            empty_slots = max(0, concurrency - len(conversations(cold)))
            return _taken(talks, first, requests, waves=WAVES * concurrency, after=empty_slots)

        # Each repeat continues after the previous one's last prompt, so that all prompts are measured equally often.
        first = repeat * len(conversations(taken(0))) % len(talks)
        warmup = tuple(map(warmup_prompt, _taken(talks, 0, MOST_WARMUP * least) if self.until_flat else cold))
        measured = taken(first)
        at_s: tuple[float, ...] = ()
        if request_rate is not None:
            total, seed = len(warmup) + len(measured), self.seed + repeat
            at_s = schedule(total, request_rate, self.distribution, burstiness=self.burstiness, seed=seed)
        return Level(
            concurrency,
            repeat,
            warmup,
            measured,
            request_rate,
            at_s,
            self.interval_s if request_rate is None else None,
            least if self.until_flat else None,
            self.max_in_flight if request_rate is not None else None,
            self.turn_delay_s,
            budget_s=level_budget(self.budget_s, self.requests) if self.interval_s is None else None,
        )


def _taken(
    talks: Sequence[tuple[Prompt, ...]], first: int, requests: int, *, waves: int = 0, after: int = 0
) -> tuple[Prompt, ...]:
    """At least `requests` requests, `waves` of them after the first `after` conversations: whole ones, cycling."""
    prompts: list[Prompt] = []
    behind = 0
    for number, talk in enumerate(islice(cycle(talks), first, None)):
        if len(prompts) >= requests and behind >= waves:
            break
        prompts += talk
        behind += len(talk) if number >= after else 0
    return tuple(prompts)


def _at_s(prompt: Prompt) -> float:
    assert prompt.at_s is not None, "read with `timed`"
    return prompt.at_s


def schedule(
    count: int, rate: float, distribution: Distribution, *, burstiness: float = 1.0, seed: int = 0
) -> tuple[float, ...]:
    """`count` times in seconds, from 0, with 1/`rate` seconds between consecutive ones on average.

    constant: equal gaps. poisson: exponential gaps. gamma: gaps of shape `burstiness` (below 1 in bursts, 1 is poisson,
    above 1 more even), as vLLM's benchmark defines it.
    """
    draw = random.Random(seed)  # noqa: S311 - not a secret
    shape = 1.0 if distribution == "poisson" else burstiness
    gaps = (
        1 / rate if distribution == "constant" else draw.gammavariate(shape, 1 / (rate * shape)) for _ in range(count)
    )
    times, now_s = [], 0.0
    for gap_s in gaps:
        times.append(now_s)
        now_s += gap_s
    return tuple(times)


class EventFile:
    """Appends records to an event file, each on disk before the next request of its slot is sent."""

    def __init__(self, path: Path) -> None:
        # Unbuffered and appending: a record is one write, so that records of several processes do not mix.
        self._file = path.open("ab", buffering=0)
        self.path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    def header(self, target: Target, *, settings: Mapping[str, Any]) -> None:
        """First record: the requested load, and one wall-clock time to anchor the monotonic ones."""
        anchor = {"monotonic_ns": time.monotonic_ns(), "unix_ns": time.time_ns()}
        about = {"protocol": target.protocol, "model": target.model, "tls": target.tls}
        self.write("header", schema=SCHEMA, anchor=anchor, **about, settings=dict(settings))

    def write(self, kind: str, **values: object) -> None:
        """One record of type `kind`. Raises StageError when the disk is full."""
        data = json.dumps({"type": kind, **values}, ensure_ascii=False).encode() + b"\n"
        if self._file.write(data) != len(data):
            raise StageError(f"{self.path}: the disk is full", failure=FailureClass.USER)


class Flatness:
    """Detects when the time to first token has stopped falling: the medians of two consecutive windows are similar."""

    def __init__(self, least: int, window: int) -> None:
        self._least, self._window = least, max(_FLAT_WINDOW, window)
        self._ttft_ms: list[float] = []

    def add(self, ttft_ms: float | None) -> bool:
        """Record a request's TTFT, if it has one. Returns True when the warmup is over."""
        self._ttft_ms += [] if ttft_ms is None else [ttft_ms]
        if len(self._ttft_ms) < max(self._least, 2 * self._window):
            return False
        before, after = self._ttft_ms[-2 * self._window : -self._window], self._ttft_ms[-self._window :]
        return median(after) >= (1 - FLAT) * median(before)


async def run_level(
    client: AnyClient,
    level: Level,
    generation: Callable[[Prompt, int], GenerationRequest],
    events: EventFile,
    done: Callable[[], None],
    *,
    share: Share | None = None,
    begin: Callable[[], int] = time.monotonic_ns,
) -> None:
    """Run a process's share of one level. `generation` builds the request from a prompt and its number in the level.
    `done` is called after each request. `begin` is called when all sessions are connected, and returns the start time.
    """
    loop = _Loop(client, level, generation, events, done, share or Share())
    lag_ns: list[int] = []
    await loop.connect()
    # A collection of everything imported so far would stall the loop for tens of milliseconds.
    gc.collect()
    gc.freeze()
    start_ns = begin()
    probe = asyncio.create_task(_probe(lag_ns))
    wall_ns, cpu_ns = time.monotonic_ns(), time.process_time_ns()
    try:
        await (loop.closed() if level.request_rate is None else loop.open(start_ns))
    finally:
        wall_ns, cpu_ns = time.monotonic_ns() - wall_ns, time.process_time_ns() - cpu_ns
        probe.cancel()
        with suppress(asyncio.CancelledError):
            await probe
        gc.unfreeze()
        await asyncio.gather(*(session.close() for session in loop.sessions))
        events.write("client", **level.key, worker=loop.share.worker, wall_ns=wall_ns, cpu_ns=cpu_ns, lag_ns=lag_ns)


@dataclass
class _Loop:
    """One process's part of one level."""

    client: AnyClient
    level: Level
    generation: Callable[[Prompt, int], GenerationRequest]
    events: EventFile
    done: Callable[[], None]
    share: Share

    def __post_init__(self) -> None:
        level = self.level
        self.sessions: list[Session] = []
        self.planned = level.planned
        self.talks = [range(0)] * 0
        first = 0
        for talk in (*conversations(level.warmup), *conversations(level.measured)):
            self.talks.append(range(first, first + len(talk)))
            first += len(talk)
        self.warm_talks = sum(talk.start < len(level.warmup) for talk in self.talks)
        self.flatness: Flatness | None = None
        if level.least_warmup is not None:
            least = max(1, level.least_warmup // self.share.workers)
            self.flatness = Flatness(least, (level.concurrency or 0) // self.share.workers)
        if level.concurrency is None:
            assert level.request_rate is not None
            self.slots = range(min(_WARM_LANES, int(level.request_rate / self.share.workers) + 1))
        else:
            self.slots = self.share.slots(level.concurrency)

    async def connect(self) -> None:
        """Open every slot's session, a few at a time, to avoid overflowing a server's backlog."""
        self.sessions = [self.client.session() for _ in self.slots]
        for first in range(0, len(self.sessions), 32):
            await asyncio.gather(*(session.open() for session in self.sessions[first : first + 32]))

    async def closed(self) -> None:
        """Every slot starts the next conversation as soon as its last one has ended."""
        end_ns: int | None = None
        level = self.level
        limit_s = level.budget_s if level.seconds is None else level.seconds
        measured, unsent = len(self.talks) - self.warm_talks, 0

        async def user(slot: int, session: Session) -> None:
            nonlocal end_ns, unsent
            while True:
                number = sent = self.share.next()
                if level.seconds is None and number >= len(self.talks):
                    return
                if limit_s is not None and number >= self.warm_talks:
                    end_ns = end_ns or time.monotonic_ns() + int(limit_s * 1e9)
                    if time.monotonic_ns() >= end_ns:
                        if level.seconds is not None:
                            return
                        unsent += len(self.talks[number])
                        continue
                    number = self.warm_talks + (number - self.warm_talks) % measured
                await self._talk(self.talks[number], sent, slot, session, time.monotonic_ns())
                if self.share.all_warm:
                    self.share.skip_to(self.warm_talks)

        await asyncio.gather(*(user(slot, session) for slot, session in zip(self.slots, self.sessions, strict=True)))
        if unsent:
            self.events.write("over_budget", **level.key, worker=self.share.worker, requests=unsent)

    async def open(self, start_ns: int) -> None:
        """Start every conversation at its time, on a free session or else a new one."""
        free = list(range(len(self.sessions)))
        under_way: set[asyncio.Task[None]] = set()
        level, most = self.level, self.level.max_in_flight
        most = None if most is None else max(1, len(self.share.slots(most)))
        held_until_ns, numbers = 0, iter(self.share.slots(len(self.talks)))
        least_ns = start_ns + int(SATURATED_S * 1e9)

        async def send(number: int, due_ns: int, held_ns: int) -> None:
            if not free:
                free.append(len(self.sessions))
                self.sessions.append(self.client.session())
            slot = free.pop()
            await self._talk(self.talks[number], number, slot, self.sessions[slot], due_ns, held_ns)
            free.append(slot)

        for number in numbers:
            if self.share.all_warm and number < self.warm_talks:
                # The rest of the warmup is skipped, so later requests are due earlier.
                start_ns -= int((level.at_s[self._next(number)] - level.at_s[self.talks[number].start]) * 1e9)
                continue
            due_ns = start_ns + int(level.at_s[self.talks[number].start] * 1e9)
            limit_s = math.inf if level.budget_s is None else level.at_s[len(level.warmup)] + level.budget_s
            if due_ns < start_ns + limit_s * 1e9:
                await _until(due_ns)
                while most is not None and len(under_way) >= most:
                    await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                    held_until_ns = time.monotonic_ns()
            over_budget = max(due_ns, held_until_ns) >= start_ns + limit_s * 1e9
            if over_budget or held_until_ns > max(least_ns, start_ns + int(level.at_s[-1] * 1e9)):
                left = [number, *numbers]
                unsent = sum(len(self.talks[each]) for each in left if each >= self.warm_talks)
                kind = "over_budget" if over_budget else "unsent"
                self.events.write(kind, **level.key, worker=self.share.worker, requests=unsent)
                break
            task = asyncio.create_task(send(number, due_ns, max(0, held_until_ns - due_ns)))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        await asyncio.gather(*under_way)

    def _next(self, number: int) -> int:
        """The first request of this process's next conversation."""
        return self.talks[min(number + self.share.workers, len(self.talks) - 1)].start

    async def _talk(
        self, talk: range, sent: int, slot: int, session: Session, scheduled_ns: int, held_ns: int = 0
    ) -> None:
        """Send the turns of a conversation. A failed turn ends it."""
        opening = self.level.openings[sent] if sent < len(self.level.openings) else ""
        for number in talk:
            ok = await self._request(number, opening, slot, session, scheduled_ns, held_ns)
            if not ok:
                break
            if number + 1 < talk.stop:
                if self.level.turn_delay_s:
                    await asyncio.sleep(self.level.turn_delay_s)
                scheduled_ns, held_ns = time.monotonic_ns(), 0

    async def _request(
        self, number: int, opening: str, slot: int, session: Session, scheduled_ns: int, held_ns: int
    ) -> bool:
        """Send one request and record the result. Returns True if it succeeded."""
        prompt = self.planned[number]
        if opening:
            prompt = with_text(prompt, lambda text, shared: opened(text, shared, opening))
        request = self.generation(prompt, number)
        answer = await session.generate(request)
        record = {name: getattr(answer, name) for name in _OBSERVED}
        record["events"] = [event if event.reasoning else event[:3] for event in answer.events]
        warming = number < len(self.level.warmup)
        self.events.write(
            "request",
            **self.level.key,
            phase="warmup" if warming else "measured",
            worker=self.share.worker,
            slot=slot,
            prompt=prompt.id,
            **({"opening": opening} if opening else {}),
            max_tokens=request.max_tokens,
            scheduled_ns=scheduled_ns,
            **({"held_ns": held_ns} if held_ns else {}),
            **({"turn": prompt.turn} if prompt.turn > 1 else {}),
            **record,
        )
        self.done()
        if warming and self.flatness is not None:
            first_ms = (answer.events[0].time_ns - answer.sent_ns) / 1e6 if answer.events else None
            if self.flatness.add(first_ms):
                self.flatness = None
                self.share.one_is_warm()
        return answer.error is None


async def _until(due_ns: int) -> None:
    """Wait until CLOCK_MONOTONIC reaches `due_ns`."""
    wait_s = (due_ns - time.monotonic_ns()) / 1e9 - _SPIN_S
    if wait_s > 0:
        await asyncio.sleep(wait_s)
    while time.monotonic_ns() < due_ns:
        await asyncio.sleep(0)


async def _probe(lag_ns: list[int]) -> None:
    """Sample the delay of the event loop repeatedly."""
    while True:
        due_ns = time.monotonic_ns() + int(LAG_PROBE_S * 1e9)
        await asyncio.sleep(LAG_PROBE_S)
        lag_ns.append(max(0, time.monotonic_ns() - due_ns))
