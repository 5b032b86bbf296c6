"""Observers that write lines: for logs and pipes, and for programs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final, TextIO

from trtllm_pipeline.base import Cell, Json, Scope, StageError, StageRunId, StageStatus, count, duration, terminal
from trtllm_pipeline.orchestrate import Forecast, Nodes, Observer, Plan, StageRun
from trtllm_pipeline.show.progress import json_events, views
from trtllm_pipeline.show.progress.left import TimeLeft
from trtllm_pipeline.show.progress.tracker import NOTHING_TO_DO, Clock, Tracker

_S = StageStatus
_ANNOUNCE_AFTER_S: Final = 3.0
"""Stage runs that take longer are announced while they run."""


class QuietObserver(Observer):
    """Reports failures only. Like every observer, it publishes the time left for `pipeline status`."""

    _quiet_s = _ANNOUNCE_AFTER_S
    _tells_all = False
    """True if it also prints pulled artifacts and new nodes."""
    _run: str | None = None
    _time_left: TimeLeft | None = None
    _tracker: Tracker
    _planned: tuple[Plan, Forecast] | None = None
    """The plan and its forecast, until the run begins."""

    def __init__(self, stream: TextIO, clock: Clock = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self.reported: set[str] = set()
        """Reasons that were already printed. The summary after the run does not repeat them."""

    def enter(self, folder: Path) -> None:
        self._run = folder.name
        with suppress(OSError):  # the run's other files will report a full disk
            self._time_left = TimeLeft(folder)

    def leave(self, forecast: Mapping[str, Json] | None) -> None:  # noqa: ARG002  reports show it
        if self._time_left is not None:
            self._time_left.close()
        self._run = self._time_left = None

    def planned(self, plan: Plan, outlook: Forecast) -> None:
        self._planned = plan, outlook

    def begin(
        self,
        plan: Plan,
        statuses: Mapping[StageRunId, StageStatus],
        durations: Mapping[str, float],
        nodes: Nodes = tuple,
    ) -> None:
        self._tracker = Tracker(plan, statuses, durations, self._clock, nodes, quiet_s=self._quiet_s)
        self._begun()
        self._planned = None  # cells that are retried are no news

    def _begun(self) -> None:
        """Show the start of the run, from the tracker."""

    def _doubts(self) -> list[str]:
        """Lines about what the plan warns of."""
        if self._planned is None:
            return []
        from trtllm_pipeline.show.report import plan_text  # other commands show progress without a plan

        return plan_text.doubts(*self._planned)

    def tick(self, progress: Mapping[StageRunId, Mapping[str, Json]]) -> None:  # noqa: ARG002  not shown
        """Publish the time left."""
        if self._tracker.estimate() and self._time_left is not None and (left := self._tracker.left()) is not None:
            with suppress(OSError):
                self._time_left.write(*left)

    def changed(self, run: StageRun, status: StageStatus, error: StageError | None, seconds: float | None) -> None:
        self._tracker.changed(run, status, seconds)
        if status is _S.FAILED:
            self._say(*self._failure(run, error, seconds))

    def pulling(self, message: str, *, wrong: bool = False) -> None:
        if wrong or self._tells_all:
            self._say(message)

    def node(self, name: str, *, gone: bool) -> None:
        if gone or self._tells_all:
            self._say(views.node_change(name, gone=gone))

    def retrying(self, cells: Sequence[Cell]) -> None:
        self._say(*views.retries(cells))

    def _failure(self, run: StageRun, error: StageError | None, seconds: float | None) -> list[str]:
        return views.failure(run, error, seconds, self.reported)

    def _say(self, *lines: str) -> None:
        self._stream.write(terminal.clean("".join(f"{line}\n" for line in lines)))
        self._stream.flush()


class PlainObserver(QuietObserver):
    """Prints one line per event. Long stage runs and the time left are announced every minute, with progress."""

    _tells_all = True

    def _begun(self) -> None:
        """Print the amount of work."""
        tracker = self._tracker
        self._reminded: dict[StageRunId, float] = {}
        """Running time of a stage run when it was last mentioned, in seconds."""
        self._silent: Counter[StageStatus] = Counter()
        """Changes printed together in one line: a failed download may block thousands of stage runs."""
        work = f"{tracker.counts[_S.UP_TO_DATE]} up to date, {tracker.to_do} to do" if tracker.to_do else NOTHING_TO_DO
        cells = tracker.plan.cells
        head = f"{count(len(cells), 'cell')}, {count(len(tracker.statuses), 'stage run')}: {work}"
        self._say(head, *views.infeasible(cells, self.reported), *self._doubts())

    def changed(self, run: StageRun, status: StageStatus, error: StageError | None, seconds: float | None) -> None:
        self._tracker.changed(run, status, seconds)
        self._reminded.pop(run.id, None)
        if status in {_S.BLOCKED, _S.CANCELLED, _S.SKIPPED}:
            self._silent[status] += 1
            return
        self._say_silent()
        if status is _S.FAILED:
            first, *rest = self._failure(run, error, seconds)
            self._say(f"{self._place()} {first}", *rest)
        elif status is _S.UP_TO_DATE:
            self._say_of(run, "done by another process")
        elif status is _S.SUCCEEDED:
            word = "stopped after" if run.stage.scope is Scope.SERVICE else "done in"
            self._say_of(run, f"{word} {duration(seconds or 0.0)}")

    def waiting(self, run: StageRun, why: str) -> None:
        self._say_of(run, f"waiting: {why}")

    def tick(self, progress: Mapping[StageRunId, Mapping[str, Json]]) -> None:
        """Print long-running stage runs."""
        super().tick(progress)
        self._say_silent()
        for run, seconds in self._tracker.running():
            last = self._reminded.get(run.id)
            if seconds < (_ANNOUNCE_AFTER_S if last is None else last + views.REMIND_EVERY_S):
                continue
            self._reminded[run.id] = seconds
            parts = [f"{self._tracker.verb(run)} for {duration(seconds)}"]
            parts += [text] if (text := views.progress_text(progress.get(run.id))) else []
            self._say_of(run, ", ".join(parts))
        if self._tracker.is_due(views.REMIND_EVERY_S) and (left := self._tracker.left_text()):
            self._say(f"{self._place()} {left}")

    def end(self) -> None:
        self._say_silent()
        if self._tracker.to_do:
            self._say(f"{', '.join(self._tracker.summary())}, in {duration(self._tracker.elapsed_s)}")

    def _say_of(self, run: StageRun, text: str) -> None:
        self._say(f"{self._place()} {run.id}  {views.who(run)}  {text}")

    def _place(self) -> str:
        return f"[{self._tracker.ended}/{self._tracker.to_do}]"

    def _say_silent(self) -> None:
        blocked, cancelled = self._silent[_S.BLOCKED], self._silent[_S.CANCELLED]
        self._silent.clear()
        if blocked:
            self._say(f"{self._place()} {count(blocked, 'stage run')} blocked by failures")
        if cancelled:
            self._say(f"{self._place()} {count(cancelled, 'stage run')} not finished")


class JsonObserver(QuietObserver):
    """One JSON object per line, see docs/reference/formats.md. The first event about a stage run also lists its cells."""

    def _begun(self) -> None:
        """The event `begin`."""
        plan = self._tracker.plan
        self._last_progress_s: dict[StageRunId, float] = {}
        self._retries: dict[StageRunId, list[str]] = {}
        """Changes of stage runs that wait for another process. They retry five times a second, mostly without success."""
        self._stage_runs = json_events.StageRuns()
        never: dict[str, Json] = {cell.id: cell.reason for cell in plan.cells if cell.reason is not None}
        cells: list[Json] = [cell.id for cell in plan.cells]
        amounts: dict[str, Json] = {"stage_runs": len(self._tracker.statuses), "to_do": self._tracker.to_do}
        self._event("begin", schema=json_events.SCHEMA, run=self._run, cells=cells, infeasible=never, **amounts)

    def changed(self, run: StageRun, status: StageStatus, error: StageError | None, seconds: float | None) -> None:
        self._tracker.changed(run, status, seconds)
        self._last_progress_s.pop(run.id, None)
        fields: dict[str, Json] = {**self._named(run), "status": status.value, "seconds": seconds}
        if error is not None:
            fields |= {"failure": error.failure.value, "message": error.message, "hint": error.hint}
            fields["log"] = None if error.log is None else str(error.log)
            fields |= {"line": error.line, "setting": error.setting}
        event = json_events.event("changed", **fields)
        retry = self._retries.get(run.id)
        if retry is not None and status is _S.ELSEWHERE:
            retry.clear()
        elif retry is not None and status in {_S.PENDING, _S.RUNNING}:
            retry.append(event)
        else:
            self._say(*self._retries.pop(run.id, ()), event)
            if status is _S.ELSEWHERE:
                self._retries[run.id] = []

    def waiting(self, run: StageRun, why: str) -> None:
        self._event("waiting", **self._named(run), why=why)

    def tick(self, progress: Mapping[StageRunId, Mapping[str, Json]]) -> None:
        """The events `progress` and `left`."""
        super().tick(progress)
        for run_id in [run_id for run_id, retry in self._retries.items() if retry]:
            self._say(*self._retries.pop(run_id))
        now = self._clock()
        for run_id, values in progress.items():
            if now - self._last_progress_s.get(run_id, float("-inf")) >= 1.0:
                self._last_progress_s[run_id] = now
                self._event("progress", **self._named(self._tracker.plan.stage_runs[run_id]), **values)
        if self._tracker.is_due(views.REMIND_EVERY_S) and (left := self._tracker.left()) is not None:
            self._event("left", **json_events.left(*left))

    def pulling(self, message: str, *, wrong: bool = False) -> None:
        self._event("pulling", message=message, wrong=wrong)

    def node(self, name: str, *, gone: bool) -> None:
        self._event("node", node=name, gone=gone)

    def retrying(self, cells: Sequence[Cell]) -> None:
        for cell in cells:
            self._event("retrying", cell=cell.id, changes=[asdict(change) for change in cell.changes])

    def end(self) -> None:
        counts: dict[str, Json] = {status.value: number for status, number in self._tracker.counts.items() if number}
        self._event("end", seconds=round(self._tracker.elapsed_s, 3), counts=counts)

    def leave(self, forecast: Mapping[str, Json] | None) -> None:
        super().leave(forecast)
        if forecast is not None:
            self._event("forecast", **forecast)

    def _event(self, event: str, **fields: Json) -> None:
        self._say(json_events.event(event, **fields))

    def _named(self, run: StageRun) -> dict[str, Json]:
        return self._stage_runs.named(run.id, run.stage.name, run.cells)
