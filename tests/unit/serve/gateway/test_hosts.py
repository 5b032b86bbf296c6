"""Host names under which a gateway answers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from trtllm_pipeline.base.errors import UsageError
from trtllm_pipeline.orchestrate.matrix.gateway_settings import GatewayParams
from trtllm_pipeline.serve.gateway.gateway_config import GatewayConfig, OfferedModel
from trtllm_pipeline.serve.gateway.gateway_server import _for_trusted_hosts


def status(name: str, *allowed: str, **config: Any) -> int:
    """Status of the response to a request addressed to `name`."""
    code: int = responded(name, *allowed, **config)[0]["status"]
    return code


def responded(name: str, *allowed: str, **config: Any) -> list[Any]:
    """The messages of the response."""
    model = OfferedModel(name="m", url="http://127.0.0.1:9")
    checked = _for_trusted_hosts(
        Response("ok"), GatewayConfig(models=(model,), params=GatewayParams(allowed_hosts=allowed), **config)
    )
    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": [(b"host", name.encode())]}
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    asyncio.run(checked(scope, receive, send))
    return sent


@pytest.mark.parametrize("host", ["localhost", "localhost:9000", "127.0.0.1:1", "[::1]", "[::1]:9000"])
def test_names_of_this_machine_are_accepted(host: str) -> None:
    assert status(host) == 200


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
    assert status(host) == 400


def test_a_refusal_is_an_error_of_the_api_that_names_the_option() -> None:
    start, body = responded("evil.example:80")
    assert (b"content-type", b"application/json") in start["headers"]
    error = json.loads(body["body"])["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_host")
    assert error["message"] == (
        "the header Host is 'evil.example', which is not a name of this gateway: --allowed-hosts adds names"
    )


def test_more_names_can_be_allowed() -> None:
    assert status("models.example:9000", "Models.Example:9000") == 200
    assert status("a.models.example", "*.models.example") == 200
    assert status("models.example", "*.models.example") == 400
    assert status("other.example", "*") == 200
    assert status("other.example", "Models.Example") == 400
    for pattern in ("a*b", "*a", "a.*"):
        with pytest.raises(UsageError, match="--allowed-hosts"):
            status("localhost", pattern)


def test_its_own_address_is_accepted() -> None:
    assert status("127.0.0.2:80", host="127.0.0.2") == 200
    assert status("127.0.0.2:80") == 400


@pytest.mark.parametrize("config", [{"host": "0.0.0.0"}, {"host": "::"}, {"api_keys_file": Path("keys")}])
def test_a_gateway_that_others_reach_or_that_needs_keys_accepts_all(config: dict[str, Any]) -> None:
    assert status("evil.example", **config) == 200
