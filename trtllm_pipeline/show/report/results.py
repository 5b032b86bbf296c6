"""The newest results of a matrix's cells, for all formats of `pipeline report`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from trtllm_pipeline.base import CellId, PipelineError, UsageError
from trtllm_pipeline.orchestrate import CellResult, Store, report_file
from trtllm_pipeline.orchestrate import runs as run_folders
from trtllm_pipeline.show.report.record import Ending, Record, StageRecord, read_record
from trtllm_pipeline.show.report.report_formats import Report

if TYPE_CHECKING:
    from trtllm_pipeline.show.report.comparison import Comparison


_EARLIER: Final = 20
"""Number of earlier runs that the page considers for a comparison."""


def read_results(store: Store, wanted: str | None = None) -> Report:
    """The results of the latest run's matrix, or of the run `wanted`. Raises UsageError, StateError."""
    runs = run_folders.newest_cells(store, wanted)
    saved: dict[CellId, CellResult] = {}
    forecast = None
    matrix = next((known.matrix for known in store.index.runs() if known.id == runs.newest.name), "")
    for folder in runs.folders:
        if (folder / report_file.NAME).is_file():
            rows, about = report_file.read_report(folder / report_file.NAME)
            saved |= {row.id: row for row in rows if runs.origins.get(row.id) == folder}
            if folder == runs.newest:
                matrix, forecast = str(about["matrix"]), about.get("forecast")
    if len(saved) < len(runs.outline.cells):
        saved = {row.id: saved.get(row.id, row) for row in report_file.rows_of(runs.outline, store)}
    rows = tuple(saved[cell.id] for cell in runs.outline.cells)
    return Report(
        rows=rows,
        run_id=runs.newest.name,
        matrix=matrix,
        finished=(runs.newest / report_file.NAME).is_file(),
        workspace=store.workspace,
        forecast=forecast,
        record=partial(_record, runs, store),
        previous=partial(_compared_with_previous, rows, runs, store),
    )


def check_level(rows: Sequence[CellResult], level: str) -> str:
    """`level`, checked to be one of a table. Raises UsageError."""
    from trtllm_pipeline.show.report.columns import HIGHEST, LOWEST, level_keys

    known = (*level_keys(rows), LOWEST, HIGHEST)
    if level not in known:
        raise UsageError(f"--level: no cell was measured at {level}", hint=f"one of {', '.join(known)}")
    return level


def _compared_with_previous(
    rows: Sequence[CellResult], runs: run_folders.NewestCells, store: Store
) -> Comparison | None:
    """Comparison with the last earlier run of the same matrix with other measurements, preferably a comparable one."""
    from trtllm_pipeline.orchestrate import REQUEST_FILE, read_request
    from trtllm_pipeline.show.report.comparison import DEFAULT, compare
    from trtllm_pipeline.show.report.measured import load_measured, with_files

    new = with_files(runs.newest.name, rows, runs.outline, store)
    measured = {cell.perf for cell in new.cells}
    apart: Comparison | None = None
    folders = run_folders.run_folders(store)
    for folder in folders[folders.index(runs.newest) + 1 :][:_EARLIER]:
        with suppress(PipelineError):  # unreadable and incomparable runs are skipped
            if read_request(folder / REQUEST_FILE).matrix != read_request(runs.newest / REQUEST_FILE).matrix:
                continue
            base = load_measured(folder.name, store)
            if any(cell.levels and cell.perf not in measured for cell in base.cells):
                comparison = compare(new, base, DEFAULT)
                if comparison.pairs:
                    return comparison
                apart = apart or comparison
    return apart


def _record(runs: run_folders.NewestCells, store: Store) -> Record:
    """The record of the newest run, with earlier runs' stage runs for the other cells."""
    newest, *earlier = (read_record(store, folder) for folder in runs.folders)
    stages = {stage.id: _earlier(stage) for record in reversed(earlier) for stage in record.stages}
    stages |= {stage.id: stage for stage in newest.stages}
    shown = runs.outline.stage_runs
    return replace(newest, stages=tuple(replace(stages[run], cells=shown[run].cells) for run in shown))


def _earlier(stage: StageRecord) -> StageRecord:
    """A stage run of an earlier run. None of its time counts for the newest run."""
    ending = {Ending.MADE: Ending.UP_TO_DATE, Ending.SERVED: Ending.SKIPPED}.get(stage.ending, stage.ending)
    return replace(stage, ending=ending, attempts=())


def page_limits(text: str) -> dict[str, float | str]:
    """The limits of `report --slo` in the format of the page's form. Raises UsageError."""
    from trtllm_pipeline.measure import metric_names, result
    from trtllm_pipeline.show.report.html.page import LIMITED
    from trtllm_pipeline.show.report.recommendation import parse_slo

    limits: dict[str, float | str] = {}
    for slo in parse_slo(text):
        latency, statistic = ("", "") if slo.metric in metric_names.HIGHER_IS_BETTER else result.latency_of(slo.metric)
        if latency not in LIMITED or limits.setdefault("statistic", statistic) != statistic:
            raise UsageError(
                f"--slo: the page supports {', '.join(LIMITED)} at one common statistic, got {text!r}",
                hint="e.g. ttft_p99=300ms,tpot_p99=40ms; pipeline recommend supports all objectives",
            )
        limits[latency] = slo.limit
    return limits
