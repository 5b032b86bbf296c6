"""The work of a plan: present artifacts, pulls, stage runs, and retries with other settings.

Artifacts that a remote store has are pulled instead of built. Measurements are not pulled: they belong to the machine
that they were taken on. A run without a remote store does not load the code of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trtllm_pipeline.base import Fingerprint, PlanError, RemoteError, Scope, StageRunId, UsageError, amount, count, size
from trtllm_pipeline.orchestrate.memory.estimates import DISK
from trtllm_pipeline.orchestrate.plan import plan as planning
from trtllm_pipeline.orchestrate.plan.plan import Plan, to_run, wanted
from trtllm_pipeline.orchestrate.plan.planner import Request, newly_planned, replanned
from trtllm_pipeline.orchestrate.run.forecast import Forecast, Offers, forecast
from trtllm_pipeline.orchestrate.run.scheduler import Capacity
from trtllm_pipeline.orchestrate.store.index import Artifact
from trtllm_pipeline.orchestrate.store.store import Store

if TYPE_CHECKING:
    from trtllm_pipeline.base import Machine
    from trtllm_pipeline.orchestrate.matrix.validate import LoadedMatrix
    from trtllm_pipeline.orchestrate.run.executor import Executor
    from trtllm_pipeline.orchestrate.run.loop import Observer, Outcome
    from trtllm_pipeline.orchestrate.store.remote_store import ArtifactTransfer, Remote

_EVERY_S: Final = 5.0
_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Work:
    """A plan, its present artifacts and the source of the others."""

    plan: Plan
    store: Store
    present: Mapping[Fingerprint, Artifact]
    source: RemoteSource | None
    nodes: Sequence[Capacity]
    executor: Callable[[], Executor]
    rerun: frozenset[Fingerprint] = frozenset()
    """Artifacts to make again, present or not."""

    def forecast(self) -> Forecast:
        """Return the actions and costs of running it. Raises PlanError if it does not fit on the workspace's disk."""
        offers = None if self.source is None else self.source.offers(self.plan, self.present)
        result = forecast(self.plan, self.store, self.present, offers=offers, nodes=self.nodes, rerun=self.rerun)
        _check_room(result, self.store)
        return result

    def run(
        self,
        observer: Observer,
        *,
        run_id: str,
        keep_going: bool = True,
        expected_s: Mapping[StageRunId, float] | None = None,
    ) -> Outcome:
        """Pull artifacts of the remote store, and run the rest."""
        from trtllm_pipeline.orchestrate.run.loop import Execution  # not needed by a plan

        here = self.present
        if self.source is not None:
            here = self.source.pull(self.plan, self.store, here, observer)
        return Execution(
            self.plan,
            self.store,
            self.executor(),
            observer,
            run_id=run_id,
            nodes=self.nodes,
            present={each: artifact for each, artifact in here.items() if each not in self.rerun},
            keep_going=keep_going,
            expected_s=expected_s or {},
            rerun=self.rerun,
        ).run()


def work_of(
    request: Request,
    loaded: LoadedMatrix,
    plan: Plan,
    store: Store,
    nodes: Sequence[Capacity],
    executor: Callable[[], Executor],
) -> Work:
    """Return the work of a plan. Raises UsageError, and StateError if present artifacts lack required signatures."""
    present = present_of(plan, store)
    _check_signed(request, present)
    source, rerun = source_of(request, loaded, plan.machine), rerun_of(plan, request.rerun)
    return Work(plan, store, present, source, nodes, executor, rerun)


@dataclass(frozen=True, slots=True)
class Done:
    """The outcome of running a plan."""

    plan: Plan
    """The last plan: retried cells have their changed settings."""
    outcome: Outcome
    seconds: float
    untried: int
    """Number of cells that ran out of memory and were not retried, because the run stops at the first failure."""


def run_with_retries(
    work: Work,
    observer: Observer,
    *,
    run_id: str,
    keep_going: bool,
    expected_s: Mapping[StageRunId, float],
    until: str | None,
    replan: Callable[[Plan, Forecast], None],
) -> Done:
    """Run it. Cells that ran out of memory are retried as `settings.retry` allows. `replan` gets each new plan."""
    from trtllm_pipeline.orchestrate.plan.pins import Pins

    started, store, plan = time.monotonic(), work.store, work.plan
    outcome = work.run(observer, run_id=run_id, keep_going=keep_going, expected_s=expected_s)
    pins = Pins(store, guess=False)  # cells stay pinned: only the settings of those that failed change
    untried = 0
    while not outcome.interrupted:
        again = replanned(plan, store, pins, until)
        changed = newly_planned(plan, again)
        if not keep_going:
            untried = len(changed)
        if not changed or not keep_going:
            break
        plan = again
        replan(plan, forecast(plan, store, nodes=work.nodes))
        observer.retrying(changed)
        part = planning.part(plan, changed)
        more = Work(part, store, present_of(part, store), work.source, work.nodes, work.executor)
        outcome = outcome.then(more.run(observer, run_id=run_id, keep_going=keep_going), plan)
    return Done(plan, outcome, time.monotonic() - started, untried)


