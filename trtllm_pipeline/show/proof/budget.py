"""Selection of the cells of a deep examination by time, used without explicit precisions."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from trtllm_pipeline.base import Cell, CellId, StageRunId
from trtllm_pipeline.orchestrate import Forecast, Plan, order

LIMIT_S: Final = 600.0
_BEFORE_SEVERAL: Final = 4
"""Precisions on one GPU before the first over several."""
_MOST_INFORMATIVE: Final = (
    *("fp16", "fp8", "int4_awq", "nvfp4", "int8_sq"),
    *("w4a8_awq", "bf16", "int8_wo", "int4_wo", "fp32"),
)
"""Ordered so that each has the least in common with earlier ones in stages, kernels and files."""


def chosen(plan: Plan, outlook: Forecast, limit_s: float = LIMIT_S) -> tuple[frozenset[CellId], float]:
    """Cells with a total expected time within `limit_s`, and their expected wall time in seconds.

    The most informative precisions come first, on every toolchain, then as many others as fit. Completed stages take no
    time, so that the next examination continues with the rest. The first cell is always included.
    """
    taken: set[CellId] = set()
    takes_s = 0.0
    for cell in sorted(plan.feasible, key=_rank):
        more_s = expected_s(plan, outlook, {*taken, cell.id})
        if more_s <= limit_s or not taken:
            taken.add(cell.id)
            takes_s = more_s
    return frozenset(taken), takes_s


def expected_s(plan: Plan, outlook: Forecast, cells: Collection[CellId]) -> float:
    """Expected wall time of `cells` of the plan, in seconds."""
    among: set[StageRunId] = {run for cell in cells for run in plan.by_cell[cell]}
    return order.simulate(plan, outlook.expected_s, order.capacities(plan.machine), among & outlook.to_run)


def _rank(cell: Cell) -> int:
    return _MOST_INFORMATIVE.index(cell.precision) + (_BEFORE_SEVERAL if cell.tp * cell.pp > 1 else 0)
