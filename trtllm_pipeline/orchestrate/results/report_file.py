"""The results of each cell of a run, and the file `report.json`, written and read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from trtllm_pipeline.base import (
    CellId,
    Json,
    MatrixError,
    Scope,
    StageError,
    StageRunId,
    StageStatus,
    StateError,
    UsageError,
    in_words,
    read_object,
    reading,
    user_files,
    writing,
)
from trtllm_pipeline.measure import (
    PERF_FILE,
    AccuracyResult,
    Conditions,
    LevelResult,
    LoadResult,
    accuracy_result,
    engine_report,
    result,
    scores,
    stats,
)
from trtllm_pipeline.orchestrate.plan.plan import Plan
from trtllm_pipeline.orchestrate.plan.plan_file import Outline, OutlineCell, OutlineRun, outline
from trtllm_pipeline.orchestrate.plan.stage_status import StageState, stage_states
from trtllm_pipeline.orchestrate.run.forecast import ForecastCheck
from trtllm_pipeline.orchestrate.store import manifest
from trtllm_pipeline.orchestrate.store.index import Artifact
from trtllm_pipeline.orchestrate.store.store import Store

if TYPE_CHECKING:
    from trtllm_pipeline.measure import Drift
    from trtllm_pipeline.orchestrate.run.loop import Outcome

UNQUANTIZED: Final = ("fp32", "fp16", "bf16")
"""Precisions of reference cells for quantized cells, the preferred first."""
Made = TypeVar("Made")
SCORING: Final = ("accuracy", "score", "tasks")
"""Stages that write accuracy.json: own questions, answers that perf timed, or standard tasks."""
_PREPARATION: Final = ("quantize", "convert", "build", "visual")
_ENGINE_STAGE: Final = "build"


class CellStatus(str, Enum):
    """Status of a cell."""

    DONE = "done"
    """All of its artifacts exist, and this run built some of them."""
    UP_TO_DATE = "up_to_date"
    """All of its artifacts existed before."""
    FAILED = "failed"
    """One of its stages failed, possibly one shared with other cells. Results of earlier stages are still shown."""
    INFEASIBLE = "infeasible"
    """The plan found that it cannot work."""
    INTERRUPTED = "interrupted"
    """The run was stopped before this cell was finished."""
    RUNNING = "running"
    """A process works on it now."""
    NOT_RUN = "not_run"
    """Not started, or not finished because the run ended after another cell's failure."""


