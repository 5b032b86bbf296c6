from __future__ import annotations

import io
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers import fabricated, trtllm_cells
from trtllm_pipeline.base.domain import StageRunId, StageStatus
from trtllm_pipeline.base.errors import FailureClass, StageError
from trtllm_pipeline.base.wording import duration
from trtllm_pipeline.orchestrate.memory.estimates import GPU, Estimate, Need
from trtllm_pipeline.orchestrate.plan.plan import Plan, StageRun
from trtllm_pipeline.orchestrate.run.forecast import forecast, guess_s
from trtllm_pipeline.orchestrate.run.order import capacities, play, tasks
from trtllm_pipeline.orchestrate.run.scheduler import Capacity, Event, Instruction, Scheduler
from trtllm_pipeline.show.progress import observer
from trtllm_pipeline.show.progress.lines import JsonObserver, PlainObserver, QuietObserver
from trtllm_pipeline.show.progress.live import LiveObserver, Picture
from trtllm_pipeline.show.progress.tracker import Tracker

S = StageStatus
FP16, FP16_8 = fabricated.cell("fp16"), fabricated.cell("fp16", 8)
NEVER = fabricated.cell("fp8", reason="precision fp8: not here")
PLAN = fabricated.plan(FP16, FP16_8, NEVER)
PENDING = dict.fromkeys(PLAN.stage_runs, S.PENDING)
LEARNT = {
    "download": 10.0,
    "convert": 4.0,
    "build": 2.0,
    "repository": 1.0,
    "smoke": 1.0,
    "perf": 20.0,
    "accuracy": 5.0,
}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(stage: str, plan: Plan = PLAN) -> StageRun:
    return fabricated.stage_run(plan, plan.cells[0], stage)


def lines(stream: io.StringIO) -> list[str]:
    text = stream.getvalue()
    stream.seek(0)
    stream.truncate()
    return text.splitlines()


def test_auto_is_live_only_where_it_can_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(observer(Terminal()), LiveObserver)
    assert isinstance(observer(io.StringIO()), PlainObserver)
    monkeypatch.setenv("CI", "true")
    assert isinstance(observer(Terminal()), PlainObserver)
    monkeypatch.delenv("CI")
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(observer(Terminal()), PlainObserver)
    assert isinstance(observer(Terminal(), mode="json"), JsonObserver)
    assert type(observer(Terminal(), mode="quiet")) is QuietObserver


def test_plain_lines(tmp_path: Path) -> None:
    stream, clock = io.StringIO(), Clock()
    plain = PlainObserver(stream, clock)
    plain.begin(PLAN, {**PENDING, run("download").id: S.UP_TO_DATE}, LEARNT)
    assert lines(stream) == [
        "3 cells, 14 stage runs: 1 up to date, 13 to do",
        "1 cell can never work:",
        f"  {NEVER.id}: precision fp8: not here",
    ]
    convert, build = run("convert"), run("build")
    plain.changed(convert, S.RUNNING, None, None)
    plain.tick({})
    assert lines(stream) == []
    clock.now += 5
    plain.tick({convert.id: {"done": 1_000_000, "total": 4_000_000, "unit": "bytes"}})
    plain.tick({})
    place = f"{convert.id}  {FP16.id} (for 2 cells)"
    assert lines(stream) == [f"[0/13] {place}  running for 5.0 s, 1.0/4.0 MB (25%)"]
    clock.now += 61
    plain.tick({convert.id: {"done": "much", "total": None}})
    # Convert is overdue: as long again. Then builds and repositories side by side, then the two servers.
    left = duration(66 + 2 + 1 + 2 * (guess_s(run("launch"), PLAN.machine) + 26))
    assert lines(stream) == [f"[0/13] {place}  running for 1:06", f"[0/13] about {left} left"]
    plain.tick({})
    assert lines(stream) == [], "in a minute again"
    plain.changed(convert, S.SUCCEEDED, None, 66.2)
    assert lines(stream) == [f"[1/13] {place}  done in 1:06"]
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(30)))
    error = StageError(
        "build: ended; its last line: line 29", hint="look", log=log, telling=("log:7: line 7", "log:9: line 9")
    )
    plain.changed(build, S.RUNNING, None, None)
    plain.changed(build, S.FAILED, error, 12.3)
    for stage in ("repository", "launch", "smoke"):
        plain.changed(run(stage), S.BLOCKED, None, None)
    assert lines(stream) == [
        f"[2/13] {build.id}  {FP16.id}  failed after 12 s: build: ended; its last line: line 29",
        f"  log: {log}",
        "  unknown cause, most relevant lines:",
        "  | log:7: line 7",
        "  | log:9: line 9",
        "  try: look",
    ]
    assert plain.reported == {error.message, "look", NEVER.reason}
    plain.waiting(run("perf"), "a dropped connection; attempt 2 in 4 s")
    plain.end()
    assert lines(stream) == [
        f"[5/13] {run('perf').id}  {FP16.id}  waiting: a dropped connection; attempt 2 in 4 s",
        "[5/13] 3 stage runs blocked by failures",
        "1 of 13 stage runs done, 1 failed, 3 blocked, in 1:06",
    ]


