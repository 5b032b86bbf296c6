"""Status of every stage run of a plan, as seen from the store: of a run that continues, was killed, or ended."""

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
    """Status of one stage run. What is unknown or does not apply is None."""

    status: StageStatus
    artifact: Artifact | None = None
    failure: str | None = None
    """Failure class, of what failed."""
    message: str | None = None
    hint: str | None = None
    attempt_log: Path | None = None
    """Where there is no artifact."""
    line: int | None = None
    """Of `log`, where it says why."""
    setting: str | None = None
    """What to change, as `--set` takes it."""
    telling: tuple[str, ...] = ()
    """Lines of the logs, where nobody knows the cause."""
    started_s: float | None = None
    """Unix time at which the attempt that runs now started."""
    progress: Mapping[str, Json] | None = None
    """done, total and unit, of what runs now and told any."""

    @property
    def log(self) -> Path | None:
        """The log of the attempt that made the artifact, or of the last one."""
        return self.attempt_log if self.artifact is None else self.artifact.folder / LOG

    def failed(self, error: StageError) -> StageState:
        """The same with why it failed."""
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
        """What to say below why it failed, for people: where, what else the logs say, what to do and to change."""
        place = "" if self.line is None else f":{self.line}"
        lines = [] if self.log is None else [f"log: {path_from_here(self.log)}{place}"]
        lines += ["its cause is not in our table; the lines that say most:"] if self.telling else []
        lines += [f"| {line}" for line in self.telling]
        lines += [] if self.hint is None else [f"try: {self.hint}"]
        return lines if self.setting is None else [*lines, f"set: {self.setting}"]


_THERE: Final = StageState(StageStatus.UP_TO_DATE)


def stage_states(outline: Outline, store: Store, *, artifacts: bool = True) -> dict[StageRunId, StageState]:
    """Status of each stage run now; without `artifacts` it says of these only that they are there, and looks at no files.

    UP_TO_DATE: its artifact is there. RUNNING: some process works on it. FAILED: its last attempt failed, or it is
    known never to work. CANCELLED: its last attempt was interrupted or killed. BLOCKED: something it needs failed.
    SKIPPED: nobody needs it, since all that would read it is there. PENDING: everything else.
    """
    runs = outline.stage_runs.values()
    before = store.claimed()
    wanted = {run.fingerprint: run.stage for run in runs if run.scope is not Scope.SERVICE}
    present = {**store.present(wanted)} if artifacts else dict.fromkeys(store.listed(wanted), None)
    absent = [run.fingerprint for run in runs if run.fingerprint not in present]
    attempts = store.index.attempts(absent)
    infeasible = store.index.infeasible()
    now = store.claimed()
    # What ended or started meanwhile was, or is, being worked on: it has not been interrupted.
    open_ = {fingerprint for fingerprint, attempt in attempts.items() if attempt.outcome is None}
    # Without an attempt it may be claimed for a moment only, by who then finds that it has to wait; or it is being pulled.
    working = (before & now) | ((before | now) & open_)
    needed = _needed(outline, present) if absent else set()
    found: dict[StageRunId, StageState] = {}
    for run in runs:  # after everything it needs
        if run.fingerprint in present:
            artifact = present[run.fingerprint]
            found[run.id] = _THERE if artifact is None else StageState(StageStatus.UP_TO_DATE, artifact)
            continue
        attempt = attempts.get(run.fingerprint)
        if run.fingerprint in working:
            found[run.id] = _running(attempt)
        elif run.id not in needed:
            found[run.id] = StageState(StageStatus.SKIPPED, attempt_log=_log(attempt))
        elif run.fingerprint in infeasible:
            message = infeasible[run.fingerprint]
            hint = "pipeline resume --retry-infeasible tries it again"
            known = StageState(StageStatus.FAILED) if attempt is None else failed_attempt(attempt)
            found[run.id] = replace(known, failure=INFEASIBLE, message=message, hint=hint)
        else:
            found[run.id] = _after(run, attempt, found)
    return found


def _needed(outline: Outline, present: Collection[Fingerprint]) -> set[StageRunId]:
    """What would run now: results that are not there, and what those need and is not there."""
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


def _after(run: OutlineRun, attempt: AttemptRow | None, found: Mapping[StageRunId, StageState]) -> StageState:
    """Where a stage run stands that is neither there nor being worked on."""
    if attempt is not None and attempt.outcome == "failed":
        return failed_attempt(attempt)
    bad = (StageStatus.FAILED, StageStatus.BLOCKED)
    if any(need in found and found[need].status in bad for need in run.needs):
        return StageState(StageStatus.BLOCKED, attempt_log=_log(attempt))
    if attempt is not None and run.scope is not Scope.SERVICE and attempt.outcome != "succeeded":
        return StageState(StageStatus.CANCELLED, attempt_log=_log(attempt))
    return StageState(StageStatus.PENDING, attempt_log=_log(attempt))


def failed_attempt(attempt: AttemptRow) -> StageState:
    """What the index knows of a failed attempt, with what its directory says more as long as it is there."""
    state = StageState(
        StageStatus.FAILED, None, attempt.failure, attempt.message, attempt.hint, attempt_log=_log(attempt)
    )
    told = None if state.log is None else failure.read(attempt.folder, state.log)
    if told is None or told.message != attempt.message:
        return state
    return state.failed(told)


def _log(attempt: AttemptRow | None) -> Path | None:
    """The attempt's log, where it still is."""
    if attempt is None or not (attempt.folder / LOG).exists():
        return None
    return attempt.folder / LOG


def running_s(standing: StageState) -> float | None:
    """Seconds for which the attempt that runs now has been running."""
    return None if standing.started_s is None else max(0.0, time.time() - standing.started_s)
