"""A run as one HTML page that needs no network: recommended configurations, all results, and their provenance.

The page consists of `assets/page.html` (tables, readable without scripts), `page.css`, `page.js` (sorting, filtering,
plots) and two compressed blocks: the run's data, and Vega with Vega-Lite for the plots. Vega comes from
vl-convert-python, the Vega project's own package. Without it the page has tables but no plots.

A content security policy lists the hashes of the page's scripts and styles, so content of logs or cell names cannot
run. Text is only ever inserted as text.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import shlex
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline import __version__
from trtllm_pipeline.base import CellId, Json, Scope, count, duration, fingerprint, shared_parts, terminal, text_blocks
from trtllm_pipeline.measure import Drift, LevelResult, conditions, result, stats
from trtllm_pipeline.orchestrate import CellResult, CellStatus, ForecastCheck, report_file
from trtllm_pipeline.show.phrases import without
from trtllm_pipeline.show.report import time_series, writers
from trtllm_pipeline.show.report.columns import HIGHEST, LOWEST, Column, columns, level_keys
from trtllm_pipeline.show.report.comparable_loads import label_of, shortened, words, workloads
from trtllm_pipeline.show.report.compare_writers import of_page
from trtllm_pipeline.show.report.recommendation import pareto_front
from trtllm_pipeline.show.report.record import Ending, Record, StageRecord
from trtllm_pipeline.show.report.report_formats import Report

LIMITED: Final = ("ttft_ms", "tpot_ms", "e2e_ms")
"""Latencies that the page has limits for."""
_ASSETS: Final = Path(__file__).parent / "assets"
_STATISTICS: Final = ("mean", "p50", "p90", "p95", "p99", "n")
_SERIES: Final = 50
"""Maximum number of cells for which the page has the samples over time of each level."""
_LOGS_BYTES: Final = 1_000_000
"""Maximum total length of all log ends before compression. Beyond it, only failures include their logs."""
_LOADS: Final = 3
"""Maximum number of different loads among the facts of the run. All are among the conditions."""
_SYMBOLS: Final = {
    CellStatus.DONE: "✓",
    CellStatus.UP_TO_DATE: "=",
    CellStatus.FAILED: "✗",
    CellStatus.INFEASIBLE: "-",
    CellStatus.INTERRUPTED: "!",
    CellStatus.RUNNING: "▶",
    CellStatus.NOT_RUN: "·",
}
_COUNTED: Final = {
    Ending.MADE: "executed",
    Ending.SERVED: "executed",
    Ending.UP_TO_DATE: "up_to_date",
    Ending.FAILED: "failed",
}
"""Columns of the table of stages."""


def write(report: Report) -> None:
    report.stream.write(terminal.clean(to_html(report)))


def to_html(report: Report, *, plots: bool = True) -> str:
    """The page. `plots=False` leaves out plots. With a workspace, it includes the launch command of each cell."""
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    rows, record, comparison, matrix = report.rows, report.record(), report.previous(), Path(report.matrix).name
    library = vega() if plots else ""
    style, script = ((_ASSETS / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    parts = shared_parts([row.id for row in rows])
    data = json.dumps(_data(report, record, parts), ensure_ascii=False, separators=(",", ":"))
    jinja = Environment(
        loader=FileSystemLoader(_ASSETS),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return jinja.get_template(
        "page.html"
    ).render(
        policy=_policy([script, *filter(None, [library])], style),
        style=Markup(style),  # noqa: S704 - a file of this package
        script=Markup(script),  # noqa: S704 - a file of this package
        data=_packed(data),
        library=library and _packed(library),
        run=record,
        matrix=matrix,
        finished=report.finished,
        summary=writers.summary_of(rows),
        shared=parts,
        short=lambda cell: without(cell, parts),
        head=[*_facts(record, report.forecast), *(("load", text) for text in writers.loads_of(rows)[:_LOADS])],
        title=_some([str(row.axes.get("model")) for row in rows]) or matrix or "Pipeline report",
        facts=_opening(rows, matrix),
        levels=_levels(rows),
        level=report.level,
        columns=_every_column(rows, report.level),
        rows=rows,
        symbols=_SYMBOLS,
        failures=writers.failures_of(rows),
        conditions=writers.conditions_of(rows, writers.CONDITIONS_IN_FULL),
        compared=None if comparison is None else Markup(text_blocks.as_html(of_page(comparison))),  # noqa: S704 - escaped there
        notes=[(text, count(cells, "cell")) for text, cells in writers.notes_of(rows)],
        stages=_stage_summary(record),
        environment=_environment(record),
        metrics=_occurring(rows, record),
        version=__version__,
        written=writers.moment(time.time()),
    )


@lru_cache(maxsize=1)
def vega() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script that sets `vegaEmbed`. Empty if vl-convert-python is not installed."""
    try:
        import vl_convert
    except ImportError:
        return ""
    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return bundle