def test_a_failure_that_is_explained_needs_no_end_of_a_log(tmp_path: Path) -> None:
    stream = io.StringIO()
    quiet = QuietObserver(stream)
    quiet.begin(PLAN, PENDING, {})
    log = tmp_path / "log"
    log.write_text("loading\nno memory\n")
    error = StageError("build: no memory", failure=FailureClass.OUT_OF_MEMORY, hint="buy some", log=log)
    build = run("build")
    quiet.changed(build, S.FAILED, error, 12.3)
    assert lines(stream) == [
        f"{build.id}  {FP16.id}  failed after 12 s (out of memory): build: no memory",
        f"  log: {log}",
        "  try: buy some",
    ]
    assert quiet.reported == {"build: no memory", "buy some"}
    quiet.changed(run("repository"), S.FAILED, error, 2.0)
    assert lines(stream) == [
        f"{run('repository').id}  {FP16.id}  failed after 2.0 s (out of memory): for the same reason",
        f"  log: {log}",
    ]


def test_a_server_is_not_up_before_something_ran_in_it() -> None:
    stream, clock = io.StringIO(), Clock()
    plain = PlainObserver(stream, clock)
    plain.begin(PLAN, PENDING, {})
    lines(stream)
    launch, smoke = run("launch"), run("smoke")
    for _ in range(2):  # the second is another try
        plain.changed(launch, S.RUNNING, None, None)
        clock.now += 303
        plain.tick({})
        assert [line.rpartition("  ")[2] for line in lines(stream)[:1]] == ["starting for 5:03"]
        plain.changed(smoke, S.RUNNING, None, None)
        plain.changed(smoke, S.SUCCEEDED, None, 1.0)
        clock.now += 61
        plain.tick({})
        assert [line.rpartition("  ")[2] for line in lines(stream)][-2] == "up for 6:04"
        plain.changed(launch, S.PENDING, None, None)


def test_what_probably_does_not_fit_is_said_once_before_the_run() -> None:
    first = PLAN.cells[0].id
    need = Need("launch", first, GPU, Estimate(27 << 30, 0.15), 24 << 30)
    outlook = replace(forecast(PLAN, None), needs=(need,))
    for kind in (PlainObserver, LiveObserver, QuietObserver, JsonObserver):
        stream = Terminal()
        shows = kind(stream)
        shows.planned(PLAN, outlook)
        shows.begin(PLAN, PENDING, LEARNT)
        shows.begin(PLAN, PENDING, LEARNT)  # cells that ran out of memory are retried
        shows.end()
        assert stream.getvalue().count("launch needs up to 27.0 GiB") == (kind in {PlainObserver, LiveObserver})


def test_quiet_says_only_what_failed() -> None:
    stream = io.StringIO()
    quiet = QuietObserver(stream)
    quiet.begin(PLAN, PENDING, {})
    quiet.changed(run("download"), S.SUCCEEDED, None, 1.0)
    quiet.changed(run("convert"), S.FAILED, StageError("convert: bad"), 1.0)
    quiet.node("n2", gone=False)
    quiet.node("n1", gone=True)
    quiet.end()
    assert lines(stream) == [
        f"{run('convert').id}  {FP16.id} (for 2 cells)  failed after 1.0 s: convert: bad",
        "lost node n1: no stages will start on it",
    ]


