"""The executor of a cluster: an attempt's job becomes one task of Ray, or one job of Slurm, that runs `agent.py` on a node.

A service and what is measured inside it are one task: the agent that runs the service is told of the others through its
orders. Which node has room is the scheduler's to say; `Cluster` starts, cancels and counts. Downloads run on this machine,
which has the network and the tokens. Workers open no database: they see the attempt's directory and write there, and what
came of it is published here.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

from trtllm_pipeline.base import (
    FailureClass,
    Machine,
    Scope,
    StageError,
    StageRunId,
    UsageError,
    read_object,
    write_json,
)
from trtllm_pipeline.orchestrate.clusters import agent as agents
from trtllm_pipeline.orchestrate.clusters.exchange import Exchange
from trtllm_pipeline.orchestrate.run.executor import Ended, Executor, ExecutorEvent, Job, Ready, Usage, read_job
from trtllm_pipeline.orchestrate.run.scheduler import Capacity, NodeCame, NodeGone
from trtllm_pipeline.orchestrate.store.store import LOG
from trtllm_pipeline.tensorrt import JOB, failure

_POLL_S: Final = 0.2
_CANCEL_S: Final = 15.0
"""For an agent to end what it was told to, beyond the grace, before the cluster ends the agent."""
_CLOSE_S: Final = 60.0
_ANSWER_S: Final = 60.0
"""For the last answer of an agent that has ended to be seen here: network file systems remember what they have read."""


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """What a cluster says of one of its nodes, as long as it can be used."""

    name: str
    cpus: int
    gpus: int
    accelerator: str | None
    """The type of its GPUs, as the cluster calls it."""

    @property
    def capacity(self) -> Capacity:
        """What it has to hand out; downloads are not done there."""
        gpus = tuple(f"{self.name}/{number}" for number in range(self.gpus))
        return Capacity(self.cpus, gpus, 0, self.name, self.type)

    @property
    def type(self) -> str | None:
        """The type of its GPUs in lower case: clusters spell it as they like."""
        return None if self.accelerator is None else self.accelerator.lower()


def chosen(nodes: Iterable[ClusterNode], accelerators: Sequence[str]) -> list[ClusterNode]:
    """The nodes with CPUs and one of these types of accelerators, in their order; without any, of the only type, or all.

    Raises UsageError where there is none.
    """
    nodes = [node for node in nodes if node.cpus]
    types = sorted({node.accelerator for node in nodes if node.accelerator is not None})
    if not accelerators and len(types) > 1:
        raise UsageError(
            f"the cluster has several types of accelerators: {', '.join(types)}",
            hint=f"--set settings.cluster.accelerator=TYPE for one of them, --set 'axes.gpu=[{', '.join(types)}]' to compare",
        )
    wanted: list[str | None] = [each.lower() for each in accelerators or types]
    found = [node for each in wanted or [None] for node in nodes if node.type == each]
    if not found:
        what = f"with {' or '.join(accelerators)}" if accelerators else "with CPUs"
        has = f"it has {', '.join(types)}" if types else "no node names a type"
        raise UsageError(f"the cluster has no node {what}" + (f"; {has}" if accelerators else ""))
    return found


class KnownNodes:
    """The nodes of a cluster that a run uses, and what becomes of them."""

    def __init__(
        self, chosen: Sequence[ClusterNode], look: Callable[[], Iterable[ClusterNode]], every_s: float
    ) -> None:
        """`look` lists the nodes of all types; it may raise UsageError while nothing is known."""
        self._types = {node.type for node in chosen}
        self._there = {node.name: node for node in chosen}
        self._look = look
        self._every_s = every_s
        self._looked_s = time.monotonic()

    def changes(self) -> list[NodeGone | NodeCame]:
        """See `Cluster`: looks if the last look is `every_s` seconds ago."""
        if time.monotonic() - self._looked_s < self._every_s:
            return []
        self._looked_s = time.monotonic()
        try:
            listed = list(self._look())
        except UsageError:
            return []
        now = {node.name: node for node in listed if node.cpus and node.type in self._types}
        gone = [NodeGone(name) for name in self._there if name not in now]
        came = [NodeCame(node.capacity) for name, node in now.items() if name not in self._there]
        self._there = now
        return [*gone, *came]


def in_common(machine: Machine, nodes: Sequence[ClusterNode]) -> Machine:
    """What `nodes` have in common: the software of `machine`, one of them, and of CPUs and GPUs as many as each has."""
    gpus = min(node.gpus for node in nodes) if machine.gpus else 0
    return replace(
        machine,
        cpus=min(node.cpus for node in nodes),
        gpus=tuple(replace(machine.gpus[0], index=number, uuid=str(number)) for number in range(gpus)),
    )


def machine_of(
    nodes: Sequence[ClusterNode], accelerators: Sequence[str], look: Callable[[ClusterNode], Machine]
) -> Machine:
    """What plans are made for, as `look` finds it on one node of each type; see `in_common`."""
    machines: dict[str | None, Machine] = {}
    for node in nodes:
        if node.type not in machines:
            machines[node.type] = in_common(look(node), [each for each in nodes if each.type == node.type])
    first = next(iter(machines.values()))
    types = tuple((name, each) for name, each in machines.items() if name is not None and accelerators)
    return replace(first, types=types)


class Cluster(Protocol):
    """Where agents run. A ticket names what was started."""

    @property
    def machine(self) -> Machine:
        """What a node is: plans are made for it."""

    @property
    def nodes(self) -> Sequence[Capacity]:
        """What there is to hand out."""

    def start(self, job: Job, command: Sequence[str]) -> str:
        """Run an agent's `command` on a node with `job.resources`, on `job.node` if possible; returns its ticket."""

    def over(self, timeout_s: float) -> Mapping[str, StageError | None]:
        """The tickets that have ended since this was asked last, after at most `timeout_s`; with why the agent could not end."""

    def changes(self) -> Sequence[NodeGone | NodeCame]:
        """The nodes that have gone and come since this was asked last. It is asked often, and looks when it is time to."""

    def left(self, attempt: Path) -> str | None:
        """The ticket of an agent that an earlier invocation started for `attempt`, if it is in a queue or runs; else None."""

    def cancel(self, tickets: Sequence[str]) -> None:
        """End these agents, whether they have begun or not; `over` tells when they are."""

    def close(self) -> None:
        """Let go of the cluster."""


