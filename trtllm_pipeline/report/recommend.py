"""The configuration to recommend: the cheapest that meets every objective, and why each of the others does not.

Only cells of the same workload are compared (`report/workloads.py`). Pure functions of what `report/measured.py` loads.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final, Literal

from trtllm_pipeline.bench import objectives
from trtllm_pipeline.bench.conditions import deciding, differences, of_questions
from trtllm_pipeline.bench.objectives import Objective
from trtllm_pipeline.bench.result import RATES, load_words
from trtllm_pipeline.domain import Json
from trtllm_pipeline.errors import UsageError
from trtllm_pipeline.report.compare import LEVEL_METRICS, ChangeVerdict, accuracy_delta
from trtllm_pipeline.report.drift import UNQUANTIZED, references
from trtllm_pipeline.report.measured import Measured, MeasuredLevel, Side, selected
from trtllm_pipeline.report.workloads import Workload, workloads

Goal = Literal["throughput", "latency", "size"]
OBJECTIVES: Final = {
    "throughput": "highest output throughput per GPU (or host) at a load that meets the objectives: the lowest "
    "cost per token",
    "latency": "lowest median end-to-end latency at a load that meets the objectives",
    "size": "smallest engine",
}
_LEAST: Final = re.compile(r"\s*(?:([a-z_0-9.]+)\s*:)?\s*(?:-\s*(\d+(?:\.\d+)?)\s*%|(\d+(?:\.\d+)?))\s*")


@dataclass(frozen=True, slots=True)
class LeastAccuracy:
    """A least score: itself, or (`share`) that of the unquantized cell less a share of it."""

    metric: str | None
    """None is the first score a cell has."""
    score: float | None
    share: float | None
    typed: str = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One cell at its best level. `reason` says why it is excluded; None when it meets all objectives."""

    cell: str
    workload: Workload
    level: str | None
    reason: str | None
    output_tps_per_device: float | None
    e2e_p50_ms: float | None
    engine_bytes: int | None
    accuracy: float | None
    requests: int | None
    """Measured at that level: with fewer than 100, p99 is the maximum."""

    def to_json(self) -> dict[str, Json]:
        """As `pipeline recommend --format json` prints it, see docs/formats.md."""
        fields = {name: getattr(self, name) for name in Candidate.__dataclass_fields__}
        return {**fields, "workload": dict(self.workload)}


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What a run's configurations come to: all candidates, workload by workload, the best first."""

    run: str
    goal: Goal
    slos: tuple[Objective, ...]
    min_accuracy: LeastAccuracy | None
    candidates: tuple[Candidate, ...]
    per_gpu: bool
    """Some engine spans several GPUs, so that rates are of one GPU."""

    @property
    def groups(self) -> list[list[Candidate]]:
        """The candidates of each workload."""
        return [list(group) for _, group in groupby(self.candidates, key=lambda each: each.workload)]

    @property
    def exit_code(self) -> int:
        """3 where no configuration meets the objectives, else 0."""
        return 0 if any(each.reason is None for each in self.candidates) else 3

    def to_json(self) -> dict[str, Json]:
        """As `pipeline recommend --format json` prints it, see docs/formats.md."""
        return {
            "schema": 1,
            "run": self.run,
            "objective": self.goal,
            "slo": {slo.metric: slo.limit for slo in self.slos},
            "min_accuracy": None if self.min_accuracy is None else self.min_accuracy.typed,
            "recommended": [
                {"workload": dict(group[0].workload), "cell": group[0].cell if group[0].reason is None else None}
                for group in self.groups
            ],
            "candidates": [each.to_json() for each in self.candidates],
        }


