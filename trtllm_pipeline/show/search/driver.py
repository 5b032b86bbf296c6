"""`pipeline search`: decide, run one cell like `pipeline run --cells`, read the workspace's results, decide again.

A search keeps no state except its runs. The tried cells are the matrix's cells with results in the workspace. So a killed
search continues where it stopped, and cells measured by any run are not measured again.
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
    Cell,
    CellId,
    FailureClass,
    Json,
    Scope,
    count,
    read_object,
    shared_parts,
    text_blocks,
    write_json,
)
from trtllm_pipeline.orchestrate import (
    CellStatus,
    Forecast,
    Observer,
    Plan,
    Request,
    Store,
    check_feasible,
    flow,
    part,
    plan_file,
    report_file,
    to_run,
)
from trtllm_pipeline.show.phrases import without
from trtllm_pipeline.show.report.measured import Measured, Side, with_files
from trtllm_pipeline.show.report.prices import with_price
from trtllm_pipeline.show.report.recommendation import Goals, Recommendation, advise
from trtllm_pipeline.show.search.next_cell import Decision, Option, decide

CHOICE_FILE: Final = "search.json"
"""File in a run's directory with the chosen cell and the reason."""
_SAYS_NOTHING: Final = frozenset(each.value for each in (FailureClass.TRANSIENT, FailureClass.LOST, FailureClass.USER))
"""Failures unrelated to the cell, which may work later without changes."""


@dataclass(frozen=True, slots=True)
class WorkloadState:
    """The cells of one workload, and the conclusions from the tried ones."""

    options: tuple[Option, ...]
    tried: int
    decision: Decision


@dataclass(frozen=True, slots=True)
class SearchState:
    """The search's view of a matrix in a workspace."""

    name: str
    cells: int
    """Number of feasible cells."""
    tried: Mapping[CellId, Measured]
    groups: tuple[WorkloadState, ...]

    @property
    def failed(self) -> list[Measured]:
        return [cell for cell in self.tried.values() if cell.status is CellStatus.FAILED]

    @property
    def spent(self) -> int:
        """Spent budget: measured cells plus failures. One failure may affect several cells."""
        return len(self.tried) - len(self.failed) + len({cell.log or cell.reason for cell in self.failed})

    @property
    def next(self) -> Decision | None:
        """The next decision, for the workload with the fewest tried cells. None if nothing is left."""
        ahead = [group for group in self.groups if group.decision.cell is not None]
        return min(ahead, key=lambda group: group.tried).decision if ahead else None

    @property
    def ruled_out(self) -> dict[CellId, str]:
        """Cells that need no measurement, with reasons."""
        return {cell: why for group in self.groups for cell, why in group.decision.ruled_out.items()}


@dataclass(frozen=True, slots=True)
class Search:
    """The result of a search."""

    state: SearchState
    advice: Recommendation
    budget: int
    stopped: str
    why: Mapping[CellId, str] = field(default_factory=dict)
    """Measured cells and the reasons why searches chose them."""
    exit_code: int = 0
    """130 if interrupted, 1 after a failure unrelated to the cells, 3 if no tried cell meets the objectives, otherwise 0."""

    def to_json(self) -> dict[str, Json]:
        """The JSON of `pipeline search --format json`, see docs/reference/formats.md."""
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

    def blocks(self) -> list[text_blocks.Block]:
        state, failed = self.state, len(self.state.failed)
        numbers = [f"{len(state.tried) - failed} of {count(state.cells, 'cell')} measured"]
        numbers += [f"{failed} failed"] if failed else []
        numbers += [f"{len(state.ruled_out)} ruled out"] if state.ruled_out else []
        parts = shared_parts(list(state.tried))
        chosen = [text_blocks.TextLine(f"{without(cell, parts)}: {why}") for cell, why in self.why.items()]
        ruled = [
            text_blocks.TextLine(f"{count(number, 'cell')}: {why}")
            for why, number in Counter(state.ruled_out.values()).items()
        ]
        ahead = [] if state.next is None else [text_blocks.TextLine(f"next: {state.next.cell}: {state.next.why}")]
        return [
            text_blocks.Heading(f"{', '.join(numbers)}; {self.stopped}"),
            *ahead,
            *([text_blocks.TextLine(""), *self.advice.blocks()] if state.tried else []),
            text_blocks.Items("reasons for these choices", chosen),
            text_blocks.Items("ruled out without measuring", ruled),
        ]


