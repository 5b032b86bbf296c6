"""The forecast of a run: time, disk and memory.

The time comes from the scheduler, simulated on expected durations: formulas of the model, the machine and the release,
corrected by earlier runs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trtllm_pipeline.base import Fingerprint, Json, Machine, Resources, Scope, StageRunId
from trtllm_pipeline.models import kept_bytes
from trtllm_pipeline.orchestrate.memory.estimates import HOST, SHARED, TIME, Corrections, Estimate, Need, is_known
from trtllm_pipeline.orchestrate.plan.memory_needs import of_plan, of_run
from trtllm_pipeline.orchestrate.plan.plan import Plan, StageRun, to_run
from trtllm_pipeline.orchestrate.plan.plan_file import action
from trtllm_pipeline.orchestrate.plan.reasons import RERUN, reasons
from trtllm_pipeline.orchestrate.run import scheduler as scheduling
from trtllm_pipeline.orchestrate.run.order import FIRST, play
from trtllm_pipeline.orchestrate.store.index import Artifact
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.tensorrt import PARTIAL, DownloadParams

if TYPE_CHECKING:
    from trtllm_pipeline.orchestrate.run.pulling import Offers

_GUESS_ERROR: Final = 0.6
"""Relative error of a time formula (docs/project/estimates.md)."""
_KNOWN_ERROR: Final = 0.3
"""Relative error of a duration measured on an unknown system."""
_MOST_SIMULATED: Final = 2_000
"""Larger plans are not simulated: the schedule takes 1% to 4% longer than the bound of `least_s`, which is less than the
error of the durations."""
_ALL: Final = ""
"""The label of all stage runs."""


class Durations:
    """Seconds of stage runs by label from coarse to fine, as `learnt` earlier.

    Otherwise the formula, corrected by this run's results: engines of several sizes share a label.
    """

    def __init__(self, learnt: Mapping[str, float], machine: Machine, corrections: Corrections | None = None) -> None:
        self._learnt = learnt
        self._corrections = corrections
        self._machine = machine
        self._here: dict[str, tuple[float, float]] = {}
        """Measured and estimated seconds."""
        self._guesses: dict[StageRunId, float] = {}
        self._estimates: dict[tuple[str, int], Estimate] = {}

    def learn(self, run: StageRun, seconds: float) -> None:
        """Record the duration of a stage run."""
        self._estimates.clear()
        for label in (*_labels(run), _ALL):
            took_s, guessed_s = self._here.get(label, (0.0, 0.0))
            self._here[label] = (took_s + seconds, guessed_s + self.guess(run))

    def guess(self, run: StageRun) -> float:
        """Return `guess_s`, computed once: learning calls it repeatedly."""
        if run.id not in self._guesses:
            self._guesses[run.id] = guess_s(run, self._machine)
        return self._guesses[run.id]

    def of(self, run: StageRun) -> float | None:
        """Return the known duration. None if no comparable run exists. Another model's time is not comparable if size matters."""
        known = list(_labels(run))
        for label in known[:-2] if _by_size(run) else known:
            took_s, guessed_s = self._here.get(label, (0.0, 0.0))
            if guessed_s:
                return self.guess(run) * took_s / guessed_s
            if label in self._learnt:
                return self._learnt[label]
        return None

    def guessed(self, run: StageRun) -> float:
        """Return the formula's seconds, corrected by this run's results for comparable stage runs, else for all."""
        for label in (*_labels(run), _ALL):
            took_s, guessed_s = self._here.get(label, (0.0, 0.0))
            if guessed_s:
                return self.guess(run) * took_s / guessed_s
        return self.guess(run)

    def estimate(self, run: StageRun) -> Estimate:
        """Return the formula in milliseconds, corrected by similar systems. Without measurements: the known duration, or the formula."""
        formula = round(1000 * guess_s(run, self._machine))
        same = run.label, formula
        corrected = self._estimates.get(same)
        if corrected is None:
            corrected = self._estimates[same] = self._estimate(run, formula)
        return corrected

    def _estimate(self, run: StageRun, formula: int) -> Estimate:
        if self._corrections is not None:
            corrections = self._corrections.on(run.first_cell.gpu)
            corrected = corrections.of(run.label, TIME, formula, _GUESS_ERROR)
            if corrected.measured:
                return corrected
        known = self.of(run)
        return Estimate(formula, _GUESS_ERROR) if known is None else Estimate(round(1000 * known), _KNOWN_ERROR, 1)

    def expected(self, run: StageRun) -> float:
        """Return the expected seconds."""
        return self.estimate(run).value / 1000