def test_json_events() -> None:
    stream, clock = io.StringIO(), Clock()
    told = JsonObserver(stream, clock)
    told.begin(PLAN, PENDING, LEARNT)
    build = run("build")
    told.changed(build, S.RUNNING, None, None)
    for _ in range(5):
        clock.now += 0.5
        told.tick({build.id: {"done": 1, "total": 2, "unit": "layers"}})
    clock.now += 60
    for _ in range(2):
        told.tick({})
    told.waiting(build, "why")
    told.node("n1", gone=True)
    told.changed(build, S.FAILED, StageError("bad", hint="do"), 2.5)
    told.end()
    events = [json.loads(line) for line in lines(stream)]
    names = ["begin", "changed", "progress", "progress", "progress", "left", "waiting", "node", "changed", "end"]
    assert [event["event"] for event in events] == names
    assert all(abs(event["time_s"] - time.time()) < 60 for event in events)
    assert events[0]["infeasible"] == {NEVER.id: "precision fp8: not here"}
    assert events[0]["to_do"] == 14
    assert (events[0]["schema"], events[0]["run"]) == (2, None)
    assert {"stage_run": build.id, "stage": "build", "cells": [FP16.id]}.items() <= events[1].items()
    assert {"done": 1, "total": 2, "unit": "layers", "stage_run": build.id}.items() <= events[2].items()
    assert not any("cells" in event for event in events[2:]), "they are said once"
    # Download and convert first; the build has run for 62.5 s, is overdue, and takes as long again.
    left = 10 + 4 + 62.5 + 1 + 2 * (guess_s(run("launch"), PLAN.machine) + 26)
    assert {"seconds": round(left), "complete": True}.items() <= events[5].items()
    failure = {"status": "failed", "failure": "bug", "message": "bad", "hint": "do", "log": None, "seconds": 2.5}
    assert {"node": "n1", "gone": True}.items() <= events[7].items()
    assert failure.items() <= events[8].items()
    assert events[-1]["counts"] == {"pending": 13, "failed": 1}


def test_json_events_of_what_waits_for_another_process_are_not_repeated() -> None:
    stream, clock = io.StringIO(), Clock()
    told = JsonObserver(stream, clock)
    told.begin(PLAN, PENDING, LEARNT)
    download = run("download")
    for _ in range(3):  # as the loop tries again
        for status in (S.PENDING, S.RUNNING, S.ELSEWHERE):
            told.changed(download, status, None, None)
        told.tick({})
    for status in (S.PENDING, S.RUNNING):
        told.changed(download, status, None, None)
    told.tick({download.id: {"done": 1, "total": 2, "unit": "files"}})
    told.changed(download, S.SUCCEEDED, None, 1.0)
    events = [json.loads(line) for line in lines(stream)]
    assert [event.get("status", event["event"]) for event in events] == [
        *("begin", "pending", "running", "elsewhere", "pending", "running", "progress", "succeeded")
    ]


# The tracker


def test_what_is_left_is_what_the_scheduler_makes_of_it() -> None:
    clock = Clock()
    tracker = Tracker(PLAN, PENDING, LEARNT, clock)
    # download 10, convert 4, build 2 and repository 1 of both cells side by side, then of each launch by a guess, smoke 1, perf 20,
    # accuracy 5.
    served = guess_s(run("launch"), PLAN.machine) + 26
    then = 4 + 2 + 1 + 2 * served
    assert tracker.left_s() == (10 + then, True)
    tracker.changed(run("download"), S.RUNNING, None)
    clock.now += 4
    assert tracker.left_s() == (6 + then, True)
    clock.now += 7
    assert tracker.left_s()[0] == then, "late is not negative"
    clock.now += 2
    assert tracker.left_s()[0] == 13 + then, "overdue: as long again, by the scheduler's rule"
    clock.now += 87
    assert tracker.left_s()[0] == 100 + then
    tracker.changed(run("download"), S.UP_TO_DATE, None)
    tracker.changed(run("smoke"), S.ELSEWHERE, None)
    tracker.changed(run("launch"), S.FAILED, None)
    for stage in ("perf", "accuracy"):
        tracker.changed(run(stage), S.BLOCKED, None)
    assert tracker.left_s()[0] == then - served, "what is elsewhere outlives its server"
    nodes = [Capacity(cpus=2, node="a"), Capacity(cpus=2, node="b")]
    tracker = Tracker(PLAN, PENDING, LEARNT, clock, lambda: nodes)
    assert tracker.left_s()[0] == 10 + 4 + 2 + 1 + served, "one on each"
    nodes.pop()
    assert tracker.left_s()[0] == 10 + then