# Packing


def _packed(text: str) -> str:
    """Text for a block that the page unpacks: gzip, base64."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _policy(scripts: Sequence[str], style: str) -> str:
    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {' '.join(map(digest, scripts))}; style-src {digest(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


# The run's data for the page's script


def _data(report: Report, record: Record, parts: Sequence[str]) -> dict[str, Any]:
    rows = report.rows
    of_cell: dict[CellId, list[int]] = {row.id: [] for row in rows}
    for place, stage in enumerate(record.stages):
        for cell in stage.cells:
            of_cell.setdefault(cell, []).append(place)
    stages = {cell: [record.stages[place] for place in places] for cell, places in of_cell.items()}
    full = workloads(rows)
    workload_of_row = shortened(full)
    fronts = {
        point
        for one in set(full)
        for point in pareto_front(row for row, load in zip(rows, full, strict=True) if load == one)
    }
    under = {json.dumps(each): each for each in (_under(row) for row in rows)}
    places = {text: place for place, text in enumerate(under)}
    brief = sum(len(stage.log) + len(stage.server_log) for stage in record.stages) <= _LOGS_BYTES
    return {
        "limits": report.limits,
        "cells": [
            {
                **{name: getattr(row, name) for name in _CELL},
                "name": without(row.id, parts),
                "status": row.status.value.replace("_", " "),
                "gpus": max((stage.resources["gpus"] for stage in stages[row.id]), default=0),
                "levels": _levels_of(row, stages[row.id], fronts, series=len(rows) <= _SERIES),
                "highest_rate": None if row.highest_rate is None else str(row.highest_rate),
                **({} if row.highest_concurrency is None else {"highest_concurrency": str(row.highest_concurrency)}),
                "asked": fingerprint(json.dumps(row.conditions.questions, sort_keys=True))[:12],
                "accuracy_drift": row.accuracy_drift and _drift(row.accuracy_drift),
                "measured": writers.moment(row.conditions.measured_s),
                "tokens": writers.lengths_of(row.levels),
                "load": writers.load_of(row) if row.levels else "",
                "workload": words(workload),
                "under": places[json.dumps(_under(row))],
                "launch": _launch(row, record, report.workspace),
                **_server(stages[row.id]),
            }
            for row, workload in zip(rows, workload_of_row, strict=True)
        ],
        "under": list(under.values()),
        "apart": list(dict.fromkeys(label_of(name) for workload in workload_of_row for name, _ in workload)),
        "runs": of_cell,
        "t": stats.T_QUANTILES,
        "one_machine": record.request.get("executor") is None,
        "stages": [_stage(stage, record, logs=brief or stage.ending is Ending.FAILED) for stage in record.stages],
    }


def _server(stages: Sequence[StageRecord]) -> dict[str, str]:
    """The server's own command. Omitted if it is unknown, so that 1000 cells take at most 1.5 MB."""
    known = (stage.server_command for stage in stages if stage.server_command)
    return {"server": command} if (command := next(known, None)) else {}


