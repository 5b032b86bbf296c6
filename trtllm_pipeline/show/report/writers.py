"""Results as a terminal table, JSON, CSV and Markdown."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TextIO

from trtllm_pipeline.base import (
    CellId,
    Json,
    count,
    in_brackets,
    path_from_here,
    shared_parts,
    shorten,
    terminal,
    text_blocks,
    text_tables,
)
from trtllm_pipeline.measure import Conditions, LevelResult, conditions, metric_names, result
from trtllm_pipeline.models import AS_IS
from trtllm_pipeline.orchestrate import CellResult, CellStatus, ForecastCheck, report_file
from trtllm_pipeline.show.phrases import without
from trtllm_pipeline.show.report.columns import HIGHEST, LOWEST, Column, columns
from trtllm_pipeline.show.report.interference import interference
from trtllm_pipeline.show.report.report_formats import Report
from trtllm_pipeline.tensorrt import levels_words

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

    from trtllm_pipeline.measure import ScoreDrift

_STYLES: Final = {
    CellStatus.DONE: "green",
    CellStatus.UP_TO_DATE: "green",
    CellStatus.FAILED: "bold red",
    CellStatus.INFEASIBLE: "dim",
    CellStatus.INTERRUPTED: "yellow",
    CellStatus.RUNNING: "cyan",
    CellStatus.NOT_RUN: "dim",
}
_MIN_NAME: Final = 16
_NAME: Final = 24
"""Minimum width of cell names next to the most important columns."""
_SHORT_NOTES: Final = 3
_SHORT_DROPPED: Final = 6
_WHICH: Final = {LOWEST: "the lowest load of each cell", HIGHEST: "the highest load of each cell"}
_MAX_FAILURES: Final = 20
_MAX_ROWS: Final = 200
"""Maximum number of cells in a table. JSON and CSV have all cells."""
_NOTHING: Final = frozenset({CellStatus.INTERRUPTED, CellStatus.NOT_RUN, CellStatus.RUNNING})
"""Statuses without results. A table with too many cells leaves these out first."""
_PIPED_WIDTH: Final = 120
_SIMILAR: Final = ", or similar"
_BENCH: Final = ("output_tokens_per_s", "requests_per_s", "ttft_ms", "tpot_ms", "e2e_ms")


# CSV


def to_csv(rows: Sequence[CellResult]) -> str:
    return f"{text_tables.csv_table(flat(rows)) or 'cell'}\n"


def flat(rows: Sequence[CellResult]) -> list[dict[str, object]]:
    """One mapping per cell and level. All have the same keys, with units in the names. Cells without measurements have one."""
    lines = [(*_of_cell(row), *_of_level(row, level)) for row in rows for level in row.levels or (None,)]
    # Built part by part, so that the order of columns does not depend on the first cell.
    names = dict.fromkeys(name for parts in zip(*lines, strict=True) for part in parts for name in part)
    return [
        {**dict.fromkeys(names), **{name: value for part in line for name, value in part.items()}} for line in lines
    ]


def _of_cell(row: CellResult) -> list[Mapping[str, object]]:
    """A cell as columns, in parts. Columns without values are left out."""
    drift, at, bench = row.accuracy_drift, row.conditions.measured_s, row.trtllm_bench or {}
    scores: dict[str, object] = {}
    for name in row.accuracy:
        if ends := row.accuracy_intervals.get(name):
            scores |= {f"accuracy_{name}_low": ends[0], f"accuracy_{name}_high": ends[1]}
        if drift and (of := drift.scores.get(name)):
            low, high = of.interval
            scores |= {f"drift_{name}": of.difference, f"drift_{name}_low": low, f"drift_{name}_high": high}
    recorded: dict[str, object] = {}
    for field in conditions.FIELDS if row.levels else ():
        value = row.conditions.value(field)
        shown = value if field.name.endswith("digest") or isinstance(value, (int, float)) else field.shown(value)
        recorded |= {} if value is None else {f"{field.about}_{field.name}": shown}
    measured = None if at is None else datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="seconds")
    return [
        {"cell": row.id},
        row.axes,
        row.numerics or {},
        {"status": row.status.value},
        {name: getattr(row, name) for name in ("failed_stage", "failure", "reason", "log")},
        {f"{stage}_s": seconds for stage, seconds in row.seconds.items()},
        {"engine_size_bytes": row.engine_size_bytes, "accuracy_total": row.accuracy_total},
        {} if row.highest_rate is None else {"highest_rate": row.highest_rate.rate},
        {} if row.highest_concurrency is None else {"highest_concurrency": row.highest_concurrency.concurrency},
        {f"trtllm_bench_{name}": bench[name] for name in _BENCH if name in bench},
        {f"accuracy_{name}": score for name, score in row.accuracy.items()},
        scores,
        {"drift_reference": drift.reference, "drift_agreement": drift.agreement} if drift else {},
        {} if measured is None else {"measured_at": measured},
        recorded,
    ]


def _of_level(row: CellResult, level: LevelResult | None) -> list[Mapping[str, object]]:
    """A level as columns, in parts: `ttft_p50_ms`, `input_tokens_per_request_mean` etc. All are empty without a level."""
    known = LevelResult() if level is None else level
    planned = row.conditions.level(known.concurrency, known.request_rate)
    rates = ("requests", "failures", "duration_s", "input_tokens_per_s", "output_tokens_per_s", "requests_per_s")
    goodput = known.goodput
    interval = known.interval("output_tps")
    derived = {"user_tokens_per_s": known.value("user_tps")}
    if level is not None:
        derived |= {"output_tokens_per_s_per_gpu": row.per_gpu(known)}
        derived |= {} if row.gpu_hour is None else {"dollars_per_million": row.cost(known)}
    return [
        {"concurrency": known.concurrency},
        {} if known.request_rate is None else {"request_rate": known.request_rate},
        {name: getattr(known, name) for name in rates},
        {} if interval is None else {"output_tokens_per_s_low": interval[0], "output_tokens_per_s_high": interval[1]},
        derived,
        {}
        if goodput is None
        else {f"goodput_{name}": getattr(goodput, name) for name in ("share", "requests_per_s", "output_tokens_per_s")},
        {} if known.saturated_rps is None else {"saturated_rps": known.saturated_rps},
        {} if known.acceptance is None else {"acceptance": known.acceptance},
        {} if known.tokens_per_joule is None else {"tokens_per_joule": known.tokens_per_joule},
        {} if known.gpu_use is None else {f"gpu_{name}": value for name, value in asdict(known.gpu_use).items()},
        _of_triton(known.triton_use),
        *(
            {
                f"{name[:-3]}_{key}{'' if key == 'n' else '_ms'}": value
                for key, value in known.latencies.get(name, {}).items()
            }
            for name in metric_names.LATENCIES
        ),
        {name: planned[name] for name in ("warmup_requests", "repeats") if planned.get(name) is not None},
        *({f"{name}_{key}": value for key, value in known.lengths.get(name, {}).items()} for name in result.LENGTHS),
    ]


def _of_triton(use: result.TritonUse | None) -> Mapping[str, object]:
    """Triton's own metrics: `triton_waiting`, `triton_tensorrt_llm_queue_ms` etc."""
    if use is None:
        return {}
    gauges = {name: getattr(use, name) for name in result.TRITON_GAUGES}
    times = {f"{model}_{name}": of[name] for model, of in use.models.items() for name in _TIMES if name in of}
    return {f"triton_{name}": value for name, value in {**gauges, **times}.items() if value is not None}


