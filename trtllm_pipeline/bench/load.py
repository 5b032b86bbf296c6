"""The load client: sends requests to a server and records what happens; no tokenizing, no arithmetic.

Closed loop: a fixed number of requests in flight, the next sent when one ends. Open loop: requests at times drawn
beforehand, whatever the server does; how late each was sent can be seen. The first requests of a level are its warm-up;
the measured ones follow without draining, so the server never falls idle between them.

Event file: JSON Lines, the records of `bench/events.py`; docs/formats.md describes them. Times are CLOCK_MONOTONIC
nanoseconds. Records are written as requests end, so an interrupted run keeps what it measured; several processes append
to it, each record in one write.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import count, cycle, islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal

from trtllm_pipeline.bench.prompts import Prompt
from trtllm_pipeline.client.session import Answer, GenerationRequest, Session
from trtllm_pipeline.errors import FailureClass, StageError

if TYPE_CHECKING:
    from typing_extensions import Self

    from trtllm_pipeline.bench.target import AnyClient, Target

SCHEMA: Final = 1
LAG_PROBE_S: Final = 0.01
"""How often the event loop is asked how late it is."""
_SPIN_S: Final = 0.0011
"""An event loop's timers are this coarse, since epoll counts whole milliseconds and Python rounds up: the rest of the way
to a scheduled time is waited by looking at the clock."""
WARMUP_REQUESTS: Final = 4
"""Before an open loop, where their number is not given."""
WARMUP_ID: Final = " (warm-up)"
"""Ends the ids of prompts that are made for the warm-up."""
_WARM_LANES: Final = 128
_OBSERVED: Final = tuple(field.name for field in fields(Answer))

Distribution = Literal["constant", "poisson", "gamma"]


@dataclass(frozen=True, slots=True)
class Level:
    """One concurrency or request rate, measured once."""

    concurrency: int | None
    repeat: int
    warmup: tuple[Prompt, ...]
    measured: tuple[Prompt, ...]
    request_rate: float | None = None
    """Open loop: requests a second on average."""
    at_s: tuple[float, ...] = ()
    """Open loop: when each request is due, in seconds from the start."""

    @property
    def planned(self) -> tuple[Prompt, ...]:
        """All prompts in the order they are sent."""
        return (*self.warmup, *self.measured)

    @property
    def key(self) -> dict[str, Any]:
        """The fields by which its records name their level and repeat."""
        return {"concurrency": self.concurrency, "request_rate": self.request_rate, "repeat": self.repeat}


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a level that one of several processes has."""

    worker: int = 0
    workers: int = 1

    def slots(self, total: int) -> range:
        """Which of `total` slots are its own."""
        return range(self.worker, total, self.workers)


def warmup_prompt(prompt: Prompt) -> Prompt:
    """What warms the server up for `prompt`: the same without its first word, so about as long, never longer, and nothing
    of it is in a cache when `prompt` is measured. A single word stays what it is; the analysis says so.
    """
    text, messages = _without_first_word(prompt.text), prompt.messages
    if messages:
        *before, last = messages
        content = last.get("content")
        shorter = _without_first_word_of(content)
        if shorter == content:
            return prompt
        messages = (*before, {**last, "content": shorter})
    return (
        prompt if text == prompt.text else replace(prompt, id=f"{prompt.id}{WARMUP_ID}", text=text, messages=messages)
    )


def _without_first_word_of(content: Any) -> Any:
    """A message's content without the first word of its first text."""
    if isinstance(content, str):
        return _without_first_word(content)
    if not isinstance(content, list) or not content or "text" not in content[0]:
        return content
    return [{**content[0], "text": _without_first_word(content[0]["text"])}, *content[1:]]