def _certain(level: LevelResult) -> dict[str, Any]:
    """The 95% intervals of what ranks a level, as far as they are known."""
    ends = {name: level.interval(metric) for name, metric in (("out", "output_tps"), ("ttft_ms", "ttft_p50"))}
    known = {name: [_short(end, 4) for end in each] for name, each in ends.items() if each and each[0] > 0}
    return {"ends": known} if known else {}


def _launch(row: CellResult, record: Record, workspace: Path | None) -> str | None:
    """The command line that serves a cell. None if the cell failed or cannot be served by this project."""
    served = any(stage.scope is Scope.SERVICE and row.id in stage.cells for stage in record.stages)
    if workspace is None or row.unfit is not None or not served:
        return None
    request = record.request
    words = ["pipeline", "stage", "launch", "--matrix", str(request.get("matrix"))]
    sets = request.get("sets")
    words += [word for value in (sets if isinstance(sets, list) else ()) for word in ("--set", str(value))]
    words += [] if request.get("toolchain") is None else ["--toolchain", str(request["toolchain"])]
    return shlex.join([*words, "--cells", row.id, "--workspace", str(workspace)])


_CELL: Final = (
    *("id", "axes", "reason", "unfit", "hint", "log", "accuracy", "accuracy_total", "accuracy_asked"),
    *("accuracy_intervals", "findings", "engine_size_bytes", "preparation_s", "gpu_hour", "numerics"),
)


def _drift(drift: Drift) -> dict[str, Any]:
    """Only the data that the page shows, so that 1000 cells take at most 1.6 MB."""
    changes = {
        name: {"difference": _short(of.difference), "interval": list(map(_short, of.interval))}
        for name, of in drift.scores.items()
    }
    return {"agreement": drift.agreement, "scores": changes}


def _under(row: CellResult) -> dict[str, str]:
    """System and load of a cell's measurement, as text by label."""
    known = [(field, row.conditions.value(field)) for field in conditions.FIELDS if row.levels]
    return {field.label: field.shown(value) for field, value in known if value is not None}


def _levels_of(
    row: CellResult, stages: Sequence[StageRecord], fronts: Collection[tuple[str, str]], *, series: bool
) -> list[dict[str, Any]]:
    """The levels of a cell, marked if they are on the Pareto front. With `series`, also the samples over their time."""
    folders = [stage.folder for stage in stages if stage.stage == "perf" and stage.folder is not None]
    known = time_series.of_measurement(folders[0] / "out") if series and folders and row.levels else {}
    return [
        {
            **_level(level),
            **_certain(level),
            **({"front": 1} if (row.id, level.key) in fronts else {}),
            **({"series": known[level.key]} if known.get(level.key) else {}),
        }
        for level in row.levels
    ]


def _statistics(values: Mapping[str, float | None]) -> dict[str, Any]:
    known = {key: _short(values[key]) for key in _STATISTICS if values.get(key) is not None}
    return known if "p99" in known else {**known, "max": _short(values.get("max"))}


def _level(level: LevelResult) -> dict[str, Any]:
    goodput, due = level.goodput, {name: _statistics(values) for name, values in level.from_schedule.items()}
    return {
        **({"concurrency": level.concurrency} if level.request_rate is None else {"rate": level.request_rate}),
        "requests": level.requests,
        "failures": level.failures,
        "out": _short(level.output_tokens_per_s),
        "in": _short(level.input_tokens_per_s),
        "req": _short(level.requests_per_s),
        "window": level.window,
        "repeats": [_short(rate) for one in level.repeats if (rate := one.output_tokens_per_s) is not None],
        **{name: _statistics(values) for name, values in level.latencies.items()},
        # Omitted if empty, so that 1000 cells take at most 1.6 MB. The page adds what follows from the others.
        **({} if goodput is None else {"goodput": goodput.share, "good_out": _short(goodput.output_tokens_per_s)}),
        **({"due": due} if due else {}),
        **({} if level.gpu_use is None else {"gpu": asdict(level.gpu_use), "joule": _short(level.tokens_per_joule)}),
        **({} if level.triton_use is None else {"triton": _triton(level.triton_use)}),
    }