@dataclass(frozen=True, slots=True)
class CellResult:
    """Results of one cell: status, failure, measurements, scores and measurement conditions."""

    id: CellId
    axes: Mapping[str, Json]
    status: CellStatus
    failed_stage: str | None = None
    failure: str | None = None
    """A value of `FailureClass`."""
    reason: str | None = None
    """Cause of a failure, or reason why it cannot work, in words."""
    hint: str | None = None
    log: str | None = None
    """Log with the cause, relative to the workspace."""
    line: int | None = None
    """Line of `log` with the cause."""
    setting: str | None = None
    """Suggested change, as a value of `--set`."""
    changes: tuple[str, ...] = ()
    """Settings changed after a stage ran out of memory, in words."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Stage -> wall-clock seconds to build its artifact, in this or an earlier run."""
    engine_size_bytes: int | None = None
    """Bytes of the engine's files, each hard link counted once."""
    levels: tuple[LevelResult, ...] = ()
    """Levels by increasing concurrency, then by increasing request rate."""
    highest_rate: result.HighestRate | None = None
    """Highest load that meets the objectives, if it was searched for."""
    highest_concurrency: result.HighestConcurrency | None = None
    """Most requests in flight that meet the objectives, if it was searched for."""
    trtllm_bench: Mapping[str, Json] | None = None
    """Report of trtllm-bench for the engine without a server, next to the level of the same load: `measure/load/engine_report.py`."""
    accuracy: Mapping[str, float] = field(default_factory=dict)
    """Metric -> mean score, 0 to 1."""
    accuracy_total: int | None = None
    """Number of questions in the mean scores."""
    accuracy_asked: str | None = None
    """Endpoint of the questions, and the source of the chat template."""
    accuracy_intervals: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Metric -> lower and upper end of the mean's 95% interval."""
    accuracy_drift: Drift | None = None
    """Difference of its answers to those of the unquantized cell, see `references`."""
    smoke: Mapping[str, Json] | None = None
    """Notes of the smoke test."""
    numerics: Mapping[str, str] | None = None
    """The meaning of its precision: `weights`, `activations`, `kv_cache`, and how it was `made`."""
    gpu_hour: float | None = None
    """Price of one of its GPUs, or of its host, for an hour."""
    served_gpus: int | None = None
    """GPUs of all its servers. None if they are tp * pp."""
    findings: tuple[str, ...] = ()
    """Validity findings of the measurement, each "SEVERITY: MESSAGE"."""
    conditions: Conditions = field(default_factory=Conditions)
    """System and load of its measurements, in this or an earlier run."""

    @property
    def unfit(self) -> str | None:
        """The reason why it must not be recommended, even if measured. None if all stages succeeded."""
        if self.status in {CellStatus.DONE, CellStatus.UP_TO_DATE}:
            return None
        if self.failed_stage is not None:
            return f"{self.failed_stage} failed: {self.reason or 'unknown reason'}"
        words = self.status.value.replace("_", " ")
        return self.reason or (f"not finished: {words}" if self.levels else words)

    @property
    def gpus(self) -> int:
        """The number of GPUs that its server spans, at least 1."""
        if self.served_gpus is not None:
            return self.served_gpus
        tp, pp = (value if isinstance(value := self.axes.get(name), int) else 1 for name in ("tp", "pp"))
        return tp * pp

    def per_gpu(self, level: LevelResult) -> float | None:
        """Output tokens/s per GPU, or per host."""
        return None if level.output_tokens_per_s is None else level.output_tokens_per_s / self.gpus

    def cost(self, level: LevelResult) -> float | None:
        """Price of a million output tokens at a level. None without a price or a rate."""
        rate = level.output_tokens_per_s
        return self.gpu_hour * self.gpus / 3600 / rate * 1e6 if self.gpu_hour is not None and rate else None

    @property
    def warnings(self) -> list[str]:
        """Findings other than notes on the method."""
        return [text for text in self.findings if not text.startswith("info:")]

    @property
    def build_s(self) -> float | None:
        return self.seconds.get(_ENGINE_STAGE)

    @property
    def preparation_s(self) -> float | None:
        """Seconds of quantizing, converting and building."""
        known = [self.seconds[stage] for stage in _PREPARATION if stage in self.seconds]
        return sum(known) if known else None

    @property
    def trtllm_bench_tps(self) -> float | None:
        """Output tokens/s of the engine in trtllm-bench."""
        value = (self.trtllm_bench or {}).get("output_tokens_per_s")
        return float(value) if isinstance(value, (int, float)) else None

    def to_json(self) -> dict[str, Json]:
        """The row in report.json, see docs/reference/formats.md."""
        written: dict[str, Json] = {
            "status": self.status.value,
            "perf": [
                {
                    **level.to_json(),
                    "output_tokens_per_s_per_gpu": self.per_gpu(level),
                    "dollars_per_million": self.cost(level),
                }
                for level in self.levels
            ],
            "highest_rate": None if self.highest_rate is None else asdict(self.highest_rate),
            "highest_concurrency": None if self.highest_concurrency is None else asdict(self.highest_concurrency),
            "accuracy_drift": None if self.accuracy_drift is None else self.accuracy_drift.to_json(),
            "conditions": self.conditions.to_json(),
        }
        names = ("perf" if name == "levels" else name for name in CellResult.__dataclass_fields__)
        return {name: written[name] if name in written else getattr(self, name) for name in names}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> CellResult:
        """Read the row that `to_json` wrote. Raises KeyError, ValueError, TypeError for anything else."""
        fields = {name: data[name] for name in data if name in _PLAIN_FIELDS}
        drifted = data.get("accuracy_drift")
        if drifted is not None:
            from trtllm_pipeline.measure import Drift  # few cells need it, and it imports pydantic

            drifted = Drift.from_json(drifted)
        return CellResult(
            **fields,
            changes=tuple(data.get("changes", ())),
            status=CellStatus(data["status"]),
            levels=result.levels_of(data["perf"]),
            highest_rate=result.read_record(result.HighestRate, data.get("highest_rate")),
            highest_concurrency=result.read_record(result.HighestConcurrency, data.get("highest_concurrency")),
            accuracy_drift=drifted,
            findings=tuple(data["findings"]),
            conditions=Conditions.read(data.get("conditions")),
        )