def _labels(run: StageRun) -> Iterator[str]:
    """Yield stage/toolchain/model/precision, with the GPU type if the cell names one, and each prefix."""
    label = run.label
    while label:
        yield label
        label = label.rpartition("/")[0]


def _by_size(run: StageRun) -> bool:
    """Return whether the stage takes longer for a larger model and this model's size is known."""
    return run.stage.takes is not None and "num_hidden_layers" in run.first_cell.recipe


def guess_s(run: StageRun, machine: Machine) -> float:
    """Return the seconds of a stage run by its formula, before any correction."""
    stage = run.stage
    return stage.expected_s + (
        stage.takes(run.first_cell, machine.of(run.first_cell.gpu))
        if stage.takes is not None and _by_size(run)
        else 0.0
    )


@dataclass(frozen=True, slots=True)
class Forecast:
    """Actions and costs of running a plan now."""

    present: frozenset[StageRunId]
    to_run: frozenset[StageRunId]
    reasons: Mapping[StageRunId, str]
    """Reasons by stage run in `to_run`."""
    expected_s: Mapping[StageRunId, float]
    """Expected seconds by stage run in `to_run`."""
    times: Mapping[StageRunId, Estimate]
    """The same in milliseconds, with errors."""
    durations: Durations
    """The source of both."""
    total_s: float
    """Wall-clock seconds of the run, from the same scheduler that will run it."""
    guessed: int
    """Number of stage runs in `to_run` without a comparable run in this workspace: their durations are rough."""
    needs: tuple[Need, ...]
    """Memory needed by each of `to_run` and disk needed by all, compared with the available amounts."""
    corrections: Corrections
    """Corrections measured in this workspace."""
    offers: Offers | None = None
    """Artifacts that a remote store offers, if one is set. The other fields assume that they are pulled."""
    pulls: Mapping[StageRunId, int] = field(default_factory=dict)
    """Bytes to pull."""

    def action(self, run: StageRunId) -> str:
        """Return the action for a stage run, as in a plan's JSON."""
        return action(run, self.to_run, self.present, self.pulls)


def forecast(
    plan: Plan,
    store: Store | None,
    present: Mapping[Fingerprint, Artifact] | None = None,
    *,
    workspace: Path | None = None,
    offers: Offers | None = None,
    nodes: Sequence[scheduling.Capacity] = (),
    rerun: Collection[Fingerprint] = (),
) -> Forecast:
    """Return the actions of running `plan` now, their reasons and costs. `present` are the store's artifacts, if known.

    Without a store, `workspace` is its future directory. `offers` are the artifacts of a remote store. Without `nodes` it
    runs on the plan's machine. Artifacts of `rerun` are made again.
    """
    runs = plan.stage_runs.values()
    if present is None:
        present = {} if store is None else store.present({run.fingerprint: run.stage.name for run in runs})
    corrections = Corrections(store.index.peaks() if store is not None else (), plan.machine)
    durations = Durations(store.index.durations() if store is not None else {}, plan.machine, corrections)
    folder = workspace if store is None else store.workspace
    free = None if folder is None or plan.machine.assumed else _free_bytes(folder.absolute())
    present_runs = frozenset(run.id for run in runs if run.fingerprint in present and run.fingerprint not in rerun)
    pulls = {} if offers is None else {run: each.transfer_bytes for run, each in offers.pulls.items()}
    after = present_runs.union(pulls)
    todo = frozenset(to_run(plan, lambda run: run.id in after))
    times = {run.id: durations.estimate(run) for run in runs if run.id in todo}
    expected_s = {run: estimate.value / 1000 for run, estimate in times.items()}
    fetched = {} if store is None else {run: _fetched(plan.stage_runs[run], store) for run in todo}
    return Forecast(
        present_runs,
        todo,
        {**reasons(plan, times, store), **{run.id: RERUN for run in runs if run.fingerprint in rerun}},
        expected_s,
        times,
        durations,
        simulate(plan, expected_s, nodes or capacities(plan.machine), todo, corrections),
        sum(not estimate.measured for estimate in times.values()),
        tuple(
            of_plan(plan, (plan.stage_runs[run] for run in plan.stage_runs if run in todo), corrections, free, fetched)
        ),
        corrections,
        offers,
        pulls,
    )