@dataclass(slots=True)
class _Agent:
    """An agent that was started, and the stage runs that it was given."""

    id: StageRunId
    """Of what it was started for."""
    attempt: Path
    service: bool
    ticket: str = ""
    orders: dict[str, Any] = field(default_factory=lambda: {"jobs": [], "stop": {}, "beat": 0})
    open: dict[StageRunId, Job] = field(default_factory=dict)
    ready: bool = False
    started_s: float = field(default_factory=time.monotonic)
    cancel_at: float = math.inf
    over_at: float = math.inf
    """When the cluster said that it has ended."""
    lost: StageError | None = None

    def order(self) -> None:
        """Tell it all that it was told, with what is new."""
        write_json(agents.folder_of(self.attempt) / agents.ORDERS, self.orders)

    def answers(self) -> dict[str, Any]:
        """What it has answered; nothing as long as it has not begun."""
        return read_object(agents.folder_of(self.attempt) / agents.ANSWERS) or {}

    def unanswered(self, job: Job) -> StageError | None:
        """Why a stage run that it was given will have no answer; None where there may still be one."""
        since = time.monotonic() - self.over_at
        stopped = not self.orders["stop"].keys().isdisjoint((self.id, job.id))
        if since < 0.0 or (since < _ANSWER_S and self.lost is None and not stopped):
            return None
        if stopped:
            return StageError(f"{job.stage}: stopped")
        why = self.lost or StageError("its agent ended without an answer", failure=FailureClass.LOST)
        return StageError(f"{job.stage}: {why.message}", failure=why.failure, hint=why.hint, log=_log(job))