_PLAIN_FIELDS: Final = frozenset(CellResult.__dataclass_fields__) - {
    *("status", "levels", "highest_rate", "highest_concurrency", "accuracy_drift", "findings", "conditions", "changes")
}


def rows(plan: Plan, store: Store, outcome: Outcome | None = None) -> tuple[CellResult, ...]:
    """One row for each cell of `plan`, in its order. Without an outcome, the status is from the store."""
    shape = outline(plan)
    if outcome is None:
        return rows_of(shape, store)
    states: dict[StageRunId, StageState] = {}
    for run_id, status in outcome.statuses.items():
        error = outcome.errors.get(run_id) if status is StageStatus.FAILED else None
        state = StageState(status, outcome.artifacts.get(shape.stage_runs[run_id].fingerprint))
        states[run_id] = state if error is None else state.failed(error)
    return _rows(shape, states, store, interrupted=outcome.interrupted)


def rows_of(shape: Outline, store: Store) -> tuple[CellResult, ...]:
    """One row for each cell of a plan file, from the current store."""
    return _rows(shape, stage_states(shape, store), store, interrupted=True)


_States = list[tuple[OutlineRun, StageState]]


def _rows(
    shape: Outline, states: Mapping[StageRunId, StageState], store: Store, *, interrupted: bool
) -> tuple[CellResult, ...]:
    results, answers = [], {}
    for cell in shape.cells:
        own_states = [(shape.stage_runs[run], states[run]) for run in cell.stage_runs]
        made = {run.stage: state.artifact for run, state in own_states if state.artifact is not None}
        results.append(_row(cell, own_states, made, store.workspace, interrupted=interrupted))
        if (scored := scored_by(made)) is not None:
            answers[cell.id] = scored.out
    drifts = drifts_of({row.id: row.axes for row in results}, answers) if answers else {}
    return tuple(replace(row, accuracy_drift=drifts[row.id]) if row.id in drifts else row for row in results)


def references(axes: Mapping[CellId, Mapping[str, Json]]) -> dict[CellId, CellId]:
    """Cell -> the unquantized cell that is equal on every other axis. Cells without one are missing."""
    groups: dict[frozenset[tuple[str, str]], dict[str, CellId]] = {}
    keys = {}
    for cell, values in axes.items():
        keys[cell] = frozenset((name, str(value)) for name, value in values.items() if name != "precision")
        groups.setdefault(keys[cell], {})[str(values.get("precision"))] = cell
    reference_of = {}
    for cell, key in keys.items():
        best = next((groups[key][precision] for precision in UNQUANTIZED if precision in groups[key]), None)
        if best is not None and best != cell:
            reference_of[cell] = best
    return reference_of


def drifts_of(axes: Mapping[CellId, Mapping[str, Json]], answers: Mapping[CellId, Path]) -> dict[CellId, Drift]:
    """Cell -> drift from its reference. `answers` are directories with an answers.jsonl.

    A cell is left out if it or its reference has no answers, or if their questions differ.
    """
    from trtllm_pipeline.measure import drift

    read = cache(drift.read)
    drifts = {}
    for cell, reference in references(axes).items():
        if cell in answers and reference in answers:
            # Answers to other questions do not count.
            with suppress(UsageError):
                drifts[cell] = replace(
                    drift.compare(read(answers[reference]), drift.read(answers[cell])), reference=reference
                )
    return drifts


def _made_on(made: Mapping[str, Artifact]) -> dict[str, Mapping[str, Json]]:
    """Systems that built the engine and produced the answers."""
    prepared = [made[stage] for stage in _PREPARATION if stage in made]
    systems = {}
    for name, artifact in (("preparation", prepared[-1] if prepared else None), ("accuracy", scored_by(made))):
        about = {} if artifact is None else read_object(artifact.folder / manifest.NAME) or {}
        provenance = about.get("provenance")
        if isinstance(provenance, dict) and isinstance(provenance.get("system"), dict):
            systems[name] = provenance["system"]
    return systems


def _written(artifact: Artifact | None, name: str) -> dict[str, Any] | None:
    present = artifact is not None and any(file == name for file, _ in artifact.files)
    return read_object(artifact.out / name) if artifact is not None and present else None


