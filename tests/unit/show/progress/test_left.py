"""The time left of a run, as other processes find it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tests.unit.show.progress.test_progress import LEARNT, PENDING, PLAN, Clock
from trtllm_pipeline.orchestrate.store import claims
from trtllm_pipeline.show.progress import left
from trtllm_pipeline.show.progress.left import TimeLeft, read
from trtllm_pipeline.show.progress.lines import JsonObserver, QuietObserver


def test_it_counts_down_as_long_as_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(tmp_path) is None
    told = TimeLeft(tmp_path)
    assert read(tmp_path) is None, "nothing is known yet"
    told.write(123456.789, True)
    told.write(90.0, False)
    at = json.loads((tmp_path / left.NAME).read_text())["time_s"]
    for later, seconds in ((0, 90.0), (80, 10.0), (100, 0.0), (-5, 90.0)):
        monkeypatch.setattr(left.time, "time", lambda later=later: at + later)
        assert read(tmp_path) == (pytest.approx(seconds), False)
    told.close()
    assert (read(tmp_path), list(tmp_path.iterdir())) == (None, [])


def test_it_is_told_although_somebody_looked_at_the_moment_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = claims.take(tmp_path / left.NAME, shared=True, remove=False)
    assert looks is not None
    monkeypatch.setattr(claims.time, "sleep", lambda _seconds: looks.release())
    told = TimeLeft(tmp_path)
    told.write(90.0, True)
    assert read(tmp_path) is not None
    told.close()


def test_of_a_run_that_was_killed_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / left.NAME).write_text('{"schema": 1, "time_s": 1, "left_s": 1, "complete": true}\n')
    assert read(tmp_path) is None


@pytest.mark.parametrize("damaged", ["", "[]", '{"left_s": null, "time_s": 1}', '{"left_s": 1}'])
def test_a_damaged_file_says_nothing(tmp_path: Path, damaged: str) -> None:
    told = TimeLeft(tmp_path)
    (tmp_path / left.NAME).write_text(damaged)
    assert read(tmp_path) is None
    told.close()


def test_every_observer_keeps_it_and_the_last_line_has_its_error(tmp_path: Path) -> None:
    for observer, stream in ((QuietObserver, io.StringIO()), (JsonObserver, io.StringIO())):
        clock = Clock()
        told = observer(stream, clock)
        told.enter(tmp_path)
        told.begin(PLAN, PENDING, LEARNT)
        told.tick({})
        assert read(tmp_path) is None, "a run that ends soon pays nothing for it"
        clock.now += 3.0
        told.tick({})
        found = read(tmp_path)
        assert found[0] == pytest.approx(told._tracker.left_s()[0], abs=1.0)
        told.end()
        assert read(tmp_path) is not None, "another part may follow"
        told.leave({"expected_s": 5.0, "took_s": 6.0, "stages": []})
        assert read(tmp_path) is None
    first, *_, last = map(json.loads, stream.getvalue().splitlines())
    assert (first["run"], last["event"], last["took_s"]) == (tmp_path.name, "forecast", 6.0)


def test_a_run_goes_on_where_it_cannot_be_kept(tmp_path: Path) -> None:
    clock = Clock()
    told = QuietObserver(io.StringIO(), clock)
    told.enter(tmp_path / "gone")
    told.begin(PLAN, PENDING, LEARNT)
    clock.now += 3.0
    told.tick({})
    told.leave(None)
