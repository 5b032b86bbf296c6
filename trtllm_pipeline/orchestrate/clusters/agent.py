"""`python -m trtllm_pipeline.orchestrate.clusters.agent [ATTEMPT]`: the executor of one attempt on a cluster node.

It runs the attempt's job like the local executor: with leases of its node, with limits, and with a guardian that ends all
processes when this one ends. A service's agent also runs the measurements inside the service.

Its orders and answers are two files in the directory `ATTEMPT.cluster`, on a file system shared by all nodes:

    orders.json    {"jobs": [FOLDER, ...], "stop": {ID: GRACE_S}, "beat": N}        by the pipeline
    answers.json   {"host", "system", "ready": [ID, ...], "ended": {ID: {"failed", "usage"}}}     by this program

Without an attempt, it prints a description of the node as JSON. Both files hold the full state, so a late or repeated
read misses nothing. The pipeline increments `beat` while it lives. If `beat` has not changed for `SILENCE_S`, a service
ends, but an artifact is still finished.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

from trtllm_pipeline.base import Json, PipelineError, Scope, StageRunId, gpus, probe, read_object, terminal, write_json
from trtllm_pipeline.orchestrate.run.executor import Ended, Executor, ExecutorEvent, Job, Ready, read_job
from trtllm_pipeline.orchestrate.store.claims import Claim, WaitingPlace, lease_machine
from trtllm_pipeline.orchestrate.store.store import CLUSTER
from trtllm_pipeline.tensorrt import JOB

ORDERS: Final = "orders.json"
ANSWERS: Final = "answers.json"
BEAT_S: Final = 10.0
"""Interval of the pipeline's heartbeat."""
SILENCE_S: Final = 120.0
_OF_A_JOB: Final = ("SLURM_", "PMI_", "PMIX_", "OMPI_")
_POLL_S: Final = 0.2
_STOP_S: Final = 5.0
"""Grace for a service whose pipeline is gone."""


@dataclass(slots=True)
class _NodeAttempt:
    """One attempt on this node."""

    attempt: Path
    job: Job
    answers: dict[str, Any] = field(default_factory=dict)
    executor: Executor = field(default_factory=Executor)
    gpus: tuple[str, ...] = ()
    cpus: tuple[int, ...] = ()
    open: set[StageRunId] = field(default_factory=set)
    taken: int = 0
    """Number of ordered jobs that have been started."""
    stopped: set[str] = field(default_factory=set)
    beat: Json = None
    heard_s: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        self.answers = {"host": os.uname().nodename, "system": probe.maker(), "ready": [], "ended": {}}
        self._answer()
        claims: list[Claim] = []
        try:
            leased = self._lease()
            if leased is None:
                return
            claims, self.gpus = leased
            if self.job.resources.exclusive.pinned:
                self.cpus = probe.cpus_near(self.gpus)
            self._submit(self.job, claims)
            while self.open:
                self._obey(claims)
                self._tell(self.executor.wait(_POLL_S))
        finally:
            self.executor.close()
            for claim in claims:
                claim.release()

    def _lease(self) -> tuple[list[Claim], tuple[str, ...]] | None:
        """Wait for the leases that the job needs. None if it is stopped before."""
        need = self.job.resources
        devices = gpus.look().devices if need.gpus else ()
        named = tuple(device.gpu.uuid for device in devices)[: need.gpus]
        place = WaitingPlace()
        try:
            while (
                leased := lease_machine(
                    named, exclusive=need.exclusive, beside_standing=need.beside_standing, place=place
                )
            ) is None:
                if self.job.id in self._orders().get("stop", {}) or self._alone:
                    return None
                time.sleep(_POLL_S)
            return leased
        finally:
            place.leave()

    def _orders(self) -> Mapping[str, Any]:
        orders = read_object(folder_of(self.attempt) / ORDERS) or {}
        if orders.get("beat") != self.beat:
            self.beat, self.heard_s = orders.get("beat"), time.monotonic()
        return orders

    @property
    def _alone(self) -> bool:
        """True if the pipeline is gone and this service is not needed anymore."""
        return self.job.scope is Scope.SERVICE and time.monotonic() - self.heard_s > SILENCE_S

    def _obey(self, claims: Sequence[Claim]) -> None:
        orders = self._orders()
        for folder in orders.get("jobs", ())[self.taken :]:
            self.taken += 1
            self._submit(read_job(Path(folder) / JOB), claims)
        for run, grace_s in orders.get("stop", {}).items():
            self._stop(run, grace_s)
        if self._alone:
            for run in self.open:
                self._stop(run, _STOP_S)

    def _submit(self, job: Job, claims: Sequence[Claim]) -> None:
        self.open.add(job.id)
        self.executor.submit(replace(job, gpus=self.gpus, cpus=self.cpus), [claim.fd for claim in claims])

    def _stop(self, run: str, grace_s: float) -> None:
        # A second order without grace is a second interrupt by the user.
        if f"{run} {grace_s}" not in self.stopped:
            self.stopped.add(f"{run} {grace_s}")
            self.executor.stop(StageRunId(run), grace_s)

    def _tell(self, events: Sequence[ExecutorEvent]) -> None:
        for event in events:
            if isinstance(event, Ready):
                self.answers["ready"].append(event.id)
            elif isinstance(event, Ended):
                self.open.discard(event.id)
                self.answers["ended"][event.id] = {"failed": event.error is not None, "usage": asdict(event.usage)}
        if events:
            self._answer()

    def _answer(self) -> None:
        write_json(folder_of(self.attempt) / ANSWERS, self.answers)


def folder_of(attempt: Path) -> Path:
    """Directory of an attempt's orders and answers. It is outside the attempt, so it is not part of its result."""
    return attempt.with_name(f"{attempt.name}{CLUSTER}")


def run(attempt: Path) -> None:
    """Run an attempt to its end. Its answers contain the outcome."""
    _NodeAttempt(attempt, read_job(attempt / JOB)).run()


def main(argv: Sequence[str]) -> int:
    """Run the given attempt, or print the machine. Returns the exit code, which does not depend on the stage."""
    prepare()
    if argv:
        return exit_code(lambda: run(Path(argv[0])))
    print(json.dumps(asdict(probe.this_machine())))  # noqa: T201 - the requested output
    return 0


def exit_code(run: Callable[[], None]) -> int:
    """Exit code of an agent that calls `run`: 0, or `os.EX_TEMPFAIL` and a reason on stderr if node or URL fails."""
    try:
        run()
    except (PipelineError, OSError) as error:
        print(message_of(error), file=sys.stderr)  # noqa: T201 - the pipeline reads the last line
        return os.EX_TEMPFAIL
    return 0


def message_of(error: BaseException) -> str:
    if isinstance(error, PipelineError):
        return error.message
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return f"{type(error).__name__}: {error}"


def prepare() -> None:
    """Set up this process as an agent: signals end all its processes, and it does not act as part of a batch job."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)  # it ends all processes started here

    terminal.clean_streams()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, leave)
    for name in [name for name in os.environ if name.startswith(_OF_A_JOB)]:
        del os.environ[name]  # mpirun would use the ranks and slots of the batch job


if __name__ == "__main__":
    terminal.start()
    sys.exit(main(sys.argv[1:]))
