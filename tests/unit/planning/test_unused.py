"""What `store gc --unused-days` removes, and what it leaves."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import fabricated
from trtllm_pipeline.cli.app import main
from trtllm_pipeline.errors import StateError
from trtllm_pipeline.planning.plan import Plan
from trtllm_pipeline.planning.plan_file import plan_lines
from trtllm_pipeline.planning.unused import unused
from trtllm_pipeline.store.store import Store

FP16, INT8, INT4 = (fabricated.cell(precision) for precision in ("fp16", "int8_wo", "int4_wo"))
DAY_S = 86400


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "ws")
    for cell in (FP16, INT8, INT4):
        fabricated.publish_all(store, fabricated.plan(cell), cell)
    for artifact in store.index.all_artifacts():
        aged(artifact.folder / "manifest.json", 100)
    yield store
    store.close()


def aged(path: Path, days: float) -> None:
    then = time.time() - days * DAY_S
    os.utime(path, (then, then))


def asked(store: Store, plan: Plan, *, days: float) -> None:
    """A run so many days ago."""
    folder = store.runs_dir / f"run-{days}"
    folder.mkdir()
    lines = plan_lines(plan, present=(), to_run=(), reasons={}, times=lambda _run: None, commands=lambda _run: [])
    (folder / "plan.json").write_text("\n".join(lines))
    aged(folder / "plan.json", days)


def of(store: Store, *plans: Plan) -> set[str]:
    wanted = {run.fingerprint for plan in plans for run in plan.stage_runs.values()}
    return {each.fingerprint for each in store.index.all_artifacts() if each.fingerprint in wanted}


def test_what_recent_runs_asked_for_stays(store: Store) -> None:
    old, recent, latest = (fabricated.plan(cell) for cell in (INT4, FP16, INT8))
    for plan, days in ((old, 40), (recent, 20), (latest, 10)):
        asked(store, plan, days=days)
    gone = of(store, old) - of(store, recent, latest)  # the download is that of all three
    assert gone
    assert {each.fingerprint for each in unused(store, 30)} == gone
    assert unused(store, 50) == []
    # However long ago the latest run was, it is not undone.
    assert {each.fingerprint for each in unused(store, 1)} == of(store, old, recent) - of(store, latest)


def test_what_was_made_lately_stays_whoever_made_it(store: Store) -> None:
    asked(store, fabricated.plan(FP16), days=1)
    by_hand = unused(store, 30)[0]
    aged(by_hand.folder / "manifest.json", 2)
    assert by_hand not in unused(store, 30)


def test_what_a_kept_server_serves_stays_with_all_it_was_made_from(store: Store) -> None:
    asked(store, fabricated.plan(FP16), days=1)
    served = fabricated.plan(INT8)
    repository = fabricated.stage_run(served, INT8, "repository")
    folder = store.workspace / "serve" / "chat"
    folder.mkdir(parents=True)
    inputs = {"repository": str(store.folder("repository", repository.fingerprint) / "out")}
    (folder / "job.json").write_text(json.dumps({"inputs": inputs}))
    left = {each.stage for each in unused(store, 30) if each.fingerprint in of(store, served)}
    assert left == {"smoke", "perf", "accuracy"}


def test_the_command(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    asked(store, fabricated.plan(FP16), days=1)
    gone = unused(store, 30)
    words = ["store", "gc", "-w", str(store.workspace), "--unused-days", "30"]
    assert main([*words, "--dry-run"]) == 0
    assert f"{len(gone)} unused artifacts with 0.0 MB would be removed" in capsys.readouterr().out
    assert all(each.folder.is_dir() for each in gone)
    assert main([*words, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["fingerprint"] for each in found["artifacts"]] == [each.fingerprint for each in gone]
    assert found["freed_bytes"] == sum(each.size_bytes for each in gone) > 0
    assert not any(each.folder.exists() for each in gone)
    assert not any(each.is_dir() for each in store.work_dir.iterdir())
    assert unused(store, 30) == []
    assert all(store.get(each.stage, each.fingerprint) for each in store.index.all_artifacts())
    assert main([*words]) == 0
    assert capsys.readouterr().out == "0 unused artifacts with 0.0 MB and 0 attempts removed\n"
    assert main(["store", "gc", "--dry-run", "-w", str(store.workspace)]) == 2
    assert main(["store", "gc", "--unused-days", "-1", "-w", str(store.workspace)]) == 2


def test_nothing_is_removed_while_something_runs(store: Store) -> None:
    asked(store, fabricated.plan(FP16), days=1)
    gone = unused(store, 30)
    claim = store.claim(fabricated.stage_run(fabricated.plan(INT4), INT4, "perf").fingerprint)
    assert claim is not None
    with pytest.raises(StateError, match="something is running in this workspace"):
        store.remove(gone)
    claim.release()
    assert store.remove(gone) == gone


def test_what_a_killed_removal_left_is_swept(store: Store) -> None:
    gone = unused(store, 30)[0]
    gone.folder.rename(store.work_dir / f"{gone.fingerprint}.0")
    assert store.get(gone.stage, gone.fingerprint) is None
    assert store.sweep() == 1