def advise(
    side: Side,
    patterns: Sequence[str],
    slos: tuple[Objective, ...],
    least: LeastAccuracy | None,
    goal: Goal,
    allow: Collection[str],
) -> Recommendation:
    """Which of the cells that `patterns` let through to take."""
    chosen = {cell.id for cell in selected(side, patterns).cells}
    # Of the whole run: what a quantized cell's accuracy is held against need not be among those to choose from.
    found = tuple(each for each in recommend(side, slos, least, goal, allow=allow) if each.cell in chosen)
    return Recommendation(side.name, goal, slos, least, found, any(devices(cell) > 1 for cell in side.cells))


def parse_slo(text: str) -> tuple[Objective, ...]:
    """`ttft_p99=300ms,tpot_p99=40ms,output_tps=100`. Raises UsageError."""
    return objectives.parse(text, LEVEL_METRICS, RATES, example="ttft_p99=300ms,tpot_p99=40ms,output_tps=100")


def parse_least(text: str) -> LeastAccuracy:
    """`-1%`, `0.6`, `contains:-1%`. Raises UsageError."""
    match = _LEAST.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--min-accuracy: {text!r} is neither a share to lose nor a score",
            hint="such as -1% of the unquantized cell's, 0.6, or contains:-1%",
        )
    share = float(match[2]) / 100 if match[2] else None
    return LeastAccuracy(match[1], float(match[3]) if match[3] else None, share, text)


def recommend(
    side: Side,
    slos: Sequence[Objective],
    least: LeastAccuracy | None,
    objective: Goal,
    *,
    allow: Collection[str] = frozenset(),
) -> tuple[Candidate, ...]:
    """Every cell, workload by workload: those that meet all objectives from the best down, then the others in the order of
    the run. Without `least`, cells are excluded whose accuracy is significantly below that of the unquantized one. `allow`: groups or
    fields of `bench/conditions.py` that do not tell workloads apart.
    """
    axes = {cell.id: cell.axes for cell in side.cells}
    by_id = {cell.id: cell for cell in side.cells}
    base = {cell: by_id[reference] for cell, reference in references(axes).items()}
    asked = workloads(side.cells, allow)
    found = [
        _candidate(cell, workload, base.get(cell.id), slos, least, objective, allow)
        for cell, workload in zip(side.cells, asked, strict=True)
    ]
    place = {workload: number for number, workload in enumerate(dict.fromkeys(asked))}

    def order(each: Candidate) -> tuple[int, bool, float]:
        held = each.reason is None
        return place[each.workload], not held, _cost(each, objective) if held else 0.0

    return tuple(sorted(found, key=order))


def devices(cell: Measured) -> int:
    """How many GPUs a cell's engine spans; 1 also where it has none."""
    tp, pp = (value if isinstance(value := cell.axes.get(name), int) else 1 for name in ("tp", "pp"))
    return tp * pp


def _cost(each: Candidate, objective: Goal) -> float:
    if objective == "throughput":
        return -(each.output_tps_per_device or 0.0)
    value = each.e2e_p50_ms if objective == "latency" else each.engine_bytes
    return float("inf") if value is None else float(value)


def _candidate(
    cell: Measured,
    workload: Workload,
    base: Measured | None,
    slos: Sequence[Objective],
    least: LeastAccuracy | None,
    objective: Goal,
    allow: Collection[str],
) -> Candidate:
    names = [least.metric] if least and least.metric else list(cell.accuracy)
    score = cell.accuracy.get(names[0]) if names else None
    if not cell.levels:
        return Candidate(
            cell.id,
            workload,
            None,
            cell.unfit or cell.why or "not measured",
            None,
            None,
            cell.engine_bytes,
            score,
            None,
        )
    good = [level for level in cell.levels if all(_missed(slo, level) is None for slo in slos)]
    if good:
        each = min((_at(cell, workload, level, None, score) for level in good), key=lambda each: _cost(each, objective))
    else:
        nearest = min(cell.levels, key=lambda level: max(_share(slo, level) for slo in slos))
        reasons = [reason for slo in slos if (reason := _missed(slo, nearest)) is not None]
        more = f", its best of {len(cell.levels)} levels" if len(cell.levels) > 1 else ""
        each = _at(cell, workload, nearest, f"{reasons[0]} at {load_words(nearest.key)}{more}", score)
    reason = cell.unfit or _inaccurate(cell, base, names[0] if names else None, least, allow)
    return each if reason is None else replace(each, reason=reason)


