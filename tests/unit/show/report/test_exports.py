"""Results for other programs: OpenMetrics, Python and pandas, experiment trackers."""

from __future__ import annotations

import dataclasses
import io
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trtllm_pipeline
from tests.helpers.fabricated_run import HOSTILE, run
from trtllm_pipeline.base.errors import StateError, UsageError
from trtllm_pipeline.measure.load.result import HighestRate, LevelResult, TritonUse
from trtllm_pipeline.orchestrate.results.report_file import NAME, CellResult, report_json
from trtllm_pipeline.show.report.openmetrics import to_openmetrics
from trtllm_pipeline.show.report.writers import flat, to_csv


def families(rows: tuple[CellResult, ...]) -> dict[str, Any]:
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    return {family.name: family for family in parser.text_string_to_metric_families(to_openmetrics(rows, "run-1"))}


def test_openmetrics_have_every_level_in_base_units() -> None:
    rows = run(3)[0]
    found = families(rows)
    ttft = {
        (sample.labels["cell"], sample.labels["concurrency"]): sample.value
        for sample in found["pipeline_cell_ttft_seconds"].samples
        if sample.labels["statistic"] == "p50"
    }
    assert ttft == {
        (row.id, str(level.concurrency)): pytest.approx((level.latency("ttft_ms", "p50") or math.nan) / 1000)
        for row in rows
        for level in row.levels
    }
    (first, *_) = found["pipeline_cell_output_tokens_per_second"].samples
    assert first.labels["precision"] == "fp16"
    assert first.value == rows[0].levels[0].output_tokens_per_s
    assert {sample.labels["stage"] for sample in found["pipeline_cell_stage_seconds"].samples} == {"build", "perf"}
    assert "pipeline_cell_itl_seconds" not in found, "nobody measured it"


def test_what_is_measured_of_some_cells_alone_is_exported_too() -> None:
    rows = run(2)[0]
    rate = LevelResult(request_rate=10.0, requests=40, failures=0, window="whole", saturated_rps=7.25)
    searched = HighestRate(0.95, {"ttft": 300.0}, 6.5, 6.2, 6.9, {})
    bench = {"output_tokens_per_s": 333.0}
    asked = dataclasses.replace(rows[0], levels=(rate,), highest_rate=searched, trtllm_bench=bench)
    found = families((asked, rows[1]))
    told = {name: [each.value for each in family.samples] for name, family in found.items()}
    assert told["pipeline_cell_saturated_requests_per_second"] == [7.25]
    assert told["pipeline_cell_highest_rate_requests_per_second"] == [6.5]
    assert told["pipeline_cell_trtllm_bench_output_tokens_per_second"] == [333.0]
    use = TritonUse(models={"tensorrt_llm": {"requests": 9, "queue_ms": 1.5, "compute_infer_ms": 80.0}}, waiting=0.5)
    of_triton = dataclasses.replace(rows[1], levels=(dataclasses.replace(rows[1].levels[0], triton_use=use),))
    found = families((asked, of_triton))
    parts = {
        (each.labels["model"], each.labels["part"]): each.value
        for each in found["pipeline_cell_triton_request_seconds"].samples
    }
    assert parts == {("tensorrt_llm", "queue"): 0.0015, ("tensorrt_llm", "compute_infer"): 0.08}
    assert [each.value for each in found["pipeline_cell_triton_requests"].samples] == [9.0]
    (waiting,) = found["pipeline_cell_triton_requests_waiting"].samples
    assert (waiting.labels["statistic"], waiting.value) == ("mean", 0.5)
    assert "pipeline_cell_triton_kv_cache_use_ratio" not in found
    (_, line) = flat((asked, of_triton))
    told = {name: value for name, value in line.items() if name.startswith("triton_")}
    assert told == {
        "triton_waiting": 0.5,
        "triton_tensorrt_llm_queue_ms": 1.5,
        "triton_tensorrt_llm_compute_infer_ms": 80.0,
    }
    (line, *_) = flat((asked, rows[1]))
    assert (line["saturated_rps"], line["highest_rate"], line["trtllm_bench_output_tokens_per_s"]) == (7.25, 6.5, 333.0)


