"""The record of a run, stage run by stage run: outcome, times, commands, log, provenance.

Read from what the run left: plan.json, request.json, the attempts in the index, and job.json, manifest.json and log of
each artifact or failed attempt. What is gone or cannot be read is left out; it must not take the report with it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import (
    CellId,
    Exclusive,
    Fingerprint,
    Json,
    Scope,
    StateError,
    clean,
    read_object,
    reading,
    shared_parts,
)
from trtllm_pipeline.orchestrate.plan.plan_file import NAME as PLAN
from trtllm_pipeline.orchestrate.plan.plan_file import Outline, OutlineRun, read_plan
from trtllm_pipeline.orchestrate.store import manifest
from trtllm_pipeline.orchestrate.store.index import Artifact, AttemptRow, RunRow
from trtllm_pipeline.orchestrate.store.store import LOG, Store
from trtllm_pipeline.tensorrt import JOB

REQUEST: Final = "request.json"
_SERVER_LOG: Final = "server.log"
_NOT_SHOWN: Final = {"system", "inputs", "made_by"}
"""Of an artifact's provenance: a report shows systems by themselves, and names no user and no host."""
_TAIL_BYTES: Final = 1_500
_FAILED_TAIL_BYTES: Final = 8_000
"""Of a log's end: enough to see what the last thing was, and for a failure what led to it."""


class Ending(str, Enum):
    """Outcome of a stage run in one run of the pipeline."""

    MADE = "made"
    """Its artifact was made in this run."""
    UP_TO_DATE = "up_to_date"
    """Its artifact was there before: a cache hit."""
    ELSEWHERE = "elsewhere"
    """Not tried in this run, yet its artifact is there: another run made it meanwhile or later."""
    SERVED = "served"
    """A server that did its service."""
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    RUNNING = "running"
    NOT_RUN = "not_run"
    """Wanted and not begun: something it needs failed, or the run ended before."""
    SKIPPED = "skipped"
    """Not needed."""


@dataclass(frozen=True, slots=True)
class StageAttempt:
    """One try, in seconds of Unix time. Of one that continues, `ended_s` is the time of looking."""

    started_s: float
    ended_s: float
    outcome: str | None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return max(0.0, self.ended_s - self.started_s)


@dataclass(slots=True)
class StageRecord(OutlineRun):
    """One stage run of a run. Unknown values are None or empty."""

    name: str
    """What the cells it is for have in common, e.g. "smollm2-135m/fp16"."""
    ending: Ending
    attempts: tuple[StageAttempt, ...]
    """Those of this run, in order."""
    made_s: float | None
    """Wall-clock seconds its artifact took when it was made, in whichever run that was."""
    planned: str | None
    """Why the plan wanted it to run."""
    failure: str | None
    message: str | None
    hint: str | None
    commands: tuple[tuple[str, ...], ...]
    """As run; as planned, with placeholders, where it was never tried."""
    folder: Path | None
    """With log, job.json and out/: of the artifact, or of the latest attempt."""
    log: str
    """The end of its log."""
    server_log: str
    """The end of the server's own log, for a service."""
    resources: Mapping[str, int]
    """cpus, gpus, downloads: what the schedule gave it."""
    exclusive: str
    """What might run beside it, see `domain.Exclusive`."""
    gpus: tuple[str, ...]
    """UUIDs of the GPUs it had."""
    provenance: Mapping[str, Json]
    """Of its artifact: run, attempt, duration_s, cpu_s, max_rss_bytes."""
    key: Mapping[str, Json]
    """Everything its artifact depends on: params, files, identity, inputs."""
    files: int
    size_bytes: int | None

    @property
    def seconds(self) -> float:
        """Time spent on it in this run, all attempts together."""
        return sum(attempt.seconds for attempt in self.attempts)


@dataclass(frozen=True, slots=True)
class Record:
    """One run of the pipeline."""

    id: str
    about: RunRow | None
    """None when the index has lost it."""
    request: Mapping[str, Json]
    stages: tuple[StageRecord, ...]
    """In the order of the plan: after everything they need."""

    @property
    def started_s(self) -> float | None:
        """Unix time at which it started; that of its first attempt where the index has lost it."""
        if self.about is not None:
            return self.about.started_s
        return min((attempt.started_s for stage in self.stages for attempt in stage.attempts), default=None)

    @property
    def seconds(self) -> float | None:
        """How long it took, or None while that is not known."""
        return None if self.about is None else self.about.seconds


