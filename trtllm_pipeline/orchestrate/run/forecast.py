"""What running a plan will take: time, disk and memory.

The time is the scheduler's own, played on expected durations: formulas of the model, the machine and the release, corrected by
what earlier runs took.
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
from trtllm_pipeline.orchestrate.plan.reasons import reasons
from trtllm_pipeline.orchestrate.run import scheduler as scheduling
from trtllm_pipeline.orchestrate.run.order import FIRST, play
from trtllm_pipeline.orchestrate.store.index import Artifact
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.tensorrt import PARTIAL, DownloadParams

if TYPE_CHECKING:
    from trtllm_pipeline.orchestrate.run.pulling import Offers

_GUESS_ERROR: Final = 0.6
"""Share by which a formula for time may be wrong (docs/memory.md)."""
_KNOWN_ERROR: Final = 0.3
"""The same for what a stage run took on a system of which nothing is known."""
_MOST_SIMULATED: Final = 2_000
"""Larger plans are not played on a simulated clock: the scheduler takes 1% to 4% longer than the bound of `least_s`, less
than the error of the durations."""
_ALL: Final = ""
"""The label of everything."""


class Durations:
    """Seconds that stage runs take, by label from coarse to fine: as `learnt` earlier.

    Above that by what was shown now of the formula: the same label has engines of several sizes.
    """

    def __init__(self, learnt: Mapping[str, float], machine: Machine, corrections: Corrections | None = None) -> None:
        self._learnt = learnt
        self._corrections = corrections
        self._machine = machine
        self._here: dict[str, tuple[float, float]] = {}
        """Seconds taken, and guessed."""
        self._guesses: dict[StageRunId, float] = {}
        self._estimates: dict[tuple[str, int], Estimate] = {}

    def learn(self, run: StageRun, seconds: float) -> None:
        """Take in what a stage run took."""
        self._estimates.clear()
        for label in (*_labels(run), _ALL):
            took_s, guessed_s = self._here.get(label, (0.0, 0.0))
            self._here[label] = (took_s + seconds, guessed_s + self.guess(run))

    def guess(self, run: StageRun) -> float:
        """As `guess_s`, made once: whoever learns asks again and again."""
        if run.id not in self._guesses:
            self._guesses[run.id] = guess_s(run, self._machine)
        return self._guesses[run.id]

    def of(self, run: StageRun) -> float | None:
        """What is known; None where nothing like it ever ran. What another model took says nothing of one of any size."""
        known = list(_labels(run))
        for label in known[:-2] if _by_size(run) else known:
            took_s, guessed_s = self._here.get(label, (0.0, 0.0))
            if guessed_s:
                return self.guess(run) * took_s / guessed_s
            if label in self._learnt:
                return self._learnt[label]
        return None

    def guessed(self, run: StageRun) -> float:
        """By the formula, and by what was shown now of it: for what is like this, else for all."""
        for label in (*_labels(run), _ALL):
            took_s, guessed_s = self._here.get(label, (0.0, 0.0))
            if guessed_s:
                return self.guess(run) * took_s / guessed_s
        return self.guess(run)

    def estimate(self, run: StageRun) -> Estimate:
        """The formula in milliseconds, corrected by what was measured on systems like this; else what is known, or the formula."""
        formula = round(1000 * guess_s(run, self._machine))
        same = run.label, formula
        found = self._estimates.get(same)
        if found is None:
            found = self._estimates[same] = self._estimate(run, formula)
        return found

    def _estimate(self, run: StageRun, formula: int) -> Estimate:
        if self._corrections is not None:
            corrections = self._corrections.on(run.first_cell.gpu)
            found = corrections.of(run.label, TIME, formula, _GUESS_ERROR)
            if found.measured:
                return found
        known = self.of(run)
        return Estimate(formula, _GUESS_ERROR) if known is None else Estimate(round(1000 * known), _KNOWN_ERROR, 1)

    def expected(self, run: StageRun) -> float:
        """Its seconds."""
        return self.estimate(run).value / 1000


def _labels(run: StageRun) -> Iterator[str]:
    """stage/toolchain/model/precision, with the type of GPU where the cell names one, and each prefix."""
    label = run.label
    while label:
        yield label
        label = label.rpartition("/")[0]


def _by_size(run: StageRun) -> bool:
    """Whether a stage run takes longer for a larger model, and the size of this one is known."""
    return run.stage.takes is not None and "num_hidden_layers" in run.first_cell.recipe


def guess_s(run: StageRun, machine: Machine) -> float:
    """Seconds that a stage run takes by its formula, before any correction."""
    stage = run.stage
    return stage.expected_s + (
        stage.takes(run.first_cell, machine.of(run.first_cell.gpu))
        if stage.takes is not None and _by_size(run)
        else 0.0
    )


@dataclass(frozen=True, slots=True)
class Forecast:
    """What running a plan now would do, and take."""

    present: frozenset[StageRunId]
    to_run: frozenset[StageRunId]
    reasons: Mapping[StageRunId, str]
    """Why each of `to_run` has to run."""
    expected_s: Mapping[StageRunId, float]
    """Of each of `to_run`."""
    times: Mapping[StageRunId, Estimate]
    """The same, in milliseconds with their error."""
    durations: Durations
    """What both follow from."""
    total_s: float
    """Wall-clock seconds of the whole, from the same scheduler that will run it."""
    guessed: int
    """How many of `to_run` have durations by a guess, since nothing like them ever ran in this workspace."""
    needs: tuple[Need, ...]
    """Memory that each of `to_run` takes, and disk that all of them do, beside what there is."""
    corrections: Corrections
    """What was measured in this workspace."""
    offers: Offers | None = None
    """What a remote store has, if one was asked. The rest is as after what is pulled from there."""
    pulls: Mapping[StageRunId, int] = field(default_factory=dict)
    """Bytes of what is pulled."""

    def action(self, run: StageRunId) -> str:
        """What becomes of a stage run, as in a plan's JSON."""
        return action(run, self.to_run, self.present, self.pulls)


