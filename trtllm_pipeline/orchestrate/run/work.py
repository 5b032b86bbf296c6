"""The work of a plan: present artifacts, pulls, stage runs, and retries with other settings."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_pipeline.base import Fingerprint, PlanError, Scope, StageRunId, UsageError, size
from trtllm_pipeline.orchestrate.memory.estimates import DISK
from trtllm_pipeline.orchestrate.plan import plan as planning
from trtllm_pipeline.orchestrate.plan import retries
from trtllm_pipeline.orchestrate.plan.plan import Plan
from trtllm_pipeline.orchestrate.plan.planner import replanned
from trtllm_pipeline.orchestrate.plan.request import Request
from trtllm_pipeline.orchestrate.run.forecast import Forecast, forecast
from trtllm_pipeline.orchestrate.run.scheduler import Capacity
from trtllm_pipeline.orchestrate.store.index import Artifact
from trtllm_pipeline.orchestrate.store.store import Store

if TYPE_CHECKING:
    from trtllm_pipeline.base import Machine
    from trtllm_pipeline.orchestrate.matrix.validate import LoadedMatrix
    from trtllm_pipeline.orchestrate.run.executor import Executor
    from trtllm_pipeline.orchestrate.run.loop import Observer, Outcome
    from trtllm_pipeline.orchestrate.run.pulling import RemoteSource


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
        from trtllm_pipeline.orchestrate.run.loop import execute  # not needed by a plan

        here = self.present
        if self.source is not None:
            here = self.source.pull(self.plan, self.store, here, observer)
        return execute(
            self.plan,
            self.store,
            self.executor(),
            observer,
            run_id=run_id,
            nodes=self.nodes,
            present={each: artifact for each, artifact in here.items() if each not in self.rerun},
            keep_going=keep_going,
            expected_s=expected_s,
            rerun=self.rerun,
        )


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
    """How the work of a plan ended."""

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
        changed = retries.newly_planned(plan, again)
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
    from trtllm_pipeline.orchestrate.run.pulling import RemoteSource

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
