"""uvicorn's HTTP/1.1 with features that it lacks: a header size limit, JSON errors, HTTP/1.0, clients that disconnect
or do not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from trtllm_pipeline.serve.gateway.api_error import ApiError
from trtllm_pipeline.serve.gateway.openai_app import CONNECTION

MAX_HEADER_BYTES: Final = 1 << 16
"""Size limit for everything except the body: header, chunk sizes, trailer."""


class GatewayProtocol(HttpToolsProtocol):
    """One connection of a client."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._idle_bytes = 0
        self._left: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close it like an idle connection if no request follows. uvicorn would wait forever for the first one."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        if self._left is not None:
            self._left()

    def watch(self, left: Callable[[], None]) -> None:
        """Call `left` when the client disconnects, or now if it has."""
        self._left = left
        if self.transport.is_closing():
            left()
        self.flow.resume_reading()  # a large body paused it, and only a read shows that the client has disconnected

    def unwatch(self) -> None:
        self._left = None

    def abort(self) -> None:
        """Close the connection at once, without waiting for a client that does not read."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse one read. uvicorn with httptools has no header size limit."""
        if self.transport.is_closing():
            return
        self._idle_bytes += len(data)
        super().data_received(data)
        if self._idle_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._refuse(ApiError(431, f"the header is larger than {MAX_HEADER_BYTES} bytes", code="header_too_large"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[CONNECTION] = self  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        self._idle_bytes = 0
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0" and self.cycle is not None:
            _without_chunks(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._idle_bytes = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP with a JSON error."""
        self._refuse(ApiError(400, msg, code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body = error.body
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[error.status] + head.encode() + body)
        self.transport.close()


def _without_chunks(cycle: RequestResponseCycle) -> None:
    """Send no chunks: HTTP/1.0 has none. A response of unknown length ends with the connection."""
    send = cycle.send

    async def plain(message: Any) -> None:
        if message["type"] == "http.response.start":
            cycle.chunked_encoding = False
        elif cycle.expected_content_length == 0:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = plain  # type: ignore[method-assign]
