"""Conditions on a comparison: `ttft_p99:+10%,output_tps:-5%,accuracy:-1pt`, and their evaluation.

`judge` implements `pipeline compare`: it compares two sides, or one side's cells with each other, and evaluates conditions.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from trtllm_pipeline.base import NOT_COMPARABLE, ComparisonError, Json, UsageError, count
from trtllm_pipeline.measure import metric_names, stats
from trtllm_pipeline.show.report.comparison import (
    DEFAULT,
    ChangeVerdict,
    Comparison,
    Delta,
    check_metric,
    compare,
    compare_by,
)
from trtllm_pipeline.show.report.measured import Side

_CONDITION: Final = re.compile(r"\s*([a-z0-9_.]+)\s*:\s*([+-])\s*(\d+(?:\.\d+)?)\s*(%|pts?)\s*")
_EXAMPLE: Final = "such as ttft_p99:+10%,output_tps:-5%,accuracy:-1pt"
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Condition:
    """A metric may not rise (`rising`) or fall by more than `limit`: a share of the base, or of the scale of a score if `points`."""

    metric: str
    rising: bool
    limit: float
    points: bool = False

    def __str__(self) -> str:
        return f"{self.metric}:{'+' if self.rising else '-'}{self.limit * 100:g}{'pt' if self.points else '%'}"

    def change(self, delta: Delta) -> float | None:
        """The change that counts: relative, or of the score itself."""
        if not self.points:
            return delta.change
        return None if delta.base is None or delta.new is None else delta.new - delta.base

    def broken_by(self, change: float) -> bool:
        return (change if self.rising else -change) > self.limit + _ROUNDING


@dataclass(frozen=True, slots=True)
class Break:
    """A broken condition. `delta` is None if there was nothing to compare. `reason` explains it."""

    cell: str
    level: str | None
    condition: Condition
    delta: Delta | None
    reason: str

    @property
    def within_noise(self) -> bool:
        return self.delta is not None and self.delta.verdict is ChangeVerdict.NOISE

    def to_json(self) -> dict[str, Json]:
        """The JSON form within the comparison."""
        limit = self.condition.limit if self.condition.rising else -self.condition.limit
        values = {name: getattr(self.delta, name, None) for name in ("base", "new", "change")}
        about = {"cell": self.cell, "level": self.level, "metric": self.condition.metric, "limit": limit}
        return {**about, "unit": "points" if self.condition.points else "share", **values, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Judgement:
    """A comparison and its broken conditions. `broken` is None without conditions."""

    comparison: Comparison
    broken: tuple[Break, ...] | None
    excused: tuple[Break, ...] = ()
    """Changes beyond a limit that pass only because of --beyond-noise."""

    @property
    def exit_code(self) -> int:
        """1 for a broken condition or if nothing was compared, NOT_COMPARABLE for refused cells, otherwise 0."""
        if self.broken or not (self.comparison.pairs or self.comparison.refused):
            return 1
        return NOT_COMPARABLE if self.comparison.refused else 0

    @property
    def verdict(self) -> str | None:
        """The gate's result in one line, or None without conditions. It cannot pass if cells were refused."""
        if self.broken is None:
            return None
        excused = f"{count(len(self.excused), 'change')} beyond the limit, but within noise (--beyond-noise)"
        if self.broken:
            more = f"; not counted: {excused}" if self.excused else ""
            return f"gate: {count(len(self.broken), 'condition')} broken{more}"
        if self.comparison.refused:
            return "gate: not evaluated: some cells are not comparable"
        return f"gate: passed, with {excused}" if self.excused else "gate: passed"

    def to_json(self) -> dict[str, Json]:
        """The JSON of `pipeline compare --format json`, see docs/reference/formats.md."""
        judged = not self.comparison.refused
        broken: list[Json] = [each.to_json() for each in self.broken or ()]
        excused: list[Json] = [each.to_json() for each in self.excused]
        gate: Json = {"holds": judged and not broken, "judged": judged, "broken": broken, "excused": excused}
        return {**self.comparison.to_json(), "gate": None if self.broken is None else gate}

    @property
    def refusal(self) -> ComparisonError | None:
        """One line that explains why cells cannot be compared, or why nothing was. None if all that can be was."""
        refused = self.comparison.refused
        if not (self.comparison.pairs or refused):
            return ComparisonError(
                f"nothing was compared: {self.comparison.new} and {self.comparison.base} have no valid measurement in common",
                hint="measure again what is listed as not compared; pipeline logs or bench analyze shows what went wrong",
            )
        if not refused:
            return None
        about = dict.fromkeys(difference.field.about for each in refused for difference in each.differences)
        cells = count(len({each.cell for each in refused}), "cell")
        return ComparisonError(
            f"{cells} not comparable, e.g. {refused[0].cell}: {refused[0].differences[0]}",
            hint=f"measure both under the same conditions, or accept the difference with --allow {','.join(about)}",
        )


