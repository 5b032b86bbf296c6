"""What torch, transformers and Model Optimizer import for purposes that are not this worker's: two seconds, left out."""

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
"""Packages that those import where they are there, and do without."""
_EMPTY: Final = "scipy"
"""Names of it are imported by losses of object detection, pruning and entropy calibration, and used when those run."""
_LOOKED_AT: Final = "0.47."
"""Releases of Model Optimizer of which that is known: another may need more of it as soon as it is imported."""


def leave_out() -> None:
    """Have what is not needed left out of all imports that follow, in this process."""
    for package in _NOT_FOUND:
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]  # as Python documents it: not to be found
    if _EMPTY not in sys.modules and version("nvidia-modelopt").startswith(_LOOKED_AT):
        sys.meta_path.insert(0, _Finder())
    # Model Optimizer has functions compiled that are not called here, for which torch imports its whole compiler.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


class _Finder(MetaPathFinder, Loader):
    """Finds the package and any module of it, with nothing in them."""

    def find_spec(self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == _EMPTY else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to do."""


class _Empty(ModuleType):
    """A module that has every name asked for; what one stands for cannot be called."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_args: Any, **_named: Any) -> NoReturn:
            raise ImportError(f"{self.__name__}.{name} is left out of the quantization worker's imports")

        return missing
