"""What would make cells fit that need more memory than there is: `pipeline plan --fit`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from trtllm_pipeline.base import Block, Cell, CellId, Items, Json, MatrixError, TextLine, ToPaste, count, layout_name
from trtllm_pipeline.orchestrate.matrix.expand import segment
from trtllm_pipeline.orchestrate.matrix.spelling import SETTINGS_PREFIX
from trtllm_pipeline.orchestrate.memory import estimates, fitting
from trtllm_pipeline.orchestrate.plan.pins import Pins
from trtllm_pipeline.orchestrate.plan.request import Request
from trtllm_pipeline.orchestrate.plan.selection import expanded, infeasible, lacks_gpu, load, machine_of
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.tensorrt import catalog as toolchains
from trtllm_pipeline.tensorrt import companions

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
    names: tuple[str, ...] = ()
    """The matrix's axes: what it has of settings among them, `--set` changes there."""
    proposal: tuple[str, ...] | None = None
    """The smallest change with which it fits, as values of `--set`; None where none helps."""
    changed: Cell | None = None
    """The cell with it."""
    added: bool = False
    """It is one of those that the matrix adds, whose axes no `--set` changes."""

    def with_change(self, settings: Sequence[str], changed: Cell) -> Fit:
        """The same with a change, of which `settings` are said as axes where the matrix has them so."""
        fit = replace(self, changed=changed)
        others = (setting for setting in settings if not setting.startswith((_AXIS, *self.names)))
        return replace(fit, proposal=(*fit.axes, *others))

    @property
    def axes(self) -> tuple[str, ...]:
        """What of the change is of axes, as values of `--set`."""
        return tuple(f"{_AXIS}{name}=[{new}]" for name, _, (_, new) in self._differences())

    @property
    def changed_id(self) -> CellId:
        """The cell's id with the change."""
        segments = dict(known for _, known, _ in self._differences())
        return CellId("/".join(segments.get(each, each) for each in self.cell.id.split("/")))

    def _differences(self) -> Iterator[tuple[str, tuple[str, str], tuple[str, str]]]:
        """Of each axis that is changed its name, and what it was and is: as ids have it, and as `--set` takes it."""
        old, new = self.cell, self.changed or self.cell
        batches = str(old.max_batch_size), str(new.max_batch_size)
        layouts = layout_name(*_layout(old)), layout_name(*_layout(new))
        for name, texts in {
            "max_batch_size": batches,
            "parallel": layouts,
            **{
                name: (_setting(old, name), _setting(new, name))
                for name in self.names
                if name.startswith(SETTINGS_PREFIX)
            },
        }.items():
            if texts[0] != texts[1]:
                before, after = (segment(name, text, self.names) for text in texts)
                yield name, (before, after), texts

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
    """How many were looked at: all that can work with enough memory."""
    fits: tuple[Fit, ...]
    selected: bool = False
    """The matrix has others, too."""

    def to_json(self) -> dict[str, Json]:
        """As `pipeline plan --fit --format json` prints it."""
        return {"schema": SCHEMA, "cells": self.cells, "fits": [fit.to_json() for fit in self.fits]}

    def blocks(self) -> list[Block]:
        """The same for people: cells that the same change helps, together."""
        if not self.fits:
            enough = f"the memory of this machine is enough for {_all(self.cells)}"
            return [
                TextLine(
                    enough if self.cells else "no cell can work, however much memory there is: `pipeline plan` says why"
                )
            ]
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
        if words and (
            self.selected or len(found) < self.cells
        ):  # the change is of an axis or of settings, and so of all cells
            words += [word for cell in dict.fromkeys(fit.changed_id for fit in found) for word in ("--cells", cell)]
        return [*blocks, ToPaste(shlex.join(words))] if words else blocks


def fits_of(request: Request, store: Store | None) -> Fits:
    """Which cells of the request need more memory than the machine has, and with which change they fit. Raises as `plan_of`."""
    machine, loaded = machine_of(request), load(request)
    corrections = estimates.Corrections(() if store is None else store.index.peaks(), machine)
    pins = Pins(store, guess=True)
    cells = [
        pins.pin(cell) if cell.reason is None and companions.named_models(cell) else cell
        for cell in expanded(request, loaded, machine)
    ]
    roomy = estimates.without_limits(machine)
    found = []

    @lru_cache
    def with_(axes: tuple[str, ...]) -> frozenset[CellId]:
        changed = replace(request, sets=(*request.sets, *axes), cells=())
        try:
            return frozenset(cell.id for cell in expanded(changed, load(changed), machine))
        except MatrixError:  # its rules leave no cell
            return frozenset()

    able = [cell for cell in cells if not (cell.reason or lacks_gpu(cell, machine) or infeasible(cell, roomy))]
    for cell in able:  # what cannot work for another reason is the plan's to tell
        toolchain = toolchains.load(cell.toolchain)
        need, reason = estimates.lacking(cell, toolchain.stages, machine, corrections), infeasible(cell, machine)
        if need is not None or reason is not None:
            works = reason is None and need is not None and need.verdict == estimates.LESS
            fit = Fit(cell, str(reason) if need is None else estimates.in_words(need), works, tuple(loaded.axes))

            def wrong(changed: Cell, fit: Fit = fit) -> bool:
                """Whether it lacks memory, cannot work, or is nothing that the matrix can be made to have."""
                stages = toolchains.load(changed.toolchain).stages
                if estimates.lacking(changed, stages, machine, corrections) or infeasible(changed, machine):
                    return True
                as_asked = fit.with_change((), changed)
                cells = with_(as_asked.axes)
                return not {as_asked.changed_id, fit.cell.id} & cells

            proposal = fitting.fit(cell, machine.of(cell.gpu), wrong, same_batch=works)
            fit = fit if proposal is None else fit.with_change(*proposal)
            found.append(replace(fit, added=fit.changed_id not in with_(fit.axes)))
    return Fits(len(able), tuple(found), selected=bool(request.cells))


def _setting(cell: Cell, name: str) -> str:
    _, section, *keys = name.split(".")
    value: Json = {**cell.settings[section]}
    for key in keys:
        assert isinstance(value, dict)
        value = value[key]
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


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
