"""`python -m trtllm_pipeline.orchestrate.clusters.agent [ATTEMPT]`: the executor of a node of a cluster, for one attempt.

It runs the attempt's job as this machine's executor would: with the leases of its node, with limits, and with a guardian
that ends every process when this one ends. A service's agent also runs what is measured inside the service.

What it is to do, and what came of it, are two files in the directory `ATTEMPT.cluster`, on the file system that all nodes share:

    orders.json    {"jobs": [FOLDER, ...], "stop": {ID: GRACE_S}, "beat": N}        by the pipeline
    answers.json   {"host", "system", "ready": [ID, ...], "ended": {ID: {"failed", "usage"}}}     by this program

Without an attempt it prints what the node is, as JSON. Both files hold all that was said so far, so whoever reads one late, or again, misses nothing. The pipeline raises `beat` while it
lives. A service ends when it has been the same for `SILENCE_S`; an artifact is finished even so.
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
"""How often the pipeline says that it lives."""
SILENCE_S: Final = 120.0
_OF_A_JOB: Final = ("SLURM_", "PMI_", "PMIX_", "OMPI_")
_POLL_S: Final = 0.2
_STOP_S: Final = 5.0
"""For a service, when there is nobody left to serve."""


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
    """How many of the jobs ordered have begun."""
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
        """The leases that the job needs, as soon as they are free; None when it is stopped before."""
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
        """Whether the pipeline is gone and nobody needs what this does."""
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
        # Twice where the second order leaves no time: the user asked twice.
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
    """Where an attempt's orders and answers are; beside it, so that its result has no part of them."""
    return attempt.with_name(f"{attempt.name}{CLUSTER}")


def run(attempt: Path) -> None:
    """Run an attempt to its end; what came of it is in its answers."""
    _NodeAttempt(attempt, read_job(attempt / JOB)).run()


def main(argv: Sequence[str]) -> int:
    """Run the attempt that is named, or print the machine. Returns the exit code, which says nothing of the stage."""
    prepare()
    if argv:
        return exit_code(lambda: run(Path(argv[0])))
    print(json.dumps(asdict(probe.this_machine())))  # noqa: T201 - that is what was asked
    return 0


def exit_code(run: Callable[[], None]) -> int:
    """That of an agent which does `run`: 0, or `os.EX_TEMPFAIL` where its node or the URL is at fault, with why on stderr."""
    try:
        run()
    except (PipelineError, OSError) as error:
        print(said(error), file=sys.stderr)  # noqa: T201 - the pipeline reads the last line
        return os.EX_TEMPFAIL
    return 0


def said(error: BaseException) -> str:
    """What an error says, of whatever kind it is."""
    if isinstance(error, PipelineError):
        return error.message
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return f"{type(error).__name__}: {error}"


def prepare() -> None:
    """Make this process an agent's: signals end all that it has started, and it is no part of a batch job."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)  # and so end all that was started here

    terminal.clean_streams()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, leave)
    for name in [name for name in os.environ if name.startswith(_OF_A_JOB)]:
        del os.environ[name]  # mpirun would take the ranks and slots of the batch job for its own


if __name__ == "__main__":
    terminal.start()
    sys.exit(main(sys.argv[1:]))
