"""The smallest change with which a cell fits into the memory of a machine: `pipeline plan --fit`.

Small is what costs the user little: first nothing (a larger share for the KV cache, GPUs that are there), then time, then how
well calibration knows the data, last how many requests are served at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from trtllm_pipeline.base import USUAL_NUM_TOKENS, Cell, Json, Machine, layout_name
from trtllm_pipeline.tensorrt import ENGINES, companions, vision

_MOST_FRACTION: Final = 0.95
_LEAST_FRACTION: Final = 0.4
_ROWS: Final = 512
_LEAST_ROWS: Final = 16
_LEAST_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class Reduction:
    """One change with which a cell takes less memory."""

    setting: str
    """KEY=VALUE, as `--set` takes it."""
    apply: Callable[[Cell], Cell]


Option = Reduction | None
"""None: as it is."""


def fit(
    cell: Cell, machine: Machine, wrong: Callable[[Cell], bool], *, same_batch: bool = False
) -> tuple[tuple[str, ...], Cell] | None:
    """The smallest change after which nothing is `wrong` with a cell, as values of `--set`, and the changed cell; None where
    none helps. With `same_batch` it continues serving as many requests at a time.

    Of each kind of change, the dearest first, the least is taken that is enough together with everything cheaper.
    """
    dear: list[list[Option]] = [[None, *kind] for kind in (_samples(cell), _rows(cell), _tokens(cell))]
    dear.insert(0, [None, *(() if same_batch else _batches(cell))])
    layouts: list[Option] = [None, *_layouts(cell, machine)]
    shares: list[Option] = [None, *_shares(cell, machine)]

    def fits(options: Sequence[Option]) -> bool:
        return not wrong(_changed(cell, options))

    def possible(begun: Sequence[Option]) -> bool:
        least = [options[-1] for options in dear[len(begun) :]]
        return any(fits([*begun, *least, layout, shares[-1]]) for layout in layouts)

    chosen: list[Option] = []
    for options in dear:
        enough = [*itertools.islice((option for option in options if possible([*chosen, option])), 1)]
        if not enough:
            return None
        chosen += enough
    found = next(
        changes for layout, share in itertools.product(layouts, shares) if fits(changes := [*chosen, layout, share])
    )
    settings = tuple(change.setting for change in found if change is not None)
    return settings, _changed(cell, found)


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
    """Calibrated at a time; where nothing is asked for, as many as fit are taken anyway."""
    rows = cell.settings["quantize"].get("batch_size")
    for fewer in _halves(rows, 1) if isinstance(rows, int) else ():
        yield _setting("quantize", "batch_size", fewer)


def _tokens(cell: Cell) -> Iterator[Reduction]:
    """Of a forward pass, but a whole prompt: those of several requests are read one after another."""
    tokens = cell.settings["build"].get("max_num_tokens")
    if companions.speculation(cell) is None:  # drafting has limits of its own
        for fewer in _halves(tokens if isinstance(tokens, int) else USUAL_NUM_TOKENS, max(cell.isl, _LEAST_TOKENS)):
            yield _setting("build", "max_num_tokens", fewer)


def _layouts(cell: Cell, machine: Machine) -> Iterator[Reduction]:
    """Over more of the GPUs that are there, tensor parallelism before pipeline stages, which make no token faster."""
    most = len(machine.gpus) // (cell.tp * cell.pp)
    powers = [1 << power for power in range(most.bit_length())]
    times = [(tp, pp) for tp, pp in itertools.product(powers, powers) if 1 < tp * pp <= most]
    for tp, pp in sorted(times, key=lambda each: (each[0] * each[1], each[1])):
        layout = layout_name(cell.tp * tp, cell.pp * pp, cell.ep if cell.ep > 1 else None)
        yield Reduction(f"axes.parallel=[{layout}]", partial(replace, tp=cell.tp * tp, pp=cell.pp * pp))


def _shares(cell: Cell, machine: Machine) -> Iterator[Reduction]:
    if companions.DRAFT in cell.companions and cell.toolchain == ENGINES:
        return  # what the cache of one engine takes, that of the other lacks
    share = cell.settings["repository"].get("kv_cache_free_gpu_mem_fraction")
    if vision.sees(cell):  # what the cache leaves has to hold a visual engine
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
