"""Runs a plan: the loop that joins scheduler, store and executor.

The scheduler decides, the executor runs jobs, the store keeps results. This module passes events between them and handles
claims, leases and attempt directories. All waiting happens in `_collect`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Final, TypeAlias

from trtllm_pipeline.base import (
    Cell,
    Exclusive,
    FailureClass,
    Fingerprint,
    Json,
    Scope,
    StageError,
    StageRunId,
    StageStatus,
    StateError,
    disk,
    probe,
    read_object,
)
from trtllm_pipeline.orchestrate.memory import estimates
from trtllm_pipeline.orchestrate.plan.plan import Plan, StageRun, to_run
from trtllm_pipeline.orchestrate.plan.plan_file import command_lines
from trtllm_pipeline.orchestrate.run import file_views
from trtllm_pipeline.orchestrate.run import scheduler as scheduling
from trtllm_pipeline.orchestrate.run.executor import Ended, Executor, ExecutorEvent, Job, Ready, Usage, read_job
from trtllm_pipeline.orchestrate.run.forecast import Durations, Forecast, guess_s
from trtllm_pipeline.orchestrate.run.order import favourable, section, section_name, tasks
from trtllm_pipeline.orchestrate.store.claims import Claim, SharedEntry, WaitingPlace, lease_machine, machine_users
from trtllm_pipeline.orchestrate.store.index import Artifact, AttemptRow, Peak
from trtllm_pipeline.orchestrate.store.manifest import Manifest, read
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.tensorrt import JOB, OUT, PROGRESS_FILE, SERVICE_FILE, params

_POLL_S: Final = 0.2
"""Poll interval for state without events: claims of other invocations, progress of stages, the user's interrupt."""
_SEAL_POLL_S: Final = 0.01
"""Poll interval while results are digested."""
_WAITING: Final = (StageStatus.PENDING, StageStatus.ELSEWHERE)
_CAUSE_PATIENCE_S: Final = 1.0
"""Delay before a failure inside a service is reported, in case its cause, the end of the service, follows."""


Nodes: TypeAlias = Callable[[], Sequence[scheduling.Capacity]]
"""Returns the current nodes. None means the plan's machine."""


_Lease: TypeAlias = tuple[Exclusive, bool, int]
"""Kind of a machine lease: exclusivity, whether standing servers are allowed, number of GPUs."""


class Observer:
    """Shows a run in progress. This one shows nothing."""

    def enter(self, folder: Path) -> None:
        """The following calls are about the run in this directory, until `leave`."""

    def leave(self, forecast: Mapping[str, Json] | None) -> None:
        """The run has ended. `forecast` is its report's comparison of forecast and actual costs, if a stage ran."""

    def planned(self, plan: Plan, outlook: Forecast) -> None:
        """The run's plan and its forecast, before it begins."""

    def begin(
        self,
        plan: Plan,
        statuses: Mapping[StageRunId, StageStatus],
        durations: Mapping[str, float],
        nodes: Nodes = tuple,
    ) -> None:
        """The run starts on `nodes`. `durations` are seconds from earlier runs, by prefixes of `StageRun.label`."""

    def changed(self, run: StageRun, status: StageStatus, error: StageError | None, seconds: float | None) -> None:
        """A stage run's status changed. `seconds` is its duration if it has ended."""

    def waiting(self, run: StageRun, why: str) -> None:
        """A stage run waits for a retry or for another invocation."""

    def tick(self, progress: Mapping[StageRunId, Mapping[str, Json]]) -> None:
        """Regular update. `progress` of stage runs that report it: done, total, unit."""

    def pulling(self, message: str, *, wrong: bool = False) -> None:
        """A message about pulling from a remote store before the run starts. `wrong` reports a failed pull."""

    def node(self, name: str, *, gone: bool) -> None:
        """A node of the cluster has gone, or has come."""

    def retrying(self, cells: Sequence[Cell]) -> None:
        """Cells that ran out of memory are planned again with changed settings. `begin` follows."""

    def end(self) -> None:
        """The part started by `begin` has ended."""


