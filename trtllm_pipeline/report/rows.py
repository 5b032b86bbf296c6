"""What came out of a plan, one row a cell: the arrow from artifacts to a report.

    rows(plan, store, outcome)     at the end of a run
    rows_of(outline, store)        at any time later, or while it goes on, from plan.json

Missing is None, never 0.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trtllm_pipeline.bench.conditions import Conditions
from trtllm_pipeline.domain import CellId, Json, Scope, StageRunId, StageStatus
from trtllm_pipeline.planning.names import load_key
from trtllm_pipeline.planning.plan import Plan
from trtllm_pipeline.planning.plan_file import Outline, OutlineCell, outline
from trtllm_pipeline.planning.stage_status import StageState, stage_states
from trtllm_pipeline.report import drift
from trtllm_pipeline.store import manifest
from trtllm_pipeline.store.store import Artifact, Store

if TYPE_CHECKING:
    from trtllm_pipeline.execution.loop import Outcome

LATENCIES: Final = ("ttft_ms", "tpot_ms", "itl_ms", "icl_ms", "e2e_ms")
LENGTHS: Final = ("input_tokens_per_request", "output_tokens_per_request")
CLIENT_ERROR: Final = "info: self-test of the load client, its own error"
PREPARATION: Final = ("quantize", "convert", "build")
_ENGINE_STAGE: Final = "build"
_RATES: Final = ("duration_s", "input_tokens_per_s", "output_tokens_per_s", "requests_per_s")


class CellStatus(str, Enum):
    """How far a cell came."""

    DONE = "done"
    """Everything it needs is there, and some of it was made in this run."""
    UP_TO_DATE = "up_to_date"
    """Everything was there before."""
    FAILED = "failed"
    """One of its stages failed, be it one that other cells share; results from before that stage are still shown."""
    INFEASIBLE = "infeasible"
    """Can never work, as the plan found."""
    INTERRUPTED = "interrupted"
    """The run was stopped before this cell was finished."""
    RUNNING = "running"
    """Some process works on it now."""
    NOT_RUN = "not_run"
    """Not begun, or not finished because the run ended after another cell's failure."""


@dataclass(frozen=True, slots=True)
class LevelResult:
    """What was measured at one concurrency, or in an open loop at one request rate: the other is None."""

    concurrency: int | None
    requests: int | None
    failures: int | None
    duration_s: float | None
    input_tokens_per_s: float | None
    output_tokens_per_s: float | None
    requests_per_s: float | None
    window: str | None
    """What the rates are over: "steady", or "whole" where there was no steady window long enough."""
    latencies: Mapping[str, Mapping[str, float]]
    """"ttft_ms", "tpot_ms", "itl_ms", "icl_ms", "e2e_ms" -> statistic ("mean", "p50", ..., "n") -> milliseconds."""
    repeats: tuple[Mapping[str, Any], ...] = ()
    """Each repeat by itself: `started_s` (Unix time), the rates over the same kind of window, and the latencies."""
    request_rate: float | None = None
    """Requests a second, on average, however many are in flight."""
    goodput: Mapping[str, Any] | None = None
    """`objectives_ms`, `share` of the requests that met them all, and these as `requests_per_s`; None without any."""
    lengths: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """LENGTHS -> statistic -> tokens, of the measured requests that were answered."""

    @property
    def key(self) -> str:
        """What it is called in comparisons: `4` requests in flight, or `2.5/s`."""
        return load_key(self.concurrency, self.request_rate)

    def latency(self, name: str, statistic: str) -> float | None:
        """One statistic of one latency, in milliseconds."""
        return self.latencies.get(name, {}).get(statistic)


