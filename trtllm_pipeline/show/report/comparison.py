"""Two sides compared: cells matched by their axes, differences with their intervals, and payback.

Pure functions of what `orchestrate/results/measured.py` loads.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from trtllm_pipeline.base import Json, UsageError
from trtllm_pipeline.measure import (
    HIGHER_IS_BETTER,
    LEVEL_METRICS,
    RATES,
    Difference,
    LevelResult,
    RepeatResult,
    deciding,
    differences,
    latency_of,
    load_words,
    of_makers,
    of_questions,
    stats,
)
from trtllm_pipeline.orchestrate import Measured, RequestSample, Side

if TYPE_CHECKING:
    import numpy as np

TAIL: Final = 5
"""Requests that must lie beyond a percentile, or resampling them says nothing of it: p99 takes 500."""
CELL_METRICS: Final = {
    "accuracy": "accuracy",
    "build_s": "build_s",
    "preparation_s": "preparation_s",
    "engine_bytes": "engine_size_bytes",
    "trtllm_bench_tps": "trtllm_bench_tps",
}
"""Metric -> attribute of a cell."""
DEFAULT: Final = (
    *("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "e2e_p50", "output_tps"),
    *("accuracy", "build_s", "engine_bytes"),
)
METHODS: Final = {
    "paired_repeats": "repeats of both sides that alternate in time, pair by pair: Student's t on logarithms of ratios",
    "repeats": "repeats of each side, in one block after the other: Welch's t on logarithms. What differs between two "
    "starts of a server, or changed on the machine between the blocks, is not in it",
    "paired_requests": "requests of one repeat, prompts paired: percentile bootstrap. Narrower than the truth: what "
    "changes from one measurement to the next is not in it",
    "requests": "requests of one repeat: percentile bootstrap. Narrower than the truth: what changes from one "
    "measurement to the next is not in it",
    "paired_questions": "answers to the same questions: percentile bootstrap of the mean difference",
    "questions": "both sides' own intervals, as of independent questions",
    "exact": "a size, known exactly",
    "same": "both sides are one and the same measurement",
}
"""What an interval is made of, by the name in `method`."""


class ChangeVerdict(str, Enum):
    """Whether a difference is an improvement, as far as its interval tells."""

    BETTER = "better"
    WORSE = "worse"
    NOISE = "noise"
    """The interval holds zero."""
    UNKNOWN = "unknown"
    """There is no interval: too little was measured to tell."""
    MISSING = "missing"
    """One of the values is not there."""


@dataclass(frozen=True, slots=True)
class Delta:
    """One metric on both sides. `change` and the interval are relative to the base: 0.1 is 10% more."""

    metric: str
    base: float | None
    new: float | None
    change: float | None
    interval: stats.Interval | None
    method: str | None
    verdict: ChangeVerdict


@dataclass(frozen=True, slots=True)
class Pair:
    """A cell against its base, at one level (None: what does not depend on the level)."""

    cell: str
    base: str
    level: str | None
    deltas: tuple[Delta, ...]

    def delta(self, metric: str) -> Delta | None:
        """That of `metric`; `accuracy` stands for the first score."""
        exact = next((each for each in self.deltas if each.metric == metric), None)
        if exact is None and metric == "accuracy":
            return next((each for each in self.deltas if each.metric.startswith("accuracy.")), None)
        return exact


@dataclass(frozen=True, slots=True)
class Payback:
    """After how many tokens the work of preparing `cell` pays back, compared with `base`, which exists already."""

    cell: str
    base: str
    level: str
    preparation_s: float
    saved_s_per_token: float
    tokens: float | None
    """Output tokens; None when the cell saves nothing."""
    load_s: float | None
    """Seconds in which the cell generates these tokens at this level."""
    verdict: ChangeVerdict
    """Of the throughput: whether what it saves is beyond noise."""


class NotCompared(NamedTuple):
    """A cell of which nothing is compared."""

    cell: str
    reason: str


class LostLevel(NamedTuple):
    """A level that only the base has."""

    cell: str
    level: str
    reason: str


class Refusal(NamedTuple):
    """A cell that was not measured under the same conditions as its base."""

    cell: str
    base: str
    differences: tuple[Difference, ...]


class Caveat(NamedTuple):
    """A condition that differs in spite of which a cell is compared: allowed, or of little influence."""

    cell: str
    difference: Difference


@dataclass(slots=True)
class Comparison:
    """The result of a comparison."""

    new: str
    base: str
    matched: list[tuple[str, str]] = field(default_factory=list)
    """(cell, its base), whatever there is to compare."""
    pairs: list[Pair] = field(default_factory=list)
    paybacks: list[Payback] = field(default_factory=list)
    only_new: list[NotCompared] = field(default_factory=list)
    """Cells without a base, or whose base was not measured."""
    only_base: list[NotCompared] = field(default_factory=list)
    """Cells that the new side lacks."""
    lost: list[LostLevel] = field(default_factory=list)
    unfit: list[NotCompared] = field(default_factory=list)
    """Cells that failed or are not finished, or whose base did or is."""
    refused: list[Refusal] = field(default_factory=list)
    told: list[Caveat] = field(default_factory=list)

    @property
    def methods(self) -> dict[str, str]:
        """What its intervals are made of."""
        used = {delta.method for pair in self.pairs for delta in pair.deltas if delta.method}
        return {name: words for name, words in METHODS.items() if name in used}

    def to_json(self) -> dict[str, Json]:
        """As `pipeline compare --format json` prints it, see docs/formats.md."""
        pairs: list[Json] = [
            {
                "cell": pair.cell,
                "base": pair.base,
                "level": pair.level,
                "metrics": {values.pop("metric"): values for values in map(asdict, pair.deltas)},
            }
            for pair in self.pairs
        ]
        alone = {name: [each._asdict() for each in getattr(self, name)] for name in ("only_new", "only_base", "lost")}
        return {
            "schema": 1,
            "new": self.new,
            "base": self.base,
            "confidence": stats.CONFIDENCE,
            "methods": dict[str, Json](self.methods),
            "pairs": pairs,
            "paybacks": [asdict(each) for each in self.paybacks],
            **alone,
            "unfit": [each._asdict() for each in self.unfit],
            "refused": [
                {"cell": cell, "base": base, "differences": [each.to_json() for each in why]}
                for cell, base, why in self.refused
            ],
            "differences": [{"cell": cell, **each.to_json()} for cell, each in self.told],
        }


def better_is_higher(metric: str) -> bool:
    """Which way is an improvement."""
    return metric in HIGHER_IS_BETTER or metric == "trtllm_bench_tps" or metric.partition(".")[0] == "accuracy"


def check_metric(name: str) -> str:
    """`name`, if it is a metric. Raises UsageError."""
    if name in LEVEL_METRICS or name in CELL_METRICS or name.startswith("accuracy."):
        return name
    raise UsageError(
        f"there is no metric {name!r}",
        hint=f"such as ttft_p99, tpot_p50, itl_mean, e2e_p95, {', '.join(RATES)}, tokens_per_joule, {', '.join(CELL_METRICS)}, "
        "accuracy.contains",
    )


# Matching cells


def compare(
    new: Side, base: Side, metrics: Sequence[str] = DEFAULT, *, allow: Collection[str] = frozenset()
) -> Comparison:
    """Compare each cell of `new` with the cell of `base` that is equal on all axes both sides have.

    One cell without axes is the base of all. Cells that were measured under other conditions are refused, but for what
    `allow` names: groups or fields of `measure/load/conditions.py`.
    """
    result = Comparison(new.name, base.name)
    if len(base.cells) == 1 and not base.cells[0].axes:
        matched = [(cell, base.cells[0]) for cell in new.cells]
    elif len(new.cells) == 1 and not new.cells[0].axes:
        matched = [(new.cells[0], cell) for cell in base.cells]
    else:
        shared = _axes(new.cells) & _axes(base.cells)
        matched = _matched(result, new.cells, base.cells, shared, "the baseline has no cell with the same axes")
        seen = {other.id for _, other in matched}
        left = [cell.id for cell in base.cells if cell.id not in seen and cell.feasible]
        result.only_base += [NotCompared(cell, "the new side has no such cell") for cell in left]
    return _compared(result, matched, metrics, allow)


def compare_by(
    side: Side,
    axis: str,
    base: str | None,
    metrics: Sequence[str] = DEFAULT,
    *,
    allow: Collection[str] = frozenset(),
) -> Comparison:
    """Compare the cells of one run: those with other values of `axis` with those that have the value `base`.

    The default base is the first value that needs no preparation while others do, or else the first value. The payback of
    the others then refers to it. Conditions that the axis itself varies do not count as different.
    Raises UsageError for an axis or a value that is not there.
    """

    def value(cell: Measured) -> str:
        return str(cell.axes.get(axis, _UNSAID.get(axis)))

    values = list(dict.fromkeys(value(cell) for cell in side.cells if axis in cell.axes or axis in _UNSAID))
    if not any(axis in cell.axes for cell in side.cells):
        axes = dict.fromkeys(name for cell in side.cells for name in cell.axes)
        raise UsageError(f"there is no axis {axis!r}", hint=f"the axes are {', '.join(axes) or 'none'}")
    if base is None:
        prepared = {value(cell) for cell in side.cells if cell.preparation_s is not None}
        measured = [value(cell) for cell in side.cells if cell.levels and cell.unfit is None]
        unprepared = [each for each in measured if each in values and each not in prepared] if prepared else []
        base = (unprepared or values)[0]
    if base not in values:
        raise UsageError(f"no cell has {axis} {base}", hint=f"there are {', '.join(values)}")
    old = [cell for cell in side.cells if value(cell) == base]
    new = [cell for cell in side.cells if value(cell) != base]
    result = Comparison(f"{side.name}, other {axis}", f"{side.name}, {axis} {base}")
    none = f"no cell with {axis} {base} is otherwise equal"
    return _compared(result, _matched(result, new, old, _axes(side.cells) - {axis}, none), metrics, allow, axis)


_UNSAID: Final = {"ep": 1}
"""Axis that cells have only beyond a value -> that value."""
_Matched = list[tuple[Measured, Measured]]


def _axes(cells: Iterable[Measured]) -> set[str]:
    return {name for cell in cells for name in cell.axes}


def _matched(
    result: Comparison, new: Iterable[Measured], base: Iterable[Measured], axes: Collection[str], none: str
) -> _Matched:
    """Cells and their bases, equal on `axes`; of cells without one it is told in `result`, `none` for want of any."""

    def key(cell: Measured) -> tuple[str, ...]:
        return tuple(str(cell.axes.get(name)) for name in sorted(axes))

    alike: dict[tuple[str, ...], list[Measured]] = {}
    for cell in base:
        alike.setdefault(key(cell), []).append(cell)
    matched: _Matched = []
    for cell in new:
        found = alike.get(key(cell), [])
        exact = [other for other in found if other.id == cell.id] or found
        if len(exact) == 1:
            matched.append((cell, exact[0]))
        else:
            several = f"{len(found)} cells of the baseline have the same axes: {found[0].id}, ..." if found else none
            result.only_new.append(NotCompared(cell.id, several))
    return matched


def _compared(
    result: Comparison, matched: _Matched, metrics: Sequence[str], allow: Collection[str], axis: str | None = None
) -> Comparison:
    of_level = [metric for metric in metrics if metric in LEVEL_METRICS]
    of_cell = [metric for metric in metrics if metric not in LEVEL_METRICS]
    for cell, other in matched:
        if not cell.feasible and not other.feasible:
            continue
        result.matched.append((cell.id, other.id))
        if cell.unfit is not None or other.unfit is not None:
            result.unfit.append(NotCompared(cell.id, cell.unfit or f"the baseline {other.id}: {other.unfit}"))
            continue
        apart = _apart(cell, other)
        if why := deciding(apart, allow, () if axis is None else (axis,)):
            result.refused.append(Refusal(cell.id, other.id, why))
            continue
        result.told += [Caveat(cell.id, each) for each in apart]
        deltas = [_cell_delta(metric, cell, other) for metric in _expanded(of_cell, cell, other)]
        if known := tuple(each for each in deltas if each.base is not None or each.new is not None):
            result.pairs.append(Pair(cell.id, other.id, None, known))
        for level in other.levels:
            mine = cell.level(level.key)
            if mine is None:
                why_not = "this level was not measured" if cell.levels else cell.why
                result.lost.append(LostLevel(cell.id, level.key, why_not))
                continue
            compared = tuple(_level_delta(metric, cell, mine, other, level) for metric in of_level)
            result.pairs.append(Pair(cell.id, other.id, level.key, compared))
            if (payback := _payback(cell, mine, other, level)) is not None:
                result.paybacks.append(payback)
        if not other.levels and cell.levels:
            result.only_new.append(NotCompared(cell.id, f"the baseline {other.id}: {other.why}"))
    return result


def _same_load_run(cell: Measured, other: Measured) -> bool:
    """Also where a report was kept: the same numbers, measured under the same conditions at the same moment."""
    if cell.perf is not None and cell.perf == other.perf:
        return True
    known = cell.conditions.measured_s is not None
    return known and cell.conditions == other.conditions and cell.levels == other.levels


def _same_answers(cell: Measured, other: Measured) -> bool:
    return cell.answers is not None and cell.answers == other.answers


def _apart(cell: Measured, other: Measured) -> tuple[Difference, ...]:
    """In what the conditions differ under which both were measured, as far as both were."""
    found: tuple[Difference, ...] = ()
    scored = bool(cell.accuracy and other.accuracy) and not _same_answers(cell, other)
    if _same_load_run(cell, other):
        pass
    elif cell.levels and other.levels:
        shared = [level for level in cell.levels if other.level(level.key)]
        places = [(level.concurrency, level.request_rate, load_words(level.key)) for level in shared]
        found = differences(cell.conditions, other.conditions, places)
    else:
        prepared = None not in (cell.preparation_s, other.preparation_s)
        found = of_makers(cell.conditions, other.conditions, ["preparation"] * prepared + ["accuracy"] * scored)
    return (*found, *of_questions(cell.conditions, other.conditions)) if scored else found


def _expanded(metrics: Sequence[str], cell: Measured, other: Measured) -> list[str]:
    """`accuracy` stands for the first score both have; the others stay as they are."""
    shared = [name for name in other.accuracy if name in cell.accuracy] or [*other.accuracy, *cell.accuracy]
    return [f"accuracy.{shared[0]}" if metric == "accuracy" and shared else metric for metric in metrics]


# Differences


def delta(
    metric: str,
    new: float | None,
    base: float | None,
    interval: stats.Interval | None = None,
    method: str | None = None,
) -> Delta:
    """A difference, judged. The base 0 has no relative difference, so it counts as missing unless both are 0."""
    if new is None or base is None or (base == 0 and new != 0):
        return Delta(metric, base, new, None, None, None, ChangeVerdict.MISSING)
    change = 0.0 if base == 0 else new / base - 1
    if interval is None:
        return Delta(metric, base, new, change, None, None, ChangeVerdict.UNKNOWN)
    low, high = interval
    if low <= 0 <= high:
        verdict = ChangeVerdict.NOISE
    else:
        verdict = ChangeVerdict.BETTER if (low > 0) == better_is_higher(metric) else ChangeVerdict.WORSE
    return Delta(metric, base, new, change, interval, method, verdict)


def _level_delta(metric: str, cell: Measured, new: LevelResult, other: Measured, base: LevelResult) -> Delta:
    after, before = new.value(metric), base.value(metric)
    if _same_load_run(cell, other):
        return delta(metric, after, before, (0.0, 0.0), "same")
    repeats, others = (_of_repeats(level, lambda repeat: repeat.value(metric)) for level in (new, base))
    if len(repeats) > 1 and len(others) > 1:
        if alternate(*(_of_repeats(level, lambda repeat: repeat.started_s) for level in (base, new))):
            return delta(metric, after, before, stats.paired_change(others, repeats), "paired_repeats")
        return delta(metric, after, before, stats.unpaired_change(others, repeats), "repeats")
    if after is None or not before:
        return delta(metric, after, before)
    interval, method = _resampled(metric, after / before, cell.samples(new.key), other.samples(base.key))
    return delta(metric, after, before, interval, method)


def _of_repeats(level: LevelResult, of: Callable[[RepeatResult], float | None]) -> list[float]:
    """A number of each repeat; empty unless all have one."""
    values = [of(repeat) for repeat in level.repeats]
    return [value for value in values if value is not None] if None not in values else []


def alternate(base: Sequence[float], new: Sequence[float]) -> bool:
    """Whether two series of times belong together pair by pair: base, new, base, new, or in turn the other way round."""
    if len(base) != len(new) or len(base) < 2:
        return False
    order = sorted([(time, 0) for time in base] + [(time, 1) for time in new])
    sides = [side for _, side in order]
    return all(sides[index] != sides[index + 1] for index in range(0, len(sides), 2))


_Rows = list[tuple[float, ...]]
_Columns = Callable[[RequestSample], "tuple[float, ...] | None"]


def _resampled(
    metric: str, ratio: float, new: Sequence[RequestSample], base: Sequence[RequestSample]
) -> tuple[stats.Interval | None, str | None]:
    """An interval of `ratio` - 1 from the requests of both sides, and its method; None where requests do not tell."""
    statistic = _statistic(metric)
    if statistic is None or not new or not base:
        return None, None
    columns, of, least = statistic
    before, after, paired = _rows(base, new, columns)
    if min(len(before), len(after)) < least:
        return None, None
    found = stats.resampled_change(before, after, of, paired=paired)
    if found is not None and metric in RATES:
        # Requests tell how much work was done in how much time, not the window; their noise is put on the rate.
        done = [sum(row[0] for row in rows) / sum(row[1] for row in rows) for rows in (after, before)]
        scale = ratio / (done[0] / done[1])
        found = ((found[0] + 1) * scale - 1, (found[1] + 1) * scale - 1)
    return found, "paired_requests" if paired else "requests"


def _statistic(metric: str) -> tuple[_Columns, stats.Statistic, int] | None:
    """How a metric comes from requests: the numbers of each, the metric of many rows of them, and how many it takes.

    None for gaps between tokens, which are no property of a request, and for extremes: that of resampled requests is
    never beyond the one measured.
    """
    import numpy as np

    if metric in {"output_tps", "rps"}:
        return (
            lambda sample: (sample.output_tokens if metric == "output_tps" else 1.0, sample.e2e_ms),
            lambda rows: rows[..., 0].sum(axis=1) / rows[..., 1].sum(axis=1),
            stats.LEAST_REQUESTS,
        )
    if metric == "tokens_per_joule":
        return None
    latency, statistic = latency_of(metric)
    if latency not in {"ttft_ms", "tpot_ms", "e2e_ms"} or statistic in {"min", "max"}:
        return None
    percent = 50.0 if statistic == "mean" else float(statistic[1:])

    def columns(sample: RequestSample) -> tuple[float, ...] | None:
        value: float | None = getattr(sample, latency)
        return None if value is None else (value,)

    def of(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        values = rows[..., 0]
        found: np.ndarray[Any, Any]
        found = values.mean(axis=1) if statistic == "mean" else np.percentile(values, percent, axis=1)
        return found

    return columns, of, math.ceil(round(TAIL / min(percent / 100, 1 - percent / 100), 6))


def _rows(base: Sequence[RequestSample], new: Sequence[RequestSample], columns: _Columns) -> tuple[_Rows, _Rows, bool]:
    """Numbers of the requests of both sides; row by row the same prompt, if both sent the same ones."""
    left, right = _by_prompt(base, columns), _by_prompt(new, columns)
    if left and left.keys() == right.keys():
        return list(left.values()), [right[key] for key in left], True
    return list(left.values()), list(right.values()), False


def _by_prompt(samples: Sequence[RequestSample], columns: _Columns) -> dict[tuple[str, str, int], tuple[float, ...]]:
    """(prompt, its text, which time it was sent) -> numbers."""
    found: dict[tuple[str, str, int], tuple[float, ...]] = {}
    times: Counter[str] = Counter()
    for sample in samples:
        times[sample.prompt] += 1
        if (values := columns(sample)) is not None:
            found[sample.prompt, sample.text, times[sample.prompt]] = values
    return found


def _cell_delta(metric: str, cell: Measured, other: Measured) -> Delta:
    name, _, score = metric.partition(".")
    if name == "accuracy":
        return accuracy_delta(metric, score, cell, other)
    after, before = (getattr(side, CELL_METRICS[metric]) for side in (cell, other))
    if metric == "engine_bytes" and after is not None and before:
        return delta(metric, after, before, (after / before - 1,) * 2, "exact")
    return delta(metric, after, before)


def accuracy_delta(metric: str, score: str, cell: Measured, other: Measured) -> Delta:
    """The score called `score`, with an interval from pairs of answers where both sides were asked the same."""
    after, before = cell.accuracy.get(score), other.accuracy.get(score)
    if after is None or not before:
        return delta(metric, after, before)
    if _same_answers(cell, other):
        return delta(metric, after, before, (0.0, 0.0), "same")
    found = _paired_questions(score, cell, other)
    if found is not None:
        return delta(metric, after, before, (found[0] / before, found[1] / before), "paired_questions")
    ends = [interval for side in (cell, other) if (interval := side.accuracy_intervals.get(score)) is not None]
    if len(ends) < 2:
        return delta(metric, after, before)
    half = math.hypot(*((high - low) / 2 for low, high in ends))
    interval = ((after - before - half) / before, (after - before + half) / before)
    return delta(metric, after, before, interval, "questions")


def _paired_questions(score: str, cell: Measured, other: Measured) -> stats.Interval | None:
    """Interval of the difference of mean scores over the questions both were asked; None when there is no such thing.

    Where the answers are not here any more, it is as the run itself noted it.
    """
    from trtllm_pipeline.measure import drift

    noted = cell.accuracy_drift if cell.accuracy_drift and cell.accuracy_drift.reference == other.id else None
    found = [] if noted is None else [noted]
    if cell.answers is not None and other.answers is not None:
        with contextlib.suppress(UsageError):
            found.insert(0, drift.compare(drift.read(other.answers), drift.read(cell.answers)))
    # Some questions alone would be another difference than that of the two means.
    whole = (each.scores[score].interval for each in found if score in each.scores and not each.unpaired)
    return next(whole, None)


def _payback(cell: Measured, new: LevelResult, other: Measured, base: LevelResult) -> Payback | None:
    """Preparation seconds / (seconds a token takes with the base - with the cell), at the level's throughput."""
    after, before = new.value("output_tps"), base.value("output_tps")
    if cell.preparation_s is None or not after or not before or _same_load_run(cell, other) or cell.axes == other.axes:
        return None  # the same configuration at another time costs nothing
    saved = 1 / before - 1 / after
    verdict = _level_delta("output_tps", cell, new, other, base).verdict
    tokens = cell.preparation_s / saved if saved > 0 else None
    load_s = None if tokens is None else tokens / after
    return Payback(cell.id, other.id, new.key, cell.preparation_s, saved, tokens, load_s, verdict)
