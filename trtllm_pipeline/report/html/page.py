"""A run as one HTML page that needs no network: recommended configurations, all results, and their provenance.

The page is `assets/page.html` (tables, readable without scripts), `page.css`, `page.js` (sorting, filtering, plots) and
two compressed blocks: the run's data, and Vega with Vega-Lite, which draw the plots. Vega comes from vl-convert-python,
the Vega project's own package of it; without it the page has its tables and no plots.

A content security policy names the hashes of the page's own scripts and styles, so nothing else on it can run, whatever
a log or a cell's name says; text is only ever written as text.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline import __version__
from trtllm_pipeline.bench.conditions import FIELDS, Conditions
from trtllm_pipeline.bench.result import LevelResult, load_words
from trtllm_pipeline.domain import CellId, Json
from trtllm_pipeline.evaluate.drift import Drift
from trtllm_pipeline.fingerprint import fingerprint
from trtllm_pipeline.planning.names import count, duration, shared_parts, without
from trtllm_pipeline.report.columns import METRICS, Column, columns
from trtllm_pipeline.report.record import Ending, Record, StageRecord
from trtllm_pipeline.report.rows import CellResult, CellStatus
from trtllm_pipeline.report.workloads import label_of, words, workloads
from trtllm_pipeline.report.writers import (
    client_error_of,
    conditions_of,
    lengths_of,
    moment,
    notes_of,
    problems_of,
    summary_of,
)

NAME: Final = "report.html"
LIMITED: Final = ("ttft_ms", "tpot_ms", "e2e_ms")
"""Latencies that the page takes limits of."""
_ASSETS: Final = Path(__file__).parent / "assets"
_STATISTICS: Final = ("mean", "p50", "p90", "p95", "p99", "n")
_MAX_PROBLEMS: Final = 20
_LOGS_BYTES: Final = 1_000_000
"""Together the ends of all logs may be this long before compression; beyond it only failures keep theirs."""
_SYMBOLS: Final = {
    CellStatus.DONE: "✓",
    CellStatus.UP_TO_DATE: "=",
    CellStatus.FAILED: "✗",
    CellStatus.INFEASIBLE: "-",
    CellStatus.INTERRUPTED: "!",
    CellStatus.RUNNING: "▶",
    CellStatus.NOT_RUN: "·",
}


def to_html(
    rows: Sequence[CellResult],
    record: Record,
    matrix: str = "",
    *,
    finished: bool = True,
    limits: Mapping[str, float | str] | None = None,
    plots: bool = True,
) -> str:
    """The page. `limits` presets its form: "ttft_ms", "tpot_ms", "e2e_ms", "statistic". `plots=False` leaves plots out."""
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    library = vega() if plots else ""
    style, script = ((_ASSETS / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    parts = shared_parts([row.id for row in rows])
    shown = columns(rows)
    problems = list(problems_of(rows))
    environment = Environment(
        loader=FileSystemLoader(_ASSETS),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(
        "page.html"
    ).render(
        policy=_policy([script, *filter(None, [library])], style),
        style=Markup(style),  # noqa: S704 - a file of this package
        script=Markup(script),  # noqa: S704 - a file of this package
        data=_packed(json.dumps(_data(rows, record, parts, limits or {}), ensure_ascii=False, separators=(",", ":"))),
        library=_packed(library) if library else "",
        run=record,
        matrix=Path(matrix).name if matrix else "",
        finished=finished,
        summary=summary_of(rows),
        shared=parts,
        head=_facts(record),
        columns=[(column.head, column.formula, column.head == "status") for column in shown],
        table=[_line(row, shown, parts) for row in rows],
        problems=[
            (what, [(cell, without(cell, parts)) for cell in cells], details)
            for what, cells, details in problems[:_MAX_PROBLEMS]
        ],
        more_problems=max(0, len(problems) - _MAX_PROBLEMS),
        tested=client_error_of(rows),
        conditions=conditions_of(rows),
        notes=[(text, count(cells, "cell")) for text, cells in notes_of(rows)],
        stages=_stage_summary(record),
        environment=_environment(record),
        metrics=[metric for metric in METRICS if metric.formula],
        version=__version__,
        written=moment(datetime.now(timezone.utc).timestamp()),
    )


@lru_cache(maxsize=1)
def vega() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script that sets `vegaEmbed`; empty when vl-convert-python is not installed."""
    try:
        import vl_convert
    except ImportError:
        return ""
    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return bundle


