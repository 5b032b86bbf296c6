"""Two sides compared: cells matched by their axes, differences with their intervals, and payback.

Pure functions of what `report/measured.py` loads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trtllm_pipeline.bench import stats
from trtllm_pipeline.bench.conditions import Difference, deciding, differences, of_makers, of_questions
from trtllm_pipeline.bench.result import RATES, latency_of, load_words
from trtllm_pipeline.bench.stats import STATISTICS, Interval, Statistic
from trtllm_pipeline.domain import Json
from trtllm_pipeline.errors import UsageError
from trtllm_pipeline.report.measured import Measured, MeasuredLevel, RequestSample, Side

if TYPE_CHECKING:
    import numpy as np

LATENCY_STEMS: Final = ("ttft", "tpot", "itl", "icl", "e2e")
TAIL: Final = 5
"""Requests that must lie beyond a percentile, or resampling them says nothing of it: p99 takes 500."""
LEVEL_METRICS: Final = (*(f"{stem}_{each}" for stem in LATENCY_STEMS for each in STATISTICS), *RATES)
CELL_METRICS: Final = ("accuracy", "build_s", "preparation_s", "engine_bytes")
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
    """One figure on both sides. `change` and the interval are relative to the base: 0.1 is 10 % more."""

    metric: str
    base: float | None
    new: float | None
    change: float | None
    interval: Interval | None
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
        """The figure called `metric`."""
        return next((delta for delta in self.deltas if delta.metric == metric), None)


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
    verdict: ChangeVerdict
    """Of the throughput: whether what it saves is beyond noise."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a comparison."""

    new: str
    base: str
    matched: tuple[tuple[str, str], ...]
    """(cell, its base), whatever there is to compare."""
    pairs: tuple[Pair, ...]
    paybacks: tuple[Payback, ...]
    only_new: tuple[tuple[str, str], ...] = ()
    """Cells without a base, and why."""
    only_base: tuple[tuple[str, str], ...] = ()
    """Cells whose figures the new side lacks, and why."""
    lost: tuple[tuple[str, str, str], ...] = field(default=())
    """(cell, level, why) of levels that only the base has."""
    unfit: tuple[tuple[str, str], ...] = ()
    """(cell, why) where it or its base failed or is not finished: no figure of theirs is compared."""
    refused: tuple[tuple[str, str, tuple[Difference, ...]], ...] = ()
    """(cell, its base, why) of those that were not measured under the same conditions: not compared either."""
    told: tuple[tuple[str, Difference], ...] = ()
    """(cell, difference) of conditions that differ in spite of which cells are compared: allowed, or of little influence."""

    @property
    def methods(self) -> dict[str, str]:
        """What its intervals are made of."""
        used = {delta.method for pair in self.pairs for delta in pair.deltas if delta.method}
        return {name: words for name, words in METHODS.items() if name in used}


def better_is_higher(metric: str) -> bool:
    """Which way is an improvement."""
    return metric in RATES or metric.partition(".")[0] == "accuracy"


def check_metric(name: str) -> str:
    """`name`, if it is a metric. Raises UsageError."""
    if name in LEVEL_METRICS or name in CELL_METRICS or name.startswith("accuracy."):
        return name
    raise UsageError(
        f"there is no metric {name!r}",
        hint=f"such as ttft_p99, tpot_p50, itl_mean, e2e_p95, {', '.join(RATES)}, {', '.join(CELL_METRICS)}, "
        "accuracy.contains",
    )


def compare(
    new: Side, base: Side, metrics: Sequence[str] = DEFAULT, *, allow: Collection[str] = frozenset()
) -> Comparison:
    """Compare each cell of `new` with the cell of `base` that is equal on all axes both sides have.

    Those that were measured under other conditions are refused, but for what `allow` names: groups or fields of
    `bench/conditions.py`.
    """
    matched, only_new, only_base = _match(new.cells, base.cells)
    return _compared(new.name, base.name, matched, metrics, only_new, only_base, allow)


