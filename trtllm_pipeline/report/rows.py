"""The results of a plan, one record per cell: the step from artifacts to a report.

    rows(plan, store, outcome)     at the end of a run
    rows_of(outline, store)        at any time later, or while it goes on, from plan.json

Missing is None, never 0.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trtllm_pipeline.bench.conditions import Conditions
from trtllm_pipeline.bench.result import NAME as PERF
from trtllm_pipeline.bench.result import LevelResult, LoadResult, levels_of
from trtllm_pipeline.domain import CellId, Json, Scope, StageRunId, StageStatus
from trtllm_pipeline.errors import UsageError
from trtllm_pipeline.evaluate import drift
from trtllm_pipeline.evaluate.drift import Drift
from trtllm_pipeline.evaluate.result import NAME as ACCURACY
from trtllm_pipeline.evaluate.result import AccuracyResult
from trtllm_pipeline.files.writing import read_object
from trtllm_pipeline.planning.plan import Plan
from trtllm_pipeline.planning.plan_file import Outline, OutlineCell, outline
from trtllm_pipeline.planning.stage_status import StageState, stage_states
from trtllm_pipeline.store import manifest
from trtllm_pipeline.store.store import Artifact, Store

if TYPE_CHECKING:
    from trtllm_pipeline.execution.loop import Outcome

UNQUANTIZED: Final = ("fp32", "fp16", "bf16")
"""Precisions of a cell that quantized ones are compared with, the preferred first."""
_PREPARATION: Final = ("quantize", "convert", "build")
_ENGINE_STAGE: Final = "build"


class CellStatus(str, Enum):
    """How far a cell got."""

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
class CellResult:
    """The results of one cell: status, failure, measurements, scores, and the conditions they were measured under."""

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
    accuracy_drift: Drift | None = None
    """Difference of its answers from those of the unquantized cell, see `references`."""
    smoke: Mapping[str, Json] | None = None
    """What the smoke test noted."""
    findings: tuple[str, ...] = ()
    """Validity findings of the measurement, each "SEVERITY: MESSAGE"."""
    conditions: Conditions = field(default_factory=Conditions)
    """System and load of its measurements, in whichever run they were made."""

    @property
    def unfit(self) -> str | None:
        """Why it must not be recommended, whatever was measured; None when all its stages succeeded."""
        if self.status in {CellStatus.DONE, CellStatus.UP_TO_DATE}:
            return None
        if self.failed_stage is not None:
            return f"{self.failed_stage} failed: {self.reason or 'no reason was given'}"
        words = self.status.value.replace("_", " ")
        return self.reason or (f"not finished: {words}" if self.levels else words)

    @property
    def warnings(self) -> list[str]:
        """The findings that say more than how it was measured."""
        return [text for text in self.findings if not text.startswith("info:")]

    @property
    def build_s(self) -> float | None:
        """Seconds the engine build took."""
        return self.seconds.get(_ENGINE_STAGE)

    @property
    def preparation_s(self) -> float | None:
        """Seconds of quantizing, converting and building."""
        known = [self.seconds[stage] for stage in _PREPARATION if stage in self.seconds]
        return sum(known) if known else None

    def to_json(self) -> dict[str, Json]:
        """The row as in report.json, see docs/formats.md."""
        written: dict[str, Json] = {
            "status": self.status.value,
            "perf": [level.to_json() for level in self.levels],
            "accuracy_drift": None if self.accuracy_drift is None else self.accuracy_drift.to_json(),
            "conditions": self.conditions.to_json(),
        }
        names = ("perf" if name == "levels" else name for name in CellResult.__dataclass_fields__)
        return {name: written[name] if name in written else getattr(self, name) for name in names}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> CellResult:
        """The row that `to_json` wrote. Raises KeyError, ValueError, TypeError for anything else."""
        fields = {name: value for name, value in data.items() if name in _PLAIN_FIELDS}
        return CellResult(
            **fields,
            status=CellStatus(data["status"]),
            levels=levels_of(data["perf"]),
            accuracy_drift=None if (drifted := data.get("accuracy_drift")) is None else Drift.from_json(drifted),
            findings=tuple(data["findings"]),
            conditions=Conditions.read(data.get("conditions")),
        )


_PLAIN_FIELDS: Final = frozenset(CellResult.__dataclass_fields__) - {
    *("status", "levels", "accuracy_drift", "findings", "conditions")
}


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
    drifts = drifts_of({row.id: row.axes for row in found}, answers)
    return tuple(replace(row, accuracy_drift=drifts[row.id]) if row.id in drifts else row for row in found)


def references(axes: Mapping[CellId, Mapping[str, Json]]) -> dict[CellId, CellId]:
    """Cell -> the unquantized cell that is equal to it on every other axis; without those that have none."""
    groups: dict[frozenset[tuple[str, str]], dict[str, CellId]] = {}
    keys = {}
    for cell, values in axes.items():
        keys[cell] = frozenset((name, str(value)) for name, value in values.items() if name != "precision")
        groups.setdefault(keys[cell], {})[str(values.get("precision"))] = cell
    found = {}
    for cell, key in keys.items():
        best = next((groups[key][precision] for precision in UNQUANTIZED if precision in groups[key]), None)
        if best is not None and best != cell:
            found[cell] = best
    return found


def drifts_of(axes: Mapping[CellId, Mapping[str, Json]], answers: Mapping[CellId, Path]) -> dict[CellId, Drift]:
    """Cell -> its drift from its reference. `answers` are folders with an answers.jsonl.

    A cell is left out where it or its reference has no answers, or they were not asked the same.
    """
    known: dict[CellId, list[drift.ScoredAnswer]] = {}
    found = {}
    for cell, reference in references(axes).items():
        if cell not in answers or reference not in answers:
            continue
        try:
            if reference not in known:
                known[reference] = drift.read(answers[reference])
            found[cell] = replace(drift.compare(known[reference], drift.read(answers[cell])), reference=reference)
        except UsageError:  # answers of an earlier release, or of a cell whose own settings ask something else
            continue
    return found


def _made(cell: OutlineCell, shape: Outline, seen: Mapping[StageRunId, StageState]) -> dict[str, Artifact]:
    """Stage -> artifact of a cell, as far as they are there."""
    runs = (shape.stage_runs[run_id] for run_id in cell.stage_runs)
    return {run.stage: artifact for run in runs if (artifact := seen[run.id].artifact) is not None}


def _made_on(made: Mapping[str, Artifact]) -> dict[str, Mapping[str, Json]]:
    """The systems that engine and answers came from."""
    prepared = [made[stage] for stage in _PREPARATION if stage in made]
    found = {"preparation": prepared[-1] if prepared else None, "accuracy": _scored(made)}
    manifests = {
        name: read_object(artifact.folder / manifest.NAME) or {} for name, artifact in found.items() if artifact
    }
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
        accuracy = _accuracy(why.log.parent / "out")  # too low a score is to be seen
    else:
        accuracy = _accuracy(None if scored is None else scored.out)
    questions: dict[str, Json] = {"digest": accuracy.rows_digest, "max_tokens": accuracy.settings.get("max_tokens")}
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
        accuracy=accuracy.scores,
        accuracy_total=accuracy.total,
        accuracy_intervals={name: ends for name, ends in accuracy.intervals.items() if ends is not None},
        smoke=read_object(made["smoke"].out / "smoke.json") if "smoke" in made else None,
        findings=findings,
        conditions=replace(
            conditions,
            questions=questions if accuracy.rows_digest is not None else None,
            made_on={} if levels else _made_on(made),
        ),
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


def _perf(artifact: Artifact | None) -> tuple[tuple[LevelResult, ...], tuple[str, ...], Conditions]:
    found = LoadResult.read((read_object(artifact.out / PERF) if artifact is not None else None) or {})
    return found.levels if found.valid else (), found.notes, found.conditions


def _accuracy(folder: Path | None) -> AccuracyResult:
    return AccuracyResult.read((read_object(folder / ACCURACY) if folder is not None else None) or {})