def _in_process(artifact: Artifact | None, perf: LoadResult) -> dict[str, Json] | None:
    """The report of trtllm-bench next to the measurement of perf. None if either is missing."""
    if artifact is None or not perf.valid:
        return None
    with suppress(MatrixError, StageError):
        return engine_report.BenchComparison.of(
            perf, engine_report.EngineReport.read(artifact.out / engine_report.ENGINE_REPORT_FILE)
        ).to_json()
    return None


def scored_by(made: Mapping[str, Made]) -> Made | None:
    """Output of the stage that scored a cell. None without one."""
    return next((made[stage] for stage in SCORING if stage in made), None)


def _row(
    cell: OutlineCell, own_states: _States, made: Mapping[str, Artifact], workspace: Path, *, interrupted: bool
) -> CellResult:
    if cell.reason is not None:
        return CellResult(cell.id, cell.axes, CellStatus.INFEASIBLE, reason=cell.reason)
    failures = ((run.stage, state) for run, state in own_states if state.status is StageStatus.FAILED)
    failed, why = next(failures, (None, StageState(StageStatus.PENDING)))
    # An invalid file counts as missing, so that the report can still be written.
    perf = LoadResult.read(_written(made.get("perf"), PERF_FILE) or {})
    levels = perf.levels if perf.valid else ()
    scored = scored_by(made)
    scores_in = None if scored is None else scored.out
    if failed in SCORING and why.log is not None:
        scores_in = why.log.parent / "out"  # show the low score as well
    accuracy = AccuracyResult.read(
        (read_object(scores_in / accuracy_result.ACCURACY_FILE) if scores_in else None) or {}
    )
    conditions = replace(perf.conditions, made_on={} if levels else _made_on(made))
    # Relative to the workspace, so that a shared report does not reveal home directories.
    within = why.log is not None and why.log.is_relative_to(workspace)
    log = None if why.log is None else str(why.log.relative_to(workspace) if within else why.log)
    numerics = cell.about.get("numerics")
    questions: dict[str, Json] = {"digest": accuracy.rows_digest, "max_tokens": accuracy.settings.get("max_tokens")}
    return CellResult(
        id=cell.id,
        axes=cell.axes,
        status=_status(own_states, interrupted=interrupted),
        failed_stage=failed,
        failure=why.failure,
        reason=why.message,
        hint=why.hint,
        log=log,
        line=why.line,
        changes=tuple(in_words(cell.changes)),
        setting=None if why.setting is None else _to_set(why.setting, cell.id),
        seconds={stage: artifact.duration_s for stage, artifact in made.items()},
        engine_size_bytes=made[_ENGINE_STAGE].size_bytes if _ENGINE_STAGE in made else None,
        levels=levels,
        highest_rate=perf.highest_rate if perf.valid else None,
        highest_concurrency=perf.highest_concurrency if perf.valid else None,
        trtllm_bench=_in_process(made.get("trtllm_bench"), perf),
        accuracy=accuracy.scores,
        accuracy_total=accuracy.total,
        accuracy_asked=accuracy.asked,
        accuracy_intervals={name: ends for name, ends in accuracy.intervals.items() if ends is not None},
        smoke=_written(made.get("smoke"), "smoke.json"),
        numerics={name: str(value) for name, value in numerics.items()} if isinstance(numerics, dict) else None,
        served_gpus=gpus if isinstance(gpus := cell.about.get("gpus"), int) else None,
        gpu_hour=price_of(cell.about.get("gpu_hour"), cell.axes, conditions),
        findings=perf.notes,
        conditions=replace(conditions, questions=None if accuracy.rows_digest is None else questions),
    )


def price_of(prices: Json | Mapping[str, float], axes: Mapping[str, Json], conditions: Conditions) -> float | None:
    """The price of one GPU of a cell for an hour. None if its type has none."""
    if isinstance(prices, Mapping):
        measured = (conditions.system or {}).get("gpus")
        gpus = (axes.get("gpu"), *(measured if isinstance(measured, list) else ()))
        names = [str(gpu).casefold() for gpu in gpus if gpu]
        known = (price for kind, price in prices.items() if any(kind.casefold() in name for name in names))
        prices = next(known, None)
    return float(prices) if isinstance(prices, (int, float)) and not isinstance(prices, bool) else None


