"""The state of a running run: statuses, times, and the expected time left. Prints nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final

from trtllm_pipeline.base import Scope, StageRunId, StageStatus, count
from trtllm_pipeline.orchestrate import Nodes, Plan, StageRun, forecast, order, overdue
from trtllm_pipeline.show.progress.views import GOOD, time_left

Clock = Callable[[], float]
_S = StageStatus
NOTHING_TO_DO: Final = "nothing to do: everything is up to date"
_ESTIMATE_S: Final = 1.0
"""Interval between estimates of the time left."""
_ESTIMATES: Final = 0.01
"""Maximum share of the run's time for estimates."""
ENDED: Final = frozenset({*GOOD, _S.FAILED, _S.BLOCKED, _S.CANCELLED})


class Tracker:
    """The state of a run so far: statuses, times, and the expected time left."""

    def __init__(
        self,
        plan: Plan,
        statuses: Mapping[StageRunId, StageStatus],
        durations: Mapping[str, float],
        clock: Clock = time.monotonic,
        nodes: Nodes = tuple,
        *,
        quiet_s: float = 0.0,
    ) -> None:
        """Track a plan that starts now. Estimates start after `quiet_s`, so that short runs do not pay for them."""
        self.plan = plan
        self.statuses = dict(statuses)
        self.started: dict[StageRunId, float] = {}
        self._why: dict[StageRunId, tuple[StageStatus, str]] = {}
        """Reason and status of waiting stage runs."""
        self.failed: dict[StageRunId, None] = {}
        """Failed stage runs, in order of failure."""
        self.counts = Counter(statuses.values())
        self.by_stage = Counter((plan.stage_runs[run].stage.name, status) for run, status in statuses.items())
        self.by_group: Counter[tuple[str, str, StageStatus]] = Counter()
        """Counts by group of cells, if groups are set."""
        self._groups: Mapping[StageRunId, Collection[str]] = {}
        self._clock = clock
        self._began = self._due_since = clock()
        self._nodes = nodes
        self._durations = forecast.Durations(durations, plan.machine)
        """Seconds by label, from earlier runs and this one."""
        self._estimate_at = self._began + quiet_s
        self._expected: tuple[float, bool] | None = None
        """Expected end time of the run, and whether it is reliable."""
        self._ready: set[StageRunId] = set()
        self._good_before = sum(self.counts[status] for status in GOOD)
        self.to_do = len(statuses) - self._good_before
        """Stage runs that were neither up to date nor unneeded when the run started."""

    def changed(self, run: StageRun, status: StageStatus, seconds: float | None) -> None:
        now = self._clock()
        for each, change in ((self.statuses[run.id], -1), (status, 1)):
            self.counts[each] += change
            self.by_stage[run.stage.name, each] += change
            for group in self._groups.get(run.id, ()):
                self.by_group[group, run.stage.name, each] += change
        self.statuses[run.id] = status
        if status in ENDED:
            self._why.pop(run.id, None)
        self._ready.discard(run.id)
        if status is _S.RUNNING:
            self.started[run.id] = now
            service = run.inputs.get("service")
            if service in self.started and service not in self._ready:
                self._ready.add(service)
                self._durations.learn(self.plan.stage_runs[service], now - self.started[service])
        elif (
            (began := self.started.pop(run.id, None)) is not None
            and status is _S.SUCCEEDED
            and run.stage.scope is not Scope.SERVICE
        ):
            self._durations.learn(run, now - began if seconds is None else seconds)
        if status is _S.FAILED:
            self.failed[run.id] = None
        if status is _S.CANCELLED:  # already part of the estimate
            self._estimate_at, self._expected = now, None

    def group(self, groups: Mapping[StageRunId, Collection[str]]) -> None:
        """Count by these groups from now on. Maps each stage run to its groups."""
        self._groups = groups
        stages = {run: self.plan.stage_runs[run].stage.name for run in groups}
        self.by_group = Counter(
            (group, stages[run], self.statuses[run]) for run, of_run in groups.items() for group in of_run
        )

    def waits(self, run: StageRun, why: str) -> None:
        """Record that a stage run waits for a retry or for another invocation."""
        about_to = self.statuses[run.id] is _S.RUNNING
        self._why[run.id] = (_S.ELSEWHERE if about_to else _S.PENDING, why)

    @property
    def waiting(self) -> dict[StageRunId, str]:
        return {run: why for run, (status, why) in self._why.items() if self.statuses[run] is status}

    @property
    def done(self) -> int:
        """Number of stage runs of `to_do` that succeeded or turned out not to be needed."""
        return sum(self.counts[status] for status in GOOD) - self._good_before

    @property
    def ended(self) -> int:
        """Number of stage runs of `to_do` that ended, successfully or not."""
        return self.done + sum(self.counts[status] for status in ENDED - GOOD)

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._began

    def is_due(self, every_s: float) -> bool:
        """True if a periodic message is due: one period after the start, and after each message."""
        due = (now := self._clock()) - self._due_since >= every_s
        if due:
            self._due_since = now
        return due

    def verb(self, run: StageRun) -> str:
        """The activity of a running stage run. A service is "starting" until a stage has run against it."""
        if run.stage.scope is not Scope.SERVICE:
            return "running"
        return "up" if run.id in self._ready else "starting"

    def running(self) -> Iterator[tuple[StageRun, float]]:
        """Running stage runs and their seconds, oldest first. Includes services only while no stage runs against them."""
        now = self._clock()
        services = {self.plan.stage_runs[run_id].inputs.get("service") for run_id in self.started}
        for run_id, began in self.started.items():
            if run_id not in services:
                yield self.plan.stage_runs[run_id], now - began

    def left_s(self) -> tuple[float, bool]:
        """Expected seconds until the end, and whether they are reliable: False if no comparable work has run yet.

        Simulates the scheduler for unfinished stage runs, minus their running time. An overdue stage run is expected to take
        as long again, as in the scheduler. Stage runs without history use a formula, scaled by how long similar
        (otherwise all) finished stage runs took compared with it.
        """
        now = self._clock()
        rest: dict[StageRunId, float] = {}
        complete = True
        for run in self.plan.stage_runs.values():
            # Another invocation's work may be complete when its service has ended.
            if self.statuses[run.id] in ENDED or self.statuses[run.inputs.get("service", run.id)] in ENDED:
                continue
            expected = self._durations.of(run)
            if expected is None:
                # The start time of servers is learned from the first one, and is short compared with the stages that use it.
                complete = complete and run.stage.scope is Scope.SERVICE
                expected = self._durations.guessed(run)
            so_far = max(0.0, now - self.started.get(run.id, now))
            rest_s = so_far if overdue(so_far, expected) else max(0.0, expected - so_far)
            rest[run.id] = 0.0 if run.id in self._ready else rest_s
        nodes = self._nodes() or order.capacities(self.plan.machine)
        return order.simulate(self.plan, rest, nodes, rest, running=self.started), complete

    def estimate(self) -> bool:
        """Estimate the time left if due. Returns whether `left` changed."""
        began = self._clock()
        if began < self._estimate_at:
            return False
        seconds, complete = self.left_s()
        self._expected = began + seconds, complete
        now = self._clock()
        self._estimate_at = now + max(_ESTIMATE_S, (now - began) / _ESTIMATES)
        return True

    def left(self) -> tuple[float, bool] | None:
        """Like `left_s`, counted down from the last estimate. None before the first."""
        if self._expected is None:
            return None
        end_s, complete = self._expected
        return max(0.0, end_s - self._clock()), complete

    def left_text(self) -> str:
        """The time left in words, empty for less than a second."""
        left = self.left()
        return "" if left is None else time_left(*left)

    def summary(self) -> list[str]:
        """Counts of the stage runs to do, in words."""
        words = {_S.RUNNING: "running", _S.ELSEWHERE: "waiting", _S.FAILED: "failed", _S.BLOCKED: "blocked"}
        words[_S.CANCELLED] = "not finished"
        others = [f"{self.counts[status]} {word}" for status, word in words.items() if self.counts[status]]
        return [f"{self.done} of {count(self.to_do, 'stage run')} done", *others]
