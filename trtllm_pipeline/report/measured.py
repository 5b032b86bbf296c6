"""Loading what is compared: cells with their figures, from a run, a report file, or a load run on any server.

    latest, latest~1, 20261121-03     runs of the workspace
    report.json                       any report, also of another workspace
    perf.json, events.jsonl, a folder with them    a load run; one cell without axes

Several separated by commas are repeats of the same thing.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Final

from trtllm_pipeline.bench.conditions import Conditions, deciding, differences
from trtllm_pipeline.bench.result import LATENCIES, RATES, LevelResult, LoadResult, RepeatResult, load_key, load_words
from trtllm_pipeline.bench.result import NAME as PERF
from trtllm_pipeline.domain import CellId, Json
from trtllm_pipeline.errors import ComparisonError, StageError, UsageError
from trtllm_pipeline.evaluate.drift import Drift
from trtllm_pipeline.files.model_files import tokenizer_at
from trtllm_pipeline.files.user_files import fail, read_json, read_mapping
from trtllm_pipeline.planning.runs import find_run, read_run
from trtllm_pipeline.report.rows import PREPARATION, CellResult, CellStatus, rows_of
from trtllm_pipeline.report.writers import NAME as REPORT
from trtllm_pipeline.report.writers import read_report
from trtllm_pipeline.store.store import Store

EVENTS: Final = "events.jsonl"


@dataclass(frozen=True, slots=True)
class RequestSample:
    """One measured request with an answer."""

    prompt: str
    text: str
    repeat: int
    ttft_ms: float
    e2e_ms: float
    tpot_ms: float | None
    output_tokens: int


@dataclass(frozen=True)
class MeasuredLevel:
    """One level of one cell. Names of figures: `ttft_p99`, `tpot_p50`, ... in ms, and RATES of `bench/result.py`."""

    level: LevelResult
    samples_of: tuple[Path, Path | None] | None = None
    """Event file, and the tokenizer that counts its tokens where the server did not."""

    @property
    def key(self) -> str:
        """The level, as people write it: `4` requests in flight, or `2.5/s`."""
        return self.level.key

    def value(self, name: str) -> float | None:
        """The figure of all repeats together, as reported."""
        return self.level.value(name)

    def repeats(self, name: str) -> list[float]:
        """The figure of each repeat; empty unless all have one."""
        values = [repeat.value(name) for repeat in self.level.repeats]
        return [value for value in values if value is not None] if None not in values else []

    @property
    def started_s(self) -> list[float]:
        """Unix time at which each repeat began; empty unless all say so."""
        times = [repeat.started_s for repeat in self.level.repeats]
        return [time for time in times if time is not None] if None not in times else []

    @cached_property
    def samples(self) -> tuple[RequestSample, ...]:
        """Its measured requests, from the event file; empty where that is gone or cannot be read."""
        if self.samples_of is None:
            return ()
        return _samples(*self.samples_of).get(self.key, ())


@dataclass(frozen=True)
class Measured:
    """One cell with everything that can be compared. Unknown values are None or empty."""

    id: CellId
    axes: Mapping[str, Json]
    why: str | None = None
    """Why it has no figures of latency and throughput."""
    feasible: bool = True
    unfit: str | None = None
    """Why it must not be recommended or called better, whatever its figures: a stage failed or is not finished."""
    levels: tuple[MeasuredLevel, ...] = ()
    accuracy: Mapping[str, float] = field(default_factory=dict)
    accuracy_intervals: Mapping[str, Sequence[float]] = field(default_factory=dict)
    accuracy_drift: Drift | None = None
    """As in report.json: what its answers were compared with then, and by how much the scores differed."""
    answers: Path | None = None
    """Folder with answers.jsonl."""
    preparation_s: float | None = None
    """Seconds of quantizing, converting and building."""
    build_s: float | None = None
    engine_bytes: int | None = None
    perf: Path | None = None
    """Folder of the perf artifact: two cells with the same one share one measurement."""
    conditions: Conditions = field(default_factory=Conditions)
    """On what system and under which load it was measured."""

    def level(self, key: str) -> MeasuredLevel | None:
        """The level `key`."""
        return next((level for level in self.levels if level.key == key), None)


@dataclass(frozen=True)
class Side:
    """One side of a comparison."""

    name: str
    cells: tuple[Measured, ...]
    left_out: tuple[str, ...] = ()
    """Of repeats: the cells and levels that not all of them have, in words."""


def load(
    text: str, store: Store | None, *, tokenizer: Path | None = None, allow: Collection[str] = frozenset()
) -> Side:
    """What `text` names, see the module's docstring. Raises UsageError, StateError or StageError.

    ComparisonError for repeats that were not measured under the same conditions, but for what `allow` names.
    """
    sides = [_load(part.strip(), store, tokenizer) for part in text.split(",")]
    return sides[0] if len(sides) == 1 else _together(text, sides, allow)


def selected(found: Side, patterns: Sequence[str]) -> Side:
    """`found` with the cells that `patterns` let through; what has no axes stays. Raises UsageError when none is left."""
    from trtllm_pipeline.config.expand import select

    if not patterns or not any(cell.axes for cell in found.cells):
        return found
    return replace(found, cells=tuple(select(found.cells, patterns)))


def _load(text: str, store: Store | None, tokenizer: Path | None) -> Side:
    path = Path(text)
    folder_given = os.path.isdir(path)  # noqa: PTH112  (Path.is_dir raises for a name that is too long)
    if folder_given and not (path / PERF).exists() and not (path / EVENTS).exists() and (path / REPORT).exists():
        path = path / REPORT
    elif folder_given:
        path = path / (PERF if (path / PERF).exists() else EVENTS)
    if os.path.lexists(path):
        return _file(path, tokenizer)
    if store is None:
        raise UsageError(
            f"{text!r} is neither a file nor, without a workspace, a run",
            hint="give a report.json, a perf.json, or --workspace DIR",
        )
    folder = find_run(store, text)
    finished = (folder / REPORT).is_file()
    rows = read_report(folder / REPORT)[0] if finished else rows_of(read_run(folder), store)
    return Side(folder.name, _cells(rows, _artifacts(folder, store)))


def _artifacts(folder: Path, store: Store) -> dict[str, dict[str, Path]]:
    """Cell -> stage -> folder of its files, as far as they are still there."""
    shape = read_run(folder)
    found: dict[str, dict[str, Path]] = {}
    for cell in shape.cells:
        runs = [shape.stage_runs[run] for run in cell.stage_runs]
        folders = {run.stage: store.folder(run.stage, run.fingerprint) / "out" for run in runs}
        found[cell.id] = {stage: path for stage, path in folders.items() if path.is_dir()}
    return found


def _cells(rows: Iterable[CellResult], artifacts: Mapping[str, Mapping[str, Path]]) -> tuple[Measured, ...]:
    cells = []
    for row in rows:
        made = artifacts.get(row.id, {})
        events, engine = made.get("perf"), made.get("build")
        source = None
        if events is not None and engine is not None:
            source = (events / EVENTS, engine / "tokenizer.json")
        preparation = [row.seconds[stage] for stage in PREPARATION if stage in row.seconds]
        cells.append(
            Measured(
                id=row.id,
                axes=row.axes,
                why=None if row.levels else row.unfit or "not measured",
                feasible=row.status is not CellStatus.INFEASIBLE,
                unfit=row.unfit,
                levels=tuple(MeasuredLevel(level, source) for level in row.levels),
                accuracy=row.accuracy,
                accuracy_intervals=row.accuracy_intervals,
                accuracy_drift=row.accuracy_drift,
                answers=made.get("accuracy") or made.get("score"),
                preparation_s=sum(preparation) if preparation else None,
                build_s=row.build_s,
                engine_bytes=row.engine_size_bytes,
                perf=events,
                conditions=row.conditions,
            )
        )
    return tuple(cells)


def _file(path: Path, tokenizer: Path | None) -> Side:
    """A report, or what a load run left."""
    if path.suffix == ".jsonl":
        return _perf_side(path, _analyzed(path, tokenizer), tokenizer)
    data = read_json(path)
    if isinstance(data, dict) and "cells" in data:
        rows, about = read_report(path)
        return Side(str(about.get("id") or path), _cells(rows, {}))
    if isinstance(data, dict) and "levels" in data:
        return _perf_side(path, _checked(path, data), tokenizer)
    raise UsageError(
        f"{path} is neither a report nor the result of a load run",
        hint="`pipeline bench load` and the perf stage write perf.json",
    )


def _analyzed(path: Path, tokenizer: Path | None) -> Mapping[str, Any]:
    from trtllm_pipeline.bench.metrics import analyze

    beside = path.with_name(PERF)
    if tokenizer is None and path.name == EVENTS and beside.is_file():
        return _checked(beside, read_mapping(beside))
    data = analyze(path, None if tokenizer is None else tokenizer_at(tokenizer))
    if data["token_count"]["source"] == "events":
        raise UsageError(
            f"{path}: the server did not count its tokens", hint="--tokenizer PATH of that model counts them"
        )
    return data


def _checked(path: Path, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The perf.json in `path`, if its parts are of the types they are read as. Raises MatrixError."""
    findings = data.get("findings", [])
    if not isinstance(data.get("levels"), list):
        fail(str(path), None, "levels: a list was expected")
    if not isinstance(findings, list) or not all(isinstance(each, dict) for each in findings):
        fail(str(path), None, "findings: a list of objects was expected")
    if not isinstance(data.get("token_count", {}), dict):
        fail(str(path), None, "token_count: an object was expected")
    return data