_TIMES: Final = ("queue_ms", "compute_infer_ms")

# Markdown


def to_markdown(report: Report) -> str:
    """A table for a pull request, followed by failures and metric definitions."""
    rows, forecast, matrix = report.rows, report.forecast, report.matrix
    parts = shared_parts([row.id for row in rows])
    shown = columns(rows, report.level)
    failures = [
        f"{what}, {count(len(ids), 'cell')} ({', '.join(ids[:4])}{', …' if len(ids) > 4 else ''}): {'; '.join(details)}"
        for what, ids, details in failures_of(rows)
    ]
    notes, recorded, definitions = _below(rows, shown)
    status = [place for place, column in enumerate(shown, 1) if column.head == "status"]
    return text_blocks.as_markdown(
        [
            text_blocks.Heading(
                " ".join(filter(None, ("Pipeline report", report.run_id, matrix and f"of {Path(matrix).name}")))
            ),
            text_blocks.TextLine(f"{summary_of(rows)}{'; all cells: ' + ' '.join(parts) if parts else ''}"),
            text_blocks.Items("measured", recorded),
            text_blocks.Grid(
                ["cell", *(column.head for column in shown)],
                [[_name(row, parts), *(column.value(row) or "" for column in shown)] for row in rows],
                (0, *status),
            ),
            text_blocks.Items("failed and infeasible cells", list(map(text_blocks.TextLine, failures))),
            text_blocks.Items("notes", notes),
            text_blocks.Items("definitions", definitions, folded=True),
            *([] if forecast is None else [text_blocks.Items(forecast.line(), _checked(forecast), folded=True)]),
        ]
    )