# Packing


def _packed(text: str) -> str:
    """Text for a block that the page unpacks itself: gzip, base64."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _policy(scripts: Sequence[str], style: str) -> str:
    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {' '.join(map(digest, scripts))}; style-src {digest(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


# The run's data, as the page's script reads it


def _data(
    rows: Sequence[CellResult], record: Record, parts: Sequence[str], limits: Mapping[str, float | str]
) -> dict[str, Json]:
    of_cell: dict[CellId, list[int]] = {}
    for place, stage in enumerate(record.stages):
        for cell in stage.cells:
            of_cell.setdefault(cell, []).append(place)
    asked = workloads(rows)
    under = [_under(row.conditions) if row.levels else {} for row in rows]
    distinct = {json.dumps(each): each for each in under}
    places = {text: place for place, text in enumerate(distinct)}
    total = sum(len(stage.log) + len(stage.server_log) for stage in record.stages)
    return {
        "limits": dict(limits),
        "start": record.started_s,
        "cells": [
            {
                **_cell(row, [record.stages[n] for n in of_cell.get(row.id, ())], parts),
                "workload": words(workload),
                "under": places[json.dumps(conditions)],
            }
            for row, workload, conditions in zip(rows, asked, under, strict=True)
        ],
        "under": list(distinct.values()),
        "apart": list(dict.fromkeys(label_of(name) for workload in asked for name, _ in workload)),
        "runs": {row.id: list(of_cell.get(row.id, ())) for row in rows},
        "stages": [
            _stage(stage, record, logs=total <= _LOGS_BYTES or stage.ending is Ending.FAILED) for stage in record.stages
        ],
    }


def _cell(row: CellResult, stages: Sequence[StageRecord], parts: Sequence[str]) -> dict[str, Json]:
    return {
        "id": row.id,
        "name": without(row.id, parts),
        "axes": dict(row.axes),
        "status": row.status.value.replace("_", " "),
        "reason": row.reason,
        "unfit": row.unfit,
        "hint": row.hint,
        "failed": row.failed_stage,
        "log": row.log,
        "gpus": max((stage.resources["gpus"] for stage in stages), default=0),
        "levels": [_level(level) for level in row.levels],
        "accuracy": dict(row.accuracy),
        "questions": row.accuracy_total,
        "asked": fingerprint(json.dumps(row.conditions.questions, sort_keys=True))[:12],
        "intervals": {name: list(ends) for name, ends in row.accuracy_intervals.items()},
        "drift": None if row.accuracy_drift is None else _drift(row.accuracy_drift),
        "findings": list(row.findings),
        "measured": moment(row.conditions.measured_s),
        "tokens": lengths_of(row.levels),
    }


def _drift(drift: Drift) -> dict[str, Json]:
    """Agreement with the unquantized cell, and the difference of each score with its interval."""
    return {
        "agreement": drift.agreement,
        "scores": {
            name: {"difference": _short(of.difference), "interval": [_short(end) for end in of.interval]}
            for name, of in drift.scores.items()
        },
    }


def _under(conditions: Conditions) -> dict[str, Json]:
    """On what and under which load a cell was measured, by label, in words."""
    known = {field.label: (field, conditions.value(field)) for field in FIELDS}
    return {label: field.shown(value) for label, (field, value) in known.items() if value is not None}


def _level(level: LevelResult) -> dict[str, Json]:
    latencies: dict[str, Json] = {
        name: {key: _short(values[key]) for key in _STATISTICS if key in values}
        for name, values in level.latencies.items()
    }
    return {
        "concurrency": level.concurrency,
        "rate": level.request_rate,
        "key": level.key,
        "at": load_words(level.key),
        "goodput": None if level.goodput is None else level.goodput.share,
        "requests": level.requests,
        "failures": level.failures,
        "out": _short(level.output_tokens_per_s),
        "in": _short(level.input_tokens_per_s),
        "req": _short(level.requests_per_s),
        "window": level.window,
        "repeats": [_short(rate) for one in level.repeats if (rate := one.output_tokens_per_s) is not None],
        **latencies,
    }


def _short(value: float | None) -> float | None:
    """Six significant digits: rounded again to the page's three, the last one is still right. Whole numbers are brief."""
    if value is None:
        return None
    short = float(f"{value:.6g}")
    return int(short) if short.is_integer() else short