def test_estimating_the_time_left_takes_a_hundredth_of_the_run() -> None:
    clock = Clock()
    tracker = Tracker(PLAN, PENDING, LEARNT, clock)
    assert tracker.left() is None, "there is no estimate yet"

    def costly(*_args: object) -> float:
        clock.now += 0.5
        return 0.0

    tracker._durations.of = costly  # type: ignore[method-assign]
    cost_s = 0.5 * len(PLAN.stage_runs)
    assert tracker.estimate()
    assert tracker.left() is not None
    clock.now += 100 * cost_s - 1.0
    assert not tracker.estimate()
    clock.now += 1.0
    assert tracker.estimate()


def _errors(plan: Plan, times: float) -> list[float]:
    """By what share the time left is too long at each tenth of a run in which all takes so many times what is guessed."""
    clock, on, runs = Clock(), capacities(plan.machine), plan.stage_runs
    tracker = Tracker(plan, dict.fromkeys(runs, S.PENDING), {}, clock)
    takes = {run: times * seconds for run, seconds in fabricated.expected(plan, {}).items()}
    known = list(tasks(plan, runs, lambda run: takes[run.id] / times, None, on))
    total = play(known, Scheduler(known, *on), takes)
    began, errors = clock.now, list[float]()

    def changed(run: StageRunId, _old: S, new: S) -> None:
        tracker.changed(runs[run], new, takes[run] if new is S.SUCCEEDED else None)

    class Watched(Scheduler):
        def advance(self, now: float, *events: Event) -> list[Instruction]:
            while len(errors) < 10 and (at := total * len(errors) / 10) <= now:
                clock.now = began + at
                errors.append(tracker.left_s()[0] / (total - at) - 1)
            clock.now = began + now
            return super().advance(now, *events)

    play(known, Watched(known, *on, observe=changed), takes)
    assert len(errors) == 10
    return errors


@pytest.mark.parametrize("exclusive", ["machine", "gpu"])
def test_the_time_left_is_right_where_what_is_measured_is_alone(exclusive: str) -> None:
    settings = {"perf.exclusive": exclusive}
    plan = trtllm_cells.plan(
        *(
            trtllm_cells.cell(precision, tp=tp, batch=batch, settings=settings)
            for precision in ("fp16", "fp8")
            for tp in (1, 4, 8)
            for batch in (4, 8, 16)
        )
    )
    assert max(map(abs, _errors(plan, 1.0))) < 0.02, "as guessed"
    slow = _errors(plan, 2.0)
    assert slow[0] < -0.4, "nobody could know"
    assert max(map(abs, slow[3:])) < 0.1, "the run has shown it"


def test_left_is_a_guess_until_the_like_has_run_and_by_what_has_ended_guesses_are_corrected() -> None:
    clock = Clock()
    tracker = Tracker(PLAN, PENDING, {}, clock)
    guesses = {each.id: guess_s(each, PLAN.machine) for each in PLAN.stage_runs.values()}
    # Of one cell they take nothing: they are beside the other's.
    build, repository = guesses[run("build").id], guesses[run("repository").id]
    assert tracker.left_s() == (pytest.approx(sum(guesses.values()) - build - repository), False)
    tracker.changed(run("build"), S.RUNNING, None)
    took = build / 10
    clock.now += took
    tracker.changed(run("build"), S.SUCCEEDED, took)
    others = sum(guess for each, guess in guesses.items() if PLAN.stage_runs[each].stage.name != "build")
    left = took + (others - repository) / 10
    assert tracker.left_s() == (pytest.approx(left), False), "the other build will take as long"
    launches = 2 * guesses[run("launch").id]
    known = {stage: seconds for stage, seconds in LEARNT.items() if stage != "perf"}
    perf = 2 * guesses[run("perf").id]
    assert Tracker(PLAN, PENDING, known, clock).left_s() == (pytest.approx(10 + 4 + 3 + 2 * 6 + launches + perf), False)
    tracker = Tracker(PLAN, PENDING, {**LEARNT, "perf/embedded": 2.0}, clock)
    assert tracker.left_s() == (10 + 4 + 3 + 2 * 8 + launches, True), "the finer label counts"