# Terminal


def to_table(report: Report, width: int) -> Group:
    """The rows at one level as a table of at most `width` columns, failures, and notes, which are short unless `verbose`.

    Reasons in `reported` are not repeated. Columns that do not fit are dropped, highest rank first. So are cells beyond
    `_MAX_ROWS`. JSON and CSV have everything.
    """
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    rows, forecast = report.rows, report.forecast
    parts = shared_parts([row.id for row in rows])
    listed = rows if len(rows) <= _MAX_ROWS else [row for row in rows if row.status not in _NOTHING][:_MAX_ROWS]
    every = columns(listed, report.level)
    shown, by_model, name_width = _fit(listed, every, parts, width)
    parts_drawn: list[Any] = [Text(f"{summary_of(rows)}{'; all: ' + ' '.join(parts) if parts else ''}", "bold")]
    if listed:
        parts_drawn += [Text(), *_table(listed, shown, parts, name_width, by_model=by_model)]
    if len(rows) > len(listed):
        more = f"and {count(len(rows) - len(listed), 'more cell')}" if listed else "no cell has finished"
        parts_drawn.append(Text(f"{more}: see pipeline report --format csv", "dim"))
    failures = failures_of(rows, report.workspace, report.reported)
    for what, ids, details in failures[:_MAX_FAILURES]:
        names = [shorten(without(cell, parts), max(_MIN_NAME, width - 8)) for cell in ids]
        more = f", and {len(ids) - 3} more" if len(ids) > 3 else ""
        parts_drawn.append(Text(f"\n{what}, {count(len(ids), 'cell')}: {', '.join(names[:3])}{more}", "bold"))
        parts_drawn += [Padding(Text(detail), (0, 0, 0, 2), expand=False) for detail in details]
    if len(failures) > _MAX_FAILURES:
        parts_drawn.append(Text(f"\nand {len(failures) - _MAX_FAILURES} more reasons: see --format json", "dim"))
    checked = [] if forecast is None else [text_blocks.TextLine(forecast.line(), "dim")]
    dropped = [column.head for column in every if column not in shown]
    below = [_in_short(rows, shown, dropped, width, checked)]
    if report.verbose:
        below = [*_below(rows, shown), [*checked, *_checked(forecast)]]
    for lines in below:
        parts_drawn += [Text("\n" * (place == 0) + line.text, line.style) for place, line in enumerate(lines)]
    return Group(*parts_drawn)


def _below(rows: Sequence[CellResult], shown: Sequence[Column]) -> list[list[text_blocks.TextLine]]:
    """Details of the table: notes, conditions, definitions."""
    return [
        [text_blocks.TextLine(_note(*note), "yellow") for note in notes_of(rows)],
        [
            text_blocks.TextLine(f"{name}: {text}", "dim")
            for name, text in (*conditions_of(rows), *numerics_of(rows), *losses_of(rows))
        ],
        [text_blocks.TextLine(f"{head}: {formula}", "dim") for head, formula in definitions_of(shown)],
    ]


def _checked(forecast: ForecastCheck | None) -> list[text_blocks.TextLine]:
    return [] if forecast is None else [text_blocks.TextLine(line, "dim") for line in forecast.lines()]


