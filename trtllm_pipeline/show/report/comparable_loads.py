"""Workloads: cells with the same load on the same system may be compared, and cells that do the same work are pooled.

Shared by `recommend` and the HTML page.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from trtllm_pipeline.base import CellId, Json
from trtllm_pipeline.measure import Conditions, LevelResult, conditions
from trtllm_pipeline.orchestrate import CellResult
from trtllm_pipeline.show.report.measured import Measured, pooled

_BY_NAME: Final = {field.name: field for field in (*conditions.FIELDS, *conditions.LEVEL_FIELDS)}
AXES: Final = ("model", "isl", "osl")
"""Axes that define the load: prompts, model and output lengths. The measurements contain the rest of the load."""
Workload = tuple[tuple[str, Json], ...]
"""Values of these axes and of measurement conditions in which cells of a run differ. Empty if they do not differ."""


def workloads(cells: Sequence[CellResult], allow: Collection[str] = frozenset()) -> list[Workload]:
    """The workload of each cell, by the values that vary. `allow` has groups and fields that may vary.

    A cell without measurements joins the first measured cell with the same axes. A cell without a level joins the first
    cell with it. If an axis varies server or protocol, cells are compared across them.
    """

    def varies(axis: str) -> bool:
        return len({str(cell.axes.get(axis)) for cell in cells}) > 1

    served = {name for cell in cells for name in cell.axes if name.rpartition(".")[2] in conditions.SERVED_BY}
    served = set(filter(varies, served))

    def distinguishes(field: conditions.Field) -> bool:
        return field.decides and not {field.about, field.name} & set(allow) and not field.explained_by(served)

    measured = [cell.conditions for cell in cells if cell.levels]
    fields = [
        field
        for field in conditions.FIELDS
        if distinguishes(field) and len({each.shown(field) for each in measured}) > 1
    ]
    axes = list(filter(varies, AXES))
    by_axes: list[Workload] = [tuple((name, cell.axes.get(name)) for name in axes) for cell in cells]
    under: list[Workload] = [tuple((field.name, cell.conditions.shown(field)) for field in fields) for cell in cells]
    first: dict[Workload, Workload] = {}
    for cell, of_axes, workload in zip(cells, by_axes, under, strict=True):
        if cell.levels:
            first.setdefault(of_axes, workload)
    groups = [
        (*of_axes, *(workload if cell.levels else first.get(of_axes, ())))
        for cell, of_axes, workload in zip(cells, by_axes, under, strict=True)
    ]
    at_levels = [_at_levels(cell.conditions) if cell.levels else {} for cell in cells]
    values: dict[_Place, set[str]] = {}
    for place, value in (item for every in at_levels for item in every.items()):
        values.setdefault(place, set()).add(value)
    apart = {place for place, several in values.items() if len(several) > 1 and distinguishes(_BY_NAME[place[0]])}
    of_level = [{place: value for place, value in every.items() if place in apart} for every in at_levels]
    first_at: dict[Workload, dict[_Place, str]] = {}
    for group, mine in zip(groups, of_level, strict=True):
        first_at[group] = {**mine, **first_at.get(group, {})}
    return [(*group, *_summary({**first_at[group], **mine})) for group, mine in zip(groups, of_level, strict=True)]


_Place = tuple[str, str]
"""Name of one of LEVEL_FIELDS and a level in words."""


def _at_levels(recorded: Conditions) -> dict[_Place, str]:
    """Load fields of each level."""
    levels = (recorded.workload or {}).get("levels")
    values = {}
    for entry in levels if isinstance(levels, list) else ():
        if isinstance(entry, dict):
            rate = entry.get("request_rate")
            place = f"concurrency {entry.get('concurrency')}" if rate is None else f"{rate} requests/s"
            values.update(
                {(field.name, place): field.shown(entry.get(field.name)) for field in conditions.LEVEL_FIELDS}
            )
    return values


def _summary(at_levels: Mapping[_Place, str]) -> Workload:
    """`64`, or `64 at concurrency 1, 8 at concurrency 4`, field by field."""
    by_field: dict[str, dict[str, str]] = {}
    for (name, place), value in at_levels.items():
        by_field.setdefault(name, {})[place] = value

    def text(values: Mapping[str, str]) -> str:
        alike = set(values.values())
        return alike.pop() if len(alike) == 1 else ", ".join(f"{value} at {place}" for place, value in values.items())

    return tuple((name, text(values)) for name, values in sorted(by_field.items()))


def shortened(loads: Sequence[Workload]) -> list[Workload]:
    """The workloads without digests and without values that an axis varies, as far as they remain distinct."""
    result, kinds = list(loads), len({*loads})
    names = list(dict.fromkeys(name for workload in loads for name, _ in workload))
    known = [name for name in names if name in _BY_NAME]
    digests = [name for name in known if name.endswith("digest")]
    for name in (*digests, *(name for name in known if _BY_NAME[name].explained_by({*names} & {*AXES}))):
        shorter = [tuple(part for part in workload if part[0] != name) for workload in result]
        if len({*shorter}) == kinds:
            result = shorter
    return result


def words(workload: Workload) -> str:
    """`smollm2 isl128 osl16, CPU AMD EPYC`: axes as in cell ids, then measurement conditions."""
    axes = [str(value) if name == "model" else f"{name}{value}" for name, value in workload if name in AXES]
    under = [f"{label_of(name)} {value}" for name, value in workload if name in _BY_NAME]
    return ", ".join([" ".join(axes)] * bool(axes) + under)


def label_of(name: str) -> str:
    """The display name of a part of a workload."""
    return _BY_NAME[name].label if name in _BY_NAME else name


# Cells that do the same work at a level are one measurement of it: batch sizes 4 and 8 with one request in flight.

_BATCH: Final = "max_batch_size"
Work = tuple[Workload, str, str]
"""Workload, all axes but the batch size, and level."""


def work_of(cell: CellResult, workload: Workload, level: LevelResult) -> Work | None:
    """The work of a cell at a level. None if more requests are in flight than fit in the batch."""
    batch = cell.axes.get(_BATCH)
    if not isinstance(batch, int) or level.concurrency is None or level.concurrency > batch:
        return None
    axes = sorted((name, str(value)) for name, value in cell.axes.items() if name != _BATCH)
    return workload, str(axes), level.key


def together_at_levels(
    cells: Sequence[Measured], workload_of_cell: Sequence[Workload]
) -> tuple[tuple[Measured, ...], Mapping[tuple[CellId, str], tuple[CellId, ...]]]:
    """The cells with their levels pooled over all cells that do the same work, and for (cell, level) these cells.

    Only cells whose stages all succeeded are pooled.
    """
    members: dict[Work, list[tuple[Measured, LevelResult]]] = {}
    for cell, workload in zip(cells, workload_of_cell, strict=True):
        for level in cell.levels if cell.unfit is None else ():
            if (work := work_of(cell, workload, level)) is not None:
                members.setdefault(work, []).append((cell, level))
    several = [each for each in members.values() if len(each) > 1]
    same = {(cell.id, level.key): tuple(other.id for other, _ in each) for each in several for cell, level in each}
    levels = {(cell.id, level.key): pooled([of for _, of in each]) for each in several for cell, level in each}

    def changed(cell: Measured) -> Measured:
        own = tuple(levels.get((cell.id, level.key), level) for level in cell.levels)
        # The requests of one measurement do not represent all of them.
        return cell if own == cell.levels else replace(cell, levels=own, events=None)

    return tuple(map(changed, cells)), same
