"""Two sides compared: cells matched by their axes, differences with their intervals, and payback.

Pure functions of what `show/report/measured.py` loads.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from trtllm_pipeline.base import Json, UsageError
from trtllm_pipeline.measure import LevelResult, conditions, metric_names, result, stats
from trtllm_pipeline.show.report.measured import Measured, RequestSample, Side

if TYPE_CHECKING:
    import numpy as np

TAIL: Final = 5
"""Requests required beyond a percentile for resampling to be meaningful: p99 needs 500."""
FAR_OUTPUTS: Final = 0.05
"""Outputs whose mean lengths differ by a larger share are reported: shorter outputs take less time."""
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
    "paired_repeats": "repeats of both sides, alternating in time and compared pair by pair: Student's t on logarithms of ratios",
    "repeats": "repeats of each side, in consecutive blocks: Welch's t on logarithms. Does not include variation between "
    "server starts or changes on the machine between the blocks",
    "paired_requests": "requests of one repeat, prompts paired: percentile bootstrap. Too narrow, because it does not "
    "include variation between measurements",
    "requests": "requests of one repeat: percentile bootstrap. Too narrow, because it does not include variation "
    "between measurements",
    "intervals": "the intervals of both sides, which report.json has, assuming independence. Too narrow, because they do not "
    "include variation between measurements",
    "paired_questions": "answers to the same questions: percentile bootstrap of the mean difference",
    "questions": "the intervals of both sides, assuming independent questions",
    "exact": "a size, known exactly",
    "same": "both sides are the same measurement",
}
"""Name in `method` -> how the interval is computed."""


class ChangeVerdict(str, Enum):
    """Verdict on a difference, judged by its interval."""

    BETTER = "better"
    WORSE = "worse"
    NOISE = "noise"
    """The interval contains zero."""
    UNKNOWN = "unknown"
    """No interval: too few measurements."""
    MISSING = "missing"


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
    """A cell and its base at one level. None stands for metrics that do not depend on the level."""

    cell: str
    base: str
    level: str | None
    deltas: tuple[Delta, ...]

    def delta(self, metric: str) -> Delta | None:
        """The delta of `metric`. `accuracy` stands for the first score, `accuracy.TASK` for the first of a task."""
        by_name = {each.metric: each for each in self.deltas}
        return by_name.get(first_of(metric, by_name))


@dataclass(frozen=True, slots=True)
class Payback:
    """Number of tokens after which preparing `cell` pays off, compared with the existing `base`."""

    cell: str
    base: str
    level: str
    preparation_s: float
    saved_s_per_token: float
    tokens: float | None
    """Output tokens, or None if the cell saves nothing."""
    load_s: float | None
    """Seconds that the cell needs to generate these tokens at this level."""
    verdict: ChangeVerdict
    """Verdict on the throughput: whether the saving is beyond noise."""


class NotCompared(NamedTuple):
    """A cell that is not compared."""

    cell: str
    reason: str


class LostLevel(NamedTuple):
    """A level that exists only in the base."""

    cell: str
    level: str
    reason: str


class Refusal(NamedTuple):
    """A cell measured under other conditions than its base."""

    cell: str
    base: str
    differences: tuple[conditions.Difference, ...]


class Caveat(NamedTuple):
    """A differing condition that does not prevent a comparison: it is allowed or has little influence."""

    cell: str
    difference: conditions.Difference


@dataclass(slots=True)
class Comparison:
    """The result of a comparison."""

    new: str
    base: str
    matched: list[tuple[str, str]] = field(default_factory=list)
    """(cell, its base), whether or not metrics can be compared."""
    pairs: list[Pair] = field(default_factory=list)
    paybacks: list[Payback] = field(default_factory=list)
    only_new: list[NotCompared] = field(default_factory=list)
    """Cells without a measured base."""
    only_base: list[NotCompared] = field(default_factory=list)
    """Cells missing on the new side."""
    lost: list[LostLevel] = field(default_factory=list)
    unfit: list[NotCompared] = field(default_factory=list)
    """Cells that failed or are unfinished, or whose base is."""
    refused: list[Refusal] = field(default_factory=list)
    caveats: list[Caveat] = field(default_factory=list)

    @property
    def methods(self) -> dict[str, str]:
        used = {delta.method for pair in self.pairs for delta in pair.deltas if delta.method}
        return {name: words for name, words in METHODS.items() if name in used}

    def to_json(self) -> dict[str, Json]:
        """The JSON of `pipeline compare --format json`, see docs/reference/formats.md."""
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
            "differences": [{"cell": cell, **each.to_json()} for cell, each in self.caveats],
        }


def better_is_higher(metric: str) -> bool:
    return (
        metric in metric_names.HIGHER_IS_BETTER
        or metric == "trtllm_bench_tps"
        or metric.partition(".")[0] == "accuracy"
    )


def check_metric(name: str) -> str:
    """`name`, checked to be a metric. Raises UsageError."""
    if name in metric_names.LEVEL_METRICS or name in CELL_METRICS or name.startswith("accuracy."):
        return name
    raise UsageError(
        f"unknown metric {name!r}",
        hint=f"such as ttft_p99, tpot_p50, itl_mean, e2e_p95, {', '.join(metric_names.RATES)}, tokens_per_joule, {', '.join(CELL_METRICS)}, "
        "accuracy.contains",
    )


# Matching cells


def compare(
    new: Side, base: Side, metrics: Sequence[str] = DEFAULT, *, allow: Collection[str] = frozenset()
) -> Comparison:
    """Compare each cell of `new` with the cell of `base` that matches it on all common axes.

    A single cell without axes is the base of all cells. Cells measured under other conditions are refused, except for
    differences in `allow`: groups or fields of `measure/load/conditions.py`.
    """
    comparison = Comparison(new.name, base.name)
    if len(base.cells) == 1 and not base.cells[0].axes:
        matched = [(cell, base.cells[0]) for cell in new.cells]
    elif len(new.cells) == 1 and not new.cells[0].axes:
        matched = [(new.cells[0], cell) for cell in base.cells]
    else:
        shared = _axes(new.cells) & _axes(base.cells)
        matched = _matched(comparison, new.cells, base.cells, shared, "the baseline has no cell with the same axes")
        used = {other.id for _, other in matched}
        left = [cell.id for cell in base.cells if cell.id not in used and cell.feasible]
        comparison.only_base += [NotCompared(cell, "the new side has no such cell") for cell in left]
    return _compared(comparison, matched, metrics, allow)


def compare_by(
    side: Side, axis: str, base: str | None, metrics: Sequence[str] = DEFAULT, *, allow: Collection[str] = frozenset()
) -> Comparison:
    """Compare the cells of one run along `axis` with the cells at the value `base`.

    The default base is the first value that needs no preparation if others do, otherwise the first value. Payback refers
    to the base. Conditions that the axis itself varies do not count as different.
    Raises UsageError for an unknown axis or value.
    """

    def value(cell: Measured) -> str:
        return str(cell.axes.get(axis, _UNSAID.get(axis)))

    values = list(dict.fromkeys(value(cell) for cell in side.cells if axis in cell.axes or axis in _UNSAID))
    if not any(axis in cell.axes for cell in side.cells):
        axes = dict.fromkeys(name for cell in side.cells for name in cell.axes)
        raise UsageError(f"unknown axis {axis!r}", hint=f"axes: {', '.join(axes) or 'none'}")
    if base is None:
        prepared = {value(cell) for cell in side.cells if cell.preparation_s is not None}
        measured = [value(cell) for cell in side.cells if cell.levels and cell.unfit is None]
        unprepared = [each for each in measured if each in values and each not in prepared] if prepared else []
        base = (unprepared or values)[0]
    if base not in values:
        raise UsageError(f"no cell has {axis} {base}", hint=f"values: {', '.join(values)}")
    old = [cell for cell in side.cells if value(cell) == base]
    new = [cell for cell in side.cells if value(cell) != base]
    comparison = Comparison(f"{side.name}, other {axis}", f"{side.name}, {axis} {base}")
    none = f"no matching cell with {axis} {base}"
    return _compared(comparison, _matched(comparison, new, old, _axes(side.cells) - {axis}, none), metrics, allow, axis)


_UNSAID: Final = {"ep": 1}
"""Axis that exists only for one value of `axis` -> that value."""
_Matched = list[tuple[Measured, Measured]]


def _axes(cells: Iterable[Measured]) -> set[str]:
    return {name for cell in cells for name in cell.axes}


def _matched(
    comparison: Comparison, new: Iterable[Measured], base: Iterable[Measured], axes: Collection[str], none: str
) -> _Matched:
    """Cells and their bases, matched on `axes`. Cells without a base are recorded in `comparison` with the reason `none`."""

    def key(cell: Measured) -> tuple[str, ...]:
        return tuple(str(cell.axes.get(name)) for name in sorted(axes))

    alike: dict[tuple[str, ...], list[Measured]] = {}
    for cell in base:
        alike.setdefault(key(cell), []).append(cell)
    matched: _Matched = []
    for cell in new:
        candidates = alike.get(key(cell), [])
        exact = [other for other in candidates if other.id == cell.id] or candidates
        if len(exact) == 1:
            matched.append((cell, exact[0]))
        else:
            several = (
                f"{len(candidates)} cells of the baseline have the same axes: {candidates[0].id}, ..."
                if candidates
                else none
            )
            comparison.only_new.append(NotCompared(cell.id, several))
    return matched


def _compared(
    comparison: Comparison, matched: _Matched, metrics: Sequence[str], allow: Collection[str], axis: str | None = None
) -> Comparison:
    of_level = [metric for metric in metrics if metric in metric_names.LEVEL_METRICS]
    of_cell = [metric for metric in metrics if metric not in metric_names.LEVEL_METRICS]
    for cell, other in matched:
        if not cell.feasible and not other.feasible:
            continue
        comparison.matched.append((cell.id, other.id))
        if cell.unfit is not None or other.unfit is not None:
            comparison.unfit.append(NotCompared(cell.id, cell.unfit or f"the baseline {other.id}: {other.unfit}"))
            continue
        apart = _apart(cell, other)
        if why := conditions.deciding(apart, allow, () if axis is None else (axis,)):
            comparison.refused.append(Refusal(cell.id, other.id, why))
            continue
        comparison.caveats += [Caveat(cell.id, each) for each in apart]
        deltas = [_cell_delta(metric, cell, other) for metric in _expanded(of_cell, cell, other)]
        if known := tuple(each for each in deltas if each.base is not None or each.new is not None):
            comparison.pairs.append(Pair(cell.id, other.id, None, known))
        for level in other.levels:
            mine = cell.level(level.key)
            if mine is None:
                why_not = "this level was not measured" if cell.levels else cell.why
                comparison.lost.append(LostLevel(cell.id, level.key, why_not))
                continue
            compared = tuple(level_delta(metric, cell, mine, other, level) for metric in of_level)
            comparison.pairs.append(Pair(cell.id, other.id, level.key, compared))
            if axis is None or not conditions.OUTPUT_LENGTH.explained_by((axis,)):
                comparison.caveats += [Caveat(cell.id, each) for each in _output_lengths(mine, level)]
            if (payback := _payback(cell, mine, other, level)) is not None:
                comparison.paybacks.append(payback)
        if not other.levels and cell.levels:
            comparison.only_new.append(NotCompared(cell.id, f"the baseline {other.id}: {other.why}"))
    return comparison


def _output_lengths(new: LevelResult, base: LevelResult) -> Iterator[conditions.Difference]:
    """The difference between the mean output lengths of a level, if it is not small."""
    after, before = (level.lengths.get("output_tokens_per_request", {}).get("mean") for level in (new, base))
    if after and before and abs(after / before - 1) > FAR_OUTPUTS:
        place = result.load_words(new.key)
        yield conditions.Difference(conditions.OUTPUT_LENGTH, f"{before:.4g}", f"{after:.4g}", place)


def _same_load_run(cell: Measured, other: Measured) -> bool:
    """Also true for a saved copy of a report: the same numbers under the same conditions at the same time."""
    if cell.perf is not None and cell.perf == other.perf:
        return True
    known = cell.conditions.measured_s is not None
    return known and cell.conditions == other.conditions and cell.levels == other.levels


def _same_answers(cell: Measured, other: Measured) -> bool:
    return cell.answers is not None and cell.answers == other.answers


def _apart(cell: Measured, other: Measured) -> tuple[conditions.Difference, ...]:
    """Differences between the measurement conditions of two cells, if both were measured."""
    differing: tuple[conditions.Difference, ...] = ()
    scored = bool(cell.accuracy and other.accuracy) and not _same_answers(cell, other)
    if _same_load_run(cell, other):
        pass
    elif cell.levels and other.levels:
        shared = [level for level in cell.levels if other.level(level.key)]
        places = [(level.concurrency, level.request_rate, result.load_words(level.key)) for level in shared]
        differing = conditions.differences(cell.conditions, other.conditions, places)
    else:
        prepared = None not in (cell.preparation_s, other.preparation_s)
        differing = conditions.of_makers(
            cell.conditions, other.conditions, ["preparation"] * prepared + ["accuracy"] * scored
        )
    return (*differing, *conditions.of_questions(cell.conditions, other.conditions)) if scored else differing


def _expanded(metrics: Sequence[str], cell: Measured, other: Measured) -> list[str]:
    """Resolve `accuracy`, or `accuracy.TASK`, to the first such score that both sides have. Other names stay."""
    shared = [name for name in other.accuracy if name in cell.accuracy] or [*other.accuracy, *cell.accuracy]
    names = [f"accuracy.{name}" for name in shared]
    return list(dict.fromkeys(first_of(metric, names) for metric in metrics))


def first_of(name: str, scores: Collection[str]) -> str:
    """`name`, or the first of `scores` that starts with it: `gsm8k` for `gsm8k.exact_match`."""
    return name if name in scores else next((each for each in scores if each.startswith(f"{name}.")), name)


# Differences


def delta(
    metric: str,
    new: float | None,
    base: float | None,
    interval: stats.Interval | None = None,
    method: str | None = None,
) -> Delta:
    """A difference with its verdict. A base of 0 has no relative difference and counts as missing unless both are 0."""
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


def level_delta(metric: str, cell: Measured, new: LevelResult, other: Measured, base: LevelResult) -> Delta:
    """The difference between a level of a cell and a level of another."""
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
    ends = new.interval(metric), base.interval(metric)
    of_ends = None
    if ends[0] is not None and ends[1] is not None:
        of_ends = stats.change_of_intervals((before, ends[1]), (after, ends[0]))
    # Requests in flight together share what disturbs the server: parts of the window show it, drawing requests does not.
    if interval is None or (
        of_ends is not None and metric in metric_names.RATES and _width(of_ends) > _width(interval)
    ):
        interval, method = of_ends, None if of_ends is None else "intervals"
    return delta(metric, after, before, interval, method)


def _width(interval: stats.Interval) -> float:
    return interval[1] - interval[0]


def _of_repeats(level: LevelResult, of: Callable[[result.RepeatResult], float | None]) -> list[float]:
    """One number per repeat, or empty if a repeat lacks it."""
    values = [of(repeat) for repeat in level.repeats]
    return [value for value in values if value is not None] if None not in values else []


def alternate(base: Sequence[float], new: Sequence[float]) -> bool:
    """True if two series of times alternate pair by pair: base, new, base, new, or with alternating order within pairs."""
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
    """An interval of `ratio` - 1 from the requests of both sides, and its method, or None if requests cannot give one."""
    statistic = _statistic(metric)
    if statistic is None or not new or not base:
        return None, None
    columns, of, least = statistic
    before, after, paired = _rows(base, new, columns)
    if min(len(before), len(after)) < least:
        return None, None
    interval = stats.resampled_change(before, after, of, paired=paired)
    if interval is not None and metric in metric_names.RATES:
        # Requests give work per time but not the window, so their relative noise is applied to the rate.
        done = [sum(row[0] for row in rows) / sum(row[1] for row in rows) for rows in (after, before)]
        scale = ratio / (done[0] / done[1])
        interval = ((interval[0] + 1) * scale - 1, (interval[1] + 1) * scale - 1)
    return interval, "paired_requests" if paired else "requests"


def _statistic(metric: str) -> tuple[_Columns, stats.Statistic, int] | None:
    """How to compute a metric from requests: numbers per request, the statistic over them, and the required count.

    None for gaps between tokens, which are not a property of a request, and for extremes, because resampled requests
    never exceed the measured extreme.
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
    latency, statistic = result.latency_of(metric)
    if latency not in {"ttft_ms", "tpot_ms", "e2e_ms"} or statistic in {"min", "max"}:
        return None
    percent = 50.0 if statistic == "mean" else float(statistic[1:])

    def columns(sample: RequestSample) -> tuple[float, ...] | None:
        value: float | None = getattr(sample, latency)
        return None if value is None else (value,)

    def of(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        values = rows[..., 0]
        means: np.ndarray[Any, Any]
        means = values.mean(axis=1) if statistic == "mean" else np.percentile(values, percent, axis=1)
        return means

    return columns, of, math.ceil(round(TAIL / min(percent / 100, 1 - percent / 100), 6))


def _rows(base: Sequence[RequestSample], new: Sequence[RequestSample], columns: _Columns) -> tuple[_Rows, _Rows, bool]:
    """Numbers of the requests of both sides, aligned by prompt if both sent the same prompts."""
    left, right = _by_prompt(base, columns), _by_prompt(new, columns)
    if left and left.keys() == right.keys():
        return list(left.values()), [right[key] for key in left], True
    return list(left.values()), list(right.values()), False


def _by_prompt(samples: Sequence[RequestSample], columns: _Columns) -> dict[tuple[str, str, int], tuple[float, ...]]:
    """(prompt, its text, how often it was sent before) -> numbers."""
    numbers_by_prompt: dict[tuple[str, str, int], tuple[float, ...]] = {}
    times: Counter[str] = Counter()
    for sample in samples:
        times[sample.prompt] += 1
        if (values := columns(sample)) is not None:
            numbers_by_prompt[sample.prompt, sample.text, times[sample.prompt]] = values
    return numbers_by_prompt


def _cell_delta(metric: str, cell: Measured, other: Measured) -> Delta:
    name, _, score = metric.partition(".")
    if name == "accuracy":
        return accuracy_delta(metric, score, cell, other)
    after, before = (getattr(side, CELL_METRICS[metric]) for side in (cell, other))
    if metric == "engine_bytes" and after is not None and before:
        return delta(metric, after, before, (after / before - 1,) * 2, "exact")
    return delta(metric, after, before)


def accuracy_delta(metric: str, score: str, cell: Measured, other: Measured) -> Delta:
    """The difference in `score`, with an interval from paired answers if both sides answered the same questions."""
    after, before = cell.accuracy.get(score), other.accuracy.get(score)
    if after is None or not before:
        return delta(metric, after, before)
    if _same_answers(cell, other):
        return delta(metric, after, before, (0.0, 0.0), "same")
    paired = _paired_questions(score, cell, other)
    if paired is not None:
        return delta(metric, after, before, (paired[0] / before, paired[1] / before), "paired_questions")
    ends = [interval for side in (cell, other) if (interval := side.accuracy_intervals.get(score)) is not None]
    if len(ends) < 2:
        return delta(metric, after, before)
    half = math.hypot(*((high - low) / 2 for low, high in ends))
    interval = ((after - before - half) / before, (after - before + half) / before)
    return delta(metric, after, before, interval, "questions")


def _paired_questions(score: str, cell: Measured, other: Measured) -> stats.Interval | None:
    """Interval of the difference over common questions, as recorded if the answers are gone, or None."""
    from trtllm_pipeline.measure import drift

    noted = cell.accuracy_drift if cell.accuracy_drift and cell.accuracy_drift.reference == other.id else None
    drifts = [] if noted is None else [noted]
    if cell.answers is not None and other.answers is not None:
        with contextlib.suppress(UsageError):
            drifts.insert(0, drift.compare(drift.read(other.answers), drift.read(cell.answers)))
    # A subset of the questions would give a different difference than that of the two means.
    whole = (each.scores[score].interval for each in drifts if score in each.scores and not each.unpaired)
    return next(whole, None)


def _payback(cell: Measured, new: LevelResult, other: Measured, base: LevelResult) -> Payback | None:
    """Preparation seconds / (seconds per token of the base - of the cell), at the level's throughput."""
    after, before = new.value("output_tps"), base.value("output_tps")
    if cell.preparation_s is None or not after or not before or _same_load_run(cell, other) or cell.axes == other.axes:
        return None  # the same configuration measured at another time costs nothing
    saved = 1 / before - 1 / after
    verdict = level_delta("output_tps", cell, new, other, base).verdict
    tokens = cell.preparation_s / saved if saved > 0 else None
    load_s = None if tokens is None else tokens / after
    return Payback(cell.id, other.id, new.key, cell.preparation_s, saved, tokens, load_s, verdict)