def test_a_run_learns_how_long_its_servers_take_to_start() -> None:
    clock = Clock()
    tracker = Tracker(PLAN, PENDING, LEARNT, clock)
    before = tracker.left_s()[0]
    tracker.changed(run("launch"), S.RUNNING, None)
    assert [each.stage.name for each, _ in tracker.running()] == ["launch"]
    clock.now += 7
    tracker.changed(run("smoke"), S.RUNNING, None)
    assert [each.stage.name for each, _ in tracker.running()] == ["smoke"]
    guess = guess_s(run("launch"), PLAN.machine)
    assert tracker.left_s()[0] == before - 2 * guess + 7, "the second server will take as long"


def test_what_was_expected_is_not_said_of_a_run_that_is_interrupted() -> None:
    clock = Clock()
    tracker = Tracker(PLAN, PENDING, LEARNT, clock)
    tracker.changed(run("download"), S.RUNNING, None)
    assert tracker.estimate()
    before = tracker.left()
    for stage_run in PLAN.stage_runs.values():
        if stage_run is not run("download"):
            tracker.changed(stage_run, S.CANCELLED, None)
    assert tracker.left_text() == ""
    assert tracker.estimate()
    assert tracker.left() == (10, True), "what still runs"
    assert before[0] > 10


def test_counts() -> None:
    there = {run("download").id: S.UP_TO_DATE, run("convert").id: S.SKIPPED}
    tracker = Tracker(PLAN, {**PENDING, **there}, {}, Clock())
    assert (tracker.to_do, tracker.done, tracker.ended) == (12, 0, 0)
    tracker.changed(run("build"), S.SUCCEEDED, 1.0)
    tracker.changed(run("perf"), S.FAILED, None)
    assert (tracker.done, tracker.ended) == (1, 2)
    assert tracker.by_stage["build", S.SUCCEEDED] == 1
    assert tracker.summary() == ["1 of 12 stage runs done", "1 failed"]


# The live view


def picture(plan: Plan, clock: Clock, **statuses: S) -> Picture:
    drawn = Picture(Tracker(plan, dict.fromkeys(plan.stage_runs, S.PENDING), LEARNT, clock))
    for stage, status in statuses.items():
        drawn.tracker.changed(run(stage, plan), status, 1.0)
    return drawn


def test_the_picture_of_two_cells() -> None:
    clock = Clock()
    drawn = picture(PLAN, clock, download=S.SUCCEEDED, convert=S.SUCCEEDED, build=S.FAILED, repository=S.BLOCKED)
    other = fabricated.stage_run(PLAN, FP16_8, "build")
    drawn.tracker.changed(other, S.RUNNING, None)
    drawn.progress = {other.id: {"done": 3, "total": 4, "unit": "layers"}}
    clock.now += 12
    drawn.tracker.estimate()
    assert [line.plain for line in drawn.draw(79, 24)] == [
        "all cells: smollm2 fp16 tp1pp1 isl128-osl64",
        "    download convert build repository launch smoke perf accuracy",
        "bs4    ✓        ✓      ✗       #        ·      ·    ·      ·",
        "bs8    ✓        ✓      ▶       ·        ·      ·    ·      ·",
        "▶ build       bs8  ━━━━━━━─── 3/4 layers (75%), 12 s",
        "2 of 14 stage runs done  1 running  1 failed  1 blocked  12 s  about 1:15 left",
        "· to do   ▶ running   ✓ done   ✗ failed   # blocked",
    ]


@pytest.mark.parametrize(("width", "height"), [(79, 23), (159, 49), (40, 12), (20, 6), (300, 10)])
@pytest.mark.parametrize("cells", [1, 2, 40, 1000])
def test_every_picture_fits_its_screen(cells: int, width: int, height: int) -> None:
    plan = fabricated.plan(*(fabricated.cell("fp16", batch, model="smollm2-135m-instruct") for batch in range(cells)))
    clock = Clock()
    drawn = picture(plan, clock, download=S.SUCCEEDED, convert=S.RUNNING, build=S.FAILED)
    for final in (False, True):
        frame = drawn.draw(width, height, final=final)
        assert len(frame) <= height
        assert max(line.cell_len for line in frame) <= width
        assert not any("\n" in line.plain for line in frame)


