"""The forecast of a run: time, disk and memory.

The time comes from the scheduler, simulated on expected durations: formulas of the model, the machine and the release,
corrected by earlier runs. A `ForecastCheck` compares the forecast with the actual time and memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trtllm_pipeline.base import Fingerprint, Json, Machine, Scope, StageRunId, duration, read_object, size
from trtllm_pipeline.models import sources
from trtllm_pipeline.orchestrate.memory.estimates import KINDS, TIME, Corrections, Estimate, Need
from trtllm_pipeline.orchestrate.plan.plan import Plan, StageRun, of_plan, of_run, to_run
from trtllm_pipeline.orchestrate.plan.plan_file import action, commands_of, plan_lines
from trtllm_pipeline.orchestrate.plan.stage_status import RERUN, reasons
from trtllm_pipeline.orchestrate.run import scheduler as scheduling
from trtllm_pipeline.orchestrate.run.order import capacities, section, section_name, simulate
from trtllm_pipeline.orchestrate.store.index import Artifact, prefixes
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.tensorrt import PARTIAL
from trtllm_pipeline.tensorrt import params as stage_params

if TYPE_CHECKING:
    from trtllm_pipeline.orchestrate.store.remote_store import ArtifactTransfer


@dataclass(frozen=True, slots=True)
class Offers:
    """Artifacts of a plan in a remote store."""

    url: str
    pulls: Mapping[StageRunId, ArtifactTransfer] = field(default_factory=dict)
    """Needed and available."""
    refused: Mapping[StageRunId, ArtifactTransfer] = field(default_factory=dict)
    """Available but not usable."""
    fault: str | None = None
    """Why the remote store cannot be read."""

    @property
    def size_bytes(self) -> int:
        return sum(each.transfer_bytes for each in self.pulls.values())


_GUESS_ERROR: Final = 0.6
"""Relative error of a time formula (docs/project/estimates.md)."""
_KNOWN_ERROR: Final = 0.3
"""Relative error of a duration measured on an unknown system."""
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

    def learn(self, run: StageRun, seconds: float) -> None:
        for label in (*prefixes(run.label), _ALL):
            took_s, guessed_s = self._here.get(label, (0.0, 0.0))
            self._here[label] = (took_s + seconds, guessed_s + self.guess(run))

    def guess(self, run: StageRun) -> float:
        """Return `guess_s`, computed once: learning calls it repeatedly."""
        if run.id not in self._guesses:
            self._guesses[run.id] = guess_s(run, self._machine)
        return self._guesses[run.id]

    def of(self, run: StageRun) -> float | None:
        """Return the known duration. None if no comparable run exists. Another model's time is not comparable if size matters."""
        known = list(prefixes(run.label))
        for label in known[:-2] if _by_size(run) else known:
            if label in self._here:
                return self._scaled(run, label)
            if label in self._learnt:
                return self._learnt[label]
        return None

    def guessed(self, run: StageRun) -> float:
        """Return the formula's seconds, corrected by this run's results for comparable stage runs, else for all."""
        known = next((label for label in (*prefixes(run.label), _ALL) if label in self._here), None)
        return self.guess(run) if known is None else self._scaled(run, known)

    def _scaled(self, run: StageRun, label: str) -> float:
        took_s, guessed_s = self._here[label]
        return self.guess(run) * took_s / guessed_s

    def estimate(self, run: StageRun) -> Estimate:
        """Return the formula in milliseconds, corrected by similar systems. Without measurements: the known duration, or the formula."""
        formula = round(1000 * guess_s(run, self._machine))
        if self._corrections is not None:
            corrections = self._corrections.on(run.first_cell.gpu)
            corrected = corrections.of(run.label, TIME, formula, _GUESS_ERROR)
            if corrected.measured:
                return corrected
        known = self.of(run)
        return Estimate(formula, _GUESS_ERROR) if known is None else Estimate(round(1000 * known), _KNOWN_ERROR, 1)

    def expected(self, run: StageRun) -> float:
        return self.estimate(run).value / 1000


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
    if not isinstance(params, stage_params.DownloadParams):
        return 0
    folder = None if params.folder is None else Path(params.folder)
    return sources.kept_bytes(params.source, store.work_dir / PARTIAL, folder)


def durations(plan: Plan, forecast: Forecast) -> list[Need]:
    """Return the time of each stage run to run (a service: until ready) and its timeout, in milliseconds."""
    needs = []
    for run in (run for run in plan.stage_runs.values() if run.id in forecast.to_run):
        (_, limit), estimate = timeout(run), forecast.times[run.id]
        has = round(1000 * limit) if isinstance(limit, (int, float)) else None
        needs.append(Need(run.stage.name, run.first_cell.id, TIME, estimate, has, assumed=not estimate.measured))
    return needs