def _in_short(
    rows: Sequence[CellResult],
    shown: Sequence[Column],
    dropped: Sequence[str],
    width: int,
    checked: Sequence[text_blocks.TextLine],
) -> list[text_blocks.TextLine]:
    """A few lines: notes, legend and system, then `checked`. Only the last is cut to `width`."""
    notes = notes_of(rows)
    keys = dict.fromkeys(key for column in shown if (key := column.head.partition("@")[2]))
    legend = ["Latencies are medians (p50)"] if any(column.is_latency for column in shown) else []
    legend += [f"@{key} is {_WHICH.get(key) or result.load_words(key)}" for key in keys]
    measured = [row.conditions for row in rows if row.levels]
    lines = [text_blocks.TextLine(_note(*note), "yellow") for note in notes[:_SHORT_NOTES]]
    if any(row.warnings for row in rows):
        legend.append("! has warnings")
    if systems := {_system(each) for each in measured}:
        at = moment(max((each.measured_s for each in measured if each.measured_s is not None), default=None))
        more = f" and {len(systems) - 1} more" if len(systems) > 1 else ""
        lines.append(text_blocks.TextLine(f"Measured{f' {at}' if at else ''} on {min(systems)}{more}", "dim"))
    lines += [text_blocks.TextLine(f"{', '.join(legend)}.", "dim")] if legend else []
    if dropped:
        more = f" and {len(dropped) - _SHORT_DROPPED} more" if len(dropped) > _SHORT_DROPPED else ""
        lines.append(text_blocks.TextLine(f"{text_blocks.also_shown(dropped[:_SHORT_DROPPED])}{more}", "dim"))
    if load := main_load(rows):
        lines.append(text_blocks.TextLine(f"Load: {load}", "dim"))
    lines += [text_blocks.TextLine(line, "dim") for line in interference(rows)]
    more = f"{count(len(notes) - _SHORT_NOTES, 'more note')}, " if len(notes) > _SHORT_NOTES else ""
    full = f"definitions, system{',' if checked else ' and'} load{' and forecast' if checked else ''} in full"
    how = [text_blocks.TextLine(_cut(f"-v: {more}{full}", width), "dim")] if legend or notes or checked else []
    return [*lines, *checked, *how]


def _system(each: Conditions) -> str:
    """The hardware of a measurement, GPUs first."""
    return "; ".join(
        reversed(conditions.machine_words(each).replace(conditions.UNKNOWN, "an unknown system").split("; "))
    )


def _note(text: str, cells: int) -> str:
    severity, _, rest = text.partition(": ")
    if severity not in {"warning", "invalid"}:
        severity, rest = "note", text
    return f"{severity} ({count(cells, 'cell')}): {rest}"


def _name(row: CellResult, parts: Sequence[str]) -> str:
    """A cell's id without `parts`. The precision of unconverted weights includes the format from the model's files."""
    precision = str(row.axes.get("precision"))
    words = without(row.id, parts).split("/")
    return "/".join(precision if word == AS_IS else word for word in words)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1].rstrip()}…"


def _fit(
    rows: Sequence[CellResult], shown: tuple[Column, ...], parts: Sequence[str], width: int
) -> tuple[tuple[Column, ...], bool, int]:
    """Columns that fit, whether rows are grouped under their model's name, and the width left for names."""
    longest = max((len(_name(row, parts)) for row in rows), default=1)
    models = {str(row.axes.get("model")) for row in rows}
    by_model = False
    while True:
        free = width - sum(2 + _width(column, rows) for column in shown)
        if free >= longest:
            return shown, by_model, longest
        worst = max(shown, key=lambda column: column.rank)
        if worst.rank > 2:
            shown = tuple(column for column in shown if column is not worst)
        elif len(models) > 1 and not by_model:
            by_model = True
            longest = max(2 + len(_name(row, (*parts, str(row.axes.get("model"))))) for row in rows)
        elif worst.rank > 0 and free < min(longest, _NAME):
            shown = tuple(column for column in shown if column is not worst)
        else:
            return shown, by_model, max(min(longest, free), 8)


def _width(column: Column, rows: Sequence[CellResult]) -> int:
    return max(map(len, (*_head(column), *(column.value(row) or "" for row in rows))))


def _head(column: Column) -> list[str]:
    """A header on up to two lines: "TTFT ms" over "@1"."""
    first, _, last = column.head.rpartition(" ")
    return [first, last] if first else [last]


