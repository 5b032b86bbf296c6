"""A matrix that was checked before is not checked again, and nothing but time depends on what was kept of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from tests.helpers.matrix_files import RECIPE, Write
from trtllm_pipeline.config import load, validate
from trtllm_pipeline.config.expand import expand
from trtllm_pipeline.config.load import load_matrix
from trtllm_pipeline.config.recipes import matrices_folder
from trtllm_pipeline.errors import MatrixError

SETS = ["settings.perf.repeats=5", "recipes.*.parameters=7"]


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where things are kept, however lately the package was changed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(load, "_SETTLED_S", float("-inf"))
    return tmp_path / "cache" / "trtllm-pipeline" / "matrices"


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The matrices that were checked."""
    found: list[Path] = []
    real = validate.validated

    def validated(path: Path, sets: list[str]) -> object:
        found.append(path)
        return real(path, sets)

    monkeypatch.setattr(validate, "validated", validated)
    return found


def only(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


@pytest.mark.parametrize("matrix", sorted(matrices_folder().glob("*.yaml")), ids=lambda path: path.stem)
def test_what_was_kept_is_what_was_checked(matrix: Path, checked: list[Path]) -> None:
    first = load_matrix(matrix, ["settings.perf.repeats=5"])
    assert load_matrix(matrix, ["settings.perf.repeats=5"]) == first
    assert checked == [matrix]
    assert load_matrix(matrix) != first
    assert checked == [matrix, matrix]


def test_added_cells_overrides_and_folders_are_kept_too(folder: Path, write: Write, checked: list[Path]) -> None:
    (folder / "models" / "m").mkdir(parents=True)
    config = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size"), 8)
    config |= {"vocab_size": 9, "max_position_embeddings": 9}
    (folder / "models" / "m" / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    path = write(
        axes={"model": ["small", "./models/m"], "settings.perf.concurrency": [[1], [1, 8]]},
        add=[
            {
                "model": "small",
                "precision": "int8_wo",
                "max_batch_size": 64,
                "lengths": "1,1",
                "settings.perf.concurrency": [1],
            }
        ],
        override=[{"where": {"model": "small"}, "settings": {"build": {"use_x": "enable"}}}],
    )
    first = load_matrix(path, SETS)
    again = load_matrix(path, SETS)
    assert again == first
    assert expand(again, default_toolchain="embedded") == expand(first, default_toolchain="embedded")
    assert len(checked) == 1
    (folder / "models" / "m" / "config.json").write_text(json.dumps({**config, "model_type": "qwen3"}))
    assert load_matrix(path, SETS).recipes["./models/m"]["family"] == "qwen3"


def _another_word(path: Path, kept: Path) -> None:
    path.write_text(path.read_text().replace('"name": "', '"name": "x-'))


def _another_recipe(path: Path, kept: Path) -> None:
    recipe = path.parent / "recipes" / "small.yaml"
    recipe.write_text(recipe.read_text() + "parameters: 5\n")


def _a_recipe_that_goes_first(path: Path, kept: Path) -> None:
    (path.parent / "recipes" / "tiny.yaml").write_text(RECIPE.replace("name: small", "name: tiny"))


def _nothing_left(path: Path, kept: Path) -> None:
    only(kept).unlink()


def _a_byte(path: Path, kept: Path) -> None:
    file = only(kept)
    text = file.read_bytes()
    at = text.index(b'"max_batch_size"') + 3
    file.write_bytes(text[:at] + b"y" + text[at + 1 :])


def _half(path: Path, kept: Path) -> None:
    file = only(kept)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _empty(path: Path, kept: Path) -> None:
    only(kept).write_bytes(b"")


def _a_folder(path: Path, kept: Path) -> None:
    file = only(kept)
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    "change",
    [_another_word, _another_recipe, _a_recipe_that_goes_first, _nothing_left, _a_byte, _half, _empty, _a_folder],
)
def test_what_is_not_the_same_is_checked_again(
    write: Write, kept: Path, checked: list[Path], change: Callable[[Path, Path], None]
) -> None:
    path = write(axes={"model": ["small", "tiny"]})
    load_matrix(path)
    load_matrix(path)
    assert len(checked) == 1
    change(path, kept)
    found = load_matrix(path)
    assert len(checked) == 2
    assert found == validate.validated(path, [])[0]


def test_another_program_checks_again(write: Write, checked: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = write()
    load_matrix(path)
    programs = set(load._programs())
    assert {validate.__file__, json.__file__} & programs == {validate.__file__}
    assert any("pydantic_core" in program for program in programs)
    real = load._stamp

    def newer(program: str) -> list[int]:
        size, modified, changed = real(program)
        return [size, modified, changed + (program == validate.__file__)]

    monkeypatch.setattr(load, "_stamp", newer)
    load_matrix(path)
    assert len(checked) == 2


def test_a_program_that_changed_just_now_keeps_nothing(
    write: Write, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_SETTLED_S", float("inf"))
    load_matrix(write())
    assert not kept.exists()


def test_what_others_left_is_not_believed(write: Write, checked: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = write()
    load_matrix(path)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    load_matrix(path)
    assert len(checked) == 2


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022])
def test_what_others_can_write_is_not_believed(write: Write, kept: Path, checked: list[Path], umask: int) -> None:
    path = write()
    before = os.umask(umask)
    try:
        load_matrix(path)
    finally:
        os.umask(before)
    assert kept.stat().st_mode & 0o777 == 0o700
    assert only(kept).stat().st_mode & 0o777 == 0o600
    load_matrix(path)
    assert len(checked) == 1
    for mode in (0o620, 0o602):
        only(kept).chmod(mode)
        load_matrix(path)
    assert len(checked) == 3


def test_faults_are_told_each_time_with_their_lines(write: Write, kept: Path) -> None:
    wrong = write(axes={"precision": ["fp61"]})
    texts = []
    for _ in range(2):
        with pytest.raises(MatrixError) as caught:
            load_matrix(wrong)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert not kept.exists()


def test_faults_of_rules_have_their_lines_although_nothing_is_read_for_the_check(
    write: Write, checked: list[Path]
) -> None:
    path = write(exclude=[{"model": "small", "precision": "fp8"}, {"max_batch_size": 77}])
    texts = []
    for _ in range(2):
        with pytest.raises(MatrixError) as caught:
            expand(load_matrix(path), default_toolchain="embedded")
        texts.append(str(caught.value))
    assert len(checked) == 1
    assert texts[0] == texts[1]
    line = next(number for number, text in enumerate(path.read_text().splitlines(), 1) if "77" in text)
    assert f"matrix.yaml:{line}: exclude[1].max_batch_size: 77 matches" in texts[0]


def test_no_cache_is_no_fault(write: Write, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.parent.parent.write_text("a file where the cache would be")
    load_matrix(write())
    monkeypatch.delenv("XDG_CACHE_HOME")

    def homeless() -> NoReturn:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", homeless)
    load_matrix(write())


def test_the_newest_are_kept(write: Write, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_MOST_KEPT", 2)
    for repeats in range(1, 5):
        load_matrix(write(), [f"settings.perf.repeats={repeats}"])
    assert len(list(kept.iterdir())) == 2
