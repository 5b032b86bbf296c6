"""Observers of a run: what a person, or a program, sees of it on stderr while it goes on.

    live     a picture of cells x stages that is drawn over; what failed is printed above it and stays
    plain    a line an event, for logs and pipes
    quiet    failures only
    json     one JSON object a line, each with `event` and `time_s` (Unix time):
               begin      cells, infeasible: {id: reason}, stage_runs, to_do
               changed    stage_run, stage, cells, status (see domain.StageStatus), seconds, and for failures
                          failure, message, hint, log
               waiting    stage_run, stage, cells, why
               progress   stage_run, stage, cells, done, total, unit; at most one a second for each stage run
               end        seconds, counts: {status: stage runs}

What they all know about the run is in `Tracker`.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TextIO

from trtllm_pipeline.domain import CellId, Json, Scope, StageRunId, StageStatus
from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.executors.base import tail
from trtllm_pipeline.plan import Plan, StageRun
from trtllm_pipeline.report.grid import LOOKS, grid, legend, symbol
from trtllm_pipeline.report.names import amount, count, duration, shared_parts, shorten, without

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.text import Text

    from trtllm_pipeline.execution import Observer

Mode = Literal["auto", "live", "plain", "json", "quiet"]
Clock = Callable[[], float]

_S = StageStatus
_GOOD: Final = frozenset({_S.SUCCEEDED, _S.UP_TO_DATE, _S.SKIPPED})
_ENDED: Final = frozenset({*_GOOD, _S.FAILED, _S.BLOCKED, _S.CANCELLED})
_LOG_LINES: Final = 10
_MAX_LISTED: Final = 10
_ANNOUNCE_AFTER_S: Final = 3.0
"""What takes longer is announced while it runs, in plain lines."""
_REMIND_EVERY_S: Final = 60.0
_REDRAW_S: Final = 0.15


def observer(stream: TextIO, *, mode: Mode = "auto") -> Observer:
    """The observer for `mode`. "auto" is live when `stream` is a terminal that can redraw and nobody set CI."""
    if mode == "auto":
        dumb = os.environ.get("TERM", "") in {"", "dumb", "unknown"} or bool(os.environ.get("CI"))
        mode = "live" if stream.isatty() and not dumb else "plain"
    return {"live": LiveObserver, "plain": PlainObserver, "json": JsonObserver, "quiet": QuietObserver}[mode](stream)


class _Durations:
    """Expected seconds by label, coarse to fine: what was learnt before, and above it what this run itself showed."""

    def __init__(self, learnt: Mapping[str, float]) -> None:
        self._learnt = learnt
        self._here: dict[str, tuple[float, int]] = {}

    def learn(self, run: StageRun, seconds: float) -> None:
        for label in _labels(run):
            total, number = self._here.get(label, (0.0, 0))
            self._here[label] = (total + seconds, number + 1)

    def of(self, run: StageRun) -> float | None:
        for label in _labels(run):
            if label in self._here:
                total, number = self._here[label]
                return total / number
            if label in self._learnt:
                return self._learnt[label]
        return None


def _labels(run: StageRun) -> Iterator[str]:
    label = run.label
    while label:
        yield label
        label = label.rpartition("/")[0]


class Tracker:
    """What is known of a run so far: statuses, times, and how long the rest may take."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._busy_s = 0.0
        self._good_before = 0
        self._durations = _Durations({})
        self._ready: set[StageRunId] = set()
        self.plan = Plan((), {}, {})
        self.statuses: dict[StageRunId, StageStatus] = {}
        self.started: dict[StageRunId, float] = {}
        """When each stage run that runs now began, by the clock."""
        self.waiting: dict[StageRunId, str] = {}
        """Why stage runs wait for a retry or for another invocation."""
        self.failed: dict[StageRunId, None] = {}
        """In the order in which they failed."""
        self.counts: Counter[StageStatus] = Counter()
        self.by_stage: Counter[tuple[str, StageStatus]] = Counter()
        self.to_do = 0
        """Stage runs that were neither up to date nor unneeded when the run began."""

    def begin(self, plan: Plan, statuses: Mapping[StageRunId, StageStatus], durations: Mapping[str, float]) -> None:
        """Take in the plan; `durations` are seconds by label, from earlier runs."""
        self.plan = plan
        self.statuses = dict(statuses)
        self._durations = _Durations(durations)
        self._began = self._clock()
        for run_id, status in statuses.items():
            self._count(plan.stage_runs[run_id], status, 1)
        self._good_before = sum(self.counts[status] for status in _GOOD)
        self.to_do = len(statuses) - self._good_before

    def changed(self, run: StageRun, status: StageStatus, seconds: float | None) -> None:
        """A stage run's status changed."""
        now = self._clock()
        self._count(run, self.statuses[run.id], -1)
        self._count(run, status, 1)
        self.statuses[run.id] = status
        self.waiting.pop(run.id, None)
        if status is _S.RUNNING:
            self.started[run.id] = now
            service = run.inputs.get("service")
            if service in self.started and service not in self._ready:
                self._ready.add(service)
                self._durations.learn(self.plan.stage_runs[service], now - self.started[service])
        elif (began := self.started.pop(run.id, None)) is not None and run.stage.scope is not Scope.SERVICE:
            self._busy_s += now - began
            if status is _S.SUCCEEDED:
                self._durations.learn(run, now - began if seconds is None else seconds)
        if status is _S.FAILED:
            self.failed[run.id] = None

    def _count(self, run: StageRun, status: StageStatus, change: int) -> None:
        self.counts[status] += change
        self.by_stage[run.stage.name, status] += change

    @property
    def done(self) -> int:
        """How many of `to_do` are there now, or turned out not to be needed."""
        return sum(self.counts[status] for status in _GOOD) - self._good_before

    @property
    def ended(self) -> int:
        """How many of `to_do` have come to an end, good or bad."""
        return self.done + sum(self.counts[status] for status in _ENDED - _GOOD)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._began

    def running(self) -> Iterator[tuple[StageRun, float]]:
        """What runs and for how many seconds, the oldest first; a service only while nothing runs inside it."""
        now = self._clock()
        services = {self.plan.stage_runs[run_id].inputs.get("service") for run_id in self.started}
        for run_id, began in self.started.items():
            if run_id not in services:
                yield self.plan.stage_runs[run_id], now - began

    def left_s(self) -> tuple[float, bool]:
        """Expected seconds until the end, and whether that is all: False when work is left whose like never ran.

        The longest chain of what is left, or all of it at the parallelism seen so far, whichever is longer.
        """
        now = self._clock()
        chain: dict[StageRunId, float] = {}
        total = longest = 0.0
        complete = True
        busy = self._busy_s
        for run in self.plan.stage_runs.values():
            if self.statuses[run.id] in _ENDED:
                continue
            expected = self._durations.of(run)
            if expected is None:
                # How long a server takes to start is learnt with the first, and is little beside what runs in it.
                complete = complete and run.stage.scope is Scope.SERVICE
                expected = 0.0
            so_far = now - self.started[run.id] if run.id in self.started else 0.0
            if run.stage.scope is not Scope.SERVICE:
                busy += so_far
            rest = max(0.0, expected - so_far)
            chain[run.id] = rest + max((chain.get(need, 0.0) for need in run.needs), default=0.0)
            longest = max(longest, chain[run.id])
            total += rest
        parallel = max(1.0, busy / self.elapsed_s) if self.elapsed_s > 0 else 1.0
        return max(total / parallel, longest), complete

    def summary(self) -> str:
        """Counts in words, of what had to be done."""
        parts = [f"{self.done} of {self.to_do} done"]
        for status, word in (
            (_S.RUNNING, "running"),
            (_S.ELSEWHERE, "elsewhere"),
            (_S.FAILED, "failed"),
            (_S.BLOCKED, "blocked"),
            (_S.CANCELLED, "not finished"),
        ):
            if self.counts[status]:
                parts.append(f"{self.counts[status]} {word}")
        return ", ".join(parts)


