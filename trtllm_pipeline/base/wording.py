"""Short forms for display: shared parts of cell ids, counts, durations, sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from trtllm_pipeline.base.domain import CellId


def shared_parts(ids: Sequence[str]) -> tuple[str, ...]:
    """The segments that several ids have in common, wherever they are. Empty for fewer than two."""
    if len(set(ids)) < 2:
        return ()
    split = [cell.split("/") for cell in ids]
    everywhere = set(split[0]).intersection(*split[1:])
    return tuple(part for part in split[0] if part in everywhere)


def merged(sequences: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Names in an order that fits all sequences: new names follow their predecessors."""
    order: list[str] = []
    for sequence in sequences:
        place = 0
        for name in sequence:
            if name in order:
                place = order.index(name) + 1
            else:
                order.insert(place, name)
                place += 1
    return tuple(order)


def in_flow_order(
    first_cells: Iterable[tuple[str, CellId]], of_cell: Callable[[CellId], Sequence[str]]
) -> tuple[str, ...]:
    """All stages in the order of the flow, by the stages `of_cell` of the first cell that has each."""
    cells: dict[str, CellId] = {}
    for stage, cell in first_cells:
        cells.setdefault(stage, cell)
    return merged(map(of_cell, dict.fromkeys(cells.values())))


def shorten(text: str, width: int) -> str:
    """`text` in at most `width` characters, shortened in the middle: ids differ at their ends."""
    if len(text) <= width:
        return text
    if width < 4:
        return text[:width]
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def count(number: int, noun: str) -> str:
    """A number with its noun: "1 cell", "2 cells"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(seconds: float) -> str:
    """A duration for display: 0.4 s, 12 s, 2:05, 1:02:05."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def size(size_bytes: float) -> str:
    """Bytes with two significant digits: "270 MB", "1.4 GB", "145 GB", "2.1 TB"."""
    unit, scale = next((each for each in (("TB", 1e12), ("GB", 1e9)) if size_bytes >= each[1]), ("MB", 1e6))
    value = size_bytes / scale
    return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"


def memory_size(size_bytes: float) -> str:
    """Bytes of memory in the unit of nvidia-smi and `--assume`: "22.5 GiB", "141 GiB", "64 MiB"."""
    if size_bytes < 2**30 / 10:
        return f"{size_bytes / 2**20:.0f} MiB"
    value = size_bytes / 2**30
    return f"{value:.1f} GiB" if value < 100 else f"{value:.0f} GiB"


def amount(done: float, total: float | None, unit: str) -> str:
    """Progress in its own unit: "12.3/270.1 MB", "12/40 requests", "67.1/134.5 M parameters"."""
    largest = max(done, total or 0)
    scale = 1.0
    if unit == "bytes":
        scales = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
        scale, unit = next(((each, name) for each, name in scales if largest >= each), (1.0, "B"))
    elif largest >= 1e6:
        scale, unit = 1e6, f"M {unit}"
    form = "g" if scale == 1.0 else ".1f"
    return f"{done / scale:{form}}{'' if total is None else f'/{total / scale:{form}}'} {unit}"


def path_from_here(path: Path) -> str:
    """`path` as short as it can be typed in the current directory."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