def _without_first_word(text: str) -> str:
    # With the space before: what stands behind it is then the same tokens as it was.
    _, space, rest = text.lstrip().partition(" ")
    return f"{space}{rest}" if rest.strip() else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The levels to measure: closed loops with so many requests in flight, then open loops of so many a second."""

    concurrency: tuple[int, ...] = ()
    request_rate: tuple[float, ...] = ()
    requests: int = 64
    """Of a level, but never fewer than two for each in flight."""
    warmup_requests: int | None = None
    """Before each level. None: two for each request in flight, and WARMUP_REQUESTS before an open loop."""
    repeats: int = 1
    distribution: Distribution = "poisson"
    burstiness: float = 1.0
    seed: int = 0
    """The same seed gives the same times of an open loop, for every repeat others."""

    def levels(self, prompts: Sequence[Prompt]) -> list[Level]:
        """The levels in the order they are measured, repeats interleaved: drift of the machine hits every level alike."""
        repeats = range(self.repeats)
        return [
            *(
                self._level(prompts, repeat, concurrency, None)
                for repeat in repeats
                for concurrency in self.concurrency
            ),
            *(self._level(prompts, repeat, None, rate) for repeat in repeats for rate in self.request_rate),
        ]

    def _level(
        self, prompts: Sequence[Prompt], repeat: int, concurrency: int | None, request_rate: float | None
    ) -> Level:
        requests = max(self.requests, 2 * (concurrency or 0))
        warmup_requests = self.warmup_requests
        if warmup_requests is None:
            warmup_requests = WARMUP_REQUESTS if concurrency is None else 2 * concurrency
        at_s: tuple[float, ...] = ()
        if request_rate is not None:
            total, seed = requests + warmup_requests, self.seed + repeat
            at_s = schedule(total, request_rate, self.distribution, burstiness=self.burstiness, seed=seed)
        # Each repeat goes on where the one before ended: all prompts are measured evenly.
        first = repeat * requests % len(prompts)
        return Level(
            concurrency,
            repeat,
            tuple(map(warmup_prompt, islice(cycle(prompts), warmup_requests))),
            tuple(islice(cycle(prompts), first, first + requests)),
            request_rate,
            at_s,
        )


def schedule(
    count: int, rate: float, distribution: Distribution, *, burstiness: float = 1.0, seed: int = 0
) -> tuple[float, ...]:
    """`count` times in seconds, from 0, with 1/`rate` seconds between neighbours on average.

    constant: exactly. poisson: exponential gaps. gamma: gaps of shape `burstiness` (below 1 in bursts, 1 is poisson,
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

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def header(self, target: Target, *, settings: Mapping[str, Any], self_test: dict[str, Any] | None = None) -> None:
        """First record: what was asked, and one wall-clock time to anchor the monotonic ones."""
        anchor = {"monotonic_ns": time.monotonic_ns(), "unix_ns": time.time_ns()}
        about = {"protocol": target.protocol, "model": target.model, "tls": target.tls}
        self.write("header", schema=SCHEMA, anchor=anchor, **about, settings=dict(settings), self_test=self_test)

    def write(self, kind: str, **values: object) -> None:
        """One record of type `kind`. Raises StageError when the disk is full."""
        data = json.dumps({"type": kind, **values}, ensure_ascii=False).encode() + b"\n"
        if self._file.write(data) != len(data):
            raise StageError(f"{self.path}: the disk is full", failure=FailureClass.USER)


Turns = Callable[[], int]
"""Number of the next request to send, one more with each call, over all processes."""


async def run_level(
    client: AnyClient,
    level: Level,
    generation: Callable[[Prompt, int], GenerationRequest],
    events: EventFile,
    done: Callable[[], None],
    *,
    share: Share = Share(),
    turns: Turns | None = None,
    begin: Callable[[], int] = time.monotonic_ns,
) -> None:
    """Run a process's share of one level. `generation` makes the request for a prompt and its number in the level;
    `done` is called after each. `begin` is called when everything is connected and gives the time of the start.
    """
    loop = _Loop(client, level, generation, events, done, share)
    lag_ns: list[int] = []
    await loop.connect()
    # A collection of everything imported so far stalls the loop for tens of milliseconds.
    gc.collect()
    gc.freeze()
    start_ns = begin()
    probe = asyncio.create_task(_probe(lag_ns))
    wall_ns, cpu_ns = time.monotonic_ns(), time.process_time_ns()
    try:
        await (loop.closed(turns or count().__next__) if level.request_rate is None else loop.open(start_ns))
    finally:
        wall_ns, cpu_ns = time.monotonic_ns() - wall_ns, time.process_time_ns() - cpu_ns
        probe.cancel()
        with suppress(asyncio.CancelledError):
            await probe
        gc.unfreeze()
        for session in loop.sessions:
            await session.close()
        events.write("client", **level.key, worker=share.worker, wall_ns=wall_ns, cpu_ns=cpu_ns, lag_ns=lag_ns)


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
        if level.concurrency is None:
            assert level.request_rate is not None
            self.slots = range(min(_WARM_LANES, int(level.request_rate / self.share.workers) + 1))
        else:
            self.slots = self.share.slots(level.concurrency)

    async def connect(self) -> None:
        """Open every slot's session, a few at a time, or a server's backlog would overflow."""
        self.sessions = [self.client.session() for _ in self.slots]
        for first in range(0, len(self.sessions), 32):
            await asyncio.gather(*(session.open() for session in self.sessions[first : first + 32]))

    async def closed(self, turns: Turns) -> None:
        """Every slot takes the next request as soon as its last one has ended."""

        async def user(slot: int, session: Session) -> None:
            while (number := turns()) < len(self.planned):
                await self._request(number, slot, session, time.monotonic_ns())

        await asyncio.gather(*(user(slot, session) for slot, session in zip(self.slots, self.sessions, strict=True)))

    async def open(self, start_ns: int) -> None:
        """Every request at its time, on a session that is free or else a new one."""
        free = list(range(len(self.sessions)))
        under_way: set[asyncio.Task[None]] = set()

        async def send(number: int, due_ns: int) -> None:
            if not free:
                free.append(len(self.sessions))
                self.sessions.append(self.client.session())
            slot = free.pop()
            await self._request(number, slot, self.sessions[slot], due_ns)
            free.append(slot)

        for number in self.share.slots(len(self.planned)):
            due_ns = start_ns + int(self.level.at_s[number] * 1e9)
            await _until(due_ns)
            task = asyncio.create_task(send(number, due_ns))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        await asyncio.gather(*under_way)

    async def _request(self, number: int, slot: int, session: Session, scheduled_ns: int) -> None:
        prompt = self.planned[number]
        request = self.generation(prompt, number)
        answer = await session.generate(request)
        record = {name: getattr(answer, name) for name in _OBSERVED}
        record["events"] = [event if event.reasoning else event[:3] for event in answer.events]
        self.events.write(
            "request",
            **self.level.key,
            phase="warmup" if number < len(self.level.warmup) else "measured",
            worker=self.share.worker,
            slot=slot,
            prompt=prompt.id,
            max_tokens=request.max_tokens,
            scheduled_ns=scheduled_ns,
            **record,
        )
        self.done()


async def _until(due_ns: int) -> None:
    """Wait until CLOCK_MONOTONIC says `due_ns`."""
    wait_s = (due_ns - time.monotonic_ns()) / 1e9 - _SPIN_S
    if wait_s > 0:
        await asyncio.sleep(wait_s)
    while time.monotonic_ns() < due_ns:
        await asyncio.sleep(0)


async def _probe(lag_ns: list[int]) -> None:
    """How late the event loop gives control back, again and again."""
    while True:
        due_ns = time.monotonic_ns() + int(LAG_PROBE_S * 1e9)
        await asyncio.sleep(LAG_PROBE_S)
        lag_ns.append(max(0, time.monotonic_ns() - due_ns))