@dataclass(slots=True)
class Outcome:
    """Outcome of a run of a plan."""

    statuses: dict[StageRunId, StageStatus]
    artifacts: Mapping[Fingerprint, Artifact]
    errors: dict[StageRunId, StageError] = field(default_factory=dict)
    blocked_by: dict[StageRunId, StageRunId] = field(default_factory=dict)
    interrupted: bool = False
    waited: bool = False
    """True if a stage run waited for another invocation or for a managed server."""

    def then(self, later: Outcome, plan: Plan) -> Outcome:
        """Return the combined outcome of this run and the following one, for the stage runs of `plan`."""
        statuses = {**self.statuses, **later.statuses}
        for run, status in self.statuses.items():  # done in the first, present in the second
            if status is StageStatus.SUCCEEDED and statuses[run] is StageStatus.UP_TO_DATE:
                statuses[run] = status
        statuses = {run: statuses[run] for run in plan.stage_runs}
        errors, blocked = ({**self.errors, **later.errors}, {**self.blocked_by, **later.blocked_by})
        return Outcome(
            statuses,
            {**self.artifacts, **later.artifacts},
            {run: error for run, error in errors.items() if statuses.get(run) is StageStatus.FAILED},
            {run: cause for run, cause in blocked.items() if statuses.get(run) is StageStatus.BLOCKED},
            interrupted=later.interrupted,
            waited=self.waited or later.waited,
        )

    @property
    def comparable(self) -> bool:
        """True if its duration can be compared with a forecast: all stage runs succeeded without waiting for others."""
        return self.exit_code == 0 and not self.waited

    @property
    def exit_code(self) -> int:
        """0 success, 1 failure, 130 interrupted."""
        if self.interrupted:
            return 130
        bad = {StageStatus.FAILED, StageStatus.BLOCKED, StageStatus.CANCELLED}
        return 1 if bad.intersection(self.statuses.values()) else 0


@dataclass(slots=True)
class _Running:
    """An attempt in progress and its claims."""

    run: StageRun
    attempt: AttemptRow
    claim: Claim
    leases: list[Claim]
    """Leases of the machine, then of its GPUs."""
    gpus: tuple[str, ...]
    """Its GPUs. They differ from the scheduler's choice if another invocation holds that."""
    cpus: tuple[int, ...]
    """The CPUs that it is pinned to; () for any."""
    started_s: float
    ready_s: float | None = None
    """Seconds until the service was ready. None if it is not ready or not a service."""
    stop_asked: bool = False


