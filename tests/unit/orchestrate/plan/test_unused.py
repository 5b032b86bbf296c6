"""What `store prune` removes, what it leaves and why, and what `store keep` and `store du` say."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import fabricated
from trtllm_pipeline.base.domain import Fingerprint
from trtllm_pipeline.base.errors import StateError, UsageError
from trtllm_pipeline.orchestrate.plan.plan import Plan
from trtllm_pipeline.orchestrate.plan.plan_file import plan_lines
from trtllm_pipeline.orchestrate.plan.unused import KEPT, Roots, sort_out
from trtllm_pipeline.orchestrate.store import claims
from trtllm_pipeline.orchestrate.store.index import Artifact
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.show.cli.app import main

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


def asked(store: Store, plan: Plan, *, days: float, name: str | None = None) -> None:
    """A run so many days ago."""
    folder = store.runs_dir / (name or f"run-{1000 - days:.0f}")
    folder.mkdir()
    lines = plan_lines(plan, present=(), to_run=(), reasons={}, times=lambda _run: None, commands=lambda _run: [])
    (folder / "plan.json").write_text("\n".join(lines))
    aged(folder / "plan.json", days)


def of(store: Store, *plans: Plan) -> set[str]:
    wanted = {run.fingerprint for plan in plans for run in plan.stage_runs.values()}
    return {each.fingerprint for each in store.index.all_artifacts() if each.fingerprint in wanted}


def unused(store: Store, days: float) -> list[Artifact]:
    return list(sort_out(store, Roots(unused_days=days)).unused)


def left(store: Store, **roots: Any) -> set[str]:
    return {each.fingerprint for each, _ in sort_out(store, Roots(**roots)).needed}


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
    gone = {each.stage for each in unused(store, 30) if each.fingerprint in of(store, served)}
    assert gone == {"smoke", "perf", "accuracy"}


def test_the_latest_runs_named_ones_and_matrices_stay(store: Store) -> None:
    old, named, latest = (fabricated.plan(cell) for cell in (INT4, FP16, INT8))
    for number, (plan, name) in enumerate(((old, "old"), (named, "release-1.0"), (latest, "x"))):
        asked(store, plan, days=40 - number, name=f"20260101-00000{number}-{name}")
    every = of(store, old, named, latest)
    assert left(store) == every, "nothing was said to be unused"
    assert left(store, runs=1) == of(store, latest)
    assert left(store, runs=2) == of(store, latest, named)
    assert left(store, named=("release-1.0",)) == of(store, latest, named)
    assert left(store, named=("old",), runs=2) == every
    planned = {"my.yaml": {run.fingerprint for run in old.stage_runs.values()}}
    assert left(store, matrices=planned) == of(store, latest, old)
    reasons = {why for _, why in sort_out(store, Roots(named=("old",), matrices=planned, runs=2)).needed}
    assert reasons == {
        "the latest run, 20260101-000002-x",
        "run 20260101-000000-old",
        "one of the latest 2 runs",
    }
    with pytest.raises(UsageError, match=r"there is no run 'release-2\.0'"):
        left(store, named=("release-2.0",))
    with pytest.raises(UsageError, match=r"there is no run 'release-2\.0'"):
        left(store, named=("old", "release-1.0", "release-2.0"))  # all is needed
    (store.runs_dir / "20260101-000000-old" / "plan.json").write_text("{")
    with pytest.raises(StateError, match="not a plan"):
        left(store, runs=3)


def test_what_is_kept_stays_with_all_it_was_made_from(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    asked(store, fabricated.plan(FP16), days=1)
    build = fabricated.stage_run(fabricated.plan(INT8), INT8, "build")
    where = ["-w", str(store.workspace)]
    assert main(["store", "keep", f"build-{build.fingerprint[:12]}", *where]) == 0
    more = left(store, runs=1) - of(store, fabricated.plan(FP16))
    assert {each.stage for each in store.index.artifacts(more).values()} == {"build", "convert"}
    capsys.readouterr()
    assert main(["store", "keep", *where, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["artifacts"] == [{"stage": "build", "fingerprint": build.fingerprint}]
    assert main(["store", "keep", "--run", "latest", *where]) == 0
    assert main(["store", "keep", "--forget", "build", *where]) == 0
    assert build.fingerprint not in left(store, runs=1)
    assert main(["store", "keep", "--forget", *where]) == 2
    assert main(["store", "keep", "--forget", "--run", "latest", *where]) == 0
    assert capsys.readouterr().out.endswith("no artifacts are protected\n")
    (store.workspace / KEPT).write_text("[]")
    assert main(["store", "prune", "--unused-for", "1d", *where]) == 2, "what is kept is not known"


def test_the_command(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    asked(store, fabricated.plan(FP16), days=1)
    gone = unused(store, 30)
    words = ["store", "prune", "-w", str(store.workspace), "--unused-for", "30d"]
    assert main([*words, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert f"would be removed: {len(gone)} unused artifacts with 0.0 MB" in out
    assert "the latest run, run-999" in out
    assert all(each.folder.is_dir() for each in gone)
    assert main([*words, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["fingerprint"] for each in found["artifacts"]] == [each.fingerprint for each in gone]
    assert {each["why"] for each in found["kept"]} == {"the latest run, run-999"}
    assert found["freed_bytes"] == sum(each.size_bytes for each in gone) > 0
    assert not any(each.folder.exists() for each in gone)
    assert not any(each.is_dir() for each in store.work_dir.iterdir())
    assert unused(store, 30) == []
    assert all(store.get(each.stage, each.fingerprint) for each in store.index.all_artifacts())
    assert main([*words]) == 0
    assert capsys.readouterr().out == "removed: 0 unused artifacts with 0.0 MB, 0 attempts of killed runs\n"
    assert main(["store", "prune", "--unused-for", "-1d", "-w", str(store.workspace)]) == 2


def test_without_a_word_of_what_is_needed_only_what_was_left_is_removed(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    every = {each.fingerprint for each in store.index.all_artifacts()}
    attempt = store.begin("killed", "build", Fingerprint("0" * 32))
    (attempt.out / "half").write_bytes(b"x" * 3_000_000)
    pulled, other = (store.arriving("build", Fingerprint(digit * 32)) for digit in "12")
    old, new = (store.work_dir / "partial" / (digit * 32) for digit in "ab")
    for folder in (pulled, other, old, new):
        folder.mkdir(parents=True)
        (folder / "part").write_bytes(b"x" * 1_000_000)
    for path in (old / "part", old):
        aged(path, 8)
    words = ["store", "prune", "-w", str(store.workspace)]
    assert main([*words, "--dry-run"]) == 0
    assert "would be removed: 3 attempts of killed runs, 1 partial transfer with 6.0 MB" in capsys.readouterr().out
    assert attempt.folder.is_dir()
    claim = store.claim(Fingerprint("1" * 32))
    assert main(words) == 0
    assert [each.is_dir() for each in (attempt.folder, pulled, other, old, new)] == [False, True, False, False, True]
    claim.release()
    assert main(words) == 0
    assert not pulled.is_dir()
    assert {each.fingerprint for each in store.index.all_artifacts()} == every


def test_what_takes_the_space_is_told_by_stage_model_and_precision(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store", "du", "-w", str(store.workspace), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    artifacts = store.index.all_artifacts()
    assert found["artifacts"] == len(artifacts)
    for shares in found["by"].values():
        assert sum(each["size_bytes"] for each in shares.values()) == sum(each.size_bytes for each in artifacts)
    assert set(found["by"]["precision"]) == {"as downloaded", "fp16", "int8_wo", "int4_wo"}
    assert found["by"]["stage"]["build"]["artifacts"] == 3
    assert set(found["by"]["model"]) == {"smollm2"}
    assert main(["store", "du", "-w", str(store.workspace)]) == 0
    assert "as downloaded" in capsys.readouterr().out


def test_while_a_run_uses_what_it_found_nothing_is_removed_and_no_run_begins_meanwhile(store: Store) -> None:
    asked(store, fabricated.plan(FP16), days=1)
    gone = unused(store, 30)
    with store.in_use(), store.in_use(), pytest.raises(StateError, match="a run in this workspace may need"):
        store.remove(lambda: gone)
    assert store.remove(lambda: gone[:1]) == gone[:1]
    alone = claims.take(store.work_dir / "users.lock", remove=False)
    with pytest.raises(StateError, match="removing unused artifacts"), store.in_use():
        pass
    alone.release()


def test_what_a_run_asked_for_while_older_things_were_removed_stays(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked(store, fabricated.plan(FP16), days=1)
    gone = unused(store, 30)
    assert gone
    sweep = Store.sweep

    def runs_meanwhile(self: Store) -> list[Path]:
        asked(store, fabricated.plan(FP16, INT8, INT4), days=0)
        return sweep(self)

    monkeypatch.setattr(Store, "sweep", runs_meanwhile)
    words = ["store", "prune", "-w", str(store.workspace), "--unused-for", "30d", "--format", "json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["artifacts"] == []
    assert all(each.folder.is_dir() for each in gone)


def test_nothing_is_removed_while_something_runs(store: Store) -> None:
    asked(store, fabricated.plan(FP16), days=1)
    gone = unused(store, 30)
    claim = store.claim(fabricated.stage_run(fabricated.plan(INT4), INT4, "perf").fingerprint)
    with pytest.raises(StateError, match="a run in this workspace may need"):
        store.remove(lambda: gone)
    claim.release()
    assert store.remove(lambda: gone) == gone


def test_what_a_killed_removal_left_is_swept(store: Store) -> None:
    gone = unused(store, 30)[0]
    gone.folder.rename(store.work_dir / f"{gone.fingerprint}.0")
    assert store.get(gone.stage, gone.fingerprint) is None
    assert len(store.sweep()) == 1
