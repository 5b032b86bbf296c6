"""Labels of stage runs. Measurements of one stage run predict others with the same label, or with a prefix of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from trtllm_pipeline.base import Cell
from trtllm_pipeline.tensorrt import Stage

_SHORTEST: Final = 2
"""Segments of the shortest useful prefix. Formulas of different toolchains have different errors."""


def label_of(stage: Stage, cell: Cell) -> str:
    """The label of the stage run of a cell: stage/toolchain/model/precision, and the type of GPU if the cell has one."""
    gpu_type = "" if cell.gpu is None else f"/{cell.gpu}"
    return f"{stage.name}/{cell.toolchain}/{cell.model}/{cell.precision}{gpu_type}"


def prefixes(label: str) -> Iterator[str]:
    """A label and its shorter prefixes, the longest first."""
    while label.count("/") + 1 >= _SHORTEST:
        yield label
        label = label.rpartition("/")[0]
