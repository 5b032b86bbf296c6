"""A module's base name stands once, so that people can say it without its package."""

from collections import Counter
from pathlib import Path
from typing import Final

from trtllm_pipeline import PACKAGE

OF_EACH_TOOLCHAIN: Final = frozenset({"toolchain", "params", "needs", "durations"})
"""Modules with the same role in each toolchain. `stages/params.py` has the parameters of shared stages."""
ONE_ROLE: Final = ("toolchains", "stages")


def test_a_base_name_stands_once() -> None:
    modules = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if not path.stem.startswith("__")]
    plain = [path for path in modules if not (path.stem in OF_EACH_TOOLCHAIN and path.parts[0] in ONE_ROLE)]
    repeated = {name for name, number in Counter(path.stem for path in plain).items() if number > 1}
    assert not {str(path) for path in plain if path.stem in repeated}


def test_test_files_have_their_names_once() -> None:
    tests = Counter(path.name for path in Path(__file__).parent.parent.rglob("test_*.py"))
    assert not [name for name, number in tests.items() if number > 1]
