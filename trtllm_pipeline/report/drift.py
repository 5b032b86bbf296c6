"""Accuracy drift of a run: each quantized cell's answers compared with those of its unquantized counterpart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from trtllm_pipeline.domain import CellId, Json
from trtllm_pipeline.errors import UsageError
from trtllm_pipeline.evaluate import drift

UNQUANTIZED: Final = ("fp32", "fp16", "bf16")
"""Precisions a reference may have, the preferred first."""


def references(axes: Mapping[CellId, Mapping[str, Json]]) -> dict[CellId, CellId]:
    """Cell -> the unquantized cell that is equal to it on every other axis; without those that have none."""
    groups: dict[frozenset[tuple[str, str]], dict[str, CellId]] = {}
    keys = {}
    for cell, values in axes.items():
        keys[cell] = frozenset((name, str(value)) for name, value in values.items() if name != "precision")
        groups.setdefault(keys[cell], {})[str(values.get("precision"))] = cell
    found = {}
    for cell, key in keys.items():
        best = next((groups[key][precision] for precision in UNQUANTIZED if precision in groups[key]), None)
        if best is not None and best != cell:
            found[cell] = best
    return found


def by_cell(axes: Mapping[CellId, Mapping[str, Json]], answers: Mapping[CellId, Path]) -> dict[CellId, drift.Drift]:
    """Cell -> its drift from its reference. `answers` are folders with an answers.jsonl.

    A cell is left out where it or its reference has no answers, or they were not asked the same.
    """
    known: dict[CellId, list[drift.ScoredAnswer]] = {}
    found = {}
    for cell, reference in references(axes).items():
        if cell not in answers or reference not in answers:
            continue
        try:
            if reference not in known:
                known[reference] = drift.read(answers[reference])
            found[cell] = replace(drift.compare(known[reference], drift.read(answers[cell])), reference=reference)
        except UsageError:  # answers of an earlier release, or of a cell whose own settings ask something else
            continue
    return found