def test_why_another_invocation_is_waited_for_is_shown_as_long_as_it_is_so() -> None:
    drawn = picture(PLAN, Clock())
    tracker, download = drawn.tracker, run("download")
    why = "this machine is in use by process 4711 in workspace /home/someone/models (pipeline run --matrix matrix.yaml)"

    def shown() -> list[str]:
        return [line.plain for line in drawn.draw(79, 24)]

    def told() -> bool:
        return why in " ".join(line.strip() for line in shown())

    tracker.changed(download, S.RUNNING, None)
    tracker.waits(download, why)  # as the loop says it: the scheduler hears of it afterwards
    tracker.changed(download, S.ELSEWHERE, None)
    assert told()
    for status in (S.PENDING, S.RUNNING):
        tracker.changed(download, status, None)
        assert not told()
    tracker.changed(download, S.ELSEWHERE, None)
    assert told(), "it is said once, and holds"
    tracker.changed(download, S.RUNNING, None)
    tracker.waits(download, " and ".join([why] * 9))
    tracker.changed(download, S.ELSEWHERE, None)
    assert [line[-2:] == " …" for line in shown() if line.startswith("    ") and "build" not in line] == [False, True]
    tracker.changed(download, S.PENDING, None)
    tracker.waits(download, "a dropped connection; attempt 2 in 4 s")
    assert any("attempt 2 in 4 s" in line for line in shown())
    tracker.changed(download, S.RUNNING, None)
    tracker.changed(download, S.SUCCEEDED, 1.0)
    assert not any("attempt 2" in line for line in shown())


def test_of_many_cells_stages_are_counted_and_the_eventful_ones_shown() -> None:
    plan = fabricated.plan(*(fabricated.cell("fp16", batch) for batch in range(100)))
    drawn = picture(plan, Clock(), download=S.SUCCEEDED, convert=S.SUCCEEDED, build=S.FAILED)
    busy = fabricated.stage_run(plan, plan.cells[42], "build")
    drawn.tracker.changed(busy, S.RUNNING, None)
    text = [line.plain for line in drawn.draw(79, 23)]
    assert any(line.startswith("build") and "0/100" in line and "▶1" in line and "✗1" in line for line in text)
    cells = [line.split()[0] for line in text if line.startswith("bs")]
    assert cells == ["bs42", "bs0"]


def test_many_cells_are_shown_in_groups_where_these_fit() -> None:
    cells = [
        fabricated.cell(precision, batch, model=model)
        for model in ("qwen2", "smollm2")
        for precision in ("fp16", "int8_wo")
        for batch in range(50)
    ]
    plan = fabricated.plan(*cells)
    drawn = picture(plan, Clock(), download=S.SUCCEEDED, convert=S.SUCCEEDED)
    builds = [fabricated.stage_run(plan, cell, "build") for cell in cells]
    for build in builds[:51]:
        drawn.tracker.changed(build, S.SUCCEEDED, 1.0)
    drawn.tracker.changed(builds[51], S.FAILED, None)
    drawn.tracker.changed(builds[52], S.RUNNING, None)

    def shown(height: int, width: int = 99) -> list[str]:
        return [line.plain for line in drawn.draw(width, height)]

    heads = shown(24).index("group (cells)        download convert build repository launch smoke perf accuracy")
    assert shown(24)[heads + 1 : heads + 5] == [
        "qwen2/fp16 (50)         ✓        ✓      ✓       ·        ·      ·    ·      ·",
        "qwen2/int8_wo (50)      ✓        ·     ✗ 2%     ·        ·      ·    ·      ·",
        "smollm2/fp16 (50)       ·        ·      ·       ·        ·      ·    ·      ·",
        "smollm2/int8_wo (50)    ·        ·      ·       ·        ·      ·    ·      ·",
    ]
    assert "▶ build       qwen2/int8_wo/bs2  0 s" in shown(24)
    drawn.tracker.changed(fabricated.stage_run(plan, cells[50], "convert"), S.RUNNING, None)
    assert "▶ convert     qwen2/int8_wo (50 cells)  0 s" in shown(24)
    for build in builds[100:110]:
        drawn.tracker.changed(build, S.RUNNING, None)
    assert shown(24)[-3] == "  and 7 more", "those that started last"
    assert any(line.startswith("qwen2 (100)") and "▶50%" in line and "✗51%" in line for line in shown(20))
    assert not any(line.startswith("qwen2 ") for line in shown(12)), "there is no room for two"
    assert "✗   " in next(line for line in shown(24, 56) if line.startswith("qwen2/int8")), "nor for percents"


