"""Loads cells with their metrics for a comparison, from a run, a report file, or a load run on any server.

    latest, latest~1, 20261121-03     runs of the workspace
    report.json                       any report, also of another workspace
    perf.json, events.jsonl, a directory with them    a load run, one cell without axes

Several, separated by commas, are repeats of the same measurement.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from trtllm_pipeline.base import CellId, ComparisonError, StageError, UsageError, read_object, user_files
from trtllm_pipeline.measure import (
    EVENTS_FILE,
    PERF_FILE,
    Conditions,
    LevelResult,
    LoadResult,
    conditions,
    metric_names,
    result,
    stats,
)
from trtllm_pipeline.models import tokenizer_at
from trtllm_pipeline.orchestrate import CellResult, CellStatus, Outline, Store, report_file
from trtllm_pipeline.orchestrate import runs as run_folders


@dataclass(frozen=True, slots=True)
class RequestSample:
    """One measured request with a response."""

    prompt: str
    text: str
    ttft_ms: float
    e2e_ms: float
    tpot_ms: float | None
    output_tokens: int


@dataclass(frozen=True)
class Measured(CellResult):
    """The results of a cell with their source files, as far as these still exist."""

    why: str = "not measured"
    """The reason why it has no levels, unless `unfit` has one."""
    perf: Path | None = None
    """Directory of the perf artifact. Cells with the same directory share one measurement."""
    events: tuple[Path, Path | None] | None = None
    """Event file, and the tokenizer that counts tokens if the server did not."""
    answers: Path | None = None

    @staticmethod
    def of(row: CellResult, **files: Any) -> Measured:
        return Measured(**{name: getattr(row, name) for name in CellResult.__dataclass_fields__}, **files)

    @property
    def feasible(self) -> bool:
        return self.status is not CellStatus.INFEASIBLE

    def level(self, key: str) -> LevelResult | None:
        return next((level for level in self.levels if level.key == key), None)

    def samples(self, key: str) -> tuple[RequestSample, ...]:
        """The measured requests of a level, from the event file. Empty if the file cannot be read."""
        return () if self.events is None else _samples(*self.events).get(key, ())


@dataclass(frozen=True)
class Side:
    """One side of a comparison."""

    name: str
    cells: tuple[Measured, ...]
    left_out: tuple[str, ...] = ()
    """(repeats) Cells and levels that some repeats lack, in words."""


def load_measured(
    text: str, store: Store | None, *, tokenizer: Path | None = None, allow: Collection[str] = frozenset()
) -> Side:
    """Load the side that `text` names, see the module's docstring. Raises UsageError, StateError or StageError.

    Raises ComparisonError for repeats under different conditions, except for those in `allow`.
    """
    sides = [_load(part.strip(), store, tokenizer) for part in text.split(",")]
    return sides[0] if len(sides) == 1 else together(text, sides, allow)


def selected(side: Side, patterns: Sequence[str]) -> Side:
    """`side` with the cells that match `patterns`. A cell without axes stays. Raises UsageError if none is left."""
    from trtllm_pipeline.orchestrate import select

    if not patterns or not any(cell.axes for cell in side.cells):
        return side
    return replace(side, cells=tuple(select(side.cells, patterns)))


def _load(text: str, store: Store | None, tokenizer: Path | None) -> Side:
    path = Path(text)
    if os.path.isdir(path):
        path /= next(
            (name for name in (PERF_FILE, EVENTS_FILE, report_file.NAME) if (path / name).exists()), EVENTS_FILE
        )
    if os.path.lexists(path):
        return _file(path, tokenizer)
    if store is None:
        raise UsageError(
            f"{text!r} is not a file, and there is no workspace with runs",
            hint="create one with pipeline run FILE, or give --workspace DIR, a report.json or a perf.json",
        )
    folder = run_folders.find_run(store, text)
    finished, shape = (folder / report_file.NAME).is_file(), run_folders.read_run(folder)
    return with_files(
        folder.name,
        report_file.read_report(folder / report_file.NAME)[0] if finished else report_file.rows_of(shape, store),
        shape,
        store,
    )


def with_files(name: str, rows: Iterable[CellResult], shape: Outline, store: Store) -> Side:
    """The rows of a plan's cells with their source files, as far as the store has them."""
    return Side(name, _cells(rows, _artifacts(shape, store)))


