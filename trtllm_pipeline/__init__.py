"""From a matrix of models to measured Triton servers.

The flow, each arrow one function with one plain type on either side (`flow.py` shows them in order):

    matrix + recipes -> cells -> plan -> schedule -> stage runs -> artifacts -> report

`load_report(path)` reads results back: rows with types, and a frame of pandas.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from trtllm_pipeline.show import load_report as load_report

__version__ = "0.1.0"
PACKAGE: Final = Path(__file__).resolve().parent
"""The directory of this package. Its data files are in `data`."""


def __getattr__(name: str) -> Any:
    """`load_report`, imported on first use, because every command imports this module."""
    if name != "load_report":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return import_module("trtllm_pipeline.show").load_report
