"""Recipes are pinned to the commits that the hubs name, and keep the rest of their text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from maintenance import pin_recipes
from tests.helpers.fake_hub import FakeHub, Repository

pytestmark = pytest.mark.seam
MODEL = "org/model"
RECIPE = f"""# A model.
name: model
sources:
  - hugging_face: {MODEL}
  - modelscope: {MODEL}
    revision: master

# From its page.
parameters: 1
"""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    monkeypatch.setenv("MODELSCOPE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with FakeHub({MODEL: Repository({"config.json": b"{}", "model.safetensors": b"0"})}) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", served.url)
        yield served


def test_both_hubs_commits_are_written(hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(RECIPE, encoding="utf-8")
    commit = hub.repositories[MODEL].commit
    assert pin_recipes.main([str(file)]) == 0
    assert file.read_text(encoding="utf-8") == RECIPE, "only shown"
    assert capsys.readouterr().out.splitlines() == [
        f"model.yaml: {kind} {MODEL}: {commit}" for kind in ("hugging_face", "modelscope")
    ]
    assert pin_recipes.main([str(file), "--write"]) == 0
    written = RECIPE.replace("    revision: master\n", "").replace(MODEL, f"{MODEL}\n    revision: {commit}")
    assert file.read_text(encoding="utf-8") == written
    capsys.readouterr()
    assert pin_recipes.main([str(file), "--write"]) == 0
    assert capsys.readouterr().out == "", "a commit is not asked for again"


def test_a_model_that_a_hub_does_not_have_is_left_as_it_is(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(RECIPE.replace(MODEL, "org/other"), encoding="utf-8")
    before = file.read_text(encoding="utf-8")
    assert pin_recipes.main([str(file), "--write"]) == 1
    assert file.read_text(encoding="utf-8") == before
    assert capsys.readouterr().out.count("not pinned: org/other") == 2
