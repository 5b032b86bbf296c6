"""The choice of the next cell to measure, and when to stop. Pure: measurements in, decision out.

All cells have the same workload. As in `recommend`, a cell's value is its best level that meets the objectives. The model
(`surrogate.py`) predicts the goal and the limited metrics at each level. A cell's promise is the expected improvement over
the best cell so far, times the probability that it meets the objectives (Gardner et al.: Bayesian Optimization with
Inequality Constraints, 2014), times the probability that it works at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from trtllm_pipeline.base import CellId, FailureClass, Json, text_tables
from trtllm_pipeline.measure import LevelResult, Objective, conditions, metric_names, result
from trtllm_pipeline.orchestrate import report_file
from trtllm_pipeline.show.phrases import about
from trtllm_pipeline.show.report.measured import Measured
from trtllm_pipeline.show.report.recommendation import Goal, Goals, at_best, cost, inaccurate
from trtllm_pipeline.show.search import surrogate

_BATCH: Final = "max_batch_size"
_NOT_OF_WEIGHTS: Final = ("tp", "pp", "ep", _BATCH)
"""Axes that change a model's answers only by rounding."""
_CLEARLY: Final = 1.05
"""A limit missed by less may be met in another measurement."""
_ENOUGH: Final = 2e-5
"""The search ends when no cell promises this relative improvement. With 1e-4 it missed the optimum of 1 surface in 40."""
_THRIFT: Final = 0.25
"""A cell that takes ten times as long must promise 10 ** 0.25 = 1.8 times as much."""
_QUANTITY: Final[Mapping[Goal, str]] = {"throughput": "output_tps", "latency": "e2e_p50", "size": ""}
_UNIT: Final[Mapping[Goal, str]] = {"throughput": "tok/s per GPU or host", "latency": "ms e2e p50", "size": "MB"}


@dataclass(frozen=True, slots=True)
class Option:
    """A cell that can be measured."""

    id: CellId
    axes: Mapping[str, Json]
    takes_s: float
    """Seconds needed to measure it, for the missing stages."""
    built: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """The next cell to measure, or None, with the reason `why`. `ruled_out` maps cells that need no measurement to reasons."""

    cell: CellId | None
    why: str
    ruled_out: Mapping[CellId, str]


def decide(options: Sequence[Option], tried: Mapping[CellId, Measured], goals: Goals) -> Decision:
    """The decision from the results, including failures, of the cells `tried`."""
    known = {option.id: tried[option.id] for option in options if option.id in tried}
    bases = report_file.references({option.id: option.axes for option in options})
    inaccurate_cells = _inaccurate(known, bases, goals)
    good = {
        cell.id: value
        for cell in known.values()
        if cell.unfit is None and cell.id not in inaccurate_cells and (value := _value(cell, goals)) is not None
    }
    left_out = _ruled_out(options, known, inaccurate_cells, goals)
    left = [option for option in options if option.id not in known and option.id not in left_out]
    if not left:
        return Decision(None, "every cell is measured or ruled out", left_out)
    best = min(good, key=good.__getitem__, default=None)
    if best is not None and (base := _reference(known[best], known, bases, goals)) is not None:
        return Decision(base, f"accuracy reference for {best}, the best cell so far", left_out)
    worked = [cell for cell in known.values() if cell.unfit is None and cell.levels]
    # One cell per axis plus one shows the effect of each axis.
    if not worked or len(known) < _varying(options) + 2:
        return Decision(*_start(options, left, known), left_out)
    if all(_counts(cell, level, goals) is None for cell in worked for level in cell.levels):
        return Decision(None, f"no measured cell has the goal metric: {goals.objective}", left_out)
    reached = None if best is None else good[best]
    promises = _promises(options, list(known), worked, reached, goals)
    chosen = max(left, key=lambda option: promises[option.id].share / _patience(option))
    if reached is not None and max(promises[option.id].share for option in left) < _ENOUGH:
        return Decision(None, f"no other cell promises more than {_ENOUGH:.3%}", left_out)
    return Decision(chosen.id, _words(promises[chosen.id], chosen, reached, goals), left_out)


def _varying(options: Sequence[Option]) -> int:
    names = dict.fromkeys(name for option in options for name in option.axes)
    return sum(len({str(option.axes.get(name)) for option in options}) > 1 for name in names)


def _patience(option: Option) -> float:
    return math.pow(max(option.takes_s, 1.0), _THRIFT)


def _takes(option: Option) -> str:
    return f"about {about(option.takes_s)}" + (", engine exists" if option.built else "")


# Cells that need no measurement


