"""The recommended configuration: the cheapest that meets every objective, and the reasons against each other one.

Only cells of the same workload are compared (`show/report/comparable_loads.py`). Pure functions of what `show/report/measured.py` loads.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Final, Literal

from trtllm_pipeline.base import Json, UsageError, shared_parts, text_blocks, text_tables
from trtllm_pipeline.measure import (
    LEVEL_METRICS,
    LevelResult,
    Objective,
    deciding,
    differences,
    load_words,
    objectives,
    of_questions,
)
from trtllm_pipeline.orchestrate import report_file
from trtllm_pipeline.show.phrases import without
from trtllm_pipeline.show.report.comparable_loads import Workload, shortened, words, workloads
from trtllm_pipeline.show.report.comparison import ChangeVerdict, accuracy_delta
from trtllm_pipeline.show.report.measured import Measured, Side, selected

if TYPE_CHECKING:
    from rich.console import Group

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
    """A minimum score: absolute, or (`share`) relative to the unquantized cell."""

    metric: str | None
    """None means the cell's first score."""
    score: float | None
    share: float | None
    typed: str = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One cell at its best level. `reason` explains its exclusion. None if it meets all objectives."""

    cell: str
    workload: Workload
    reason: str | None
    engine_bytes: int | None
    accuracy: float | None
    level: str | None = None
    output_tps_per_device: float | None = None
    e2e_p50_ms: float | None = None
    requests: int | None = None
    """Requests measured at that level. With fewer than 100, p99 is the maximum."""

    def to_json(self) -> dict[str, Json]:
        """The JSON of `pipeline recommend --format json`, see docs/reference/formats.md."""
        return {**asdict(self), "workload": dict(self.workload)}


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

    @property
    def groups(self) -> list[list[Candidate]]:
        """The candidates of each workload."""
        return [list(group) for _, group in groupby(self.candidates, key=lambda each: each.workload)]

    @property
    def exit_code(self) -> int:
        """3 if no configuration meets the objectives, otherwise 0."""
        return 0 if any(each.reason is None for each in self.candidates) else 3

    def to_json(self) -> dict[str, Json]:
        """The JSON of `pipeline recommend --format json`, see docs/reference/formats.md."""
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
    """The recommendation for the cells that match `patterns`."""
    chosen = {cell.id for cell in selected(side, patterns).cells}
    # Uses the whole run: the reference of a quantized cell's accuracy need not match the patterns.
    candidates = tuple(each for each in recommend(side, slos, least, goal, allow=allow) if each.cell in chosen)
    return Recommendation(side.name, goal, slos, least, candidates, any(devices(cell) > 1 for cell in side.cells))


def parse_slo(text: str) -> tuple[Objective, ...]:
    """`ttft_p99=300ms,tpot_p99=40ms,output_tps=100`. Raises UsageError."""
    return objectives.parse(text, LEVEL_METRICS, example="ttft_p99=300ms,tpot_p99=40ms,output_tps=100")


def parse_least(text: str) -> LeastAccuracy:
    """`-1%`, `0.6`, `contains:-1%`. Raises UsageError."""
    match = _LEAST.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--min-accuracy: expected a score or a relative loss, got {text!r}",
            hint="e.g. -1% (of the unquantized cell's score), 0.6, or contains:-1%",
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
    """All cells by workload: cells that meet all objectives, best first, then the others in run order.

    Without `least`, cells with significantly lower accuracy than the unquantized cell are excluded. `allow` lists groups
    or fields of `measure/load/conditions.py` that do not separate workloads.
    """
    by_id = {cell.id: cell for cell in side.cells}
    base = {
        cell: by_id[other]
        for cell, other in report_file.references({cell.id: cell.axes for cell in side.cells}).items()
    }
    workload_of_cell = workloads(side.cells, allow)
    place = {workload: number for number, workload in enumerate(dict.fromkeys(workload_of_cell))}
    candidates = []
    for cell, workload in zip(side.cells, workload_of_cell, strict=True):
        best = at_best(cell, workload, slos, objective, least.metric if least else None)
        if best.level is not None and (why := cell.unfit or inaccurate(cell, base.get(cell.id), least, allow)):
            best = replace(best, reason=why)
        candidates.append(best)

    def order(each: Candidate) -> tuple[int, bool, float]:
        return place[each.workload], each.reason is not None, cost(each, objective) if each.reason is None else 0.0

    return tuple(sorted(candidates, key=order))


def devices(cell: Measured) -> int:
    """The number of GPUs that a cell's engine spans, at least 1."""
    tp, pp = (value if isinstance(value := cell.axes.get(name), int) else 1 for name in ("tp", "pp"))
    return tp * pp


def cost(each: Candidate, objective: Goal) -> float:
    """The cost of a candidate. Lower is better."""
    if objective == "throughput":
        return -(each.output_tps_per_device or 0.0)
    value = each.e2e_p50_ms if objective == "latency" else each.engine_bytes
    return float("inf") if value is None else float(value)


