"""Which names a gateway may be reached by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trtllm_pipeline.gateway.api_error import ApiError
from trtllm_pipeline.gateway.config import GatewayConfig, GatewayParams, OfferedModel
from trtllm_pipeline.gateway.hosts import Hosts


def refusal(*named: str, allowed: tuple[str, ...] = (), **config: Any) -> ApiError | None:
    """Why a request with these header fields Host is refused."""
    model = OfferedModel(name="m", url="http://127.0.0.1:9")
    hosts = Hosts(GatewayConfig(models=(model,), params=GatewayParams(allowed_hosts=allowed), **config))
    try:
        hosts.check([(b"accept", b"*/*"), *((b"host", name.encode()) for name in named)])
    except ApiError as error:
        return error
    return None


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9000", "localhost.", "127.0.0.1:1", "[::1]", "[::1]:9000"])
def test_names_of_this_machine_are_accepted(host: str) -> None:
    assert refusal(host) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:9000",
        "localhost.evil.example",
        "127.0.0.1.evil.example:80",
        "",
        "localhost:x",
        "x@localhost",
    ],
)
def test_other_names_are_refused(host: str) -> None:
    refused = refusal(host)
    assert refused is not None
    assert (refused.status, refused.code) == (403, "host_not_allowed")
    assert "--allowed-hosts" in refused.message


def test_more_names_can_be_allowed() -> None:
    assert refusal("models.example:9000", allowed=("Models.Example",)) is None
    assert refusal("other.example", allowed=("Models.Example",))


def test_its_own_address_is_accepted() -> None:
    assert refusal("127.0.0.2:80", host="127.0.0.2") is None
    assert refusal("127.0.0.2:80")


@pytest.mark.parametrize("config", [{"host": "0.0.0.0"}, {"host": "::"}, {"api_keys_file": Path("keys")}])
def test_a_gateway_that_others_reach_or_that_needs_keys_accepts_all(config: dict[str, Any]) -> None:
    assert refusal("evil.example", **config) is None


def test_a_request_without_a_host_is_accepted_and_one_with_two_needs_both_allowed() -> None:
    assert refusal() is None
    assert refusal("localhost", "evil.example")
