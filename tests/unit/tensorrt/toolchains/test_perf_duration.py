"""How long measuring is expected to take."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.orchestrate.matrix.test_perf_levels import cells, matrix
from trtllm_pipeline.base.machine.assume import parse
from trtllm_pipeline.tensorrt.toolchains.common_stages import PERF


def expected_s(folder: Path, **perf: object) -> float:
    (cell,) = cells(matrix(folder, {"warmup_requests": 0, **perf}))
    return PERF.takes(cell, parse("sm=90,gpus=1"))


def test_levels_that_last_a_time_are_expected_to_last_it(tmp_path: Path) -> None:
    closed = expected_s(tmp_path, concurrency=[1, 4], measurement_interval_ms=30_000)
    assert closed == pytest.approx(60, abs=2)
    opened = expected_s(tmp_path, concurrency=[], request_rate=[2, 5], measurement_interval_ms=30_000)
    assert opened == pytest.approx(60, abs=5)


def test_a_level_has_two_requests_for_each_in_flight_at_least(tmp_path: Path) -> None:
    one, other = (expected_s(tmp_path, concurrency=[64], requests=requests) for requests in (1, 128))
    assert one == other


def test_rates_of_a_search_have_as_many_requests_as_it_needs(tmp_path: Path) -> None:
    asked = {"concurrency": [], "find_rate": 0.9, "slo": {"ttft_ms": 300.0}}
    brief = expected_s(tmp_path, **asked, measurement_interval_ms=1.0)
    assert brief == pytest.approx(expected_s(tmp_path, **asked, requests=300), rel=0.01)
    assert expected_s(tmp_path, **asked, measurement_interval_ms=1e6) >= 12_000