def read_record(store: Store, folder: Path) -> Record:
    """The record of the run in `directory`. Raises StateError when its plan cannot be read."""
    outline = read_plan(folder / PLAN)
    planned = {run["id"]: run for run in json.loads(reading.read_bytes(folder / PLAN))["stage_runs"]}
    present = store.present({run.fingerprint: run.stage for run in outline.stage_runs.values()})
    attempts: dict[Fingerprint, list[AttemptRow]] = {}
    working = store.claimed()
    for row in store.index.attempts_of(folder.name):
        attempts.setdefault(row.fingerprint, []).append(row)
    working |= store.claimed()  # what ended or started meanwhile has not been interrupted
    stages = tuple(
        _stage(
            run,
            planned[run.id],
            present.get(run.fingerprint),
            attempts.get(run.fingerprint, ()),
            outline,
            store,
            working=run.fingerprint in working,
        )
        for run in outline.stage_runs.values()
    )
    about = next((run for run in store.index.runs() if run.id == folder.name), None)
    return Record(folder.name, about, read_object(folder / REQUEST) or {}, stages)


def _stage(
    run: OutlineRun,
    planned: Mapping[str, Any],
    artifact: Artifact | None,
    attempts: Sequence[AttemptRow],
    outline: Outline,
    store: Store,
    *,
    working: bool,
) -> StageRecord:
    ending = _ending(run, planned.get("action"), artifact, attempts, working=working)
    folder = _folder(artifact, attempts, store)
    job = {} if folder is None else read_object(folder / JOB) or {}
    made = _manifest(artifact)
    failed = attempts[-1] if attempts and ending is Ending.FAILED else None
    tail = _FAILED_TAIL_BYTES if failed else _TAIL_BYTES
    resources = planned.get("resources") or {}
    return StageRecord(
        **{name: getattr(run, name) for name in OutlineRun.__dataclass_fields__},
        name=_name(run.cells, outline),
        ending=ending,
        attempts=tuple(
            StageAttempt(row.started_s, time.time() if row.ended_s is None else row.ended_s, row.outcome)
            for row in attempts
            # Without an end and without anybody at work, its pipeline was killed: when is not known.
            if row.ended_s is not None or ending is Ending.RUNNING
        ),
        made_s=None if artifact is None else artifact.duration_s,
        planned=planned.get("reason"),
        failure=failed.failure if failed else None,
        message=failed.message if failed else None,
        hint=failed.hint if failed else None,
        commands=tuple(tuple(map(str, command)) for command in job.get("commands") or planned.get("argv") or ()),
        folder=folder,
        log="" if folder is None else _tail(folder / LOG, tail),
        server_log="" if folder is None or run.scope is not Scope.SERVICE else _tail(folder / _SERVER_LOG, tail),
        # What runs in a service has its share of what that holds.
        resources={
            name: 0 if run.scope is Scope.IN_SERVICE else int(resources.get(name) or 0)
            for name in ("cpus", "gpus", "downloads")
        },
        exclusive=str(resources.get("exclusive") or Exclusive.NONE.value),
        gpus=tuple(map(str, job.get("gpus") or ())),
        # The page's head says what system it was.
        provenance={} if made is None else {k: each for k, each in made.provenance.items() if k not in _NOT_SHOWN},
        key={} if made is None else json.loads(made.key),
        files=0 if made is None else len(made.files),
        size_bytes=None if made is None else made.size_bytes,
    )


_NOT_TRIED: Final = {"up_to_date": Ending.UP_TO_DATE, "skip": Ending.SKIPPED}
_TRIED: Final = {"succeeded": Ending.MADE, "failed": Ending.FAILED}


def _ending(
    run: OutlineRun, action: object, artifact: Artifact | None, attempts: Sequence[AttemptRow], *, working: bool
) -> Ending:
    if not attempts:
        return _NOT_TRIED.get(str(action), Ending.NOT_RUN if artifact is None else Ending.ELSEWHERE)
    outcome = attempts[-1].outcome
    if outcome is None and working:
        return Ending.RUNNING
    if outcome == "stopped" and run.scope is Scope.SERVICE:
        return Ending.SERVED
    return _TRIED.get(str(outcome), Ending.INTERRUPTED)


def _folder(artifact: Artifact | None, attempts: Sequence[AttemptRow], store: Store) -> Path | None:
    """The artifact's directory, else the latest attempt's, where the index says or, in a workspace that was moved, here."""
    if artifact is not None:
        return artifact.folder
    if not attempts:
        return None
    known = attempts[-1].folder
    return next((folder for folder in (known, store.work_dir / known.name) if folder.is_dir()), None)


def _name(cells: Sequence[CellId], outline: Outline) -> str:
    if len(cells) == 1:
        return str(cells[0])
    shared = shared_parts(cells)
    return "/".join(shared) if shared else f"{len(cells)} of {len(outline.cells)} cells"


def _manifest(artifact: Artifact | None) -> manifest.Manifest | None:
    try:
        return None if artifact is None else manifest.read(artifact.folder)
    except StateError:
        return None


def _tail(path: Path, size: int) -> str:
    """The last `size` bytes of a text file from a line's start, or the empty text."""
    try:
        with reading.open_file(path) as file:
            length = file.seek(0, 2)
            file.seek(max(0, length - size))
            text = clean(file.read().decode("utf-8", "replace"))
    except OSError:
        return ""
    return text if length <= size else "…\n" + text.partition("\n")[2]