def _stage(stage: StageRecord, record: Record, *, logs: bool) -> dict[str, Json]:
    start = record.started_s or 0.0
    attempts: list[Json] = [
        [round(attempt.started_s - start, 3), round(attempt.ended_s - start, 3), attempt.outcome]
        for attempt in stage.attempts
    ]
    return {
        "id": stage.id,
        "stage": stage.stage,
        "name": stage.name,
        "ending": stage.ending.value.replace("_", " "),
        "attempts": attempts,
        "made_s": stage.made_s,
        "planned": stage.planned,
        "message": stage.message,
        "hint": stage.hint,
        "commands": [shlex.join(command) for command in stage.commands],
        "folder": None if stage.folder is None else str(stage.folder),
        "log": stage.log if logs else None,
        "server_log": stage.server_log if logs else None,
        "resources": dict(stage.resources),
        "gpus": list(stage.gpus),
        "provenance": dict(stage.provenance),
        "key": dict(stage.key),
        "fingerprint": stage.fingerprint,
        "files": stage.files,
        "size": stage.size_bytes,
    }


# What stands in the page itself


def _facts(record: Record) -> list[tuple[str, str]]:
    facts = []
    if record.started_s is not None:
        facts.append(("started", str(moment(record.started_s))))
    if record.seconds is not None:
        facts.append(("duration", duration(record.seconds)))
    endings = Counter(stage.ending for stage in record.stages)
    words = {Ending.MADE: "executed", Ending.UP_TO_DATE: "up to date", Ending.FAILED: "failed"}
    told = ", ".join(f"{endings[ending]} {word}" for ending, word in words.items() if endings[ending])
    if told:
        facts.append(("stage runs", told))
    return facts


def _line(row: CellResult, shown: Sequence[Column], parts: Sequence[str]) -> dict[str, Any]:
    warnings = [text for text in row.findings if not text.startswith("info:")]
    return {
        "id": row.id,
        "name": without(row.id, parts),
        "status": row.status.value,
        "symbol": _SYMBOLS[row.status],
        "values": [(column.value(row) or "", column.head == "status") for column in shown],
        "warnings": len(warnings),
    }


def _stage_summary(record: Record) -> list[dict[str, Any]]:
    """For each stage: how many were made, were up to date, failed; seconds spent here, and saved by what was there."""
    found: dict[str, dict[str, Any]] = {}
    for stage in record.stages:
        line = found.setdefault(stage.stage, {"stage": stage.stage, "counts": Counter(), "spent": 0.0, "saved": 0.0})
        line["counts"][stage.ending] += 1
        line["spent"] += stage.seconds
        if stage.ending is Ending.UP_TO_DATE:
            line["saved"] += stage.made_s or 0.0
    for line in found.values():
        counts = line["counts"]
        known = (Ending.MADE, Ending.SERVED, Ending.UP_TO_DATE, Ending.FAILED)
        line |= {
            "made": counts[Ending.MADE] + counts[Ending.SERVED],
            "up_to_date": counts[Ending.UP_TO_DATE],
            "failed": counts[Ending.FAILED],
            "other": sum(counts.values()) - sum(counts[ending] for ending in known),
            "spent": duration(line["spent"]),
            "saved": duration(line["saved"]) if line["saved"] else "",
        }
    return list(found.values())


def _environment(record: Record) -> list[tuple[str, str]]:
    """Where and with what: the request, the versions that results depend on, the GPUs, the memory."""
    about = record.about
    facts = [("run", record.id)]
    if about is not None:
        facts.append(("command", shlex.join(about.command)))
        if about.ended_s is not None:
            facts.append(("ended", f"{moment(about.ended_s)}, exit code {about.exit_code}"))
    facts += [(name, str(value)) for name, value in record.request.items() if value not in (None, [], "")]
    known: dict[str, list[str]] = {}
    for stage in record.stages:
        identity = stage.key.get("identity")
        for name, value in identity.items() if isinstance(identity, dict) else ():
            said = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            if said not in known.setdefault(name, []):
                known[name].append(said)
    facts += [(name, "; ".join(values)) for name, values in known.items()]
    gpus = sorted({gpu for stage in record.stages for gpu in stage.gpus})
    if gpus:
        facts.append(("GPUs", ", ".join(gpus)))
    memory = [value for stage in record.stages if isinstance(value := stage.provenance.get("max_rss_bytes"), int)]
    if memory:
        facts.append(("peak memory of a process", f"{max(memory) / 1e9:.2f} GB"))
    return facts
