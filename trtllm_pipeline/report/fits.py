"""What would make cells fit that need more memory than there is: `pipeline plan --fit`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from trtllm_pipeline.domain import Cell, CellId, Json, layout_name
from trtllm_pipeline.planning.names import count
from trtllm_pipeline.report.document import Block, Items, TextLine, ToPaste

SCHEMA = 1
_AXIS: Final = "axes."
_PLAIN: Final = str.maketrans("", "", "[]")
"""An axis has lists, an added cell plain values."""


@dataclass(frozen=True, slots=True)
class Fit:
    """One cell that does not fit."""

    cell: Cell
    why: str
    works: bool
    """On fewer requests or rows at a time than asked for."""
    proposal: tuple[str, ...] | None
    """The smallest change with which it fits, as values of `--set`; None where none helps."""
    changed: Cell | None
    """The cell with it."""
    added: bool = False
    """It is one of those that the matrix adds, whose axes no `--set` changes."""

    @property
    def changed_id(self) -> CellId:
        """The cell's id with the change."""
        changed = self.changed or self.cell
        segments = {
            layout_name(*_layout(self.cell)): layout_name(*_layout(changed)),
            f"bs{self.cell.max_batch_size}": f"bs{changed.max_batch_size}",
        }
        return CellId("/".join(segments.get(each, each) for each in self.cell.id.split("/")))

    def to_json(self) -> dict[str, Json]:
        """As in the JSON of all."""
        return {
            "cell": self.cell.id,
            "reason": self.why,
            "works": self.works,
            "set": None if self.proposal is None else list(self.proposal),
        }


@dataclass(frozen=True, slots=True)
class Fits:
    """All of them."""

    cells: int
    """How many were looked at."""
    fits: tuple[Fit, ...]

    def to_json(self) -> dict[str, Json]:
        """As `pipeline plan --fit --format json` prints it."""
        return {"schema": SCHEMA, "cells": self.cells, "fits": [fit.to_json() for fit in self.fits]}

    def blocks(self) -> list[Block]:
        """The same for people: cells that the same change helps, together."""
        if not self.fits:
            return [TextLine(f"the memory of this machine is enough for {_all(self.cells)}")]
        alike: dict[tuple[bool, bool, tuple[str, ...] | None], list[Fit]] = {}
        for fit in self.fits:
            alike.setdefault((fit.works, fit.added, fit.proposal), []).append(fit)
        return [block for found in alike.values() for block in self._together(found)]

    def _together(self, found: Sequence[Fit]) -> list[Block]:
        first = found[0]
        blocks: list[Block] = [
            Items(_title(first, len(found)), [TextLine(f"{fit.cell.id}: {fit.why}") for fit in found])
        ]
        settings = list(first.proposal or ())
        if first.added:
            axes = [setting for setting in settings if setting.startswith(_AXIS)]
            values = (setting.removeprefix(_AXIS).translate(_PLAIN).replace("=", ": ") for setting in axes)
            blocks.append(TextLine(f"  where the matrix adds it: {', '.join(values)}", "bold"))
            settings = [setting for setting in settings if setting not in axes]
        words = [word for setting in settings for word in ("--set", setting)]
        if words and len(found) < self.cells:  # the change is of an axis or of settings, and so of all cells
            words += [word for cell in dict.fromkeys(fit.changed_id for fit in found) for word in ("--cells", cell)]
        return [*blocks, ToPaste(shlex.join(words))] if words else blocks


def _layout(cell: Cell) -> tuple[int, int, int | None]:
    return cell.tp, cell.pp, cell.ep if cell.ep > 1 else None


def _all(cells: int) -> str:
    return "the cell" if cells == 1 else f"all {cells} cells"


def _title(fit: Fit, number: int) -> str:
    one = number == 1
    of = f"{count(number, 'cell')} {'needs' if one else 'need'} more memory than there is"
    if fit.works:
        of = f"{count(number, 'cell')} {'works' if one else 'work'}, on fewer requests or rows at a time than asked for"
    if fit.proposal is None:
        return (
            f"{of}, and no layout over these GPUs changes that"
            if fit.works
            else f"{of}, and no smaller batch and no layout over these GPUs is enough"
        )
    return f"{of}; with this {'it fits' if one else 'they fit'}"