@dataclass(frozen=True, slots=True)
class CellResult:
    """What is known of one cell."""

    id: CellId
    axes: Mapping[str, Json]
    status: CellStatus
    failed_stage: str | None = None
    failure: str | None = None
    """A value of `FailureClass`."""
    reason: str | None = None
    """Why it failed or cannot work, in words."""
    hint: str | None = None
    log: str | None = None
    """Log of the failed stage, below the workspace's folder."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Stage -> wall-clock seconds it took when its artifact was made, in whichever run that was."""
    engine_size_bytes: int | None = None
    """Bytes of the engine's files, each hard link counted once."""
    levels: tuple[LevelResult, ...] = ()
    """By rising concurrency, then by rising request rate."""
    accuracy: Mapping[str, float] = field(default_factory=dict)
    """Metric -> mean score, 0 to 1."""
    accuracy_total: int | None = None
    """Questions the accuracy scores are means over."""
    accuracy_intervals: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Metric -> lower and upper end of the mean's 95 % interval."""
    accuracy_drift: Mapping[str, Any] | None = None
    """How far its answers are from those of the unquantized cell, see `report/drift.py`."""
    smoke: Mapping[str, Json] | None = None
    """What the smoke test noted."""
    findings: tuple[str, ...] = ()
    """What the perf stage found about its own numbers, each "SEVERITY: MESSAGE"."""
    conditions: Conditions = field(default_factory=Conditions)
    """On what system and under which load its figures were measured, whenever that was."""

    @property
    def unfit(self) -> str | None:
        """Why nobody should choose it whatever its figures are; None when every one of its stages ended well."""
        if self.status in {CellStatus.DONE, CellStatus.UP_TO_DATE}:
            return None
        if self.failed_stage is not None:
            return f"{self.failed_stage} failed: {self.reason or 'no reason was given'}"
        words = self.status.value.replace("_", " ")
        return self.reason or (f"not finished: {words}" if self.levels else words)

    @property
    def build_s(self) -> float | None:
        """Seconds the engine build took."""
        return self.seconds.get(_ENGINE_STAGE)

    def to_json(self) -> dict[str, Json]:
        """The row as in report.json, see docs/formats.md."""
        levels: list[Json] = [
            {
                "concurrency": level.concurrency,
                "request_rate": level.request_rate,
                "requests": level.requests,
                "failures": level.failures,
                **{name: getattr(level, name) for name in _RATES},
                "headline": {"window": level.window},
                **{name: dict(values) for name, values in (*level.latencies.items(), *level.lengths.items())},
                "goodput": None if level.goodput is None else dict(level.goodput),
                "repeats": [dict(repeat) for repeat in level.repeats],
            }
            for level in self.levels
        ]
        return {
            "id": self.id,
            "axes": dict(self.axes),
            "status": self.status.value,
            "failed_stage": self.failed_stage,
            "failure": self.failure,
            "reason": self.reason,
            "hint": self.hint,
            "log": self.log,
            "seconds": dict(self.seconds),
            "engine_size_bytes": self.engine_size_bytes,
            "perf": levels,
            "accuracy": dict(self.accuracy),
            "accuracy_total": self.accuracy_total,
            "accuracy_intervals": {name: list(ends) for name, ends in self.accuracy_intervals.items()},
            "accuracy_drift": None if self.accuracy_drift is None else dict(self.accuracy_drift),
            "smoke": None if self.smoke is None else dict(self.smoke),
            "findings": list(self.findings),
            "conditions": self.conditions.to_json(),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> CellResult:
        """The row that `to_json` wrote. Raises KeyError, ValueError, TypeError for anything else."""
        fields = {name: value for name, value in data.items() if name in _PLAIN_FIELDS}
        return CellResult(
            **fields,
            status=CellStatus(data["status"]),
            levels=levels_of(data["perf"]),
            findings=tuple(data["findings"]),
            conditions=Conditions.read(data.get("conditions")),
        )


_PLAIN_FIELDS: Final = frozenset(CellResult.__dataclass_fields__) - {"status", "levels", "findings", "conditions"}


def rows(plan: Plan, store: Store, outcome: Outcome | None = None) -> tuple[CellResult, ...]:
    """One row for each cell of `plan`, in its order. Without an outcome, the store says how far each cell is."""
    shape = outline(plan)
    if outcome is None:
        return rows_of(shape, store)
    seen: dict[StageRunId, StageState] = {}
    for run_id, status in outcome.statuses.items():
        artifact = outcome.artifacts.get(shape.stage_runs[run_id].fingerprint)
        error = outcome.errors.get(run_id) if status is StageStatus.FAILED else None
        if error is None:
            seen[run_id] = StageState(status, artifact)
        else:
            seen[run_id] = StageState(status, artifact, error.failure.value, error.message, error.hint, error.log)
    return _rows(shape, seen, store, interrupted=outcome.interrupted)


def rows_of(shape: Outline, store: Store) -> tuple[CellResult, ...]:
    """One row for each cell of a plan file, from what the store holds now."""
    return _rows(shape, stage_states(shape, store), store, interrupted=True)


def _rows(
    shape: Outline, seen: Mapping[StageRunId, StageState], store: Store, *, interrupted: bool
) -> tuple[CellResult, ...]:
    found = [_row(cell, shape, seen, store.workspace, interrupted=interrupted) for cell in shape.cells]
    answers = {cell.id: scored.out for cell in shape.cells if (scored := _scored(_made(cell, shape, seen))) is not None}
    drifts = drift.by_cell({row.id: row.axes for row in found}, answers)
    return tuple(replace(row, accuracy_drift=drifts[row.id]) if row.id in drifts else row for row in found)


def _made(cell: OutlineCell, shape: Outline, seen: Mapping[StageRunId, StageState]) -> dict[str, Artifact]:
    """Stage -> artifact of a cell, as far as they are there."""
    runs = (shape.stage_runs[run_id] for run_id in cell.stage_runs)
    return {run.stage: artifact for run in runs if (artifact := seen[run.id].artifact) is not None}


def _made_on(made: Mapping[str, Artifact]) -> dict[str, Mapping[str, Json]]:
    """The systems that engine and answers came from."""
    prepared = [made[stage] for stage in PREPARATION if stage in made]
    found = {"preparation": prepared[-1] if prepared else None, "accuracy": _scored(made)}
    manifests = {name: _read(artifact.folder, manifest.NAME) or {} for name, artifact in found.items() if artifact}
    made_by = {name: each["provenance"] for name, each in manifests.items() if isinstance(each.get("provenance"), dict)}
    return {name: each["system"] for name, each in made_by.items() if isinstance(each.get("system"), dict)}


def _scored(made: Mapping[str, Artifact]) -> Artifact | None:
    """What the stage that scored left: answers of its own, or those that perf timed."""
    return made.get("accuracy") or made.get("score")


def _row(
    cell: OutlineCell,
    shape: Outline,
    seen: Mapping[StageRunId, StageState],
    workspace: Path,
    *,
    interrupted: bool,
) -> CellResult:
    if cell.reason is not None:
        return CellResult(cell.id, cell.axes, CellStatus.INFEASIBLE, reason=cell.reason)
    runs = [shape.stage_runs[run_id] for run_id in cell.stage_runs]
    failed = next((run for run in runs if seen[run.id].status is StageStatus.FAILED), None)
    why = seen[failed.id] if failed else StageState(StageStatus.PENDING)
    made = _made(cell, shape, seen)
    levels, findings, conditions = _perf(made.get("perf"))
    scored = _scored(made)
    if failed and failed.stage in {"accuracy", "score"} and why.log is not None:
        scores, total, intervals, questions = _accuracy(why.log.parent / "out")  # too low a score is to be seen
    else:
        scores, total, intervals, questions = _accuracy(None if scored is None else scored.out)
    return CellResult(
        id=cell.id,
        axes=cell.axes,
        status=_status(
            [seen[run.id].status for run in runs],
            [seen[run.id].status for run in runs if run.scope is not Scope.SERVICE],
            interrupted=interrupted,
        ),
        failed_stage=failed.stage if failed else None,
        failure=why.failure,
        reason=why.message,
        hint=why.hint,
        log=_below(why.log, workspace),
        seconds={stage: artifact.duration_s for stage, artifact in made.items()},
        engine_size_bytes=disk_bytes(made[_ENGINE_STAGE].out) if _ENGINE_STAGE in made else None,
        levels=levels,
        accuracy=scores,
        accuracy_total=total,
        accuracy_intervals=intervals,
        smoke=_read(made["smoke"].out, "smoke.json") if "smoke" in made else None,
        findings=findings,
        conditions=replace(conditions, questions=questions, made_on={} if levels else _made_on(made)),
    )


def _status(every: list[StageStatus], results: list[StageStatus], *, interrupted: bool) -> CellStatus:
    """A cell's status, from those of all its stage runs and of those that leave results.

    `interrupted`: a cancelled stage run was cut short, not given up because another had failed.
    """
    if StageStatus.FAILED in every:
        return CellStatus.FAILED
    if StageStatus.RUNNING in every or StageStatus.ELSEWHERE in every:
        return CellStatus.RUNNING
    if StageStatus.CANCELLED in every or StageStatus.PENDING in every or StageStatus.BLOCKED in every:
        cut = interrupted and StageStatus.CANCELLED in every
        return CellStatus.INTERRUPTED if cut else CellStatus.NOT_RUN
    return CellStatus.DONE if StageStatus.SUCCEEDED in results else CellStatus.UP_TO_DATE


def disk_bytes(folder: Path) -> int:
    """Bytes of all regular files below `folder`, each inode counted once; symbolic links count nothing."""
    sizes: dict[tuple[int, int], int] = {}
    for base, _, names in os.walk(folder):
        for name in names:
            stat = os.lstat(os.path.join(base, name))
            if not os.path.islink(os.path.join(base, name)):
                sizes[stat.st_dev, stat.st_ino] = stat.st_size
    return sum(sizes.values())


def _below(path: Path | None, workspace: Path) -> str | None:
    """`path` from the workspace's folder, so that a report that is passed on names nobody's home."""
    if path is None:
        return None
    return str(path.relative_to(workspace)) if path.is_relative_to(workspace) else str(path)


# What the stages left. A file that is not what it should be counts as missing: it must not take the report with it.


def _read(folder: Path, name: str) -> dict[str, Any] | None:
    try:
        data = json.loads((folder / name).read_bytes())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _perf(artifact: Artifact | None) -> tuple[tuple[LevelResult, ...], tuple[str, ...], Conditions]:
    data = (_read(artifact.out, "perf.json") if artifact is not None else None) or {}
    client = data.get("client")
    tested = client.get("self_test") if isinstance(client, dict) else None
    levels = () if data.get("valid") is False else levels_of(data.get("levels"))
    return levels, (*_findings(data.get("findings")), *_self_test(tested)), Conditions.read(data)


_Scores = tuple[dict[str, float], int | None, dict[str, tuple[float, float]], "dict[str, Json] | None"]


def _accuracy(folder: Path | None) -> _Scores:
    """Means, number of questions, intervals, and what the questions were."""
    data = (_read(folder, "accuracy.json") if folder is not None else None) or {}
    ends = data.get("intervals")
    intervals = {}
    for name, pair in ends.items() if isinstance(ends, dict) else ():
        numbers = [number for end in pair if (number := _number(end)) is not None] if isinstance(pair, list) else []
        if len(numbers) == 2:
            intervals[str(name)] = (numbers[0], numbers[1])
    settings = data.get("settings")
    asked: dict[str, Json] = {
        "digest": data.get("rows_digest"),
        "max_tokens": settings.get("max_tokens") if isinstance(settings, dict) else None,
    }
    known = asked if asked["digest"] is not None else None
    return _numbers(data.get("scores")), _count(data.get("total")), intervals, known


def levels_of(data: object) -> tuple[LevelResult, ...]:
    """The levels of a perf.json, or of a cell in a report.json; what is not one is left out."""
    levels = []
    for entry in data if isinstance(data, list) else ():
        concurrency = _count(entry.get("concurrency")) if isinstance(entry, dict) else None
        rate = _number(entry.get("request_rate")) if isinstance(entry, dict) else None
        if concurrency is not None or rate is not None:
            levels.append(
                LevelResult(
                    concurrency=concurrency,
                    request_rate=rate,
                    requests=_count(entry.get("requests")),
                    failures=_count(entry.get("failures")),
                    **{name: _number(entry.get(name)) for name in _RATES},
                    window=_window(entry.get("headline")),
                    latencies={name: _numbers(entry.get(name)) for name in LATENCIES if entry.get(name)},
                    repeats=_repeats(entry.get("repeats"), _window(entry.get("headline"))),
                    goodput=entry["goodput"] if isinstance(entry.get("goodput"), dict) else None,
                    lengths={name: _numbers(entry.get(name)) for name in LENGTHS if entry.get(name)},
                )
            )
    return tuple(
        sorted(levels, key=lambda level: (level.request_rate is not None, level.request_rate or level.concurrency))
    )


def _repeats(data: object, window: str | None) -> tuple[Mapping[str, Any], ...]:
    """The repeats of a level, as perf.json has them (rates for each window) or as a report has them."""
    found = []
    for entry in data if isinstance(data, list) else ():
        if isinstance(entry, dict):
            rates = entry[window] if window is not None and isinstance(entry.get(window), dict) else entry
            latencies = {name: _numbers(entry[name]) for name in LATENCIES if entry.get(name)}
            numbers = {name: _number(rates.get(name)) for name in _RATES}
            found.append({"started_s": _number(entry.get("started_s")), **numbers, **latencies})
    return tuple(found)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _numbers(data: object) -> dict[str, float]:
    entries = data.items() if isinstance(data, dict) else ()
    return {str(name): number for name, value in entries if (number := _number(value)) is not None}


def _window(headline: object) -> str | None:
    window = headline.get("window") if isinstance(headline, dict) else None
    return window if isinstance(window, str) else None


def _self_test(tested: object) -> tuple[str, ...]:
    """How wrong the client itself was, by a test of it on this machine."""
    first = tested.get("ttft_error_ms") if isinstance(tested, dict) else None
    errors = [_number(first.get(name)) for name in ("p50", "p99")] if isinstance(first, dict) else []
    known = [error for error in errors if error is not None]
    return (f"{CLIENT_ERROR}: TTFT p50 {known[0]:.3f} ms, p99 {known[1]:.3f} ms",) if len(known) == 2 else ()


def _findings(data: object) -> tuple[str, ...]:
    """Findings as lines: "warning: 1 of 40 requests failed, ... (concurrency 4)"."""
    lines = []
    for entry in data if isinstance(data, list) else ():
        if isinstance(entry, dict) and "message" in entry:
            concurrency, rate = entry.get("concurrency"), _number(entry.get("request_rate"))
            place = "" if concurrency is None else f" (concurrency {concurrency})"
            place = place if rate is None else f" ({rate:g} requests/s)"
            lines.append(f"{entry.get('severity', 'warning')}: {entry['message']}{place}")
    return tuple(lines)