def _table(
    rows: Sequence[CellResult], shown: Sequence[Column], parts: Sequence[str], name_width: int, *, by_model: bool
) -> Iterator[Text]:
    """Lines of the table. Rich's own table takes ten times as long."""
    from rich.text import Text

    aligned = [(_width(column, rows), str.ljust if column.head == "status" else str.rjust) for column in shown]
    heads = [(["", *_head(column)])[-2:] for column in shown]
    for number, name in enumerate(("", "cell")):
        if number or any(head[0] for head in heads):
            words = [align(head[number], width) for head, (width, align) in zip(heads, aligned, strict=True)]
            yield Text("  ".join((name.ljust(name_width), *words)), "dim", no_wrap=True)
    place = {model: number for number, model in enumerate(dict.fromkeys(row.axes.get("model") for row in rows))}
    model: Json = None
    for row in sorted(rows, key=lambda row: place[row.axes.get("model")]) if by_model else rows:
        if by_model and row.axes.get("model") != model:
            model = row.axes.get("model")
            yield Text(shorten(str(model), name_width), "bold")
        name = "  " + _name(row, (*parts, str(model))) if by_model else _name(row, parts)
        line = Text(shorten(name, name_width).ljust(name_width), no_wrap=True)
        for column, (width, align) in zip(shown, aligned, strict=True):
            line.append(
                f"  {align(column.value(row) or '', width)}", _STYLES[row.status] if column.head == "status" else ""
            )
        yield line


# Text common to all human-readable formats


def summary_of(rows: Sequence[CellResult]) -> str:
    counts = Counter(row.status for row in rows)
    words = ", ".join(f"{counts[status]} {status.value.replace('_', ' ')}" for status in CellStatus if counts[status])
    return f"{count(len(rows), 'cell')}: {words}" if rows else "no cells"


class FailedCells(NamedTuple):
    """A failure, its cells, and details: reason, log, fix."""

    what: str
    cells: list[CellId]
    details: list[str]


def failures_of(
    rows: Sequence[CellResult], workspace: Path | None = None, reported: Collection[str] = ()
) -> list[FailedCells]:
    """All failures. A failed shared stage is one failure. Reasons already in `reported` are omitted."""
    groups: dict[tuple[object, ...], list[CellResult]] = {}
    for row in rows:
        if row.reason is not None or row.failed_stage is not None:
            why = None if row.reason in reported else (row.reason, row.log, row.line)
            groups.setdefault((row.status, row.failed_stage, row.failure, why), []).append(row)
    failures = []
    for struck in groups.values():
        row = struck[0]
        what = f"{row.failed_stage} failed" if row.failed_stage else row.status.value
        details = [row.reason or "no reason given"]
        if row.log is not None:
            place = "" if row.line is None else f":{row.line}"
            details.append(f"log: {row.log if workspace is None else path_from_here(workspace / row.log)}{place}")
        details += [] if row.hint is None else [f"try: {row.hint}"]
        details += [] if row.setting is None else [f"set: {row.setting}"]
        cells = [row.id for row in struck]
        failures.append(
            FailedCells(f"{what}{in_brackets(row.failure)}", cells, [] if row.reason in reported else details)
        )
    return failures


def notes_of(rows: Sequence[CellResult]) -> list[tuple[str, int]]:
    """Notes on measurements with numbers of cells, most frequent first. Equal texts with other numbers are one note."""
    first: dict[str, str] = {}
    cells: Counter[str] = Counter()
    for row in rows:
        findings = [*row.changes, *row.warnings]
        if any(level.window == "whole" for level in row.levels):
            findings.append("the steady window was too short: rates include ramp-up and drain")
        other = (row.trtllm_bench or {}).get("not_the_same")
        if isinstance(other, list) and other:
            findings.append(f"trtllm-bench used a different load than the server: {', '.join(map(str, other))}")
        if not findings:
            continue
        kinds = [re.sub(r"[0-9.]+", "0", text) for text in findings]
        cells.update(dict.fromkeys(kinds, 1))
        for kind, text in zip(kinds, findings, strict=True):
            if first.setdefault(kind, text) not in {text, text + _SIMILAR}:
                first[kind] = first[kind].removesuffix(_SIMILAR) + _SIMILAR
    return [*mixed(rows), *((first[kind], number) for kind, number in cells.most_common())]