def _artifacts(shape: Outline, store: Store) -> dict[str, dict[str, Path]]:
    """Cell -> stage -> directory of its files, if it still exists."""
    directories: dict[str, dict[str, Path]] = {}
    for cell in shape.cells:
        runs = [shape.stage_runs[run] for run in cell.stage_runs]
        folders = {run.stage: store.folder(run.stage, run.fingerprint) / "out" for run in runs}
        directories[cell.id] = {stage: path for stage, path in folders.items() if path.is_dir()}
    return directories


def _cells(rows: Iterable[CellResult], artifacts: Mapping[str, Mapping[str, Path]]) -> tuple[Measured, ...]:
    cells = []
    for row in rows:
        made = artifacts.get(row.id, {})
        perf, model = made.get("perf"), made.get("download")
        answers = report_file.scored_by(made)
        if perf is not None and row.levels:
            measured_s = Conditions.read(read_object(perf / PERF_FILE)).measured_s
            perf = perf if measured_s == row.conditions.measured_s else None  # else measured again since this row
        events = None if perf is None or model is None else (perf / EVENTS_FILE, model)
        cells.append(Measured.of(row, perf=perf, events=events, answers=answers))
    return tuple(cells)


def _file(path: Path, tokenizer: Path | None) -> Side:
    """A report, or the output of a load run."""
    if path.suffix == ".jsonl":
        return _perf_side(path, _analyzed(path, tokenizer), tokenizer)
    data = user_files.read_json(path)
    if isinstance(data, dict) and "cells" in data:
        rows, about = report_file.read_report(path)
        return Side(str(about.get("id") or path), _cells(rows, {}))
    if isinstance(data, dict) and "levels" in data:
        return _perf_side(path, _checked(path, data), tokenizer)
    raise UsageError(
        f"{path} is neither a report nor the result of a load run",
        hint="`pipeline bench load` and the perf stage write perf.json",
    )


def _analyzed(path: Path, tokenizer: Path | None) -> LoadResult:
    from trtllm_pipeline.measure import analyze

    beside = path.with_name(PERF_FILE)
    if tokenizer is None and path.name == EVENTS_FILE and beside.is_file():
        return _checked(beside, user_files.read_mapping(beside))
    analyzed = analyze(path, None if tokenizer is None else tokenizer_at(tokenizer))
    if analyzed.tokens_counted_by == "events":
        raise UsageError(
            f"{path}: the server did not count its tokens", hint="give the model's tokenizer: --tokenizer PATH"
        )
    return analyzed


def _checked(path: Path, data: Mapping[str, Any]) -> LoadResult:
    """The perf.json in `path`, after a check of its types. Raises MatrixError."""
    findings = data.get("findings", [])
    if not isinstance(data.get("levels"), list):
        user_files.fail(str(path), None, "levels: expected a list")
    if not isinstance(findings, list) or not all(isinstance(each, dict) for each in findings):
        user_files.fail(str(path), None, "findings: expected a list of objects")
    if not isinstance(data.get("token_count", {}), dict):
        user_files.fail(str(path), None, "token_count: expected an object")
    return LoadResult.read(data)


def _perf_side(path: Path, load_result: LoadResult, tokenizer: Path | None) -> Side:
    events = path if path.suffix == ".jsonl" else path.with_name(EVENTS_FILE)
    # If the tokenizer counted, the events alone would be another measurement.
    whole = tokenizer is not None or load_result.tokens_counted_by == "server"
    invalid = "; ".join(each.message for each in load_result.invalid)
    cell = Measured(
        CellId(str(path)),
        {},
        CellStatus.DONE if load_result.valid else CellStatus.FAILED,
        reason=None if load_result.valid else f"the measurement is not valid: {invalid}",
        levels=load_result.levels if load_result.valid else (),
        conditions=load_result.conditions,
        perf=path.absolute(),
        events=(events, tokenizer) if whole and events.is_file() else None,
    )
    return Side(str(path), (cell,))


def together(name: str, sides: Sequence[Side], allow: Collection[str]) -> Side:
    """The medians of repeated measurements. What a repeat lacks is left out and reported. Raises ComparisonError."""
    one_each = all(len(side.cells) == 1 for side in sides)
    by_id = [{"" if one_each else cell.id: cell for cell in side.cells} for side in sides]
    names = [side.name for side in sides]
    cells = []
    left_out: list[str] = []
    for id_ in dict.fromkeys(id_ for cells_of in by_id for id_ in cells_of):
        lacking = [side for side, cells_of in zip(names, by_id, strict=True) if id_ not in cells_of]
        if lacking:
            left_out.append(f"{id_}: not in {lacking[0]}")
        else:
            cells.append(_one([cells_of[id_] for cells_of in by_id], names, allow, left_out))
    return Side(name, tuple(cells), tuple(left_out))


