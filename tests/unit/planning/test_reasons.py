"""Why a stage has to run, also where its input is a server, which leaves nothing behind."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tests.helpers import fabricated
from trtllm_pipeline.planning.reasons import reasons
from trtllm_pipeline.store.store import Store

CELL = fabricated.cell()


def test_a_server_that_changed_says_what_changed(tmp_path: Path) -> None:
    store = Store(tmp_path / "w")
    before = fabricated.plan(CELL)
    fabricated.publish_all(store, before, CELL)
    runs = [before.stage_runs[run] for run in before.by_cell[CELL.id]]
    launch = fabricated.stage_run(before, CELL, "launch")
    store.index.set_latest(
        [(CELL.id, run.stage.name, run.fingerprint) for run in runs if run is not launch],
        [(CELL.id, "launch", launch.fingerprint, launch.key)],
    )
    serve = {**CELL.settings["serve"], "threads": 1}
    now = fabricated.plan(dataclasses.replace(CELL, settings={**CELL.settings, "serve": serve}))
    changed = [run.id for run in now.stage_runs.values() if run.id not in before.stage_runs]
    store.close()
    store = Store(tmp_path / "w")
    found = {now.stage_runs[run].stage.name: why for run, why in reasons(now, changed, store).items()}
    assert found == {
        "launch": "changed: params.threads 0 -> 1",
        "smoke": "launch changed",
        "perf": "launch changed",
        "accuracy": "launch changed",
    }
    # An index that was lost knows it again.
    store.repair()
    assert reasons(now, changed, store)[fabricated.stage_run(now, CELL, "launch").id] == found["launch"]
    assert reasons(before, [launch.id], store) == {launch.id: "needed by what runs inside it"}
    store.close()