def _who(run: StageRun) -> str:
    """The cell a stage run is for, and how many share it."""
    return run.first_cell.id if len(run.cells) < 2 else f"{run.first_cell.id} (for {len(run.cells)} cells)"


def _infeasible(plan: Plan) -> list[str]:
    """What to say of cells that can never work."""
    cells = [cell for cell in plan.cells if cell.reason is not None]
    if not cells:
        return []
    lines = [f"{count(len(cells), 'cell')} can never work:"]
    lines += [f"  {cell.id}: {cell.reason}" for cell in cells[:_MAX_LISTED]]
    return lines if len(cells) <= _MAX_LISTED else [*lines, f"  and {len(cells) - _MAX_LISTED} more: pipeline plan"]


def _failure(run: StageRun, error: StageError | None, seconds: float | None, *, log_lines: int) -> list[str]:
    """What to say of a failure: what, why, the log and its end, what to do."""
    kind = "" if error is None or error.failure is FailureClass.BUG else f" ({error.failure.value.replace('_', ' ')})"
    after = "" if seconds is None else f" after {duration(seconds)}"
    lines = [f"{run.id}  {_who(run)}  failed{after}{kind}{': ' + error.message if error else ''}"]
    if error is not None and error.log is not None:
        lines.append(f"  log: {_shown(error.log)}")
        lines += [f"  | {line}" for line in tail(error.log, log_lines)] if log_lines else []
    if error is not None and error.hint:
        lines.append(f"  try: {error.hint}")
    return lines