def _fetched(run: StageRun, store: Store) -> int:
    """Return the bytes of a download that are already on the disk."""
    params = run.params
    if not isinstance(params, DownloadParams):
        return 0
    folder = None if params.folder is None else Path(params.folder)
    return kept_bytes(params.source, store.work_dir / PARTIAL, folder)


def durations(plan: Plan, forecast: Forecast, *, every: bool = True) -> list[Need]:
    """Return the time of each stage run to run, with its timeout; without `every`, only the longest of each stage."""
    todo = [run for run in plan.stage_runs.values() if run.id in forecast.to_run]
    if not every:
        longest: dict[str, StageRun] = {}
        for run in todo:
            known = longest.get(run.stage.name)
            if known is None or forecast.times[run.id].value > forecast.times[known.id].value:
                longest[run.stage.name] = run
        todo = list(longest.values())
    return [_duration(run, forecast.times[run.id]) for run in todo]


def _duration(run: StageRun, estimate: Estimate) -> Need:
    """Return the time of a stage run (a service: until ready) and its timeout, in milliseconds."""
    limit: Json = section(run).get("timeout_s") or run.stage.timeout_s
    if run.stage.scope is Scope.SERVICE:
        limit = getattr(run.params, "ready_timeout_s", None)
    has = round(1000 * limit) if isinstance(limit, (int, float)) else None
    return Need(run.stage.name, run.first_cell.id, TIME, estimate, has, assumed=not estimate.measured)


