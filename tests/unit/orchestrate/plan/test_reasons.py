"""Why a stage has to run, also where its input is a server, which leaves nothing behind."""

from __future__ import annotations

import dataclasses
import json
from contextlib import closing
from pathlib import Path

from tests.helpers import fabricated
from tests.helpers.trtllm_cells import cell, plan, stage_run
from trtllm_pipeline.base.fingerprints import canonical, changes
from trtllm_pipeline.orchestrate.plan.plan import StageRun
from trtllm_pipeline.orchestrate.plan.stage_status import in_words, reasons
from trtllm_pipeline.orchestrate.store.store import Store

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
    assert reasons(before, [launch.id], store) == {launch.id: "needed by stages that use the server"}
    store.close()


def test_an_older_release_s_keys_say_what_is_new_in_them() -> None:
    """Its convert hung on the whole download, its smoke did not read it at all."""
    files = {"config.json": "a" * 64, "tokenizer.json": "b" * 64}
    wanted = cell("fp16", recipe={"files": files})
    now = plan(wanted)
    download, convert, smoke = (stage_run(now, stage) for stage in ("download", "convert", "smoke"))
    same, other = (download.key, download.key.replace("a" * 64, "c" * 64))

    def why(run: StageRun, **inputs: object) -> str:
        key = json.loads(run.key)
        old = canonical({**key, "inputs": {name: told for name, told in inputs.items() if told is not None}})
        return in_words(now, run, changes(old, run.key), {"model": before})

    before = same
    assert (
        why(convert, model=download.fingerprint) == "download (its key had all files, now those that it reads) changed"
    )
    before = other
    assert why(convert, model="f" * 32) == "download (config.json) changed"
    assert why(smoke, **{**json.loads(smoke.key)["inputs"], "model": None}) == "download (not read before) changed"


def test_what_runs_now_was_not_interrupted(tmp_path: Path) -> None:
    now = fabricated.plan(CELL)
    convert = fabricated.stage_run(now, CELL, "convert")
    with closing(Store(tmp_path / "w")) as store:
        claim = store.claim(convert.fingerprint)
        fabricated.begin(store, convert)
        assert reasons(now, [convert.id], store) == {convert.id: "another process works on it now"}
        claim.release()
        assert reasons(now, [convert.id], store) == {convert.id: "was interrupted"}
