"""One house enters another only by its door: the names in its `__init__.pyi`, so that a wider door shows in a diff."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from trtllm_pipeline import PACKAGE

HOUSES = ("base", "models", "measure", "tensorrt", "orchestrate", "serve", "show")
"""Each may import from those before it."""


def door(house: str) -> list[str]:
    return list(import_module(f"trtllm_pipeline.{house}").__all__)


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Module and name of each import from this package in `path`."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("trtllm_pipeline."):
            for alias in node.names:
                yield node.module.removeprefix("trtllm_pipeline."), alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("trtllm_pipeline."):
                    yield alias.name.removeprefix("trtllm_pipeline."), ""


@cache
def entries() -> list[tuple[Path, str, str, str]]:
    """File, its house, the module it imports from, and the name, for all imports from another house."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        house = path.relative_to(PACKAGE).parts[0]
        for module, name in imports(path):
            if module.split(".")[0] in HOUSES and module.split(".")[0] != house:
                found.append((path, house, module, name))
    return found


def test_a_house_is_entered_by_its_door_and_only_from_houses_above_it() -> None:
    inside = [
        f"{path}: from trtllm_pipeline.{module} import {name}"
        for path, house, module, name in entries()
        if module not in HOUSES
        or name not in door(module)
        or (house in HOUSES and HOUSES.index(module) > HOUSES.index(house))
    ]
    assert inside == []


@pytest.mark.parametrize("house", HOUSES)
def test_every_name_at_a_door_can_be_had_and_is_used(house: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = door(house)
    print(f"{house}: {len(names)} names: {', '.join(names)}")
    package = import_module(f"trtllm_pipeline.{house}")
    for name in names:
        getattr(package, name)
    assert set(names) == {name for _, _, module, name in entries() if module == house}


def test_a_house_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = import_module("trtllm_pipeline.base").nothing