def _free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of a directory, which may not exist yet."""
    return shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists())).free


def capacity(machine: Machine) -> scheduling.Capacity:
    """Return the capacity of `machine`: whole GPUs by name, CPU slots."""
    host, shared = machine.memory_bytes, machine.shared_bytes
    return scheduling.Capacity(
        cpus=machine.cpus,
        gpus=tuple(gpu.uuid for gpu in machine.gpus),
        memory=None if host is None or shared is None else (host, shared),
    )


def capacities(machine: Machine) -> list[scheduling.Capacity]:
    """Return the capacity of `machine`. With several GPU types: an empty one for this machine, and one node of each type."""
    nodes = (
        scheduling.Capacity(each.cpus, tuple(gpu.uuid for gpu in each.gpus), 0, name, name)
        for name, each in machine.types
    )
    return [scheduling.Capacity(0), *nodes] if machine.types else [capacity(machine)]


def simulate(
    plan: Plan,
    takes: Mapping[StageRunId, float],
    on: Sequence[scheduling.Capacity],
    among: Collection[StageRunId],
    corrections: Corrections | None = None,
    *,
    running: Collection[StageRunId] = (),
) -> float:
    """Return the wall-clock seconds of running `among` of `plan` on the nodes `on`, if each `takes` these seconds.

    Stage runs that are already `running` start first.
    """
    if len(among) > _MOST_SIMULATED:
        return least_s(plan, takes, on, among)
    known = list(tasks(plan, among, lambda run: takes[run.id], corrections, on))
    return play(known, scheduling.Scheduler(known, *on, favour=dict.fromkeys(running, FIRST)))


def least_s(
    plan: Plan, takes: Mapping[StageRunId, float], on: Sequence[scheduling.Capacity], among: Collection[StageRunId]
) -> float:
    """Return the lower bound of `Scheduler.least_s` in a sixth of the time."""
    runs = plan.stage_runs
    ends: dict[StageRunId, float] = {}
    work: dict[Resources, list[float]] = {}
    for run_id, run in runs.items():  # after all its needs
        if run_id in among:
            seconds, begin, service = takes[run_id], 0.0, _service(plan, run)
            for each in run.needs:
                if (end := ends.get(each, 0.0)) > begin:
                    begin = end
            ends[run_id] = begin + seconds
            resources = plan.resources(run)
            measures, holder = resources.exclusive.alone, run
            if service is not None:  # inside it, one after another
                ends[service], holder = ends[run_id], runs[service]
                resources = plan.resources(holder)
            if (
                not (service is not None and measures)
                and scheduling.may_overlap(resources, on)
                and is_known(holder.stage, holder.first_cell)
            ):
                seconds /= 2  # as two do at a time
            work.setdefault(resources, [0.0])[0] += seconds
    total = {resources: seconds for resources, (seconds,) in work.items()}
    return max(scheduling.work_s(total, on), max(ends.values(), default=0.0))


def _service(plan: Plan, run: StageRun) -> StageRunId | None:
    """Return the service that a stage run runs inside."""
    for up in run.inputs.values():
        if plan.stage_runs[up].stage.scope is Scope.SERVICE:
            return up
    return None


def tasks(
    plan: Plan,
    among: Collection[StageRunId],
    takes: Callable[[StageRun], float],
    corrections: Corrections | None = None,
    on: Sequence[scheduling.Capacity] = (),
) -> Iterator[scheduling.Task]:
    """Return the scheduler tasks of `among` on the nodes `on`. `corrections` are for memory needs."""
    order = {cell.id: number for number, cell in enumerate(plan.cells)} if among else {}
    corrections = corrections or Corrections((), plan.machine)
    host = plan.machine.memory_bytes if len(on) == 1 else None  # unknown for the nodes of a cluster
    limit = None if host is None else (on[0].cpus, host)
    for run in plan.stage_runs.values():
        if run.id not in among:
            continue
        settings, resources = section(run), plan.resources(run)
        service = run.stage.scope is Scope.SERVICE
        memory = _memory(run, plan.machine, corrections) if service or limit else {}
        if limit and HOST in memory and (slots := _slots(memory[HOST].value, *limit)) > resources.cpus:
            resources = replace(resources, cpus=slots)
        yield scheduling.Task(
            id=run.id,
            needs=tuple(each for each in run.needs if each in among),
            scope=run.stage.scope,
            service=_service(plan, run),
            resources=resources,
            expected_s=takes(run),
            retries=run.stage.retries if settings.get("retries") is None else int(str(settings["retries"])),
            order=order[run.first_cell.id],
            memory=_at_most(memory) if service else None,
        )


def _memory(run: StageRun, machine: Machine, corrections: Corrections) -> dict[str, Estimate]:
    """Return the known memory needs of a stage run by resource."""
    return {need.resource: need.estimate for need in of_run(run, machine, corrections)}


def _at_most(memory: Mapping[str, Estimate]) -> tuple[int, int] | None:
    """Return the maximum host memory and /dev/shm. None if unknown."""
    shared = memory.get(SHARED)
    return (memory[HOST].most, 0 if shared is None else shared.most) if HOST in memory else None


def _slots(host: int, cpus: int, memory: int) -> int:
    """Return its share of the machine's memory in CPU slots, so that stage runs that do not fit together do not run together.

    0 for less than a slot: stage runs that need no CPU are limited otherwise.
    """
    return 0 if host * cpus < memory else min(cpus, -(-host * cpus // memory))


def section(run: StageRun) -> Mapping[str, Json]:
    """Return the settings section of a stage run's stage."""
    return run.first_cell.settings[run.stage.section or run.stage.name]
