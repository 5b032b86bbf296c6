"""One model on several toolchains: what each gives, what it costs to prepare, and which to take, with the reasons.

Lanes are cells that are equal but for their toolchain. Every judgement is that of `report/compare.py`: what was not measured
under the same conditions is not compared, and a difference without an interval, or within noise, decides nothing. Pure
functions, but for the measurements that they are given.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from trtllm_pipeline.domain import CellId
from trtllm_pipeline.errors import UsageError
from trtllm_pipeline.evaluate import drift
from trtllm_pipeline.evaluate.drift import ScoredAnswer
from trtllm_pipeline.planning.names import about, size
from trtllm_pipeline.report.compare import ChangeVerdict, Comparison, Delta, Payback, compare_by
from trtllm_pipeline.report.compare_writers import percent
from trtllm_pipeline.report.measured import Measured, Side
from trtllm_pipeline.text_blocks import Block, Grid, Heading, Items, TextLine, Value
from trtllm_pipeline.text_tables import number

AXIS: Final = "toolchain"
_METRICS: Final = ("output_tps", "ttft_p50", "tpot_p50", "accuracy")
_THROUGHPUT, _LATENCIES, _ACCURACY = _METRICS[0], _METRICS[1:3], _METRICS[3]
_END: Final = re.compile(r"[\W_]+\Z")


@dataclass(frozen=True, slots=True)
class Memory:
    """The most that a server took, in bytes; None where nobody looked."""

    host: int | None = None
    gpu: int | None = None


@dataclass(frozen=True)
class Lane:
    """One toolchain's cell."""

    cell: Measured
    memory: Memory = Memory()
    agreement: float | None = None
    """Share of its answers that are those of the base, character by character, but for an end without letters or digits."""
    apart: str | None = None
    """Why it is not compared with the base."""
    payback: Payback | None = None
    """Of its preparation against the base, at the highest load that both were measured at."""

    @property
    def name(self) -> str:
        """Its toolchain."""
        return str(self.cell.axes[AXIS])


@dataclass(frozen=True)
class Migration:
    """The lanes of one cell, and what to do."""

    what: str
    """What all of them have in common."""
    base: str
    """The lane that others are compared with: the first that needs no preparation, or else the first."""
    level: str | None
    """The highest load that the compared lanes were all measured at."""
    lanes: tuple[Lane, ...]
    advice: str
    notes: tuple[str, ...] = ()
    deltas: Mapping[str, Mapping[str, Delta]] = field(default_factory=dict)
    """Lane -> metric -> its difference from the base."""


def migrations(side: Side, memory: Mapping[CellId, Memory]) -> list[Migration]:
    """Each group of cells that are equal but for their toolchain, and of which at least two can work."""
    groups: dict[tuple[tuple[str, str], ...], list[Measured]] = {}
    for cell in side.cells:
        if AXIS in cell.axes and cell.feasible:
            key = tuple(sorted((name, str(value)) for name, value in cell.axes.items() if name != AXIS))
            groups.setdefault(key, []).append(cell)
    return [_migration(cells, memory) for cells in groups.values() if len(cells) > 1]


def _migration(cells: Sequence[Measured], memory: Mapping[CellId, Memory]) -> Migration:
    usable = [cell for cell in cells if cell.unfit is None and cell.levels] or cells
    base = next((cell for cell in usable if cell.preparation_s is None), usable[0])
    found = _against(base, cells)
    together = [
        base,
        *(cell for cell in cells if cell is not base and any(pair.cell == cell.id for pair in found.pairs)),
    ]
    level = _level(together)
    lanes = tuple(_lane(cell, base, found, level, memory) for cell in cells)
    compared = [lane for lane in lanes if lane.apart is None]
    return Migration(
        what=_common(cells),
        base=str(base.axes[AXIS]),
        level=level,
        lanes=lanes,
        advice=_advice(compared, lanes, level),
        notes=tuple(dict.fromkeys(f"{name.replace('_', ' ')}: {words}" for name, words in found.methods.items())),
        deltas={lane.name: _deltas(found, lane.cell, level) for lane in compared if lane.cell is not base},
    )


def _common(cells: Sequence[Measured]) -> str:
    parts = [cell.id.split("/") for cell in cells]
    return "/".join(word for word in parts[0] if all(word in other for other in parts[1:]))


def _against(base: Measured, cells: Sequence[Measured]) -> Comparison:
    return compare_by(Side("", tuple(cells)), AXIS, str(base.axes[AXIS]), _METRICS)


def _level(cells: Sequence[Measured]) -> str | None:
    """The highest concurrency, or else request rate, that all of them were measured at."""
    shared = [level for level in cells[0].levels if all(cell.level(level.key) for cell in cells)]
    closed = [level for level in shared if level.request_rate is None]
    return (closed or shared)[-1].key if shared else None


