"""A run with nothing to do, after runs that made something and runs that did not."""

from __future__ import annotations

import io
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trtllm_pipeline import flow
from trtllm_pipeline.planning.runs import find_run
from trtllm_pipeline.progress.lines import QuietObserver
from trtllm_pipeline.store.store import Store

pytestmark = pytest.mark.integration
TINY = Path(__file__).parents[2] / "matrices/tiny.yaml"


def test_a_run_that_finds_what_the_one_before_left_takes_what_that_wrote(tmp_path: Path) -> None:
    matrix = tmp_path / "matrix.yaml"
    shutil.copy(TINY, matrix)
    store, request = Store(tmp_path / "ws"), flow.Request(matrix, until="download")

    def run(*sets: str) -> tuple[Path, dict[str, Any]]:
        result = flow.run(replace(request, sets=sets), store, QuietObserver(io.StringIO()))
        folder = store.runs_dir / result.run_id
        report = json.loads((folder / "report.json").read_bytes())
        assert json.loads(json.dumps([row.to_json() for row in result.rows])) == report["cells"]
        assert {path.name for path in folder.iterdir()} >= {"plan.json", "request.json", "lock"}
        return folder, report

    def same(one: Path, other: Path) -> set[str]:
        names = ("plan.json", "outline.json", "report.json", "lock/matrix.yaml", "request.json")
        return {name for name in names if (one / name).samefile(other / name)}

    taken = {"plan.json", "outline.json", "report.json", "lock/matrix.yaml"}
    first, made = run()
    second, found = run()
    assert (made["run"]["counts"], found["run"]["counts"]) == ({"done": 2}, {"up_to_date": 2})
    assert not same(first, second), "the first made something"
    os.utime(second / "plan.json", (0, 0))
    third, _ = run()
    assert (third / "plan.json").stat().st_mtime > 0, "by which store gc tells how long ago a run was"
    assert same(second, third) == taken
    assert find_run(store, None) == third
    changed, _ = run("settings.download.max_workers=2")
    assert not same(third, changed), "another lock, whatever is keyed"
    back, _ = run()
    assert not same(changed, back)

    def remove() -> None:
        for artifact in store.index.all_artifacts():
            shutil.rmtree(artifact.folder)

    remove()
    flow.bring_up_to_date(request, store, QuietObserver(io.StringIO()))
    again, _ = run()
    assert not same(back, again), "made again meanwhile, by no run"
    run()
    latest = store.index.latest_fingerprints()
    other = replace(request, sets=("recipes.tiny.sources.0.seed=1",))
    flow.bring_up_to_date(other, store, QuietObserver(io.StringIO()))
    assert store.index.latest_fingerprints() != latest
    run()
    assert store.index.latest_fingerprints() == latest, "what cells last had is what this run found"
    remove()
    remade, about = run()
    assert about["run"]["counts"] == {"done": 2}
    assert not same(again, remade)
    store.close()


def test_two_runs_of_one_name_begin_in_the_same_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1e9, monotonic=time.monotonic)
    clock.time = lambda: clock.now

    def sleep(seconds: float) -> None:
        clock.now += seconds

    clock.sleep = sleep
    monkeypatch.setattr(flow, "time", clock)
    store, request = Store(tmp_path / "ws"), flow.Request(TINY, until="download")
    first, second = (flow.run(request, store, QuietObserver(io.StringIO()), name="nightly").run_id for _ in range(2))
    assert first < second
    assert find_run(store, "nightly").name == second