def compare_by(
    side: Side,
    axis: str,
    base: str | None,
    metrics: Sequence[str] = DEFAULT,
    *,
    allow: Collection[str] = frozenset(),
) -> Comparison:
    """Compare the cells of one run: those with other values of `axis` with those that have the value `base`.

    Without `base` it is the first cell's value. What the axis itself varies is no difference of conditions.
    Raises UsageError for an axis or a value that is not there.
    """
    values = list(dict.fromkeys(str(cell.axes[axis]) for cell in side.cells if axis in cell.axes))
    if not values:
        axes = dict.fromkeys(name for cell in side.cells for name in cell.axes)
        raise UsageError(f"there is no axis {axis!r}", hint=f"the axes are {', '.join(axes) or 'none'}")
    base = values[0] if base is None else base
    if base not in values:
        raise UsageError(f"no cell has {axis} {base}", hint=f"there are {', '.join(values)}")
    by_rest = {_key(cell, axis): cell for cell in side.cells if str(cell.axes.get(axis)) == base}
    matched: _Matched = []
    alone: _Alone = []
    for cell in side.cells:
        if str(cell.axes.get(axis)) == base:
            continue
        partner = by_rest.get(_key(cell, axis))
        if partner is None:
            alone.append((cell.id, f"no cell with {axis} {base} is otherwise equal"))
        else:
            matched.append((cell, partner))
    names = f"{side.name}, other {axis}", f"{side.name}, {axis} {base}"
    return _compared(*names, matched, metrics, alone, [], allow, axis)


def _key(cell: Measured, axis: str) -> frozenset[tuple[str, str]]:
    return frozenset((name, str(value)) for name, value in cell.axes.items() if name != axis)


_Matched = list[tuple[Measured, Measured]]
_Alone = list[tuple[str, str]]


def _match(new: Sequence[Measured], base: Sequence[Measured]) -> tuple[_Matched, _Alone, _Alone]:
    """Cells that are equal on the axes both sides have; one cell without axes is the base of all."""
    if len(base) == 1 and not base[0].axes:
        return [(cell, base[0]) for cell in new], [], []
    if len(new) == 1 and not new[0].axes:
        return [(new[0], cell) for cell in base], [], []
    shared = set().union(*(cell.axes for cell in new)) & set().union(*(cell.axes for cell in base))
    by_axes: dict[tuple[tuple[str, str], ...], list[Measured]] = {}
    for cell in base:
        by_axes.setdefault(_axes(cell, shared), []).append(cell)
    matched: _Matched = []
    only_new: _Alone = []
    seen = set()
    for cell in new:
        found = by_axes.get(_axes(cell, shared), [])
        exact = [other for other in found if other.id == cell.id] or found
        if len(exact) == 1:
            matched.append((cell, exact[0]))
            seen.add(exact[0].id)
        elif found:
            only_new.append((cell.id, f"{len(found)} cells of the baseline have the same axes: {found[0].id}, ..."))
        else:
            only_new.append((cell.id, "the baseline has no cell with the same axes"))
    only_base: _Alone = [
        (cell.id, "the new side has no such cell") for cell in base if cell.id not in seen and cell.feasible
    ]
    return matched, only_new, only_base


def _axes(cell: Measured, names: Iterable[str]) -> tuple[tuple[str, str], ...]:
    return tuple((name, str(cell.axes.get(name))) for name in sorted(names))