class ClusterExecutor(Executor):
    """Runs jobs that name a node on a cluster, and others on this machine."""

    def __init__(self, cluster: Cluster, exchange: Exchange | None = None) -> None:
        """`exchange` is for nodes that do not see the workspace."""
        super().__init__()
        self._cluster = cluster
        self._exchange = exchange
        self._agents: dict[str, _Agent] = {}
        self._given: dict[StageRunId, _Agent] = {}
        self._adopted: dict[Path, str | None] = {}
        """Attempts of earlier invocations, with the tickets of agents that have not ended."""
        self._refused: list[ExecutorEvent] = []
        self._beat_s = time.monotonic()

    def adopt(self, attempt: Path) -> bool:
        """Whether an earlier invocation's agent makes, or made, the artifact of `attempt`; `submit` then starts none.

        A service's agent has nobody who measures it: it is ended.
        """
        try:
            job = read_job(attempt / JOB)
        except UsageError:
            return False
        ticket = self._cluster.left(attempt)
        if job.scope is Scope.ARTIFACT:
            made = _Agent(job.id, attempt, service=False).answers().get("ended", {}).get(job.id, {"failed": True})
            if ticket is not None or not made["failed"]:
                self._adopted[attempt] = ticket
                return True
        elif ticket is not None:
            self._cluster.cancel([ticket])
        return False

    def submit(self, job: Job, claims: Sequence[int]) -> None:
        """Start a job, on a node or here. `claims` are inherited here only; on a node, the agent takes leases."""
        if not job.node:
            super().submit(job, claims)
            return
        if job.scope is Scope.IN_SERVICE:
            service = Path(job.inputs["service"]).parent
            agent = next(each for each in self._given.values() if each.attempt == service)
            self._post(job, agent)
            agent.orders["jobs"].append(job.attempt)
            agent.order()
        else:
            agent = _Agent(job.id, Path(job.attempt), job.scope is Scope.SERVICE)
            if agent.attempt in self._adopted:
                ticket = self._adopted.pop(agent.attempt)
                agent.ticket = ticket or job.attempt
                agent.over_at = math.inf if ticket else time.monotonic()
            else:
                folder = agents.folder_of(agent.attempt)
                shutil.rmtree(folder, ignore_errors=True)  # of as many attempts ago, before the index was lost
                folder.mkdir()
                agent.order()
                try:
                    agent.ticket = self._cluster.start(job, self._post(job, agent))
                except UsageError as error:
                    why = StageError(f"{job.stage}: {error.message}", failure=FailureClass.TRANSIENT, hint=error.hint)
                    self._refused.append(Ended(job.id, why, Usage(0.0, 0.0, 0)))
                    return
            self._agents[agent.ticket] = agent
        agent.open[job.id] = job
        self._given[job.id] = agent

    def _post(self, job: Job, agent: _Agent) -> Sequence[str]:
        """Let the agent have a job; returns the command that runs the agent."""
        if self._exchange is None:
            return (sys.executable, "-m", agents.__name__, str(agent.attempt))
        self._exchange.post(job, agent.attempt)
        return self._exchange.command(agent.attempt)

    def stop(self, job: StageRunId, grace_s: float) -> None:
        """As on this machine; an agent that has not begun is cancelled."""
        agent = self._given.get(job)
        if agent is None:
            super().stop(job, grace_s)
            return
        agent.orders["stop"][job] = grace_s
        agent.order()
        if agent.open[job].scope is not Scope.IN_SERVICE:
            patience = grace_s + _CANCEL_S if grace_s > 0 and agent.answers() else 0.0
            agent.cancel_at = min(agent.cancel_at, time.monotonic() + patience)

    def wait(self, timeout_s: float) -> list[ExecutorEvent]:
        """What happened, after at most `timeout_s` seconds."""
        until = time.monotonic() + timeout_s
        while True:
            events = [*self._refused, *super().wait(0.0)]
            self._refused.clear()
            events += self._cluster.changes()
            self._keep()
            remaining = max(0.0, until - time.monotonic())
            for ticket, error in self._cluster.over(0.0 if events else min(_POLL_S, remaining)).items():
                if ticket in self._agents:
                    self._agents[ticket].over_at, self._agents[ticket].lost = time.monotonic(), error
            for agent in list(self._agents.values()):
                if agent.service or self._exchange is not None or agent.over_at < math.inf:
                    events += self._look(agent)
            if events or time.monotonic() >= until:
                return events

    def _look(self, agent: _Agent) -> Iterator[ExecutorEvent]:
        """What an agent has answered, and what became of the stage runs of one that has ended."""
        # Asked before the answers are read: what arrives in between is seen the next time.
        copying = self._exchange is not None and self._exchange.is_copying(agent.attempt, agent.over_at)
        answers = agent.answers()
        for job in list(agent.open.values()):
            if not agent.ready and job.id in answers.get("ready", ()):
                agent.ready = True
                yield Ready(job.id)
            ended = answers.get("ended", {}).get(job.id)
            if ended is not None:
                usage, error = Usage(**ended["usage"]), _failure(job) if ended["failed"] else None
            else:
                usage = Usage(time.monotonic() - agent.started_s, 0.0, 0)
                error = None if copying else agent.unanswered(job)
            if ended is not None or error is not None:
                del agent.open[job.id], self._given[job.id]
                yield Ended(job.id, error, usage, answers.get("system"))
        if agent.open:
            return
        if agent.over_at == math.inf:  # it has nothing left to do
            agent.cancel_at = min(agent.cancel_at, time.monotonic() + _CANCEL_S)
            return
        del self._agents[agent.ticket]
        if self._exchange is not None:
            self._exchange.drop(agent.attempt)
        shutil.rmtree(agents.folder_of(agent.attempt), ignore_errors=True)

    def _keep(self) -> None:
        """Say that this lives, and end agents that did not end what they were told to."""
        now = time.monotonic()
        for agent in self._agents.values():
            if now > agent.cancel_at:
                agent.cancel_at = math.inf
                self._cluster.cancel([agent.ticket])
        if now - self._beat_s > agents.BEAT_S:
            self._beat_s = now
            for agent in self._agents.values():
                if agent.service or (
                    self._exchange is not None and not agent.answers()
                ):  # there it waits for its parcel
                    agent.orders["beat"] += 1
                    agent.order()

    def close(self) -> None:
        """End everything that still runs, and wait for it."""
        for agent in self._agents.values():
            agent.orders["stop"] = dict.fromkeys(agent.open, 0.0)
        self._cluster.cancel([agent.ticket for agent in self._agents.values() if agent.over_at == math.inf])
        until = time.monotonic() + _CLOSE_S
        while self._agents and time.monotonic() < until:
            self.wait(_POLL_S)
        if self._exchange is not None:
            self._exchange.close()
        super().close()


def _log(job: Job) -> Path:
    return Path(job.attempt) / LOG


def _failure(job: Job) -> StageError:
    """Why a stage run failed, as it was left on the node."""
    told = failure.read(Path(job.attempt), _log(job))
    return told or StageError(f"{job.stage}: failed, and did not leave why", log=_log(job))