def forecast(
    plan: Plan,
    store: Store | None,
    present: Mapping[Fingerprint, Artifact] | None = None,
    *,
    workspace: Path | None = None,
    offers: Offers | None = None,
    nodes: Sequence[scheduling.Capacity] = (),
) -> Forecast:
    """What running `plan` now would do, why, and what it takes. `present` is what the store has, if that is known.

    Where there is no store yet, `workspace` is where it would be. `offers` is what a remote store has. Without `nodes` it runs
    on the plan's machine.
    """
    runs = plan.stage_runs.values()
    if present is None:
        present = {} if store is None else store.present({run.fingerprint: run.stage.name for run in runs})
    corrections = Corrections(store.index.peaks() if store is not None else (), plan.machine)
    durations = Durations(store.index.durations() if store is not None else {}, plan.machine, corrections)
    folder = workspace if store is None else store.workspace
    free = None if folder is None or plan.machine.assumed else _free_bytes(folder.absolute())
    there = frozenset(run.id for run in runs if run.fingerprint in present)
    pulls = {} if offers is None else {run: each.transfer_bytes for run, each in offers.pulls.items()}
    after = there.union(pulls)
    todo = frozenset(to_run(plan, lambda run: run.id in after))
    times = {run.id: durations.estimate(run) for run in runs if run.id in todo}
    expected_s = {run: estimate.value / 1000 for run, estimate in times.items()}
    fetched = {} if store is None else {run: _fetched(plan.stage_runs[run], store) for run in todo}
    return Forecast(
        there,
        todo,
        reasons(plan, times, store),
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
    """Bytes of a download that are on the disk already."""
    params = run.params
    if not isinstance(params, DownloadParams):
        return 0
    folder = None if params.folder is None else Path(params.folder)
    return kept_bytes(params.source, store.work_dir / PARTIAL, folder)


def durations(plan: Plan, seen: Forecast, *, every: bool = True) -> list[Need]:
    """Time that the stage runs to run take, beside its limit; without `every`, of each stage the longest."""
    todo = [run for run in plan.stage_runs.values() if run.id in seen.to_run]
    if not every:
        longest: dict[str, StageRun] = {}
        for run in todo:
            known = longest.get(run.stage.name)
            if known is None or seen.times[run.id].value > seen.times[known.id].value:
                longest[run.stage.name] = run
        todo = list(longest.values())
    return [_duration(run, seen.times[run.id]) for run in todo]


def _duration(run: StageRun, estimate: Estimate) -> Need:
    """The time of a stage run beside its limit, a service's until it is ready; both in milliseconds."""
    limit: Json = section(run).get("timeout_s") or run.stage.timeout_s
    if run.stage.scope is Scope.SERVICE:
        limit = getattr(run.params, "ready_timeout_s", None)
    has = round(1000 * limit) if isinstance(limit, (int, float)) else None
    return Need(run.stage.name, run.first_cell.id, TIME, estimate, has, assumed=not estimate.measured)


def _free_bytes(folder: Path) -> int:
    """Free on the disk of a directory, or of where it would be made."""
    return shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists())).free


