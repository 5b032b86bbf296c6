"""Decides what runs when: events in, instructions out. No clock, disk, thread or process.

    scheduler = Scheduler(tasks, machine)
    todo = scheduler.advance(now)                        the first starts
    todo = scheduler.advance(now, Finished(task_id))     and again for every event, until scheduler.finished

Ready work is ordered by longest remaining path. Tasks with the same demand share a queue, so a decision checks the
heads of a few queues, never all ready tasks. Tasks that fit start, until the best one that does not fit has a remaining
path as long as all the remaining work: each second it waits then delays the end of the run. It gets a reservation, and
later tasks start only if they do not delay it (EASY backfill: D. Lifka, "The ANL/IBM SP scheduling system", 1995). An
overdue task is expected to run as long again as it has run: the later it is, the more starts meanwhile. A reservation
for each task that does not fit would leave GPUs idle if the expected durations are wrong (`benchmarks/makespan.py`). No
task starves: the remaining work shrinks, the path of a waiting task does not.

A task whose result is still being digested gives its place to others, except to measurements (`Vacated`).

There may be several nodes, which come and go. A task runs on one node with the GPU type it requests. The scheduler chooses
the node that keeps the fewest GPUs, then CPUs, free, so that whole nodes stay free for tasks that need one. A reservation
holds a place on one node. A task that no remaining node can run waits `NODE_PATIENCE_S` for another node, then fails.

A task that must be alone takes every slot of its node (`Exclusive.alone`). Tasks of `Exclusive.GPU` run alongside each
other and alongside nothing else. There are slots for work and slots for measurements. While any of one kind is taken,
the other kind has no free slot. Tasks of the same kind join as long as they fit, so a node seldom changes from
one kind to the other. Among services of `Exclusive.GPU`, loading and measuring exclude each other on a node: a measurement
starts when no other service is loading there, and no service starts there during a measurement.

A service and the tasks inside it are one unit of work. The service starts when all artifacts that they need are present.
Its tasks run one after another, then it is stopped. Only the service occupies resources.

When the measurements inside an exclusive service are done, the next such service starts alongside it, while the first does
the rest and stops. The next service must be the one that would start next anyway, and must fit in free GPUs and memory.
So at most two exist, and never during a measurement: a measurement in one waits until the other, whether loading, idle or
stopping, has ended.

Failed tasks are retried at most `Task.retries` times:

    LOST                   as TRANSIENT, but at least `LOST_RETRIES` times: the node was lost, and others remain
    TRANSIENT              after a growing, jittered wait
    OUT_OF_MEMORY          once and alone on the machine, if it failed while another task ran. Otherwise the same
                           inputs would fail again in the same memory
    TIMEOUT                never: a limit of an hour would cost two (a slow transfer is TRANSIENT to its stage)
    INFEASIBLE, USER, BUG  never
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, TypeAlias

from trtllm_pipeline.base import Exclusive, FailureClass, Resources, Scope, StageError, StageRunId, StageStatus

BACKOFF_S: Final = 2.0
"""Mean wait before the first retry. Doubles with each further one."""
BACKOFF_LIMIT_S: Final = 120.0
LOST_RETRIES: Final = 3
NODE_PATIENCE_S: Final = 600.0
"""Wait for a suitable node after the last one has gone."""
_LATE: Final = 1.25
"""A task is overdue after this multiple of its expected time. A smaller one would cost the waiting task its place."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Resources of one node: CPU slots, GPUs by name (UUID), downloads at a time."""

    cpus: int
    gpus: tuple[str, ...] = ()
    downloads: int = 4
    node: str = ""
    """Node name. Empty for this machine."""
    accelerator: str | None = None
    """GPU type in lower case, if nodes differ in it."""
    memory: tuple[int, ...] | None = None
    """Bytes of each kind of memory shared by the node. None: no service starts alongside an exclusive one."""

    def suits(self, accelerator: str | None) -> bool:
        """Return True if a task that requests this GPU type (None: any) can run here."""
        return accelerator is None or accelerator == self.accelerator


@dataclass(frozen=True, slots=True)
class Task:
    """The scheduling data of one stage run.

    `service` names the service that an IN_SERVICE task runs in. Such a task measures if its own resources are
    exclusive. `expected_s` of a service is the time until it is ready. Equal priorities are ordered by `order`, then by
    list position.
    """

    id: StageRunId
    needs: tuple[StageRunId, ...] = ()
    scope: Scope = Scope.ARTIFACT
    service: StageRunId | None = None
    resources: Resources = field(default_factory=Resources)
    expected_s: float = 1.0
    retries: int = 0
    order: int = 0
    memory: tuple[int, ...] | None = None
    """Maximum bytes that a service uses of each kind in `Capacity.memory`. None if unknown."""


@dataclass(frozen=True, slots=True)
class _OfTask:
    id: StageRunId


@dataclass(frozen=True, slots=True)
class _End(_OfTask):
    failure: StageError | None = None


class Finished(_End):
    """An ARTIFACT or IN_SERVICE task ended; also the response to `Cancel`."""


class Vacated(_OfTask):
    """The processes of an ARTIFACT task have ended and their output is being digested. `Finished` follows.

    Other tasks may use its CPUs and GPUs, but no measurement starts meanwhile.
    """


class ServiceReady(_OfTask):
    """A service is ready."""


class ServiceEnded(_End):
    """A service has ended, requested or not. Its resources are free. Report it before the failures that it caused."""


class Busy(_OfTask):
    """Another invocation holds the task's claim, or the machine that it needs."""