def _shown(path: Path) -> str:
    """`path` as short as it can be typed from here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


class QuietObserver:
    """Says only what failed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def begin(self, plan: Plan, statuses: Mapping[StageRunId, StageStatus], durations: Mapping[str, float]) -> None:
        """Say nothing."""

    def changed(self, run: StageRun, status: StageStatus, error: StageError | None, seconds: float | None) -> None:
        """Say what failed."""
        if status is _S.FAILED:
            self._say(*_failure(run, error, seconds, log_lines=_LOG_LINES))

    def waiting(self, run: StageRun, why: str) -> None:
        """Say nothing."""

    def tick(self, progress: Mapping[StageRunId, Mapping[str, Json]]) -> None:
        """Say nothing."""

    def end(self) -> None:
        """Say nothing."""

    def _say(self, *lines: str) -> None:
        self._stream.write("".join(f"{line}\n" for line in lines))
        self._stream.flush()


class PlainObserver(QuietObserver):
    """A line an event; what takes long is announced, and again every minute with its progress."""

    def __init__(self, stream: TextIO, clock: Clock = time.monotonic) -> None:
        super().__init__(stream)
        self._tracker = Tracker(clock)
        self._reminded: dict[StageRunId, float] = {}
        """Seconds a stage run had been running when it was last mentioned."""
        self._silent: Counter[StageStatus] = Counter()
        """Changes that are said in one line together: one failed download may block thousands of stage runs."""

    def begin(self, plan: Plan, statuses: Mapping[StageRunId, StageStatus], durations: Mapping[str, float]) -> None:
        """Say how much there is to do."""
        tracker = self._tracker
        tracker.begin(plan, statuses, durations)
        there = tracker.counts[_S.UP_TO_DATE]
        self._say(
            f"{count(len(plan.cells), 'cell')}, {count(len(statuses), 'stage run')}: {there} up to date, "
            f"{tracker.to_do} to do",
            *_infeasible(plan),
        )

    def changed(self, run: StageRun, status: StageStatus, error: StageError | None, seconds: float | None) -> None:
        """Say what ended."""
        tracker = self._tracker
        tracker.changed(run, status, seconds)
        self._reminded.pop(run.id, None)
        if status in {_S.BLOCKED, _S.CANCELLED, _S.SKIPPED}:
            self._silent[status] += 1
            return
        self._say_silent()
        if status is _S.FAILED:
            first, *rest = _failure(run, error, seconds, log_lines=_LOG_LINES)
            self._say(f"{self._place()} {first}", *rest)
        elif status is _S.UP_TO_DATE:
            self._say(f"{self._place()} {run.id}  {_who(run)}  done by another invocation")
        elif status is _S.SUCCEEDED:
            word = "stopped after" if run.stage.scope is Scope.SERVICE else "done in"
            self._say(f"{self._place()} {run.id}  {_who(run)}  {word} {duration(seconds or 0.0)}")

    def waiting(self, run: StageRun, why: str) -> None:
        """Say why a stage run waits."""
        self._say(f"{self._place()} {run.id}  {_who(run)}  waits: {why}")

    def tick(self, progress: Mapping[StageRunId, Mapping[str, Json]]) -> None:
        """Mention what has been running for long."""
        self._say_silent()
        for run, seconds in self._tracker.running():
            last = self._reminded.get(run.id)
            if seconds < (_ANNOUNCE_AFTER_S if last is None else last + _REMIND_EVERY_S):
                continue
            self._reminded[run.id] = seconds
            parts = [f"running for {duration(seconds)}"]
            parts += [told] if (told := _told(progress.get(run.id))) else []
            self._say(f"{self._place()} {run.id}  {_who(run)}  {', '.join(parts)}")

    def end(self) -> None:
        """Say what came of it."""
        self._say_silent()
        self._say(f"{self._tracker.summary()}, in {duration(self._tracker.elapsed_s)}")

    def _place(self) -> str:
        return f"[{self._tracker.ended}/{self._tracker.to_do}]"

    def _say_silent(self) -> None:
        blocked, cancelled = self._silent[_S.BLOCKED], self._silent[_S.CANCELLED]
        self._silent.clear()
        if blocked:
            self._say(f"{self._place()} {count(blocked, 'stage run')} blocked by what failed")
        if cancelled:
            self._say(f"{self._place()} {count(cancelled, 'stage run')} not finished")


