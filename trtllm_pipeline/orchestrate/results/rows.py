"""The results of a plan, one record per cell: the step from artifacts to a report.

    rows(plan, store, outcome)     at the end of a run
    rows_of(outline, store)        at any time later, or while it continues, from plan.json

Missing is None, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trtllm_pipeline.base import (
    CellId,
    Json,
    MatrixError,
    Scope,
    StageError,
    StageRunId,
    StageStatus,
    UsageError,
    in_words,
    read_object,
)
from trtllm_pipeline.measure import (
    ACCURACY_FILE,
    ENGINE_REPORT_FILE,
    PERF_FILE,
    AccuracyResult,
    BenchComparison,
    Conditions,
    EngineReport,
    HighestRate,
    LevelResult,
    LoadResult,
    levels_of,
)
from trtllm_pipeline.orchestrate.plan.plan import Plan
from trtllm_pipeline.orchestrate.plan.plan_file import Outline, OutlineCell, OutlineRun, outline
from trtllm_pipeline.orchestrate.plan.stage_status import StageState, stage_states
from trtllm_pipeline.orchestrate.store import manifest
from trtllm_pipeline.orchestrate.store.index import Artifact
from trtllm_pipeline.orchestrate.store.store import Store

if TYPE_CHECKING:
    from trtllm_pipeline.measure import Drift
    from trtllm_pipeline.orchestrate.run.loop import Outcome

UNQUANTIZED: Final = ("fp32", "fp16", "bf16")
"""Precisions of a cell that quantized ones are compared with, the preferred first."""
_PREPARATION: Final = ("quantize", "convert", "build", "visual")
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


@dataclass(slots=True)  # not frozen, as Cell
class CellResult:
    """The results of one cell, which nobody changes: status, failure, measurements, scores, and the conditions they were measured under."""

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
    """The log that says why, below the workspace's directory."""
    line: int | None = None
    """Of `log`, where it says why."""
    setting: str | None = None
    """What to change, as `--set` takes it."""
    changes: tuple[str, ...] = ()
    """Settings that differ from the matrix, after a stage ran out of memory, in words."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Stage -> wall-clock seconds it took when its artifact was made, in whichever run that was."""
    engine_size_bytes: int | None = None
    """Bytes of the engine's files, each hard link counted once."""
    levels: tuple[LevelResult, ...] = ()
    """By rising concurrency, then by rising request rate."""
    highest_rate: HighestRate | None = None
    """That keeps the objectives, where it was looked for."""
    trtllm_bench: Mapping[str, Json] | None = None
    """What trtllm-bench said of the engine in its own process, beside the level of the same load: `measure/load/engine_report.py`."""
    accuracy: Mapping[str, float] = field(default_factory=dict)
    """Metric -> mean score, 0 to 1."""
    accuracy_total: int | None = None
    """Questions the accuracy scores are means over."""
    accuracy_asked: str | None = None
    """The endpoint that the questions went to, and whose chat template wrote the prompts."""
    accuracy_intervals: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Metric -> lower and upper end of the mean's 95% interval."""
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

    @property
    def trtllm_bench_tps(self) -> float | None:
        """Output tokens/s of the engine in the process of trtllm-bench."""
        value = (self.trtllm_bench or {}).get("output_tokens_per_s")
        return float(value) if isinstance(value, (int, float)) else None

    def to_json(self) -> dict[str, Json]:
        """The row as in report.json, see docs/formats.md."""
        written: dict[str, Json] = {
            "status": self.status.value,
            "perf": [level.to_json() for level in self.levels],
            "highest_rate": None if self.highest_rate is None else asdict(self.highest_rate),
            "accuracy_drift": None if self.accuracy_drift is None else self.accuracy_drift.to_json(),
            "conditions": self.conditions.to_json(),
        }
        names = ("perf" if name == "levels" else name for name in CellResult.__dataclass_fields__)
        return {name: written[name] if name in written else getattr(self, name) for name in names}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> CellResult:
        """The row that `to_json` wrote. Raises KeyError, ValueError, TypeError for anything else."""
        fields = {name: data[name] for name in data if name in _PLAIN_FIELDS}
        drifted = data.get("accuracy_drift")
        if drifted is not None:
            from trtllm_pipeline.measure import Drift  # of few cells, and it reads answers with pydantic

            drifted = Drift.from_json(drifted)
        return CellResult(
            **fields,
            changes=tuple(data.get("changes", ())),
            status=CellStatus(data["status"]),
            levels=levels_of(data["perf"]),
            highest_rate=HighestRate.read(data.get("highest_rate")),
            accuracy_drift=drifted,
            findings=tuple(data["findings"]),
            conditions=Conditions.read(data.get("conditions")),
        )


