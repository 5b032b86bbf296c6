"""The job file and its executor: stage runs are child processes of a guardian that ends them if the pipeline is killed.

A job holds all data of one attempt: commands, environment without secrets, inputs, limits. `pipeline stage replay
job.json` runs the same commands months later.
"""

from __future__ import annotations

import math
import select
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final, TypeAlias

from trtllm_pipeline.base import (
    Exclusive,
    FailureClass,
    Json,
    Resources,
    Scope,
    StageError,
    StageRunId,
    UsageError,
    hub_tokens,
    process,
    reading,
    user_files,
    writing,
)
from trtllm_pipeline.base import gpus as gpu_devices
from trtllm_pipeline.orchestrate.run.scheduler import NodeCame, NodeGone
from trtllm_pipeline.orchestrate.store.index import LOG
from trtllm_pipeline.tensorrt import SERVICE_FILE, causes, failure, out_of_memory

SCHEMA: Final = 3
_READY_POLL_S: Final = 0.02
_DOWNLOAD: Final = "download"
_TIMEOUT_GRACE_S: Final = 10.0
_FORCED_GRACE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Job:
    """One attempt at a stage run, as written to job.json. `trtllm_pipeline.tensorrt.worker` reads its own part of it."""

    id: StageRunId
    stage: str
    toolchain: str
    fingerprint: str
    scope: Scope
    commands: tuple[tuple[str, ...], ...]
    """Run one after another. The first failure ends the job."""
    environment: Mapping[str, str]
    """Added to the pipeline's own environment. Never contains secrets."""
    program: str | None
    """Our own "module:function", which the last command runs with this file."""
    params_class: str
    """"module:class" of `params`."""
    params: Mapping[str, Json]
    inputs: Mapping[str, str]
    files: Mapping[str, str]
    out: str
    """Directory of the result."""
    attempt: str
    """Attempt directory, which contains `out`."""
    timeout_s: float
    section: str
    """Settings section of the timeout."""
    gpus: tuple[str, ...] = ()
    cpus: tuple[int, ...] = ()
    """CPUs for its processes; () for any."""
    resources: Resources = field(default_factory=Resources)
    node: str = ""
    """Cluster node to run on. Empty for this machine."""
    viewed: Mapping[str, str] = field(default_factory=dict)
    """Input name -> the whole artifact, if `inputs` has a directory with some of its files while the attempt runs."""
    schema: int = field(default=SCHEMA)

    def write(self, path: str | Path) -> None:
        data = {each: getattr(self, each) for each in self.__slots__}
        data |= {"scope": self.scope.value, "resources": asdict(self.resources)}
        writing.write_once(path, writing.object_text(data))


def read_job(path: Path) -> Job:
    """Return the job in a job file. Raises UsageError if it is not a job file."""
    try:
        data = user_files.decode_mapping(reading.read_bytes(path))
        if data["schema"] != SCHEMA:
            raise UsageError(f"{path}: job schema {data['schema']}, this release reads {SCHEMA}")
        data["commands"] = tuple(tuple(command) for command in data["commands"])
        data["scope"] = Scope(data["scope"])
        data |= {name: tuple(data[name]) for name in ("gpus", "cpus")}
        resources = data["resources"]
        data["resources"] = Resources(**{**resources, "exclusive": Exclusive(resources["exclusive"])})
        return Job(**data)
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else f"not a job file: {error}"
        raise UsageError(
            f"{path}: {why}", hint="every attempt's directory and every artifact has a job.json"
        ) from error