class JsonObserver(QuietObserver):
    """One JSON object a line, see the module."""

    def __init__(self, stream: TextIO, clock: Clock = time.monotonic) -> None:
        super().__init__(stream)
        self._clock = clock
        self._tracker = Tracker(clock)
        self._told: dict[StageRunId, float] = {}

    def begin(self, plan: Plan, statuses: Mapping[StageRunId, StageStatus], durations: Mapping[str, float]) -> None:
        """The event `begin`."""
        self._tracker.begin(plan, statuses, durations)
        infeasible: dict[str, Json] = {cell.id: cell.reason for cell in plan.cells if cell.reason is not None}
        self._event(
            "begin",
            cells=[cell.id for cell in plan.cells],
            infeasible=infeasible,
            stage_runs=len(statuses),
            to_do=self._tracker.to_do,
        )

    def changed(self, run: StageRun, status: StageStatus, error: StageError | None, seconds: float | None) -> None:
        """The event `changed`."""
        self._tracker.changed(run, status, seconds)
        self._told.pop(run.id, None)
        fields: dict[str, Json] = {**_named(run), "status": status.value, "seconds": seconds}
        if error is not None:
            fields |= {"failure": error.failure.value, "message": error.message, "hint": error.hint}
            fields["log"] = None if error.log is None else str(error.log)
        self._event("changed", **fields)

    def waiting(self, run: StageRun, why: str) -> None:
        """The event `waiting`."""
        self._event("waiting", **_named(run), why=why)

    def tick(self, progress: Mapping[StageRunId, Mapping[str, Json]]) -> None:
        """The events `progress`."""
        now = self._clock()
        for run_id, told in progress.items():
            if now - self._told.get(run_id, float("-inf")) >= 1.0:
                self._told[run_id] = now
                self._event("progress", **_named(self._tracker.plan.stage_runs[run_id]), **told)

    def end(self) -> None:
        """The event `end`."""
        counts: dict[str, Json] = {status.value: number for status, number in self._tracker.counts.items() if number}
        self._event("end", seconds=round(self._tracker.elapsed_s, 3), counts=counts)

    def _event(self, event: str, **fields: Json) -> None:
        self._say(json.dumps({"event": event, "time_s": round(time.time(), 3), **fields}, ensure_ascii=False))


