"""Which cells of a deep examination there is time for, where nobody asked for certain precisions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from trtllm_pipeline.base import Cell, CellId, StageRunId
from trtllm_pipeline.orchestrate import Forecast, Plan, capacities, simulate

LIMIT_S: Final = 600.0
_BEFORE_SEVERAL: Final = 4
"""Precisions on one GPU before the first over several."""
_TELLING: Final = ("fp16", "fp8", "int4_awq", "nvfp4", "int8_sq", "w4a8_awq", "bf16", "int8_wo", "int4_wo", "fp32")
"""Those first whose stages, kernels and files have least in common with the ones before."""


def chosen(plan: Plan, seen: Forecast, limit_s: float = LIMIT_S) -> tuple[frozenset[CellId], float]:
    """Cells whose stage runs take `limit_s` together, by their forecast, and what they take, in seconds of a clock.

    The most telling precisions first, on every toolchain; of the others as many as there is time for.
    What is there already takes no time, so that the next examination continues with the rest. The first is taken however long
    it takes.
    """
    taken: set[CellId] = set()
    takes_s = 0.0
    for cell in sorted(plan.feasible, key=_rank):
        more_s = expected_s(plan, seen, {*taken, cell.id})
        if more_s <= limit_s or not taken:
            taken.add(cell.id)
            takes_s = more_s
    return frozenset(taken), takes_s


def expected_s(plan: Plan, seen: Forecast, cells: Collection[CellId]) -> float:
    """Seconds of a clock that `cells` of the plan take."""
    among: set[StageRunId] = {run for cell in cells for run in plan.by_cell[cell]}
    return simulate(plan, seen.expected_s, capacities(plan.machine), among & seen.to_run)


def left_out(plan: Plan, taken: Collection[CellId]) -> Sequence[Cell]:
    """Feasible cells that there is no time for."""
    return [cell for cell in plan.feasible if cell.id not in taken]


def _rank(cell: Cell) -> int:
    return _TELLING.index(cell.precision) + (_BEFORE_SEVERAL if cell.tp * cell.pp > 1 else 0)
