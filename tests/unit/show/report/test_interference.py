"""What a report says of the cell that was measured alone and beside others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trtllm_pipeline.base.domain import ALONE, CellId
from trtllm_pipeline.measure.load.conditions import Conditions
from trtllm_pipeline.measure.load.result import LevelResult
from trtllm_pipeline.orchestrate.results.report_file import CellResult, CellStatus
from trtllm_pipeline.show.report.interference import interference
from trtllm_pipeline.show.report.report_formats import Report
from trtllm_pipeline.show.report.writers import to_markdown


def level(tokens: float, ttft: float, concurrency: int = 4) -> LevelResult:
    return LevelResult(concurrency=concurrency, output_tokens_per_s=tokens, latencies={"ttft_ms": {"p50": ttft}})


def row(name: str, at: float, *levels: LevelResult) -> CellResult:
    measured = Conditions(measured_s=at, system={}, workload={})
    return CellResult(CellId(name), {}, CellStatus.DONE, seconds={"perf": 60.0}, levels=levels, conditions=measured)


BESIDE = row("m/fp8/tp1", 1000.0, level(980.0, 51.0), level(1500.0, 70.0, 8))
OTHER = row("m/fp16/tp1", 1030.0, level(700.0, 60.0))
ALONE_ROW = row(f"{ALONE}m/fp8/tp1", 2000.0, level(1000.0, 50.0))


def test_ratios_are_of_each_load_that_both_have() -> None:
    (line,) = interference([BESIDE, OTHER, ALONE_ROW])
    assert line == "m/fp8/tp1 alongside 1 other vs. alone, concurrency 4: output tokens/s -2.0%, TTFT p50 +2.0%"
    assert line in to_markdown(Report(rows=[BESIDE, OTHER, ALONE_ROW]))


@pytest.mark.parametrize(("at", "share"), [(1061.0, "none"), (1045.0, "only 25%")])
def test_a_pair_that_others_hardly_met_gives_no_ratio(at: float, share: str) -> None:
    (line,) = interference([BESIDE, row("m/fp16/tp1", at, level(700.0, 60.0)), ALONE_ROW])
    assert line == f"m/fp8/tp1 shared {share} of its time with another measurement: too little to show an effect"


def test_without_both_there_is_nothing_to_say() -> None:
    assert not [*interference([BESIDE, OTHER])]
    assert not [*interference([BESIDE, OTHER, replace(ALONE_ROW, levels=())])]
    assert not [*interference([OTHER, ALONE_ROW])]