def _triton(use: result.TritonUse) -> dict[str, Any]:
    """Only the data that the page shows, with as many digits as it shows."""
    models = {
        name: [of.get("requests"), *(_short(of.get(time), 3) for time in _TIMES)] for name, of in use.models.items()
    }
    gauges = {name: _short(value, 3) for name in result.TRITON_GAUGES if (value := getattr(use, name)) is not None}
    return {"models": models, **gauges}


_TIMES: Final = ("request_ms", "queue_ms", "compute_input_ms", "compute_infer_ms", "compute_output_ms")


def _short(value: float | None, digits: int = 6) -> float | None:
    """Six significant digits, so that rounding to the page's three digits stays exact. Whole numbers stay short."""
    if value is None:
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() else short


def _stage(stage: StageRecord, record: Record, *, logs: bool) -> dict[str, Any]:
    start = record.started_s or 0.0
    return {
        **{name: getattr(stage, name) for name in _STAGE},
        "ending": stage.ending.value.replace("_", " "),
        "attempts": [
            (round(each.started_s - start, 3), round(each.ended_s - start, 3), each.outcome) for each in stage.attempts
        ],
        "commands": [shlex.join(command) for command in stage.commands],
        "folder": stage.folder and str(stage.folder),
        "log": stage.log if logs else None,
        "server_log": stage.server_log if logs else None,
    }


_STAGE: Final = (
    *("id", "stage", "name", "made_s", "planned", "message", "hint", "resources", "exclusive", "gpus", "provenance"),
    *("key", "fingerprint", "files", "size_bytes"),
)

# Content of the page itself


def _some(names: Sequence[str]) -> str:
    found = list(dict.fromkeys(filter(None, names)))
    return ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")


def _opening(rows: Sequence[CellResult], matrix: str) -> list[tuple[str, str]]:
    """Hardware, engine, load and date of the measurements. Details are folded further down."""
    measured = [row for row in rows if row.levels]
    gpus = [conditions.machine_words(row.conditions).split("; ") for row in measured]
    hardware = _some([parts[-1] for parts in gpus])
    software = [field for field in conditions.FIELDS if field.name in _ENGINES]
    known = [(field, row.conditions.value(field)) for row in measured for field in software]
    toolchains = [str(row.axes.get("toolchain") or "") for row in rows]
    engine = _some([*toolchains, *(_named(field, value) for field, value in known if value is not None)])
    times = [row.conditions.measured_s for row in measured if row.conditions.measured_s is not None]
    date = str(writers.moment(max(times)))[:10] if times else ""
    facts = {"on": hardware, "engine": engine, "load": writers.main_load(rows), "measured": date, "matrix": matrix}
    return [(name, value) for name, value in facts.items() if value]


_ENGINES: Final = ("server", "tensorrt_llm", "xllamacpp")
"""Conditions that name the software that served."""


def _named(field: conditions.Field, value: Json) -> str:
    """A version with its name. The server's value has its own."""
    return field.shown(value) if field.name == "server" else f"{field.label} {field.shown(value)}"


def _levels(rows: Sequence[CellResult]) -> list[tuple[str, str]]:
    keys = level_keys(rows)
    if len(keys) < 2:
        return [(HIGHEST, result.load_words(keys[0]))] if keys else []
    return [
        (HIGHEST, "highest of each cell"),
        *((key, result.load_words(key)) for key in keys),
        (LOWEST, "lowest of each cell"),
    ]


def _every_column(rows: Sequence[CellResult], level: str) -> list[Column]:
    """Columns at one level, including those that only have a value at another level."""
    others = (column for key in level_keys(rows) for column in columns(rows, key))
    of_level = {column.of_level: column for column in others if column.of_level is not None}
    shown = list(columns(rows, level))
    missing = of_level.keys() - {column.of_level for column in shown}
    at = max((place for place, column in enumerate(shown) if column.of_level is not None), default=0) + 1
    return [*shown[:at], *(of_level[path] for path in of_level if path in missing), *shown[at:]] if missing else shown