@dataclass(slots=True)
class Execution:
    """One run of a plan."""

    plan: Plan
    store: Store
    executor: Executor
    observer: Observer
    _: KW_ONLY
    run_id: str
    nodes: Sequence[scheduling.Capacity]
    present: dict[Fingerprint, Artifact]
    """Artifacts already present, and those made since."""
    keep_going: bool = True
    expected_s: Mapping[StageRunId, float] = field(default_factory=dict)
    """Durations of a forecast, if there is one."""
    rerun: Collection[Fingerprint] = ()
    """Artifacts to make again, whether or not the store has them."""
    _running: dict[StageRunId, _Running] = field(default_factory=dict)
    _elsewhere: dict[StageRunId, None] = field(default_factory=dict)
    _unleased: dict[_Lease, dict[StageRunId, None]] = field(default_factory=dict)
    """Stage runs that wait for leases. Only one of each kind retries."""
    _refused: dict[_Lease, str] = field(default_factory=dict)
    """Reasons, as of the last attempt to lease."""
    _waits: set[tuple[StageRunId, str]] = field(default_factory=set)
    _enter: SharedEntry = field(default_factory=SharedEntry)
    _place: WaitingPlace = field(default_factory=WaitingPlace)
    _sealing: dict[StageRunId, tuple[Future[Manifest], Usage]] = field(default_factory=dict)
    """Results being digested in a thread."""
    _sealer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    _took: dict[StageRunId, float] = field(default_factory=dict)
    _interrupts: int = 0
    _latest_progress: dict[StageRunId, Mapping[str, Json]] = field(default_factory=dict)
    _progress_s: float = 0.0
    _queued: list[scheduling.Event] = field(default_factory=list)
    _begun: bool = False
    _system: dict[str, Json] | None = None
    _made_by: dict[str, Json] = field(default_factory=probe.made_by)
    _trees: dict[Fingerprint, str] = field(default_factory=dict)
    _known_infeasible: dict[Fingerprint, str] = field(init=False)
    _durations: dict[str, float] = field(init=False)
    _to_run: set[StageRunId] = field(init=False)
    """All stage runs of the scheduler."""
    _scheduler: scheduling.Scheduler = field(init=False)

    def __post_init__(self) -> None:
        self._known_infeasible = self.store.index.infeasible()
        self._durations = self.store.index.durations()
        self._to_run = to_run(self.plan, lambda run: run.fingerprint in self.present)
        corrections = estimates.Corrections(self.store.index.peaks(), self.plan.machine)
        # The forecast lacks stage runs whose artifacts could not be pulled or have disappeared since.
        if unforecast := self._to_run - self.expected_s.keys():
            durations = Durations(self._durations, self.plan.machine, corrections)
            more = {run: durations.expected(self.plan.stage_runs[run]) for run in unforecast}
            self.expected_s = {**self.expected_s, **more}
        known = list(tasks(self.plan, self._to_run, lambda run: self.expected_s[run.id], corrections, self.nodes))
        stages = (self.plan.stage_runs[run].stage for run in self._to_run)
        has_run = all(stage.scope is Scope.SERVICE or stage.name in self._durations for stage in stages)
        self._scheduler = scheduling.Scheduler(
            known,
            *self.nodes,
            keep_going=self.keep_going,
            observe=self._changed,
            # With inaccurate estimates, a searched order is not better than the longest path first.
            favour=favourable(known, self.nodes) if has_run else None,
        )

    # The loop.

    def run(self) -> Outcome:
        """Bring every stage run up to date. Returns when all have ended, successfully or not."""
        scheduler = self._scheduler
        statuses = self._statuses()
        self.observer.begin(self.plan, statuses, self._durations, lambda: scheduler.nodes)
        self._begun = True
        for run, status in statuses.items():
            if status is StageStatus.FAILED:  # needs more than this machine has: known before the start
                self._changed(run, StageStatus.PENDING, status)
        events: list[scheduling.Event] = []
        interrupts_obeyed = 0
        try:
            with self._catching_signals():
                while True:
                    for instruction in scheduler.advance(time.monotonic(), *events):
                        self._obey(instruction)
                    if scheduler.finished and not self._running:
                        break
                    events = self._collect()
                    if self._interrupts > interrupts_obeyed:
                        interrupts_obeyed = self._interrupts
                        events.append(scheduling.Interrupt())
                        if interrupts_obeyed > 1:
                            for run in self._running:
                                self.executor.stop(run, grace_s=0.0)
        finally:
            with ExitStack() as ending:  # in reverse order, each even if others fail
                ending.callback(self.observer.end)
                ending.callback(self._place.leave)
                ending.callback(self._enter.let_go)
                for held in self._running.values():
                    ending.callback(_release, held)
                ending.callback(self._give_up)
                ending.callback(self._sealer.shutdown)
                ending.callback(self.executor.close)
        self._remember_latest()
        statuses = self._statuses()
        failed = (run for run, status in statuses.items() if status is StageStatus.FAILED)
        return Outcome(
            statuses,
            self.present,
            {run: failure for run in failed if (failure := scheduler.failure(run)) is not None},
            {run: cause for run in self._to_run if (cause := scheduler.blocked_by(run)) is not None},
            interrupted=self._interrupts > 0,
            waited=bool(self._waits),
        )

    def _give_up(self) -> None:
        """Record running stage runs as interrupted."""
        for held in self._running.values():
            self.store.fail(held.attempt, "interrupted", None)
            _release(held)

    def _statuses(self) -> dict[StageRunId, StageStatus]:
        """Return the status of all stage runs of the plan. Those not to run are present or not needed."""
        status, present = self._scheduler.status, self.present
        return {
            run.id: status(run.id)
            if run.id in self._to_run
            else StageStatus.UP_TO_DATE
            if run.fingerprint in present
            else StageStatus.SKIPPED
            for run in self.plan.stage_runs.values()
        }

    def _collect(self) -> list[scheduling.Event]:
        """Return new events. Waits a moment if there are none."""
        if self._queued:
            events, self._queued = self._queued, []
            return events
        due = self._scheduler.wake_at
        patience = _POLL_S if due is None else min(_POLL_S, max(0.0, due - time.monotonic()))
        if self._sealing:
            patience = min(patience, _SEAL_POLL_S)
        self._enter.let_go()
        if (waits := self._place.by) and self._scheduler.status(StageRunId(waits)) not in _WAITING:
            self._place.leave()  # done elsewhere, or cancelled
        events = []
        for event in self._with_causes(self.executor.wait(patience)):
            if isinstance(event, Ready):
                if event.id in self._running:
                    self._running[event.id].ready_s = time.monotonic() - self._running[event.id].started_s
                events.append(scheduling.ServiceReady(event.id))
            elif isinstance(event, Ended):
                events += self._ended(event)
            else:
                gone = isinstance(event, scheduling.NodeGone)
                self.observer.node(event.node if isinstance(event, scheduling.NodeGone) else event.node.node, gone=gone)
                events.append(event)
        for run_id in [run_id for run_id, (future, _) in self._sealing.items() if future.done()]:
            events.append(self._publish(run_id, *self._sealing.pop(run_id)))
        events += self._freed()
        self.observer.tick(self._progress())
        return events

    def _with_causes(self, events: list[ExecutorEvent]) -> list[ExecutorEvent]:
        """Return `events` with ends of services before the failures that they caused. Waits a moment for such an end."""
        deadline = time.monotonic() + _CAUSE_PATIENCE_S
        while time.monotonic() < deadline:
            over = {event.id for event in events if isinstance(event, Ended)}
            services = {
                self.plan.stage_runs[event.id].inputs.get("service")
                for event in events
                if isinstance(event, Ended) and event.error is not None and not self._running[event.id].stop_asked
            }
            if not (services - {None}) - over:
                break
            events = events + self.executor.wait(_POLL_S)

        def is_effect(event: ExecutorEvent) -> bool:
            return isinstance(event, (Ready, Ended)) and self.plan.stage_runs[event.id].stage.scope is Scope.IN_SERVICE

        return sorted(events, key=is_effect)

    @contextmanager
    def _catching_signals(self) -> Iterator[None]:
        def interrupt(_signal: int, _frame: FrameType | None) -> None:
            self._interrupts += 1

        before = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # set by nohup and a shell's &
                before[number] = signal.signal(number, interrupt)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # Instructions.

    def _obey(self, instruction: scheduling.Instruction) -> None:
        if isinstance(instruction, scheduling.Start):
            self._queued += self._start(self.plan.stage_runs[instruction.id], instruction)
        elif isinstance(instruction, scheduling.RetryAt):
            wait = max(0.0, instruction.when - time.monotonic())
            run = self.plan.stage_runs[instruction.id]
            self.observer.waiting(run, f"{instruction.failure.message}; attempt {instruction.attempt} in {wait:.0f} s")
        else:
            held = self._running.get(instruction.id)
            if held is not None and instruction.id not in self._sealing:
                held.stop_asked = True
                stopping_s = _seconds(held.run, "stop_timeout_s", 0.0)  # a service stops its server first
                self.executor.stop(instruction.id, grace_s=5.0 + stopping_s)

    def _start(self, run: StageRun, start: scheduling.Start) -> list[scheduling.Event]:
        """Start an attempt, unless another invocation works on it or has done it, or it is infeasible."""
        known = self._known_infeasible.get(run.fingerprint)
        if known is not None:
            remembered = StageError(
                f"{known} (recorded in an earlier attempt)",
                failure=FailureClass.INFEASIBLE,
                hint="if it can work now, retry it with `pipeline resume --retry-infeasible` or `pipeline run`",
            )
            return [_ended_event(run, remembered)]
        need = self.plan.resources(run)
        kind = need.exclusive, need.beside_standing, len(start.gpus)
        leases_here = not start.node and run.stage.scope is not Scope.IN_SERVICE
        if leases_here and kind in self._refused and kind in self._unleased:
            return self._busy(run, self._refused[kind], self._unleased[kind])
        claim = self.store.claim(run.fingerprint)
        if claim is None:
            who = " and ".join(self.store.claimants(run.fingerprint)) or "another invocation"
            return self._busy(run, f"{who} works on it", self._elsewhere)
        leases, gpus = list[Claim](), start.gpus
        done = self._done_elsewhere(run)
        if done:
            claim.release()
            return [*done, *self._may_ask(kind)]
        cpus: tuple[int, ...] = ()
        if start.node:  # a cluster node takes leases on its own GPUs
            gpus = ()
        elif run.stage.scope is Scope.IN_SERVICE:
            service = self._running[StageRunId(run.inputs["service"])]
            gpus, cpus = service.gpus, service.cpus
        else:
            machine = self.plan.machine
            exclusive, beside_standing, _ = kind
            others = [gpu.uuid for gpu in machine.gpus]
            leased = lease_machine(
                gpus,
                exclusive=exclusive,
                others=others,
                enter=self._enter,
                beside_standing=beside_standing,
                place=self._place,
                by=run.id,
            )
            if leased is None:
                claim.release()
                users = machine_users(
                    others if gpus else (), exclusive=exclusive, beside_standing=beside_standing, place=self._place
                )
                who = " and ".join(users) or "another invocation or a managed server"
                what = "GPUs are" if gpus and exclusive is Exclusive.NONE else "this machine is"
                self._refused[kind] = f"{what} in use by {who}"
                return self._busy(run, self._refused[kind], self._unleased.setdefault(kind, {}))
            leases, gpus = leased
            if exclusive.pinned:
                cpus = probe.cpus_near(gpus)
        left = self.store.unended(run.fingerprint) if start.node else None
        if left is not None and self.executor.adopt(left):
            attempt = self.store.join(self.run_id, run.stage.name, run.fingerprint, left)
            job = replace(read_job(attempt.folder / JOB), node=start.node)
        else:
            attempt = self.store.begin(self.run_id, run.stage.name, run.fingerprint)
            job = self._job(run, attempt, gpus, cpus, start.node)
            job.write(attempt.folder / JOB)
        self._running[run.id] = _Running(run, attempt, claim, leases, gpus, cpus, time.monotonic())
        self.executor.submit(job, [each.fd for each in (claim, *leases)])
        return self._may_ask(kind) if leases_here else []

    def _may_ask(self, kind: _Lease) -> list[scheduling.Event]:
        """Return events for all stage runs that wait for such a lease, after one of them has stopped waiting."""
        return [scheduling.Freed(each, done=False) for each in self._unleased.pop(kind, ())]

    def _done_elsewhere(self, run: StageRun) -> list[scheduling.Event]:
        """Return events for artifacts that another invocation has published since the last look."""
        if run.stage.scope is not Scope.SERVICE:
            return [scheduling.Freed(run.id, done=True)] if self._look(run) else []
        done = self._done_inside(run)
        return [scheduling.Busy(run.id), *done, scheduling.Freed(run.id, done=False)] if done else []

    def _done_inside(self, service: StageRun) -> list[scheduling.Event]:
        inside = [
            run
            for run in map(self.plan.stage_runs.__getitem__, self._to_run)
            if run.inputs.get("service") == service.id and self._scheduler.status(run.id) is StageStatus.PENDING
        ]
        return [scheduling.Freed(run.id, done=True) for run in inside if self._look(run)]

    def _look(self, run: StageRun) -> bool:
        artifact = None if run.fingerprint in self.rerun else self.store.get(run.stage.name, run.fingerprint)
        if artifact is None:
            return False
        self.present[run.fingerprint] = artifact
        return True

    def _busy(self, run: StageRun, why: str, among: dict[StageRunId, None]) -> list[scheduling.Event]:
        if (run.id, why) not in self._waits:
            self._waits.add((run.id, why))
            self.observer.waiting(run, why)
        among[run.id] = None
        return [scheduling.Busy(run.id)]

    def _job(self, run: StageRun, attempt: AttemptRow, gpus: tuple[str, ...], cpus: tuple[int, ...], node: str) -> Job:
        inputs = {name: self._input(self.plan.stage_runs[upstream]) for name, upstream in run.inputs.items()}
        shown = {
            name: str(file_views.make(attempt.folder, name, Path(inputs[name]), files))
            for name, files in run.reads.items()
        }
        viewed = {name: inputs[name] for name, folder in shown.items() if folder != inputs[name]}
        inputs |= shown
        folder = str(attempt.folder)
        # Python programs then write log lines at once and in order.
        environment = {"PYTHONUNBUFFERED": "1"} | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
        return Job(
            id=run.id,
            stage=run.stage.name,
            toolchain=run.toolchain,
            fingerprint=run.fingerprint,
            scope=run.stage.scope,
            commands=command_lines(run, inputs, folder, self.plan.machine),
            environment=environment,
            program=run.stage.program,
            params_class=params.class_name(run.params),
            params=params.to_json(run.params),
            inputs=inputs,
            viewed=viewed,
            files=run.files,
            out=f"{folder}/{OUT}",
            attempt=folder,
            timeout_s=_seconds(run, "timeout_s", run.stage.timeout_s),
            section=section_name(run),
            gpus=gpus,
            cpus=cpus,
            resources=self.plan.resources(run),
            node=node,
        )

    def _input(self, upstream: StageRun) -> str:
        if upstream.stage.scope is Scope.SERVICE:
            return f"{self._running[upstream.id].attempt.folder}/{SERVICE_FILE}"
        return str(self.present[upstream.fingerprint].out)

    # Events.

    def _ended(self, event: Ended) -> list[scheduling.Event]:
        held = self._running[event.id]
        run, attempt = held.run, held.attempt
        self._took[run.id] = event.usage.wall_s
        if run.reads:
            file_views.remove(attempt.folder)
        if event.error is None and run.stage.scope is not Scope.SERVICE:
            seal = self._sealer.submit(self.store.seal, attempt, run.key, run.label, self._provenance(held, event))
            self._sealing[run.id] = seal, event.usage
            if run.stage.scope is Scope.IN_SERVICE:  # it has no GPUs itself
                return []
            of_gpus = held.leases[len(held.leases) - len(held.gpus) :]
            for lease in of_gpus:  # the machine's own keeps measurements away
                lease.release()
            return [scheduling.Vacated(run.id)]
        del self._running[run.id]
        error = None if held.stop_asked and run.stage.scope is Scope.SERVICE else event.error
        if error is None and held.ready_s is not None:  # a service stopped while loading has not reached its peak
            self.store.index.add_peak(attempt.id, self._peak(held, event.usage, 0))
        stopped = held.stop_asked and error is not None
        self.store.fail(attempt, "stopped" if stopped or error is None else "failed", error)
        _release(held)
        if error is None:
            return [_ended_event(run, None)]
        return [self._failure(run, error)]

    def _peak(self, held: _Running, usage: Usage, left: int) -> Peak:
        """Return expected and actual resource usage of a stage run. Later plans use it."""
        machine, run = self.plan.machine, held.run
        of_type = machine.of(run.first_cell.gpu)
        estimate = estimates.expected(run.stage, run.first_cell, machine)
        expected = {} if estimate is None else estimates.expected_by_kind(estimate, of_type)
        seconds = held.ready_s if run.stage.scope is Scope.SERVICE else usage.wall_s
        taken = {
            "host": usage.peak_bytes,
            "gpu": usage.gpu_bytes or 0,
            "shared": usage.shared_bytes,
            "leaves": left,
            "written": usage.written_bytes,
            "ms": round(1000 * (seconds or 0.0)),
        }
        system = estimates.system(of_type)
        return Peak(run.label, system, {**expected, "ms": round(1000 * guess_s(run, machine))}, taken)

    def _failure(self, run: StageRun, error: StageError) -> scheduling.Event:
        if error.failure is FailureClass.INFEASIBLE:
            self.store.index.add_infeasible(run.fingerprint, error.message)
        return _ended_event(run, error)

    def _provenance(self, held: _Running, event: Ended) -> dict[str, Json]:
        run, usage, system = held.run, event.usage, event.system or self._system
        if system is None:  # inspected once per run, and only if it produces an artifact
            system = self._system = probe.maker()
        # Of these inputs, its key has only the selected files.
        made_from: dict[str, Json] = {name: self.plan.stage_runs[run.inputs[name]].fingerprint for name in run.reads}
        changed = [each for each in run.first_cell.changes if hasattr(run.params, each.setting.rpartition(".")[2])]
        return {
            "run": self.run_id,
            "attempt": held.attempt.number,
            "finished_s": round(time.time(), 3),
            "duration_s": round(usage.wall_s, 3),
            "expected_s": round(self.expected_s[run.id], 3),
            "cpu_s": round(usage.cpu_s, 3),
            **{name: size for name, size in asdict(usage).items() if name.endswith("_bytes") and size is not None},
            "system": dict(system),
            "inputs": dict(self._read_by(run)),
            **({"made_from": made_from} if made_from else {}),
            **({"made_by": self._made_by} if self._made_by else {}),
            **({"changes": [asdict(each) for each in changed]} if changed else {}),
        }

    def _read_by(self, run: StageRun) -> Iterator[tuple[str, str]]:
        """Yield digests of the inputs by name: an artifact rebuilt with the same fingerprint may have other bytes."""
        for name, upstream in run.inputs.items():
            fingerprint = self.plan.stage_runs[upstream].fingerprint
            if fingerprint not in self._trees and fingerprint in self.present:
                with suppress(StateError):  # removed or damaged since: the digest is unknown
                    self._trees[fingerprint] = read(self.present[fingerprint].folder).tree
            if fingerprint in self._trees:
                yield name, self._trees[fingerprint]

    def _publish(self, run_id: StageRunId, sealing: Future[Manifest], usage: Usage) -> scheduling.Event:
        held = self._running[run_id]  # its claims are released even if the index cannot be written
        try:
            sealed = sealing.result()
            artifact = self.store.publish(held.attempt, sealed, self._peak(held, usage, sealed.size_bytes))
        except (StageError, OSError) as error:
            failed = error if isinstance(error, StageError) else _disk_error(held, error)
            self.store.fail(held.attempt, "failed", failed)
            ended = self._failure(held.run, failed)
        else:
            self.present[held.run.fingerprint] = artifact
            self._trees[held.run.fingerprint] = sealed.tree
            ended = _ended_event(held.run, None)
        del self._running[run_id]
        _release(held)
        return ended

    def _freed(self) -> list[scheduling.Event]:
        """Return events for claims and leases released by others."""
        events: list[scheduling.Event] = []
        for run_id in list(self._elsewhere):
            run = self.plan.stage_runs[run_id]
            claim = self.store.claim(run.fingerprint)
            if claim is None:
                continue
            claim.release()
            del self._elsewhere[run_id]
            if run.stage.scope is Scope.SERVICE:
                events += self._done_inside(run)
                events.append(scheduling.Freed(run_id, done=False))
            else:
                events.append(scheduling.Freed(run_id, done=self._look(run)))
        self._refused.clear()
        for waiting in filter(None, self._unleased.values()):
            del waiting[asks := next(iter(waiting))]
            events.append(scheduling.Freed(asks, done=False))
        return events

    # Reporting.

    def _changed(self, run_id: StageRunId, _old: StageStatus, new: StageStatus) -> None:
        if not self._begun:
            return
        error = self._scheduler.failure(run_id) if new is StageStatus.FAILED else None
        self.observer.changed(self.plan.stage_runs[run_id], new, error, self._took.get(run_id))

    def _progress(self) -> dict[StageRunId, Mapping[str, Json]]:
        """Return the stages' progress, read a moment ago."""
        now = time.monotonic()
        if now - self._progress_s >= _POLL_S:
            self._latest_progress, self._progress_s = {}, now
            for run_id, held in self._running.items():
                progress = read_object(held.attempt.folder / PROGRESS_FILE)
                if progress is not None:
                    self._latest_progress[run_id] = progress
        return self._latest_progress

    def _remember_latest(self) -> None:
        """Record the current artifacts of each cell, so that the next plan can report changes."""
        known = self.store.index.latest_fingerprints()
        runs, present = self.plan.stage_runs, self.present
        used = {up for run in runs.values() if run.fingerprint in present for up in run.inputs.values()}
        rows: list[tuple[str, str, Fingerprint]] = []
        services: list[tuple[str, str, Fingerprint, str]] = []
        for cell, of_cell in self.plan.by_cell.items():
            # If there are two of one stage, the last is the cell's own. The other was built for its draft model.
            for stage, run in {runs[each].stage.name: runs[each] for each in of_cell}.items():
                row = cell, stage, run.fingerprint
                if row in known:
                    continue
                if run.fingerprint in present:
                    rows.append(row)
                elif run.stage.scope is Scope.SERVICE and run.id in used:
                    services.append((*row, run.key))
        if rows or services:
            self.store.index.set_latest(rows, services)


def _seconds(run: StageRun, name: str, default: float) -> float:
    """Return a timeout set by the matrix, or else the stage's default."""
    value = section(run).get(name)
    return float(value) if isinstance(value, (int, float)) else default


def _ended_event(run: StageRun, failure: StageError | None) -> scheduling.Event:
    if run.stage.scope is Scope.SERVICE:
        return scheduling.ServiceEnded(run.id, failure)
    return scheduling.Finished(run.id, failure)


def _disk_error(held: _Running, error: OSError) -> StageError:
    return StageError(
        f"{held.run.stage.name}: cannot be published: "
        f"{disk.no_room(error, held.attempt.folder) or error.strerror or error}",
        failure=FailureClass.USER,
        hint=disk.hint(error),
        log=held.attempt.log,
    )


def _release(held: _Running) -> None:
    for claim in (held.claim, *held.leases):
        claim.release()
