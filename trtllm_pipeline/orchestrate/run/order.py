"""Simulated schedules: the duration of a plan, and a task order that shortens it.

Longest path first is a good rule, not the best one: with gangs and exclusive measurements, other orders often end
sooner. A simulation takes milliseconds, so many are tried with randomly changed paths, and the best is kept (random
sampling of priority rules: R. Kolisch, S. Hartmann, "Heuristic algorithms for solving the resource-constrained
project scheduling problem", 1999).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import Final

from trtllm_pipeline.base import Exclusive, Scope, StageRunId
from trtllm_pipeline.orchestrate.run.scheduler import (
    Capacity,
    Event,
    Finished,
    Scheduler,
    ServiceEnded,
    ServiceReady,
    Start,
    Task,
)

_TRIES: Final = 300
_TASKS: Final = 20_000
"""Maximum simulated tasks over all tries: half a second. A plan with over a tenth of them gets too few tries to matter."""
_WORTH_S: Final = 300.0
"""For shorter plans, the search costs more than it saves."""
_NEAR: Final = 1.01
"""The search stops within this factor of the lower bound."""
FIRST: Final = 1e6
"""A factor that puts a path before all others."""


def play(
    tasks: Sequence[Task],
    scheduler: Scheduler,
    takes: Mapping[StageRunId, float] | None = None,
) -> float:
    """Return the wall-clock seconds of these tasks under their new scheduler, if none fails.

    Each takes its expected time, or its time in `takes`.
    """
    known = {task.id: task for task in tasks}
    now = 0.0
    due: list[tuple[float, int, Event]] = []
    events: list[Event] = []
    number = 0
    while True:
        for instruction in scheduler.advance(now, *events):
            event: Event
            if isinstance(instruction, Start):
                is_service = known[instruction.id].scope is Scope.SERVICE
                event = (ServiceReady if is_service else Finished)(instruction.id)
                wait = known[instruction.id].expected_s if takes is None else takes[instruction.id]
            else:  # no task fails here, so this stops a service
                event, wait = ServiceEnded(instruction.id), 0.0
            number += 1
            heappush(due, (now + wait, number, event))
        if not due:
            return now
        wake_at = scheduler.wake_at
        now, events = min(due[0][0], math.inf if wake_at is None else wake_at), []
        while due and due[0][0] == now:
            events.append(heappop(due)[2])


def favourable(tasks: Sequence[Task], on: Sequence[Capacity]) -> Mapping[StageRunId, float]:
    """Return factors for task paths that shorten the run. Empty if none were found or the search was skipped.

    The search needs several GPUs and a plan that is long but not too large. It is deterministic.
    """
    if sum(len(node.gpus) for node in on) < 2 or not 0 < len(tasks) <= _TASKS // 10:
        return {}
    scheduler = Scheduler(tasks, *on)
    least_s = scheduler.least_s
    shortest_s = play(tasks, scheduler)
    if shortest_s < _WORTH_S:
        return {}
    best: Mapping[StageRunId, float] = {}
    for favour in _changes(tasks, min(_TRIES, _TASKS // len(tasks))):
        if shortest_s <= _NEAR * least_s:
            break
        took_s = play(tasks, Scheduler(tasks, *on, favour=favour))
        if took_s < shortest_s:
            best, shortest_s = favour, took_s
    return best


def _changes(tasks: Sequence[Task], number: int) -> Iterator[Mapping[StageRunId, float]]:
    """Yield random factors, from small changes to any order; half of them put shared measurements last."""
    chance = random.Random(0)  # noqa: S311 - deterministic
    outer = [task for task in tasks if task.service is None]
    for _ in range(number):
        spread, work_first = chance.choice((0.1, 0.3, 0.6, 1.0)), chance.random() < 0.5
        yield {
            task.id: (FIRST if work_first and task.resources.exclusive is not Exclusive.GPU else 1.0)
            * chance.lognormvariate(0.0, spread)
            for task in outer
        }