def present_of(plan: Plan, store: Store) -> dict[Fingerprint, Artifact]:
    """Return a plan's artifacts in the store. Every file is checked."""
    return store.present({run.fingerprint: run.stage.name for run in plan.stage_runs.values()})


def rerun_of(plan: Plan, stages: Sequence[str]) -> frozenset[Fingerprint]:
    """Artifacts of the measuring stages `stages`, and of all that read them. Raises UsageError for other stages."""
    known = {run.stage.name: None for run in plan.stage_runs.values() if run.stage.scope is Scope.IN_SERVICE}
    for name in stages:
        if name not in known:
            raise UsageError(
                f"--rerun: {name!r} does not measure anything in this plan", hint=f"one of {', '.join(known) or 'none'}"
            )
    chosen: set[StageRunId] = set()
    for run in plan.stage_runs.values():  # dependency order
        if run.stage.name in stages or not chosen.isdisjoint(run.inputs.values()):
            chosen.add(run.id)
    return frozenset(plan.stage_runs[run].fingerprint for run in chosen)


def source_of(request: Request, loaded: LoadedMatrix, machine: Machine) -> RemoteSource | None:
    """Return the remote store to pull from: the request's, or the matrix's. Raises UsageError."""
    of_matrix: str | None = loaded.written.get("remote")
    if of_matrix is not None and "://" not in of_matrix:
        of_matrix = str(loaded.path.parent / Path(of_matrix).expanduser())
    url = request.remote if request.remote is not None else of_matrix
    if url is None:
        return None
    return RemoteSource(url, request, () if machine.assumed else {gpu.name for gpu in machine.gpus})


def _check_signed(request: Request, present: Mapping[Fingerprint, Artifact]) -> None:
    """Raise StateError if present artifacts lack required signatures: the policy applies to them as to pulled ones."""
    from trtllm_pipeline.orchestrate import provenance

    keys = None if request.trusted_keys is None else Path(request.trusted_keys)
    policy = provenance.policy(keys, required=request.require_signed)
    if policy.required:
        provenance.require([artifact.folder for artifact in present.values()], policy)


def _check_room(forecast: Forecast, store: Store) -> None:
    """Raise PlanError if the new artifacts do not fit on the workspace's disk, even with the error of the estimate."""
    for need in forecast.needs:
        if need.resource == DISK and need.impossible and need.has is not None:
            raise PlanError(
                f"{store.workspace}: new artifacts need about {size(need.estimate.value)} of disk, "
                f"{size(need.has)} is free",
                hint="choose a --workspace on a larger disk, or free space: `pipeline store prune --dry-run`",
            )