def _lane(
    cell: Measured, base: Measured, found: Comparison, level: str | None, memory: Mapping[CellId, Memory]
) -> Lane:
    agreement = None
    if cell is not base and cell.answers is not None and base.answers is not None:
        with suppress(UsageError):  # they were not asked the same
            agreement = drift.compare(_answers(base.answers), _answers(cell.answers)).agreement
    paybacks = (each for each in found.paybacks if (each.cell, each.level) == (cell.id, level))
    return Lane(
        cell,
        memory.get(cell.id, Memory()),
        agreement,
        None if cell is base and cell.unfit is None and cell.levels else _apart(cell, found),
        next(paybacks, None),
    )


def _answers(folder: Path) -> list[ScoredAnswer]:
    """Some servers leave the word that ends an answer in it, as the full stop of a sentence, and others take it out."""
    return [{**row, "answer": _END.sub("", row["answer"])} for row in drift.read(folder)]


def _apart(cell: Measured, found: Comparison) -> str | None:
    """Why a cell is not compared with the base, or None."""
    if cell.unfit is not None:
        return cell.unfit
    for refused in found.refused:
        if refused.cell == cell.id:
            return "; ".join(map(str, refused.differences))
    for each in (*found.unfit, *found.only_new):
        if each.cell == cell.id:
            return each.reason
    if not any(pair.cell == cell.id and pair.level is not None for pair in found.pairs):
        return cell.why if not cell.levels else "it was measured at no load of the base's"
    return None


def _deltas(found: Comparison, cell: Measured, level: str | None) -> dict[str, Delta]:
    """Of one cell against the base of `found`, at a level."""
    pairs = [pair for pair in found.pairs if pair.cell == cell.id and pair.level in {None, level}]
    known = {metric: pair.delta(metric) for metric in _METRICS for pair in pairs if pair.delta(metric) is not None}
    return {metric: delta for metric, delta in known.items() if delta is not None}


# Advice


def _advice(compared: Sequence[Lane], lanes: Sequence[Lane], level: str | None) -> str:
    """One sentence: which lane to take, or that it cannot be said, and why."""
    if len(compared) < 2 or level is None:
        why = [f"{lane.name}: {lane.apart}" for lane in lanes if lane.apart is not None]
        return _sentence_of("Not comparable", *(why or ["the lanes have no load in common"]))
    against = {lane.name: _against(lane.cell, [each.cell for each in compared]) for lane in compared}

    def delta(lane: Lane, other: Lane, metric: str) -> Delta | None:
        return _deltas(against[other.name], lane.cell, level).get(metric)

    def is_(lane: Lane, other: Lane, metric: str, *verdicts: ChangeVerdict) -> bool:
        found = delta(lane, other, metric)
        return found is not None and found.verdict in verdicts

    # What answers worse than another lane is no candidate, however fast it is.
    worse = [lane for lane in compared if any(is_(lane, other, _ACCURACY, ChangeVerdict.WORSE) for other in compared)]
    sound = [lane for lane in compared if lane not in worse]
    unknown = ChangeVerdict.UNKNOWN, ChangeVerdict.MISSING
    if undecided := [
        (lane, other)
        for place, lane in enumerate(sound)
        for other in sound[place + 1 :]
        if is_(lane, other, _THROUGHPUT, *unknown) or delta(lane, other, _THROUGHPUT) is None
    ]:
        names = " and ".join(lane.name for lane in undecided[0])
        no_interval = f"the difference between {names} at {_load(level)} has no interval"
        return _sentence_of(
            "Not decided", no_interval, "measure with settings.perf.repeats: 3, or more requests", *_dropped(worse)
        )
    unbeaten = [
        lane for lane in sound if not any(is_(lane, other, _THROUGHPUT, ChangeVerdict.WORSE) for other in sound)
    ]
    # Of those that are equally fast, the one that takes least to prepare.
    best = min(unbeaten or sound, key=lambda lane: lane.cell.preparation_s or 0.0)
    reasons = [
        text
        for other in sound
        if other is not best
        for text in _reasons(other, delta(best, other, _THROUGHPUT), best, against[other.name], level)
    ]
    slower = [
        f"its {metric.partition('_')[0].upper()} is {number(found.change * 100)} % longer than that of {other.name}"
        for other in sound
        for metric in _LATENCIES
        if (found := delta(best, other, metric)) is not None
        and found.verdict is ChangeVerdict.WORSE
        and found.change is not None
    ]
    unscored = [
        other.name
        for other in sound
        if other is not best and ((found := delta(best, other, _ACCURACY)) is None or found.verdict in unknown)
    ]
    blind = [f"whether it answers as well as {' and '.join(unscored)} is not known"] if unscored else []
    alone = [f"{lane.name} is not compared ({lane.apart})" for lane in lanes if lane.apart is not None]
    told = (*reasons, *_prepared(best, sound), *slower, *blind, *alone, *_dropped(worse))
    return _sentence_of(f"Take {best.name} at {_load(level)}", *told)


def _sentence_of(head: str, *reasons: str) -> str:
    return f"{head}: {'; '.join(reasons)}."


def _load(level: str) -> str:
    return level if "/" in level else f"concurrency {level}"