@pytest.mark.timing
def test_ten_thousand_stage_runs_do_not_slow_the_picture() -> None:
    cells = (fabricated.cell("fp16", batch, model=model) for batch in range(500) for model in ("qwen2", "smollm2"))
    plan = fabricated.plan(*cells)
    drawn = picture(plan, Clock(), convert=S.RUNNING)
    assert any("(500)" in line.plain for line in drawn.draw(159, 49))
    start = time.process_time()
    for _ in range(10):
        drawn.draw(159, 49)
    assert (time.process_time() - start) / 10 < 0.1


def test_the_live_view_leaves_the_terminal_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    terminal, clock = Terminal(), Clock()
    live = LiveObserver(terminal, clock)
    live.begin(PLAN, PENDING, {})
    live.changed(run("download"), S.RUNNING, None, None)
    live.waiting(run("download"), "slow")
    clock.now += 1
    live.tick({})
    written = len(terminal.getvalue())
    live.tick({})
    assert len(terminal.getvalue()) == written, "nothing new, nothing drawn"
    live.changed(run("download"), S.FAILED, StageError("download: gone", hint="look", log=Path("/x/log")), 1.0)
    live.end()
    live.end()
    text = terminal.getvalue()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1, "the cursor is hidden once and shown again"
    assert "download: gone" in text
    assert "log: /x/log" in text
    assert text.endswith("\n\x1b[?25h")


def test_the_last_picture_in_a_file_ends_its_line() -> None:
    file = io.StringIO()
    live = LiveObserver(file, Clock())
    live.begin(PLAN, PENDING, {})
    live.end()
    live.end()
    assert file.getvalue().endswith("\n")
    assert not file.getvalue().endswith("\n\n")


def test_ctrl_z_gives_the_shell_its_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal, stopped = Terminal(), []
    live = LiveObserver(terminal, Clock())
    live.begin(PLAN, PENDING, {})
    signal.raise_signal(signal.SIGTSTP)

    def stop(pid: int, number: int) -> None:
        assert signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL
        stopped.append((pid, number, terminal.getvalue()))

    monkeypatch.setattr("trtllm_pipeline.base.terminal.os.kill", stop)
    live.tick({})
    live.tick({})
    ((pid, number, text),) = stopped
    assert (pid, number) == (os.getpid(), signal.SIGTSTP)
    assert text.endswith("\n\x1b[?25h")
    assert terminal.getvalue().endswith("\x1b[?25l"), "the picture continues"
    live.end()
    assert terminal.getvalue().endswith("\n\x1b[?25h")
    assert signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL


def test_a_terminal_that_has_gone_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal, clock = Terminal(), Clock()
    live = LiveObserver(terminal, clock)
    live.begin(PLAN, PENDING, {})

    def gone(_text: str) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(terminal, "write", gone)
    live.changed(run("download"), S.FAILED, StageError("download: gone"), 1.0)
    clock.now += 1
    live.tick({})
    live.end()


def test_nothing_to_do_draws_nothing_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    plan = fabricated.plan(FP16)
    terminal = Terminal()
    live = LiveObserver(terminal, Clock())
    live.begin(plan, dict.fromkeys(plan.stage_runs, S.UP_TO_DATE), {})
    live.tick({})
    live.end()
    assert terminal.getvalue() == "nothing to do: everything is up to date\n"
    stream = io.StringIO()
    plain = PlainObserver(stream, Clock())
    plain.begin(plan, dict.fromkeys(plan.stage_runs, S.UP_TO_DATE), {})
    plain.end()
    (said,) = lines(stream)
    assert said.endswith("stage runs: nothing to do: everything is up to date")