def _perf_side(path: Path, data: Mapping[str, Any], tokenizer: Path | None) -> Side:
    found = LoadResult.read(data)
    events = path if path.suffix == ".jsonl" else path.with_name(EVENTS)
    # Where the tokenizer counted, the events alone would be another measurement.
    whole = tokenizer is not None or found.tokens_counted_by == "server"
    source = (events, tokenizer) if whole and events.is_file() else None
    wrong = [each.message for each in found.findings if each.severity == "invalid"]
    levels = tuple(MeasuredLevel(level, source) for level in found.levels) if found.valid else ()
    why = None if found.valid else f"the measurement is not valid: {'; '.join(wrong)}"
    cell = Measured(CellId(str(path)), {}, why, unfit=why, levels=levels, perf=path.absolute())
    return Side(str(path), (replace(cell, conditions=found.conditions),))


def _together(name: str, sides: Sequence[Side], allow: Collection[str]) -> Side:
    """Several measurements of the same cells as one, each of them repeats; figures are the medians of theirs.

    A cell or level that one of them lacks is left out of the result with a word about it. Raises ComparisonError.
    """
    one_each = all(len(side.cells) == 1 for side in sides)
    by_id = [{"" if one_each else cell.id: cell for cell in side.cells} for side in sides]
    cells = []
    left_out = []
    for id_ in dict.fromkeys(id_ for cells_of in by_id for id_ in cells_of):
        lacking = [side.name for side, cells_of in zip(sides, by_id, strict=True) if id_ not in cells_of]
        if lacking:
            left_out.append(f"{id_}: not in {lacking[0]}")
            continue
        same = [cells_of[id_] for cells_of in by_id]
        first = same[0]
        unfit = next((cell.unfit for cell in same if cell.unfit is not None), None)
        if unfit is not None:
            cells.append(replace(first, why=unfit, unfit=unfit, levels=()))
            continue
        keys = []
        for key in dict.fromkeys(level.key for cell in same for level in cell.levels):
            lacking = [side.name for side, cell in zip(sides, same, strict=True) if cell.level(key) is None]
            if lacking:
                left_out.append(f"{first.id} at {load_words(key)}: not in {lacking[0]}")
            else:
                keys.append(key)
        if not keys:
            why = next((cell.why for cell in same if cell.why is not None), "the repeats have no level in common")
            cells.append(replace(first, why=why, levels=()))
            continue
        shared = [(each.level.concurrency, each.level.request_rate, each.key) for each in first.levels]
        shared = [each for each in shared if each[-1] in keys]
        for other, side in zip(same[1:], sides[1:], strict=True):
            apart = deciding(differences(other.conditions, first.conditions, shared), allow)
            if apart and (other.perf is None or other.perf != first.perf):
                raise ComparisonError(
                    f"{side.name} is not a repeat of {sides[0].name}: {apart[0]}",
                    hint=f"give repeats of one thing, or --allow {apart[0].field.about}",
                )
        levels = tuple(_pooled([level for cell in same if (level := cell.level(key))]) for key in keys)
        cells.append(replace(first, levels=levels, perf=None))
    return Side(name, tuple(cells), tuple(left_out))