@dataclass(frozen=True, slots=True)
class Usage:
    """Resource usage of an attempt."""

    wall_s: float
    cpu_s: float
    max_rss_bytes: int
    """Largest process, as counted by the kernel."""
    peak_bytes: int = 0
    """Peak memory of all its processes together."""
    shared_bytes: int = 0
    """Maximum growth of /dev/shm while it ran."""
    written_bytes: int = 0
    """Bytes written to disks, including removed files."""
    gpu_bytes: int | None = None
    """Peak memory on its fullest GPU, above the memory in use at its start. None without GPUs."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A service is ready; its service.json is written."""

    id: StageRunId


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt and all its processes have ended. `error` is None if all commands succeeded."""

    id: StageRunId
    error: StageError | None
    usage: Usage
    system: Mapping[str, Json] | None = None
    """The machine that ran it, in the form of `machine.probe.maker`. None for this one."""


ExecutorEvent: TypeAlias = Ready | Ended | NodeGone | NodeCame


def failure_of(
    job: Job,
    returncode: int,
    *,
    timed_out: bool,
    before: out_of_memory.Counts | None = None,
    output: causes.LogText | None = None,
) -> StageError:
    """Return why a job's command ended with `returncode` (negative: the signal), from its log and files.

    `before` has the kernel's counts when the command started. `output` is its own output, if others write to the same
    log.
    """
    attempt = Path(job.attempt)
    log = attempt / LOG
    if timed_out:
        return StageError(
            f"{job.stage}: took longer than its limit of {job.timeout_s:g} s",
            failure=FailureClass.TIMEOUT,
            hint=f"raise it with --set settings.{job.section}.timeout_s=SECONDS",
            log=log,
        )
    recorded = failure.read(attempt, log)
    if recorded is not None:
        return recorded
    logs = [causes.LogText(log) if output is None else output]
    how = f"was ended by {signal.Signals(-returncode).name}" if returncode < 0 else f"ended with exit code {returncode}"
    cause = causes.first_cause(logs)
    if (cause and cause.killed) or (returncode == -signal.SIGKILL and not (cause and cause.certain)):
        kind, words, hint = out_of_memory.verdict(before)
        line = cause.line if cause else next(iter(logs[0].last(1)), None)
        quote = "" if line is None else f"; its {'log says' if cause else 'last line'}: {line.message}"
        number = cause.line.number if cause else None
        return StageError(f"{job.stage}: {how}; {words}{quote}", failure=kind, hint=hint, log=log, line=number)
    if cause is not None:
        return StageError(
            f"{job.stage}: {how}; {cause.quote}",
            failure=cause.failure,
            hint=cause.hint,
            log=log,
            line=cause.line.number,
            setting=cause.setting(job.stage, job.params),
            telling=() if cause.certain else tuple(map(str, causes.telling_lines(logs))),
        )
    lines = causes.telling_lines(logs)
    error = causes.first_error(logs)
    quote = f"; its log says: {error.message}" if error else f"; its last line: {lines[-1].message}" if lines else ""
    return StageError(
        f"{job.stage}: {how}{quote}", log=log, line=error.number if error else None, telling=tuple(map(str, lines))
    )


@dataclass(slots=True)
class _Active:
    """A job in progress: its current command, start time and stop state."""

    job: Job
    claims: Sequence[int]
    before: out_of_memory.Counts
    deadline: float
    started: float
    command: int = 0
    ready: bool = False
    timed_out: bool = False
    force_at: float = math.inf
    """Time after which a service that did not stop by itself is forced to."""
    stopping: bool = False
    took: Usage = Usage(0.0, 0.0, 0)
    """Usage up to the last finished command."""


class Executor:
    """Runs jobs on this machine."""

    def __init__(self) -> None:
        self._guardian = process.Guardian()
        self._poll = select.poll()
        self._poll.register(self._guardian, select.POLLIN)
        self._active: dict[StageRunId, _Active] = {}
        self._gpus = gpu_devices.GpuPeaks()

    def adopt(self, attempt: Path) -> bool:  # noqa: ARG002 - a cluster's executor looks at it
        """True if `submit` only has to wait for this attempt of an earlier invocation. Local ones have ended."""
        return False

    def submit(self, job: Job, claims: Sequence[int]) -> None:
        """Start a job. Its processes inherit the file descriptors `claims` and hold them while they live."""
        now = time.monotonic()
        active = _Active(job, claims, out_of_memory.counts(), now + job.timeout_s, now)
        self._active[job.id] = active
        self._gpus.begin(job.id, job.gpus)
        self._spawn(active)

    def _spawn(self, active: _Active) -> None:
        job = active.job
        self._guardian.spawn(
            job.id,
            job.commands[active.command],
            also={**job.environment, **(hub_tokens() if job.stage == _DOWNLOAD else {})},
            cwd=job.attempt,
            log=f"{job.attempt}/{LOG}",
            claim_fds=active.claims,
            measure=True,
        )

    def stop(self, job: StageRunId, grace_s: float) -> None:
        """Interrupt, terminate, kill. A service first gets `grace_s` to stop its server itself. `Ended` follows."""
        active = self._active.get(job)
        if active is None:
            return
        active.stopping = True
        if active.job.scope is Scope.SERVICE and grace_s > 0:
            self._guardian.signal(job, signal.SIGTERM)
            active.force_at = time.monotonic() + grace_s
        else:
            self._guardian.end(job, grace_s)

    def wait(self, timeout_s: float) -> list[ExecutorEvent]:
        """Return new events after at most `timeout_s` seconds."""
        until = time.monotonic() + timeout_s
        while True:
            starting = any(a.job.scope is Scope.SERVICE and not a.ready for a in self._active.values())
            remaining = max(0.0, until - time.monotonic())
            self._poll.poll((min(remaining, _READY_POLL_S) if starting else remaining) * 1e3)
            events: list[ExecutorEvent] = []
            for event in self._guardian.read_events():
                if not isinstance(event, process.Spawned):  # not requested
                    events += self._over(event)
            events += self._newly_ready()
            self._gpus.look()
            self._enforce_limits()
            if events or time.monotonic() >= until:
                return events

    def _over(self, event: process.Exited | process.Refused) -> list[ExecutorEvent]:
        """Handle a command that has ended or could not start: start the next one, or end the job."""
        active = self._active[StageRunId(event.id)]
        job = active.job
        error: StageError | None = None
        if isinstance(event, process.Refused):
            error = StageError(f"{job.stage}: cannot be started: {event.message}")
        else:
            active.took = _added(active.took, event, time.monotonic() - active.started)
            if event.returncode != 0 or active.timed_out:
                error = failure_of(job, event.returncode, timed_out=active.timed_out, before=active.before)
            elif active.command + 1 < len(job.commands):
                if not active.stopping:
                    active.command += 1
                    self._spawn(active)
                    return []
                error = StageError(f"{job.stage}: stopped between two commands")
            if error is not None:
                with suppress(OSError):  # the index has it too
                    failure.write(Path(job.attempt), error)
        del self._active[job.id]
        gpu_bytes = self._gpus.end(job.id)
        return [Ended(job.id, error, active.took if gpu_bytes is None else replace(active.took, gpu_bytes=gpu_bytes))]

    def _newly_ready(self) -> list[ExecutorEvent]:
        events: list[ExecutorEvent] = []
        for active in self._active.values():
            if active.job.scope is Scope.SERVICE and not active.ready:
                active.ready = (Path(active.job.attempt) / SERVICE_FILE).exists()
                if active.ready:
                    events.append(Ready(active.job.id))
        return events

    def _enforce_limits(self) -> None:
        now = time.monotonic()
        for active in self._active.values():
            if now > active.deadline and not active.timed_out:
                active.timed_out = True
                self._guardian.end(active.job.id, _TIMEOUT_GRACE_S)
            if now > active.force_at:
                active.force_at = math.inf
                self._guardian.end(active.job.id, _FORCED_GRACE_S)

    def close(self) -> None:
        """End all running jobs and wait for them."""
        self._guardian.close()
        self._gpus.close()


def _added(took: Usage, event: process.Exited, wall_s: float) -> Usage:
    """Return a job's usage including the command that has just ended, `wall_s` after the first one started."""
    return Usage(
        wall_s,
        took.cpu_s + event.user_s + event.sys_s,
        max(took.max_rss_bytes, event.max_rss_bytes),
        max(took.peak_bytes, event.peak_bytes),
        max(took.shared_bytes, event.shared_bytes),
        took.written_bytes + event.written_bytes,
    )