def _compared(
    new: str,
    base: str,
    matched: _Matched,
    metrics: Sequence[str],
    only_new: _Alone,
    only_base: _Alone,
    allow: Collection[str],
    axis: str | None = None,
) -> Comparison:
    pairs: list[Pair] = []
    paybacks: list[Payback] = []
    lost: list[tuple[str, str, str]] = []
    unfit: _Alone = []
    refused: list[tuple[str, str, tuple[Difference, ...]]] = []
    told: list[tuple[str, Difference]] = []
    of_level = [metric for metric in metrics if metric in LEVEL_METRICS]
    of_cell = [metric for metric in metrics if metric not in LEVEL_METRICS]
    matched = [(cell, other) for cell, other in matched if cell.feasible or other.feasible]
    for cell, other in matched:
        if cell.unfit is not None or other.unfit is not None:
            unfit.append((cell.id, cell.unfit or f"the baseline {other.id}: {other.unfit}"))
            continue
        apart = _apart(cell, other)
        if why := deciding(apart, allow, () if axis is None else (axis,)):
            refused.append((cell.id, other.id, why))
            continue
        told += [(cell.id, each) for each in apart]
        deltas = [_cell_delta(metric, cell, other) for metric in _expanded(of_cell, cell, other)]
        if known := tuple(delta for delta in deltas if delta.base is not None or delta.new is not None):
            pairs.append(Pair(cell.id, other.id, None, known))
        for level in other.levels:
            mine = cell.level(level.key)
            if mine is None:
                lost.append((cell.id, level.key, cell.why or "this level was not measured"))
                continue
            same = cell.perf is not None and cell.perf == other.perf
            compared = tuple(_level_delta(metric, mine, level, same=same) for metric in of_level)
            pairs.append(Pair(cell.id, other.id, level.key, compared))
            if (payback := _payback(cell, other, mine, level, same=same)) is not None:
                paybacks.append(payback)
        if not other.levels and cell.levels:
            only_new.append((cell.id, f"the baseline {other.id} has no figures: {other.why or 'not measured'}"))
    ids = tuple((str(cell.id), str(other.id)) for cell, other in matched)
    return Comparison(
        new,
        base,
        ids,
        tuple(pairs),
        tuple(paybacks),
        tuple(only_new),
        tuple(only_base),
        tuple(lost),
        tuple(unfit),
        tuple(refused),
        tuple(told),
    )


def _apart(cell: Measured, other: Measured) -> tuple[Difference, ...]:
    """In what the conditions differ under which both were measured, as far as both were."""
    found: tuple[Difference, ...] = ()
    same = cell.perf is not None and cell.perf == other.perf
    scored = bool(cell.accuracy and other.accuracy) and not (cell.answers is not None and cell.answers == other.answers)
    if cell.levels and other.levels and not same:
        shared = [each.level for each in cell.levels if other.level(each.key)]
        places = [(level.concurrency, level.request_rate, load_words(level.key)) for level in shared]
        found = differences(cell.conditions, other.conditions, places)
    elif not same:
        prepared = None not in (cell.preparation_s, other.preparation_s)
        found = of_makers(cell.conditions, other.conditions, ["preparation"] * prepared + ["accuracy"] * scored)
    if scored:
        found += of_questions(cell.conditions, other.conditions)
    return found


def _expanded(metrics: Sequence[str], cell: Measured, other: Measured) -> list[str]:
    """`accuracy` stands for the first score both have; the others stay as they are."""
    shared = [name for name in other.accuracy if name in cell.accuracy] or [*other.accuracy, *cell.accuracy]
    return [f"accuracy.{shared[0]}" if metric == "accuracy" and shared else metric for metric in metrics]


