"""Runs that find everything up to date, and runs that start at the same time."""

from __future__ import annotations

import io
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from trtllm_pipeline.orchestrate import flow
from trtllm_pipeline.orchestrate.plan.plan import Plan
from trtllm_pipeline.orchestrate.plan.planner import Request
from trtllm_pipeline.orchestrate.plan.runs import find_run
from trtllm_pipeline.orchestrate.run import run_folder
from trtllm_pipeline.orchestrate.run.forecast import Forecast
from trtllm_pipeline.orchestrate.run.loop import Observer
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.show.progress.lines import QuietObserver

TINY = Path(__file__).parents[2] / "matrices/tiny.yaml"


@pytest.mark.seam
def test_a_run_shows_its_plan_before_it_begins(tmp_path: Path) -> None:
    calls: list[str] = []

    class Noted(Observer):
        def planned(self, plan: Plan, outlook: Forecast) -> None:
            calls.append(f"{len(plan.cells)} cells, {len(outlook.to_run)} to run")

        def begin(self, *_about: object) -> None:
            calls.append("begun")

    flow.run(Request(TINY, until="download"), Store(tmp_path / "ws"), Noted())
    assert calls == ["2 cells, 1 to run", "begun"]


@pytest.mark.seam
def test_a_run_with_nothing_to_do_reports_what_is_there(tmp_path: Path) -> None:
    store, request = Store(tmp_path / "ws"), Request(TINY, until="download")

    def counts() -> dict[str, int]:
        result = flow.run(request, store, QuietObserver(io.StringIO()))
        folder = store.runs_dir / result.run_id
        assert {path.name for path in folder.iterdir()} >= {"plan.json", "report.json", "request.json", "lock"}
        assert find_run(store, None) == folder
        found: dict[str, int] = json.loads((folder / "report.json").read_bytes())["run"]["counts"]
        return found

    assert counts() == {"done": 2}
    assert counts() == {"up_to_date": 2}
    latest = store.index.latest_fingerprints()
    other = replace(request, sets=("recipes.tiny.sources.0.seed=1",))
    flow.bring_up_to_date(other, store, QuietObserver(io.StringIO()))
    assert store.index.latest_fingerprints() != latest
    assert counts() == {"up_to_date": 2}
    assert store.index.latest_fingerprints() == latest, "the latest artifacts of the cells are the ones this run found"
    for artifact in store.index.all_artifacts():
        shutil.rmtree(artifact.folder)
    assert counts() == {"done": 2}
    store.close()


@pytest.mark.seam
def test_two_runs_of_one_name_begin_in_the_same_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1e9, monotonic=time.monotonic)
    clock.time = lambda: clock.now

    def sleep(seconds: float) -> None:
        clock.now += seconds

    clock.sleep = sleep
    monkeypatch.setattr(run_folder, "time", clock)
    store, request = Store(tmp_path / "ws"), Request(TINY, until="download")
    first, second = (flow.run(request, store, QuietObserver(io.StringIO()), name="nightly").run_id for _ in range(2))
    assert first < second
    assert find_run(store, "nightly").name == second