_PLAIN_FIELDS: Final = frozenset(CellResult.__dataclass_fields__) - {
    *("status", "levels", "highest_rate", "accuracy_drift", "findings", "conditions", "changes")
}


def rows(plan: Plan, store: Store, outcome: Outcome | None = None) -> tuple[CellResult, ...]:
    """One row for each cell of `plan`, in its order. Without an outcome, the store says how far each cell is."""
    shape = outline(plan)
    if outcome is None:
        return rows_of(shape, store)
    seen: dict[StageRunId, StageState] = {}
    for run_id, status in outcome.statuses.items():
        error = outcome.errors.get(run_id) if status is StageStatus.FAILED else None
        state = StageState(status, outcome.artifacts.get(shape.stage_runs[run_id].fingerprint))
        seen[run_id] = state if error is None else state.failed(error)
    return _rows(shape, seen, store, interrupted=outcome.interrupted)


def rows_of(shape: Outline, store: Store) -> tuple[CellResult, ...]:
    """One row for each cell of a plan file, from what the store holds now."""
    return _rows(shape, stage_states(shape, store), store, interrupted=True)


_Seen = list[tuple[OutlineRun, StageState]]
"""The stage runs of a cell, with their states."""


def _rows(
    shape: Outline, states: Mapping[StageRunId, StageState], store: Store, *, interrupted: bool
) -> tuple[CellResult, ...]:
    found, answers = [], {}
    for cell in shape.cells:
        seen = [(shape.stage_runs[run], states[run]) for run in cell.stage_runs]
        made = {run.stage: state.artifact for run, state in seen if state.artifact is not None}
        found.append(_row(cell, seen, made, store.workspace, interrupted=interrupted))
        if (scored := _scored(made)) is not None:
            answers[cell.id] = scored.out
    drifts = drifts_of({row.id: row.axes for row in found}, answers) if answers else {}
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
    """Cell -> its drift from its reference. `answers` are directories with an answers.jsonl.

    A cell is left out where it or its reference has no answers, or they were not asked the same.
    """
    from trtllm_pipeline.measure import drift

    read = cache(drift.read)
    found = {}
    for cell, reference in references(axes).items():
        if cell in answers and reference in answers:
            # Not of answers of an earlier release, or of a cell whose own settings ask something else.
            with suppress(UsageError):
                found[cell] = replace(
                    drift.compare(read(answers[reference]), drift.read(answers[cell])), reference=reference
                )
    return found


def _made_on(made: Mapping[str, Artifact]) -> dict[str, Mapping[str, Json]]:
    """The systems that engine and answers came from."""
    prepared = [made[stage] for stage in _PREPARATION if stage in made]
    found = {}
    for name, artifact in (("preparation", prepared[-1] if prepared else None), ("accuracy", _scored(made))):
        about = {} if artifact is None else read_object(artifact.folder / manifest.NAME) or {}
        provenance = about.get("provenance")
        if isinstance(provenance, dict) and isinstance(provenance.get("system"), dict):
            found[name] = provenance["system"]
    return found


def _written(artifact: Artifact | None, name: str) -> dict[str, Any] | None:
    """The JSON object in a file of an artifact, where there is one."""
    there = artifact is not None and any(file == name for file, _ in artifact.files)
    return read_object(artifact.out / name) if artifact is not None and there else None


def _in_process(artifact: Artifact | None, perf: LoadResult) -> dict[str, Json] | None:
    """The report of trtllm-bench beside what perf measured; None where either is missing."""
    if artifact is None or not perf.valid:
        return None
    with suppress(MatrixError, StageError):
        return BenchComparison.of(perf, EngineReport.read(artifact.out / ENGINE_REPORT_FILE)).to_json()
    return None