def losses_of(rows: Sequence[CellResult]) -> list[tuple[str, str]]:
    """The change of each score from the unquantized cell, for each precision that of the cell with the largest loss."""
    worst: dict[str, dict[str, ScoreDrift]] = {}
    for row in rows:
        for name, of in ({} if row.accuracy_drift is None else row.accuracy_drift.scores).items():
            known = worst.setdefault(name, {})
            precision = str(row.axes.get("precision"))
            if precision not in known or of.difference < known[precision].difference:
                known[precision] = of
    return [
        (f"{name} against the unquantized cell", "; ".join(f"{each} {of.verdict}" for each, of in known.items()))
        for name, known in worst.items()
    ]


def mixed(rows: Sequence[CellResult]) -> list[tuple[str, int]]:
    """Precisions whose meaning differs between cells, with their numbers of cells."""
    cells: dict[str, Counter[str]] = {}
    for row in rows:
        if row.numerics is not None and row.unfit is None:
            cells.setdefault(str(row.axes.get("precision")), Counter())[_numerics(row.numerics)] += 1
    return [
        (f"{name} is not the same in all cells: {'; or '.join(meanings)}", meanings.total())
        for name, meanings in cells.items()
        if len(meanings) > 1
    ]


def _numerics(of: Mapping[str, str]) -> str:
    return f"weights {of['weights']}, activations {of['activations']}, KV cache {of['kv_cache']}, {of['made']}"


def numerics_of(rows: Sequence[CellResult]) -> list[tuple[str, str]]:
    known = {
        (str(row.axes.get("precision")), _numerics(row.numerics)): None for row in rows if row.numerics is not None
    }
    return [(f"precision {name}", text) for name, text in known]


_CONDITIONS: Final = (("system", conditions.system_words), ("load", conditions.workload_words))
CONDITIONS_IN_FULL: Final = (
    ("machine", conditions.machine_words),
    ("versions", conditions.version_words),
    ("workload", conditions.workload_words),
)
"""Label -> text, for `conditions_of`."""


def conditions_of(
    rows: Sequence[CellResult], parts: Sequence[tuple[str, Callable[[Conditions], str]]] = _CONDITIONS
) -> list[tuple[str, str]]:
    """Time, system and load of the measurements. Conditions that only some cells share are separate entries."""
    measured = [row for row in rows if row.levels]
    if not measured:
        return []
    times = sorted({text for row in measured if (text := moment(row.conditions.measured_s))})
    recorded = [("measured", times[0] if len(times) == 1 else f"{times[0]} to {times[-1]}")] if times else []
    for name, words in parts:
        counts = Counter(words(row.conditions) for row in measured)
        recorded += [
            (name if len(counts) == 1 else f"{name} of {count(cells, 'cell')}", text)
            for text, cells in counts.most_common()
        ]
    recorded += [("lengths and levels", text) for text in loads_of(rows)]
    recorded += [("side by side", line) for line in interference(rows)]
    lengths = lengths_of([level for row in measured for level in row.levels])
    return [*recorded, ("tokens per request", lengths)] if lengths else recorded


def loads_of(rows: Sequence[CellResult]) -> list[str]:
    """The measured loads in words, most frequent first, each with its number of cells if there are several. Cells whose
    levels differ only in the number of requests have one load.
    """
    alike: dict[_Load, list[CellResult]] = {}
    for row in rows:
        if row.levels:
            alike.setdefault(_load(row), []).append(row)
    loads = sorted(alike, key=lambda load: -len(alike[load]))
    return [
        _load_words(load, alike[load]) + ("" if len(loads) == 1 else f" ({count(len(alike[load]), 'cell')})")
        for load in loads
    ]


def main_load(rows: Sequence[CellResult]) -> str:
    """The most frequent load, and the number of others. Empty without measurements."""
    loads = loads_of(rows)
    more = f", and {count(len(loads) - 1, 'other load')}" if len(loads) > 1 else ""
    return f"{loads[0]}{more}" if loads else ""


