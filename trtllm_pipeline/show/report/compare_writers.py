"""A comparison and its gate as a terminal table, JSON, Markdown and CSV."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from trtllm_pipeline.base import shared_parts, text_blocks, text_tables
from trtllm_pipeline.measure import conditions
from trtllm_pipeline.show.phrases import about, without
from trtllm_pipeline.show.report.comparison import ChangeVerdict, Comparison, Delta, Pair, Payback
from trtllm_pipeline.show.report.gate import Break, Judgement

if TYPE_CHECKING:
    from rich.console import Group

_LOOKS: Final = {
    ChangeVerdict.BETTER: ("✔", "green"),
    ChangeVerdict.WORSE: ("✘", "bold red"),
    ChangeVerdict.NOISE: ("≈", "dim"),
    ChangeVerdict.UNKNOWN: ("?", ""),
    ChangeVerdict.MISSING: ("n/a", ""),
}
"""Mark and style."""
LEGEND: Final = "✔ better, ✘ worse, ≈ within noise, ? no interval, n/a missing on one side"
_MAX_MARKED: Final = 20
_MAX_REASONS: Final = 3
_UNITS: Final = {"output_tps": "tokens/s", "input_tps": "tokens/s", "rps": "requests/s", "engine_bytes": "bytes"}


def to_json(judged: Judgement) -> str:
    return json.dumps(judged.to_json(), indent=2, ensure_ascii=False) + "\n"


def to_table(judged: Judgement) -> Group:
    """Tables of differences for levels and for cells, then differences beyond noise with their values, then the gate."""
    return text_blocks.on_terminal([*blocks(judged.comparison), *_gate(judged, space=True)])


def to_markdown(judged: Judgement) -> str:
    """Markdown for a pull request: broken conditions first, then the tables."""
    head, *body = blocks(judged.comparison)
    return text_blocks.as_markdown([head, *_gate(judged), *body])


def blocks(comparison: Comparison) -> Iterator[text_blocks.Block]:
    parts = shared_parts([pair.cell for pair in comparison.pairs])
    yield text_blocks.Heading(f"{comparison.new} compared with {comparison.base}")
    if parts:
        yield text_blocks.TextLine(f"all cells: {' '.join(parts)}")
    for head, pairs in (
        ("cell @load", [pair for pair in comparison.pairs if pair.level is not None]),
        ("cell", [pair for pair in comparison.pairs if pair.level is None]),
    ):
        if metrics := _metrics(pairs):
            rows: list[list[text_blocks.Value]] = [
                [_place(pair, parts), *(_looks(pair.delta(metric)) for metric in metrics)] for pair in pairs
            ]
            yield text_blocks.Grid([head, *map(head_of, metrics)], rows)
    if comparison.pairs:
        yield text_blocks.TextLine(LEGEND, "dim")
    marked = [
        text_blocks.TextLine(
            f"{_LOOKS[delta.verdict][0]} {_place(pair, parts)} {head_of(delta.metric)}: {sentence(delta)}",
            _LOOKS[delta.verdict][1],
        )
        for pair, delta in _marked(comparison)
    ]
    yield text_blocks.Items("beyond noise", marked, _MAX_MARKED)
    yield text_blocks.Items("payback", [text_blocks.TextLine(_paid_back(each, parts)) for each in comparison.paybacks])
    yield text_blocks.Items(
        "not compared", [text_blocks.TextLine(text, "yellow") for text in _not_compared(comparison)]
    )
    yield text_blocks.Items("notes", [text_blocks.TextLine(text, "dim") for text in _notes(comparison)])


def _gate(judged: Judgement, *, space: bool = False) -> Iterator[text_blocks.Block]:
    if judged.verdict is None:
        return
    yield text_blocks.TextLine("\n" * space + judged.verdict, "bold green" if judged.exit_code == 0 else "bold red")
    if judged.broken or judged.excused:
        rows = map(_break_row, (*(judged.broken or ()), *judged.excused))
        yield text_blocks.Grid(
            ["cell", "level", "condition", "base", "new", "change", "why"], rows, (0, 1, 2, 6), notes_of=3
        )


def _break_row(each: Break) -> list[str]:
    delta = each.delta
    values = [text_tables.number(delta.base if delta else None), text_tables.number(delta.new if delta else None)]
    changed = None if delta is None else each.condition.change(delta)
    change = "n/a" if changed is None else f"{changed * 100:+.1f}pt" if each.condition.points else percent(changed)
    level = "" if each.level is None else f"@{each.level}"
    return [each.cell, level, str(each.condition), *values, change, each.reason]


def _place(pair: Pair, parts: Sequence[str]) -> str:
    level = f" @{pair.level}" if pair.level is not None else ""
    return f"{without(pair.cell, parts)}{level}"


def _looks(delta: Delta | None) -> tuple[str, str]:
    if delta is None:
        return "", ""
    mark, style = _LOOKS[delta.verdict]
    return (mark if delta.change is None else f"{percent(delta.change)} {mark}"), style


def _metrics(pairs: Sequence[Pair]) -> list[str]:
    deltas = [delta for pair in pairs for delta in pair.deltas]
    known = {delta.metric for delta in deltas if delta.base is not None or delta.new is not None}
    return [metric for metric in dict.fromkeys(delta.metric for delta in deltas) if metric in known]


def _marked(comparison: Comparison) -> list[tuple[Pair, Delta]]:
    """Differences beyond noise, worst first."""
    every = [(pair, delta) for pair in comparison.pairs for delta in pair.deltas]
    marked = [each for each in every if each[1].verdict in {ChangeVerdict.BETTER, ChangeVerdict.WORSE}]
    return sorted(marked, key=lambda each: (each[1].verdict is ChangeVerdict.BETTER, -abs(each[1].change or 0)))


def _notes(comparison: Comparison) -> list[str]:
    """Notes for reading the differences."""
    notes = [f"{name.replace('_', ' ')}: {words}" for name, words in comparison.methods.items()]
    differing: dict[tuple[str, str], list[str]] = {}
    for cell, difference in comparison.caveats:
        differing.setdefault((_kind(difference), str(difference)), []).append(cell)
    notes += [f"{kind} ({_some(cells)}): {words}" for (kind, words), cells in differing.items()]
    tried = [d for pair in comparison.pairs for d in pair.deltas if d.interval and d.method not in {"exact", "same"}]
    if len(tried) >= 10:
        expected = max(1, round(0.05 * len(tried)))
        notes.append(
            f"about {expected} of {len(tried)} differences with a 95% interval are expected to be marked by chance"
        )
    return notes


def _kind(difference: conditions.Difference) -> str:
    if difference.field is conditions.OUTPUT_LENGTH:
        return "shorter outputs have a lower e2e and more requests/s"
    unknown = conditions.UNKNOWN in str(difference)
    return "conditions not recorded" if unknown else "measured under different conditions"


def _some(cells: Sequence[str]) -> str:
    return cells[0] if len(cells) == 1 else f"{cells[0]} and {len(cells) - 1} more"


def _not_compared(comparison: Comparison) -> list[str]:
    alike: dict[tuple[str, ...], list[str]] = {}
    for cell, _, differences in comparison.refused:
        alike.setdefault(tuple(map(str, differences)), []).append(cell)
    lines = [f"{_some(cells)}: not comparable: {'; '.join(why)}" for why, cells in alike.items()]
    lines += [f"{cell}: {why}" for cell, why in (*comparison.unfit, *comparison.only_new)]
    lines += [f"{cell}: only in the baseline, {why}" for cell, why in comparison.only_base]
    return lines + [f"{cell} @{level}: only in the baseline, {why}" for cell, level, why in comparison.lost]


def of_page(comparison: Comparison) -> Iterator[text_blocks.Block]:
    """The comparison for a page: the differences, or one sentence that explains why there are none."""
    if comparison.pairs:
        yield from blocks(comparison)
        return
    reasons = list(dict.fromkeys(str(each) for refused in comparison.refused for each in refused.differences))
    words = "measured under different conditions: " if reasons else ""
    reasons = reasons or _not_compared(comparison) or ["it has no cell in common with this run"]
    more = f"; and {len(reasons) - _MAX_REASONS} more" if len(reasons) > _MAX_REASONS else ""
    causes = "; ".join(reasons[:_MAX_REASONS])
    yield text_blocks.TextLine(
        f"The previous run {comparison.base} is not comparable with {comparison.new}: {words}{causes}{more}."
    )


def _paid_back(each: Payback, parts: Sequence[str]) -> str:
    place = f"{without(each.cell, parts)} @{each.level}"
    made = f"{each.preparation_s:.1f} s of quantization, conversion and build"
    doubts = {
        ChangeVerdict.NOISE: "; the difference is within noise",
        ChangeVerdict.UNKNOWN: "; the difference has no interval",
    }
    doubt = doubts.get(each.verdict, "")
    if each.tokens is None:
        return f"{place}: {made} never pay off, because tokens take at least as long as with the baseline{doubt}"
    return (
        f"{place}: {made} pay off after {each.tokens:,.0f} output tokens, {about(each.load_s or 0.0)} at that load "
        f"({each.saved_s_per_token * 1e3:.3g} ms saved per token{doubt})"
    )


def head_of(metric: str) -> str:
    """Display name of a metric: `TTFT p99`."""
    stem, _, rest = metric.partition("_")
    if stem in {"ttft", "tpot", "itl", "icl", "e2e"}:
        return f"{stem.upper() if stem != 'e2e' else 'e2e'} {rest}"
    known = {"output_tps": "tok/s", "input_tps": "input tok/s", "rps": "req/s", "engine_bytes": "engine size"}
    return known.get(metric, metric.removeprefix("accuracy.").replace("_s", " s"))


def unit(metric: str) -> str:
    """Unit of a metric, empty for scores."""
    if metric.endswith("_s"):
        return "s"
    return _UNITS.get(metric, "" if metric.startswith("accuracy") else "ms")


def percent(change: float) -> str:
    """`+3.1%`."""
    return f"{change * 100:+.1f}%"


def sentence(delta: Delta) -> str:
    """`31.2 → 40.1 ms, +28.5% (+11.0% to +49.2%)`."""
    of, scale = (unit(delta.metric), 1.0) if delta.metric != "engine_bytes" else ("MB", 1e6)
    before, after = (text_tables.number(None if value is None else value / scale) for value in (delta.base, delta.new))
    text = f"{before} → {after} {of}".rstrip()
    if delta.change is not None:
        text += f", {percent(delta.change)}"
    if delta.interval is not None and delta.method != "exact":
        text += f" ({percent(delta.interval[0])} to {percent(delta.interval[1])})"
    return text


def to_csv(judged: Judgement) -> str:
    """One line for each metric of each pair."""
    place_names = ("cell", "base_cell", "level", "metric", "unit")
    names = (*place_names, "base", "new", "change", "low", "high", "method", "verdict")
    rows = []
    for pair in judged.comparison.pairs:
        for delta in pair.deltas:
            values = [delta.base, delta.new, delta.change, *(delta.interval or (None, None))]
            place = [pair.cell, pair.base, pair.level, delta.metric, unit(delta.metric)]
            rows.append(dict(zip(names, [*place, *values, delta.method, delta.verdict.value], strict=True)))
    return f"{text_tables.csv_table(rows) or ','.join(names)}\n"
