"""Results for other programs: OpenMetrics, Python and pandas, experiment trackers."""

from __future__ import annotations

import dataclasses
import io
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trtllm_pipeline
from tests.helpers.fabricated_run import HOSTILE, run
from trtllm_pipeline.bench.result import HighestRate, LevelResult, TritonUse
from trtllm_pipeline.errors import StateError, UsageError
from trtllm_pipeline.report import tracking
from trtllm_pipeline.report.openmetrics import to_openmetrics
from trtllm_pipeline.report.rows import CellResult
from trtllm_pipeline.report.writers import NAME, flat, to_csv, to_json


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
    (folder / NAME).write_text("\n".join(to_json(run(4)[0], "run-1", "my.yaml")), encoding="utf-8")
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


@pytest.mark.parametrize("text", [None, "", "[]", '{"schema": 1, "run": {}, "cells": [{}]}'])
def test_what_is_no_report_is_told(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(StateError, match="not a report"):
        trtllm_pipeline.load_report(path)


def test_the_package_has_nothing_else_that_is_late() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        trtllm_pipeline.nothing  # noqa: B018


def test_a_tracker_gets_each_level_as_a_step() -> None:
    rows = run(11)[0]
    cells = {cell.name: cell for cell in tracking.tracked(rows)}
    first, failed = cells[rows[0].id], cells[rows[10].id]
    assert list(first.levels) == [1, 2, 4, 8, 16]
    assert first.levels[4]["ttft_p50_ms"] == rows[0].levels[2].latency("ttft_ms", "p50")
    assert first.once["accuracy_exact"] == 0.82
    assert first.params["precision"] == "fp16"
    assert first.params["max_batch_size"] == "8"
    assert not set(first.params) & (set(first.once) | set(first.levels[1]))
    assert (failed.levels, failed.params["status"]) == ({}, "failed")


def test_steps_ascend_and_no_level_takes_the_place_of_another() -> None:
    (row,) = run(1)[0]
    levels = {level.concurrency: level for level in row.levels}
    falling = dataclasses.replace(row, levels=(levels[8], levels[2]))
    (cell,) = tracking.tracked((falling,))
    assert [(step, each["ttft_p50_ms"]) for step, each in cell.levels.items()] == [
        (step, levels[step].latency("ttft_ms", "p50")) for step in (2, 8)
    ]
    rates = [dataclasses.replace(levels[16], concurrency=None, request_rate=rate) for rate in (3.0, 7.0)]
    (cell,) = tracking.tracked((dataclasses.replace(row, levels=(levels[1], levels[4], *rates)),))
    assert list(cell.levels) == [1, 2, 3, 4]
    assert cell.levels[2]["ttft_p50_ms"] == levels[4].latency("ttft_ms", "p50")


def results(rows: tuple[CellResult, ...], folder: Path) -> Any:
    return SimpleNamespace(rows=rows, matrix="matrices/my.yaml", runs=SimpleNamespace(newest=folder / "run-1"))


@pytest.mark.parametrize("form", ["mlflow", "wandb"])
def test_a_tracker_that_is_not_installed_is_named(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, form, None)
    with pytest.raises(UsageError, match=f"--format {form} needs the package {form}") as caught:
        tracking.track(form, results(run(1)[0], tmp_path), tmp_path / "out")
    assert caught.value.hint == f"pip install 'trtllm-pipeline[{form}]'"


@pytest.mark.slow
def test_mlflow_reads_what_was_written_without_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    rows = run(3)[0]
    said = tracking.track("mlflow", results(rows, tmp_path), None)
    assert said.startswith("3 cells logged: mlflow ui --backend-store-uri sqlite:///")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/run-1/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("my")
    runs = {each.info.run_name: each for each in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {row.id for row in rows}
    one = runs[rows[1].id]
    assert one.data.params["precision"] == "fp8"
    assert [each.step for each in client.get_metric_history(one.info.run_id, "output_tokens_per_s")] == [1, 2, 4, 8, 16]


@pytest.mark.slow
def test_wandb_leaves_runs_to_send_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    said = tracking.track("wandb", results(run(2)[0], tmp_path), tmp_path / "out")
    assert said == f"2 cells logged: wandb sync {tmp_path}/out/wandb/offline-run-*"
    assert len(list((tmp_path / "out").glob("wandb/offline-run-*/*.wandb"))) == 2


@pytest.mark.parametrize("error", [RuntimeError("lost"), KeyboardInterrupt()])
def test_a_run_of_mlflow_that_is_cut_short_is_ended_as_failed(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: dict[str, str] = {}

    class Client:
        def __init__(self, _uri: str | None) -> None: ...
        def get_experiment_by_name(self, _name: str) -> Any:
            return SimpleNamespace(experiment_id="1")

        def create_run(self, _experiment: str, *, run_name: str, tags: dict[str, str]) -> Any:
            return SimpleNamespace(info=SimpleNamespace(run_id=run_name, start_time=0))

        def log_batch(self, run_id: str, *_: object) -> None:
            if run_id == rows[1].id:
                raise error

        def set_terminated(self, run_id: str, status: str = "FINISHED") -> None:
            ended[run_id] = status

    modules = {
        "mlflow": SimpleNamespace(MlflowClient=Client),
        "mlflow.entities": SimpleNamespace(Metric=tuple_of, Param=tuple_of, RunTag=tuple_of),
        "mlflow.exceptions": SimpleNamespace(MlflowException=OSError),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    rows = run(3)[0]
    with pytest.raises(type(error)):
        tracking.track("mlflow", results(rows, tmp_path), tmp_path / "out")
    assert ended == {rows[0].id: "FINISHED", rows[1].id: "FAILED"}


def tuple_of(*values: object) -> tuple[object, ...]:
    return values


@pytest.mark.parametrize("error", [RuntimeError("lost"), KeyboardInterrupt()])
def test_a_run_of_wandb_that_is_cut_short_is_ended_as_failed(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    class Run:
        summary: dict[str, float] = {}  # noqa: RUF012

        def __init__(self, name: str) -> None:
            self.name = name

        def log(self, _values: dict[str, float], *, step: int) -> None:
            if self.name == rows[1].id and step > 1:
                raise error

        def finish(self, exit_code: int | None = None) -> None:
            ended.append((self.name, exit_code))

    module = SimpleNamespace(init=lambda *, name, **_: Run(name), Settings=SimpleNamespace, Error=ValueError)
    monkeypatch.setitem(sys.modules, "wandb", module)
    rows = run(3)[0]
    with pytest.raises(type(error)):
        tracking.track("wandb", results(rows, tmp_path), tmp_path / "out")
    assert ended == [(rows[0].id, None), (rows[1].id, 1)]
