"""What the scheduler costs: seconds of CPU to set up a plan, microseconds per event, memory; and whether that stays linear.

    python benchmarks/scheduler.py [--cells 100 3000 10000 100000] [--mixed] [--nodes 125 [--downloads 4]] [--format json]

The plan has the shape of a real matrix: one download a model (64 cells), one quantize for 16, one build for 2, then
repository, service, smoke, perf and accuracy a cell; a fifth of the builds take a gang of GPUs. Every stage run ends
well after exactly its expected time, on a simulated machine of 8 GPUs and 32 CPUs. With `--mixed` builds and servers ask
for one of about 250 combinations of CPUs and GPUs each, durations differ by 100 times, and servers are alone on the machine.
With `--nodes` there are as many such machines, and downloads are done beside them: `hours` is how long the whole would take,
`gpu_use` the share of it that a GPU is held.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import sys
import time
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count

from trtllm_pipeline.domain import Exclusive, Resources, Scope, StageRunId
from trtllm_pipeline.execution.scheduler import (
    Capacity,
    Event,
    Finished,
    Instruction,
    Scheduler,
    ServiceEnded,
    ServiceReady,
    Start,
    Stop,
    Task,
)

MACHINE = Capacity(32, tuple(f"GPU-{number}" for number in range(8)))


def plan(cells: int, *, mixed: bool = False) -> list[Task]:
    """About 5.6 stage runs a cell."""
    tasks = []
    rng = random.Random(cells)

    def add(name: str, *needs: str, s: float, order: int, scope: Scope = Scope.ARTIFACT, **resources: object) -> str:
        service = StageRunId(f"serve/{order}") if scope is Scope.IN_SERVICE else None
        needed = tuple(map(StageRunId, needs))
        what = Resources(**resources)  # type: ignore[arg-type]  # names of its fields, given below
        tasks.append(Task(StageRunId(name), needed, scope, service, what, expected_s=s, order=order))
        return name

    for cell in range(cells):
        if cell % 64 == 0:
            download = add(f"download/{cell}", s=300, order=cell, cpus=0, downloads=1)
        if cell % 16 == 0:
            quantize = add(f"quantize/{cell}", download, s=900, order=cell, gpus=1)
        if cell % 2 == 0:
            gpus, cpus = (rng.randint(0, 7), rng.randint(1, 32)) if mixed else (4 if cell % 10 == 0 else 1, 1)
            seconds = rng.lognormvariate(5, 1) if mixed else 200 + cell % 300
            build = add(f"build/{cell}", quantize, s=seconds, order=cell, gpus=gpus, cpus=cpus)
        repository = add(f"repository/{cell}", build, s=2, order=cell)
        serving = {"gpus": gpus, "cpus": cpus, "exclusive": Exclusive.MACHINE} if mixed else {"gpus": 1, "cpus": 4}
        add(f"serve/{cell}", repository, s=30, order=cell, scope=Scope.SERVICE, **serving)
        smoke = add(f"smoke/{cell}", s=10, order=cell, scope=Scope.IN_SERVICE)
        add(f"perf/{cell}", smoke, s=120, order=cell, scope=Scope.IN_SERVICE)
        add(f"accuracy/{cell}", smoke, s=60, order=cell, scope=Scope.IN_SERVICE)
    return tasks


def cluster(nodes: int, downloads: int) -> list[Capacity]:
    """As many machines, and one that downloads; without any, the machine alone."""
    if not nodes:
        return [MACHINE]
    machines = [Capacity(MACHINE.cpus, MACHINE.gpus, 0, str(number)) for number in range(nodes)]
    return [Capacity(0, (), downloads), *machines]


def measure(cells: int, on: Sequence[Capacity], *, mixed: bool = False) -> dict[str, float]:
    """One plan from beginning to end."""
    tasks = plan(cells, mixed=mixed)
    expected = {task.id: task.expected_s for task in tasks}
    scopes = {task.id: task.scope for task in tasks}
    held: dict[StageRunId, tuple[float, int]] = {}  # since when, and how many GPUs
    gpu_s = 0.0
    gc.collect()
    begin = time.thread_time()
    scheduler = Scheduler(tasks, *on)
    setup_s = time.thread_time() - begin
    ahead: list[tuple[float, int, Event]] = []
    number = count()
    now, events, spent_s, longest_s = 0.0, 0, 0.0, 0.0
    happened: tuple[Event, ...] = ()
    while not scheduler.finished:
        begin = time.thread_time()
        instructions: list[Instruction] = scheduler.advance(now, *happened)
        took = time.thread_time() - begin
        spent_s, longest_s = spent_s + took, max(longest_s, took)
        for one in instructions:
            if isinstance(one, Start):
                if scopes[one.id] is not Scope.IN_SERVICE:
                    held[one.id] = now, len(one.gpus)
                event = ServiceReady(one.id) if scopes[one.id] is Scope.SERVICE else Finished(one.id)
                heappush(ahead, (now + expected[one.id], next(number), event))
            elif isinstance(one, Stop):
                heappush(ahead, (now + 1.0, next(number), ServiceEnded(one.id)))
        if ahead:
            now, _, first = heappop(ahead)
            happened = (first,)
            if isinstance(first, (Finished, ServiceEnded)) and first.id in held:
                since, gpus = held.pop(first.id)
                gpu_s += (now - since) * gpus
            events += 1
    return {
        "cells": cells,
        "stage_runs": len(tasks),
        "setup_s": setup_s,
        "setup_us_per_stage_run": setup_s / len(tasks) * 1e6,
        "events": events,
        "us_per_event": spent_s / events * 1e6,
        "longest_event_ms": longest_s * 1e3,
        "hours": now / 3600,
        "gpu_use": gpu_s / now / sum(len(each.gpus) for each in on),
        "us_per_stage_run": (setup_s + spent_s) / len(tasks) * 1e6,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, nargs="+", default=[100, 1_500, 15_000, 50_000])
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--nodes", type=int, default=0)
    parser.add_argument("--downloads", type=int, default=4)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    args = parser.parse_args()
    on = cluster(args.nodes, args.downloads)
    measure(100, on)  # warm up
    rows = [measure(cells, on, mixed=args.mixed) for cells in sorted(args.cells)]
    if args.format == "json":
        json.dump(rows, sys.stdout, indent=1)
        print()
        return
    for row in rows:
        print("  ".join(f"{key} {value:,.{2 if key == 'gpu_use' else 1}f}" for key, value in row.items()))
    print(f"per stage run, largest plan / smallest: {rows[-1]['us_per_stage_run'] / rows[0]['us_per_stage_run']:.2f}")


if __name__ == "__main__":
    main()
