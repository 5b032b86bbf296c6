"""What a run pulls from a remote store instead of making it, and what becomes of what cannot be pulled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import fabricated
from tests.helpers.fabricated import recorded
from tests.helpers.matrix_files import RECIPE
from trtllm_pipeline.base.domain import Cell, Fingerprint, Scope
from trtllm_pipeline.orchestrate.plan import planner
from trtllm_pipeline.orchestrate.plan.plan import Plan
from trtllm_pipeline.orchestrate.plan.planner import Request, read_request
from trtllm_pipeline.orchestrate.run.forecast import forecast, plan_json
from trtllm_pipeline.orchestrate.run.loop import Observer
from trtllm_pipeline.orchestrate.run.work import RemoteSource
from trtllm_pipeline.orchestrate.store import remote_store
from trtllm_pipeline.orchestrate.store.claims import Claim
from trtllm_pipeline.orchestrate.store.remote_store import ArtifactKey, ArtifactTransfer, Progress, Remote
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.show.cli.app import main
from trtllm_pipeline.show.report.plan_text import plan_markdown, plan_text

FP16, INT8 = (fabricated.cell(precision) for precision in ("fp16", "int8_wo"))
PLAN = fabricated.plan(FP16, INT8)


class Told(Observer):
    def __init__(self) -> None:
        self.said: list[str] = []
        self.wrong: list[str] = []

    def pulling(self, message: str, *, wrong: bool = False) -> None:
        (self.wrong if wrong else self.said).append(message)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Store]:
    """A workspace in which all was made."""
    store = Store(tmp_path / "made")
    for run in PLAN.stage_runs.values():
        if run.stage.scope is not Scope.SERVICE:
            fabricated.publish(store, run, {"weights": run.id.encode() * 1000})
    yield store
    store.close()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "remote")


def push(store: Store, url: str, *stages: str) -> None:
    chosen = [ArtifactKey(each.stage, each.fingerprint) for each in store.index.all_artifacts() if each.stage in stages]
    with closing(Remote(url)) as there:
        list(remote_store.push(store, there, remote_store.compare_to_push(store, there, chosen), Progress()))


def source(url: str, gpus: tuple[str, ...] = (), **asked: Any) -> RemoteSource:
    return RemoteSource(url, Request(Path(), **asked), gpus)


def names(runs: Any) -> list[str]:
    return sorted(PLAN.stage_runs[run].stage.name for run in runs)


def damage(url: str, store: Store, cell: Cell, stage: str) -> Path:
    """Other content of the same size in the place of an artifact's largest file."""
    artifact = store.get(stage, fabricated.stage_run(PLAN, cell, stage).fingerprint)
    files = json.loads((artifact.folder / "manifest.json").read_text())["files"]
    largest = max(files, key=lambda each: each["size"])
    (place,) = Path(url, "artifacts", stage, artifact.fingerprint).glob(f"*/out/{largest['path']}")
    place.chmod(0o644)
    place.write_bytes(b"?" * largest["size"])
    return place


def test_of_what_an_engine_was_made_from_nothing_is_asked_for(made: Store, url: str) -> None:
    push(made, url, "build", "convert", "perf", "smoke")
    offers = source(url).offers(PLAN, ())
    assert names(offers.pulls) == ["build", "build"], "what is measured is measured here"
    assert offers.size_bytes > 0
    seen = forecast(PLAN, None, offers=offers)
    assert "convert" not in names(seen.to_run)
    assert names(seen.to_run).count("perf") == 2
    # What only one of two needs is pulled for that one.
    there = fabricated.stage_run(PLAN, FP16, "build").fingerprint
    assert len(source(url).offers(PLAN, {there}).pulls) == 1
    push(made, url, "download")
    assert names(source(url).offers(PLAN, ()).pulls) == ["build", "build", "download"]


