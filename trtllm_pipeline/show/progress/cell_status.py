"""How far each cell is, what runs right now, and what failed: `pipeline status`, as text and as JSON."""

from __future__ import annotations

import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from trtllm_pipeline.base import Json, StageRunId, StageStatus, clean, count, in_brackets
from trtllm_pipeline.orchestrate import LOG, Outline, OutlineCell, OutlineRun, StageState, Store, stage_states

if TYPE_CHECKING:
    from rich.text import Text

_MAX_CELLS: Final = 200
"""That a picture shows."""
_BESIDE_CELLS: Final = 6
"""Lines that a picture of all cells leaves for its title, its heads, the legend and what runs."""
DONE: Final = (StageStatus.UP_TO_DATE, StageStatus.SKIPPED)
_TOLD: Final = (StageStatus.RUNNING, StageStatus.FAILED)


class Took(NamedTuple):
    """What was expected of a run beside what it took."""

    line: str
    forecast: dict[str, Json]
    """As in its report."""


@dataclass(frozen=True, slots=True)
class MatrixStatus:
    """How far the cells of a matrix are."""

    title: str
    """What the cells are of, for people."""
    run: str | None
    """The newest run they are of; None where they are of a matrix as it stands."""
    outline: Outline
    cells: Sequence[OutlineCell]
    states: Mapping[StageRunId, StageState]
    """Of what is there without the artifacts."""
    artifacts_dir: Path
    """Where these are."""
    left: tuple[float, bool] | None = None
    """Seconds until the end of a run that continues, as it expects them itself, and whether they are known."""
    goes_on: bool = False
    """Whether a run of them does, also one that waits for other processes."""
    took: Took | None = None
    """Of the newest run, where it has ended."""


def status_of(
    store: Store,
    outline: Outline,
    title: str,
    run: str | None = None,
    cells: Sequence[str] = (),
    *,
    left: tuple[float, bool] | None = None,
    goes_on: bool = False,
    took: Took | None = None,
) -> MatrixStatus:
    """How far the cells of `outline` are that fit the patterns `cells`. Raises UsageError where none does."""
    shown: Sequence[OutlineCell] = outline.cells
    if cells:
        from trtllm_pipeline.orchestrate import select

        shown = select(outline.cells, cells)
    states = stage_states(outline, store, artifacts=False)
    return MatrixStatus(title, run, outline, shown, states, store.artifacts_dir, left, goes_on, took)


def to_json(status: MatrixStatus) -> dict[str, Json]:
    """The status as JSON values, see docs/formats.md."""

    def stage(run_id: StageRunId) -> dict[str, Json]:
        state, run = status.states[run_id], status.outline.stage_runs[run_id]
        there = state.status is StageStatus.UP_TO_DATE
        log = status.artifacts_dir / run.stage / run.fingerprint / LOG if there else state.log
        return {
            "stage": run.stage,
            "id": run_id,
            "status": state.status.value,
            **{name: getattr(state, name) for name in ("failure", "message", "hint", "line", "setting")},
            "log": None if log is None else str(log),
            **{name: getattr(state, name) for name in ("started_s", "progress")},
        }

    return {
        "schema": 1,
        "run": status.run,
        "left_s": None if status.left is None else round(status.left[0], 3),
        "left_complete": None if status.left is None else status.left[1],
        "forecast": None if status.took is None else status.took.forecast,
        "cells": [
            {
                "id": cell.id,
                "reason": cell.reason,
                "changes": [asdict(change) for change in cell.changes],
                "stages": [stage(run) for run in cell.stage_runs],
            }
            for cell in status.cells
        ],
    }