@dataclass(frozen=True, slots=True)
class Criteria:
    """The metrics to compare, and the conditions on them."""

    metrics: tuple[str, ...] = DEFAULT
    conditions: tuple[Condition, ...] = ()

    @staticmethod
    def parse(metrics: str | None, fail_on: str | None) -> Criteria:
        """Parse the command line syntax: `ttft_p99,tpot_p50` and `ttft_p99:+10%`. Raises UsageError."""
        conditions = parse(fail_on) if fail_on is not None else ()
        names = [check_metric(name.strip()) for name in metrics.split(",")] if metrics else DEFAULT
        return Criteria(tuple(dict.fromkeys([*names, *(condition.metric for condition in conditions)])), conditions)


def judge(
    new: Side,
    base: Side | None,
    criteria: Criteria,
    *,
    by: str | None = None,
    first: str | None = None,
    beyond_noise: bool = False,
    allow: Collection[str] = frozenset(),
) -> Judgement:
    """Compare `new` with `base`, or its cells along axis `by` with those at `first`. Raises UsageError."""
    if base is not None:
        result = compare(new, base, criteria.metrics, allow=allow)
    else:
        assert by is not None
        result = compare_by(new, by, first, criteria.metrics, allow=allow)
    if not (result.pairs or result.only_base or result.lost or result.unfit or result.refused):
        reasons = [why for _, why in result.only_new]
        raise UsageError("no two cells can be compared" + (f": {reasons[0]}" if reasons else ""))
    conditions = criteria.conditions
    if not conditions:
        return Judgement(result, None)
    every = breaks(result, conditions)
    excused = tuple(each for each in every if beyond_noise and each.within_noise)
    return Judgement(result, tuple(each for each in every if each not in excused), excused)


def parse(text: str) -> tuple[Condition, ...]:
    """The conditions in `text`. Raises UsageError."""
    conditions = []
    for part in text.split(","):
        match = _CONDITION.fullmatch(part)
        if match is None:
            raise UsageError(
                f"--fail-on: expected METRIC:+N% or METRIC:-N%, or Npt for a score, got {part.strip()!r}", hint=_EXAMPLE
            )
        metric, points = check_metric(match[1]), match[4] != "%"
        if points and metric.partition(".")[0] != "accuracy":
            raise UsageError(f"--fail-on: {metric} is not a score, so its limit is in percent", hint=_EXAMPLE)
        conditions.append(Condition(metric, match[2] == "+", float(match[3]) / 100, points))
    return tuple(conditions)


def breaks(comparison: Comparison, conditions: Sequence[Condition]) -> tuple[Break, ...]:
    """All broken conditions, cell by cell, those within noise included.

    A missing value breaks a condition: a cell, level or metric that only the base has, a metric that neither side or only
    the new side has, and a cell that failed on either side. New cells and cells infeasible on both sides are not missing.
    Refused cells are not judged.
    """
    broken: list[Break] = []
    why_not = dict((*comparison.only_new, *comparison.unfit))
    for condition in conditions:
        of_level = condition.metric in metric_names.LEVEL_METRICS
        lost = comparison.lost if of_level else []
        broken += [Break(cell, None, condition, None, f"missing: {why}") for cell, why in comparison.only_base]
        for cell, level, why in lost:
            broken.append(Break(cell, level, condition, None, f"missing: only the baseline has this level ({why})"))
        pairs = [pair for pair in comparison.pairs if (pair.level is not None) == of_level]
        for pair in pairs:
            delta = pair.delta(condition.metric)
            if (reason := _broken(condition, delta)) is not None:
                broken.append(Break(pair.cell, pair.level, condition, delta, reason))
        judged = {
            *(each.cell for each in pairs),
            *(each.cell for each in lost),
            *(each.cell for each in comparison.refused),
        }
        for cell in dict.fromkeys(cell for cell, _ in comparison.matched if cell not in judged):
            why = why_not.get(cell, "neither side has this metric")
            broken.append(Break(cell, None, condition, None, f"missing: {why}"))
    return tuple(broken)


def _broken(condition: Condition, delta: Delta | None) -> str | None:
    if delta is None:
        return "missing: neither side has this metric"
    if delta.base is None and delta.new is None and delta.metric.endswith("_p99"):
        return f"missing: a p99 needs {stats.LEAST_P99} requests of each side"
    change = condition.change(delta)
    if change is None:
        if delta.base is not None and delta.new is not None:
            return "missing: base is 0, so there is no relative change"
        return f"missing: the {'base' if delta.base is None else 'new side'} has no value"
    if not condition.broken_by(change):
        return None
    return {
        ChangeVerdict.NOISE: "beyond the limit, but within noise: --beyond-noise accepts it",
        ChangeVerdict.UNKNOWN: "beyond the limit, noise unknown",
        ChangeVerdict.MISSING: "beyond the limit, noise unknown",
    }.get(delta.verdict, "beyond the limit and beyond noise")
