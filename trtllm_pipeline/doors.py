"""The doors of the houses.

A house is a top-level package. Other houses import names from the house itself, never from its modules. The names that a house
offers are the lines of its `__init__.pyi`. Each name is loaded on first use, so that a command pays only for what it uses.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

_LINE = re.compile(r"^from \.([\w.]*) import (\w+) as \2$", re.MULTILINE)


def door(house: str) -> tuple[Callable[[str], Any], list[str]]:
    """Returns `__getattr__` and `__all__` of the package `house`, read from its stub."""
    stub = Path(str(import_module(house).__file__)).with_suffix(".pyi").read_text(encoding="utf-8")
    modules = {name: module for module, name in _LINE.findall(stub)}

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {house!r} has no attribute {name!r}")
        package = import_module(f"{house}.{modules[name]}") if modules[name] else None
        # A name is a module if its package does not define it.
        return (
            getattr(package, name)
            if hasattr(package, name)
            else import_module(f"{house}.{modules[name]}.{name}".replace("..", "."))
        )

    return load, sorted(modules)
