"""The record of a run, stage run by stage run: outcome, times, commands, log, provenance.

Read from plan.json, request.json, the attempts in the index, and job.json, manifest.json and log of each artifact or failed
attempt. Missing or unreadable files are left out, so that the report can still be written.
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
    read_object,
    reading,
    shared_parts,
    terminal,
)
from trtllm_pipeline.orchestrate import (
    LOG,
    REQUEST_FILE,
    Artifact,
    AttemptRow,
    Outline,
    OutlineRun,
    RunRow,
    Store,
    manifest,
    plan_file,
)
from trtllm_pipeline.tensorrt import JOB, launch

_NOT_SHOWN: Final = {"system", "inputs", "made_by"}
"""Parts of provenance that a report omits: systems have their own section, and user and host stay private."""
_TAIL_BYTES: Final = 1_500
_FAILED_TAIL_BYTES: Final = 8_000
"""Length of a log's end: enough to show the last step and the cause of a failure."""


class Ending(str, Enum):
    """Outcome of a stage run in one run of the pipeline."""

    MADE = "made"
    """This run built its artifact."""
    UP_TO_DATE = "up_to_date"
    """Its artifact existed before: a cache hit."""
    ELSEWHERE = "elsewhere"
    """Not tried in this run, but its artifact exists: another run built it meanwhile or later."""
    SERVED = "served"
    """A server that ran as needed."""
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    RUNNING = "running"
    NOT_RUN = "not_run"
    """Planned but not started: an input failed, or the run ended before."""
    SKIPPED = "skipped"
    """Not needed."""


@dataclass(frozen=True, slots=True)
class StageAttempt:
    """One attempt, in seconds of Unix time. For a running attempt, `ended_s` is the current time."""

    started_s: float
    ended_s: float
    outcome: str | None

    @property
    def seconds(self) -> float:
        return max(0.0, self.ended_s - self.started_s)


@dataclass(frozen=True, slots=True)
class StageRecord(OutlineRun):
    """One stage run of a run. Unknown values are None or empty."""

    name: str
    """Common part of its cells, e.g. "smollm2-135m/fp16"."""
    ending: Ending
    attempts: tuple[StageAttempt, ...]
    """Attempts of this run, in order."""
    made_s: float | None
    """Wall-clock seconds to build its artifact, in this or an earlier run."""
    planned: str | None
    """The plan's reason to run it."""
    failure: str | None
    message: str | None
    hint: str | None
    commands: tuple[tuple[str, ...], ...]
    """Commands as run, or as planned with placeholders if it was never tried."""
    folder: Path | None
    """Directory with log, job.json and out/ of the artifact, or of the latest attempt."""
    log: str
    """End of its log."""
    server_log: str
    """End of the server's log, for a service."""
    server_command: str
    """The command that starts the service's server in a shell."""
    resources: Mapping[str, int]
    """Allocated cpus, gpus, downloads."""
    exclusive: str
    """Exclusive use, see `domain.Exclusive`."""
    gpus: tuple[str, ...]
    """UUIDs of its GPUs."""
    provenance: Mapping[str, Json]
    """Provenance of its artifact: run, attempt, duration_s, cpu_s, max_rss_bytes."""
    key: Mapping[str, Json]
    """Everything that its artifact depends on: params, files, identity, inputs."""
    files: int
    size_bytes: int | None

    @property
    def seconds(self) -> float:
        return sum(attempt.seconds for attempt in self.attempts)


@dataclass(frozen=True, slots=True)
class Record:
    """One run of the pipeline."""

    id: str
    about: RunRow | None
    """None if the index does not have it."""
    request: Mapping[str, Json]
    stages: tuple[StageRecord, ...]
    """In the order of the plan, which is dependency order."""

    @property
    def started_s(self) -> float | None:
        """Start in Unix time, or the start of its first attempt if the index does not have the run."""
        if self.about is not None:
            return self.about.started_s
        return min((attempt.started_s for stage in self.stages for attempt in stage.attempts), default=None)

    @property
    def seconds(self) -> float | None:
        """None if unknown."""
        return None if self.about is None else self.about.seconds


def read_record(store: Store, folder: Path) -> Record:
    """The record of the run in `folder`. Raises StateError if its plan cannot be read."""
    outline = plan_file.read_plan(folder / plan_file.NAME)
    planned = {run["id"]: run for run in json.loads(reading.read_bytes(folder / plan_file.NAME))["stage_runs"]}
    present = store.present({run.fingerprint: run.stage for run in outline.stage_runs.values()})
    attempts: dict[Fingerprint, list[AttemptRow]] = {}
    working = store.claimed()
    for row in store.index.attempts_of(folder.name):
        attempts.setdefault(row.fingerprint, []).append(row)
    working |= store.claimed()  # attempts that ended or started meanwhile were not interrupted
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
    return Record(folder.name, about, read_object(folder / REQUEST_FILE) or {}, stages)


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
            # Without an end and without a working process, its pipeline was killed at an unknown time.
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
        server_log="" if folder is None or run.scope is not Scope.SERVICE else _tail(folder / launch.LOG_FILE, tail),
        server_command="" if folder is None else _tail(folder / launch.COMMAND_FILE, _TAIL_BYTES),
        # Stage runs inside a service use its resources.
        resources={
            name: 0 if run.scope is Scope.IN_SERVICE else int(resources.get(name) or 0)
            for name in ("cpus", "gpus", "downloads")
        },
        exclusive=str(resources.get("exclusive") or Exclusive.NONE.value),
        gpus=tuple(map(str, job.get("gpus") or ())),
        # The head of the page has the system.
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
    """The directory of the artifact, or of the latest attempt, from the index or relative to a moved workspace."""
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
            text = terminal.clean(file.read().decode("utf-8", "replace"))
    except OSError:
        return ""
    return text if length <= size else "…\n" + text.partition("\n")[2]
