"""Simulated schedules: the duration of a plan, and a task order that shortens it.

Longest path first is a good rule, not the best one: with gangs and exclusive measurements, other orders often end
sooner. A simulation takes milliseconds, so many are tried with randomly changed paths, and the best is kept (random
sampling of priority rules: R. Kolisch, S. Hartmann, "Heuristic algorithms for solving the resource-constrained
project scheduling problem", 1999).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import Final

from trtllm_pipeline.base import Exclusive, Json, Machine, Scope, StageRunId
from trtllm_pipeline.orchestrate.memory.estimates import HOST, SHARED, Corrections
from trtllm_pipeline.orchestrate.plan.plan import Plan, StageRun, of_run
from trtllm_pipeline.orchestrate.run import scheduler as scheduling

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
    tasks: Sequence[scheduling.Task], scheduler: scheduling.Scheduler, takes: Mapping[StageRunId, float] | None = None
) -> float:
    """Wall-clock seconds of these tasks under their new scheduler. Each takes its time in `takes`, or as expected."""
    known = {task.id: task for task in tasks}
    now = 0.0
    due: list[tuple[float, int, scheduling.Event]] = []
    events: list[scheduling.Event] = []
    number = 0
    while True:
        for instruction in scheduler.advance(now, *events):
            event: scheduling.Event
            if isinstance(instruction, scheduling.Start):
                is_service = known[instruction.id].scope is Scope.SERVICE
                event = (scheduling.ServiceReady if is_service else scheduling.Finished)(instruction.id)
                wait = known[instruction.id].expected_s if takes is None else takes[instruction.id]
            else:  # tasks never fail here, so this stops a service
                event, wait = scheduling.ServiceEnded(instruction.id), 0.0
            number += 1
            heappush(due, (now + wait, number, event))
        if not due:
            return now
        wake_at = scheduler.wake_at
        now, events = min(due[0][0], math.inf if wake_at is None else wake_at), []
        while due and due[0][0] == now:
            events.append(heappop(due)[2])


def favourable(tasks: Sequence[scheduling.Task], on: Sequence[scheduling.Capacity]) -> Mapping[StageRunId, float]:
    """Return factors for task paths that shorten the run. Empty if none were found or the search was skipped.

    The search needs several GPUs and a plan that is long but not too large. It is deterministic.
    """
    if sum(len(node.gpus) for node in on) < 2 or not 0 < len(tasks) <= _TASKS // 10:
        return {}
    scheduler = scheduling.Scheduler(tasks, *on)
    least_s = scheduler.least_s
    shortest_s = play(tasks, scheduler)
    if shortest_s < _WORTH_S:
        return {}
    best: Mapping[StageRunId, float] = {}
    for favour in _changes(tasks, min(_TRIES, _TASKS // len(tasks))):
        if shortest_s <= _NEAR * least_s:
            break
        took_s = play(tasks, scheduling.Scheduler(tasks, *on, favour=favour))
        if took_s < shortest_s:
            best, shortest_s = favour, took_s
    return best


def _changes(tasks: Sequence[scheduling.Task], number: int) -> Iterator[Mapping[StageRunId, float]]:
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


_MOST_SIMULATED: Final = 2_000
"""Larger plans are not simulated: the bound of `least_s` is 1% to 4% short, less than the error of the durations."""


def capacity(machine: Machine) -> scheduling.Capacity:
    """Return the capacity of `machine`: whole GPUs by name, CPU slots."""
    host, shared = machine.memory_bytes, machine.shared_bytes
    return scheduling.Capacity(
        cpus=machine.cpus,
        gpus=tuple(gpu.uuid for gpu in machine.gpus),
        memory=None if host is None or shared is None else (host, shared),
    )


def capacities(machine: Machine) -> list[scheduling.Capacity]:
    """Return the capacity of `machine`. With several GPU types: an empty one for this machine, and one node of each type."""
    nodes = (
        scheduling.Capacity(each.cpus, tuple(gpu.uuid for gpu in each.gpus), 0, name, name)
        for name, each in machine.types
    )
    return [scheduling.Capacity(0), *nodes] if machine.types else [capacity(machine)]


def simulate(
    plan: Plan,
    takes: Mapping[StageRunId, float],
    on: Sequence[scheduling.Capacity],
    among: Collection[StageRunId],
    corrections: Corrections | None = None,
    *,
    running: Collection[StageRunId] = (),
) -> float:
    """Return the wall-clock seconds of running `among` of `plan` on the nodes `on`, if each `takes` these seconds.

    Stage runs that are already `running` start first.
    """
    known = list(tasks(plan, among, lambda run: takes[run.id], corrections, on))
    scheduler = scheduling.Scheduler(known, *on, favour=dict.fromkeys(running, FIRST))
    return play(known, scheduler) if len(known) <= _MOST_SIMULATED else scheduler.least_s


def tasks(
    plan: Plan,
    among: Collection[StageRunId],
    takes: Callable[[StageRun], float],
    corrections: Corrections | None = None,
    on: Sequence[scheduling.Capacity] = (),
) -> Iterator[scheduling.Task]:
    """Return the scheduler tasks of `among` on the nodes `on`. `corrections` are for memory needs."""
    order = {cell.id: number for number, cell in enumerate(plan.cells)} if among else {}
    corrections = corrections or Corrections((), plan.machine)
    host = plan.machine.memory_bytes if len(on) == 1 else None  # unknown for the nodes of a cluster
    limit = None if host is None else (on[0].cpus, host)
    for run in plan.stage_runs.values():
        if run.id not in among:
            continue
        settings, resources = section(run), plan.resources(run)
        needs = of_run(run, plan.machine, corrections) if run.stage.scope is Scope.SERVICE or limit else ()
        memory, most = {need.resource: need.estimate for need in needs}, None
        if limit and HOST in memory and (slots := _slots(memory[HOST].value, *limit)) > resources.cpus:
            resources = replace(resources, cpus=slots)
        if run.stage.scope is Scope.SERVICE and HOST in memory:
            most = memory[HOST].most, memory[SHARED].most if SHARED in memory else 0
        yield scheduling.Task(
            id=run.id,
            needs=tuple(each for each in run.needs if each in among),
            scope=run.stage.scope,
            service=next((up for up in run.inputs.values() if plan.stage_runs[up].stage.scope is Scope.SERVICE), None),
            resources=resources,
            expected_s=takes(run),
            retries=run.stage.retries if settings.get("retries") is None else int(str(settings["retries"])),
            order=order[run.first_cell.id],
            memory=most,
        )


def _slots(host: int, cpus: int, memory: int) -> int:
    """Return its share of the machine's memory in CPU slots, so that stage runs that do not fit together do not run
    together.

    0 for less than a slot: stage runs that need no CPU are limited otherwise.
    """
    return 0 if host * cpus < memory else min(cpus, -(-host * cpus // memory))


def section(run: StageRun) -> Mapping[str, Json]:
    return run.first_cell.settings[section_name(run)]


def section_name(run: StageRun) -> str:
    return run.stage.section or run.stage.name
