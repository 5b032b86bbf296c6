"""Changes that make cells fit into the available memory: `pipeline plan --fit`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from trtllm_pipeline.base import Cell, CellId, Json, Machine, MatrixError, count, layout_name, text_blocks
from trtllm_pipeline.orchestrate.matrix.document import SETTINGS_PREFIX
from trtllm_pipeline.orchestrate.matrix.expand import segment
from trtllm_pipeline.orchestrate.memory import estimates, fitting
from trtllm_pipeline.orchestrate.plan.pins import Pins
from trtllm_pipeline.orchestrate.plan.planner import (
    Request,
    expanded,
    infeasible,
    lacks_gpu,
    load,
    machine_of,
    weights_unread,
)
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.tensorrt import catalog as toolchains
from trtllm_pipeline.tensorrt import companions

SCHEMA = 1
_AXIS: Final = "axes."
_PLAIN: Final = str.maketrans("", "", "[]")
"""Axes have lists, added cells plain values."""


@dataclass(frozen=True, slots=True)
class Fit:
    """One cell that does not fit."""

    cell: Cell
    why: str
    works: bool
    """Works with fewer requests or rows at a time than configured."""
    names: tuple[str, ...] = ()
    """The matrix's axes. `--set` changes a setting there if it is an axis."""
    proposal: tuple[str, ...] | None = None
    """The smallest change that makes it fit, as values of `--set`. None if none helps."""
    changed: Cell | None = None
    added: bool = False
    """The cell is from `add`. `--set` does not change its axes."""

    def with_change(self, settings: Sequence[str], changed: Cell) -> Fit:
        """This fit with a change. `settings` that are axes of the matrix become axes."""
        fit = replace(self, changed=changed)
        others = (setting for setting in settings if not setting.startswith((_AXIS, *self.names)))
        return replace(fit, proposal=(*fit.axes, *others))

    @property
    def axes(self) -> tuple[str, ...]:
        """The part of the change that affects axes, as values of `--set`."""
        return tuple(f"{_AXIS}{name}=[{new}]" for name, _, (_, new) in self._differences())

    @property
    def changed_id(self) -> CellId:
        segments = dict(known for _, known, _ in self._differences())
        return CellId("/".join(segments.get(each, each) for each in self.cell.id.split("/")))

    def _differences(self) -> Iterator[tuple[str, tuple[str, str], tuple[str, str]]]:
        """For each changed axis: name, old and new value as in ids, new value for `--set`."""
        old, new = self.cell, self.changed or self.cell
        batches = str(old.max_batch_size), str(new.max_batch_size)
        layouts = layout_name(old.tp, old.pp, old.ep, old.dp), layout_name(new.tp, new.pp, new.ep, new.dp)
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
        """The entry in the JSON output."""
        return {
            "cell": self.cell.id,
            "reason": self.why,
            "works": self.works,
            "set": None if self.proposal is None else list(self.proposal),
        }


@dataclass(frozen=True, slots=True)
class Fits:
    """All cells that do not fit."""

    cells: int
    """Number of checked cells: all that can work with enough memory."""
    fits: tuple[Fit, ...]
    selected: bool = False
    """The matrix has further cells."""
    machine: Machine | None = None
    """None: this one."""

    def to_json(self) -> dict[str, Json]:
        """The output of `pipeline plan --fit --format json`."""
        return {"schema": SCHEMA, "cells": self.cells, "fits": [fit.to_json() for fit in self.fits]}

    def blocks(self) -> list[text_blocks.Block]:
        """Blocks of text. Cells with the same change form a group."""
        if not self.fits:
            none = "no cell can work, independent of memory: `pipeline plan` shows the reasons"
            return [text_blocks.TextLine(self._enough() if self.cells else none)]
        alike: dict[tuple[bool, bool, tuple[str, ...] | None], list[Fit]] = {}
        for fit in self.fits:
            alike.setdefault((fit.works, fit.added, fit.proposal), []).append(fit)
        return [block for group in alike.values() for block in self._together(group)]

    def _enough(self) -> str:
        assumed = self.machine is not None and self.machine.assumed
        unknown = self.machine is not None and self.machine.memory_bytes is None
        words = f"{'the assumed' if assumed else 'this'} machine has enough {'GPU memory' if unknown else 'memory'}"
        cells = "the cell" if self.cells == 1 else f"all {self.cells} cells"
        return f"{words} for {cells}{'; its host memory is unknown' if unknown else ''}"

    def _together(self, group: Sequence[Fit]) -> list[text_blocks.Block]:
        first = group[0]
        blocks: list[text_blocks.Block] = [
            text_blocks.Items(
                _title(first, len(group)), [text_blocks.TextLine(f"{fit.cell.id}: {fit.why}") for fit in group]
            )
        ]
        settings = list(first.proposal or ())
        if first.added:
            axes = [setting for setting in settings if setting.startswith(_AXIS)]
            values = (setting.removeprefix(_AXIS).translate(_PLAIN).replace("=", ": ") for setting in axes)
            blocks.append(text_blocks.TextLine(f"  in `add` of the matrix: {', '.join(values)}", "bold"))
            settings = [setting for setting in settings if setting not in axes]
        words = [word for setting in settings for word in ("--set", setting)]
        if words and (self.selected or len(group) < self.cells):  # the change is to an axis or to settings of all cells
            words += [word for cell in dict.fromkeys(fit.changed_id for fit in group) for word in ("--cells", cell)]
        return [*blocks, text_blocks.ToPaste(shlex.join(words))] if words else blocks