def _pooled(levels: Sequence[MeasuredLevel]) -> MeasuredLevel:
    """One level from several measurements of it."""
    repeats = tuple(repeat for figures in levels for repeat in figures.level.repeats or (_as_repeat(figures.level),))
    first = levels[0].level
    latencies = {
        name: {
            key: median(values)
            for key in first.latencies.get(name, {})
            if (values := [value for each in levels if (value := each.level.latency(name, key)) is not None])
        }
        for name in LATENCIES
    }
    rates: dict[str, Any] = {}
    for name in RATES.values():
        values = [getattr(figures.level, name) for figures in levels]
        rates[name] = None if None in values else median(values)
    return MeasuredLevel(replace(first, repeats=repeats, latencies=latencies, **rates))


def _as_repeat(level: LevelResult) -> RepeatResult:
    return RepeatResult(**level.rates(), latencies=level.latencies)


_read_already: dict[tuple[Path, Path | None], dict[str, tuple[RequestSample, ...]]] = {}


def _samples(events: Path, tokenizer: Path | None) -> dict[str, tuple[RequestSample, ...]]:
    """Level -> its measured requests. An event file is read once."""
    if (events, tokenizer) not in _read_already:
        _read_already[events, tokenizer] = _read(events, tokenizer)
    return _read_already[events, tokenizer]


def _read(events: Path, tokenizer: Path | None) -> dict[str, tuple[RequestSample, ...]]:
    from trtllm_pipeline.bench.requests import read_run

    try:
        run = read_run(events, None if tokenizer is None else tokenizer_at(tokenizer))
    except (OSError, StageError, UsageError):
        return {}
    found: dict[str, list[RequestSample]] = {}
    for request in run.requests:
        if request.measured and request.answered:
            key = load_key(request.record.get("concurrency"), request.record.get("request_rate"))
            found.setdefault(key, []).append(
                RequestSample(
                    request.record["prompt"],
                    request.prompt,
                    request.record["repeat"],
                    request.ttft_ms,
                    request.e2e_ms,
                    request.tpot_ms,
                    request.output_tokens,
                )
            )
    return {key: tuple(samples) for key, samples in found.items()}
