"""Pages of other origins: browsers ask before they send, and need the origin in each response."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import httpx
import pytest
from starlette.responses import JSONResponse

from trtllm_pipeline.base.errors import UsageError
from trtllm_pipeline.orchestrate.matrix.gateway_settings import GatewayParams
from trtllm_pipeline.serve.gateway.gateway_config import GatewayConfig, OfferedModel
from trtllm_pipeline.serve.gateway.gateway_server import _for_browsers

PAGE = "http://localhost:3000"
FIELD = "access-control-allow-origin"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


def ask(method: str, origin: str, fields: Mapping[str, str] = {}, *, allowed: tuple[str, ...]) -> httpx.Response:
    """Response to a browser's request from a page of `origin`."""
    model = OfferedModel(name="m", url="http://127.0.0.1:9")
    config = GatewayConfig(models=(model,), params=GatewayParams(cors_origin=allowed))
    app = _for_browsers(JSONResponse({"error": {}}, 429, {"Retry-After": "1"}), config)

    async def run() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.request(method, "/v1/chat/completions", headers={"origin": origin, **fields})

    return asyncio.run(run())


@pytest.mark.parametrize("allowed", [(PAGE,), ("https://chat.example", PAGE), ("*",)])
def test_a_page_of_an_allowed_origin_may_send_keys_and_read_errors(allowed: tuple[str, ...]) -> None:
    origin = "*" if allowed == ("*",) else PAGE
    preflight = ask("OPTIONS", PAGE, PREFLIGHT, allowed=allowed)
    assert (preflight.status_code, preflight.headers[FIELD]) == (200, origin)
    assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in preflight.headers["access-control-allow-methods"]
    refused = ask("POST", PAGE, allowed=allowed)
    assert (refused.status_code, refused.headers[FIELD]) == (429, origin)
    assert refused.headers["access-control-expose-headers"] == "Retry-After"
    for response in (preflight, refused):
        assert "access-control-allow-credentials" not in response.headers


@pytest.mark.parametrize(
    "origin", ["http://localhost:3001", "https://localhost:3000", "http://localhost:3000.evil.example", "null"]
)
def test_pages_of_other_origins_get_no_permission(origin: str) -> None:
    preflight = ask("OPTIONS", origin, PREFLIGHT, allowed=(PAGE,))
    assert (preflight.status_code, FIELD in preflight.headers) == (400, False)
    assert FIELD not in ask("POST", origin, allowed=(PAGE,)).headers


def test_no_origin_is_allowed_by_default() -> None:
    response = ask("POST", PAGE, allowed=())
    assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize("origin", ["localhost:3000", "http://localhost:3000/", "https://*.example", "", "http://"])
def test_what_is_not_an_origin_is_refused(origin: str) -> None:
    with pytest.raises(UsageError, match=r"--cors-origin .*expected SCHEME://HOST\[:PORT\] or \*"):
        ask("POST", PAGE, allowed=(origin,))
