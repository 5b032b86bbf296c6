"""Recognize the server at an address after a request over a wrong protocol: Triton's gRPC, HTTP or metrics port, or OpenAI."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final, Literal
from urllib.parse import urlsplit

from trtllm_pipeline.base import FailureClass, ServerError
from trtllm_pipeline.measure.client import fields
from trtllm_pipeline.measure.client.transport import ProtocolError
from trtllm_pipeline.measure.client.transport.http import HttpError, fetch

Kind = Literal["grpc", "http", "metrics", "openai"]
_NAMES: Final = {
    "grpc": "Triton's gRPC port",
    "http": "Triton's HTTP port",
    "metrics": "Triton's metrics port",
    "openai": "an OpenAI-compatible server",
}
_PORTS: Final = {"grpc": 8001, "http": 8000}
"""Triton's, by default."""
_TIMEOUT_S: Final = 2.0
_FRAME_BYTES: Final = 9


async def wrong_protocol(address: str, expected: str, timeout_s: float) -> ServerError | None:
    """An error that names the server at `address` (host:port or a URL), if it is known to differ from `expected`."""
    actual = await kind_of(address, min(timeout_s, _TIMEOUT_S))
    if actual is None or actual == expected:
        return None
    where = urlsplit(address if "://" in address else f"//{address}").netloc
    advice = [f"use {_PORTS[expected]}"] if expected in _PORTS and actual != "openai" else []
    advice += [f"--protocol {actual}"] if actual != "metrics" else []
    return ServerError(
        f"{where}: this is {_NAMES[actual]}",
        failure=FailureClass.USER,
        hint=" or ".join(advice) or "give the address of the OpenAI-compatible server",
    )


async def kind_of(address: str, timeout_s: float = _TIMEOUT_S) -> Kind | None:
    """The kind of server at `address`, None if it is unknown or a request takes longer than `timeout_s`."""
    paths: tuple[tuple[str, Kind], ...] = (("/v2", "http"), ("/v1/models", "openai"), ("/metrics", "metrics"))
    base = urlsplit(address if "://" in address else f"http://{address}")
    server = f"{base.scheme}://{base.netloc}"
    for path, kind in paths:
        try:
            status, body = await fetch(server, path, timeout_s=timeout_s)
        except HttpError:
            plain = base.scheme == "http"
            return "grpc" if plain and await _speaks_http2(base.hostname, base.port, timeout_s) else None
        except (OSError, ValueError):
            return None
        if status == 200 and _is(kind, body):
            return kind
    return None


def _is(kind: Kind, body: bytes) -> bool:
    if kind == "metrics":
        return b"nv_inference_" in body
    with suppress(ProtocolError, KeyError):
        document = fields.parse(body)
        return isinstance(document["data"], list) if kind == "openai" else "extensions" in document
    return False


async def _speaks_http2(host: str | None, port: int | None, timeout_s: float) -> bool:
    """True if the server responds to HTTP/1.1 with an HTTP/2 frame, as gRPC servers do."""
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), timeout_s)
        try:
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            frame = await asyncio.wait_for(reader.readexactly(_FRAME_BYTES), timeout_s)
        finally:
            writer.close()
    except (OSError, EOFError, asyncio.TimeoutError):
        return False
    settings, goaway, connection = 4, 7, bytes(4)
    return frame[3] in {settings, goaway} and frame[5:] == connection
