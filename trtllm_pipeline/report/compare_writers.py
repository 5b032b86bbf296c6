"""A comparison as a terminal table, Markdown and CSV; `compare.to_json` gives the JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from trtllm_pipeline.bench.conditions import UNKNOWN
from trtllm_pipeline.planning.names import count, shared_parts, without
from trtllm_pipeline.report.compare import ChangeVerdict, Comparison, Delta, Pair, Payback, to_json
from trtllm_pipeline.report.gate import Break, Judgement
from trtllm_pipeline.report.tables import csv_table

if TYPE_CHECKING:
    from rich.console import Group

MARKS: Final = {
    ChangeVerdict.BETTER: "✔",
    ChangeVerdict.WORSE: "✘",
    ChangeVerdict.NOISE: "≈",
    ChangeVerdict.UNKNOWN: "?",
    ChangeVerdict.MISSING: "n/a",
}
LEGEND: Final = "✔ better, ✘ worse, ≈ within noise, ? no interval, n/a missing on one side"
_STYLES: Final = {
    ChangeVerdict.BETTER: "green",
    ChangeVerdict.WORSE: "bold red",
    ChangeVerdict.NOISE: "dim",
    ChangeVerdict.UNKNOWN: "",
}
_UNITS: Final = {"output_tps": "tokens/s", "input_tps": "tokens/s", "rps": "requests/s", "engine_bytes": "bytes"}


def text_of(judged: Judgement, form: Literal["json", "csv", "markdown"]) -> str:
    """A comparison and its gate in one of the formats for programs."""
    comparison, broken = judged.comparison, judged.broken
    if form == "json":
        gate = None if broken is None else gate_json(broken, judged=not comparison.refused)
        return json.dumps({**to_json(comparison), "gate": gate}, indent=2, ensure_ascii=False) + "\n"
    return to_csv(comparison) if form == "csv" else to_markdown(comparison, broken)


def head(metric: str) -> str:
    """A metric's name for people: `TTFT p99`."""
    stem, _, rest = metric.partition("_")
    if stem in {"ttft", "tpot", "itl", "icl", "e2e"}:
        return f"{stem.upper() if stem != 'e2e' else 'e2e'} {rest}"
    known = {"output_tps": "tok/s", "input_tps": "input tok/s", "rps": "req/s", "engine_bytes": "engine size"}
    return known.get(metric, metric.removeprefix("accuracy.").replace("_s", " s"))


def unit(metric: str) -> str:
    """Its unit, empty for scores."""
    if metric.endswith("_s"):
        return "s"
    return _UNITS.get(metric, "" if metric.startswith("accuracy") else "ms")


def number(value: float | None) -> str:
    """Three significant digits; whole numbers from 100 on."""
    if value is None:
        return "n/a"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(change: float) -> str:
    """`+3.1 %`."""
    return f"{change * 100:+.1f} %"


def sentence(delta: Delta) -> str:
    """`31.2 → 40.1 ms, +28.5 % (+11.0 % to +49.2 %)`."""
    of, scale = (unit(delta.metric), 1.0) if delta.metric != "engine_bytes" else ("MB", 1e6)
    before, after = (number(None if value is None else value / scale) for value in (delta.base, delta.new))
    text = f"{before} → {after} {of}".rstrip()
    if delta.change is not None:
        text += f", {percent(delta.change)}"
    if delta.interval is not None and delta.method != "exact":
        text += f" ({percent(delta.interval[0])} to {percent(delta.interval[1])})"
    return text


def _cell_text(delta: Delta | None) -> str:
    if delta is None or delta.verdict is ChangeVerdict.MISSING:
        return "" if delta is None else MARKS[ChangeVerdict.MISSING]
    assert delta.change is not None
    return f"{percent(delta.change)} {MARKS[delta.verdict]}"


def _place(pair: Pair, parts: Sequence[str]) -> str:
    level = f" @{pair.level}" if pair.level is not None else ""
    return f"{without(pair.cell, parts)}{level}"


def _metrics(pairs: Sequence[Pair]) -> list[str]:
    """Those that are there on both sides in some pair, in order."""
    known = (delta for pair in pairs for delta in pair.deltas if delta.verdict is not ChangeVerdict.MISSING)
    found = {delta.metric for delta in known}
    return list(dict.fromkeys(delta.metric for pair in pairs for delta in pair.deltas if delta.metric in found))