def _to_set(setting: str, cell: CellId) -> str:
    """KEY=VALUE for `--set` of a cell. Settings that are axes are in its id."""
    name, _, value = setting.partition("=")
    keys = (name.rpartition(".")[2], name.removeprefix("settings."))
    is_axis = any(segment.partition("=")[0] in keys for segment in cell.split("/") if "=" in segment)
    return f"axes.{name}=[{value}]" if is_axis else setting


def _status(own_states: _States, *, interrupted: bool) -> CellStatus:
    """`interrupted`: a cancelled stage run was interrupted, not cancelled after another failure."""
    every = {state.status for _, state in own_states}
    if StageStatus.FAILED in every:
        return CellStatus.FAILED
    if every & {StageStatus.RUNNING, StageStatus.ELSEWHERE}:
        return CellStatus.RUNNING
    if every & {StageStatus.CANCELLED, StageStatus.PENDING, StageStatus.BLOCKED}:
        return CellStatus.INTERRUPTED if interrupted and StageStatus.CANCELLED in every else CellStatus.NOT_RUN
    results = {state.status for run, state in own_states if run.scope is not Scope.SERVICE}
    return CellStatus.DONE if StageStatus.SUCCEEDED in results else CellStatus.UP_TO_DATE


SCHEMA: Final = 1
NAME: Final = "report.json"
METRICS: Final = (
    *result.LOAD_METRICS,
    *(result.MetricDefinition(name, "0 to 1", metric.definition) for name, metric in scores.SCORE_METRICS.items()),
    result.MetricDefinition("normalisation", "", scores.NORMALISATION),
    result.MetricDefinition("interval", "", stats.MEAN_INTERVAL),
    *(
        result.MetricDefinition(name, unit, f"compared with the otherwise equal unquantized cell: {scores.DRIFT[name]}")
        for name, unit in (("agreement", "0 to 1"), ("difference", "-1 to 1"))
    ),
    result.MetricDefinition("first_divergence", "", scores.DRIFT["first_divergence"]),
    result.MetricDefinition(
        "trtllm_bench",
        "tokens/s",
        "output tokens / s of the engine in the process of trtllm-bench, without a server: the prompts of the highest concurrency "
        "level",
    ),
    result.MetricDefinition(
        "cost",
        "$ per million tokens",
        "price of a GPU, or of a host without one, for an hour * GPUs / (3600 * output tokens/s) * 1,000,000 output tokens",
    ),
    result.MetricDefinition("engine_size_bytes", "bytes", "sum of the engine's files, each hard link counted once"),
    result.MetricDefinition(
        "seconds", "s", "wall-clock time of a stage when it built its artifact, in this or an earlier run"
    ),
)
"""All metrics, and the terms of their formulas."""


def report_json(
    rows: Sequence[CellResult],
    run_id: str,
    matrix: str,
    *,
    finished: bool = True,
    forecast: ForecastCheck | None = None,
) -> Iterator[str]:
    """Lines of the report as JSON, see docs/reference/formats.md. `finished` is False until the run has written its own report."""
    counts = Counter(row.status.value for row in rows)
    return writing.json_lines(
        schema=SCHEMA,
        run={
            "id": run_id,
            "matrix": matrix,
            "finished": finished,
            "counts": dict(sorted(counts.items())),
            "forecast": None if forecast is None else forecast.to_json(),
        },
        metrics=({"name": metric.name, "unit": metric.unit, "formula": metric.formula} for metric in METRICS),
        cells=(row.to_json() for row in rows),
    )


def read_report(path: Path) -> tuple[tuple[CellResult, ...], dict[str, Any]]:
    """Rows, `run` and `forecast` of a report file, which is untrusted. Raises StateError for another file."""
    try:
        data = user_files.decode_mapping(reading.read_bytes(path))
        if data["schema"] != SCHEMA:
            raise StateError(f"{path}: report of schema {data['schema']}, this release reads {SCHEMA}")
        run = dict(data["run"])
        if (forecast := run.get("forecast")) is not None:
            run["forecast"] = ForecastCheck.from_json(forecast)
        return tuple(CellResult.from_json(cell) for cell in data["cells"]), run
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateError(f"{path}: not a report: {error}", hint="`pipeline run` writes one when it ends") from error