def _reasons(other: Lane, delta: Delta | None, best: Lane, against: Comparison, level: str) -> Iterator[str]:
    """Why the best is taken before another lane."""
    assert delta is not None
    if delta.verdict is ChangeVerdict.BETTER and delta.change is not None and delta.interval is not None:
        low, high = delta.interval
        yield (
            f"{number(delta.change * 100)} % more output tokens/s than {other.name} (95 % interval {number(low * 100)} to "
            f"{number(high * 100)} %)"
        )
        paid = next((each for each in against.paybacks if (each.cell, each.level) == (best.cell.id, level)), None)
        if paid is not None and paid.tokens is not None and other.cell.preparation_s is None:
            rate = best.cell.level(level)
            assert rate is not None
            took_s = paid.tokens / (rate.output_tokens_per_s or 1.0)
            yield (
                f"its {number(paid.preparation_s)} s of preparation pay back after {_tokens(paid.tokens)} output tokens, "
                f"{about(took_s)} at that load"
            )
    else:
        yield f"no difference in output tokens/s to {other.name} beyond noise"


def _prepared(best: Lane, sound: Sequence[Lane]) -> Iterator[str]:
    others = [lane for lane in sound if lane is not best and lane.cell.preparation_s]
    if best.cell.preparation_s is None and others:
        yield f"it needs no preparation, unlike {' and '.join(lane.name for lane in others)}"


def _dropped(worse: Sequence[Lane]) -> Iterator[str]:
    for lane in worse:
        yield f"{lane.name} answers worse than another lane, beyond noise"


def _tokens(count: float) -> str:
    for unit, scale in (("billion", 1e9), ("million", 1e6), ("thousand", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f}"


# For people


def blocks(found: Sequence[Migration]) -> Iterator[Block]:
    """A table for each group, the advice before it."""
    if not found:
        yield TextLine("no model was measured on several toolchains: list them in axes.toolchain", "yellow")
    for each in found:
        yield Heading(each.what)
        yield TextLine(each.advice, "bold")
        yield _table(each)
        yield Items(
            f"differences from {each.base}",
            [TextLine(f"{lane}: {_sentence(deltas)}") for lane, deltas in each.deltas.items() if deltas],
        )
        yield Items("not compared", [TextLine(f"{lane.name}: {lane.apart}") for lane in each.lanes if lane.apart])
        yield Items("notes", [TextLine(text, "dim") for text in (*each.notes, *_findings(each))], folded=True)


def _findings(each: Migration) -> list[str]:
    told: dict[str, list[str]] = {}
    for lane in each.lanes:
        for text in lane.cell.warnings:
            told.setdefault(text, []).append(lane.name)
    return [f"{', '.join(names)}: {text}" for text, names in told.items()]


def _table(each: Migration) -> Grid:
    at = "" if each.level is None else f" @{each.level}"
    score = next((name for lane in each.lanes for name in lane.cell.accuracy), "accuracy")
    heads = ["lane", "status", f"TTFT ms{at}", f"TPOT ms{at}", f"tok/s{at}", score, "agree", "prepare s"]
    columns = {
        "memory": [lane.memory.host for lane in each.lanes],
        "GPU memory": [lane.memory.gpu for lane in each.lanes],
    }
    memory = {head: values for head, values in columns.items() if any(values)}
    rows: list[list[Value]] = []
    for place, lane in enumerate(each.lanes):
        level = None if each.level is None else lane.cell.level(each.level)
        latencies = [None if level is None else level.latency(name, "p50") for name in ("ttft_ms", "tpot_ms")]
        rate = None if level is None else level.output_tokens_per_s
        numbers = [*latencies, rate, lane.cell.accuracy.get(score), lane.agreement]
        rows.append(
            [
                lane.name,
                lane.cell.status.value.replace("_", " "),
                *("" if value is None else number(value) for value in numbers),
                "0" if lane.cell.preparation_s is None else number(lane.cell.preparation_s),
                *(size(values[place] or 0) if values[place] else "" for values in memory.values()),
                "" if lane.payback is None else _paid(lane.payback),
            ]
        )
    return Grid([*heads, *memory, f"pays back against {each.base}"], rows, (0, 1))


def _paid(each: Payback) -> str:
    doubt = {ChangeVerdict.NOISE: " (within noise)", ChangeVerdict.UNKNOWN: " (no interval)"}.get(each.verdict, "")
    return f"never{doubt}" if each.tokens is None else f"{_tokens(each.tokens)} tokens{doubt}"


def _sentence(deltas: Mapping[str, Delta]) -> str:
    names = {"output_tps": "tok/s", "ttft_p50": "TTFT", "tpot_p50": "TPOT", "accuracy": "accuracy"}
    words = {ChangeVerdict.NOISE: "within noise", ChangeVerdict.UNKNOWN: "no interval"}
    return ", ".join(
        f"{names[metric]} {percent(delta.change)} ({words.get(delta.verdict, delta.verdict.value)})"
        for metric, delta in deltas.items()
        if delta.change is not None
    )
