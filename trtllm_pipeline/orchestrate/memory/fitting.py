"""The smallest change with which a cell fits into the memory of a machine: `pipeline plan --fit`.

Changes are ordered by their cost: a larger share for the KV cache and more of the GPUs cost nothing, then time, then the
quality of calibration, last the number of requests served at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from trtllm_pipeline.base import USUAL_NUM_TOKENS, Cell, Json, Machine, layout_name
from trtllm_pipeline.orchestrate.matrix.expand import OF_TENSORRT_LLM
from trtllm_pipeline.tensorrt import catalog, companions, vision

_MOST_FRACTION: Final = 0.95
_LEAST_FRACTION: Final = 0.4
_ROWS: Final = 512
_LEAST_ROWS: Final = 16
_LEAST_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class Reduction:
    """One change that reduces the memory of a cell."""

    setting: str
    """KEY=VALUE for `--set`."""
    apply: Callable[[Cell], Cell]


Option = Reduction | None
"""None: no change."""


def fit(cell: Cell, machine: Machine, wrong: Callable[[Cell], bool]) -> tuple[tuple[str, ...], Cell] | None:
    """The smallest change after which a cell is not `wrong`, as values of `--set`, and the changed cell. None if none helps.

    For each kind of change, the most expensive first, the smallest change is chosen that
    suffices together with all cheaper kinds.
    """
    kinds = _batches(cell), _samples(cell), _rows(cell), _tokens(cell)
    costly: list[list[Option]] = [[None, *kind] for kind in kinds]
    layouts: list[Option] = [None, *_layouts(cell, machine)]
    shares: list[Option] = [None, *_shares(cell, machine)]

    def fits(options: Sequence[Option]) -> bool:
        return not wrong(_changed(cell, options))

    def possible(first: Sequence[Option]) -> bool:
        least = [options[-1] for options in costly[len(first) :]]
        return any(fits([*first, *least, layout, shares[-1]]) for layout in layouts)

    chosen: list[Option] = []
    for options in costly:
        enough = [*itertools.islice((option for option in options if possible([*chosen, option])), 1)]
        if not enough:
            return None
        chosen += enough
    selected = next(
        changes for layout, share in itertools.product(layouts, shares) if fits(changes := [*chosen, layout, share])
    )
    settings = tuple(change.setting for change in selected if change is not None)
    return settings, _changed(cell, selected)


def _changed(cell: Cell, options: Sequence[Option]) -> Cell:
    for change in options:
        cell = cell if change is None else change.apply(cell)
    return cell


# Changes of each kind, the smallest first.


def _batches(cell: Cell) -> Iterator[Reduction]:
    for batch in _halves(cell.max_batch_size, 1):
        yield Reduction(f"axes.max_batch_size=[{batch}]", partial(replace, max_batch_size=batch))


def _samples(cell: Cell) -> Iterator[Reduction]:
    calibration = cell.settings["quantize"].get("calibration")
    if isinstance(calibration, dict):
        samples = calibration.get("samples")
        for fewer in _halves(samples if isinstance(samples, int) else _ROWS, _LEAST_ROWS):
            changed: Json = {**calibration, "samples": fewer}
            apply = partial(_with, section="quantize", name="calibration", value=changed)
            yield Reduction(f"settings.quantize.calibration.samples={fewer}", apply)


def _rows(cell: Cell) -> Iterator[Reduction]:
    """Rows calibrated at a time. An unset value already adapts to the memory."""
    rows = cell.settings["quantize"].get("batch_size")
    for fewer in _halves(rows, 1) if isinstance(rows, int) else ():
        yield _setting("quantize", "batch_size", fewer)


def _tokens(cell: Cell) -> Iterator[Reduction]:
    """Tokens of a forward pass, at least one prompt. Prompts of several requests are processed one after another."""
    tokens = cell.settings["build"].get("max_num_tokens")
    # Other servers do not read it, and drafting has its own limits.
    if cell.toolchain in OF_TENSORRT_LLM and companions.speculation(cell) is None:
        for fewer in _halves(tokens if isinstance(tokens, int) else USUAL_NUM_TOKENS, max(cell.isl, _LEAST_TOKENS)):
            yield _setting("build", "max_num_tokens", fewer)


def _layouts(cell: Cell, machine: Machine) -> Iterator[Reduction]:
    """More of the available GPUs: tensor parallelism before pipeline stages, which do not reduce latency."""
    most = len(machine.gpus) // (cell.tp * cell.pp)
    powers = [1 << power for power in range(most.bit_length())]
    times = [(tp, pp) for tp, pp in itertools.product(powers, powers) if 1 < tp * pp <= most]
    for tp, pp in sorted(times, key=lambda each: (each[0] * each[1], each[1])):
        groups = tp if cell.dp > 1 else 1  # each GPU of more keeps its own requests
        grown = {"tp": cell.tp * tp, "pp": cell.pp * pp, "ep": cell.ep * groups, "dp": cell.dp * groups}
        yield Reduction(f"axes.parallel=[{layout_name(**grown)}]", partial(replace, **grown))


def _shares(cell: Cell, machine: Machine) -> Iterator[Reduction]:
    if cell.toolchain not in OF_TENSORRT_LLM:
        return  # they do not read the setting
    if companions.DRAFT in cell.companions and cell.toolchain == catalog.ENGINES:
        return  # the caches of both engines share the memory
    share = cell.settings["repository"].get("kv_cache_free_gpu_mem_fraction")
    if vision.sees(cell):  # the vision encoder needs the rest of the memory
        if not isinstance(share, (int, float)) or share > _LEAST_FRACTION:
            yield _setting("repository", "kv_cache_free_gpu_mem_fraction", _LEAST_FRACTION)
    elif machine.gpus and (share is None or (isinstance(share, (int, float)) and share < _MOST_FRACTION)):
        yield _setting("repository", "kv_cache_free_gpu_mem_fraction", _MOST_FRACTION)


def _halves(number: int, least: int) -> Iterator[int]:
    while (number := number // 2) >= least:
        yield number


def _setting(section: str, name: str, value: Json) -> Reduction:
    return Reduction(f"settings.{section}.{name}={value}", partial(_with, section=section, name=name, value=value))


def _with(cell: Cell, *, section: str, name: str, value: Json) -> Cell:
    return replace(cell, settings={**cell.settings, section: {**cell.settings[section], name: value}})