def _at(cell: Measured, workload: Workload, level: MeasuredLevel, reason: str | None, score: float | None) -> Candidate:
    tps = level.value("output_tps")
    return Candidate(
        cell.id,
        workload,
        level.key,
        reason,
        None if tps is None else tps / devices(cell),
        level.value("e2e_p50"),
        cell.engine_bytes,
        score,
        level.level.requests,
    )


def _share(slo: Objective, level: MeasuredLevel) -> float:
    value = level.value(slo.metric)
    return float("inf") if value is None else slo.share(value)


def _missed(slo: Objective, level: MeasuredLevel) -> str | None:
    """How the level misses the objective, or None."""
    value = level.value(slo.metric)
    if value is None:
        return f"{slo.metric} was not measured"
    return slo.missed_by(value) if slo.share(value) > 1 else None


def _inaccurate(
    cell: Measured, base: Measured | None, metric: str | None, least: LeastAccuracy | None, allow: Collection[str]
) -> str | None:
    if least is None:
        return _clearly_worse(cell, base, metric, allow)
    if least.share is not None and least.share >= 1:
        return None
    score = None if metric is None else cell.accuracy.get(metric)
    if metric is None or score is None:
        return f"accuracy{'' if metric is None else f' {metric}'} was not measured"
    if least.score is not None:
        return None if score >= least.score else f"{metric} {score:.3f} < {least.score:g}"
    assert least.share is not None
    if base is None and cell.axes.get("precision") in UNQUANTIZED:
        return None  # it is what the others are held against
    if base is None:
        return f"{metric} cannot be compared with an unquantized cell: none is otherwise equal"
    reference = base.accuracy.get(metric)
    if reference is None:
        return f"{metric} cannot be compared with {base.id}, where it was not measured"
    if (apart := _apart(metric, cell, base, allow)) is not None:
        return apart
    if score >= reference * (1 - least.share):
        return None
    noise = accuracy_delta(f"accuracy.{metric}", metric, cell, base).verdict is ChangeVerdict.NOISE
    return (
        f"{metric} {score:.3f} is {1 - score / reference:.1%} below the {reference:.3f} of {base.axes.get('precision')}, "
        f"{least.share:.1%} allowed" + (" (within noise: ask more questions)" if noise else "")
    )


def _apart(metric: str, cell: Measured, base: Measured, allow: Collection[str]) -> str | None:
    """Why two scores cannot be held against each other: other questions, or as far as is known another system."""
    loads = differences(cell.conditions, base.conditions) if cell.levels and base.levels else ()
    systems = [each for each in loads if each.field.about == "system"]
    why = deciding((*of_questions(cell.conditions, base.conditions), *systems), allow)
    if not why:
        return None
    return f"{metric} cannot be compared with {base.id}: {why[0]} (--allow {why[0].field.about} compares them anyway)"


def _clearly_worse(cell: Measured, base: Measured | None, metric: str | None, allow: Collection[str]) -> str | None:
    if base is None or metric is None or metric not in cell.accuracy or metric not in base.accuracy:
        return None
    if (apart := _apart(metric, cell, base, allow)) is not None:
        return apart
    if accuracy_delta(f"accuracy.{metric}", metric, cell, base).verdict is not ChangeVerdict.WORSE:
        return None
    score, reference = cell.accuracy[metric], base.accuracy[metric]
    return (
        f"{metric} {score:.3f} is significantly (95 %) below the {reference:.3f} of {base.axes.get('precision')}; "
        "--min-accuracy -100% accepts it"
    )