def _ruled_out(
    options: Sequence[Option], known: Mapping[CellId, Measured], inaccurate_cells: Mapping[CellId, str], goals: Goals
) -> dict[CellId, str]:
    """Cells that cannot be the best according to measurements of others, with reasons."""
    by_line: dict[str, list[Measured]] = {}
    for cell in known.values():
        by_line.setdefault(_but(cell.axes, (_BATCH,)), []).append(cell)
    by_weights = {_but(known[cell].axes, _NOT_OF_WEIGHTS): f"{cell}: {why}" for cell, why in inaccurate_cells.items()}
    ruled_out = {}
    for option in options:
        if option.id not in known:
            line = by_line.get(_but(option.axes, (_BATCH,)), ())
            of_batch = (why for cell in line if (why := _by_batch(option, cell, goals.slos)) is not None)
            why = next(of_batch, by_weights.get(_but(option.axes, _NOT_OF_WEIGHTS)))
            if why is not None:
                ruled_out[option.id] = why
    return ruled_out


def _but(axes: Mapping[str, Json], names: Sequence[str]) -> str:
    return str(sorted((name, str(value)) for name, value in axes.items() if name not in names))


def _batch(axes: Mapping[str, Json]) -> int:
    value = axes.get(_BATCH)
    return value if isinstance(value, int) else 0


def _by_batch(option: Option, cell: Measured, slos: Sequence[Objective]) -> str | None:
    """Why `option` cannot be better than `cell`, which differs only in batch size, or None."""
    own, other = _batch(option.axes), _batch(cell.axes)
    if cell.failure == FailureClass.OUT_OF_MEMORY.value and own > other:
        return f"{cell.id} ran out of memory with a smaller batch"
    if not cell.levels:
        return None
    missed = []
    for level in cell.levels:
        queues = level.concurrency is None or level.concurrency > other
        missed.append(
            next((slo for slo in slos if _surely_missed(slo, level.bound(slo.metric), own > other, queues)), None)
        )
    if None in missed:
        return None
    first = next(slo for slo in missed if slo is not None)
    return f"{cell.id} misses {first.metric} already with a {'smaller' if own > other else 'larger'} batch"


def _surely_missed(slo: Objective, value: float | None, larger: bool, queues: bool) -> bool:
    """True if a larger or smaller batch also misses an objective that was missed by `value`.

    More concurrent requests delay each token and raise the total rate. They delay the first token only if no request
    waited for a free slot.
    """
    if value is None or slo.share(value) < _CLEARLY:
        return False
    if slo.metric in metric_names.HIGHER_IS_BETTER:
        return not larger
    return larger and (not queues or slo.metric.startswith(("tpot", "itl")))


# Accuracy


def _inaccurate(known: Mapping[CellId, Measured], bases: Mapping[CellId, CellId], goals: Goals) -> dict[CellId, str]:
    """The cells with insufficient accuracy, as far as known, with reasons."""
    reasons = {}
    for cell in known.values():
        base = known.get(bases.get(cell.id, cell.id))
        scored = goals.least is not None and goals.least.score is not None
        if cell.accuracy and (scored or (base is not None and base.accuracy)):
            why = inaccurate(cell, None if base is cell else base, goals.least, conditions.GROUPS)
            if why is not None:
                reasons[cell.id] = why
    return reasons


def _reference(
    best: Measured, known: Mapping[CellId, Measured], bases: Mapping[CellId, CellId], goals: Goals
) -> CellId | None:
    """The untried unquantized cell that is the accuracy reference of the best cell so far, or None.

    A precision is compared once, unless the minimum accuracy is relative to each cell's own reference.
    """
    least = goals.least
    if not best.accuracy or (least is not None and (least.score is not None or (least.share or 0.0) >= 1)):
        return None
    if best.id not in bases or bases[best.id] in known:
        return None
    compared = {_but(cell.axes, _NOT_OF_WEIGHTS) for cell in known.values() if bases.get(cell.id) in known}
    return None if least is None and _but(best.axes, _NOT_OF_WEIGHTS) in compared else bases[best.id]


def _value(cell: Measured, goals: Goals) -> float | None:
    """The cost of a cell, lower is better. None if it misses the objectives or the metric is unknown."""
    candidate = at_best(cell, (), goals.slos, goals.objective, None)
    value = cost(candidate, goals.objective) if candidate.reason is None and candidate.level is not None else math.inf
    return value if math.isfinite(value) else None


# Predictions of the model


@dataclass(frozen=True, slots=True)
class Promise:
    """The model's prediction for a cell at its most promising level."""

    share: float
    """Expected relative improvement over the best so far, times the probability that it meets all objectives and works."""
    level: str
    low: float
    high: float
    """The 68% interval of the goal metric."""
    fits: float
    """Probability that it meets the objectives."""


