"""Status of every stage run of a plan, derived from the store, for a run that continues, was killed, or ended.

The keys behind the fingerprints explain why stage runs must run.
"""

from __future__ import annotations

import json
import re
import textwrap
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import (
    Change,
    Fingerprint,
    Json,
    Scope,
    StageError,
    StageRunId,
    StageStatus,
    StateError,
    changes,
    path_from_here,
    read_object,
)
from trtllm_pipeline.models import files_of
from trtllm_pipeline.orchestrate.plan.plan import Plan, StageRun, is_result
from trtllm_pipeline.orchestrate.plan.plan_file import Outline, OutlineRun
from trtllm_pipeline.orchestrate.store import manifest
from trtllm_pipeline.orchestrate.store.index import LOG, Artifact, AttemptRow
from trtllm_pipeline.orchestrate.store.store import Store
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


def stage_states(outline: Outline, store: Store, *, artifacts: bool = True) -> dict[StageRunId, StageState]:
    """Current status of each stage run. Without `artifacts`, files of artifacts are not read.

    UP_TO_DATE: its artifact exists. RUNNING: a process works on it. FAILED: its last attempt failed, or it is
    infeasible. CANCELLED: its last attempt was interrupted or killed. BLOCKED: a stage run that it needs failed.
    SKIPPED: not needed, since all of its readers are up to date. PENDING: everything else.
    """
    runs = outline.stage_runs.values()
    before = store.claimed()
    wanted = {run.fingerprint: run.stage for run in runs if run.scope is not Scope.SERVICE}
    present: Mapping[Fingerprint, Artifact | None] = (
        store.present(wanted) if artifacts else dict.fromkeys(store.listed(wanted))
    )
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
            states[run.id] = StageState(StageStatus.UP_TO_DATE, present[run.fingerprint])
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
    return attempt.log if attempt is not None and attempt.log.exists() else None


def running_s(standing: StageState) -> float | None:
    """Seconds since the start of the running attempt."""
    return None if standing.started_s is None else max(0.0, time.time() - standing.started_s)


NEVER = "not made yet"
RERUN: Final = "measured again (--rerun)"
_INPUTS: Final = "inputs."
_CONTENT: Final = "params.content."
"""Prefix of a model file's path in the key of its download."""
_DIGEST: Final = re.compile(r'"([0-9a-f]{12})[0-9a-f]{28,}"')


def reasons(plan: Plan, to_run: Collection[StageRunId], store: Store | None) -> dict[StageRunId, str]:
    """A short reason for each of `to_run`: not built yet, files gone, failed before, or the change since the cell's last result."""
    latest = store.index.latest(cell.id for cell in plan.cells) if store is not None and to_run else {}
    tried = store.index.attempts(plan.stage_runs[run].fingerprint for run in to_run) if store is not None else {}
    texts: dict[StageRunId, str] = {}
    changed: dict[StageRunId, tuple[Change, ...]] = {}
    latest_of: dict[StageRunId, Fingerprint] = {}
    for run_id in to_run:
        run = plan.stage_runs[run_id]
        of_cells = (latest.get((cell, run.stage.name)) for cell in run.cells) if latest else ()
        before = next(filter(None, of_cells), None)
        if run.stage.scope is Scope.SERVICE:
            changed[run_id] = () if before is None else changes(before[1], run.key)
            texts[run_id] = "needed by stages that use the server"
            continue
        attempt = tried.get(run.fingerprint)
        if attempt is not None and attempt.outcome == "failed":
            texts[run_id] = f"failed before: {textwrap.shorten(attempt.message or '', 120)}"
        elif attempt is not None and attempt.outcome in {None, "stopped", "interrupted"}:
            now = attempt.outcome is None and store is not None and store.is_claimed(run.fingerprint)
            texts[run_id] = "another process works on it now" if now else "was interrupted"
        elif before is None:
            texts[run_id] = NEVER
        elif before[0] == run.fingerprint:
            texts[run_id] = "its files are gone"
        else:
            changed[run_id], latest_of[run_id] = changes(before[1], run.key), before[0]
    if store is not None:
        of_inputs = {run_id: _old_inputs(of_run, latest_of.get(run_id), store) for run_id, of_run in changed.items()}
        before_keys = store.index.keys({each for found_inputs in of_inputs.values() for each in found_inputs.values()})
        for run_id, of_run in changed.items():
            if of_run:
                before_of = {name: before_keys[old] for name, old in of_inputs[run_id].items() if old in before_keys}
                texts[run_id] = in_words(plan, plan.stage_runs[run_id], of_run, before_of)
    return texts


def in_words(plan: Plan, run: StageRun, changed: Collection[Change], before: Mapping[str, str]) -> str:
    """Changes of a key as one line. A changed input is reported by its stage, whose own reason has the details.

    `before` has the keys of earlier inputs by name, so that changed model files are named wherever the model is read.
    """
    own = [change for change in changed if not _is_input(change)]
    if own:
        return f"changed: {_some([_change_text(change) for change in own], '; ')}"
    stages: dict[str, str] = {}
    for name in dict.fromkeys(map(_input_of, changed)):
        if name not in run.inputs:  # a removed input has no stage
            stages[name] = ""
            continue
        upstream = plan.stage_runs[run.inputs[name]]
        parts = changes(before[name], upstream.key) if name in before else ()
        read = run.stage.parts(run.first_cell).get(name) if run.stage.parts and name in run.reads else None
        files = [part.path.removeprefix(_CONTENT) for part in parts if part.path.startswith(_CONTENT)]
        files = [file for file in files if read is None or files_of((file,), read)]
        stages[upstream.stage.name] = f" ({_some(files, ', ')})" if files else ""
        old = [each.old for each in changed if _is_input(each) and _input_of(each) == name]
        if not any(old):
            stages[upstream.stage.name] = " (not read before)"
        elif read is not None and not files and any(each.path == f"{_INPUTS}{name}" for each in changed):
            stages[upstream.stage.name] = " (its key had all files, now those that it reads)"
    return f"{' and '.join(f'{name}{files}' for name, files in sorted(stages.items()))} changed"


def _is_input(change: Change) -> bool:
    return change.path.startswith(_INPUTS)


def _input_of(change: Change) -> str:
    return change.path.split(".")[1]


def _old_inputs(changed: Collection[Change], before: Fingerprint | None, store: Store) -> dict[str, Fingerprint]:
    """Earlier fingerprints of changed inputs by name, as far as known."""
    inputs = [change for change in changed if _is_input(change) and change.old is not None]
    old = {_input_of(each): Fingerprint(json.loads(each.old or "")) for each in inputs if each.path.count(".") == 1}
    if before is not None and len(old) < len(inputs):
        with suppress(StateError):  # only its manifest has its inputs
            (artifact,) = store.index.artifacts((before,)).values()
            old = {**manifest.inputs(manifest.read(artifact.folder)), **old}
    return old


def _change_text(change: Change) -> str:
    old, new = (_DIGEST.sub(r"\1", value or "absent") for value in (change.old, change.new))
    return f"{change.path.removeprefix(_CONTENT)} {old} -> {new}"


def _some(parts: list[str], between: str) -> str:
    return between.join(parts[:3]) + (f"{between}and {len(parts) - 3} more" if len(parts) > 3 else "")
