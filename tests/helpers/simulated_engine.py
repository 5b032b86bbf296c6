"""A closed loop against an engine on a simulated clock, whose throughput at full concurrency is known."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trtllm_pipeline.measure.load.events import EventRecord
from trtllm_pipeline.measure.load.load import Level
from trtllm_pipeline.measure.load.requests import TimedRequest

MS = 1_000_000


@dataclass(frozen=True)
class Engine:
    """Batches in steps: each running request gets one token a step. A request that arrives waits for the next step."""

    step_ms: float = 4.7
    per_request_ms: float = 0.02
    """Added to a step by each request in it."""
    prefill_ms: float = 27.0
    """Added to the step in which a request starts."""

    def tokens_per_s(self, concurrency: int, tokens: int) -> float:
        """Throughput when all requests have as many tokens: all start together, so no request waits for a step."""
        wave_ms = tokens * (self.step_ms + self.per_request_ms * concurrency) + concurrency * self.prefill_ms
        return 1e3 * concurrency * tokens / wave_ms

    def run(self, level: Level, tokens: Callable[[int], int], *, streamed: bool = True) -> list[TimedRequest]:
        """All requests of a level; `tokens` gives the length of each by its number."""
        assert level.concurrency is not None
        idle = [(0.0, slot) for slot in range(level.concurrency)]
        left = iter(range(len(level.planned)))
        running: list[_Running] = []
        done: list[TimedRequest] = []
        now_ms = 0.0
        while True:
            started = 0
            while idle and idle[0][0] <= now_ms and (number := next(left, None)) is not None:
                sent_ms, slot = heapq.heappop(idle)
                phase = "warmup" if number < len(level.warmup) else "measured"
                running.append(_Running(slot, sent_ms, phase, tokens(number)))
                started += 1
            if not running:
                return done
            now_ms += self.step_ms + self.per_request_ms * len(running) + self.prefill_ms * started
            for each in list(running):
                each.times_ms.append(now_ms)
                if len(each.times_ms) == each.tokens:
                    running.remove(each)
                    heapq.heappush(idle, (now_ms, each.slot))
                    arrivals, count = (each.times_ms, None) if streamed else ([now_ms], each.tokens)
                    done.append(timed(each.slot, each.sent_ms, arrivals, count, phase=each.phase))


@dataclass(eq=False)
class _Running:
    """A request in the batch."""

    slot: int
    sent_ms: float
    phase: str
    tokens: int
    times_ms: list[float] = field(default_factory=list)


def timed(
    slot: int, sent_ms: float, times_ms: Sequence[float], tokens: int | None = None, **changes: Any
) -> TimedRequest:
    """A request that ended well. `tokens` None: one with each event; else all with the one event."""
    events = [EventRecord(round(at_ms * MS), " a") for at_ms in times_ms]
    times = {"sent_ns": round(sent_ms * MS), "scheduled_ns": round(sent_ms * MS), "end_ns": events[-1].time_ns}
    record: Any = {"slot": slot, "phase": "measured", "error": None, **times, "events": events, **changes}
    counts = (1,) * len(events) if tokens is None else (tokens,)
    return TimedRequest(record, "", 1, counts, sum(counts), sum(counts))