def search(
    request: Request,
    store: Store,
    observer: Observer,
    goals: Goals,
    budget: int,
    *,
    command: tuple[str, ...] = (),
    announce: Callable[[str], None],
) -> Search:
    """Measure cells until the `budget`, with earlier ones, is spent or none can be better. Raises like `flow.run`."""
    while True:
        state = look(request, store, goals)
        ahead = state.next
        if ahead is None or state.spent >= budget:
            reasons = dict.fromkeys(group.decision.why for group in state.groups)
            why = "; ".join(reasons) if ahead is None else f"budget of {count(budget, 'cell')} spent"
            return ended(state, store, goals, budget, why)
        assert ahead.cell is not None
        announce(f"search {state.spent + 1}/{budget}: {ahead.cell}: {ahead.why}")
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
    """The state of the cells in a workspace, and the next decision. Raises like `flow.outlook`, and PlanError."""
    plan, outlook = flow.outlook(request, store, Path() if store is None else store.workspace)
    check_feasible(plan, store)
    measured = (
        () if store is None else with_files("", report_file.rows(plan, store), plan_file.outline(plan), store).cells
    )
    tried = {cell.id: cell for cell in measured if _was_tried(cell.status, cell.failure)}
    groups: dict[str, list[Cell]] = {}
    for cell in plan.feasible:
        if not cell.id.startswith(ALONE):
            groups.setdefault(_workload(cell), []).append(cell)
    group_states = []
    for cells in groups.values():
        options = tuple(_option(cell, plan, outlook) for cell in cells)
        group_states.append(
            WorkloadState(options, sum(cell.id in tried for cell in cells), decide(options, tried, goals))
        )
    searched = {option.id for group in group_states for option in group.options}
    of_search = {cell: row for cell, row in tried.items() if cell in searched}
    return SearchState(request.matrix.stem, len(searched), of_search, tuple(group_states))


def _was_tried(status: CellStatus, failure: str | None) -> bool:
    """True if a result is informative about its cell."""
    failed = status is CellStatus.FAILED and failure not in _SAYS_NOTHING
    return failed or status in {CellStatus.DONE, CellStatus.UP_TO_DATE}


def _workload(cell: Cell) -> str:
    """The workload of a cell. Only cells of the same workload are compared."""
    return json.dumps([cell.model, cell.isl, cell.osl, cell.settings["perf"]], sort_keys=True)


def _option(cell: Cell, plan: Plan, outlook: Forecast) -> Option:
    own = part(plan, [cell])
    missing = to_run(own, lambda run: run.id in outlook.present)
    seconds = sum(outlook.durations.expected(own.stage_runs[run]) for run in missing)
    built = not any(own.stage_runs[run].stage.scope is Scope.ARTIFACT for run in missing)
    return Option(cell.id, plan_file.axes(cell), seconds, built)


def ended(state: SearchState, store: Store | None, goals: Goals, budget: int, why: str) -> Search:
    """The result of a stopped search, with the reason `why`."""
    side = Side(state.name, tuple(with_price(cell, goals.prices) for cell in state.tried.values()))
    advice = advise(side, (), goals, ())
    chosen = {}
    for path in [] if store is None else sorted(store.runs_dir.glob(f"*/{CHOICE_FILE}")):
        choice = read_object(path) or {}
        if choice.get("cell") in state.tried:
            chosen[CellId(choice["cell"])] = str(choice.get("why"))
    return Search(state, advice, budget, why, chosen, advice.exit_code)
