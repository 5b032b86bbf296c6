"""What would make cells fit that need more memory than there is: `pipeline plan --fit`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trtllm_pipeline.domain import CellId, Json
from trtllm_pipeline.planning.names import count
from trtllm_pipeline.report.document import Block, Items, TextLine

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Fit:
    """One cell that does not fit."""

    cell: CellId
    why: str
    proposal: tuple[str, ...] | None
    """The smallest change with which it does, as values of `--set`; None where none helps."""


@dataclass(frozen=True, slots=True)
class Fits:
    """All of them."""

    cells: int
    """How many were looked at."""
    fits: tuple[Fit, ...]

    def to_json(self) -> dict[str, Json]:
        """As `pipeline plan --fit --format json` prints it."""
        fits: list[Json] = [
            {"cell": fit.cell, "reason": fit.why, "set": None if fit.proposal is None else list(fit.proposal)}
            for fit in self.fits
        ]
        return {"schema": SCHEMA, "cells": self.cells, "fits": fits}

    def blocks(self) -> list[Block]:
        """The same for people: cells that the same change helps, together."""
        if not self.fits:
            return [TextLine(f"the memory of this machine is enough for {_all(self.cells)}")]
        alike: dict[tuple[str, ...] | None, list[Fit]] = {}
        for fit in self.fits:
            alike.setdefault(fit.proposal, []).append(fit)
        return [
            Items(_title(proposal, len(found)), [TextLine(f"{fit.cell}: {fit.why}") for fit in found])
            for proposal, found in alike.items()
        ]


def _all(cells: int) -> str:
    return "the cell" if cells == 1 else f"all {cells} cells"


def _title(proposal: Sequence[str] | None, number: int) -> str:
    of = f"{count(number, 'cell')} {'needs' if number == 1 else 'need'} more memory than there is"
    if proposal is None:
        return f"{of}, and no smaller batch and no layout over these GPUs is enough"
    return (
        f"{of}; with this {'it fits' if number == 1 else 'they fit'}: {' '.join(f'--set {each}' for each in proposal)}"
    )
