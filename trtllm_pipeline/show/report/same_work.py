"""Cells that do the same work at a level are one measurement of it, such as batch sizes 4 and 8 with one request in
flight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from trtllm_pipeline.base import CellId
from trtllm_pipeline.measure import LevelResult
from trtllm_pipeline.orchestrate import CellResult
from trtllm_pipeline.show.report.comparable_loads import Workload
from trtllm_pipeline.show.report.measured import Measured, pooled

_BATCH: Final = "max_batch_size"
Work = tuple[Workload, str, str]
"""Workload, all axes but the batch size, and level."""


def work_of(cell: CellResult, workload: Workload, level: LevelResult) -> Work | None:
    """The work of a cell at a level. None if more requests are in flight than fit in the batch."""
    batch = cell.axes.get(_BATCH)
    if not isinstance(batch, int) or level.concurrency is None or level.concurrency > batch:
        return None
    axes = sorted((name, str(value)) for name, value in cell.axes.items() if name != _BATCH)
    return workload, str(axes), level.key


def together_at_levels(
    cells: Sequence[Measured], workload_of_cell: Sequence[Workload]
) -> tuple[tuple[Measured, ...], Mapping[tuple[CellId, str], tuple[CellId, ...]]]:
    """The cells with their levels pooled over all cells that do the same work, and for (cell, level) these cells.

    Only cells whose stages all succeeded are pooled.
    """
    members: dict[Work, list[tuple[Measured, LevelResult]]] = {}
    for cell, workload in zip(cells, workload_of_cell, strict=True):
        for level in cell.levels if cell.unfit is None else ():
            if (work := work_of(cell, workload, level)) is not None:
                members.setdefault(work, []).append((cell, level))
    several = [each for each in members.values() if len(each) > 1]
    same = {(cell.id, level.key): tuple(other.id for other, _ in each) for each in several for cell, level in each}
    levels = {(cell.id, level.key): pooled([of for _, of in each]) for each in several for cell, level in each}

    def changed(cell: Measured) -> Measured:
        own = tuple(levels.get((cell.id, level.key), level) for level in cell.levels)
        # The requests of one measurement do not represent all of them.
        return cell if own == cell.levels else replace(cell, levels=own, events=None)

    return tuple(map(changed, cells)), same
