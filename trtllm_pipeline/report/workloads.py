"""What may be set against each other: cells that were asked the same and measured on the same system.

Shared by `recommend` and the HTML page.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, Protocol

from trtllm_pipeline.domain import Json
from trtllm_pipeline.perf.conditions import BY_NAME, FIELDS, SERVED_BY, Conditions

AXES: Final = ("model", "isl", "osl")
"""Axes that say what is asked, of whom, and how long answers are. What else was asked is told by the measurements."""

Workload = tuple[tuple[str, Json], ...]
"""Values of those axes, and of what measurements were made under, in which cells of a run differ; empty where in none."""


class Asked(Protocol):
    """A cell, as reports and comparisons have it."""

    @property
    def axes(self) -> Mapping[str, Json]: ...  # noqa: D102

    @property
    def conditions(self) -> Conditions: ...  # noqa: D102

    @property
    def levels(self) -> Sequence[object]: ...  # noqa: D102


def workloads(cells: Sequence[Asked], allow: Collection[str] = frozenset()) -> list[Workload]:
    """The workload of each cell, told by what varies among them; `allow` names groups and fields that may.

    A cell that was not measured goes with the first that was and has the same axes. A server or protocol that an axis
    varies is what cells are compared for.
    """
    vary = [name for name in AXES if len({str(cell.axes.get(name)) for cell in cells}) > 1]
    served = {name for cell in cells for name in cell.axes if name.rpartition(".")[2] in SERVED_BY}
    served = {name for name in served if len({str(cell.axes.get(name)) for cell in cells}) > 1}
    measured = [cell for cell in cells if cell.levels]
    fields = [
        field
        for field in FIELDS
        if field.decides
        and not {field.about, field.name} & set(allow)
        and not field.explained_by(served)
        and len({cell.conditions.shown(field) for cell in measured}) > 1
    ]
    first: dict[Workload, Workload] = {}
    found: list[tuple[Workload, Workload | None]] = []
    for cell in cells:
        asked = tuple((name, cell.axes.get(name)) for name in vary)
        under = tuple((field.name, cell.conditions.shown(field)) for field in fields) if cell.levels else None
        if under is not None:
            first.setdefault(asked, under)
        found.append((asked, under))
    return [(*asked, *(first.get(asked, ()) if under is None else under)) for asked, under in found]


def words(workload: Workload) -> str:
    """`smollm2 isl128 osl16, CPU AMD EPYC`: axes as cell ids have them, then what the measurements were made under."""
    axes = [str(value) if name == "model" else f"{name}{value}" for name, value in workload if name in AXES]
    under = [f"{label_of(name)} {value}" for name, value in workload if name in BY_NAME]
    return ", ".join([" ".join(axes)] * bool(axes) + under)


def label_of(name: str) -> str:
    """What people call a part of a workload."""
    return BY_NAME[name].label if name in BY_NAME else name
