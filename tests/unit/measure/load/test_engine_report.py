"""A report of trtllm-bench compared with a load through a server."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from trtllm_pipeline.base.errors import MatrixError, StageError
from trtllm_pipeline.measure.load.conditions import Conditions
from trtllm_pipeline.measure.load.engine_report import BenchComparison, EngineReport
from trtllm_pipeline.measure.load.result import LevelResult, LoadResult
from trtllm_pipeline.show.report import load_tables

REPORT: dict[str, Any] = {
    "engine": {"model": "m", "version": "1.2.0", "backend": "TensorRT"},
    "request_info": {
        "num_requests": 64,
        "avg_num_concurrent_requests": 7.6,
        "avg_input_length": 256.0,
        "avg_output_length": 32.0,
    },
    "performance": {
        "total_latency_ms": 1000.0,
        "avg_request_latency_ms": 100.0,
        "request_throughput_req_s": 64.0,
        "system_output_throughput_tok_s": 2048.0,
    },
    "streaming_metrics": {"avg_ttft_ms": 20.0, "avg_tpot_ms": 2.5},
}


def written(folder: Path, report: object) -> Path:
    path = folder / "report.json"
    path.write_text(json.dumps(report))
    return path


def level(concurrency: int | None, tokens: float = 256.0, **rate: float) -> LevelResult:
    return LevelResult(
        concurrency=concurrency,
        requests=64,
        output_tokens_per_s=1843.2,
        requests_per_s=57.6,
        latencies={"ttft_ms": {"mean": 30.0}, "tpot_ms": {"mean": 2.6}, "e2e_ms": {"mean": 111.0}},
        lengths={"input_tokens_per_request": {"mean": tokens}, "output_tokens_per_request": {"mean": 32.0}},
        **rate,
    )


def result(*levels: LevelResult) -> LoadResult:
    return LoadResult(valid=True, levels=levels, findings=(), conditions=Conditions())


def test_the_level_that_is_nearest_stands_beside_it(tmp_path: Path) -> None:
    comparison = BenchComparison.of(result(level(1), level(8), level(32)), EngineReport.read(written(tmp_path, REPORT)))
    assert comparison.level.concurrency == 8
    assert list(comparison.differences()) == []
    rows = {str(row[""]): row for row in comparison.rows()}
    assert rows["output_tokens_per_s"]["server's part"] == "-10.0%"
    assert rows["ttft_ms mean"]["server's part"] == "+50.0%"
    data = comparison.to_json()
    assert (data["release"], data["level"], data["not_the_same"]) == ("1.2.0", "8", [])
    text = "\n".join(load_tables.beside_engine(comparison))
    assert text.startswith("\nconcurrency 8, and the engine in the process of trtllm-bench of TensorRT-LLM 1.2.0\n")
    assert list(load_tables.beside_engine(None)) == []


def test_another_load_is_said_to_be_one(tmp_path: Path) -> None:
    comparison = BenchComparison.of(result(level(32, tokens=64.0)), EngineReport.read(written(tmp_path, REPORT)))
    assert list(comparison.differences()) == ["in flight 32 here, 7.6 there", "input tokens 64 here, 256 there"]
    assert "different load" in comparison.title()


def test_without_streaming_there_are_no_times_of_tokens(tmp_path: Path) -> None:
    plain = {name: value for name, value in REPORT.items() if name != "streaming_metrics"}
    comparison = BenchComparison.of(result(level(8)), EngineReport.read(written(tmp_path, plain)))
    assert [row[""] for row in comparison.rows()] == ["output_tokens_per_s", "requests_per_s", "e2e_ms mean"]


@pytest.mark.parametrize(
    "report",
    [
        {},
        [],
        {**REPORT, "performance": {}},
        {**REPORT, "performance": 3},
        {**REPORT, "request_info": {**REPORT["request_info"], "num_requests": "64"}},
        {**REPORT, "request_info": {**REPORT["request_info"], "num_requests": math.inf}},
        {**REPORT, "request_info": {**REPORT["request_info"], "num_requests": 10**400}},
    ],
)
def test_what_is_no_report_is_named(tmp_path: Path, report: object) -> None:
    with pytest.raises(MatrixError, match=r"report\.json"):
        EngineReport.read(written(tmp_path, report))


def test_rates_have_nothing_to_stand_beside(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="requests in flight"):
        BenchComparison.of(result(level(None, request_rate=2.0)), EngineReport.read(written(tmp_path, REPORT)))