def at_best(
    cell: Measured, workload: Workload, slos: Sequence[Objective], objective: Goal, metric: str | None
) -> Candidate:
    """A cell at its best level that meets the objectives, or at the nearest level, with the reason."""
    score = cell.accuracy.get(metric or next(iter(cell.accuracy), ""))
    bare = Candidate(cell.id, workload, cell.unfit or cell.why, cell.engine_size_bytes, score)
    if not cell.levels:
        return bare

    def at(level: LevelResult, reason: str | None = None) -> Candidate:
        tps = level.value("output_tps")
        return replace(
            bare,
            level=level.key,
            reason=reason,
            output_tps_per_device=None if tps is None else tps / devices(cell),
            e2e_p50_ms=level.value("e2e_p50"),
            requests=level.requests,
        )

    good = [at(level) for level in cell.levels if all(slo.missed_by(level.value(slo.metric)) is None for slo in slos)]
    if good:
        return min(good, key=lambda each: cost(each, objective))
    nearest = min(cell.levels, key=lambda level: max(slo.share(level.value(slo.metric)) for slo in slos))
    missed = next(reason for slo in slos if (reason := slo.missed_by(nearest.value(slo.metric))) is not None)
    more = f", its best of {len(cell.levels)} levels" if len(cell.levels) > 1 else ""
    return at(nearest, f"{missed} at {load_words(nearest.key)}{more}")


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
    if least is None or least.share is None:
        clearly = f"{metric} {score:.3f} is significantly (95%) {below}; --min-accuracy -100% accepts it"
        return clearly if verdict is ChangeVerdict.WORSE else None
    if score >= reference * (1 - least.share):
        return None
    noise = " (within noise: use more questions)" if verdict is ChangeVerdict.NOISE else ""
    return f"{metric} {score:.3f} is {1 - score / reference:.1%} {below}, {least.share:.1%} allowed{noise}"


def _apart(metric: str, cell: Measured, base: Measured, allow: Collection[str]) -> str | None:
    """Why two scores are not comparable: other questions, or a different system as far as recorded."""
    loads = differences(cell.conditions, base.conditions) if cell.levels and base.levels else ()
    systems = [each for each in loads if each.field.about == "system"]
    why = deciding((*of_questions(cell.conditions, base.conditions), *systems), allow)
    if not why:
        return None
    return f"{metric} cannot be compared with {base.id}: {why[0]} (compare anyway with --allow {why[0].field.about})"


# As text


def to_table(recommendation: Recommendation) -> Group:
    """`blocks` on a terminal."""
    return text_blocks.on_terminal(blocks(recommendation))


def blocks(recommendation: Recommendation) -> list[text_blocks.Block]:
    """Per workload, the recommended cell and a table of all candidates with the reasons for exclusion."""
    parts = shared_parts([each.cell for each in recommendation.candidates])
    shown: list[text_blocks.Block] = []
    named = shortened([group[0].workload for group in recommendation.groups])
    for group, workload in zip(recommendation.groups, named, strict=True):
        shown += [text_blocks.TextLine("")] if shown else []
        shown += _of_workload(group, words(workload), parts, recommendation)
    return shown


def _of_workload(
    group: Sequence[Candidate], workload: str, parts: Sequence[str], recommendation: Recommendation
) -> Iterator[text_blocks.Block]:
    good = [each for each in group if each.reason is None]
    if workload:
        yield text_blocks.TextLine(f"for {workload}", "bold")
    if good:
        yield text_blocks.TextLine(f"recommended: {good[0].cell}, at {load_words(str(good[0].level))}", "bold green")
        yield text_blocks.TextLine(
            f"best of {len(good)} that meet the objectives: {OBJECTIVES[recommendation.goal]}", "dim"
        )
    else:
        yield text_blocks.TextLine("no configuration meets the objectives", "bold red")
    rate = "tok/s/GPU" if recommendation.per_gpu else "tok/s"
    rows: list[list[text_blocks.Value]] = []
    for each in group:
        megabytes = None if each.engine_bytes is None else each.engine_bytes / 1e6
        values = [
            text_tables.number(value)
            for value in (each.output_tps_per_device, each.e2e_p50_ms, megabytes, each.accuracy)
        ]
        level = "n/a" if each.level is None else f"@{each.level}"
        why = ("meets all objectives", "green") if each.reason is None else (each.reason, "red")
        rows.append([without(each.cell, parts), level, *values, why])
    yield text_blocks.Grid(["cell", "level", rate, "e2e p50 ms", "engine MB", "accuracy", ""], rows, (0, 6))
    few = [each for each in good if each.requests is not None and each.requests < 100]
    if few and any(slo.metric.endswith(("p95", "p99")) for slo in recommendation.slos):
        yield text_blocks.TextLine(
            f"\nmeasured with {few[0].requests} requests: with fewer than 100, p99 is the maximum", "yellow"
        )
