"""Conditions on a comparison: `ttft_p99:+10%,output_tps:-5%,accuracy:-1%`, and what breaks them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from trtllm_pipeline.domain import Json
from trtllm_pipeline.errors import UsageError
from trtllm_pipeline.report.compare import LEVEL_METRICS, ChangeVerdict, Comparison, Delta, check_metric

_CONDITION: Final = re.compile(r"\s*([a-z0-9_.]+)\s*:\s*([+-])\s*(\d+(?:\.\d+)?)\s*%\s*")
_EXAMPLE: Final = "such as ttft_p99:+10%,output_tps:-5%,accuracy:-1%"


@dataclass(frozen=True, slots=True)
class Condition:
    """A figure may not rise (`limit` > 0) or fall (`rising` False) by more than `limit`, a share of the base."""

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
        return {
            "cell": self.cell,
            "level": self.level,
            "metric": self.condition.metric,
            "limit": self.condition.limit if self.condition.rising else -self.condition.limit,
            "base": self.delta.base if self.delta else None,
            "new": self.delta.new if self.delta else None,
            "change": self.delta.change if self.delta else None,
            "reason": self.reason,
        }


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

    A value that is missing breaks it: a cell, level or figure that the base has and the new side lacks, a figure
    that neither has or the base lacks, and a cell that failed on either side. What can never work on either side is not missing, nor is a cell that is new. One that was refused is not judged. With `beyond_noise` a change breaks it only where its interval does not hold zero; one without an
    interval still does.
    """
    found: list[Break] = []
    refused = {cell for cell, _, _ in comparison.refused}
    for condition in conditions:
        name = condition.metric
        of_level = name in LEVEL_METRICS
        found += [
            Break(cell, None, condition, None, f"missing: the cell is in the baseline alone ({why})")
            for cell, why in comparison.only_base
        ]
        if of_level:
            found += [
                Break(cell, level, condition, None, f"missing: only the baseline has this level ({why})")
                for cell, level, why in comparison.lost
            ]
        seen = set()
        for pair in comparison.pairs:
            if (pair.level is not None) == of_level:
                seen.add(pair.cell)
                deltas = [each for each in pair.deltas if each.metric == name or _first(each.metric, name)]
                reasons = _reasons(condition, deltas, beyond_noise=beyond_noise)
                found += [Break(pair.cell, pair.level, condition, each, reason) for each, reason in reasons]
        seen |= {cell for cell, _, _ in comparison.lost} if of_level else set()
        bare = dict((*comparison.only_new, *comparison.unfit))
        found += [
            Break(cell, None, condition, None, f"missing: {bare.get(cell, 'neither side has this figure')}")
            for cell in dict.fromkeys(cell for cell, _ in comparison.matched)
            if cell not in seen and cell not in refused
        ]
    return tuple(found)


def _first(metric: str, name: str) -> bool:
    """`accuracy` is written out as the score it stands for."""
    return name == "accuracy" and metric.startswith("accuracy.")


def _reasons(
    condition: Condition, deltas: Sequence[Delta], *, beyond_noise: bool
) -> Iterator[tuple[Delta | None, str]]:
    if not deltas:
        yield None, "missing: neither side has this figure"
    for delta in deltas[:1]:
        if delta.change is None:
            lacks = "base" if delta.base is None else "new side" if delta.new is None else "base is 0, no share of it"
            yield delta, f"missing: {lacks}" if "0" in lacks else f"missing: the {lacks} has no value"
        elif condition.broken_by(delta.change):
            if beyond_noise and delta.verdict is ChangeVerdict.NOISE:
                continue
            words = {
                ChangeVerdict.NOISE: "beyond the limit, though within noise",
                ChangeVerdict.UNKNOWN: "beyond the limit; whether beyond noise is not known",
            }
            yield delta, words.get(delta.verdict, "beyond the limit and beyond noise")
