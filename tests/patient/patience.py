"""Lets no load run fail because this machine is busy: a test's verdict is about the product.

The gates for a late load client have tests of their own, with made-up times, in tests/unit/measure.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

GATES = "trtllm_pipeline.measure.load.validity"


def patient(module: ModuleType) -> None:
    """Accept load clients and requests that were late by any time."""
    module.MAX_LAG_MS = math.inf  # type: ignore[attr-defined]


class Finder:
    """Makes the module with the gates patient when it is imported."""

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        if name != GATES:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            patient(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