def test_a_plan_shows_what_is_pulled(made: Store, url: str) -> None:
    push(made, url, "build")
    seen = forecast(PLAN, None, offers=source(url).offers(PLAN, ()))
    text = plan_text(PLAN, seen, verbose=False)
    assert "to pull" in text
    assert ": not needed" in plan_text(PLAN, seen, verbose=True), "what is not made has no expected time"
    assert f"pull: 2 artifacts from {url}, 0.0 MB, instead of creating them" in text
    assert "| to pull |" in plan_markdown(PLAN, seen, "Plan")
    data = json.loads("\n".join(plan_json(PLAN, None, seen)))
    actions = {(run["stage"], run["action"], "pull_bytes" in run) for run in data["stage_runs"]}
    assert ("build", "pull", True) in actions
    assert ("convert", "skip", False) in actions
    assert "to pull" not in plan_text(PLAN, forecast(PLAN, None), verbose=False)


def test_pulled_it_is_there(made: Store, store: Store, url: str) -> None:
    push(made, url, "build", "download")
    told = Told()
    present = source(url).pull(PLAN, store, {}, told)
    assert sorted(each.stage for each in present.values()) == ["build", "build", "download"]
    assert [*store.verify()] == [[], [], []]
    assert (len(told.said), told.wrong) == (1, [])
    assert source(url).pull(PLAN, store, present, told) == present
    assert len(told.said) == 1


def test_what_is_damaged_there_is_made_of_what_is_not(made: Store, store: Store, url: str) -> None:
    push(made, url, "build", "convert", "download")
    damage(url, made, INT8, "build")
    told = Told()
    present = source(url).pull(PLAN, store, {}, told)
    assert sorted(each.stage for each in present.values()) == ["build", "convert", "download"]
    (wrong,) = told.wrong
    assert "is damaged there" in wrong
    assert wrong.endswith("; it is built here")
    assert fabricated.stage_run(PLAN, INT8, "convert").fingerprint in present


def test_what_another_process_pulls_is_waited_for(made: Store, store: Store, url: str) -> None:
    push(made, url, "build", "convert")
    run = fabricated.stage_run(PLAN, FP16, "build")
    claim = store.claim(run.fingerprint)
    assert claim is not None
    store.arriving("build", run.fingerprint).mkdir(parents=True)
    waits = f"{run.id}: waiting for another process to pull it"

    class Killing(Told):
        """The other process is killed while it is waited for."""

        def pulling(self, message: str, *, wrong: bool = False) -> None:
            super().pulling(message, wrong=wrong)
            if message == waits:
                claim.release()

    told = Killing()
    present = source(url).pull(PLAN, store, {}, told)
    assert sorted(each.stage for each in present.values()) == ["build", "build"]
    assert waits in told.said
    # What another one makes is not.
    claim = store.claim(fabricated.stage_run(PLAN, FP16, "download").fingerprint)
    push(made, url, "download")
    assert source(url).pull(PLAN, store, present, told) == present
    claim.release()


