from __future__ import annotations

import pytest

from trtllm_pipeline.bench.target import service_at
from trtllm_pipeline.errors import FailureClass, ServerError


@pytest.mark.parametrize(
    ("url", "interface", "http", "grpc"),
    [
        ("host", "grpc", "", "host:8001"),
        ("host:", "grpc", "", "host:8001"),
        ("grpc://host:9/", "grpc", "", "host:9"),
        ("[::1]", "grpc", "", "[::1]:8001"),
        ("[::1]:65535", "http", "[::1]:65535", ""),
        ("http://host", "http", "host:8000", ""),
        ("https://host/triton", "http", "https://host/triton", ""),
        ("host:1/v1", "openai", "http://host:1/v1", ""),
    ],
)
def test_where_a_service_is(url: str, interface: str, http: str, grpc: str) -> None:
    service = service_at(url, interface, "m")
    assert (service.http, service.grpc) == (http, grpc)


@pytest.mark.parametrize(
    ("url", "interface"),
    [
        *((url, "grpc") for url in ("host:0", "host:65536", "host:-1", "host:x", "::1", ":8001", "host:1/path")),
        ("http://host:65536", "http"),
        ("host:1/path", "http"),
        ("http://host:65536/v1", "openai"),
        ("http://", "openai"),
    ],
)
def test_what_is_no_place_is_told_with_the_url(url: str, interface: str) -> None:
    with pytest.raises(ServerError, match=f"^{url}: ") as caught:
        service_at(url, interface, "m")
    assert caught.value.failure is FailureClass.USER
