"""Conditions on a comparison: `ttft_p99:+10%,output_tps:-5%,accuracy:-1%`, and what breaks them.

`judge` is what `pipeline compare` does: compare two sides, or one side's cells with each other, and hold conditions against it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from trtllm_pipeline.base import NOT_COMPARABLE, ComparisonError, Json, UsageError, count
from trtllm_pipeline.measure import LEVEL_METRICS
from trtllm_pipeline.orchestrate import Side
from trtllm_pipeline.show.report.comparison import (
    DEFAULT,
    ChangeVerdict,
    Comparison,
    Delta,
    check_metric,
    compare,
    compare_by,
)

_CONDITION: Final = re.compile(r"\s*([a-z0-9_.]+)\s*:\s*([+-])\s*(\d+(?:\.\d+)?)\s*%\s*")
_EXAMPLE: Final = "such as ttft_p99:+10%,output_tps:-5%,accuracy:-1%"


@dataclass(frozen=True, slots=True)
class Condition:
    """A metric may not rise (`limit` > 0) or fall (`rising` False) by more than `limit`, a share of the base."""

    metric: str
    rising: bool
    limit: float

    def __str__(self) -> str:
        """As it is typed."""
        return f"{self.metric}:{'+' if self.rising else '-'}{self.limit * 100:g}%"

    def broken_by(self, change: float) -> bool:
        """Whether a relative change goes beyond the limit."""
        return change > self.limit if self.rising else change < -self.limit


@dataclass(frozen=True, slots=True)
class Break:
    """A condition that does not hold. `delta` is None where there was nothing to compare, and `reason` says why."""

    cell: str
    level: str | None
    condition: Condition
    delta: Delta | None
    reason: str

    def to_json(self) -> dict[str, Json]:
        """As in the comparison's JSON."""
        limit = self.condition.limit if self.condition.rising else -self.condition.limit
        values = {name: getattr(self.delta, name, None) for name in ("base", "new", "change")}
        about = {"cell": self.cell, "level": self.level, "metric": self.condition.metric, "limit": limit}
        return {**about, **values, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Judgement:
    """A comparison, and what the conditions on it say; `broken` is None where there are none."""

    comparison: Comparison
    broken: tuple[Break, ...] | None

    @property
    def exit_code(self) -> int:
        """1 where a condition does not hold, NOT_COMPARABLE where cells cannot be compared, else 0."""
        return 1 if self.broken else NOT_COMPARABLE if self.comparison.refused else 0

    @property
    def verdict(self) -> str | None:
        """What the gate says in a line; None without conditions. Where cells were refused it cannot pass."""
        if self.broken is None:
            return None
        if self.broken:
            return f"gate: {count(len(self.broken), 'condition')} broken"
        return "gate: not evaluated: some cells are not comparable" if self.comparison.refused else "gate: passed"

    def to_json(self) -> dict[str, Json]:
        """As `pipeline compare --format json` prints it, see docs/formats.md."""
        judged = not self.comparison.refused
        broken: list[Json] = [each.to_json() for each in self.broken or ()]
        gate: Json = {"holds": judged and not broken, "judged": judged, "broken": broken}
        return {**self.comparison.to_json(), "gate": None if self.broken is None else gate}

    @property
    def refusal(self) -> ComparisonError | None:
        """Why cells cannot be compared, in a line, or None."""
        refused = self.comparison.refused
        if not refused:
            return None
        about = dict.fromkeys(difference.field.about for each in refused for difference in each.differences)
        cells = count(len({each.cell for each in refused}), "cell")
        return ComparisonError(
            f"{cells} not comparable, such as {refused[0].cell}: {refused[0].differences[0]}",
            hint=f"measure both alike; or --allow {','.join(about)} if that is what the comparison is about",
        )


@dataclass(frozen=True, slots=True)
class Criteria:
    """Which metrics are compared, and what they may not do."""

    metrics: tuple[str, ...] = DEFAULT
    conditions: tuple[Condition, ...] = ()

    @staticmethod
    def parse(metrics: str | None, fail_on: str | None) -> Criteria:
        """As people type them: `ttft_p99,tpot_p50` and `ttft_p99:+10%`. Raises UsageError."""
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
    """`new` against `base`, or its cells that differ in axis `by` alone against the one at `first`.

    Raises UsageError where nothing can be compared.
    """
    if base is not None:
        result = compare(new, base, criteria.metrics, allow=allow)
    else:
        assert by is not None
        result = compare_by(new, by, first, criteria.metrics, allow=allow)
    if not (result.pairs or result.only_base or result.lost or result.unfit or result.refused):
        reasons = [why for _, why in result.only_new]
        raise UsageError("no two cells can be compared" + (f": {reasons[0]}" if reasons else ""))
    conditions = criteria.conditions
    return Judgement(result, breaks(result, conditions, beyond_noise=beyond_noise) if conditions else None)


def parse(text: str) -> tuple[Condition, ...]:
    """The conditions in `text`. Raises UsageError."""
    found = []
    for part in text.split(","):
        match = _CONDITION.fullmatch(part)
        if match is None:
            raise UsageError(f"--fail-on: {part.strip()!r} is not METRIC:+PERCENT% or METRIC:-PERCENT%", hint=_EXAMPLE)
        found.append(Condition(check_metric(match[1]), match[2] == "+", float(match[3]) / 100))
    return tuple(found)


def breaks(comparison: Comparison, conditions: Sequence[Condition], *, beyond_noise: bool) -> tuple[Break, ...]:
    """Every condition that does not hold, cell by cell.

    A value that is missing breaks it: a cell, level or metric that the base has and the new side lacks, a metric
    that neither has or the base lacks, and a cell that failed on either side. A cell that is infeasible on both sides is
    not missing, nor is a new one; a cell that was refused is not judged. With `beyond_noise` a change breaks a condition
    only if its interval excludes zero, or if it has no interval.
    """
    found: list[Break] = []
    why_not = dict((*comparison.only_new, *comparison.unfit))
    for condition in conditions:
        of_level = condition.metric in LEVEL_METRICS
        lost = comparison.lost if of_level else []
        found += [Break(cell, None, condition, None, f"missing: {why}") for cell, why in comparison.only_base]
        for cell, level, why in lost:
            found.append(Break(cell, level, condition, None, f"missing: only the baseline has this level ({why})"))
        pairs = [pair for pair in comparison.pairs if (pair.level is not None) == of_level]
        for pair in pairs:
            delta = pair.delta(condition.metric)
            if (reason := _broken(condition, delta, beyond_noise=beyond_noise)) is not None:
                found.append(Break(pair.cell, pair.level, condition, delta, reason))
        judged = {
            *(each.cell for each in pairs),
            *(each.cell for each in lost),
            *(each.cell for each in comparison.refused),
        }
        for cell in dict.fromkeys(cell for cell, _ in comparison.matched if cell not in judged):
            why = why_not.get(cell, "neither side has this metric")
            found.append(Break(cell, None, condition, None, f"missing: {why}"))
    return tuple(found)


def _broken(condition: Condition, delta: Delta | None, *, beyond_noise: bool) -> str | None:
    """Why a condition does not hold, or None."""
    if delta is None:
        return "missing: neither side has this metric"
    if delta.change is None:
        if delta.base is not None and delta.new is not None:
            return "missing: base is 0, so there is no relative change"
        return f"missing: the {'base' if delta.base is None else 'new side'} has no value"
    if not condition.broken_by(delta.change) or (beyond_noise and delta.verdict is ChangeVerdict.NOISE):
        return None
    return {
        ChangeVerdict.NOISE: "beyond the limit, though within noise",
        ChangeVerdict.UNKNOWN: "beyond the limit; not known whether beyond noise",
    }.get(delta.verdict, "beyond the limit and beyond noise")