def test_openmetrics_of_hostile_cells_and_of_axes_over_settings_can_be_read() -> None:
    rows, _ = run(1, hostile=True)
    odd = dataclasses.replace(rows[0], axes={**rows[0].axes, "kv.share": 'a"b\\c\nd'})
    found = families((*rows, odd))
    labels = [sample.labels for sample in found["pipeline_cell_status"].samples]
    assert HOSTILE in {each["model"] for each in labels}
    assert 'a"b\\c\nd' in {each.get("kv_share") for each in labels}


def test_openmetrics_of_nothing_end() -> None:
    assert to_openmetrics(()) == "# EOF\n"


@pytest.fixture
def report(tmp_path: Path) -> Path:
    folder = tmp_path / "run-1"
    folder.mkdir()
    (folder / NAME).write_text("\n".join(report_json(run(4)[0], "run-1", "my.yaml")), encoding="utf-8")
    return folder


def test_a_report_is_loaded_with_types(report: Path) -> None:
    loaded = trtllm_pipeline.load_report(report)
    assert loaded == trtllm_pipeline.load_report(str(report / NAME))
    assert (loaded.run, loaded.matrix) == ("run-1", "my.yaml")
    first = run(4)[0][0]
    assert loaded.cells[first.id].levels[0].latency("ttft_ms", "p99") == first.levels[0].latency("ttft_ms", "p99")


def test_a_frame_has_the_columns_of_the_csv(report: Path) -> None:
    pandas = pytest.importorskip("pandas")
    loaded = trtllm_pipeline.load_report(report)
    frame = loaded.frame()
    assert list(frame.columns) == list(pandas.read_csv(io.StringIO(to_csv(loaded.rows))).columns)
    assert len(frame) == sum(len(row.levels) or 1 for row in loaded.rows)
    best = frame.groupby("precision").output_tokens_per_s.max()
    assert best["fp8"] == max(
        level.output_tokens_per_s or 0 for row in loaded.rows for level in row.levels if row.axes["precision"] == "fp8"
    )


def test_without_pandas_it_says_what_to_install(report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="pandas") as caught:
        trtllm_pipeline.load_report(report).frame()
    assert caught.value.hint == "pip install 'trtllm-pipeline[frame]'"


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"schema": 9}', '{"schema": 1, "run": {}, "cells": [{}]}'])
def test_what_is_no_report_is_told(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(StateError, match=r"not a report|report of schema 9"):
        trtllm_pipeline.load_report(path)


def test_the_package_has_nothing_else_that_is_late() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        trtllm_pipeline.nothing  # noqa: B018


@pytest.mark.timeout(300)  # it imports MLflow twice and makes a database
def test_the_example_for_mlflow_logs_a_run_of_each_cell_and_a_step_of_each_level(report: Path, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the package mlflow")
    database = f"sqlite:///{tmp_path}/mlflow.db"
    subprocess.run(
        [sys.executable, "examples/mlflow_tracking.py", str(report)],
        env={**os.environ, "MLFLOW_TRACKING_URI": database, "MLFLOW_DISABLE_TELEMETRY": "true"},
        check=True,
    )
    client = mlflow.MlflowClient(database)
    (experiment,) = [each for each in client.search_experiments() if each.name != "Default"]
    runs = {each.info.run_name: each for each in client.search_runs([experiment.experiment_id])}
    rows = trtllm_pipeline.load_report(report).rows
    assert set(runs) == {row.id for row in rows}
    one = runs[rows[0].id]
    assert one.data.params["precision"] == rows[0].axes["precision"]
    told = client.get_metric_history(one.info.run_id, "output_tokens_per_s")
    assert {each.step: each.value for each in told} == {
        level.concurrency: level.output_tokens_per_s for level in rows[0].levels
    }
