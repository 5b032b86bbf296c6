"""Makespan of plans under the scheduler, compared with a lower bound, first come first served, and sequential execution.

    python benchmarks/makespan.py [--plans 300] [--seed 1] [--cold [stage | precision]] [--tries 60] [--gpus 1 2 4 8] [--exclusive gpu] [--no-search] [--format json]

Random plans have the shape of matrices: a few models, precisions and batch sizes, with downloads, quantization, builds on one to
all GPUs, and servers. Seven of ten plans measure with the rule `--exclusive` (`settings.perf.exclusive` of a matrix): alone on
the machine, or side by side on separate GPUs. `over_machine` is the makespan of these plans relative to measuring alone.
`within_5_percent_exclusive` is the share of them that takes at most 5% more than the bound. `--cold` makes expected durations
wrong, as in a first run: each stage, or each stage of each precision, has a random factor (log-normal, median 1.35, a third
of them beyond 3.3 or below 0.55), and each stage run varies a little more. `over_told` is the makespan relative to a scheduler
that knows these factors from the start, which is more than it could learn. Without `--cold` all durations are as expected.

The lower bound is explained at `bound`. The shortest schedule is between it and the best of `--tries` random ones.
First come first served starts the first task in matrix order that is ready and fits. Sequential execution is a shell loop.

    python benchmarks/makespan.py --plans 100 --accuracy 30 120 600

Each server also runs unmeasured work for this many seconds. The ratio is the makespan of plans that measure alone on the
machine, with each next server loaded meanwhile, over the makespan with one server after another.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count, product
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trtllm_pipeline.base.domain import Exclusive, Resources, Scope, StageRunId
from trtllm_pipeline.orchestrate.run.order import favourable, play
from trtllm_pipeline.orchestrate.run.scheduler import Capacity, Scheduler, Task

Numbers: TypeAlias = NDArray[Any]


def plan(rng: random.Random, gpus: int, rule: Exclusive = Exclusive.MACHINE) -> list[Task]:
    """A matrix: each model downloaded once, quantized for each precision, built for each batch size, then served.

    In a third of them, one model repeatedly needs the whole machine while many others need one GPU.
    """
    tasks: list[Task] = []
    orders = count()

    def add(
        name: str, *needs: str, s: float, scope: Scope = Scope.ARTIFACT, of: str | None = None, **what: object
    ) -> str:
        needed = tuple(map(StageRunId, needs))
        service = None if of is None else StageRunId(of)
        resources = Resources(**what)  # type: ignore[arg-type]  # names of its fields, given below
        tasks.append(Task(StageRunId(name), needed, scope, service, resources, expected_s=s, order=next(orders)))
        return name

    exclusive = rule if rng.random() < 0.7 else Exclusive.NONE
    uneven = rng.random() < 0.33
    for model in range(rng.randint(8, 24) if uneven else rng.randint(1, 5)):
        billions = (1.0 if model else 70.0) if uneven else rng.choice([0.5, 1, 3, 8, 14, 32, 70])
        least = 1 if billions < 30 else 2 if billions < 60 else 4
        ranks = [each for each in (1, 2, 4, 8) if least <= each <= gpus] or [gpus]
        if uneven:
            ranks = [1 if model else rng.choice([gpus, max(1, gpus // 2)])]
        download = add(f"download/{model}", s=20 * billions, downloads=1)
        for precision in range(rng.randint(1, 4)):
            quantize = add(
                f"quantize/{model}.{precision}", download, s=40 + 25 * billions, gpus=min(gpus, least), cpus=2
            )
            for batch in range(rng.randint(1, 4)):
                tp = rng.choice(ranks)
                key = f"{model}.{precision}.{batch}"
                build = add(f"build/{key}", quantize, s=60 + 20 * billions, gpus=tp, cpus=2)
                repository = add(f"repository/{key}", build, s=1)
                serve = f"serve/{key}"
                add(serve, repository, s=20 + billions, scope=Scope.SERVICE, gpus=tp, cpus=4, exclusive=exclusive)
                smoke = add(f"smoke/{key}", s=5, scope=Scope.IN_SERVICE, of=serve)
                measured_s = rng.choice([60, 180])
                add(f"perf/{key}", smoke, s=measured_s, scope=Scope.IN_SERVICE, of=serve, exclusive=exclusive)
    return tasks


def with_accuracy(tasks: Sequence[Task], seconds: float) -> list[Task]:
    """The same tasks. Each server needs one unit of memory and runs unmeasured work for `seconds`."""
    result: list[Task] = []
    for task in tasks:
        if task.scope is Scope.SERVICE:
            task = replace(task, memory=(1,))
        elif task.service is not None and task.id.startswith("perf/"):
            accuracy = StageRunId(task.id.replace("perf/", "accuracy/"))
            result.append(replace(task, id=accuracy, expected_s=seconds, resources=Resources()))
        result.append(task)
    return result


def preloading(number: int, seed: int, gpus: int, seconds: float) -> dict[str, float]:
    """Ratios of plans that measure alone: with the next server loaded meanwhile, over one server after another."""
    one = Capacity(4 + 4 * gpus, tuple(f"GPU-{index}" for index in range(gpus)))
    times = []
    for index in range(number):
        tasks = with_accuracy(plan(random.Random(seed * 1_000_003 + index), gpus), seconds)
        if any(task.resources.exclusive.alone for task in tasks):
            takes = {task.id: task.expected_s for task in tasks}
            times.append([ours(tasks, takes, machine) for machine in (replace(one, memory=(2,)), one)])
    ratios = [beside / after for beside, after in times]
    return {
        "gpus": gpus,
        "accuracy_s": seconds,
        "plans": len(times),
        "over_one_after_another_total": sum(beside for beside, _ in times) / sum(after for _, after in times),
        "over_one_after_another_median": statistics.median(ratios),
        "over_one_after_another_least": min(ratios),
        "over_one_after_another_worst": max(ratios),
    }


def units(
    tasks: Sequence[Task], takes: Mapping[StageRunId, float]
) -> tuple[dict[StageRunId, float], dict[StageRunId, set[StageRunId]]]:
    """Units that occupy the machine, a server with its tasks being one: seconds and dependencies of each."""
    owner = {task.id: task.service or task.id for task in tasks}
    seconds: dict[StageRunId, float] = {}
    needs: dict[StageRunId, set[StageRunId]] = {}
    for task in tasks:
        unit = owner[task.id]
        seconds[unit] = seconds.get(unit, 0.0) + takes[task.id]
        needs.setdefault(unit, set()).update(owner[need] for need in task.needs)
    return seconds, {unit: others - {unit} for unit, others in needs.items()}


def bound(tasks: Sequence[Task], takes: Mapping[StageRunId, float], machine: Capacity) -> float:
    """Lower bound in seconds of every schedule: the larger of two bounds.

    One includes all units. The other separates work and measurements, which never overlap: it adds the time of the work
    alone and the time of all measurements alone.
    """
    seconds, needs = units(tasks, takes)
    what = {task.id: task.resources for task in tasks if task.service is None}
    least = _bound(seconds, needs, what, machine)
    measured = [unit for unit in what if what[unit].exclusive is not Exclusive.NONE]
    work = seconds | dict.fromkeys(measured, 0.0)
    took = np.array([seconds[unit] for unit in measured])
    width = np.array([_width(what[unit], machine) for unit in measured], dtype=int)
    return max(least, _bound(work, needs, what, machine) + _packed(took, width, len(machine.gpus)))


def _width(need: Resources, machine: Capacity) -> int:
    """GPUs that others cannot use meanwhile."""
    return len(machine.gpus) if need.exclusive.alone else need.gpus


def _packed(took: Numbers, width: Numbers, gpus: int) -> float:
    """Minimum time of units (seconds, GPUs of each) on `gpus` GPUs, without dependencies.

    Units on all GPUs run alone. Units on more than half of them run one after another. The others count as several units of
    one GPU: some GPU gets k + 1 of the longest k x gpus + 1.
    """
    narrow = (width > 0) & (width < gpus)
    ones = np.sort(np.repeat(took[narrow], width[narrow]))[::-1]
    sums = np.concatenate(([0.0], np.cumsum(ones)))
    most = np.arange((len(ones) + gpus - 1) // gpus)
    crowded = float((sums[most * gpus + 1] - sums[most * gpus - most]).max(initial=0.0))
    full = float(took[width == gpus].sum())
    return max(float(took[2 * width > gpus].sum()), full + max(crowded, float(sums[-1]) / gpus))


def _bound(
    seconds: Mapping[StageRunId, float],
    needs: Mapping[StageRunId, set[StageRunId]],
    what: Mapping[StageRunId, Resources],
    machine: Capacity,
) -> float:
    """The largest of `before + work + after` over sets of stage runs.

    A set has all units with at least `before` ahead of them and `after` behind them. Its work is its use of a resource over
    the capacity. A unit that runs alone uses all of it. Side-by-side measurements are added, because they never overlap
    other work.
    """
    order = list(what)  # topological
    before: dict[StageRunId, float] = {}
    after: dict[StageRunId, float] = dict.fromkeys(order, 0.0)
    for unit in order:
        before[unit] = max((before[need] + seconds[need] for need in needs[unit]), default=0.0)
    for unit in reversed(order):
        for need in needs[unit]:
            after[need] = max(after[need], after[unit] + seconds[unit])
    longest = max(before[unit] + seconds[unit] + after[unit] for unit in order)
    heads, tails = (np.array([times[unit] for unit in order]) for times in (before, after))
    late = heads[None, :] >= np.unique(heads)[:, None]
    early = tails[None, :] >= np.unique(tails)[:, None]
    alone = np.array([what[unit].exclusive.alone for unit in order])
    measuring = np.array([what[unit].exclusive is Exclusive.GPU for unit in order])
    takes_s = np.array([seconds[unit] for unit in order])
    reach = np.zeros((len(late), len(early)))
    for kind in (~measuring, measuring):
        of_kind = np.zeros_like(reach)
        for name, limit in (("cpus", machine.cpus), ("gpus", len(machine.gpus)), ("downloads", machine.downloads)):
            shares = np.where(alone, 1.0, [getattr(what[unit], name) / limit for unit in order])
            of_kind = np.maximum(of_kind, (late * (takes_s * shares * kind)) @ early.T.astype(float))
        reach += of_kind
    width = np.array([_width(what[unit], machine) for unit in order])
    # Every choice of sets gives a bound. Trying all of them would take too long.
    some = (np.unique(np.linspace(0, size - 1, 12, dtype=int)) for size in reach.shape)
    for row, column in product(*some):
        chosen = late[row] & early[column]
        packed = sum(
            _packed(takes_s[chosen & kind], width[chosen & kind], len(machine.gpus)) for kind in (~measuring, measuring)
        )
        reach[row, column] = max(reach[row, column], packed)
    whole = reach + np.unique(heads)[:, None] + np.unique(tails)[None, :]
    return max(longest, float(whole[reach > 0].max(initial=0.0)))


def ours(tasks: Sequence[Task], takes: Mapping[StageRunId, float], machine: Capacity, *, search: bool = False) -> float:
    """Seconds under the scheduler, with the best order that is found in advance by `search`."""
    favour = favourable(tasks, [machine]) if search else None
    return play(tasks, Scheduler(tasks, machine, favour=favour), takes)


def may_run_beside(one: Exclusive, other: Exclusive) -> bool:
    """True if measurements with these rules may run at the same time."""
    return one is other and not one.alone


def first_come(tasks: Sequence[Task], takes: Mapping[StageRunId, float], machine: Capacity, *, blocks: bool) -> float:
    """Makespan if the first unit in matrix order that is ready and fits starts. With `blocks`, no unit overtakes another."""
    seconds, needs = units(tasks, takes)
    what = {task.id: task.resources for task in tasks if task.service is None}
    waiting = list(what)
    done: set[StageRunId] = set()
    running: list[tuple[float, StageRunId]] = []
    free = [machine.cpus, len(machine.gpus), machine.downloads]
    now = 0.0
    while waiting or running:
        for unit in list(waiting):
            if not needs[unit] <= done:
                continue
            need = what[unit]
            candidate = (need.cpus, need.gpus, need.downloads)
            beside = all(may_run_beside(need.exclusive, what[other].exclusive) for _, other in running)
            if not beside or any(a > b for a, b in zip(candidate, free, strict=True)):
                if blocks:
                    break
                continue
            waiting.remove(unit)
            free = [b - a for a, b in zip(candidate, free, strict=True)]
            heappush(running, (now + seconds[unit], unit))
        now, unit = heappop(running)
        need = what[unit]
        free = [a + b for a, b in zip((need.cpus, need.gpus, need.downloads), free, strict=True)]
        done.add(unit)
    return now


def wrong(rng: random.Random, middle: float, spread: float) -> float:
    """Random ratio of actual to expected duration."""
    return min(12.0, max(1 / 12, rng.lognormvariate(middle, spread)))


def kind(task: StageRunId, fine: bool) -> str:
    """The stage of a task, with the number of its precision if `fine`."""
    stage, _, key = task.partition("/")
    return f"{stage}/{key.split('.')[1]}" if fine and "." in key else stage


def best_found(
    tasks: Sequence[Task], takes: Mapping[StageRunId, float], machine: Capacity, rng: random.Random, tries: int
) -> float:
    """Makespan of the best of several longest-path-first schedules with randomly changed paths."""
    seconds, needs = units(tasks, takes)
    outer, inner = ([task for task in tasks if (task.service is None) is whether] for whether in (True, False))
    path = dict(seconds)
    for task in reversed(outer):
        for need in needs[task.id]:
            path[need] = max(path[need], seconds[need] + path[task.id])
    best = math.inf
    for _ in range(tries):
        spread = rng.choice([0.1, 0.3, 1.0])
        key = {task.id: -path[task.id] * rng.lognormvariate(0, spread) for task in outer}
        changed = sorted(outer, key=lambda task: key[task.id])
        best = min(best, first_come([*changed, *inner], takes, machine, blocks=rng.random() < 0.5))
    return best


def measure(
    number: int,
    seed: int,
    gpus: int,
    *,
    cold: str | None = None,
    tries: int = 0,
    rule: Exclusive = Exclusive.MACHINE,
    search: bool = False,
) -> dict[str, float]:
    """Ratios over `number` random plans on a machine of `gpus`."""
    names = tuple(f"GPU-{index}" for index in range(gpus))
    rows, times, near, learned = [], [], [], []
    for index in range(number):
        rng = random.Random(seed * 1_000_003 + index)
        machine = Capacity(4 + 4 * gpus, names)
        state = rng.getstate()
        alone = plan(rng, gpus)
        rng.setstate(state)
        tasks = plan(rng, gpus, rule)
        kinds = {task.id: kind(task.id, cold == "precision") for task in tasks}
        of_kind = {kind: wrong(rng, 0.3, 0.9) for kind in dict.fromkeys(kinds.values())}
        factor = {task.id: of_kind[kinds[task.id]] * wrong(rng, 0.0, 0.3) if cold else 1.0 for task in tasks}
        takes = {task.id: task.expected_s * factor[task.id] for task in tasks}
        made = ours(tasks, takes, machine, search=search)
        if cold:
            known = [replace(task, expected_s=task.expected_s * of_kind[kinds[task.id]]) for task in tasks]
            learned.append((made, ours(known, takes, machine, search=search)))
        first = first_come(tasks, takes, machine, blocks=False)
        best = min(made, best_found(tasks, takes, machine, rng, tries))
        rows.append((made / bound(tasks, takes, machine), made / first, sum(takes.values()) / made, made / best))
        if any(task.resources.exclusive is not Exclusive.NONE for task in alone):
            times.append((made, ours(alone, takes, machine, search=search)))
            near.append(rows[-1][0] <= 1.05)
    over, first_ratio, serial, over_best = (sorted(column) for column in zip(*rows, strict=True))

    def at(column: Sequence[float], share: float) -> float:
        return column[min(len(column) - 1, int(share * len(column)))]

    over_told = sorted(made / known for made, known in learned)
    return {
        "gpus": gpus,
        "plans": number,
        "over_bound_least": over[0],
        "over_bound_median": statistics.median(over),
        "over_bound_p95": at(over, 0.95),
        "within_5_percent": sum(each <= 1.05 for each in over) / number,
        "within_5_percent_exclusive": sum(near) / len(near),
        **({"within_5_percent_of_best_found": sum(each <= 1.05 for each in over_best) / number} if tries else {}),
        "over_first_come_median": statistics.median(first_ratio),
        "over_first_come_p95": at(first_ratio, 0.95),
        "over_first_come_worst": first_ratio[-1],
        "over_first_come_by_5_percent": sum(each > 1.05 for each in first_ratio) / number,
        **(
            {
                "over_told_total": sum(made for made, _ in learned) / sum(known for _, known in learned),
                "over_told_least": over_told[0],
                "over_told_p95": at(over_told, 0.95),
                "over_told_worst": over_told[-1],
            }
            if learned
            else {}
        ),
        "one_after_another_median": statistics.median(serial),
        "over_machine_total": sum(made for made, _ in times) / sum(alone for _, alone in times),
        "over_machine_median": statistics.median(made / alone for made, alone in times),
        "over_machine_worst": max(made / alone for made, alone in times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--cold", nargs="?", const="stage", choices=("stage", "precision"), help="durations are wrongly expected"
    )
    parser.add_argument("--tries", type=int, default=60, help="random schedules that the best of is compared with")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4, 8])
    rules = [
        each for each in Exclusive if each is not Exclusive.CONTROL
    ]  # which the scheduler takes as it does `machine`
    parser.add_argument("--exclusive", type=Exclusive, choices=rules, default=Exclusive.MACHINE)
    parser.add_argument("--search", action=argparse.BooleanOptionalAction, default=True, help="the best of many orders")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument(
        "--accuracy", type=float, nargs="+", metavar="SECONDS", help="seconds of unmeasured work per server"
    )
    args = parser.parse_args()
    if args.accuracy:
        rows = [preloading(args.plans, args.seed, gpus, each) for gpus in args.gpus for each in args.accuracy]
    else:
        options = {"cold": args.cold, "tries": args.tries, "rule": args.exclusive, "search": args.search}
        rows = [measure(args.plans, args.seed, gpus, **options) for gpus in args.gpus]
    if args.format == "json":
        json.dump(rows, sys.stdout, indent=1)
        print()
        return
    for row in rows:
        print("  ".join(f"{key} {value:.4g}" for key, value in row.items()))


if __name__ == "__main__":
    main()