def load_of(row: CellResult) -> str:
    """The load that a cell was measured with: `64 in, 16 out, 1/4 in flight, 6 to 15 requests`. Lengths are those of
    its prompts and outputs, means if they differ.
    """
    return _load_words(_load(row), [row])


_Load = tuple[str, tuple[int, ...], tuple[float, ...]]
"""Lengths in words, concurrencies and request rates."""


def _load(row: CellResult) -> _Load:
    workload = row.conditions.workload or {}
    sampling, limits = workload.get("sampling"), workload.get("max_tokens")
    exact = isinstance(sampling, dict) and bool(sampling.get("exact_length"))
    means = [_mean_length(row.levels, name) for name in result.LENGTHS]
    lengths = ", ".join(f"{mean} {way}" for mean, way in zip(means, ("in", "out"), strict=True) if mean)
    if lengths and not (workload.get("synthetic") and exact):
        lengths += " on average"
    if lengths and workload.get("synthetic") and not exact and isinstance(limits, list) and limits:
        lengths += f" (output up to {limits[-1]})"
    concurrency = (level.concurrency for level in row.levels if level.concurrency is not None)
    rates = (level.request_rate for level in row.levels if level.request_rate is not None)
    return lengths, tuple(concurrency), tuple(rates)


def _load_words(load: _Load, rows: Sequence[CellResult]) -> str:
    lengths, concurrency, rates = load
    requests = [level.requests for row in rows for level in row.levels if level.requests is not None]
    return ", ".join(filter(None, (lengths, levels_words(concurrency, rates, requests))))


def _mean_length(levels: Sequence[LevelResult], name: str) -> str | None:
    means = [value for level in levels if (value := level.lengths.get(name, {}).get("mean")) is not None]
    return f"{fmean(means):.0f}" if means else None


def lengths_of(levels: Sequence[LevelResult]) -> str:
    """Lengths of prompts and outputs at these levels: "input mean 61.2, at most 80; output mean 16, at most 16"."""
    return "; ".join(
        f"{name.partition('_')[0]} mean {_range(means)}, at most {max(most):g}"
        for name in result.LENGTHS
        if (means := [value for level in levels if (value := level.lengths.get(name, {}).get("mean")) is not None])
        and (most := [value for level in levels if (value := level.lengths.get(name, {}).get("max")) is not None])
    )


def _range(values: Sequence[float]) -> str:
    low, high = (f"{value:.4g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def moment(seconds: float | None) -> str | None:
    """A Unix time as text, in UTC."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def definitions_of(shown: Sequence[Column]) -> list[tuple[str, str]]:
    """(headers, formula) of the columns shown. Columns with equal formulas are one entry."""
    heads: dict[str, list[str]] = {}
    for column in shown:
        if column.formula is not None:
            median = "; the median (p50) is shown" if column.is_latency else ""
            heads.setdefault(column.formula + median, []).append(column.head)
    return [(", ".join(names), formula) for formula, names in heads.items()]


# Printing


def write_table(report: Report) -> None:
    """Write the table of `pipeline report` and `pipeline run`, in color on a terminal."""
    width = _width_of(report.stream)
    _print(to_table(report, width), report.stream, width)


def write_json(report: Report) -> None:
    lines = report_file.report_json(
        report.rows, report.run_id, report.matrix, finished=report.finished, forecast=report.forecast
    )
    report.stream.writelines(f"{line}\n" for line in lines)


def write_csv(report: Report) -> None:
    report.stream.write(terminal.clean(to_csv(report.rows)))


def write_markdown(report: Report) -> None:
    report.stream.write(terminal.clean(to_markdown(report)))


def _print(shown: Group, stream: TextIO, width: int) -> None:
    console = terminal.console(stream, width=width)
    with console.capture() as capture:
        console.print(shown)
    terminal.raw(stream).write("".join(f"{line.rstrip(' ')}\n" for line in capture.get().splitlines()))


def _width_of(stream: TextIO) -> int:
    if stream.isatty():
        return shutil.get_terminal_size((_PIPED_WIDTH, 0)).columns
    columns_set = os.environ.get("COLUMNS", "")
    return int(columns_set) if columns_set.isdigit() and int(columns_set) > 0 else _PIPED_WIDTH