def _occurring(rows: Sequence[CellResult], record: Record) -> list[result.MetricDefinition]:
    """The metrics on the page, and the terms of their formulas."""
    levels = [level for row in rows for level in row.levels]
    windows = {level.window for level in levels}
    known = {name for level in levels for name, values in level.latencies.items() if values}
    known |= {column.metric for column in columns(rows) if column.metric is not None}
    known |= {"interval"} if any(row.accuracy_intervals for row in rows) else set()
    terms = {
        **dict.fromkeys(("n", "input_tokens", "headline", "waves", "percentiles"), bool(levels)),
        "steady": "steady" in windows,
        "whole": bool(windows - {"steady", None}),
        "normalisation": any(row.accuracy for row in rows),
        "engine_size_bytes": any(row.engine_size_bytes is not None for row in rows),
        "seconds": any(stage.made_s is not None for stage in record.stages),
    }
    known |= {name for name, occurs in terms.items() if occurs}

    def measured(name: str) -> bool:
        return any(getattr(level, name, None) is not None for level in levels)

    return [
        metric for metric in report_file.METRICS if metric.formula and (metric.name in known or measured(metric.name))
    ]


def _facts(record: Record, forecast: ForecastCheck | None) -> list[tuple[str, str]]:
    facts = []
    if record.started_s is not None:
        facts.append(("started", str(writers.moment(record.started_s))))
    if record.seconds is not None:
        facts.append(("duration", duration(record.seconds)))
    endings = Counter(stage.ending for stage in record.stages)
    words = {Ending.MADE: "executed", Ending.UP_TO_DATE: "up to date", Ending.FAILED: "failed"}
    outcomes = ", ".join(f"{endings[ending]} {word}" for ending, word in words.items() if endings[ending])
    if outcomes:
        facts.append(("stage runs", outcomes))
    if forecast is not None:
        facts.append(("time", forecast.line()))
    return facts


def _stage_summary(record: Record) -> list[dict[str, Any]]:
    """Per stage: numbers executed, up to date and failed, and the seconds spent and saved."""
    lines = []
    for name in dict.fromkeys(stage.stage for stage in record.stages):
        stages = [stage for stage in record.stages if stage.stage == name]
        saved = sum(stage.made_s or 0.0 for stage in stages if stage.ending is Ending.UP_TO_DATE)
        line = {"stage": name, **Counter(_COUNTED.get(stage.ending, "not_run") for stage in stages)}
        spent = duration(sum(stage.seconds for stage in stages))
        lines.append({**line, "spent": spent, "saved": duration(saved) if saved else ""})
    return lines


def _environment(record: Record) -> list[tuple[str, str]]:
    """Environment: request, versions that results depend on, GPUs, memory."""
    about = record.about
    facts = [("run", record.id)]
    if about is not None:
        facts.append(("command", shlex.join(about.command)))
        if about.ended_s is not None:
            facts.append(("ended", f"{writers.moment(about.ended_s)}, exit code {about.exit_code}"))
    facts += [
        (name.replace("_", " "), ", ".join(map(str, value)) if isinstance(value, list) else str(value))
        for name, value in record.request.items()
        if value not in (None, [], "", False)
    ]
    known: dict[str, list[str]] = {}
    for stage in record.stages:
        identity = stage.key.get("identity")
        for name, value in identity.items() if isinstance(identity, dict) else ():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            if text not in known.setdefault(name, []):
                known[name].append(text)
    facts += [(name, "; ".join(values)) for name, values in known.items()]
    gpus = sorted({gpu for stage in record.stages for gpu in stage.gpus})
    if gpus:
        facts.append(("GPUs", ", ".join(gpus)))
    memory = [value for stage in record.stages if isinstance(value := stage.provenance.get("peak_bytes"), int)]
    if memory:
        facts.append(("peak memory of a stage", f"{max(memory) / 1e9:.2f} GB"))
    return facts