def timeout(run: StageRun) -> tuple[str, Json]:
    """Return the setting that limits the time of a stage run (a service: until ready), and its seconds."""
    if run.stage.scope is Scope.SERVICE:
        return f"settings.{section_name(run)}.ready_timeout_s", getattr(run.params, "ready_timeout_s", None)
    return f"settings.{section_name(run)}.timeout_s", section(run).get("timeout_s") or run.stage.timeout_s


def _free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of a directory, which may not exist yet."""
    return shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists())).free


def plan_json(plan: Plan, store: Store | None, forecast: Forecast, *, run_id: str | None = None) -> Iterator[str]:
    """Yield lines of the plan in its documented form with real command lines; `{attempt}` is only known at run time."""
    artifacts = "{workspace}/store" if store is None else str(store.artifacts_dir)
    return plan_lines(
        plan,
        present=forecast.present,
        to_run=forecast.to_run,
        reasons=forecast.reasons,
        times=forecast.durations.estimate,
        needs=lambda run: of_run(run, plan.machine, forecast.corrections),
        commands=commands_of(plan, lambda run: f"{artifacts}/{run.stage.name}/{run.fingerprint}/out"),
        pulls=forecast.pulls,
        run_id=run_id,
    )


@dataclass(frozen=True, slots=True)
class StageForecast:
    """Expected and actual use of one resource by a stage's runs: sum of milliseconds, or the largest in bytes."""

    stage: str
    resource: str
    stage_runs: int
    expected: int
    taken: int

    def __str__(self) -> str:
        verb, of = ("took ", "") if self.resource == TIME else ("", f" of {self.resource}")
        return f"{verb}{self._in_words(self.taken)}{of} (estimate {self._in_words(self.expected)})"

    def _in_words(self, value: int) -> str:
        return duration(value / 1000) if self.resource == TIME else size(value)


@dataclass(frozen=True, slots=True)
class ForecastCheck:
    """Forecast and actual use of one run."""

    expected_s: float | None
    """Wall-clock seconds of the whole run. None if it was incomplete or waited for other pipelines."""
    took_s: float
    stages: tuple[StageForecast, ...]
    """Entries in the order of the plan, time first."""

    def to_json(self) -> dict[str, Json]:
        return {
            "expected_s": None if self.expected_s is None else round(self.expected_s, 3),
            "took_s": round(self.took_s, 3),
            "stages": [asdict(stage) for stage in self.stages],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> ForecastCheck:
        """Read the JSON. Raises KeyError, TypeError, ValueError for anything else."""
        stages = tuple(StageForecast(**stage) for stage in data["stages"])
        numbers = (number for stage in stages for number in (stage.stage_runs, stage.expected, stage.taken))
        if not all(type(number) is int and number > 0 for number in numbers):
            raise ValueError("a forecast without numbers")
        expected_s = data["expected_s"]
        return ForecastCheck(None if expected_s is None else float(expected_s), float(data["took_s"]), stages)

    def line(self) -> str:
        took = f"Took {duration(self.took_s)}"
        return took if self.expected_s is None else f"{took} (estimate {duration(self.expected_s)})"

    def lines(self) -> list[str]:
        by_stage: dict[str, list[str]] = {}
        for each in self.stages:
            by_stage.setdefault(each.stage, []).append(str(each))
        return [f"{stage}: {'; '.join(entries)}" for stage, entries in by_stage.items()]


def of_report(path: Path) -> ForecastCheck | None:
    """The forecast in a run's report, or None."""
    with suppress(KeyError, TypeError, ValueError):
        return ForecastCheck.from_json((read_object(path) or {})["run"]["forecast"])
    return None


def checked(
    plan: Plan, forecast: Forecast, taken: Mapping[Fingerprint, Mapping[str, int]], took_s: float, *, comparable: bool
) -> ForecastCheck | None:
    """Compare the `forecast` with the actual use `taken` by stage runs of a plan, in bytes and milliseconds by kind. None if none ran.

    `comparable` is that of the `Outcome`.
    """
    pairs_by_resource: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for run in plan.stage_runs.values():
        if run.fingerprint not in taken or run.id not in forecast.times:
            continue
        took = taken[run.fingerprint]
        expected = [(TIME, forecast.times[run.id].value)]
        expected += [(need.resource, need.estimate.value) for need in of_run(run, plan.machine, forecast.corrections)]
        for resource, value in expected:
            if value and took.get(KINDS[resource]):
                pairs_by_resource.setdefault((run.stage.name, resource), []).append((value, took[KINDS[resource]]))
    if not pairs_by_resource:
        return None
    stages = []
    for (stage, resource), pairs in pairs_by_resource.items():
        total = tuple(map(sum, zip(*pairs, strict=True))) if resource == TIME else max(pairs, key=lambda pair: pair[1])
        stages.append(StageForecast(stage, resource, len(pairs), *total))
    return ForecastCheck(forecast.total_s if comparable else None, took_s, tuple(stages))