def _marked(comparison: Comparison) -> list[tuple[Pair, Delta]]:
    """What is beyond noise, the worst first."""
    found = [
        (pair, delta)
        for pair in comparison.pairs
        for delta in pair.deltas
        if delta.verdict in {ChangeVerdict.BETTER, ChangeVerdict.WORSE}
    ]
    return sorted(found, key=lambda each: (each[1].verdict is ChangeVerdict.BETTER, -abs(each[1].change or 0)))


def _notes(comparison: Comparison) -> list[str]:
    """What a reader has to know of the numbers."""
    notes = [f"{name.replace('_', ' ')}: {words}" for name, words in comparison.methods.items()]
    differing: dict[str, list[str]] = {}
    for cell, difference in comparison.told:
        differing.setdefault(str(difference), []).append(cell)
    notes += [
        f"{'conditions not recorded' if UNKNOWN in words else 'measured under different conditions'} ({_some(cells)}): {words}"
        for words, cells in differing.items()
    ]
    tried = [d for pair in comparison.pairs for d in pair.deltas if d.interval and d.method not in {"exact", "same"}]
    if len(tried) >= 10:
        expected = max(1, round(0.05 * len(tried)))
        notes.append(
            f"about {expected} of {len(tried)} differences with a 95 % interval are expected to be marked by chance"
        )
    return notes


def _some(cells: Sequence[str]) -> str:
    return cells[0] if len(cells) == 1 else f"{cells[0]} and {len(cells) - 1} more"


def _problems(comparison: Comparison) -> list[str]:
    alike: dict[tuple[str, ...], list[str]] = {}
    for cell, _, differences in comparison.refused:
        alike.setdefault(tuple(map(str, differences)), []).append(cell)
    found = [f"{_some(cells)}: not comparable: {'; '.join(why)}" for why, cells in alike.items()]
    found += [f"{cell}: not compared, {why}" for cell, why in (*comparison.unfit, *comparison.only_new)]
    found += [f"{cell}: only in the baseline, {why}" for cell, why in comparison.only_base]
    return found + [f"{cell} @{level}: only in the baseline, {why}" for cell, level, why in comparison.lost]


def _paid_back(each: Payback, parts: Sequence[str]) -> str:
    place = f"{without(each.cell, parts)} @{each.level}"
    made = f"{each.preparation_s:.1f} s of quantizing, converting and building"
    doubts = {
        ChangeVerdict.NOISE: "; the difference is within noise",
        ChangeVerdict.UNKNOWN: "; the difference has no interval",
    }
    doubt = doubts.get(each.verdict, "")
    if each.tokens is None:
        return f"{place}: {made} never pay back: a token takes as long as with the baseline, or longer{doubt}"
    return (
        f"{place}: {made} pay back after {each.tokens:,.0f} output tokens "
        f"({each.saved_s_per_token * 1e3:.3g} ms saved per token{doubt})"
    )


# Terminal


def to_table(comparison: Comparison, broken: Sequence[Break] | None = None) -> Group:
    """Differences as one table for levels and one for cells, then what is beyond noise with its numbers, then the gate."""
    from rich.console import Group
    from rich.text import Text

    parts = shared_parts([pair.cell for pair in comparison.pairs])
    said: list[Any] = [Text(f"{comparison.new} against {comparison.base}", "bold")]
    said += [Text(f"all cells: {' '.join(parts)}")] if parts else []
    for of_level in (True, False):
        pairs = [pair for pair in comparison.pairs if (pair.level is not None) == of_level]
        if _metrics(pairs):
            said += [Text(), _grid(pairs, parts)]
    said += [Text(LEGEND, "dim")] if comparison.pairs else []
    marked = _marked(comparison)
    if marked:
        said.append(Text("\nbeyond noise", "bold"))
        said += [
            Text(
                f"  {MARKS[delta.verdict]} {_place(pair, parts)} {head(delta.metric)}: {sentence(delta)}",
                _STYLES[delta.verdict],
            )
            for pair, delta in marked[:20]
        ]
        said += [Text(f"  and {len(marked) - 20} more: --format csv has all", "dim")] if len(marked) > 20 else []
    if comparison.paybacks:
        said.append(Text("\npayback", "bold"))
        said += [Text(f"  {_paid_back(each, parts)}") for each in comparison.paybacks]
    said += [Text(f"\n{text}", "yellow") for text in _problems(comparison)]
    said += [Text(), *(Text(text, "dim") for text in _notes(comparison))]
    if broken is not None:
        said += [Text(), *gate_lines(broken, judged=not comparison.refused)]
    return Group(*said)


