"""One model of a gateway and its server."""

from __future__ import annotations

import logging
import time

import pytest

from trtllm_pipeline.orchestrate.matrix.gateway_settings import GatewayParams
from trtllm_pipeline.serve.gateway.api_error import ApiError
from trtllm_pipeline.serve.gateway.gateway_config import OfferedModel
from trtllm_pipeline.serve.gateway.served import ModelServer


def test_of_many_failures_the_log_has_one_in_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    server = ModelServer(OfferedModel(name="m", url="http://127.0.0.1:9"), GatewayParams())
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            server.log_failure("m:sql", ApiError(502, "it died\nand more"))
        now_s += 10
        server.log_failure("m", ApiError(504, "late"))
    assert caplog.messages == [
        'a request for model m:sql failed with 502: "it died\\nand more"',
        'a request for model m failed with 504: "late" (999 failures before it are not in this log)',
    ]
