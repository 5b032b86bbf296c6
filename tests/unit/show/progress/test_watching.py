"""The status again and again: a picture that fits, lines for pipes and programs."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from trtllm_pipeline.base.domain import CellId, Fingerprint, Scope, StageRunId, StageStatus
from trtllm_pipeline.orchestrate.plan.plan_file import Outline, OutlineCell, OutlineRun
from trtllm_pipeline.orchestrate.plan.stage_status import StageState
from trtllm_pipeline.orchestrate.run.forecast import ForecastCheck
from trtllm_pipeline.show.progress import watching
from trtllm_pipeline.show.progress.cell_status import MatrixStatus, to_text

S = StageStatus
STAGES = ("build", "perf")


def status(cells: int, states: Mapping[tuple[str, int], StageState]) -> MatrixStatus:
    """Cells c0, c1, ... of two stages each; what `states` does not say is to do."""
    outlined, runs, found = [], {}, {}
    for number in range(cells):
        name = CellId(f"m/c{number}")
        ids = [StageRunId(f"{stage}-{number}") for stage in STAGES]
        for stage, each in zip(STAGES, ids, strict=True):
            runs[each] = OutlineRun(each, stage, Fingerprint(each), Scope.ARTIFACT, (), (), (name,))
            found[each] = states.get((stage, number), StageState(S.PENDING))
        outlined.append(OutlineCell(name, {}, None, tuple(ids)))
    return MatrixStatus("run r", "r", Outline(tuple(outlined), runs), tuple(outlined), found, Path("store"))


RUNNING, THERE = StageState(S.RUNNING), StageState(S.UP_TO_DATE)
FAILED = StageState(S.FAILED, failure="timeout", message="took too long", hint="wait")
STEPS = (
    status(2, {("build", 0): RUNNING}),
    status(2, {("build", 0): RUNNING}),
    status(2, {("build", 0): THERE, ("perf", 0): RUNNING, ("build", 1): RUNNING}),
    status(2, {("build", 0): THERE, ("perf", 0): FAILED, ("build", 1): THERE}),
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which passes only while `watch` waits."""
    clock = [0.0]
    monkeypatch.setattr(watching.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(watching.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    return clock


def one_after_the_other(*steps: MatrixStatus) -> Callable[[], MatrixStatus]:
    """A second apart; the last one stays."""
    left = list(steps)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


@pytest.mark.usefixtures("clock")
def test_a_pipe_gets_a_line_for_each_change_until_nothing_runs() -> None:
    stream = io.StringIO()
    watching.watch(one_after_the_other(*STEPS), stream)
    assert stream.getvalue().splitlines() == [
        "run r: 3 to do, 1 running",
        "running: build, m/c0",
        "up to date: build, m/c0",
        "running: perf, m/c0",
        "running: build, m/c1",
        "failed: perf, m/c0: took too long",
        "up to date: build, m/c1",
    ]


@pytest.mark.usefixtures("clock")
def test_it_goes_on_as_long_as_a_run_that_waits() -> None:
    waits = replace(status(2, {("build", 0): THERE}), goes_on=True)
    stream = io.StringIO()
    watching.watch(one_after_the_other(*[waits] * 60, *STEPS[2:]), stream)
    assert "running: perf, m/c0" in stream.getvalue().splitlines()
    assert "the run is active, but no stage is running" in to_text(waits)
    assert "the run continues" not in to_text(replace(STEPS[2], goes_on=True))


@pytest.mark.usefixtures("clock")
def test_a_program_gets_an_object_for_each_change() -> None:
    stream = io.StringIO()
    watching.watch(one_after_the_other(*STEPS), stream, as_json=True)
    begin, *changed = map(json.loads, stream.getvalue().splitlines())
    assert (begin["event"], begin["stage_runs"]) == ("begin", {"pending": 3, "running": 1})
    assert [(each["stage_run"], each["status"]) for each in changed] == [
        ("build-0", "running"),
        ("build-0", "up_to_date"),
        ("perf-0", "running"),
        ("build-1", "running"),
        ("perf-0", "failed"),
        ("build-1", "up_to_date"),
    ]
    assert (begin["schema"], changed[2]["cells"]) == (2, ["m/c0"])
    told = {name: value for name, value in changed[4].items() if name not in ("time_s", "stage_run", "status")}
    assert told == {
        "event": "changed",
        "stage": "perf",
        "failure": "timeout",
        "message": "took too long",
        "hint": "wait",
    }


def test_the_time_left_is_said_once_a_minute_and_its_error_in_the_end(clock: list[float]) -> None:
    went_on, forecast = status(2, {("build", 0): RUNNING}), {"expected_s": 100.0, "took_s": 131.0, "stages": []}
    ended = replace(status(2, {}), took=ForecastCheck.from_json(forecast))

    def look() -> MatrixStatus:
        return replace(went_on, left=(130.0 - clock[0], True)) if clock[0] < 130.0 else ended

    stream = io.StringIO()
    watching.watch(look, stream)
    said = stream.getvalue().splitlines()
    assert said[2:] == [
        "about 1:10 left",
        "about 10 s left",
        "to do: build, m/c0",
        "Took 2:11 (estimate 1:40)",
    ]
    clock[0], stream = 0.0, io.StringIO()
    watching.watch(look, stream, as_json=True)
    told = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [each["event"] for each in told] == ["begin", "changed", "left", "left", "changed", "forecast"]
    assert {"seconds": 70, "complete": True}.items() <= told[2].items()
    assert forecast.items() <= told[-1].items()


def test_the_picture_has_the_time_left_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = replace(status(2, {("build", 0): RUNNING}), left=(70.0, False))
    *_, last = watching._picture(found, 24).plain.splitlines()
    assert last.startswith("0 of 4 stage runs done, perhaps 1:10 left, at ")
    assert "left" not in to_text(found, height=24), "nor twice"
    assert "perhaps 1:10 left" in to_text(found).splitlines()


@pytest.mark.parametrize("cells", [3, 30, 3000])
@pytest.mark.parametrize("columns", [80, 200])
def test_a_picture_fits_the_screen(monkeypatch: pytest.MonkeyPatch, cells: int, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    failed = {("perf", number): FAILED for number in range(0, cells, 2)}
    found = status(cells, {**failed, ("build", 1): RUNNING, ("build", 0): THERE})
    lines = to_text(found, height=23).splitlines()
    assert len(lines) <= 23
    assert max(map(len, lines)) <= columns
    assert lines[0] == "run r, all cells: m"
    if cells == 3000:
        assert not any(line.startswith("group") for line in lines), "they have one segment"
    by_stage = any("build" in line and f"1/{cells}" in line.replace(" ", "") for line in lines)
    assert by_stage == (cells > 17)
    assert any(line.startswith("running: build, m/c1") for line in lines), "what runs comes before what failed"
    assert not any("more to do" in line for line in lines), "all are in the lines of their stages"
    assert len(to_text(found).splitlines()) > cells


def test_the_time_that_a_run_took_is_wrapped_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    found = replace(status(2, {}), took=ForecastCheck(100.0, 131.0, ()))
    monkeypatch.setenv("COLUMNS", "20")
    assert to_text(found).splitlines()[-2:] == ["Took 2:11 (estimate", "1:40)"]


def test_a_title_that_does_not_fit_has_two_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "19")
    assert to_text(status(2, {})).splitlines()[:2] == ["run r, all cells: m", "   build perf"]
    monkeypatch.setenv("COLUMNS", "18")
    assert to_text(status(2, {})).splitlines()[:2] == ["run r", "all cells: m"]


@pytest.mark.usefixtures("clock")
def test_a_moment_without_work_is_not_the_end() -> None:
    idle, busy = status(1, {}), status(1, {("build", 0): RUNNING})
    left = [idle, idle, busy, idle, idle, idle, idle, idle]
    watching.watch(lambda: left.pop(0), io.StringIO())
    assert len(left) == 2