def _grid(pairs: Sequence[Pair], parts: Sequence[str]) -> Any:
    from rich.table import Table
    from rich.text import Text

    metrics = _metrics(pairs)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("cell" if pairs[0].level is None else "cell @load")
    for metric in metrics:
        table.add_column(head(metric), justify="right", no_wrap=True)
    for pair in pairs:
        deltas = [pair.delta(metric) for metric in metrics]
        table.add_row(
            _place(pair, parts),
            *(Text(_cell_text(delta), _STYLES.get(delta.verdict, "") if delta else "") for delta in deltas),
        )
    return table


_NOT_JUDGED: Final = "not evaluated: some cells are not comparable"


def gate_lines(broken: Sequence[Break], *, judged: bool = True) -> list[Any]:
    """What the gate says: a table of what broke, or that nothing did; `judged` is False where cells were refused."""
    from rich.table import Table
    from rich.text import Text

    if not broken:
        return [Text("gate: passed", "green") if judged else Text(f"gate: {_NOT_JUDGED}", "bold red")]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("cell", "level", "condition", "base", "new", "change", "why"):
        table.add_column(name, overflow="fold")
    for each in broken:
        table.add_row(*_break_row(each))
    return [Text(f"gate: {count(len(broken), 'condition')} broken", "bold red"), table]


def _break_row(each: Break) -> list[str]:
    change = each.delta.change if each.delta else None
    return [
        each.cell,
        "" if each.level is None else f"@{each.level}",
        str(each.condition),
        number(each.delta.base) if each.delta else "n/a",
        number(each.delta.new) if each.delta else "n/a",
        "n/a" if change is None else percent(change),
        each.reason,
    ]


# Markdown


def to_markdown(comparison: Comparison, broken: Sequence[Break] | None = None) -> str:
    """For a pull request: what broke first, then the tables."""
    parts = shared_parts([pair.cell for pair in comparison.pairs])
    lines = [f"### Comparison: `{comparison.new}` against `{comparison.base}`", ""]
    if broken is not None:
        held = f"**Gate: {_NOT_JUDGED}**" if comparison.refused else "**Gate: passed**"
        lines += [f"**Gate: {count(len(broken), 'condition')} broken**" if broken else held, ""]
        if broken:
            lines += _markdown(
                ["cell", "level", "condition", "base", "new", "change", "why"],
                map(_break_row, broken),
                left=(0, 1, 2, 6),
            )
    lines += [f"All cells: {' '.join(f'`{part}`' for part in parts)}", ""] if parts else []
    for of_level in (True, False):
        pairs = [pair for pair in comparison.pairs if (pair.level is not None) == of_level]
        metrics = _metrics(pairs)
        if metrics:
            rows = [
                [f"`{_place(pair, parts)}`", *(_cell_text(pair.delta(metric)) for metric in metrics)] for pair in pairs
            ]
            lines += _markdown(["cell", *map(head, metrics)], rows, left=(0,))
    lines += [LEGEND, ""] if comparison.pairs else []
    for title, items in (
        (
            "Beyond noise",
            [
                f"{MARKS[delta.verdict]} `{_place(pair, parts)}` {head(delta.metric)}: {sentence(delta)}"
                for pair, delta in _marked(comparison)
            ],
        ),
        ("Payback", [_paid_back(each, parts) for each in comparison.paybacks]),
        ("Not compared", _problems(comparison)),
        ("About the intervals", _notes(comparison)),
    ):
        if items:
            lines += [f"**{title}**", "", *(f"- {item}" for item in items), ""]
    return "\n".join(lines).rstrip() + "\n"


def _markdown(heads: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[int]) -> list[str]:
    rule = ["---" if index in left else "---:" for index in range(len(heads))]
    table = [heads, rule, *rows]
    return [*("| " + " | ".join(value.replace("|", "\\|") for value in row) + " |" for row in table), ""]


# CSV


def to_csv(comparison: Comparison) -> str:
    """One line for each figure of each pair."""
    place_names = ("cell", "base_cell", "level", "metric", "unit")
    names = (*place_names, "base", "new", "change", "low", "high", "method", "verdict")
    rows = []
    for pair in comparison.pairs:
        for delta in pair.deltas:
            figures = [delta.base, delta.new, delta.change, *(delta.interval or (None, None))]
            place = [pair.cell, pair.base, pair.level, delta.metric, unit(delta.metric)]
            rows.append(dict(zip(names, [*place, *figures, delta.method, delta.verdict.value], strict=True)))
    return f"{csv_table(rows) or ','.join(names)}\n"


def gate_json(broken: Sequence[Break], *, judged: bool = True) -> Mapping[str, Any]:
    """The gate's part of the JSON. It does not hold where cells were refused."""
    return {"holds": judged and not broken, "judged": judged, "broken": [each.to_json() for each in broken]}