def capacity(machine: Machine) -> scheduling.Capacity:
    """What `machine` has to hand out: whole GPUs by name, slots of CPUs."""
    host, shared = machine.memory_bytes, machine.shared_bytes
    return scheduling.Capacity(
        cpus=machine.cpus,
        gpus=tuple(gpu.uuid for gpu in machine.gpus),
        memory=None if host is None or shared is None else (host, shared),
    )


def capacities(machine: Machine) -> list[scheduling.Capacity]:
    """That of `machine`; where it stands for several types of GPU, of this machine and one node of each."""
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
    """Wall-clock seconds that running `among` of `plan` on the nodes `on` takes, if each `takes` these seconds.

    Stage runs that are `running` already start first.
    """
    if len(among) > _MOST_SIMULATED:
        return least_s(plan, takes, on, among)
    known = list(tasks(plan, among, lambda run: takes[run.id], corrections, on))
    return play(known, scheduling.Scheduler(known, *on, favour=dict.fromkeys(running, FIRST)))


def least_s(
    plan: Plan, takes: Mapping[StageRunId, float], on: Sequence[scheduling.Capacity], among: Collection[StageRunId]
) -> float:
    """As `Scheduler.least_s`, in a sixth of the time: seconds that no schedule undercuts."""
    runs = plan.stage_runs
    ends: dict[StageRunId, float] = {}
    work: dict[Resources, list[float]] = {}
    for run_id, run in runs.items():  # after everything it needs
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
    """The service that a stage run runs inside."""
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
    """What of the plan is to run, `among`, as the scheduler sees it on the nodes `on`; `corrections` are for what it needs of memory."""
    order = {cell.id: number for number, cell in enumerate(plan.cells)} if among else {}
    corrections = corrections or Corrections((), plan.machine)
    host = plan.machine.memory_bytes if len(on) == 1 else None  # nobody knows that of a cluster's nodes
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
    """What a stage run takes, by resource, as far as it is known."""
    return {need.resource: need.estimate for need in of_run(run, machine, corrections)}


def _at_most(memory: Mapping[str, Estimate]) -> tuple[int, int] | None:
    """Of the host's memory and of /dev/shm; None where that is not known."""
    shared = memory.get(SHARED)
    return (memory[HOST].most, 0 if shared is None else shared.most) if HOST in memory else None


def _slots(host: int, cpus: int, memory: int) -> int:
    """The share that it has of a machine's memory, in slots of its CPUs: what does not fit there together cannot run together.

    None for less than a slot: what asks for no CPU is limited otherwise.
    """
    return 0 if host * cpus < memory else min(cpus, -(-host * cpus // memory))


def section(run: StageRun) -> Mapping[str, Json]:
    """The settings section of a stage run's stage."""
    return run.first_cell.settings[run.stage.section or run.stage.name]
