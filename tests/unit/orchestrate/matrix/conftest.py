"""A directory with small recipes, and how to write matrices into it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.matrix_files import MATRIX, RECIPE, Write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "small.yaml").write_text(RECIPE)
    (tmp_path / "recipes" / "small-2.yaml").write_text(RECIPE.replace("name: small", "name: small-2"))
    return tmp_path


@pytest.fixture
def write(folder: Path) -> Write:
    """Writes a matrix: the usual one with other top-level keys, or other axes, or a whole text."""

    def write(text: str | None = None, *, axes: dict[str, Any] | None = None, **keys: Any) -> Path:
        path = folder / "matrix.yaml"
        data = {**MATRIX, "axes": {**MATRIX["axes"], **(axes or {})}, **keys}
        path.write_text(json.dumps(data, indent=1) if text is None else text)
        return path

    return write