class RemoteSource:
    """The remote store that a request names. Raises UsageError for an invalid URL, and a policy without keys."""

    def __init__(self, url: str, request: Request, gpus: Collection[str]) -> None:
        from trtllm_pipeline.orchestrate import provenance

        self._url = url
        self._gpus = () if request.allow_other_gpu else gpus
        keys = None if request.trusted_keys is None else Path(request.trusted_keys)
        self._policy = provenance.policy(keys, required=request.require_signed)
        self._failed: set[StageRunId] = set()
        """Failed pulls: these are built."""

    def offers(self, plan: Plan, present: Collection[Fingerprint]) -> Offers:
        """Return the artifacts of `plan` to pull, if the workspace has the artifacts `present`."""
        from trtllm_pipeline.orchestrate.store import remote_store

        try:
            with closing(remote_store.Remote(self._url)) as remote:
                return self._offers(remote, plan, present)
        except RemoteError as error:
            return Offers(remote_store.shown(self._url), fault=error.message)

    def _offers(self, remote: Remote, plan: Plan, present: Collection[Fingerprint]) -> Offers:
        from trtllm_pipeline.orchestrate.store import remote_store

        runs = plan.stage_runs
        available: dict[StageRunId, ArtifactTransfer] = {}
        refused: dict[StageRunId, ArtifactTransfer] = {}

        def needed() -> set[StageRunId]:
            return to_run(plan, lambda run: run.fingerprint in present or run.id in available)

        # From the last stage to the first: if an engine is available, its inputs are not requested.
        for stage in reversed(dict.fromkeys(run.stage.name for run in runs.values())):
            keys = {
                remote_store.ArtifactKey(stage, runs[each].fingerprint): each
                for each in needed() - self._failed
                if runs[each].stage.name == stage
                and runs[each].stage.scope is Scope.ARTIFACT
                and stage not in remote_store.BOUND
            }
            for key, each in remote_store.offered(remote, keys, self._gpus).items():
                (refused if each.state == "refused" else available)[keys[key]] = each
        # A later response may make earlier pulls unnecessary.
        read = wanted(plan).union(*(runs[each].needs for each in needed()))
        pulls = {run: available[run] for run in runs if run in available and run in read}
        return Offers(remote.url, pulls, refused)

    def pull(
        self, plan: Plan, store: Store, present: Mapping[Fingerprint, Artifact], observer: Observer
    ) -> Mapping[Fingerprint, Artifact]:
        """Pull artifacts that `plan` needs. Returns all present ones. Failed pulls are reported and left to be built.

        Raises StateError if they do not fit on the disk.
        """
        here = dict(present)
        while True:
            offers = self.offers(plan, here)
            if offers.fault is not None:
                observer.pulling(f"{offers.fault}; its artifacts are built here", wrong=True)
            for run, each in offers.refused.items():
                self._fail(run, each, observer)
            if not offers.pulls:
                return here
            # If a pull fails, its inputs may be available too.
            self._pull(offers, store, here, observer)

    def _pull(self, offers: Offers, store: Store, here: dict[Fingerprint, Artifact], observer: Observer) -> None:
        from trtllm_pipeline.orchestrate import provenance
        from trtllm_pipeline.orchestrate.store import remote_store

        run_of = {each.fingerprint: run for run, each in offers.pulls.items()}
        remote_store.check_room(store, offers.pulls.values())
        observer.pulling(f"pulling {count(len(run_of), 'artifact')} from {offers.url}, {size(offers.size_bytes)}")
        judge = partial(provenance.check, policy=self._policy, contents=False)  # every file has just been read
        progress = remote_store.Progress(paced(offers.size_bytes, observer.pulling))
        elsewhere: list[ArtifactTransfer] = []
        with closing(remote_store.Remote(self._url)) as remote:
            try:
                for each in remote_store.pull(store, remote, offers.pulls.values(), judge, progress):
                    if each.state == "refused":
                        self._fail(run_of.pop(each.fingerprint), each, observer)
                    elif each.state == "busy":
                        elsewhere.append(each)
            except RemoteError as error:
                observer.pulling(f"{error.message}; the remaining artifacts are built here", wrong=True)
        # Only now: two invocations that wait for each other would deadlock.
        for each in elsewhere:
            if _wait_for_pull(store, each, observer):
                del run_of[each.fingerprint]  # present, or to be pulled
        here |= store.present({each.fingerprint: each.stage for each in offers.pulls.values()})
        # This includes artifacts that another process builds: the run waits for them as usual.
        self._failed.update(run for fingerprint, run in run_of.items() if fingerprint not in here)

    def _fail(self, run: StageRunId, each: ArtifactTransfer, observer: Observer) -> None:
        self._failed.add(run)
        observer.pulling(f"{each.id} is not pulled: {each.message}; it is built here", wrong=True)


def _wait_for_pull(store: Store, each: ArtifactTransfer, observer: Observer) -> bool:
    """Wait while another process pulls this artifact, so that its inputs are not built meanwhile. False if none does."""
    arriving = store.arriving(each.stage, each.fingerprint)
    if not arriving.is_dir():
        # A claim that was held only briefly: no other process builds or pulls it.
        return store.get(each.stage, each.fingerprint) is not None or not store.is_claimed(each.fingerprint)
    observer.pulling(f"{each.id}: waiting for another process to pull it")
    while arriving.is_dir() and store.is_claimed(each.fingerprint):
        time.sleep(_POLL_S)
    return True


def paced(total_bytes: int, say: Callable[[str], None]) -> Callable[[int], None]:
    """Return a function that takes the bytes transferred so far and reports progress every few seconds."""
    begun = last = time.monotonic()

    def show(done_bytes: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _EVERY_S:
            last = now
            say(f"{amount(done_bytes, total_bytes, 'bytes')}, {done_bytes / 1e6 / (now - begun):.0f} MB/s")

    return show
