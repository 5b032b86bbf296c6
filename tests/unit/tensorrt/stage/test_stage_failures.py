"""Classes of failures of the stages that talk to a server: which of them are worth another try."""

from __future__ import annotations

import dataclasses

import pytest

from trtllm_pipeline.base.errors import FailureClass
from trtllm_pipeline.measure.load.result import LoadResult, MeasurementFinding
from trtllm_pipeline.tensorrt.stage import perf, smoke

BUSY = "the event loop was late"
UNAVAILABLE = "2 of 8 requests failed: UNAVAILABLE: 127.0.0.1:8001: the connection was closed"


@pytest.mark.parametrize(
    ("checks", "message", "expected"),
    [
        (("client_lag", "client_cpu"), BUSY, FailureClass.TRANSIENT),
        (("server",), "the server's process 12 did not survive the run", FailureClass.TRANSIENT),
        (("server", "client_lag"), BUSY, FailureClass.TRANSIENT),
        (("server", "failures"), UNAVAILABLE, FailureClass.TRANSIENT),
        (("roofline",), "faster than the memory allows", FailureClass.CHECK),
        (("server", "roofline"), "faster than the memory allows", FailureClass.CHECK),
    ],
)
def test_a_load_run_on_a_server_that_was_started_again_is_repeated(
    checks: tuple[str, ...], message: str, expected: FailureClass
) -> None:
    findings = tuple(MeasurementFinding("invalid", message, check=check) for check in checks)
    result = dataclasses.replace(LoadResult.read({}), findings=findings)
    assert perf.failure_of(result) is expected


@pytest.mark.parametrize(
    ("name", "detail", "expected"),
    [
        ("health", "expected every endpoint to be ready, got {'http': False, 'grpc': True}", FailureClass.TRANSIENT),
        ("expected", "expected 'Paris', got 'London'", FailureClass.CHECK),
        (
            "answer",
            "the request failed: UNAVAILABLE: 127.0.0.1:8001: the connection was closed",
            FailureClass.TRANSIENT,
        ),
        ("answer", "the request failed: the server closed the connection", FailureClass.TRANSIENT),
        ("answer", "the request failed: no such tensor", FailureClass.BUG),
    ],
)
def test_a_smoke_check_of_a_server_that_is_started_again_is_repeated(
    name: str, detail: str, expected: FailureClass
) -> None:
    assert smoke.failure_of(smoke.SmokeCheck(name, "grpc", "ensemble", False, detail, 1.0)) is expected