def to_text(status: MatrixStatus, *, height: int | None = None) -> str:
    """The picture of cells x stages, then what runs, what failed and what can never work.

    With a `height` in lines, no more than that: where not all cells fit, a line for each stage, and below it what runs
    before what failed.
    """
    from trtllm_pipeline.base import shared_parts, shorten, without
    from trtllm_pipeline.show.progress.views import grid, infeasible, legend, retries, styled, time_left

    states = status.states
    known = status.outline.stage_runs
    runs = {run: known[run] for run in dict.fromkeys(chain.from_iterable([cell.stage_runs for cell in status.cells]))}
    feasible = [cell for cell in status.cells if cell.reason is None]
    parts = shared_parts([cell.id for cell in feasible])
    listed, rest = _listed(feasible, states)
    rows = [
        (without(cell.id, parts), {runs[run].stage: states[run].status for run in cell.stage_runs}) for cell in listed
    ]
    width = shutil.get_terminal_size((120, 0)).columns
    ascii_only = not (sys.stdout.encoding or "").lower().startswith("utf")
    shown: Iterable[StageStatus] = (status for _, of_cell in rows for status in of_cell.values())
    if height is None or len(feasible) + _BESIDE_CELLS <= height:
        stages = [stage for stage in status.outline.stages if any(stage in of_cell for _, of_cell in rows)]
        drawn = grid(rows, stages, width=width, ascii_only=ascii_only) if rows else []
    else:
        drawn = _counted(
            status.outline.stages, feasible, parts, runs, states, height, width=width, ascii_only=ascii_only
        )
        shown, rest = (states[run].status for run in runs), ""  # each is in a line of its stage
    drawn += legend(shown, width=width, ascii_only=ascii_only)
    titles = [status.title, *([f"all cells: {' '.join(parts)}"] if parts else ())]
    if len(together := ", ".join(titles)) <= width:
        titles = [together]
    below = [rest] if rest else []
    told = [(run, states[run_id]) for run_id, run in runs.items() if states[run_id].status in _TOLD]
    if status.goes_on and not any(state.status is StageStatus.RUNNING for _, state in told):
        below += [
            "the run continues, but nothing runs now: if it waits for another process, it says for which where it was started"
        ]
    below += [line for run, state in told for line in _events(run, state)]
    for more in (retries(status.cells), infeasible(status.cells, set(), whole=True)):
        below += ["", *more] if more else []
    if height is None:
        below[:0] = [time_left(*status.left)] if status.left else _wrapped(status.took, width)
    else:  # nothing but one line each, what runs first
        below = sorted((line for line in below if line[:1].strip()), key=lambda line: not line.startswith("running"))
        below = [shorten(line, width - 1) for line in below]
    lines = (*map(clean, titles), *styled(drawn, sys.stdout), *map(clean, below))
    return "".join(f"{line}\n" for line in lines[:height])


def _wrapped(took: Took | None, width: int) -> list[str]:
    if took is None:
        return []
    from textwrap import wrap

    return wrap(took.line, width)


def _counted(
    order: Sequence[str],
    cells: Sequence[OutlineCell],
    shared: Sequence[str],
    runs: Mapping[StageRunId, OutlineRun],
    states: Mapping[StageRunId, StageState],
    height: int,
    *,
    width: int,
    ascii_only: bool,
) -> list[Text]:
    """A line for each stage, then one for each group of cells, where there are groups that fit."""
    from trtllm_pipeline.base import groups, without
    from trtllm_pipeline.show.progress.views import GROUPS, grid, group_line, stage_line

    counts: dict[str, Counter[StageStatus]] = defaultdict(Counter)
    for run in runs.values():
        counts[run.stage][states[run.id].status] += 1
    stages = [stage for stage in order if stage in counts]
    name_width = max(map(len, stages), default=0)
    most = max((each.total() for each in counts.values()), default=0)
    drawn = [
        stage_line(stage, counts[stage], name_width=name_width, most=most, width=width, ascii_only=ascii_only)
        for stage in stages
    ]
    named = groups([without(cell.id, shared) for cell in cells], height - _BESIDE_CELLS - len(counts))
    if named:
        of_groups = {(group, run) for cell, group in zip(cells, named, strict=True) for run in cell.stage_runs}
        by_group = Counter((group, runs[run].stage, states[run].status) for group, run in of_groups)
        rows = [group_line(group, number, stages, by_group) for group, number in Counter(named).items()]
        drawn += grid(rows, stages, width=width, ascii_only=ascii_only, title=GROUPS)
    return drawn


def _listed(cells: Sequence[OutlineCell], states: Mapping[StageRunId, StageState]) -> tuple[Sequence[OutlineCell], str]:
    """The cells that the picture shows, and what there is to say of the rest: of very many only those that are not done."""
    if len(cells) <= _MAX_CELLS:
        return cells, ""
    done = {run for run, state in states.items() if state.status in DONE}
    left = [cell for cell in cells if not done.issuperset(cell.stage_runs)]
    listed = left[:_MAX_CELLS]
    lines = [f"{count(len(cells) - len(left), 'cell')} done"] if len(left) < len(cells) else []
    lines += [f"{count(len(left) - len(listed), 'cell')} more to do or failed"] if len(left) > len(listed) else []
    return listed, f"and {', '.join(lines)}: --cells PATTERN or --format json shows them" if lines else ""


def _events(run: OutlineRun, state: StageState) -> list[str]:
    """What runs or failed, in words, after an empty line."""
    from trtllm_pipeline.base import duration
    from trtllm_pipeline.orchestrate import running_s
    from trtllm_pipeline.show.progress.views import told

    who = f"{run.stage}, {run.cells[0]}" + (f" (for {len(run.cells)} cells)" if len(run.cells) > 1 else "")
    if state.status is StageStatus.RUNNING:
        seconds = running_s(state)
        details = filter(None, (None if seconds is None else duration(seconds), told(state.progress)))
        return ["", ": ".join(filter(None, (f"running: {who}", ", ".join(details))))]
    lines = ["", f"failed{in_brackets(state.failure)}: {who}", f"  {state.message}"]
    return [*lines, *(f"  {line}" for line in state.details)]