def fits_of(request: Request, store: Store | None) -> Fits:
    """Find cells of the request that exceed the machine's memory, and changes that make them fit. Raises like `plan_of`."""
    machine, loaded = machine_of(request), load(request)
    corrections = estimates.Corrections(() if store is None else store.index.peaks(), machine)
    pins = Pins(store, guess=True)
    cells = [
        pins.pin(cell) if cell.reason is None and (companions.named_models(cell) or weights_unread(cell)) else cell
        for cell in expanded(request, loaded, machine)
    ]
    roomy = estimates.without_limits(machine)
    fits = []

    @lru_cache
    def with_(axes: tuple[str, ...]) -> frozenset[CellId]:
        changed = replace(request, sets=(*request.sets, *axes), cells=())
        try:
            return frozenset(cell.id for cell in expanded(changed, load(changed), machine))
        except MatrixError:  # no cell is left
            return frozenset()

    able = [cell for cell in cells if not (cell.reason or lacks_gpu(cell, machine) or infeasible(cell, roomy))]
    for cell in able:  # the plan reports cells that cannot work for other reasons
        toolchain = toolchains.load(cell.toolchain)
        need, reason = estimates.lacking(cell, toolchain.stages, machine, corrections), infeasible(cell, machine)
        if need is not None or reason is not None:
            works = reason is None and need is not None and need.verdict == estimates.LESS
            fit = Fit(cell, str(reason) if need is None else estimates.in_words(need), works, tuple(loaded.axes))

            def wrong(changed: Cell, fit: Fit = fit) -> bool:
                """True if it lacks memory, cannot work, or cannot be expressed in the matrix."""
                stages = toolchains.load(changed.toolchain).stages
                if estimates.lacking(changed, stages, machine, corrections) or infeasible(changed, machine):
                    return True
                as_asked = fit.with_change((), changed)
                cells = with_(as_asked.axes)
                return not {as_asked.changed_id, fit.cell.id} & cells

            proposal = fitting.fit(cell, machine.of(cell.gpu), wrong)
            fit = fit if proposal is None else fit.with_change(*proposal)
            fits.append(replace(fit, added=fit.changed_id not in with_(fit.axes)))
    return Fits(len(able), tuple(fits), selected=bool(request.cells), machine=machine)


def _setting(cell: Cell, name: str) -> str:
    _, section, *keys = name.split(".")
    value: Json = {**cell.settings[section]}
    for key in keys:
        assert isinstance(value, dict)
        value = value[key]
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _title(fit: Fit, number: int) -> str:
    one = number == 1
    of = f"{count(number, 'cell')} {'needs' if one else 'need'} more memory than available"
    if fit.works:
        of = f"{count(number, 'cell')} {'works' if one else 'work'} with fewer requests or rows at a time than configured"
    if fit.proposal is None:
        return f"{of}, and no smaller batch and no parallelism over these GPUs {'changes that' if fit.works else 'suffices'}"
    return f"{of}; with this {'it fits' if one else 'they fit'}"
