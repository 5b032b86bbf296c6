"""Models on the Hugging Face Hub as values of the model axis."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.helpers.fake_hub import FakeHub, Repository
from tests.unit.orchestrate.matrix.test_matrix_load import CONFIG
from trtllm_pipeline.base.errors import MatrixError
from trtllm_pipeline.orchestrate.matrix.expand import expand
from trtllm_pipeline.orchestrate.matrix.validate import load_matrix


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    files = {"config.json": json.dumps(CONFIG).encode()}
    with FakeHub({"acme/Small-2L": Repository(files), "acme/Bare": Repository({})}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub


def matrix(folder: Path, *models: str, offline: bool = False) -> Path:
    path = folder / "matrix.yaml"
    axes = {"model": list(models), "precision": ["fp16"], "max_batch_size": [1], "lengths": ["64,64"]}
    path.write_text(json.dumps({"name": "hub", "axes": axes, "settings": {"download": {"offline": offline}}}))
    return path


def test_a_model_on_the_hub_needs_no_recipe(hub: FakeHub, tmp_path: Path) -> None:
    loaded = load_matrix(matrix(tmp_path, "acme/Small-2L"))
    recipe = loaded.recipes["acme/Small-2L"]
    assert (recipe["family"], recipe["hidden_size"]) == ("qwen3", 64)
    assert recipe["sources"] == [{"hugging_face": "acme/Small-2L", "revision": "main"}]
    assert [cell.id for cell in expand(loaded, default_toolchain="auto")] == ["Small-2L/fp16/tp1pp1/bs1/isl64-osl64"]


def test_offline_the_users_cache_is_enough(hub: FakeHub, tmp_path: Path) -> None:
    cached = tmp_path / "cache/models--acme--Small-2L"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("c" * 40)
    (cached / "snapshots" / ("c" * 40)).mkdir(parents=True)
    (cached / "snapshots" / ("c" * 40) / "config.json").write_text(json.dumps(CONFIG))
    recipes = load_matrix(matrix(tmp_path, "acme/Small-2L@main", offline=True)).recipes
    assert recipes["acme/Small-2L@main"]["name"] == "Small-2L-main"
    assert not hub.requests


@pytest.mark.parametrize(
    ("model", "offline", "words"),
    [
        ("acme/Absent", False, "axes.model[0]: acme/Absent"),
        ("acme/Bare", False, "axes.model[0]: acme/Bare: Hugging Face has no config.json for it"),
        ("acme/Small-2L@other", True, "axes.model[0]: acme/Small-2L"),
    ],
)
def test_a_model_that_cannot_be_read_is_a_fault_of_its_line(
    hub: FakeHub, tmp_path: Path, model: str, offline: bool, words: str
) -> None:
    with pytest.raises(MatrixError) as raised:
        load_matrix(matrix(tmp_path, model, offline=offline))
    assert [words in str(fault) for fault in raised.value.faults] == [True], raised.value.faults


def test_a_repository_that_a_recipe_names_is_that_recipe(hub: FakeHub, tmp_path: Path) -> None:
    loaded = load_matrix(matrix(tmp_path, "meta-llama/Llama-3.1-8B-Instruct"))
    recipe = loaded.recipes["meta-llama/Llama-3.1-8B-Instruct"]
    assert (recipe["name"], recipe["precisions"] is not None) == ("llama-3.1-8b-instruct", True)
    assert not hub.requests


def test_a_revision_replaces_the_recipes(hub: FakeHub, tmp_path: Path) -> None:
    name = "meta-llama/Llama-3.1-8B-Instruct@refs/pr/3"
    recipe = load_matrix(matrix(tmp_path, name)).recipes[name]
    assert recipe["name"] == "llama-3.1-8b-instruct-refs-pr-3"
    assert [source["revision"] for source in recipe["sources"]] == ["refs/pr/3"]
    assert recipe["hidden_size"] == 4096


def test_a_directory_of_that_name_comes_first(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "acme/Small-2L").mkdir(parents=True)
    (tmp_path / "acme/Small-2L/config.json").write_text(json.dumps(CONFIG))
    recipe = load_matrix(matrix(tmp_path, "acme/Small-2L")).recipes["acme/Small-2L"]
    assert recipe["sources"][0] == {"local": "acme/Small-2L"}
