"""Status of every stage run of a plan, derived from the store, for a run that continues, was killed, or ended."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import (
    Fingerprint,
    Json,
    Scope,
    StageError,
    StageRunId,
    StageStatus,
    path_from_here,
    read_object,
)
from trtllm_pipeline.orchestrate.plan.plan import is_result
from trtllm_pipeline.orchestrate.plan.plan_file import Outline, OutlineRun
from trtllm_pipeline.orchestrate.store.index import Artifact, AttemptRow
from trtllm_pipeline.orchestrate.store.store import LOG, Store
from trtllm_pipeline.tensorrt import PROGRESS_FILE, failure

INFEASIBLE: Final = "infeasible"


@dataclass(frozen=True, slots=True)
class StageState:
    """Status of one stage run. Unknown values are None."""

    status: StageStatus
    artifact: Artifact | None = None
    failure: str | None = None
    """Failure class of a failed stage run."""
    message: str | None = None
    hint: str | None = None
    attempt_log: Path | None = None
    """Log if there is no artifact."""
    line: int | None = None
    """Line of `log` with the cause."""
    setting: str | None = None
    """Suggested change, as a value of `--set`."""
    telling: tuple[str, ...] = ()
    """Relevant lines of the logs, if the cause is unknown."""
    started_s: float | None = None
    """Start of the running attempt, Unix time."""
    progress: Mapping[str, Json] | None = None
    """Progress of the running attempt: done, total and unit."""

    @property
    def log(self) -> Path | None:
        """Log of the attempt that built the artifact, or of the last attempt."""
        return self.attempt_log if self.artifact is None else self.artifact.folder / LOG

    def failed(self, error: StageError) -> StageState:
        """This status with the cause of the failure."""
        return replace(
            self,
            failure=error.failure.value,
            message=error.message,
            hint=error.hint,
            attempt_log=error.log,
            line=error.line,
            setting=error.setting,
            telling=error.telling,
        )

    @property
    def details(self) -> list[str]:
        """Lines to print below the cause of a failure: log, further log lines, hint and setting."""
        place = "" if self.line is None else f":{self.line}"
        lines = [] if self.log is None else [f"log: {path_from_here(self.log)}{place}"]
        lines += ["unknown cause, most relevant lines:"] if self.telling else []
        lines += [f"| {line}" for line in self.telling]
        lines += [] if self.hint is None else [f"try: {self.hint}"]
        return lines if self.setting is None else [*lines, f"set: {self.setting}"]


_THERE: Final = StageState(StageStatus.UP_TO_DATE)


def stage_states(outline: Outline, store: Store, *, artifacts: bool = True) -> dict[StageRunId, StageState]:
    """Current status of each stage run. Without `artifacts`, files of artifacts are not read.

    UP_TO_DATE: its artifact exists. RUNNING: a process works on it. FAILED: its last attempt failed, or it is infeasible.
    CANCELLED: its last attempt was interrupted or killed. BLOCKED: a stage run that it needs failed. SKIPPED: not needed, since
    all of its readers are up to date. PENDING: everything else.
    """
    runs = outline.stage_runs.values()
    before = store.claimed()
    wanted = {run.fingerprint: run.stage for run in runs if run.scope is not Scope.SERVICE}
    present = {**store.present(wanted)} if artifacts else dict.fromkeys(store.listed(wanted), None)
    absent = [run.fingerprint for run in runs if run.fingerprint not in present]
    attempts = store.index.attempts(absent)
    infeasible = store.index.infeasible()
    now = store.claimed()
    # A stage run that ended or started meanwhile has not been interrupted.
    open_ = {fingerprint for fingerprint, attempt in attempts.items() if attempt.outcome is None}
    # Without an attempt, a process holds the claim briefly before it waits, or pulls the artifact.
    working = (before & now) | ((before | now) & open_)
    needed = _needed(outline, present) if absent else set()
    states: dict[StageRunId, StageState] = {}
    for run in runs:  # in dependency order
        if run.fingerprint in present:
            artifact = present[run.fingerprint]
            states[run.id] = _THERE if artifact is None else StageState(StageStatus.UP_TO_DATE, artifact)
            continue
        attempt = attempts.get(run.fingerprint)
        if run.fingerprint in working:
            states[run.id] = _running(attempt)
        elif run.id not in needed:
            states[run.id] = StageState(StageStatus.SKIPPED, attempt_log=_log(attempt))
        elif run.fingerprint in infeasible:
            message = infeasible[run.fingerprint]
            hint = "pipeline resume --retry-infeasible tries it again"
            known = StageState(StageStatus.FAILED) if attempt is None else failed_attempt(attempt)
            states[run.id] = replace(known, failure=INFEASIBLE, message=message, hint=hint)
        else:
            states[run.id] = _after(run, attempt, states)
    return states


def _needed(outline: Outline, present: Collection[Fingerprint]) -> set[StageRunId]:
    """Stage runs that would run now: missing results, and their missing inputs."""
    runs = outline.stage_runs
    read = {upstream for run in runs.values() for upstream in run.inputs}
    pending = [run.id for run in runs.values() if is_result(run.scope, read=run.id in read)]
    needed: set[StageRunId] = set()
    while pending:
        run = runs[pending.pop()]
        if run.id not in needed and run.fingerprint not in present:
            needed.add(run.id)
            pending += run.needs
    return needed


def _running(attempt: AttemptRow | None) -> StageState:
    if attempt is None or attempt.outcome is not None:
        return StageState(StageStatus.RUNNING)
    progress = read_object(attempt.folder / PROGRESS_FILE)
    return StageState(StageStatus.RUNNING, attempt_log=_log(attempt), started_s=attempt.started_s, progress=progress)


def _after(run: OutlineRun, attempt: AttemptRow | None, states: Mapping[StageRunId, StageState]) -> StageState:
    """Status of a stage run without an artifact and without a process that works on it."""
    if attempt is not None and attempt.outcome == "failed":
        return failed_attempt(attempt)
    bad = (StageStatus.FAILED, StageStatus.BLOCKED)
    if any(need in states and states[need].status in bad for need in run.needs):
        return StageState(StageStatus.BLOCKED, attempt_log=_log(attempt))
    if attempt is not None and run.scope is not Scope.SERVICE and attempt.outcome != "succeeded":
        return StageState(StageStatus.CANCELLED, attempt_log=_log(attempt))
    return StageState(StageStatus.PENDING, attempt_log=_log(attempt))


def failed_attempt(attempt: AttemptRow) -> StageState:
    """A failed attempt from the index, with details from its directory if it still exists."""
    state = StageState(
        StageStatus.FAILED, None, attempt.failure, attempt.message, attempt.hint, attempt_log=_log(attempt)
    )
    details = None if state.log is None else failure.read(attempt.folder, state.log)
    if details is None or details.message != attempt.message:
        return state
    return state.failed(details)


def _log(attempt: AttemptRow | None) -> Path | None:
    """The attempt's log, if it still exists."""
    if attempt is None or not (attempt.folder / LOG).exists():
        return None
    return attempt.folder / LOG


def running_s(standing: StageState) -> float | None:
    """Seconds since the start of the running attempt."""
    return None if standing.started_s is None else max(0.0, time.time() - standing.started_s)
