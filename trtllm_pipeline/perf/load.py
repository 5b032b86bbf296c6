"""Sends requests to a server and writes down what happened, nothing else: no tokenizing, no arithmetic.

Closed loop: a fixed number of requests in flight, the next sent when one ends. The first requests of a level are its
warm-up; the measured ones follow without draining, so the server never falls idle between them.

Event file (JSON Lines; times are CLOCK_MONOTONIC nanoseconds; written as requests end, so an interrupted run keeps
what it measured):

    {"type": "header", "schema": 1, "anchor": {"monotonic_ns", "unix_ns"}, "protocol", "model", "settings"}
    {"type": "prompt", "id", "text"}
    {"type": "server", "at": "start" | "end", "pid", "since", "ready"}
    {"type": "request", "concurrency", "repeat", "phase": "warmup" | "measured", "slot", "prompt", "max_tokens",
     "scheduled_ns", "sent_ns", "first_byte_ns", "events": [[time, new text, tokens so far], ...], "output_tokens",
     "end_ns", "error"}
    {"type": "client", "concurrency", "repeat", "wall_ns", "cpu_ns", "lag_ns": [...]}

Tokens are the server's own count, null where it sends none; `output_tokens` is the whole answer's. Files written before
there were counts have neither; they are read all the same.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, islice
from typing import IO, Final

from trtllm_pipeline.perf.prompts import Prompt
from trtllm_pipeline.serving.client import Client, Generation, Lane

SCHEMA: Final = 1
LAG_PROBE_S: Final = 0.01
"""How often the event loop is asked how late it is."""


@dataclass(frozen=True, slots=True)
class Level:
    """One concurrency, measured once."""

    concurrency: int
    repeat: int
    warmup: tuple[Prompt, ...]
    measured: tuple[Prompt, ...]


def split(prompts: Sequence[Prompt]) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    """(warm-up, measured) prompts: every fourth and the rest, so that both have the same lengths and share nothing.

    A single prompt is in both; the analysis says so.
    """
    if len(prompts) == 1:
        return tuple(prompts), tuple(prompts)
    warmup = tuple(prompts[3::4]) or tuple(prompts[-1:])
    return warmup, tuple(prompt for prompt in prompts if prompt not in warmup)


def levels(
    prompts: Sequence[Prompt], concurrencies: Sequence[int], *, requests: int, warmup_requests: int, repeats: int
) -> list[Level]:
    """The levels to measure, repeats interleaved: drift of the machine then hits every level alike.

    A level has `requests` requests, but never fewer than two for each one in flight; prompts repeat when they run out.
    """
    warmup, measured = split(prompts)
    return [
        Level(
            concurrency,
            repeat,
            tuple(islice(cycle(warmup), warmup_requests)),
            tuple(islice(cycle(measured), max(requests, 2 * concurrency))),
        )
        for repeat in range(repeats)
        for concurrency in concurrencies
    ]


class EventFile:
    """Appends records to an event file, each on disk before the next request of its slot is sent."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def header(self, *, protocol: str, model: str, settings: dict[str, object]) -> None:
        """First record: what was asked, and one wall-clock time to anchor the monotonic ones."""
        anchor = {"monotonic_ns": time.monotonic_ns(), "unix_ns": time.time_ns()}
        self.write("header", schema=SCHEMA, anchor=anchor, protocol=protocol, model=model, settings=settings)

    def write(self, kind: str, **values: object) -> None:
        """One record of type `kind`."""
        self._file.write(json.dumps({"type": kind, **values}, ensure_ascii=False) + "\n")
        self._file.flush()


async def closed_loop(
    client: Client,
    level: Level,
    generation: Callable[[Prompt, int], Generation],
    events: EventFile,
    done: Callable[[], None],
) -> None:
    """Run one level. `generation` makes the request for a prompt and its running number; `done` is called after each."""
    planned = enumerate((*level.warmup, *level.measured))
    lanes = [client.lane() for _ in range(level.concurrency)]
    key = {"concurrency": level.concurrency, "repeat": level.repeat}
    lag_ns: list[int] = []
    # A collection of everything imported so far stalls the loop for tens of milliseconds.
    gc.collect()
    gc.freeze()
    probe = asyncio.create_task(_probe(lag_ns))
    wall_ns, cpu_ns = time.monotonic_ns(), time.process_time_ns()
    try:
        await asyncio.gather(
            *(_slot(slot, lane, level, planned, generation, events, done) for slot, lane in enumerate(lanes))
        )
        wall_ns, cpu_ns = time.monotonic_ns() - wall_ns, time.process_time_ns() - cpu_ns
    finally:
        probe.cancel()
        with suppress(asyncio.CancelledError):
            await probe
        gc.unfreeze()
        for lane in lanes:
            await lane.close()
    events.write("client", **key, wall_ns=wall_ns, cpu_ns=cpu_ns, lag_ns=lag_ns)


async def _slot(
    slot: int,
    lane: Lane,
    level: Level,
    planned: Iterator[tuple[int, Prompt]],
    generation: Callable[[Prompt, int], Generation],
    events: EventFile,
    done: Callable[[], None],
) -> None:
    """One user: takes the next request as soon as the last one has ended."""
    for number, prompt in planned:
        scheduled_ns = time.monotonic_ns()
        request = generation(prompt, number)
        answer = await lane.generate(request)
        events.write(
            "request",
            concurrency=level.concurrency,
            repeat=level.repeat,
            phase="warmup" if number < len(level.warmup) else "measured",
            slot=slot,
            prompt=prompt.id,
            max_tokens=request.max_tokens,
            scheduled_ns=scheduled_ns,
            sent_ns=answer.sent_ns,
            first_byte_ns=answer.first_byte_ns,
            events=answer.events,
            output_tokens=answer.output_tokens,
            end_ns=answer.end_ns,
            error=answer.error,
        )
        done()


async def _probe(lag_ns: list[int]) -> None:
    """How late the event loop gives control back, again and again."""
    while True:
        due_ns = time.monotonic_ns() + int(LAG_PROBE_S * 1e9)
        await asyncio.sleep(LAG_PROBE_S)
        lag_ns.append(max(0, time.monotonic_ns() - due_ns))
