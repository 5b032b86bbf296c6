"""Skips imports of torch, transformers and Model Optimizer that this worker does not need: saves two seconds."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from types import ModuleType
from typing import Any, Final, NoReturn

_NOT_FOUND: Final = ("peft", "sklearn", "torch_geometric")
"""Optional packages that they import if installed."""
_EMPTY: Final = "scipy"
"""Its names are imported for losses of object detection, pruning and entropy calibration, and used only when those run."""
_LOOKED_AT: Final = "0.47."
"""Releases of Model Optimizer that were checked: others may need more of it at import."""


def leave_out() -> None:
    """Skip unneeded packages in all later imports of this process."""
    for package in _NOT_FOUND:
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]  # documented: the import fails as if it were missing
    if _EMPTY not in sys.modules and version("nvidia-modelopt").startswith(_LOOKED_AT):
        sys.meta_path.insert(0, _Finder())
    # Model Optimizer compiles functions that are not called here, for which torch imports its whole compiler.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


class _Finder(MetaPathFinder, Loader):
    """Finds the package and all its modules, as empty ones."""

    def find_spec(self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == _EMPTY else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """No initialization."""


class _Empty(ModuleType):
    """A module that has every requested name. The values cannot be called."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_args: Any, **_named: Any) -> NoReturn:
            raise ImportError(f"{self.__name__}.{name} is not available in the quantization worker")

        return missing