def _one(same: Sequence[Measured], sides: Sequence[str], allow: Collection[str], left_out: list[str]) -> Measured:
    """One cell from its repeats in `sides`. Levels that a repeat lacks are added to `left_out`."""
    first = same[0]
    unfit = next((cell.unfit for cell in same if cell.unfit is not None), None)
    if unfit is not None:
        status = CellStatus.FAILED if first.unfit is None else first.status
        return replace(first, status=status, failed_stage=None, reason=unfit, levels=())
    keys = []
    for key in dict.fromkeys(level.key for cell in same for level in cell.levels):
        lacking = [side for side, cell in zip(sides, same, strict=True) if cell.level(key) is None]
        if lacking:
            left_out.append(f"{first.id} at {result.load_words(key)}: not in {lacking[0]}")
        else:
            keys.append(key)
    if not keys:
        why = next((cell.why for cell in same if not cell.levels), "the repeats have no level in common")
        return replace(first, why=why, levels=())
    shared = [(each.concurrency, each.request_rate, each.key) for each in first.levels if each.key in keys]
    for other, side in zip(same[1:], sides[1:], strict=True):
        apart = conditions.deciding(conditions.differences(other.conditions, first.conditions, shared), allow)
        if apart and (other.perf is None or other.perf != first.perf):
            raise ComparisonError(
                f"{side} is not a repeat of {sides[0]}: {apart[0]}",
                hint=f"give repeats of one measurement, or --allow {apart[0].field.about}",
            )
    levels = tuple(pooled([level for cell in same if (level := cell.level(key))]) for key in keys)
    return replace(first, levels=levels, perf=None, events=None)


def pooled(levels: Sequence[LevelResult]) -> LevelResult:
    """One level from several measurements of the same work, each with repeats."""
    latencies = {
        name: {
            key: median(values)
            for key in levels[0].latencies.get(name, {})
            if (values := [value for level in levels if (value := level.latency(name, key)) is not None])
        }
        for name in metric_names.LATENCIES
    }
    rates: dict[str, Any] = {}
    for name in (*metric_names.RATES.values(), "tokens_per_joule"):
        values = [getattr(level, name) for level in levels]
        rates[name] = None if None in values else median(values)
    alone = [(result.RepeatResult(**level.rates(), latencies=level.latencies),) for level in levels]
    repeats = [each for level, whole in zip(levels, alone, strict=True) for each in level.repeats or whole]
    counts: dict[str, Any] = {
        name: sum(getattr(level, name) or 0 for level in levels) for name in ("requests", "failures")
    }
    pooled = replace(levels[0], repeats=tuple(repeats), latencies=latencies, **rates, **counts)
    known = {name for name in levels[0].intervals if all(name in level.intervals for level in levels)}
    return replace(
        pooled, intervals={name: ends for name in known if (ends := _pooled_interval(name, pooled, levels)) is not None}
    )


def _pooled_interval(name: str, pooled: LevelResult, levels: Sequence[LevelResult]) -> stats.Interval | None:
    """The interval of the mean of independent measurements, and not narrower than half their range."""
    centre, values = pooled.value(name), [value for level in levels if (value := level.value(name)) is not None]
    if centre is None or len(values) < len(levels):
        return None
    halves = [(level.intervals[name][1] - level.intervals[name][0]) / 2 for level in levels]
    half = max(math.hypot(*halves) / len(levels), (max(values) - min(values)) / 2)
    return centre - half, centre + half


@cache
def _samples(events: Path, tokenizer: Path | None) -> dict[str, tuple[RequestSample, ...]]:
    """Level -> its measured requests. Each event file is read once."""
    from trtllm_pipeline.measure import read_run

    try:
        run = read_run(events, None if tokenizer is None else tokenizer_at(tokenizer))
    except (OSError, StageError, UsageError):
        return {}
    samples_by_level: dict[str, list[RequestSample]] = {}
    for each in run.requests:
        if each.measured and each.answered:
            key = result.load_key(each.record.get("concurrency"), each.record.get("request_rate"))
            times = (each.ttft_ms, each.e2e_ms, each.tpot_ms)
            sample = RequestSample(
                each.record["prompt"], run.records.prompts[each.record["prompt"]]["text"], *times, each.output_tokens
            )
            samples_by_level.setdefault(key, []).append(sample)
    return {key: tuple(samples) for key, samples in samples_by_level.items()}