def _named(run: StageRun) -> dict[str, Json]:
    return {"stage_run": run.id, "stage": run.stage.name, "cells": list(run.cells)}


def _told(progress: Mapping[str, Json] | None) -> str | None:
    """A stage's own progress in words, "12.3/270.1 MB (5 %)"; None when it told nothing that can be shown."""
    share = _share(progress)
    if progress is None or not isinstance(done := progress.get("done"), (int, float)):
        return None
    total = progress.get("total")
    text = amount(done, total if isinstance(total, (int, float)) else None, str(progress.get("unit", "")))
    return text if share is None else f"{text} ({share:.0%})"


def _share(progress: Mapping[str, Json] | None) -> float | None:
    """How much of its work a stage has done, 0 to 1."""
    if progress is None:
        return None
    done, total = progress.get("done"), progress.get("total")
    if not isinstance(done, (int, float)) or not isinstance(total, (int, float)) or total <= 0:
        return None
    return min(1.0, max(0.0, done / total))


class LiveObserver:
    """A picture that is drawn over. Failures and waits are printed above it and stay in the terminal's history."""

    def __init__(self, stream: TextIO, clock: Clock = time.monotonic) -> None:
        from rich.console import Console

        self._clock = clock
        self._tracker = Tracker(clock)
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._ascii = self._console.options.ascii_only
        self._live: Live | None = None
        self._drawn: tuple[str, ...] = ()
        """The lines on the screen."""
        self._size = (0, 0)
        self._drawn_s = float("-inf")
        self._left: tuple[float, str] = (float("-inf"), "")
        self._progress: Mapping[StageRunId, Mapping[str, Json]] = {}
        self._names: dict[CellId, str] = {}
        self._shared: tuple[str, ...] = ()
        self._stages: tuple[str, ...] = ()

    def begin(self, plan: Plan, statuses: Mapping[StageRunId, StageStatus], durations: Mapping[str, float]) -> None:
        """Draw the first picture."""
        from rich.live import Live

        self._tracker.begin(plan, statuses, durations)
        ids = [cell.id for cell in plan.feasible]
        self._shared = shared_parts(ids)
        self._names = {cell: without(cell, self._shared) for cell in ids}
        self._stages = tuple(dict.fromkeys(run.stage.name for run in plan.stage_runs.values()))
        self._above(*_infeasible(plan))
        if not self._tracker.to_do:
            return
        # Nothing but this module prints to stdout while a run goes on, and stdout may be a pipe: leave it alone.
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, vertical_overflow="crop")
        self._live.start()
        self._draw()

    def changed(self, run: StageRun, status: StageStatus, error: StageError | None, seconds: float | None) -> None:
        """Note it for the next picture; print what failed."""
        self._tracker.changed(run, status, seconds)
        if status is _S.FAILED:
            mark = symbol(status, ascii_only=self._ascii)
            first, *rest = _failure(run, error, seconds, log_lines=0)
            self._above(f"{mark} {first}", *rest, style=LOOKS[status][2])

    def waiting(self, run: StageRun, why: str) -> None:
        """Show why a stage run waits."""
        self._tracker.waiting[run.id] = why

    def tick(self, progress: Mapping[StageRunId, Mapping[str, Json]]) -> None:
        """Draw, a few times a second."""
        self._progress = progress
        if self._clock() - self._drawn_s >= _REDRAW_S:
            self._draw()

    def end(self) -> None:
        """Draw the last picture, which stays, and give the terminal back as it was."""
        live, self._live = self._live, None
        if live is None:
            return
        try:
            self._show(live, self._last_picture())
        except OSError:
            pass  # the terminal has gone
        finally:
            try:
                live.stop()
            except OSError:
                pass