def test_what_another_process_had_for_a_moment_is_pulled(
    made: Store, store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(made, url, "build")
    claim, refused = store.claim, set[str]()

    def late(fingerprint: Fingerprint) -> Claim | None:
        taken = fingerprint in refused
        refused.add(fingerprint)
        return claim(fingerprint) if taken else None

    monkeypatch.setattr(store, "claim", late)
    assert sorted(each.stage for each in source(url).pull(PLAN, store, {}, Told()).values()) == ["build", "build"]


def test_who_looks_at_the_moment_a_pull_begins_sees_that_it_is_one(
    made: Store, store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(made, url, "build")
    fetch, seen = Remote.fetch, list[bool]()

    def begins(there: Remote, store: Store, each: ArtifactTransfer, *more: Any) -> None:
        seen.append(store.arriving(each.stage, each.fingerprint).is_dir())
        fetch(there, store, each, *more)

    monkeypatch.setattr(Remote, "fetch", begins)
    source(url).pull(PLAN, store, {}, Told())
    assert seen == [True, True]


def test_a_damaged_file_is_replaced_by_a_push_that_looks(made: Store, store: Store, url: str) -> None:
    push(made, url, "build")
    place = damage(url, made, INT8, "build")
    words = ["store", "push", url, "build", "-w", str(made.workspace)]
    assert main(words) == 0
    assert place.read_bytes().startswith(b"?"), "it has its manifest, and nothing else was checked"
    assert main([*words, "--verify"]) == 0
    assert not place.read_bytes().startswith(b"?")
    assert source(url).pull(PLAN, store, {}, Told()).keys() == {
        fabricated.stage_run(PLAN, cell, "build").fingerprint for cell in (FP16, INT8)
    }


def test_a_remote_that_is_not_there_is_told_and_everything_is_made(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told = Told()
    away = source("http://127.0.0.1:1/engines")
    offers = away.offers(PLAN, ())
    assert offers.fault is not None
    assert "no artifacts pulled: http://127.0.0.1:1/engines" in plan_text(
        PLAN, forecast(PLAN, None, offers=offers), verbose=False
    )
    assert away.pull(PLAN, store, {}, told) == {}
    assert len(told.wrong) == 1


@pytest.mark.parametrize(
    ("gpus", "asked", "pulled"),
    [
        ((), {}, True),
        (("NVIDIA H100 80GB HBM3", "NVIDIA H200"), {}, True),
        (("NVIDIA H200",), {}, False),
        (("NVIDIA H200",), {"allow_other_gpu": True}, True),
    ],
)
def test_an_engine_of_another_gpu_is_refused_unless_that_is_allowed(
    store: Store, tmp_path: Path, url: str, gpus: tuple[str, ...], asked: dict[str, Any], pulled: bool
) -> None:
    plan = trtllm_plan(tmp_path)
    run = next(run for run in plan.stage_runs.values() if run.stage.name == "build")
    other = Store(tmp_path / "other")
    attempt = other.begin("r", "build", run.fingerprint)
    (attempt.out / "rank0.engine").write_text("engine")
    system = {"gpus": ["NVIDIA H100 80GB HBM3, 80 GiB"] * 2}
    recorded(other, attempt, run.key, run.label, {"system": system})
    push(other, url, "build")
    told = Told()
    offers = source(url, gpus, **asked).offers(plan, ())
    assert set(offers.pulls) == ({run.id} if pulled else set())
    source(url, gpus, **asked).pull(plan, store, {}, told)
    assert (store.get("build", run.fingerprint) is not None) == pulled
    if not pulled:
        (wrong,) = told.wrong
        assert (
            "was built on NVIDIA H100 80GB HBM3, this machine has NVIDIA H200 (--allow-other-gpu accepts it)" in wrong
        )
        text = plan_text(plan, forecast(plan, None, offers=offers), verbose=False)
        assert "not pulled: 1 x build: was built on NVIDIA H100 80GB HBM3" in text


def trtllm_plan(tmp_path: Path) -> Plan:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/small.yaml").write_text(RECIPE.replace("{local: ./small}", "{generated: llama}"))
    matrix = "name: test\naxes: {model: [small], precision: [fp16], max_batch_size: [4], lengths: ['128,32']}\n"
    (tmp_path / "matrix.yaml").write_text(matrix)
    assume = "tensorrt_llm==0.16.0,sm=90,gpus=1,gpu_memory_gib=80"
    return planner.plan_of(Request(tmp_path / "matrix.yaml", assume=assume), None, guess=True)


def test_what_was_asked_for_is_asked_for_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trtllm_plan(tmp_path)
    plan = ["plan", "-m", "matrix.yaml", "--assume", "tensorrt_llm==0.16.0,sm=90,gpus=1,gpu_memory_gib=80"]
    assert main([*plan, "--remote", "engines"]) == 0
    assert f"nothing to pull from {tmp_path}/engines" in capsys.readouterr().out
    # A directory that a matrix names is beside it.
    (tmp_path / "matrix.yaml").write_text(f"remote: engines\n{(tmp_path / 'matrix.yaml').read_text()}")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    plan[2] = "../matrix.yaml"
    assert main(plan) == 0
    assert "nothing to pull from ../engines" in capsys.readouterr().out
    assert main([*plan, "--remote", "https://user:secret@127.0.0.1:1/engines"]) == 2
    assert "secret" not in capsys.readouterr().err
    request = Request(tmp_path / "matrix.yaml", remote="s3://engines/x", allow_other_gpu=True)
    (tmp_path / "request.json").write_text(json.dumps(request.to_json()))
    assert read_request(tmp_path / "request.json") == request
