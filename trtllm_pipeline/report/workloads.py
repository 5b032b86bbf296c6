"""What may be set against each other: cells that were asked the same. Shared by `recommend` and the HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from trtllm_pipeline.domain import Json

AXES: Final = ("model", "isl", "osl", "settings.perf.input_data", "settings.perf.max_tokens")
"""Axes that say what is asked, of whom, and how long answers are; all others say by what it is answered."""

Workload = tuple[tuple[str, Json], ...]
"""Values of those axes in which cells of a run differ; empty where all were asked the same."""


def workloads(cells: Iterable[Mapping[str, Json]]) -> list[Workload]:
    """The workload of each cell, told by the axes that vary among them."""
    axes = list(cells)
    vary = [name for name in AXES if len({str(each.get(name)) for each in axes}) > 1]
    return [tuple((name, each.get(name)) for name in vary) for each in axes]


def words(workload: Workload) -> str:
    """`smollm2 isl128 osl16`: as cell ids have it."""
    return " ".join(
        str(value) if name == "model" else f"{name.rpartition('.')[2]}{'=' if '.' in name else ''}{value}"
        for name, value in workload
    )