def _scored(made: Mapping[str, Artifact]) -> Artifact | None:
    """What the stage that scored left: answers of its own, or those that perf timed."""
    return made.get("accuracy") or made.get("score")


def _row(
    cell: OutlineCell, seen: _Seen, made: Mapping[str, Artifact], workspace: Path, *, interrupted: bool
) -> CellResult:
    if cell.reason is not None:
        return CellResult(cell.id, cell.axes, CellStatus.INFEASIBLE, reason=cell.reason)
    failures = ((run.stage, state) for run, state in seen if state.status is StageStatus.FAILED)
    failed, why = next(failures, (None, StageState(StageStatus.PENDING)))
    # A file that is not what it should be counts as missing: it must not take the report with it.
    perf = LoadResult.read(_written(made.get("perf"), PERF_FILE) or {})
    levels = perf.levels if perf.valid else ()
    scored = _scored(made)
    scores_in = None if scored is None else scored.out
    if failed in {"accuracy", "score"} and why.log is not None:
        scores_in = why.log.parent / "out"  # too low a score is to be seen
    accuracy = AccuracyResult.read((read_object(scores_in / ACCURACY_FILE) if scores_in else None) or {})
    questions: dict[str, Json] = {"digest": accuracy.rows_digest, "max_tokens": accuracy.settings.get("max_tokens")}
    return CellResult(
        id=cell.id,
        axes=cell.axes,
        status=_status(seen, interrupted=interrupted),
        failed_stage=failed,
        failure=why.failure,
        reason=why.message,
        hint=why.hint,
        log=_below(why.log, workspace),
        line=why.line,
        changes=tuple(in_words(cell.changes)),
        setting=None if why.setting is None else _to_set(why.setting, cell.id),
        seconds={stage: artifact.duration_s for stage, artifact in made.items()},
        engine_size_bytes=made[_ENGINE_STAGE].size_bytes if _ENGINE_STAGE in made else None,
        levels=levels,
        highest_rate=perf.highest_rate if perf.valid else None,
        trtllm_bench=_in_process(made.get("trtllm_bench"), perf),
        accuracy=accuracy.scores,
        accuracy_total=accuracy.total,
        accuracy_asked=accuracy.asked,
        accuracy_intervals={name: ends for name, ends in accuracy.intervals.items() if ends is not None},
        smoke=_written(made.get("smoke"), "smoke.json"),
        findings=perf.notes,
        conditions=replace(
            perf.conditions,
            questions=None if accuracy.rows_digest is None else questions,
            made_on={} if levels else _made_on(made),
        ),
    )


def _to_set(setting: str, cell: CellId) -> str:
    """KEY=VALUE as `--set` takes it of a cell, whose id has the settings that are axes."""
    name, _, value = setting.partition("=")
    keys = (name.rpartition(".")[2], name.removeprefix("settings."))
    is_axis = any(segment.partition("=")[0] in keys for segment in cell.split("/") if "=" in segment)
    return f"axes.{name}=[{value}]" if is_axis else setting


def _status(seen: _Seen, *, interrupted: bool) -> CellStatus:
    """`interrupted`: a cancelled stage run was cut short, not given up because another had failed."""
    every = {state.status for _, state in seen}
    if StageStatus.FAILED in every:
        return CellStatus.FAILED
    if every & {StageStatus.RUNNING, StageStatus.ELSEWHERE}:
        return CellStatus.RUNNING
    if every & {StageStatus.CANCELLED, StageStatus.PENDING, StageStatus.BLOCKED}:
        return CellStatus.INTERRUPTED if interrupted and StageStatus.CANCELLED in every else CellStatus.NOT_RUN
    results = {state.status for run, state in seen if run.scope is not Scope.SERVICE}
    return CellStatus.DONE if StageStatus.SUCCEEDED in results else CellStatus.UP_TO_DATE


def _below(path: Path | None, workspace: Path) -> str | None:
    """`path` from the workspace's directory, so that a report that is passed on names nobody's home."""
    return None if path is None else str(path.relative_to(workspace) if path.is_relative_to(workspace) else path)
