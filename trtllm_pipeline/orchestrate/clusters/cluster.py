"""The executor of a cluster: an attempt's job becomes one Ray task, or one Slurm job, that runs `agent.py` on a node.

A service and the measurements inside it are one task: the service's agent gets the other jobs through its orders. The
scheduler chooses the node. `Cluster` starts, cancels and counts. Downloads run on this machine, which has the network and
the tokens. Workers do not open the database: they write into the attempt's directory, and this machine publishes the
result.
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
from trtllm_pipeline.orchestrate.store.index import LOG
from trtllm_pipeline.tensorrt import JOB, failure

_POLL_S: Final = 0.2
_CANCEL_S: Final = 15.0
"""Extra time after the grace before the cluster ends an agent that has not stopped its job."""
_CLOSE_S: Final = 60.0
_ANSWER_S: Final = 60.0
"""Timeout for the last answer of an agent that has ended: network file systems cache reads."""


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A usable node, as the cluster reports it."""

    name: str
    cpus: int
    gpus: int
    accelerator: str | None
    """GPU type, as the cluster names it."""

    @property
    def capacity(self) -> Capacity:
        """Its capacity. Downloads do not run there."""
        gpus = tuple(f"{self.name}/{number}" for number in range(self.gpus))
        return Capacity(self.cpus, gpus, 0, self.name, self.type)

    @property
    def type(self) -> str | None:
        """GPU type in lower case: clusters differ in spelling."""
        return None if self.accelerator is None else self.accelerator.lower()


def chosen(nodes: Iterable[ClusterNode], accelerators: Sequence[str]) -> list[ClusterNode]:
    """Return the nodes with CPUs and one of these accelerator types, in their order; without types, all nodes of the
    only type.

    Raises UsageError if there are several types and none is given, or no such node.
    """
    nodes = [node for node in nodes if node.cpus]
    types = sorted({node.accelerator for node in nodes if node.accelerator is not None})
    if not accelerators and len(types) > 1:
        raise UsageError(
            f"the cluster has several accelerator types: {', '.join(types)}",
            hint=f"--set settings.cluster.accelerator=TYPE for one of them, --set 'axes.gpu=[{', '.join(types)}]' to compare",
        )
    wanted: list[str | None] = [each.lower() for each in accelerators or types]
    matching = [node for each in wanted or [None] for node in nodes if node.type == each]
    if not matching:
        what = f"with {' or '.join(accelerators)}" if accelerators else "with CPUs"
        has = f"it has {', '.join(types)}" if types else "no node names a type"
        raise UsageError(f"the cluster has no node {what}" + (f"; {has}" if accelerators else ""))
    return matching


class KnownNodes:
    """The nodes of a cluster that a run uses, and their changes."""

    def __init__(
        self, chosen: Sequence[ClusterNode], look: Callable[[], Iterable[ClusterNode]], every_s: float
    ) -> None:
        """`look` lists the nodes of all types. It may raise UsageError if they are unknown now."""
        self._types = {node.type for node in chosen}
        self._there = {node.name: node for node in chosen}
        self._look = look
        self._every_s = every_s
        self._looked_s = time.monotonic()

    def changes(self) -> list[NodeGone | NodeCame]:
        """See `Cluster`: lists the nodes every `every_s` seconds."""
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
    """The common part of `nodes`: the software of `machine`, which is one of them, and the minimum of CPUs and GPUs."""
    gpus = min(node.gpus for node in nodes) if machine.gpus else 0
    return replace(
        machine,
        cpus=min(node.cpus for node in nodes),
        gpus=tuple(replace(machine.gpus[0], index=number, uuid=str(number)) for number in range(gpus)),
    )


def machine_of(
    nodes: Sequence[ClusterNode], accelerators: Sequence[str], look: Callable[[ClusterNode], Machine]
) -> Machine:
    """Return the machine that plans are made for, from `look` on one node of each type. See `in_common`."""
    machines: dict[str | None, Machine] = {}
    for node in nodes:
        if node.type not in machines:
            machines[node.type] = in_common(look(node), [each for each in nodes if each.type == node.type])
    first = next(iter(machines.values()))
    types = tuple((name, each) for name, each in machines.items() if name is not None and accelerators)
    return replace(first, types=types)


