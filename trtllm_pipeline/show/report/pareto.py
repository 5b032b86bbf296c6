"""The Pareto front of throughput against speed: tokens/s per GPU against tokens/s per user, over all cells and levels."""

from __future__ import annotations

from collections.abc import Iterable

from trtllm_pipeline.base import CellId
from trtllm_pipeline.orchestrate import CellResult


def pareto_front(cells: Iterable[CellResult]) -> list[tuple[CellId, str]]:
    """(cell, level) of the points that no other point exceeds, by increasing speed per user. Only closed loops of cells
    whose stages all succeeded: the throughput of an open loop is the offered load.
    """
    points = [
        (speed, throughput, cell.id, level.key)
        for cell in cells
        if cell.unfit is None
        for level in cell.levels
        if level.request_rate is None
        and (speed := level.value("user_tps")) is not None
        and (throughput := cell.per_gpu(level)) is not None
    ]
    front: list[tuple[CellId, str]] = []
    most = 0.0
    for _, throughput, cell_id, key in sorted(points, key=lambda point: (-point[0], -point[1])):
        if throughput > most:
            most = throughput
            front.insert(0, (cell_id, key))
    return front
