"""The local executor: stage runs as child processes of a guardian, which outlives us just long enough to end them."""

from __future__ import annotations

import math
import os
import selectors
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trtllm_pipeline.domain import Scope, StageRunId
from trtllm_pipeline.errors import StageError
from trtllm_pipeline.execution.executor import Ended, ExecutorEvent, Job, Ready, Usage, failure_of
from trtllm_pipeline.processes import out_of_memory
from trtllm_pipeline.processes.process import Exited, Guardian, Refused, Spawned
from trtllm_pipeline.stages.base import SERVICE_FILE
from trtllm_pipeline.store.store import LOG

_READY_POLL_S = 0.02
_TIMEOUT_GRACE_S = 10.0
_FORCED_GRACE_S = 2.0


@dataclass(slots=True)
class _Active:
    """A job in progress: which of its commands runs, since when, and whether it was told to end."""

    job: Job
    claims: Sequence[int]
    deadline: float
    started: float
    command: int = 0
    ready: bool = False
    timed_out: bool = False
    force_at: float = math.inf
    """When a service that was asked to stop is made to."""
    stopping: bool = False
    cpu_s: float = 0.0
    max_rss_bytes: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    before: out_of_memory.Counts = field(default_factory=out_of_memory.counts)


class LocalExecutor:
    """Runs jobs on this machine; see `Executor`."""

    def __init__(self) -> None:
        self._guardian = Guardian()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._guardian, selectors.EVENT_READ)
        self._active: dict[StageRunId, _Active] = {}
        self._environment = dict(os.environ)  # reading it decodes every value

    def submit(self, job: Job, claims: Sequence[int]) -> None:
        """Start the job's first command."""
        now = time.monotonic()
        active = _Active(job, claims, now + job.timeout_s, now, environment={**self._environment, **job.environment})
        self._active[job.id] = active
        self._spawn(active)

    def _spawn(self, active: _Active) -> None:
        job = active.job
        self._guardian.spawn(
            job.id,
            job.commands[active.command],
            env=active.environment,
            cwd=Path(job.attempt),
            log=Path(job.attempt) / LOG,
            claim_fds=active.claims,
        )

    def stop(self, job: StageRunId, grace_s: float) -> None:
        """Interrupt, terminate, kill; a service is asked first to stop its server itself, and has `grace_s` for it."""
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
        """What happened, after at most `timeout_s` seconds."""
        until = time.monotonic() + timeout_s
        while True:
            starting = any(a.job.scope is Scope.SERVICE and not a.ready for a in self._active.values())
            remaining = max(0.0, until - time.monotonic())
            self._selector.select(min(remaining, _READY_POLL_S) if starting else remaining)
            events: list[ExecutorEvent] = []
            for event in self._guardian.read_events():
                if not isinstance(event, Spawned):
                    events += self._over(event)
            events += self._newly_ready()
            self._enforce_limits()
            if events or time.monotonic() >= until:
                return events

    def _over(self, event: Exited | Refused) -> list[ExecutorEvent]:
        """A command has ended, or could not begin: start the next, or end the job."""
        active = self._active[StageRunId(event.id)]
        job = active.job
        error: StageError | None = None
        if isinstance(event, Refused):
            error = StageError(f"{job.stage}: cannot be started: {event.message}")
        else:
            active.cpu_s += event.user_s + event.sys_s
            active.max_rss_bytes = max(active.max_rss_bytes, event.max_rss_bytes)
            if event.returncode != 0 or active.timed_out:
                error = failure_of(job, event.returncode, timed_out=active.timed_out, before=active.before)
            elif active.command + 1 < len(job.commands):
                if not active.stopping:
                    active.command += 1
                    self._spawn(active)
                    return []
                error = StageError(f"{job.stage}: stopped between two commands")
        del self._active[job.id]
        usage = Usage(time.monotonic() - active.started, active.cpu_s, active.max_rss_bytes)
        return [Ended(job.id, error, usage)]

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
        """End everything that still runs, and wait for it."""
        self._selector.close()
        self._guardian.close()