def _words(promise: Promise, option: Option, best: float | None, goals: Goals) -> str:
    per = 1e-6 if goals.objective == "size" else 1.0
    level = f" at {result.load_words(promise.level)}"
    fits = f"; {promise.fits:.0%} likely to meet the objectives" if goals.slos else ""
    than = "" if best is None else f"; best so far {text_tables.number(abs(best) * per)}"
    expected = (
        f"{text_tables.number(promise.low * per)} to {text_tables.number(promise.high * per)} {_UNIT[goals.objective]}"
    )
    return f"expected {expected}{level}{than}{fits}; {_takes(option)}"


def _start(options: Sequence[Option], left: Sequence[Option], known: Mapping[CellId, Measured]) -> tuple[CellId, str]:
    """The cell least similar to the tried ones. Without tried cells, the cell most similar to all."""
    place = {option.id: index for index, option in enumerate(options)}
    others = [place[cell] for cell in known] or list(range(0, len(options), 1 + len(options) // 256))
    apart = surrogate.distances([option.axes for option in options], others).mean(axis=0)
    if known:
        farthest = apart.min(axis=1)
        chosen = max(left, key=lambda option: float(farthest[place[option.id]]) / _patience(option))
        return chosen.id, f"initial cell: differs most from the measured cells; {_takes(chosen)}"
    middle = 1.0 + apart.mean(axis=1)
    chosen = min(left, key=lambda option: float(middle[place[option.id]]) * _patience(option))
    return chosen.id, f"initial cell: center of the matrix; {_takes(chosen)}"


def _promises(
    options: Sequence[Option], tried: Sequence[CellId], worked: Sequence[Measured], best: float | None, goals: Goals
) -> dict[CellId, Promise]:
    """The promise of each cell over the `best`, from those of the cells `tried` that `worked`."""
    import numpy as np

    place = {option.id: index for index, option in enumerate(options)}
    apart = surrogate.distances([option.axes for option in options], [place[cell] for cell in tried])
    order = {cell: index for index, cell in enumerate(tried)}
    of_worked = [order[cell.id] for cell in worked]
    levels = list(dict.fromkeys(level.key for cell in worked for level in cell.levels))
    values = np.array([[value for key in levels for value in _quantities(cell, key, goals)] for cell in worked])
    missing = np.isnan(values)
    means = np.where(missing, 0.0, values).sum(axis=0) / np.maximum((~missing).sum(axis=0), 1)
    values = np.where(missing, means, values)
    rows, to_worked = [place[cell.id] for cell in worked], apart[:, :, of_worked]
    shape = surrogate.fitted(to_worked[:, rows], values)
    mean, error = surrogate.predicted(shape, to_worked, rows, values)
    likeness = shape.covariance(apart)
    works = (1 + likeness[:, of_worked].sum(axis=1)) / (1 + likeness.sum(axis=1))
    sign, width = 1.0 if goals.objective == "throughput" else -1.0, 1 + len(goals.slos)
    reached = sign * math.log(abs(best)) if best else float((sign * mean[:, ::width]).min()) - 1.0
    promises: dict[CellId, Promise] = {}
    for index, option in enumerate(options):
        at_levels = []
        for at, key in zip(range(0, mean.shape[1], width), levels, strict=True):
            fits = 1.0
            for column, slo in enumerate(goals.slos, at + 1):
                room = (math.log(slo.limit) - mean[index, column]) / error[index, column]
                fits *= _below(-room if slo.metric in metric_names.HIGHER_IS_BETTER else room)
            share = _improvement(sign * mean[index, at] - reached, error[index, at]) * fits * works[index]
            low, high = (math.exp(mean[index, at] + side * error[index, at]) for side in (-1, 1))
            at_levels.append(Promise(float(share), key, low, high, fits))
        promises[option.id] = max(at_levels, key=lambda each: each.share)
    return promises


def _quantities(cell: Measured, key: str, goals: Goals) -> list[float]:
    """Logarithms of the goal metric and of each limited metric at a level, NaN if not measured."""
    level = cell.level(key)
    counts = _counts(cell, level, goals)
    values = [counts, *(None if level is None else level.bound(slo.metric) for slo in goals.slos)]
    return [math.log(value) if value else math.nan for value in values]


def _counts(cell: Measured, level: LevelResult | None, goals: Goals) -> float | None:
    """The goal metric at a level of a cell, or None if not measured."""
    if goals.objective == "size":
        return cell.engine_size_bytes
    value = None if level is None else level.value(_QUANTITY[goals.objective])
    return None if value is None else value / (cell.gpus if goals.objective == "throughput" else 1)


def _below(z: float) -> float:
    """Probability that a normal variable is below `z` standard deviations."""
    return 0.5 * math.erfc(-z / math.sqrt(2))


def _improvement(lead: float, error: float) -> float:
    """Expected improvement of a normal variable whose mean leads by `lead` (Jones, Schonlau, Welch 1998)."""
    z = lead / error
    return lead * _below(z) + error * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