@dataclass(frozen=True, slots=True)
class Freed(_OfTask):
    """The other invocation released it. `done`: the artifact is now present; also valid for a task not started here.

    A service has no artifact: first report the tasks inside it that are done.
    """

    done: bool


@dataclass(frozen=True, slots=True)
class NodeGone:
    """A node has gone: no task starts there. The ends of tasks that ran there must still be reported."""

    node: str


@dataclass(frozen=True, slots=True)
class NodeCame:
    """A node has come: a new one, or a returning one with the same capacity."""

    node: Capacity


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Start no more tasks and cancel running ones."""


Event: TypeAlias = Finished | Vacated | ServiceReady | ServiceEnded | Busy | Freed | NodeGone | NodeCame | Interrupt


@dataclass(frozen=True, slots=True)
class Start(_OfTask):
    """Start this task on these GPUs of this node. `attempt` counts from 1."""

    gpus: tuple[str, ...]
    attempt: int
    node: str = ""


class Stop(_OfTask):
    """Stop this service, and report `ServiceEnded`."""


class Cancel(_OfTask):
    """End this task, and report `Finished`."""


@dataclass(frozen=True, slots=True)
class RetryAt(_OfTask):
    """This task failed and will be retried. Call `advance` at `when`."""

    when: float
    attempt: int
    failure: StageError


Instruction: TypeAlias = Start | Stop | Cancel | RetryAt

_S = StageStatus
TRANSITIONS: Final[dict[StageStatus, frozenset[StageStatus]]] = {
    _S.PENDING: frozenset({_S.RUNNING, _S.UP_TO_DATE, _S.SKIPPED, _S.FAILED, _S.BLOCKED, _S.CANCELLED}),
    _S.RUNNING: frozenset({_S.SUCCEEDED, _S.UP_TO_DATE, _S.FAILED, _S.CANCELLED, _S.PENDING, _S.ELSEWHERE}),
    _S.ELSEWHERE: frozenset({_S.PENDING, _S.UP_TO_DATE, _S.SKIPPED, _S.CANCELLED}),
    _S.SUCCEEDED: frozenset(),
    _S.UP_TO_DATE: frozenset(),
    _S.SKIPPED: frozenset(),
    _S.FAILED: frozenset(),
    _S.BLOCKED: frozenset(),
    _S.CANCELLED: frozenset(),
}
"""All status changes. PENDING -> FAILED: needs more than the machine has. RUNNING -> PENDING: a retry. To UP_TO_DATE from
RUNNING or ELSEWHERE: another invocation published it first."""
ENDED: Final = frozenset(status for status, following in TRANSITIONS.items() if not following)
_AVAILABLE: Final = frozenset({_S.SUCCEEDED, _S.UP_TO_DATE})
_NO_SHARE: Final = (0.0, 0.0, 0.0)

# Slots for work, CPUs, GPUs, downloads, slots for measurements. A task takes one slot, an exclusive task all slots of a node.
_Amounts: TypeAlias = tuple[int, int, int, int, int]
_Demand: TypeAlias = tuple[_Amounts, "str | None"]
"""The amounts that must be free on a node, and its required GPU type."""
_WORK: Final = 0
_MEASURING: Final = 4
_NOTHING: Final[_Amounts] = (0, 0, 0, 0, 0)


class _Phase(Enum):
    OFF = 0
    STARTING = 1
    READY = 2
    STOPPING = 3
    DEAD = 4  # ended unrequested, with tasks inside it still being cancelled


@dataclass(slots=True, eq=False)
class _TaskNode:
    """A task and its state."""

    index: int
    task: Task
    duration: float  # for a service, including all tasks that will run inside it
    alone: bool
    apart: bool = False  # it ran out of memory alongside another task, so it now runs alone
    status: StageStatus = _S.PENDING
    waiting: int = 0  # missing needs; for a service, including those of the tasks inside it
    dependents: list[_TaskNode] = field(default_factory=list)
    service: _Service | None = None
    priority: float = 0.0  # the longest path from here
    rank: float = 0.0  # the priority with its `favour` factor
    failures: int = 0
    failure: StageError | None = None
    cause: _TaskNode | None = None  # the failed task that blocks this one, or itself if it failed
    amounts: _Amounts = _NOTHING  # held while running
    node: int = 0
    gpus: tuple[int, ...] = ()  # of that node
    end: float = 0.0  # expected end


@dataclass(slots=True, eq=False)
class _Service(_TaskNode):
    """A service: `left` counts the tasks inside it that have not ended, `ready` those that could run now."""

    phase: _Phase = _Phase.OFF
    members: list[_TaskNode] = field(default_factory=list)
    left: int = 0
    to_measure: int = 0  # tasks of `left` that measure
    measured_s: float = 0.0  # their part of the duration
    ready: list[_Entry] = field(default_factory=list)
    current: _TaskNode | None = None
    ended: StageError | None = None


# Heap entries compare by their first three fields. `index` is unique.
_Entry: TypeAlias = tuple[float, int, int, _TaskNode]


def _entry(node: _TaskNode) -> _Entry:
    return (-node.rank, node.task.order, node.index, node)


def _fits(amounts: _Amounts, free: Sequence[int]) -> bool:
    work, cpus, gpus, downloads, measuring = amounts
    return work <= free[0] and cpus <= free[1] and gpus <= free[2] and downloads <= free[3] and measuring <= free[4]


@dataclass(frozen=True, slots=True)
class _Reservation:
    """A place on a node from `start`, when `after` ends. `held` are the amounts held there from then on, its own included."""

    node: int
    start: float
    held: list[int]
    after: _TaskNode


def _is_measurement(node: _TaskNode) -> bool:
    """Return True if a task inside a service measures."""
    return node.service is not None and all(each.task.resources.exclusive.alone for each in (node, node.service))


def _measures_shared(node: _TaskNode) -> bool:
    """Return True if a task inside a service measures while others may measure too. Services may not load meanwhile."""
    return node.service is not None and node.task.resources.exclusive is Exclusive.GPU


def _most_retries(node: _TaskNode, failure: StageError) -> int:
    return max(node.task.retries, LOST_RETRIES if failure.failure is FailureClass.LOST else 0)


def _share(need: Resources, seconds: float, total: Sequence[int], alone: float) -> tuple[float, ...]:
    """Return the equivalent seconds of using all CPUs, GPUs and downloads; as work, then as measurement.

    `alone` is the minimum share if it must be alone on its node; else 0.
    """
    amounts = zip((need.cpus, need.gpus, need.downloads), total, strict=True)
    taken = tuple(seconds * max(alone, amount / (have or 1)) for amount, have in amounts)
    return (*_NO_SHARE, *taken) if need.exclusive is Exclusive.GPU and not alone else (*taken, *_NO_SHARE)


def _whole_s(shares: Sequence[float]) -> float:
    """Return the seconds for which the work uses all resources. Work and measurements never overlap."""
    return max(shares[:3]) + max(shares[3:])


def backoff_s(task_id: str, failures: int) -> float:
    """Return the seconds to wait after the n-th failure: doubling from `BACKOFF_S` to a limit, times 0.5 to 1.5.

    The factor depends only on the id, so that tasks that failed together are not retried together.
    """
    jitter = 0.5 + zlib.crc32(f"{task_id}:{failures}".encode()) / 2**32
    return min(BACKOFF_S * 2.0 ** min(failures - 1, 32), BACKOFF_LIMIT_S) * jitter


def overdue(so_far_s: float, expected_s: float) -> bool:
    """Return True if a task has run so much longer than expected that its expected end no longer holds."""
    return so_far_s >= _LATE * expected_s


class Scheduler:
    """The state machine over one plan.

    All tasks run, except services without tasks. `keep_going` False starts no task after the first failure. Running tasks
    finish. `observe` is called with (id, old, new) at every status change. `favour` has factors by task id that raise or
    lower a path's rank (`order.py`). Raises ValueError for circular needs.
    """

    def __init__(
        self,
        tasks: Iterable[Task],
        *nodes: Capacity,
        keep_going: bool = True,
        observe: Callable[[StageRunId, StageStatus, StageStatus], None] | None = None,
        favour: Mapping[StageRunId, float] | None = None,
    ) -> None:
        self._keep_going = keep_going
        self._observe = observe
        self._halted = self._interrupted = False
        self._now = 0.0
        self._nodes: dict[StageRunId, _TaskNode] = {}
        for index, task in enumerate(tasks):
            assert task.id not in self._nodes
            node_type = _Service if task.scope is Scope.SERVICE else _TaskNode
            self._nodes[task.id] = node_type(index, task, task.expected_s, task.resources.exclusive.alone)
        self._places: list[Capacity] = []
        self._capacity: list[_Amounts] = []
        """Empty for a node that has gone."""
        self._held: list[list[int]] = []
        self._free: list[list[int]] = []
        self._free_gpus: list[list[int]] = []
        self._measuring: list[int] = []
        """Number of services on each node that are measured now, exclusive ones excluded."""
        for each in nodes:
            self._add(each)
        self._stranded_at = math.inf  # when tasks that no node can run give up
        self._running: dict[_TaskNode, None] = {}  # tasks that hold resources: artifacts and services
        self._queues: dict[_Demand, list[_Entry]] = {}  # ready tasks by demand
        self._room = False  # whether a change may let a waiting task fit
        self._look_at = math.inf  # when a task may fit before a reservation because its holder is overdue
        self._retries: list[tuple[float, int, _TaskNode]] = []
        self._shares: dict[_TaskNode, tuple[float, ...]] = {}
        self._work: list[float] = []  # remaining work: the sums of the shares
        self._ended: list[_TaskNode] = []  # their dependents have not been updated yet
        self._stirred: dict[_Service, None] = {}  # changed services that `_steer` must check
        self._instructions: list[Instruction] = []
        self._counts: Counter[StageStatus] = Counter({_S.PENDING: len(self._nodes)})

        required = self._link()
        self._rank(required)
        for node in required:
            factor = 1.0 if favour is None else favour.get(node.task.id, 1.0)
            # Measurements come first in a service: the next service starts when they are done.
            node.rank = math.inf if _is_measurement(node) else node.priority * factor
        self._count_work(node for node in required if node.service is None)
        for node in required:
            if node.service is None and (reason := self._excess(node.task.resources)):
                self._fail_for_good(node, StageError(reason, failure=FailureClass.INFEASIBLE))
        for node in required:
            if node.waiting == 0 and node.status is _S.PENDING:
                self._enqueue(node)
        self._settle()
        self._steer()

    # Queries.

    @property
    def least_s(self) -> float:
        """A lower bound in seconds: the longest path, or all work and then all measurements without a gap."""
        longest = max((node.priority for node in self._shares), default=0.0)
        return max(longest, _whole_s(self._work)) if self._work else longest

    @property
    def nodes(self) -> list[Capacity]:
        return [place for place, size in zip(self._places, self._capacity, strict=True) if size != _NOTHING]

    @property
    def finished(self) -> bool:
        return not (self._counts[_S.PENDING] or self._counts[_S.RUNNING] or self._counts[_S.ELSEWHERE])

    @property
    def wake_at(self) -> float | None:
        """When `advance` is due next without an event: for a retry, a task that no node can run, or an overdue one."""
        when = min(self._retries[0][0] if self._retries else math.inf, self._stranded_at, self._look_at)
        return None if when == math.inf else when

    def status(self, task_id: StageRunId) -> StageStatus:
        return self._nodes[task_id].status

    def failure(self, task_id: StageRunId) -> StageError | None:
        """Return the last failure of this task, even if it is being retried."""
        return self._nodes[task_id].failure

    def blocked_by(self, task_id: StageRunId) -> StageRunId | None:
        """Return the failed task that blocks this one. None if it is not blocked."""
        node = self._nodes[task_id]
        return node.cause.task.id if node.cause and node.status is _S.BLOCKED else None

    # Entry point.

    def advance(self, now: float, *events: Event) -> list[Instruction]:
        """Return the instructions after these events. `now` is seconds on any monotonic clock."""
        self._now = now
        for event in events:
            self._take(event)
            self._settle()
        while self._retries and self._retries[0][0] <= now:
            node = heappop(self._retries)[2]
            if node.status is _S.PENDING:
                self._enqueue(node)
        if self._stranded_at <= now:
            self._give_up()
        if self._look_at <= now:
            self._look_at, self._room = math.inf, True
        if not (self._open or self._halted):
            self._halt()
        self._steer()
        if self._open:
            # While a task is alone, no slot is free.
            if self._room and any(free[_WORK] or free[_MEASURING] for free in self._free):
                self._dispatch()
            self._preload()
        instructions, self._instructions = self._instructions, []
        return [one for one in instructions if not isinstance(one, Cancel) or self.status(one.id) is _S.RUNNING]

    def _take(self, event: Event) -> None:
        if isinstance(event, Interrupt):
            if not self._interrupted:
                self._interrupt()
            return
        if isinstance(event, NodeGone | NodeCame):
            self._change_nodes(event)
            return
        node = self._nodes[event.id]
        assert isinstance(event, Freed) or node.status is _S.RUNNING
        if isinstance(event, Freed):
            self._freed(node, done=event.done)
        elif isinstance(event, Busy):
            self._leave(node)
            self._move(node, _S.ELSEWHERE if self._open else _S.CANCELLED)
        elif isinstance(event, Finished):
            self._finished(node, event.failure)
        elif isinstance(event, Vacated):
            assert node.task.scope is Scope.ARTIFACT
            # Its slots keep measurements away.
            self._give_back(node, (node.amounts[_WORK], 0, 0, 0, node.amounts[_MEASURING]))
        else:
            assert isinstance(node, _Service)
            if isinstance(event, ServiceEnded):
                self._service_ended(node, event.failure)
            elif node.phase is _Phase.STARTING:  # otherwise it was stopped before it was ready
                node.phase = _Phase.READY
                self._stir_services()
        if node.service and node.service.current is None:
            self._stirred[node.service] = None
            if node.service.phase is _Phase.DEAD:
                self._settle()
                self._close(node.service)

    # Setup: required tasks, dependencies, priorities.

    def _link(self) -> list[_TaskNode]:
        """Link the required tasks to their needs and return them. A service without tasks ends here as skipped."""
        for node in self._nodes.values():
            assert (node.task.scope is Scope.IN_SERVICE) == (node.task.service is not None)
            if node.task.service is not None:
                holder = self._nodes[node.task.service]
                assert isinstance(holder, _Service)
                node.service = holder
        used = {node.service for node in self._nodes.values()}
        required = []
        for node in self._nodes.values():
            if isinstance(node, _Service) and node not in used:
                self._move(node, _S.SKIPPED)
            else:
                required.append(node)
        self._ended.clear()  # they have no dependents
        for node in required:
            service = node.service
            if service:
                service.members.append(node)
                service.left += 1
                service.to_measure += _is_measurement(node)
                service.duration += node.duration
                service.measured_s += node.duration if _is_measurement(node) else 0.0
            # A task inside a service may or may not list that service.
            for upstream in [each for need in node.task.needs if (each := self._nodes[need]) is not service]:
                assert not isinstance(upstream, _Service)
                upstream.dependents.append(node)
                node.waiting += 1
                if service and upstream.service is not service:
                    service.waiting += 1
        return required

    def _rank(self, required: list[_TaskNode]) -> None:
        """Set priorities: expected seconds of the longest path from the start of a task to the end of the run."""
        waiting = {node: node.waiting + (node.service is not None) for node in required}
        order = [node for node, count in waiting.items() if not count]
        for node in order:  # grows during the loop
            # A service comes before its tasks. Their other needs come before the service.
            following: list[_TaskNode] = node.dependents
            if isinstance(node, _Service):
                following = node.members
            else:
                services = [d.service for d in following if d.service and d.service is not node.service]
                following = [*following, *services]
            for later in following:
                waiting[later] -= 1
                if not waiting[later]:
                    order.append(later)
        if len(order) < len(required):
            circle = sorted(node.task.id for node in required if waiting[node])
            raise ValueError(f"circular needs among {', '.join(circle[:5])}{', ...' if circle[5:] else ''}")

        def after(node: _TaskNode, service: _Service | None) -> float:
            """Return the longest path that starts when `node` ends, outside `service`."""
            later = ((d.service or d).priority for d in node.dependents if not d.service or d.service is not service)
            return max(later, default=0.0)

        for node in reversed(order):
            if isinstance(node, _Service):
                node.priority = node.duration + max(after(member, node) for member in node.members)
            elif node.service:
                beside = (d.priority for d in node.dependents if d.service is node.service)
                node.priority = node.duration + max(after(node, node.service), max(beside, default=0.0))
            else:
                node.priority = node.duration + after(node, None)

    def _count_work(self, nodes: Iterable[_TaskNode]) -> None:
        """Sum up the remaining work of these unfinished tasks."""
        node_count = max(1, len(self.nodes))
        total = [sum(column) for column in zip(*self._capacity, strict=True)][1:4]
        self._shares = {
            node: _share(node.task.resources, self._least_s(node), total, 1.0 / node_count if node.alone else 0.0)
            for node in nodes
        }
        self._work = [math.fsum(column) for column in zip(*self._shares.values(), strict=True)]

    def _least_s(self, node: _TaskNode) -> float:
        """Return the seconds for which `node` keeps resources from others; half of them if two services run at a time."""
        need = node.task.resources
        if isinstance(node, _Service) and node.task.memory is not None and need.exclusive.alone:
            # It may share a node with its successor while neither measures.
            enough = (not need.gpus or need.gpus < len(each.gpus) for each in self._places if each.memory is not None)
            if any(enough):
                return (node.duration + node.measured_s) / 2
        return node.duration

    def _excess(self, resources: Resources) -> str | None:
        """Return a message about requests that no node can satisfy."""
        amounts = (resources.cpus, resources.gpus, resources.downloads)
        sizes = zip(self._capacity, self._places, strict=True)
        suitable = (size for size, place in sizes if place.suits(resources.accelerator))
        least, capacities = (1, *amounts, 0), [_NOTHING]
        for size in suitable:
            if _fits(least, size):
                return None
            capacities.append(size)
        who = "this machine" if len(self._places) == 1 else "no node"
        those_of = "" if resources.accelerator is None else f" with {resources.accelerator}"
        names = ("CPUs", "GPUs", "downloads at a time")
        excess = [
            f"needs {amount} {name}, {who}{those_of} offers {'more than ' * (who == 'no node')}{limit}"
            for amount, name, *limits in zip(amounts, names, *(each[1:4] for each in capacities), strict=True)
            if amount > (limit := max(limits))
        ]
        wanted = ", ".join(f"{amount} {name}" for amount, name in zip(amounts, names, strict=True) if amount)
        return "; ".join(excess) or f"needs {wanted or 'a node'}; no node{those_of} offers all of these"

    # Statuses.

    @property
    def _open(self) -> bool:
        """True if tasks may still be started."""
        return not self._interrupted and (self._keep_going or not self._counts[_S.FAILED])

    def _move(self, node: _TaskNode, status: StageStatus) -> None:
        """Change a status. Only this method does."""
        old = node.status
        if status not in TRANSITIONS[old]:
            raise ValueError(f"{node.task.id} cannot go from {old.value} to {status.value}")
        node.status = status
        self._counts[old] -= 1
        self._counts[status] += 1
        if status in ENDED:
            self._ended.append(node)
            if share := self._shares.pop(node, None):
                self._work = [left - each for left, each in zip(self._work, share, strict=True)]
        if self._observe:
            self._observe(node.task.id, old, status)

    def _block(self, node: _TaskNode, cause: _TaskNode) -> None:
        if node.status is _S.PENDING:
            node.cause = cause
            self._move(node, _S.BLOCKED)

    def _settle(self) -> None:
        """Update all direct and indirect dependents of tasks that have just ended."""
        while self._ended:
            node = self._ended.pop()
            succeeded = node.status in _AVAILABLE
            for dependent in node.dependents:
                if succeeded:
                    dependent.waiting -= 1
                    if dependent.waiting == 0 and dependent.status is _S.PENDING:
                        self._enqueue(dependent)
                elif node.cause:  # otherwise it was cancelled, and so are its dependents
                    self._block(dependent, node.cause)
                service = dependent.service
                if service and service is not node.service:
                    service.waiting -= 1
                    if service.waiting == 0 and service.status is _S.PENDING:
                        self._enqueue(service)
            if isinstance(node, _Service) and node.cause:
                for member in node.members:
                    self._block(member, node.cause)
            elif node.service:
                node.service.left -= 1
                node.service.to_measure -= _is_measurement(node)
                self._stirred[node.service] = None

    def _fail_for_good(self, node: _TaskNode, failure: StageError) -> None:
        node.failure, node.cause = failure, node
        self._move(node, _S.FAILED)

    def _may_retry(self, node: _TaskNode, failure: StageError) -> bool:
        """Return True if a retry is allowed. Called while `node` still counts as running."""
        if not self._open or node.failures >= _most_retries(node, failure):
            return False
        if failure.failure is FailureClass.OUT_OF_MEMORY:
            holder = node.service or node
            return holder in self._running and not (node.apart or holder.apart) and self._has_neighbors(holder)
        return failure.failure in (FailureClass.TRANSIENT, FailureClass.LOST)

    def _retry(self, node: _TaskNode, failure: StageError) -> None:
        node.failures += 1
        node.failure = failure
        node.apart = node.apart or failure.failure is FailureClass.OUT_OF_MEMORY
        node.alone = node.alone or node.apart
        when = self._now + backoff_s(node.task.id, node.failures)
        heappush(self._retries, (when, node.index, node))
        self._move(node, _S.PENDING)
        self._instructions.append(RetryAt(node.task.id, when, node.failures + 1, failure))

    # Events.

    def _finished(self, node: _TaskNode, failure: StageError | None) -> None:
        assert not isinstance(node, _Service)
        again = failure is not None and self._may_retry(node, failure)
        if failure is not None and node.service and (ended := node.service.ended):
            # The server ended under it. That is the cause, and this task can be retried only if the service can.
            failure = StageError(
                f"{node.service.task.id} failed while this ran", failure=ended.failure, log=failure.log
            )
            again = node.failures < _most_retries(node, ended) and self._may_retry(node.service, ended)
        self._leave(node)
        if failure is None:
            self._move(node, _S.SUCCEEDED)
        elif self._interrupted:
            self._move(node, _S.CANCELLED)
        elif again:
            self._retry(node, failure)
        else:
            self._fail_for_good(node, failure)

    def _service_ended(self, service: _Service, failure: StageError | None) -> None:
        if failure is None and service.phase is not _Phase.STOPPING:
            before = "it was ready" if service.phase is _Phase.STARTING else "it was stopped"
            failure = StageError(f"ended before {before}")
        service.ended = failure
        if service.current:
            service.phase = _Phase.DEAD
            if not self._interrupted:  # it has been cancelled already
                self._instructions.append(Cancel(service.current.task.id))
        else:
            self._close(service)

    def _close(self, service: _Service) -> None:
        """Handle the end of a service with no running tasks."""
        failure, service.ended = service.ended, None
        again = failure is not None and service.left > 0 and self._may_retry(service, failure)
        self._leave(service)
        if self._interrupted:
            self._move(service, _S.CANCELLED)
        elif failure is None:
            self._move(service, _S.SUCCEEDED)
        elif again:
            self._retry(service, failure)
        else:
            self._fail_for_good(service, failure)

    def _freed(self, node: _TaskNode, *, done: bool) -> None:
        if node.status in ENDED:
            return  # cancelled meanwhile, or reported twice
        if done and not isinstance(node, _Service):
            if node.status is _S.RUNNING:
                self._leave(node)
            self._move(node, _S.UP_TO_DATE)
        elif node.status is _S.ELSEWHERE:
            self._move(node, _S.PENDING)
            if node.service and node.service.cause:  # the service failed meanwhile
                self._block(node, node.service.cause)
            else:
                self._enqueue(node)

    def _interrupt(self) -> None:
        self._interrupted = True
        self._halt()
        for node in self._running:
            if isinstance(node, _Service):
                if node.current and node.phase is not _Phase.DEAD:  # cancel only once
                    self._instructions.append(Cancel(node.current.task.id))
            else:
                self._instructions.append(Cancel(node.task.id))

    def _halt(self) -> None:
        """Start no more tasks: cancel those not started, and end services when their running task ends."""
        self._halted = True
        waiting = (_S.PENDING, _S.ELSEWHERE)
        for node in self._nodes.values():
            if node.status in waiting:
                self._move(node, _S.CANCELLED)
        self._queues.clear()
        self._retries.clear()
        self._settle()

    # Nodes.

    def _add(self, node: Capacity) -> None:
        slots = len(self._nodes)
        self._places.append(node)
        self._capacity.append((slots, node.cpus, len(node.gpus), node.downloads, slots))
        self._held.append(list(_NOTHING))
        self._measuring.append(0)
        self._free.append(self._free_after(len(self._places) - 1, _NOTHING))
        self._free_gpus.append(list(range(len(node.gpus))))

    def _change_nodes(self, event: NodeGone | NodeCame) -> None:
        name = event.node if isinstance(event, NodeGone) else event.node.node
        number = next((number for number, each in enumerate(self._places) if each.node == name), None)
        if isinstance(event, NodeGone):
            if number is None:
                return
            self._capacity[number] = _NOTHING
        elif number is None:
            self._add(event.node)
        else:
            slots, back = len(self._nodes), self._places[number]
            self._capacity[number] = slots, back.cpus, len(back.gpus), back.downloads, slots
        if number is not None:
            self._count_free(number)
        self._count_work(list(self._shares))
        # The demand of an exclusive task is a whole node, and the nodes have changed.
        entries = [entry for queue in self._queues.values() for entry in queue]
        self._queues.clear()
        for entry in entries:
            if entry[3].status is _S.PENDING:
                self._enqueue(entry[3])
        self._stranded_at = min(self._stranded_at, self._now + NODE_PATIENCE_S) if self._stranded() else math.inf

    def _stranded(self) -> list[tuple[_TaskNode, str]]:
        """Return unfinished tasks that no node can run, with reasons. Ends of tasks on a lost node may still be reported."""
        excesses = ((node, self._excess(node.task.resources)) for node in self._shares)
        return [(node, reason) for node, reason in excesses if reason is not None]

    def _give_up(self) -> None:
        hint = "`pipeline resume` continues when there are such nodes"
        for node, reason in self._stranded():
            if node.status is _S.PENDING:
                failure = StageError(f"{reason}, since nodes have gone", failure=FailureClass.LOST, hint=hint)
                self._fail_for_good(node, failure)
        self._settle()
        self._stranded_at = self._now + NODE_PATIENCE_S if self._stranded() else math.inf

    # Resources.

    def _enqueue(self, node: _TaskNode) -> None:
        """Queue `node`, whose needs are met, until it fits."""
        if node.service:
            heappush(node.service.ready, _entry(node))
            self._stirred[node.service] = None
            return
        demand = self._demand(node)
        heappush(self._queues.setdefault(demand, []), _entry(node))
        self._room = self._room or self._place(demand) is not None

    def _demand(self, node: _TaskNode) -> _Demand:
        """Return the free amounts that `node` needs to start: the smallest sufficient node as a whole if it must be alone."""
        need = node.task.resources
        measures = need.exclusive is Exclusive.GPU and not node.alone
        demand = (int(not measures), need.cpus, need.gpus, need.downloads, int(measures))
        if node.alone:
            sizes = zip(self._capacity, self._places, strict=True)
            sufficient = (size for size, place in sizes if _fits(demand, size) and place.suits(need.accelerator))
            demand = min(sufficient, default=demand)
        return demand, need.accelerator

    def _place(self, demand: _Demand, end: float = 0.0, reserved: _Reservation | None = None) -> int | None:
        """Return the node where this demand can start now and run until `end`, with the fewest GPUs, then CPUs, left free.

        A task that still runs when a reserved place is due must fit alongside it.
        """
        amounts, accelerator = demand
        best: tuple[int, int, int] | None = None
        for number, free in enumerate(self._free):
            if (
                _fits(amounts, free)
                and (accelerator is None or self._places[number].suits(accelerator))
                and (best is None or (free[2], free[1]) < best[:2])
                and (
                    reserved is None
                    or number != reserved.node
                    or end <= reserved.start
                    or _fits(amounts, self._free_after(number, reserved.held))
                )
            ):
                best = free[2], free[1], number
        return None if best is None else best[2]

    def _dispatch(self) -> None:
        """Start all tasks that fit, best first. Reserve a place for the first critical one that does not fit."""
        self._look_at, self._room = math.inf, False
        heads: list[tuple[_Entry, _Demand]] = []
        waiting: tuple[_Entry, _Demand] | None = None  # the best that does not fit
        for demand, queue in self._waiting():
            if self._place(demand) is not None:
                heads.append((queue[0], demand))
            elif waiting is None or queue[0] < waiting[0]:
                waiting = queue[0], demand
        heapify(heads)
        reserved: _Reservation | None = None
        while heads:
            entry, demand = heads[0]
            node = entry[3]
            if self._place(demand) is None:
                if waiting is None or entry < waiting[0]:
                    waiting = entry, demand
                heappop(heads)
                continue
            # Each second that a task waits delays the run if its path is as long as the remaining work.
            if reserved is None and waiting and waiting[0] < entry and waiting[0][3].rank >= _whole_s(self._work):
                reserved = self._reservation(waiting[1])
            end = self._now + node.duration
            place = self._place(demand, end, reserved)
            if place is None:
                if reserved:
                    self._look_at = min(self._look_at, self._fits_before(reserved, node))
                heappop(heads)
                continue
            if reserved and place == reserved.node and end > reserved.start:  # it will still be running then
                held = [taken + more for taken, more in zip(reserved.held, demand[0], strict=True)]
                reserved = replace(reserved, held=held)
            queue = self._queues[demand]
            heappop(queue)
            self._start(node, place)
            while queue and queue[0][3].status is not _S.PENDING:
                heappop(queue)
            if queue:
                heapreplace(heads, (queue[0], demand))
            else:
                heappop(heads)

    def _preload(self) -> None:
        """Start the next service alongside an exclusive one whose measurements are done."""
        for place, capacity in enumerate(self._places):
            free = self._free[place]
            if capacity.memory is None or free[_WORK] > 0 or free[_MEASURING] > 0:
                continue  # no exclusive task there
            running = [node for node in self._running if node.node == place]
            if len(running) != 1 or not self._winds_down(running[0]):
                continue
            queue = min((queue for _, queue in self._waiting()), default=[], key=lambda queue: queue[0])
            node = queue[0][3] if queue else None
            if isinstance(node, _Service) and node.alone and not node.apart and self._has_room(node, running[0], place):
                heappop(queue)
                self._start(node, place)

    def _has_room(self, node: _Service, other: _TaskNode, place: int) -> bool:
        """Return True if a service fits on a node alongside this other one."""
        capacity, need = self._places[place], node.task.resources
        if capacity.memory is None or node.task.memory is None or other.task.memory is None:
            return False
        enough = all(
            a + b <= have for a, b, have in zip(node.task.memory, other.task.memory, capacity.memory, strict=True)
        )
        suits = _fits((1, need.cpus, need.gpus, need.downloads, 0), self._capacity[place])
        return suits and enough and need.gpus <= len(self._free_gpus[place]) and capacity.suits(need.accelerator)

    def _waiting(self) -> Iterator[tuple[_Demand, list[_Entry]]]:
        """Yield waiting tasks by demand, the best of each first."""
        for demand, queue in list(self._queues.items()):
            while queue and queue[0][3].status is not _S.PENDING:
                heappop(queue)  # ended while waiting: done elsewhere, or a service that is not needed any more
            if queue:
                yield demand, queue
            else:
                del self._queues[demand]

    @staticmethod
    def _winds_down(node: _TaskNode) -> bool:
        """Return True if this is a service whose measurements are done."""
        return (
            isinstance(node, _Service)
            and node.alone
            and not (node.apart or node.to_measure)
            and node.phase in (_Phase.READY, _Phase.STOPPING)
        )

    def _has_neighbors(self, node: _TaskNode) -> bool:
        """Return True if another task runs on this task's node."""
        return any(other is not node and other.node == node.node for other in self._running)

    def _must_wait(self, node: _TaskNode, service: _Service) -> bool:
        """Return True if a task inside a service measures, and a running task excludes that."""
        if _measures_shared(node):
            loading = (other for other in self._running if isinstance(other, _Service) and other is not service)
            return any(other.phase is _Phase.STARTING and other.node == service.node for other in loading)
        return _is_measurement(node) and self._has_neighbors(service)

    def _reservation(self, head: _Demand) -> _Reservation | None:
        """Return where and when `head` can start first if running tasks end as expected."""
        amounts, accelerator = head
        held = [list(each) for each in self._held]
        for node in sorted(self._running, key=self._ends):
            remaining = held[node.node] = [
                taken - back for taken, back in zip(held[node.node], node.amounts, strict=True)
            ]
            suits = self._places[node.node].suits(accelerator)
            if suits and _fits(amounts, self._free_after(node.node, remaining)):
                taken = [before + more for before, more in zip(remaining, amounts, strict=True)]
                return _Reservation(node.node, self._ends(node), taken, node)
        return None

    def _ends(self, node: _TaskNode) -> float:
        """Return the expected end of a running task. An overdue one ends when it has run as long again."""
        so_far = self._now - (node.end - node.duration)
        return self._now + so_far if overdue(so_far, node.duration) else node.end

    @staticmethod
    def _fits_before(reserved: _Reservation, node: _TaskNode) -> float:
        """Return when `node` fits before this reservation because its holder has run long enough; plus a second for rounding."""
        begun = reserved.after.end - reserved.after.duration
        return begun + max(_LATE * reserved.after.duration, node.duration) + 1.0

    def _free_after(self, node: int, held: Sequence[int]) -> list[int]:
        """Return the amounts free on a node in addition to these."""
        free = [have - taken for have, taken in zip(self._capacity[node], held, strict=True)]
        if held[_WORK]:
            free[_MEASURING] = 0
        if held[_MEASURING]:
            free[_WORK] = 0
        return free

    def _start(self, node: _TaskNode, place: int) -> None:
        amounts, _ = self._demand(node)
        node.end = self._now + node.duration
        node.node = place
        node.gpus = tuple(heappop(self._free_gpus[place]) for _ in range(node.task.resources.gpus))
        self._hold(node, amounts)
        self._running[node] = None
        if isinstance(node, _Service):
            node.phase = _Phase.STARTING
        self._begin(node, node)

    def _begin(self, node: _TaskNode, holder: _TaskNode) -> None:
        """Start `node` with the resources of `holder`: itself, or its service."""
        self._move(node, _S.RUNNING)
        if _measures_shared(node):
            self._measuring[holder.node] += 1
            self._count_free(holder.node)
        place = self._places[holder.node]
        names = tuple(place.gpus[gpu] for gpu in holder.gpus)
        self._instructions.append(Start(node.task.id, names, node.failures + 1, place.node))

    def _leave(self, node: _TaskNode) -> None:
        """Release the resources of `node`, which has ended."""
        if node.service:
            node.service.current = None
            if _measures_shared(node):
                self._measuring[node.service.node] -= 1
                self._count_free(node.service.node)
                self._room = True
            return
        if isinstance(node, _Service):
            node.phase = _Phase.OFF
        del self._running[node]
        self._stir_services()
        self._give_back(node)

    def _stir_services(self) -> None:
        """Check all services again: a measurement may have waited for one to be ready, or to end."""
        self._stirred |= {node: None for node in self._running if isinstance(node, _Service)}

    def _give_back(self, node: _TaskNode, kept: _Amounts = _NOTHING) -> None:
        for gpu in node.gpus:
            heappush(self._free_gpus[node.node], gpu)
        node.gpus = ()
        self._hold(node, kept)
        self._room = True

    def _hold(self, node: _TaskNode, amounts: _Amounts) -> None:
        """Set the amounts that `node` occupies."""
        held = self._held[node.node]
        for which, (before, now) in enumerate(zip(node.amounts, amounts, strict=True)):
            held[which] += now - before
        node.amounts = amounts
        self._count_free(node.node)

    def _count_free(self, node: int) -> None:
        """Count the free amounts of a node: while one service is measured, no other may load."""
        self._free[node] = self._free_after(node, self._held[node])
        if self._measuring[node]:
            self._free[node][_MEASURING] = 0

    def _steer(self) -> None:
        """Start the next task inside each changed service, or stop the service when none is left.

        Runs once after all events of a step, so a service that is known to have died gets no more tasks.
        """
        for service in self._stirred:
            if service.left == 0 and service.status in (_S.PENDING, _S.ELSEWHERE):
                self._move(service, _S.SKIPPED)
            if service.current or service.phase not in (_Phase.STARTING, _Phase.READY):
                continue
            if service.left == 0:
                service.phase = _Phase.STOPPING
                self._instructions.append(Stop(service.task.id))
            elif service.phase is _Phase.READY and self._open:
                later: list[_Entry] = []
                while service.ready and service.current is None:
                    entry = heappop(service.ready)
                    node = entry[3]
                    if node.status is not _S.PENDING:
                        continue
                    if self._must_wait(node, service):
                        later.append(entry)
                        continue
                    service.current = node
                    self._begin(node, service)
                for entry in later:
                    heappush(service.ready, entry)
        self._stirred.clear()
