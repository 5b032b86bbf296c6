"""uvicorn's HTTP/1.1 with the limits that it has none for: time and size of a header, connections, and errors as JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from trtllm_pipeline.gateway.api_error import ApiError
from trtllm_pipeline.gateway.openai_app import CONNECTION, WHOLE

MAX_HEADER_BYTES: Final = 1 << 16
"""From the end of one request to the end of the header of the next."""


def limited(*, header_timeout_s: float, max_connections: int) -> type[asyncio.Protocol]:
    """The protocol with these limits."""

    class LimitedProtocol(_LimitedProtocol):
        pass

    LimitedProtocol.header_timeout_s = header_timeout_s
    LimitedProtocol.max_connections = max_connections
    return LimitedProtocol


class _TooLarge(Exception):  # noqa: N818
    """A header has more than it may."""


def _header_too_large() -> ApiError:
    return ApiError(431, f"the header is larger than {MAX_HEADER_BYTES} bytes", code="header_too_large")


def _without_chunks(cycle: RequestResponseCycle) -> None:
    """HTTP/1.0 knows no chunks: an answer whose length is not told ends with the connection."""
    send = cycle.send

    async def plain(message: Any) -> None:
        if message["type"] == "http.response.start":
            cycle.chunked_encoding = False
        elif cycle.expected_content_length == 0:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = plain  # type: ignore[method-assign]


class _HeadWithBody:
    """The transport of one answer: the head waits for the body, which follows at once, and both are one system call."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.close, self.is_closing = transport.close, transport.is_closing
        self._transport = transport
        self._head = b""
        self._begun = False

    def write(self, data: bytes) -> None:
        """Send it, but for the head."""
        if self._begun:
            self._transport.write(data)
        elif self._head:
            self._transport.write(self._head + data)
            self._begun = True
        else:
            self._head = data


class _LimitedProtocol(HttpToolsProtocol):
    header_timeout_s: float
    max_connections: int

    def __init__(self, config: Config, *args: Any, **named: Any) -> None:
        super().__init__(config, *args, **named)
        self._timer: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._in_header = True
        self._fields_bytes = 0
        self._left: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse what is too much, and wait for a header."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(
                ApiError(503, "the gateway has too many connections", code="too_many_connections", retry_after_s=1)
            )
            return
        self._expect_header()

    def connection_lost(self, exc: Exception | None) -> None:
        """The end."""
        self._forget_timer()
        super().connection_lost(exc)
        if self._left is not None:
            self._left()

    def watch(self, left: Callable[[], None]) -> None:
        """Call `left` when the client leaves, at once where it has left."""
        self._left = left
        if self.transport.is_closing():
            left()
        self.flow.resume_reading()  # which a large body has paused, and nobody would see the client leave

    def unwatch(self) -> None:
        """The answer has ended."""
        self._left = None

    def abort(self) -> None:
        """Close it at once."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Count the bytes of a header that has not ended."""
        if self.transport.is_closing():
            return
        if self._in_header:
            if self._timer is None:
                self._expect_header()
            self._header_bytes += len(data)
        super().data_received(data)
        if self._in_header and self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._refuse(_header_too_large())

    def on_message_begin(self) -> None:
        """A request begins: whoever answers it may close the connection."""
        super().on_message_begin()
        self._fields_bytes = 0
        self.scope[CONNECTION] = self  # type: ignore[typeddict-unknown-key]

    def on_header(self, name: bytes, value: bytes) -> None:
        """One field. A header that arrives at once, with its end, is counted here."""
        self._fields_bytes += len(name) + len(value) + 4
        if self._fields_bytes > MAX_HEADER_BYTES:
            raise _TooLarge  # ends the parsing
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The header has ended."""
        self._in_header = False
        self._forget_timer()
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0" and self.cycle is not None:
            _without_chunks(self.cycle)
        if self.scope["method"] == "POST" and not self.expect_100_continue:
            self.cycle.transport = _HeadWithBody(self.transport)  # type: ignore[assignment]

    def on_message_complete(self) -> None:
        """The next bytes are of another header."""
        super().on_message_complete()
        self.scope[WHOLE] = True  # type: ignore[typeddict-unknown-key]
        self._in_header, self._header_bytes = True, 0

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is told so as JSON."""
        large = self._fields_bytes > MAX_HEADER_BYTES
        self._refuse(_header_too_large() if large else ApiError(400, msg, code="invalid_http"))

    def _expect_header(self) -> None:
        self._timer = self.loop.call_later(self.header_timeout_s, self._late)

    def _late(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            if self._header_bytes:
                self._refuse(
                    ApiError(408, f"the header did not arrive within {self.header_timeout_s:g} s", code="timeout")
                )
            else:
                self.transport.close()

    def _forget_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, error: ApiError) -> None:
        self._forget_timer()
        if (
            getattr(self, "cycle", None) is not None
            and self.cycle.response_started
            and not self.cycle.response_complete
        ):
            self.transport.close()  # in the middle of the answer before
            return
        body = error.body
        fields = {**error.headers, "content-type": "application/json", "content-length": str(len(body))}
        head = "".join(f"{name.lower()}: {value}\r\n" for name, value in fields.items())
        self.transport.write(STATUS_LINE[error.status] + head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()
