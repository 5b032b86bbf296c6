"""The limits of a connection to the gateway."""

from __future__ import annotations

import asyncio
from unittest.mock import MagicMock

import pytest
import uvicorn
from uvicorn.server import ServerState

from trtllm_pipeline.serve.gateway.http_protocol import MAX_HEADER_BYTES, GatewayProtocol

POST = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


async def app(_scope: object, receive: object, send: object) -> None:
    await asyncio.sleep(0)


def received(*reads: bytes) -> bytes:
    """What the server writes when these reads arrive one after another."""

    async def run() -> bytes:
        transport = MagicMock()
        transport.is_closing.side_effect = lambda: transport.close.called
        transport.get_extra_info.return_value = None
        protocol = GatewayProtocol(uvicorn.Config(app, ws="none"), ServerState(), {})
        protocol.connection_made(transport)
        for data in reads:
            protocol.data_received(data)
        written = b"".join(call.args[0] for call in transport.write.call_args_list)
        protocol.connection_lost(None)
        return written

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("start", "more"),
    [
        (b"GET / HTTP/1.1\r\n", b"x: y\r\n" * 6000),
        (b"GET / HTTP/1.1\r\nx: ", b"y" * 36_000),
        (CHUNKED + b"0\r\n", b"x: y\r\n" * 6000),
        (CHUNKED + b"0\r\nx: ", b"y" * 36_000),
        (CHUNKED + b"1;", b"e" * 36_000),
    ],
    ids=["fields", "value", "trailer", "value of a trailer", "chunk extension"],
)
def test_everything_but_a_body_has_a_limit(start: bytes, more: bytes) -> None:
    assert received(start, more) == b""
    written = received(start, more, more)
    assert written.startswith(b"HTTP/1.1 431 ")
    assert b'"code": "header_too_large"' in written


def test_a_body_does_not_count() -> None:
    head = POST + b"Content-Length: 1000000\r\n\r\n"
    assert received(head, *(bytes(MAX_HEADER_BYTES) for _ in range(3))) == b""
