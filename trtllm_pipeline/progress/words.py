"""Text about stage runs that all observers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trtllm_pipeline.domain import Json
from trtllm_pipeline.errors import StageError, in_brackets
from trtllm_pipeline.execution.executor import tail
from trtllm_pipeline.planning.names import amount, count, duration, path_from_here
from trtllm_pipeline.planning.plan import Plan, StageRun

_MAX_LISTED: Final = 10


def who(run: StageRun) -> str:
    """The cell a stage run is for, and how many share it."""
    return run.first_cell.id if len(run.cells) < 2 else f"{run.first_cell.id} (for {len(run.cells)} cells)"


def infeasible(plan: Plan, told: set[str]) -> list[str]:
    """What to say of cells that can never work; the reasons that it gives are added to `told`."""
    cells = [cell for cell in plan.cells if cell.reason is not None]
    told |= {str(cell.reason) for cell in cells[:_MAX_LISTED]}
    lines = [f"{count(len(cells), 'cell')} can never work:"] if cells else []
    lines += [f"  {cell.id}: {cell.reason}" for cell in cells[:_MAX_LISTED]]
    more = len(cells) - _MAX_LISTED
    return [*lines, f"  and {more} more: pipeline plan"] if more > 0 else lines


def failure(
    run: StageRun, error: StageError | None, seconds: float | None, told: set[str], *, log_lines: int
) -> list[str]:
    """What to say of a failure: what, why, the log, what to do; the log's end where nobody named the cause.

    What is in `told` is not said again; what is said is added to it.
    """
    kind = "" if error is None else in_brackets(error.failure.value)
    after = "" if seconds is None else f" after {duration(seconds)}"
    why = "" if error is None else f": {'for the same reason' if error.message in told else error.message}"
    lines = [f"{run.id}  {who(run)}  failed{after}{kind}{why}"]
    if error is not None and error.log is not None:
        lines.append(f"  log: {path_from_here(error.log)}")
        end = tail(error.log, log_lines) if log_lines and error.unexplained else []
        lines += [f"  | {line}" for line in end if not error.message.endswith(line)]
    if error is not None and error.hint and error.hint not in told:
        lines.append(f"  try: {error.hint}")
    if error is not None:
        told |= {error.message, *filter(None, (error.hint,))}
    return lines


def told(progress: Mapping[str, Json] | None) -> str | None:
    """A stage's own progress in words, "12.3/270.1 MB (5 %)"; None when it told nothing that can be shown."""
    done, total = _numbers(progress)
    if progress is None or done is None:
        return None
    text, part = amount(done, total, str(progress.get("unit", ""))), share(progress)
    return text if part is None else f"{text} ({part:.0%})"


def share(progress: Mapping[str, Json] | None) -> float | None:
    """How much of its work a stage has done, 0 to 1."""
    done, total = _numbers(progress)
    return None if done is None or not total or total < 0 else min(1.0, max(0.0, done / total))


def _numbers(progress: Mapping[str, Json] | None) -> tuple[float | None, float | None]:
    values = [(progress or {}).get(name) for name in ("done", "total")]
    done, total = (value if isinstance(value, (int, float)) else None for value in values)
    return done, total
