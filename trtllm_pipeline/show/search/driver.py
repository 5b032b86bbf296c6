"""`pipeline search`: decide, run one cell as `pipeline run --cells` does, look at what the workspace has now, decide again.

Nothing is kept of a search but its runs: what was tried is what the workspace has of the matrix's cells. So a search that was
killed continues where it stopped, and cells that any run has measured need no measuring.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import (
    ALONE,
    Block,
    Cell,
    CellId,
    FailureClass,
    Heading,
    Items,
    Json,
    Scope,
    TextLine,
    count,
    read_object,
    shared_parts,
    without,
    write_json,
)
from trtllm_pipeline.orchestrate import (
    CellStatus,
    Forecast,
    Measured,
    Observer,
    Plan,
    Request,
    Side,
    Store,
    axes,
    check_feasible,
    flow,
    outline,
    part,
    rows,
    to_run,
    with_files,
)
from trtllm_pipeline.show.report.recommendation import Recommendation, advise
from trtllm_pipeline.show.report.recommendation import blocks as blocks_of_advice
from trtllm_pipeline.show.search.next_cell import Decision, Goals, Option, decide

CHOICE_FILE: Final = "search.json"
"""In the directory of a run: which cell was chosen, and why."""
_SAYS_NOTHING: Final = frozenset(each.value for each in (FailureClass.TRANSIENT, FailureClass.LOST, FailureClass.USER))
"""Failures that say nothing of a cell: it may work as it is."""


@dataclass(frozen=True, slots=True)
class WorkloadState:
    """The cells of one workload, and what follows from those that were tried."""

    options: tuple[Option, ...]
    tried: int
    decision: Decision


@dataclass(frozen=True, slots=True)
class SearchState:
    """A matrix as a search sees it in a workspace."""

    name: str
    cells: int
    """That can work."""
    tried: Mapping[CellId, Measured]
    groups: tuple[WorkloadState, ...]

    @property
    def failed(self) -> list[Measured]:
        """Those that were tried and failed."""
        return [cell for cell in self.tried.values() if cell.status is CellStatus.FAILED]

    @property
    def spent(self) -> int:
        """Of a budget: the cells that were measured, and the failures, each of which may have taken several cells with it."""
        return len(self.tried) - len(self.failed) + len({cell.log or cell.reason for cell in self.failed})

    @property
    def next(self) -> Decision | None:
        """What to do next, for the workload of which the fewest cells were tried; None where nothing is left."""
        ahead = [group for group in self.groups if group.decision.cell is not None]
        return min(ahead, key=lambda group: group.tried).decision if ahead else None

    @property
    def why_done(self) -> str:
        """Why nothing is left, where that is so."""
        return "; ".join(dict.fromkeys(group.decision.why for group in self.groups))

    @property
    def ruled_out(self) -> dict[CellId, str]:
        """Cells that need no measuring, and why."""
        return {cell: why for group in self.groups for cell, why in group.decision.ruled_out.items()}


@dataclass(frozen=True, slots=True)
class Search:
    """How a search ended."""

    state: SearchState
    advice: Recommendation
    budget: int
    stopped: str
    why: Mapping[CellId, str] = field(default_factory=dict)
    """Why searches have chosen the cells that they measured."""
    exit_code: int = 0
    """130 where it was interrupted, 1 where something failed that says nothing of a cell, 3 where no cell that was tried meets
    the objectives, else 0."""

    def to_json(self) -> dict[str, Json]:
        """As `pipeline search --format json` prints it, see docs/formats.md."""
        ahead = self.state.next
        return {
            "schema": 1,
            "cells": self.state.cells,
            "budget": self.budget,
            "spent": self.state.spent,
            "stopped": self.stopped,
            "next": None if ahead is None else {"cell": ahead.cell, "why": ahead.why},
            "tried": [{"cell": cell, "why": self.why.get(cell)} for cell in self.state.tried],
            "ruled_out": [{"cell": cell, "why": why} for cell, why in self.state.ruled_out.items()],
            "recommendation": self.advice.to_json(),
        }

    def blocks(self) -> list[Block]:
        """For people."""
        state, failed = self.state, len(self.state.failed)
        numbers = [f"{len(state.tried) - failed} of {count(state.cells, 'cell')} measured"]
        numbers += [f"{failed} failed"] if failed else []
        numbers += [f"{len(state.ruled_out)} ruled out"] if state.ruled_out else []
        parts = shared_parts(list(state.tried))
        chosen = [TextLine(f"{without(cell, parts)}: {why}") for cell, why in self.why.items()]
        ruled = [
            TextLine(f"{count(number, 'cell')}: {why}") for why, number in Counter(state.ruled_out.values()).items()
        ]
        ahead = [] if state.next is None else [TextLine(f"next: {state.next.cell}: {state.next.why}")]
        return [
            Heading(f"{', '.join(numbers)}; {self.stopped}"),
            *ahead,
            *([TextLine(""), *blocks_of_advice(self.advice)] if state.tried else []),
            Items("why searches chose these", chosen),
            Items("ruled out without measuring", ruled),
        ]


def search(
    request: Request,
    store: Store,
    observer: Observer,
    goals: Goals,
    budget: int,
    *,
    command: tuple[str, ...] = (),
    told: Callable[[str], None],
) -> Search:
    """Measure cells of the matrix until `budget` are, or no other can be better. Those that were measured before count.

    `told` hears of each cell before it runs. Raises as `flow.run`.
    """
    while True:
        state = look(request, store, goals)
        ahead = state.next
        if ahead is None or state.spent >= budget:
            why = state.why_done if ahead is None else f"the budget of {count(budget, 'cell')} is spent"
            return ended(state, store, goals, budget, why)
        assert ahead.cell is not None
        told(f"search {state.spent + 1}/{budget}: {ahead.cell}: {ahead.why}")
        name = f"search-{len(state.tried) + 1}"
        result = flow.run(replace(request, cells=(ahead.cell,)), store, observer, command=command, name=name)
        choice: dict[str, Json] = {"cell": ahead.cell, "why": ahead.why}
        write_json(store.runs_dir / result.run_id / CHOICE_FILE, choice)
        if result.outcome.interrupted:
            return replace(ended(state, store, goals, budget, "interrupted"), exit_code=130)
        row = next(row for row in result.rows if row.id == ahead.cell)
        if not _was_tried(row.status, row.failure):
            why = f"{row.id}: {row.unfit}"
            return replace(ended(look(request, store, goals), store, goals, budget, why), exit_code=1)


def look(request: Request, store: Store | None, goals: Goals) -> SearchState:
    """What a workspace knows of the cells, and what to do next. Raises as `flow.outlook`, and PlanError."""
    plan, seen = flow.outlook(request, store, Path() if store is None else store.workspace)
    check_feasible(plan)
    measured = () if store is None else with_files("", rows(plan, store), outline(plan), store).cells
    tried = {cell.id: cell for cell in measured if _was_tried(cell.status, cell.failure)}
    groups: dict[str, list[Cell]] = {}
    for cell in plan.feasible:
        if not cell.id.startswith(ALONE):
            groups.setdefault(_workload(cell), []).append(cell)
    found = []
    for cells in groups.values():
        options = tuple(_option(cell, plan, seen) for cell in cells)
        found.append(WorkloadState(options, sum(cell.id in tried for cell in cells), decide(options, tried, goals)))
    searched = {option.id for group in found for option in group.options}
    of_search = {cell: row for cell, row in tried.items() if cell in searched}
    return SearchState(request.matrix.stem, len(searched), of_search, tuple(found))


def _was_tried(status: CellStatus, failure: str | None) -> bool:
    """Whether what came of a cell says something of it."""
    failed = status is CellStatus.FAILED and failure not in _SAYS_NOTHING
    return failed or status in {CellStatus.DONE, CellStatus.UP_TO_DATE}


def _workload(cell: Cell) -> str:
    """What is asked of a cell: only cells of the same are compared."""
    return json.dumps([cell.model, cell.isl, cell.osl, cell.settings["perf"]], sort_keys=True)


def _option(cell: Cell, plan: Plan, seen: Forecast) -> Option:
    own = part(plan, [cell])
    missing = to_run(own, lambda run: run.id in seen.present)
    seconds = sum(seen.durations.expected(own.stage_runs[run]) for run in missing)
    built = not any(own.stage_runs[run].stage.scope is Scope.ARTIFACT for run in missing)
    return Option(cell.id, axes(cell), seconds, built)


def ended(state: SearchState, store: Store | None, goals: Goals, budget: int, why: str) -> Search:
    """What a search has found when it stops, and `why` it does."""
    side = Side(state.name, tuple(state.tried.values()))
    advice = advise(side, (), goals.slos, goals.least, goals.objective, ())
    chosen = {}
    for path in [] if store is None else sorted(store.runs_dir.glob(f"*/{CHOICE_FILE}")):
        choice = read_object(path) or {}
        if choice.get("cell") in state.tried:
            chosen[CellId(choice["cell"])] = str(choice.get("why"))
    return Search(state, advice, budget, why, chosen, advice.exit_code)