class Cluster(Protocol):
    """A cluster that runs agents. A ticket identifies a started agent."""

    @property
    def machine(self) -> Machine:
        """The node that plans are made for."""

    @property
    def nodes(self) -> Sequence[Capacity]:
        """Capacities of the nodes."""

    def start(self, job: Job, command: Sequence[str]) -> str:
        """Run an agent's `command` on a node with `job.resources`, preferably `job.node`. Returns its ticket."""

    def over(self, timeout_s: float) -> Mapping[str, StageError | None]:
        """Return tickets that have ended since the last call, after at most `timeout_s`, with the errors of lost agents."""

    def changes(self) -> Sequence[NodeGone | NodeCame]:
        """Return nodes that have gone and come since the last call. Called often; it checks only at intervals."""

    def left(self, attempt: Path) -> str | None:
        """Return the ticket of an earlier invocation's agent for `attempt`, if it is queued or running; else None."""

    def cancel(self, tickets: Sequence[str]) -> None:
        """End these agents, started or not. `over` reports their end."""

    def close(self) -> None:
        """Disconnect from the cluster."""


@dataclass(slots=True)
class _Agent:
    """A started agent and its stage runs."""

    id: StageRunId
    """The stage run that it was started for."""
    attempt: Path
    service: bool
    ticket: str = ""
    orders: dict[str, Any] = field(default_factory=lambda: {"jobs": [], "stop": {}, "beat": 0})
    open: dict[StageRunId, Job] = field(default_factory=dict)
    ready: bool = False
    started_s: float = field(default_factory=time.monotonic)
    cancel_at: float = math.inf
    over_at: float = math.inf
    """When the cluster reported its end."""
    lost: StageError | None = None

    def order(self) -> None:
        """Write all orders, old and new."""
        write_json(agents.folder_of(self.attempt) / agents.ORDERS, self.orders)

    def answers(self) -> dict[str, Any]:
        """Return its answers. Empty until it has started."""
        return read_object(agents.folder_of(self.attempt) / agents.ANSWERS) or {}

    def unanswered(self, job: Job) -> StageError | None:
        """Return why a stage run will get no answer. None if an answer may still come."""
        since = time.monotonic() - self.over_at
        stopped = not self.orders["stop"].keys().isdisjoint((self.id, job.id))
        if since < 0.0 or (since < _ANSWER_S and self.lost is None and not stopped):
            return None
        if stopped:
            return StageError(f"{job.stage}: stopped")
        why = self.lost or StageError("its agent ended without an answer", failure=FailureClass.LOST)
        return StageError(f"{job.stage}: {why.message}", failure=why.failure, hint=why.hint, log=_log(job))


class ClusterExecutor(Executor):
    """Runs jobs with a node on a cluster, and others on this machine."""

    def __init__(self, cluster: Cluster, exchange: Exchange | None = None) -> None:
        """`exchange` is for nodes that do not share the workspace."""
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
        """Return True if an earlier invocation's agent builds, or built, the artifact of `attempt`. `submit` then
        starts none.

        A service's agent of an earlier invocation is ended.
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
        """Start a job on a node or here. `claims` are only inherited here. On a node, the agent takes leases."""
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
                shutil.rmtree(folder, ignore_errors=True)  # from an attempt of this number, before the index was lost
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
        """Send a job to the agent. Returns the agent's command."""
        if self._exchange is None:
            return (sys.executable, "-m", agents.__name__, str(agent.attempt))
        self._exchange.post(job, agent.attempt)
        return self._exchange.command(agent.attempt)

    def stop(self, job: StageRunId, grace_s: float) -> None:
        """Stop as on this machine. An agent that has not started is cancelled."""
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
        """Yield events from an agent's answers, or from its end."""
        # Checked before the answers are read: later ones are seen the next time.
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
        if agent.over_at == math.inf:  # it has no work left
            agent.cancel_at = min(agent.cancel_at, time.monotonic() + _CANCEL_S)
            return
        del self._agents[agent.ticket]
        if self._exchange is not None:
            self._exchange.drop(agent.attempt)
        shutil.rmtree(agents.folder_of(agent.attempt), ignore_errors=True)

    def _keep(self) -> None:
        """Send heartbeats, and end agents that did not stop their jobs in time."""
        now = time.monotonic()
        for agent in self._agents.values():
            if now > agent.cancel_at:
                agent.cancel_at = math.inf
                self._cluster.cancel([agent.ticket])
        if now - self._beat_s > agents.BEAT_S:
            self._beat_s = now
            for agent in self._agents.values():
                # Without an answer, it is waiting for its parcel.
                if agent.service or (self._exchange is not None and not agent.answers()):
                    agent.orders["beat"] += 1
                    agent.order()

    def close(self) -> None:
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
    """Return why a stage run failed, as recorded on the node."""
    error = failure.read(Path(job.attempt), _log(job))
    return error or StageError(f"{job.stage}: failed without recording a reason", log=_log(job))