def delta(
    metric: str, new: float | None, base: float | None, interval: Interval | None = None, method: str | None = None
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


def _level_delta(metric: str, new: MeasuredLevel, base: MeasuredLevel, *, same: bool) -> Delta:
    after, before = new.value(metric), base.value(metric)
    if same:
        return delta(metric, after, before, (0.0, 0.0), "same")
    repeats, others = new.repeats(metric), base.repeats(metric)
    if len(repeats) > 1 and len(others) > 1:
        if alternate(base.started_s, new.started_s):
            return delta(metric, after, before, stats.paired_change(others, repeats), "paired_repeats")
        return delta(metric, after, before, stats.unpaired_change(others, repeats), "repeats")
    statistic = _statistic(metric)
    if statistic is None or after is None or not before or not new.samples or not base.samples:
        return delta(metric, after, before)
    left, right, paired = _rows(base.samples, new.samples, statistic.columns)
    if min(len(left), len(right)) < statistic.least:
        return delta(metric, after, before)
    found = stats.resampled_change(left, right, statistic.of, paired=paired)
    if found is not None and metric in RATES:
        # Requests tell how much work was done in how much time, not the window; their noise is put on the figure.
        work = _work(new.samples, statistic.columns) / _work(base.samples, statistic.columns)
        scale = after / before / work
        found = ((found[0] + 1) * scale - 1, (found[1] + 1) * scale - 1)
    return delta(metric, after, before, found, "paired_requests" if paired else "requests")


def alternate(base: Sequence[float], new: Sequence[float]) -> bool:
    """Whether two series of times belong together pair by pair: base, new, base, new, or in turn the other way round."""
    if len(base) != len(new) or len(base) < 2:
        return False
    order = sorted([(time, 0) for time in base] + [(time, 1) for time in new])
    sides = [side for _, side in order]
    return all(sides[index] != sides[index + 1] for index in range(0, len(sides), 2))


@dataclass(frozen=True, slots=True)
class _Requests:
    """How a figure comes from requests: the numbers of each, and the figure of many rows of them."""

    columns: Callable[[RequestSample], tuple[float, ...] | None]
    of: Statistic
    least: int = stats.LEAST_REQUESTS
    """Requests it takes."""


def _statistic(metric: str) -> _Requests | None:
    """None for gaps between tokens, which are no property of a request."""
    import numpy as np

    if metric in RATES:
        work: dict[str, Callable[[RequestSample], float]] = {
            "output_tps": lambda s: s.output_tokens,
            "rps": lambda _s: 1.0,
        }
        if metric not in work:
            return None
        return _Requests(
            lambda sample: (work[metric](sample), sample.e2e_ms),
            lambda rows: rows[..., 0].sum(axis=1) / rows[..., 1].sum(axis=1),
        )
    latency, statistic = latency_of(metric)
    if latency not in {"ttft_ms", "tpot_ms", "e2e_ms"} or statistic in {"min", "max"}:
        return None  # an extreme of resampled requests is never beyond the extreme measured

    def columns(sample: RequestSample) -> tuple[float, ...] | None:
        value: float | None = getattr(sample, latency)
        return None if value is None else (value,)

    def figure(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        values = rows[..., 0]
        found: np.ndarray[Any, Any] = (
            values.mean(axis=1) if statistic == "mean" else np.percentile(values, float(statistic[1:]), axis=1)
        )
        return found

    share = 0.5 if statistic == "mean" else float(statistic[1:]) / 100
    return _Requests(columns, figure, math.ceil(round(TAIL / min(share, 1 - share), 6)))


_Rows = list[tuple[float, ...]]


def _rows(
    base: Sequence[RequestSample],
    new: Sequence[RequestSample],
    columns: Callable[[RequestSample], tuple[float, ...] | None],
) -> tuple[_Rows, _Rows, bool]:
    """Numbers of the requests of both sides; row by row the same prompt, if both sent the same ones."""
    left, right = _by_prompt(base, columns), _by_prompt(new, columns)
    shared = [key for key in left if key in right]
    if shared and len(shared) == len(left) == len(right):
        return [left[key] for key in shared], [right[key] for key in shared], True
    return list(left.values()), list(right.values()), False


def _by_prompt(
    samples: Sequence[RequestSample], columns: Callable[[RequestSample], tuple[float, ...] | None]
) -> dict[tuple[str, str, int], tuple[float, ...]]:
    """(prompt, its text, which time it was sent) -> numbers."""
    found: dict[tuple[str, str, int], tuple[float, ...]] = {}
    times: dict[str, int] = {}
    for sample in samples:
        number = times[sample.prompt] = times.get(sample.prompt, -1) + 1
        if (values := columns(sample)) is not None:
            found[sample.prompt, sample.text, number] = values
    return found


def _work(samples: Sequence[RequestSample], columns: Callable[[RequestSample], tuple[float, ...] | None]) -> float:
    rows = [values for sample in samples if (values := columns(sample)) is not None]
    return sum(row[0] for row in rows) / sum(row[1] for row in rows)


def _cell_delta(metric: str, cell: Measured, other: Measured) -> Delta:
    name, _, score = metric.partition(".")
    if name == "accuracy":
        return accuracy_delta(metric, score, cell, other)
    after, before = getattr(cell, metric), getattr(other, metric)
    if metric == "engine_bytes" and after is not None and before:
        return delta(metric, after, before, (after / before - 1,) * 2, "exact")
    return delta(metric, after, before)


def accuracy_delta(metric: str, score: str, cell: Measured, other: Measured) -> Delta:
    """The score called `score`, with an interval from pairs of answers where both sides were asked the same."""
    after, before = cell.accuracy.get(score), other.accuracy.get(score)
    if after is None or not before:
        return delta(metric, after, before)
    if cell.answers is not None and cell.answers == other.answers:
        return delta(metric, after, before, (0.0, 0.0), "same")
    found = _paired_questions(score, cell.answers, other.answers) or _recorded(score, cell, other)
    if found is not None:
        return delta(metric, after, before, (found[0] / before, found[1] / before), "paired_questions")
    ends = [side.accuracy_intervals.get(score) for side in (cell, other)]
    if ends[0] is None or ends[1] is None:
        return delta(metric, after, before)
    halves = [(high - low) / 2 for low, high in (ends[0], ends[1])]
    half = (halves[0] ** 2 + halves[1] ** 2) ** 0.5
    return delta(
        metric, after, before, ((after - before - half) / before, (after - before + half) / before), "questions"
    )


def _recorded(score: str, cell: Measured, other: Measured) -> Interval | None:
    """The same interval as the run itself noted it, where the answers are not here any more."""
    drift = cell.accuracy_drift
    found = drift.scores.get(score) if drift and drift.reference == other.id and not drift.unpaired else None
    return None if found is None else found.interval


def _paired_questions(score: str, answers: Path | None, base: Path | None) -> Interval | None:
    """Interval of the difference of mean scores over the questions both were asked; None when there is no such thing."""
    if answers is None or base is None:
        return None
    from trtllm_pipeline.evaluate import drift

    try:
        found = drift.compare(drift.read(base), drift.read(answers))
    except UsageError:
        return None
    # Some questions alone would be another difference than that of the two means.
    return found.scores[score].interval if score in found.scores and found.unpaired == 0 else None


def _payback(cell: Measured, other: Measured, new: MeasuredLevel, base: MeasuredLevel, *, same: bool) -> Payback | None:
    """Preparation seconds / (seconds a token takes with the base - with the cell), at the level's throughput."""
    after, before = new.value("output_tps"), base.value("output_tps")
    if cell.preparation_s is None or not after or not before or same or cell.axes == other.axes:
        return None  # the same configuration at another time costs nothing
    saved = 1 / before - 1 / after
    verdict = _level_delta("output_tps", new, base, same=False).verdict
    tokens = cell.preparation_s / saved if saved > 0 else None
    return Payback(cell.id, other.id, new.key, cell.preparation_s, saved, tokens, verdict)


def to_json(comparison: Comparison) -> dict[str, Json]:
    """As `pipeline compare --format json` prints it, see docs/formats.md."""

    def alone(cells: Iterable[tuple[str, str]]) -> list[Json]:
        return [{"cell": cell, "reason": why} for cell, why in cells]

    methods: Mapping[str, Json] = comparison.methods
    return {
        "schema": 1,
        "new": comparison.new,
        "base": comparison.base,
        "confidence": stats.CONFIDENCE,
        "methods": dict(methods),
        "pairs": [
            {"cell": pair.cell, "base": pair.base, "level": pair.level, "metrics": dict(map(_entry, pair.deltas))}
            for pair in comparison.pairs
        ],
        "paybacks": [asdict(each) for each in comparison.paybacks],
        "only_new": alone(comparison.only_new),
        "only_base": alone(comparison.only_base),
        "lost": [{"cell": cell, "level": level, "reason": why} for cell, level, why in comparison.lost],
        "unfit": alone(comparison.unfit),
        "refused": [
            {"cell": cell, "base": base, "differences": [each.to_json() for each in why]}
            for cell, base, why in comparison.refused
        ],
        "differences": [{"cell": cell, **each.to_json()} for cell, each in comparison.told],
    }


def _entry(delta: Delta) -> tuple[str, dict[str, Json]]:
    values = asdict(delta)
    return values.pop("metric"), values
