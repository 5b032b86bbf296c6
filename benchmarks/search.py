"""Speed of `pipeline search` in finding a good cell, on surfaces of 200 cells each, drawn from models (`surfaces.py`).

    python benchmarks/search.py [--seeds 10] [--first-seed 0] [--budget 30] [--surface WORDS] [--format json]

It is compared with random search, with TPE of Optuna if installed (`pip install optuna`: multivariate, eight random trials,
objectives as constraints, repeated cells are not counted), and with the full grid, on the same numbers. Each seed gives another
draw of the noise, another order of the cells, and another seed of the random methods. A search has found a good cell when its
best cell is within 5% of the grid's best. Times are those of the surfaces: 10 minutes to quantize to a precision, 6 to
build and measure a cell.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import cast

from surfaces import SURFACES, Surface

from trtllm_pipeline.base.domain import CellId
from trtllm_pipeline.orchestrate.results.report_file import CellResult
from trtllm_pipeline.show.report.measured import Measured
from trtllm_pipeline.show.report.recommendation import Goal, Goals, at_best, cost, parse_slo
from trtllm_pipeline.show.search.next_cell import Option, decide

_GOOD = 0.05
_Rows = Mapping[CellId, CellResult]


@dataclass(frozen=True, slots=True)
class Found:
    """Results of a search method on a surface, over all seeds."""

    surface: str
    way: str
    good: int
    """Seeds in which it found a good cell."""
    seeds: int
    cells: float
    """Cells measured, median."""
    until_good: float | None
    """Cells measured until the first good one, median of the seeds that found one."""
    hours: float
    """Median, of all that it built and measured."""
    gap: float
    """Gap between its best and the grid's best, worst of the seeds. Infinite if no cell met the objectives."""
    decision_ms: float
    """Mean time of one decision."""


def goals_of(surface: Surface) -> Goals:
    return Goals(cast("Goal", surface.objective), parse_slo(surface.slo) if surface.slo else ())


def value(row: CellResult, goals: Goals) -> float | None:
    """Cost of a cell, None if it fails or misses the objectives."""
    best = at_best(Measured.of(row), (), goals.slos, goals.objective, None)
    return cost(best, goals.objective) if best.reason is None else None


def by_model(surface: Surface, rows: _Rows, goals: Goals, seed: int, budget: int) -> Iterator[CellId]:
    """`pipeline search`."""
    order = list(rows)
    random.Random(seed).shuffle(order)
    tried: dict[CellId, Measured] = {}
    while len(tried) < budget:
        done = {str(row.axes["precision"]) for row in tried.values()}
        options = [Option(cell, rows[cell].axes, surface.takes(rows[cell].axes, done), built=False) for cell in order]
        chosen = decide(options, tried, goals).cell
        if chosen is None:
            return
        tried[chosen] = Measured.of(rows[chosen])
        yield chosen


def at_random(surface: Surface, rows: _Rows, goals: Goals, seed: int, budget: int) -> Iterator[CellId]:
    """Cells in any order."""
    del surface, goals
    yield from random.Random(seed).sample(list(rows), budget)


def whole_grid(surface: Surface, rows: _Rows, goals: Goals, seed: int, budget: int) -> Iterator[CellId]:
    """All cells."""
    del surface, goals, seed, budget
    yield from rows


