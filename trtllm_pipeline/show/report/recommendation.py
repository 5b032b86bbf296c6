"""The recommended configuration: the cheapest that meets every objective, and the reasons against each other one.

Only cells of the same workload are compared (`show/report/comparable_loads.py`). Pure functions of what
`show/report/measured.py` loads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Final, Literal, NamedTuple

from trtllm_pipeline.base import CellId, Json, UsageError, count, shared_parts, text_blocks, text_tables
from trtllm_pipeline.measure import LevelResult, Objective, conditions, metric_names, objectives, result, stats
from trtllm_pipeline.orchestrate import CellResult, report_file
from trtllm_pipeline.show.phrases import without
from trtllm_pipeline.show.report.comparable_loads import Workload, shortened, together_at_levels, words, workloads
from trtllm_pipeline.show.report.comparison import ChangeVerdict, accuracy_delta, first_of, level_delta
from trtllm_pipeline.show.report.measured import Measured, Side, selected
from trtllm_pipeline.show.report.prices import Prices, parse_prices
from trtllm_pipeline.show.report.writers import mixed

Goal = Literal["throughput", "latency", "size"]
OBJECTIVES: Final = {
    "throughput": "highest output throughput per GPU (or host), thus the lowest cost per token",
    "latency": "lowest median end-to-end latency",
    "size": "smallest engine",
}
_LEAST: Final = re.compile(r"\s*(?:([a-z_0-9.]+)\s*:)?\s*(?:-\s*(\d+(?:\.\d+)?)\s*(%|pts?)|(\d+(?:\.\d+)?))\s*")


@dataclass(frozen=True, slots=True)
class LeastAccuracy:
    """A minimum score: absolute, or below the unquantized cell by a `share` of its score or by `points`."""

    metric: str | None
    """None means the cell's first score."""
    score: float | None
    share: float | None
    points: float | None = None
    typed: str = ""

    def loss(self, reference: float) -> float | None:
        """The loss that it allows, in units of the score. None if it allows none by itself."""
        return self.points if self.share is None else reference * self.share


