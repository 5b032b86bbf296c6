"""The lock file of a run plans the same on another machine, in another workspace, to the same fingerprints."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.matrix_files import RECIPE
from trtllm_pipeline.orchestrate.matrix.recipe_files import matrices_folder
from trtllm_pipeline.orchestrate.plan import planner
from trtllm_pipeline.orchestrate.plan.plan import Plan
from trtllm_pipeline.orchestrate.plan.planner import Request
from trtllm_pipeline.orchestrate.run.run_folder import _pinned, write_lock
from trtllm_pipeline.orchestrate.store.store import Store

SHIPPED = sorted(matrices_folder().glob("*.yaml"))
GPUS = "tensorrt_llm==1.1.0,sm=90,gpus=8,gpu_memory_gib=80"
PROMPTS = [{"input": "Say it.", "output": "it"}]


def locked(request: Request, folder: Path, store: Store | None = None) -> Plan:
    """What is planned, and its lock in `directory`."""
    loaded, machine = planner.load(request), planner.machine_of(request)
    plan = planner.plan_of(request, store, guess=True)
    write_lock(request, loaded, plan, folder, default_toolchain=planner.default_toolchain(request, loaded, machine))
    return plan


def again(folder: Path, machine: str, workspace: Path) -> Plan:
    """What the lock plans on another machine, as its first line says to run it."""
    head, _, _ = (folder / "matrix.yaml").read_text(encoding="utf-8").partition("\n")
    words = shlex.split(head.removeprefix("# "))
    assert words[:4] == ["pipeline", "run", "--matrix", "matrix.yaml"]
    given = dict(zip(words[4::2], words[5::2], strict=True))
    cells = (given["--cells"],) if "--cells" in given else ()
    store = Store(workspace)
    try:
        asked = Request(folder / "matrix.yaml", cells=cells, until=given.get("--until"), assume=machine)
        return planner.plan_of(asked, store, guess=True)
    finally:
        store.close()


def fingerprints(plan: Plan) -> dict[str, list[str]]:
    return {cell: [plan.stage_runs[run].fingerprint for run in runs] for cell, runs in plan.by_cell.items()}


@pytest.mark.parametrize("matrix", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_matrix(matrix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = locked(Request(matrix, assume=GPUS), tmp_path / "lock")
    monkeypatch.chdir(tmp_path)
    elsewhere = again(tmp_path / "lock", f"{GPUS},cpus=64", tmp_path / "w")
    assert fingerprints(elsewhere) == fingerprints(plan)
    assert any(fingerprints(plan).values())


def write(folder: Path, **more: Any) -> Path:
    """A matrix that needs much of what lies around it."""
    (folder / "recipes").mkdir(parents=True)
    small = yaml.safe_load(RECIPE)
    small["sources"] = [{"generated": "llama"}]
    unable = {**small, "name": "unable", "max_position_embeddings": 16, "sources": [{"local": "./unable"}]}
    for recipe in (small, unable):
        (folder / "recipes" / f"{recipe['name']}.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "data").mkdir()
    for name in ("prompts", "others"):
        (folder / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    (folder / "own.py").write_text("def f(answer, row): return 1\n")
    axes = {"model": ["small", "unable"], "precision": ["fp16", "int8_wo"], "max_batch_size": [4], "lengths": ["64,16"]}
    matrix = {
        "name": "m",
        "axes": {**axes, "parallel": ["tp1", "tp2"], **more.pop("axes", {})},
        "settings": {
            "perf": {"input_data": "data/prompts.jsonl"},
            "accuracy": {"input_data": "../shared.jsonl", "metrics": ["exact", "own:f"]},
        },
        **more,
    }
    (folder.parent / "shared.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    path = folder / "matrix.yaml"
    path.write_text(yaml.safe_dump(matrix))
    return path


def moved(lock: Path, tmp_path: Path) -> Path:
    """The lock alone, on a machine that has nothing else of it."""
    there = tmp_path / "there" / "lock"
    there.parent.mkdir()
    lock.rename(there)
    for path in ("home", "shared.jsonl"):
        shutil.rmtree(tmp_path / path) if (tmp_path / path).is_dir() else (tmp_path / path).unlink(missing_ok=True)
    return there


def test_it_brings_data_metrics_and_recipes_and_keeps_the_toolchain(tmp_path: Path) -> None:
    """Locked without a GPU, planned where TensorRT-LLM would be the toolchain."""
    path = write(tmp_path / "home")
    sets = ("settings.perf.requests=3", "axes.max_batch_size=[2]")
    plan = locked(Request(path, sets=sets, toolchain="embedded", assume="gpus=0,cpus=8"), tmp_path / "lock")
    assert {cell.toolchain for cell in plan.cells} == {"embedded"}
    assert any(cell.reason for cell in plan.cells)
    there = moved(tmp_path / "lock", tmp_path)
    elsewhere = again(there, f"{GPUS.replace('gpus=8', 'gpus=1')},cpus=8", tmp_path / "w")
    assert fingerprints(elsewhere) == fingerprints(plan)
    assert [cell.reason for cell in elsewhere.cells] == [cell.reason for cell in plan.cells]
    named = {file for run in elsewhere.stage_runs.values() for file in run.files.values()}
    assert all(file.startswith((str(there), str(matrices_folder().parents[1]))) for file in named)


def test_data_that_an_axis_or_a_rule_names(tmp_path: Path) -> None:
    rule = {"where": {"precision": "fp16"}, "settings": {"accuracy": {"input_data": "data/others.jsonl"}}}
    files = ["data/prompts.jsonl", "data/others.jsonl"]
    path = write(
        tmp_path / "home", axes={"settings.perf.input_data": files}, override=[rule], settings={"perf": {"requests": 2}}
    )
    plan = locked(Request(path, toolchain="embedded", assume="gpus=0,cpus=8"), tmp_path / "lock")
    there = moved(tmp_path / "lock", tmp_path)
    assert fingerprints(again(there, "gpus=0,cpus=8", tmp_path / "w")) == fingerprints(plan)


def test_a_part_of_a_matrix_is_the_same_part(tmp_path: Path) -> None:
    path = write(tmp_path / "home")
    request = Request(path, cells=("small/int8_wo/*",), until="build", toolchain="embedded", assume="gpus=0,cpus=8")
    plan = locked(request, tmp_path / "lock")
    there = moved(tmp_path / "lock", tmp_path)
    assert fingerprints(again(there, "gpus=0,cpus=8", tmp_path / "w")) == fingerprints(plan)


def test_large_data_is_named_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtllm_pipeline.orchestrate.run.run_folder._MOST_BYTES", 10)
    path = write(tmp_path / "home")
    locked(Request(path, toolchain="embedded", assume="gpus=0"), tmp_path / "lock")
    data = yaml.safe_load((tmp_path / "lock" / "matrix.yaml").read_text())
    assert data["settings"]["perf"]["input_data"] == str(tmp_path / "home" / "data" / "prompts.jsonl")
    assert not (tmp_path / "lock" / "data").exists()


def test_data_of_a_hub_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = tmp_path / "cache.jsonl"
    fetched.write_text(json.dumps(PROMPTS[0]))
    monkeypatch.setattr("trtllm_pipeline.models.hub.dataset_file.fetch", lambda _name: fetched)
    settings = {"perf": {"input_data": "hub:org/data/rows.jsonl"}}
    request = Request(write(tmp_path / "home", settings=settings), toolchain="embedded", assume="gpus=0,cpus=8")
    plan = locked(request, tmp_path / "lock")
    fetched.unlink()  # the hub has other rows by now
    there = moved(tmp_path / "lock", tmp_path)
    assert fingerprints(again(there, "gpus=0,cpus=8", tmp_path / "w")) == fingerprints(plan)


@pytest.mark.parametrize(
    "pinned",
    [
        {"hugging_face": "org/small", "revision": "c" * 40},
        {"modelscope": "org/small", "revision": "d" * 40, "listing": "e" * 64},
        {"modelscope": "org/small", "revision": "master", "listing": "e" * 64},
    ],
    ids=["hugging_face", "modelscope", "modelscope_without_commits"],
)
@pytest.mark.parametrize("files", [None, {"config.json": "a" * 64}], ids=["no_digests", "digests"])
def test_a_branch_that_moved_on_moves_nothing(
    pinned: dict[str, str], files: dict[str, str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a model's own code, which a pinned source carries too. Neither hub is asked by the plan of a lock, which has the
    other one's copy where the files are known."""
    kind = next(iter(pinned))
    other = "modelscope" if kind == "hugging_face" else "hugging_face"
    path = write(tmp_path / "home", settings={"download": {"trust_remote_code": {"small": {"modeling.py": "f" * 64}}}})
    recipe = tmp_path / "home" / "recipes" / "small.yaml"
    data = yaml.safe_load(recipe.read_text())
    recipe.write_text(yaml.safe_dump({**data, "sources": [{kind: "org/small"}, {other: "org/copy"}]}))
    for look in ("quantized", "configuration"):
        monkeypatch.setattr(f"trtllm_pipeline.models.hub.peek.{look}", lambda *_source, **_how: None)
    with monkeypatch.context() as reached:
        reached.setattr("trtllm_pipeline.models.hub.sources.resolve", lambda *_sources, **_how: dict(pinned))
        reached.setattr("trtllm_pipeline.models.hub.sources.content_of", lambda *_source, **_how: files)
        plan = locked(Request(path, toolchain="embedded", assume="gpus=0,cpus=8"), tmp_path / "lock")
    for hub in ("hugging_face.pin", "modelscope.pin", "sources.content_of"):
        monkeypatch.setattr(f"trtllm_pipeline.models.hub.{hub}", lambda *_model, **_how: pytest.fail("a hub was asked"))
    there = moved(tmp_path / "lock", tmp_path)
    elsewhere = again(there, "gpus=0,cpus=8", tmp_path / "w")
    assert fingerprints(elsewhere) == fingerprints(plan)
    download = next(run for run in elsewhere.stage_runs.values() if run.stage.name == "download")
    code = {"modeling.py": "f" * 64}
    params = {"source": {**pinned, "code": code}} if files is None else {"content": {**files, **code}}
    assert json.loads(download.key)["params"] == params
    assert os.listdir(there / "recipes") != []
    copies = [] if files is None else ["org/copy"]
    assert [copy[other] for copy in download.params.copies or ()] == copies


@pytest.mark.parametrize(("revision", "listed"), [("a" * 40, {"modeling.py": "f" * 64}), ("main", {})])
def test_code_is_listed_for_a_commit(revision: str, listed: dict[str, str]) -> None:
    """So that a lock's plan asks no hub which code the model brings."""
    code = {"files": {"modeling.py": "f" * 64}, "page": "https://hub/m"}
    source = {"hugging_face": "org/small", "revision": revision, "code": {"modeling.py": "f" * 64}}
    found = _pinned({"name": "small", "code_files": {"other.py": "0" * 64}, "source": source, "code": code})
    assert found == {
        "name": "small",
        "code_files": listed,
        "sources": [{"hugging_face": "org/small", "revision": revision}],
    }