def by_tpe(surface: Surface, rows: _Rows, goals: Goals, seed: int, budget: int) -> Iterator[CellId]:
    """Optuna's tree-structured Parzen estimator: numbers as places in their order, all else as categories."""
    import warnings

    import optuna

    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    by_values = {tuple(map(str, row.axes.values())): row for row in rows.values()}
    sampler = optuna.samplers.TPESampler(
        seed=seed, multivariate=True, n_startup_trials=8, constraints_func=lambda trial: trial.user_attrs["misses"]
    )
    study = optuna.create_study(sampler=sampler)
    tried = set()
    for _ in range(6 * budget):
        trial = study.ask()
        values = tuple(
            choices[trial.suggest_int(name, 0, len(choices) - 1)]
            if all(isinstance(choice, int) and not isinstance(choice, bool) for choice in choices)
            else trial.suggest_categorical(name, [*map(str, choices)])
            for name, choices in surface.axes.items()
        )
        row = by_values[tuple(map(str, values))]
        shares = [max((slo.share(level.value(slo.metric)) for slo in goals.slos), default=0.5) for level in row.levels]
        trial.set_user_attr("misses", (math.log(max(min(shares, default=100.0), 1e-6)),))
        study.tell(trial, value(row, Goals(goals.objective)) or 0.0)
        if row.id not in tried:
            tried.add(row.id)
            yield row.id
        if len(tried) == budget:
            return


Way = Callable[[Surface, _Rows, Goals, int, int], Iterator[CellId]]
WAYS: Mapping[str, Way] = {"search": by_model, "TPE": by_tpe, "random": at_random, "grid": whole_grid}


def measure(surface: Surface, way: str, seeds: range, budget: int) -> Found:
    """One way on one surface."""
    goals = goals_of(surface)
    cells, until, hours, gaps, spent = [], [], [], [], 0.0
    for seed in seeds:
        rows = surface.draw(seed)
        best = min(cost for row in rows.values() if (cost := value(row, goals)) is not None)
        started = time.perf_counter()
        chosen = list(WAYS[way](surface, rows, goals, seed, budget))
        spent += time.perf_counter() - started
        behind = [
            abs(cost / best - 1) if (cost := value(rows[cell], goals)) is not None else math.inf for cell in chosen
        ]
        cells.append(len(chosen))
        gaps.append(min(behind))
        until += [next(number for number, gap in enumerate(behind, 1) if gap <= _GOOD)] if min(behind) <= _GOOD else []
        hours.append(sum(_seconds(surface, [rows[cell] for cell in chosen])) / 3600)
    return Found(
        surface.name,
        way,
        len(until),
        len(seeds),
        statistics.median(cells),
        statistics.median(until) if until else None,
        statistics.median(hours),
        max(gaps),
        1e3 * spent / sum(cells),
    )


def _seconds(surface: Surface, rows: Sequence[CellResult]) -> Iterator[float]:
    done: set[str] = set()
    for row in rows:
        yield surface.takes(row.axes, done)
        done.add(str(row.axes["precision"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, metavar="N")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="others than those of a tuning")
    parser.add_argument("--budget", type=int, default=30, metavar="N", help="cells to measure (default 30)")
    parser.add_argument("--surface", default="", metavar="WORDS", help="only those with WORDS in their names")
    parser.add_argument("--way", choices=tuple(WAYS), action="append")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    args = parser.parse_args()
    ways, seeds = args.way or list(WAYS), range(args.first_seed, args.first_seed + args.seeds)
    try:
        import optuna  # noqa: F401
    except ModuleNotFoundError:
        ways = [way for way in ways if way != "TPE"]
    results = [
        measure(surface, way, seeds, args.budget)
        for surface in SURFACES
        if args.surface in surface.name
        for way in ways
    ]
    if args.format == "json":
        json.dump([asdict(each) for each in results], sys.stdout, indent=1)
        print()
        return
    print("| surface | way | seeds with a good cell | cells | until good | hours | worst gap | ms a decision |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for each in results:
        until = "-" if each.until_good is None else f"{each.until_good:g}"
        numbers = f"{each.cells:g} | {until} | {each.hours:.1f} | {each.gap:.1%} | {each.decision_ms:.1f}"
        print(f"| {each.surface} | {each.way} | {each.good} of {each.seeds} | {numbers} |")
    for way in ways:
        of_way = [each for each in results if each.way == way]
        print(f"{way}: {sum(each.good for each in of_way)} of {sum(each.seeds for each in of_way)} seeds")


if __name__ == "__main__":
    main()