@dataclass(frozen=True, slots=True)
class Goals:
    """The goal and the objectives."""

    objective: Goal
    slos: tuple[Objective, ...] = ()
    least: LeastAccuracy | None = None
    prices: Prices | None = None

    @staticmethod
    def parse(objective: Goal, slo: str | None, min_accuracy: str | None, gpu_hour: str | None) -> Goals:
        """The goals on a command line. Raises UsageError."""
        slos = parse_slo(slo) if slo else ()
        least = None if min_accuracy is None else parse_least(min_accuracy)
        prices = None if gpu_hour is None else parse_prices(gpu_hour)
        return Goals(objective, slos, least, prices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One cell at its best level. `reason` explains its exclusion. None if it meets all objectives."""

    cell: CellId
    workload: Workload
    reason: str | None
    engine_bytes: int | None
    accuracy: float | None
    gpus: int = 1
    preparation_s: float | None = None
    level: str | None = None
    output_tps_per_device: float | None = None
    user_tps: float | None = None
    e2e_p50_ms: float | None = None
    interval: stats.Interval | None = None
    """95% interval of the goal's metric. None if it is unknown, or if the goal is the size, which is exact."""
    requests: int | None = None
    dollars_per_million: float | None = None
    """Of output tokens."""
    tied: bool = False
    """Not beyond noise from the best of its workload, or the best if there is such a candidate."""
    unsure: bool = False
    """The best of its workload, and the difference to another candidate that meets all objectives has no interval."""
    same_work_as: CellId | None = None
    """The candidate that does the same work at that level, and represents this one."""
    accurate: bool = True
    """Its accuracy does not exclude it."""
    front: bool = False
    """On the Pareto front of tokens/s per GPU against tokens/s per user, over all levels of accurate candidates."""
    shortfall: float | None = None
    """Factor by which it misses the limit that it misses most."""

    def to_json(self) -> dict[str, Json]:
        """The JSON of `pipeline recommend --format json`, see docs/reference/formats.md."""
        interval: Json = None if self.interval is None else [*self.interval]
        return {**asdict(self), "workload": dict(self.workload), "interval": interval}


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The recommendation of a run: all candidates by workload, best first."""

    run: str
    goal: Goal
    slos: tuple[Objective, ...]
    min_accuracy: LeastAccuracy | None
    candidates: tuple[Candidate, ...]
    per_gpu: bool
    """Some engine spans several GPUs, so rates are per GPU."""
    numerics: str | None = None
    """The meaning of precisions of the same name in different cells, if it differs."""

    @property
    def groups(self) -> list[list[Candidate]]:
        return [list(group) for _, group in groupby(self.candidates, key=lambda each: each.workload)]

    @property
    def exit_code(self) -> int:
        return 0 if any(each.reason is None for each in self.candidates) else 3

    def blocks(self) -> list[text_blocks.Block]:
        """Per workload, the recommended cell and a table of all candidates with the reasons for exclusion."""
        parts = shared_parts([each.cell for each in self.candidates])
        shown: list[text_blocks.Block] = []
        named = shortened([group[0].workload for group in self.groups])
        for group, workload in zip(self.groups, named, strict=True):
            shown += [text_blocks.TextLine("")] if shown else []
            shown += _of_workload(group, words(workload), parts, self)
        return shown

    def to_json(self) -> dict[str, Json]:
        """The JSON of `pipeline recommend --format json`, see docs/reference/formats.md."""
        return {
            "schema": 1,
            "run": self.run,
            "objective": self.goal,
            "slo": {slo.metric: slo.limit for slo in self.slos},
            "min_accuracy": None if self.min_accuracy is None else self.min_accuracy.typed,
            "mixed_precisions": self.numerics,
            "recommended": [Recommended.of(group).to_json() for group in self.groups],
            "candidates": [each.to_json() for each in self.candidates],
        }


@dataclass(frozen=True, slots=True)
class Recommended:
    """The recommendation for a workload."""

    workload: Workload
    best: Candidate | None
    """The cheapest of the tied, or the best."""
    tied: tuple[Candidate, ...]
    """The others that are tied with it."""
    why: str | None
    """Why `best` is the cheapest of the tied."""
    nearest: Candidate | None
    """If no candidate qualifies: the one that misses its limits least."""

    @staticmethod
    def of(group: Sequence[Candidate]) -> Recommended:
        """The choice from the candidates of a workload, in their order."""
        first = group[0]
        if first.reason is not None:
            missed = [each for each in group if each.shortfall is not None]
            nearest = min(missed, key=lambda each: each.shortfall or 0.0, default=None)
            return Recommended(first.workload, None, (), None, nearest)
        tied = tuple(each for each in group[1:] if each.tied and each.same_work_as is None)
        why = next(
            (words for words, of in _CHEAPER.items() if tied and all(of(first) < of(each) for each in tied)), None
        )
        return Recommended(first.workload, first, tied, why, None)

    def to_json(self) -> dict[str, Json]:
        """The entry in the JSON output."""
        nearest: Json = None
        if self.nearest is not None:
            nearest = {"cell": self.nearest.cell, "level": self.nearest.level, "misses": self.nearest.reason}
        return {
            "workload": dict(self.workload),
            "cell": None if self.best is None else self.best.cell,
            "tied": [each.cell for each in self.tied],
            "why": self.why,
            "nearest": nearest,
        }


_CHEAPER: Final[Mapping[str, Callable[[Candidate], float]]] = {
    "fewer GPUs": lambda each: each.gpus,
    "smaller engine": lambda each: each.engine_bytes or 0,
    "less to build": lambda each: each.preparation_s or 0.0,
}
"""Reasons why one of the tied is cheaper, the most important first."""


def advise(side: Side, patterns: Sequence[str], goals: Goals, allow: Collection[str]) -> Recommendation:
    chosen = selected(side, patterns).cells
    # Uses the whole run: the reference of a quantized cell's accuracy need not match the patterns.
    candidates = recommend(
        side, goals.slos, goals.least, goals.objective, allow=allow, among={cell.id for cell in chosen}
    )
    means, per_gpu = "; ".join(text for text, _ in mixed(chosen)) or None, any(cell.gpus > 1 for cell in side.cells)
    return Recommendation(side.name, goals.objective, goals.slos, goals.least, candidates, per_gpu, means)


def parse_slo(text: str) -> tuple[Objective, ...]:
    """`ttft_p99=300ms,tpot_p99=40ms,output_tps=100`. Raises UsageError."""
    return objectives.parse(text, metric_names.LEVEL_METRICS, example="ttft_p99=300ms,tpot_p99=40ms,output_tps=100")


def parse_least(text: str) -> LeastAccuracy:
    """`-1%`, `-1pt`, `0.6`, `contains:-1%`. Raises UsageError."""
    match = _LEAST.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--min-accuracy: expected a score or a loss, got {text!r}",
            hint="e.g. -1% (of the unquantized cell's score), -1pt (points), 0.6, or contains:-1%",
        )
    loss = float(match[2]) / 100 if match[2] else None
    share, points = (loss, None) if match[3] == "%" else (None, loss)
    return LeastAccuracy(match[1], float(match[4]) if match[4] else None, share, points, text)


def recommend(
    side: Side,
    slos: Sequence[Objective],
    least: LeastAccuracy | None,
    objective: Goal,
    *,
    allow: Collection[str] = frozenset(),
    among: Collection[CellId] | None = None,
) -> tuple[Candidate, ...]:
    """Candidates by workload: those that meet all objectives, then the others in run order.

    Those tied with the best come first, the cheapest of them first. Without `least`, cells with significantly lower
    accuracy than the unquantized cell are excluded. `allow` lists groups or fields of `measure/load/conditions.py` that
    do not separate workloads. `among` limits the candidates.
    """
    by_id = {cell.id: cell for cell in side.cells}
    if least is not None and least.metric is not None:
        scores = list(dict.fromkeys(name for cell in side.cells for name in cell.accuracy))
        least = replace(least, metric=first_of(least.metric, scores))
    base = {
        cell: by_id[other]
        for cell, other in report_file.references({cell.id: cell.axes for cell in side.cells}).items()
    }
    workload_of_cell = workloads(side.cells, allow)
    cells, same = together_at_levels(side.cells, workload_of_cell)
    cell_of = {cell.id: cell for cell in cells}
    groups: dict[Workload, list[Candidate]] = {}
    for cell, workload in zip(cells, workload_of_cell, strict=True):
        if among is not None and cell.id not in among:
            continue
        best = at_best(cell, workload, slos, objective, least.metric if least else None)
        if (
            best.level is not None
            and cell.unfit is None
            and (lost := inaccurate(by_id[cell.id], base.get(cell.id), least, allow))
        ):
            best = _less_accurate(best, lost, cell, base.get(cell.id), least)
        groups.setdefault(workload, []).append(best)
    ranked = (_ranked(group, cell_of, same, objective) for group in groups.values())
    return tuple(each for group in ranked for each in group)


def _less_accurate(
    best: Candidate, why: str, cell: Measured, base: Measured | None, least: LeastAccuracy | None
) -> Candidate:
    """The candidate, excluded for its accuracy."""
    metric = (least.metric if least else None) or next(iter(cell.accuracy), "")
    reference = least.score if least is not None and least.score is not None else base and base.accuracy.get(metric)
    score, reason = cell.accuracy.get(metric), why if best.reason is None else f"{best.reason}; {why}"
    share = reference / score if reference and score else None
    known = [each for each in (share, best.shortfall) if each is not None]
    shortfall = max(known, default=None) if share is not None else None
    return replace(best, reason=reason, accurate=False, shortfall=shortfall)


def _ranked(
    group: Sequence[Candidate],
    cell_of: Mapping[CellId, Measured],
    same: Mapping[tuple[CellId, str], tuple[CellId, ...]],
    goal: Goal,
) -> list[Candidate]:
    """The candidates of a workload in order, with ties."""
    kept = [cell_of[each.cell] for each in group if each.accurate]
    front = set(pareto_front(kept))
    group = [replace(each, front=(each.cell, each.level) in front) for each in group]
    good = sorted((each for each in group if each.reason is None), key=lambda each: cost(each, goal))
    if not good:
        return list(group)
    best = good[0]
    noise = {each.cell: within_noise(best, each, cell_of, goal) for each in good[1:]}
    tied = [each for each in good[1:] if noise[each.cell]]
    best = replace(best, unsure=None in noise.values())

    def cheapness(each: Candidate) -> tuple[float, ...]:
        batch = cell_of[each.cell].axes.get("max_batch_size")
        return (*(of(each) for of in _CHEAPER.values()), batch if isinstance(batch, int) else 0)

    first = [replace(each, tied=bool(tied)) for each in sorted([best, *tied], key=cheapness)]
    rest = [each for each in good[1:] if each not in tied]
    placed: list[Candidate] = []
    for each in (*first, *rest):
        alike = same.get((each.cell, str(each.level)), ())
        twin = next((other.cell for other in placed if other.cell in alike and other.level == each.level), None)
        placed.append(each if twin is None else replace(each, same_work_as=twin))
    if not Recommended.of(placed).tied:  # only cells that do the same work are tied
        placed = [replace(each, tied=False) for each in placed]
    return [*placed, *(each for each in group if each.reason is not None)]


def within_noise(best: Candidate, other: Candidate, cell_of: Mapping[CellId, Measured], goal: Goal) -> bool | None:
    """True if the difference between two candidates has an interval that contains zero. None if it has no interval."""
    if goal == "size":
        return best.engine_bytes == other.engine_bytes
    cells = [(cell_of[each.cell], cell_of[each.cell].level(str(each.level))) for each in (best, other)]
    (mine, at), (its, its_at) = cells
    assert at is not None
    assert its_at is not None
    change = level_delta(_METRIC[goal], its, its_at, mine, at)
    if change.interval is None:
        return None
    scale = mine.gpus / its.gpus if goal == "throughput" else 1.0
    low, high = ((1 + end) * scale - 1 for end in change.interval)
    return low <= 0 <= high


_METRIC: Final[Mapping[Goal, str]] = {"throughput": "output_tps", "latency": "e2e_p50"}


def pareto_front(cells: Iterable[CellResult]) -> list[tuple[CellId, str]]:
    """(cell, level) of the points that no other exceeds in tokens/s per GPU and per user, by increasing speed per user.

    Only closed loops of cells whose stages all succeeded: the throughput of an open loop is the offered load.
    """
    points = [
        (speed, throughput, cell.id, level.key)
        for cell in cells
        if cell.unfit is None
        for level in cell.levels
        if level.request_rate is None
        and (speed := level.value("user_tps")) is not None
        and (throughput := cell.per_gpu(level)) is not None
    ]
    front: list[tuple[CellId, str]] = []
    most = 0.0
    for _, throughput, cell_id, key in sorted(points, key=lambda point: (-point[0], -point[1])):
        if throughput > most:
            most = throughput
            front.insert(0, (cell_id, key))
    return front


def cost(each: Candidate, objective: Goal) -> float:
    """The cost of a candidate. Lower is better."""
    if objective == "throughput":
        return -(each.output_tps_per_device or 0.0)
    value = each.e2e_p50_ms if objective == "latency" else each.engine_bytes
    return float("inf") if value is None else float(value)


def at_best(
    cell: Measured, workload: Workload, slos: Sequence[Objective], objective: Goal, metric: str | None
) -> Candidate:
    """A cell at its best level that meets the objectives, or at the nearest level, with all objectives that it misses."""
    bare = Candidate(
        cell=cell.id,
        workload=workload,
        reason=cell.unfit or cell.why,
        engine_bytes=cell.engine_size_bytes,
        accuracy=cell.accuracy.get(metric or next(iter(cell.accuracy), "")),
        gpus=cell.gpus,
        preparation_s=cell.preparation_s,
    )
    if not cell.levels:
        return bare

    def at(level: LevelResult, reason: str | None = None, shortfall: float | None = None) -> Candidate:
        interval = level.interval(_METRIC[objective]) if objective in _METRIC else None
        if interval is not None and objective == "throughput":
            interval = interval[0] / cell.gpus, interval[1] / cell.gpus
        return replace(
            bare,
            level=level.key,
            reason=cell.unfit or reason,
            output_tps_per_device=cell.per_gpu(level),
            user_tps=level.value("user_tps"),
            e2e_p50_ms=level.value("e2e_p50"),
            interval=interval,
            requests=level.requests,
            dollars_per_million=cell.cost(level),
            shortfall=None if cell.unfit is not None else shortfall,
        )

    good = [at(level) for level in cell.levels if not any(level.missed(slo) for slo in slos)]
    if good:
        return min(good, key=lambda each: cost(each, objective))
    shortfalls = [max(slo.share(level.bound(slo.metric)) for slo in slos) for level in cell.levels]
    least = min(shortfalls)
    nearest = cell.levels[shortfalls.index(least)]
    missed = ", ".join(reason for slo in slos if (reason := nearest.missed(slo)) is not None)
    more = f", its best of {len(cell.levels)} levels" if len(cell.levels) > 1 else ""
    return at(nearest, f"{missed} at {result.load_words(nearest.key)}{more}", least if math.isfinite(least) else None)


def inaccurate(
    cell: Measured, base: Measured | None, least: LeastAccuracy | None, allow: Collection[str]
) -> str | None:
    """The reason why a cell's accuracy excludes it, or None."""
    metric = (least.metric if least else None) or next(iter(cell.accuracy), None)
    score = None if metric is None else cell.accuracy.get(metric)
    if least is not None and least.share is not None and least.share >= 1:
        return None
    if metric is None or score is None:
        return None if least is None else f"accuracy{'' if metric is None else f' {metric}'} was not measured"
    if least is not None and least.score is not None:
        return None if score >= least.score else f"{metric} {score:.3f} < {least.score:g}"
    if base is None:
        if least is None or cell.axes.get("precision") in report_file.UNQUANTIZED:
            return None  # the unquantized cell is the reference
        return f"{metric} cannot be compared: no matching unquantized cell"
    reference = base.accuracy.get(metric)
    if reference is None:
        return None if least is None else f"{metric} cannot be compared: it was not measured for {base.id}"
    if (apart := _apart(metric, cell, base, allow)) is not None:
        return apart
    verdict = accuracy_delta(f"accuracy.{metric}", metric, cell, base).verdict
    below = f"below the {reference:.3f} of {base.axes.get('precision')}"
    if least is None or (allowed := least.loss(reference)) is None:
        clearly = f"{metric} {score:.3f} is significantly (95%) {below}; --min-accuracy -100% accepts it"
        return clearly if verdict is ChangeVerdict.WORSE else None
    if score >= reference - allowed:
        return None
    noise = " (within noise: use more questions)" if verdict is ChangeVerdict.NOISE else ""
    by, most = f"{1 - score / reference:.1%}", f"{least.share or 0:.1%}"
    if least.points is not None:
        by, most = f"{(reference - score) * 100:.1f} points", f"{least.points * 100:g}"
    return f"{metric} {score:.3f} is {by} {below}, {most} allowed{noise}"


def _apart(metric: str, cell: Measured, base: Measured, allow: Collection[str]) -> str | None:
    """Why two scores are not comparable: other questions, or a different system as far as recorded."""
    loads = conditions.differences(cell.conditions, base.conditions) if cell.levels and base.levels else ()
    systems = [each for each in loads if each.field.about == "system"]
    why = conditions.deciding((*conditions.of_questions(cell.conditions, base.conditions), *systems), allow)
    if not why:
        return None
    return f"{metric} cannot be compared with {base.id}: {why[0]} (compare anyway with --allow {why[0].field.about})"


# As text


def _of_workload(
    group: Sequence[Candidate], workload: str, parts: Sequence[str], recommendation: Recommendation
) -> Iterator[text_blocks.Block]:
    goal, choice = recommendation.goal, Recommended.of(group)
    if workload:
        yield text_blocks.TextLine(f"for {workload}", "bold")
    good = [each for each in group if each.reason is None and each.same_work_as is None]
    if choice.best is not None:
        at = result.load_words(str(choice.best.level))
        yield text_blocks.TextLine(f"recommended: {choice.best.cell}, at {at}", "bold green")
        yield text_blocks.TextLine(f"best of {len(good)} that meet the objectives: {OBJECTIVES[goal]}", "dim")
    else:
        yield text_blocks.TextLine("no configuration meets the objectives", "bold red")
    if choice.tied:
        others = count(len(choice.tied), "other configuration")
        why = f" ({choice.why})" if choice.why else ""
        yield text_blocks.TextLine(
            f"tie: the difference to {others} is within noise; the cheapest is recommended{why}. More repeats narrow the intervals",
            "yellow",
        )
    elif choice.best is not None and choice.best.unsure:
        few = "" if choice.best.requests is None else f" of {count(choice.best.requests, 'request')}"
        yield text_blocks.TextLine(
            f"measurements{few} have no interval, so this may be noise; measure more requests or repeats", "yellow"
        )
    if choice.nearest is not None:
        yield text_blocks.TextLine(f"nearest: {choice.nearest.cell} misses {choice.nearest.reason}", "yellow")
    shown = [column for column in _columns(recommendation) if any(column.value(each) is not None for each in group)]
    rows: list[list[text_blocks.Value]] = []
    for each in group:
        level = "n/a" if each.level is None else f"@{each.level}"
        rows.append(
            [without(each.cell, parts), level, *(column.value(each) or "" for column in shown), _why(each, parts)]
        )
    yield text_blocks.Grid(
        ["cell", "level", *(column.head for column in shown), ""], rows, (0, len(shown) + 2), notes_of=2
    )
    if recommendation.numerics is not None:
        yield text_blocks.TextLine(f"\n{recommendation.numerics}", "yellow")


class _Column(NamedTuple):
    head: str
    value: Callable[[Candidate], str | None]


def _columns(recommendation: Recommendation) -> list[_Column]:
    """The columns that follow the level, with the goal's interval next to its metric."""

    def of(name: str, scale: float = 1.0) -> Callable[[Candidate], str | None]:
        def value(each: Candidate) -> str | None:
            known = getattr(each, name)
            return None if known is None else text_tables.number(known / scale)

        return value

    rate = "tok/s/GPU" if recommendation.per_gpu else "tok/s"
    every = [
        _Column(rate, of("output_tps_per_device")),
        _Column("tok/s/user", of("user_tps")),
        _Column("e2e p50 ms", of("e2e_p50_ms")),
        _Column("$/M tok", of("dollars_per_million")),
        _Column("engine MB", of("engine_bytes", 1e6)),
        _Column("accuracy", of("accuracy")),
    ]
    if recommendation.goal != "size":
        every.insert(1 if recommendation.goal == "throughput" else 3, _Column("95%", _certainty))
    return every


def _certainty(each: Candidate) -> str | None:
    """The interval of the ranking value, or the number of requests that it is based on."""
    if each.interval is not None:
        return " to ".join(map(text_tables.number, each.interval))
    return None if each.requests is None else f"of {count(each.requests, 'request')}"


def _why(each: Candidate, parts: Sequence[str]) -> text_blocks.Value:
    if each.reason is not None:
        return each.reason, "red"
    if each.same_work_as is not None:
        return f"the same work as {without(each.same_work_as, parts)}, figures from both", "dim"
    words = "meets all objectives" + (", tied" if each.tied else "") + (", on the Pareto front" if each.front else "")
    return words, "green"
