"""Short forms for reports and the command line: ids without common parts, groups of cells, rough durations."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Final

from trtllm_pipeline.base import count

MAX_REASONS: Final = 10
MAX_CELLS: Final = 3
"""Cells listed for one reason."""


def without(cell: str, parts: Sequence[str]) -> str:
    """A cell's id without some of its segments. Never empty."""
    return "/".join(part for part in cell.split("/") if part not in parts) or cell


def groups(ids: Sequence[str], most: int) -> list[str] | None:
    """The group of each id: as many of its first segments as give at most `most` groups. None if no number does."""
    split = [each.split("/") for each in ids]
    found: list[str] | None = None
    for depth in range(1, max(map(len, split), default=0)):
        named = ["/".join(parts[:depth]) for parts in split]
        number = len(set(named))
        if number > most or number == len(ids):
            break
        found = named if number > 1 else None
    return found


def never_works(refused: Iterable[tuple[str, str]], all_by: str | None) -> list[str]:
    """Lines about cells that can never work, given as (id, reason): each reason once, with its cells.

    If `all_by` names a command that lists all of them, at most MAX_REASONS reasons with MAX_CELLS cells each.
    """
    by_reason: dict[str, list[str]] = {}
    for cell, reason in refused:
        by_reason.setdefault(reason, []).append(cell)
    total = sum(map(len, by_reason.values()))
    lines = [f"{count(total, 'cell')} can never work:"] if total else []
    said = 0
    for reason, cells in list(by_reason.items())[: MAX_REASONS if all_by else None]:
        shown = cells[: MAX_CELLS if all_by else None]
        if len(cells) == 1:
            lines.append(f"  {cells[0]}: {reason}")
        else:
            lines += [f"  {count(len(cells), 'cell')}: {reason}", *(f"    {cell}" for cell in shown)]
            lines += [f"    and {len(cells) - len(shown)} more"] if len(shown) < len(cells) else []
        said += len(shown)
    return [*lines, f"  {all_by} lists all"] if said < total else lines


def wrapped(text: str, width: int | None) -> str:
    """Text with lines of at most `width` columns, that of a terminal, None without one. Continued lines are indented."""
    if width is None:
        return text
    return "\n".join(_wrapped(line, width) for line in text.splitlines())


def _wrapped(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    indent = line[: len(line) - len(line.lstrip())] + "  "
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def about(seconds: float) -> str:
    """An estimated duration, rounded to its precision: "40 s", "25 min", "2 h", "3 days"."""
    if seconds < 52.5:
        return f"{max(1, round(seconds)) if seconds < 5 else 5 * round(seconds / 5)} s"
    minutes = seconds / 60
    if minutes < 55:
        return f"{max(1, round(minutes)) if minutes < 10 else 5 * round(minutes / 5)} min"
    hours = minutes / 60
    if hours < 36:
        return f"{round(2 * hours) / 2 if hours < 5 else round(hours):g} h"
    return f"{round(hours / 24)} days"
