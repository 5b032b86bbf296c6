"""One name for one thing."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "trtllm_pipeline"
TRITON_DECIDES = {"TritonPythonModel"}
OF_EACH_TOOLCHAIN = {"toolchain", "params", "needs", "durations"}
"""Modules with the same role in each toolchain. `tensorrt/stage/params.py` has the parameters of shared stages."""


def test_the_base_name_of_a_module_stands_once() -> None:
    modules = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if not path.stem.startswith("__")]
    roles = {path for path in modules if path.stem in OF_EACH_TOOLCHAIN and path.parts[0] == "tensorrt"}
    names = Counter(path.stem for path in modules if path not in roles)
    assert [name for name, times in names.items() if times > 1] == []


@pytest.mark.thorough
def test_each_class_name_stands_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: where for name, where in places.items() if len(where) > 1 and name not in TRITON_DECIDES} == {}


def test_each_test_file_has_a_name_of_its_own() -> None:
    """pytest collects modules outside of packages by their names alone."""
    tests = PACKAGE.parent / "tests"
    names = Counter(path.name for path in tests.rglob("test_*.py") if not (path.parent / "__init__.py").exists())
    assert [name for name, times in names.items() if times > 1] == []
