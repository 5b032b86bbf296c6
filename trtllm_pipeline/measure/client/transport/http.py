"""HTTP/1.1 for measurements: one keep-alive connection that passes on every part of a body with its arrival time.

httpx needed 250 µs of CPU time per streamed event: above about 60 streams of 20 events per second, the client was
slower than the server. Here httptools parses, and this module adds limits. Anything that a peer sends results in a
response or an HttpError.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpResponseParser

from trtllm_pipeline.measure.client.transport import ProtocolError
from trtllm_pipeline.measure.client.transport.timestamped_socket import MAX_MESSAGE_BYTES, Arrived, TimestampedSocket

MAX_HEAD_BYTES: Final = 1 << 16
"""Limit for everything except the body: the header with earlier interim responses, chunk sizes, and the trailer."""
MAX_FIELDS: Final = 256


class HttpError(ProtocolError):
    """The peer closed the connection, did not speak HTTP/1.1, or exceeded a limit."""


class Parser:
    """Parses one response incrementally and passes its body to `sink`.

    Raises HttpError for anything but a valid response with a body of at most `max_bytes`.
    """

    def __init__(self, sink: Arrived, *, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.status = 0
        """Set once the header is complete."""
        self.headers_ns: int | None = None
        self.latest_ns = 0
        """When the last bytes arrived."""
        self.began = False
        self.complete = False
        self.keep_alive = True
        """True if another request may follow on this connection."""
        self._sink = sink
        self._max_bytes = max_bytes
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        self._fields: dict[bytes, list[bytes]] = {}
        self._count = 0
        self._idle_bytes = 0
        self._body_bytes = 0
        self._to_the_end = False

    def feed(self, now_ns: int, data: bytes) -> None:
        if self._parser is None:  # complete, and no further response was requested
            self.keep_alive = False
            return
        self.began, self.latest_ns = True, now_ns
        before = self._body_bytes
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            if error.__context__ is not None:  # raised by a callback
                raise error.__context__ from None
            if not self.complete:
                what = "invalid" if self._parser.get_status_code() else "not an"
                raise HttpError(f"{what} HTTP response: {error}: {data[:40]!r}") from None
            self.keep_alive = False
        if self.complete:
            self._parser = None  # they refer to each other
        elif self._body_bytes > before:
            self._idle_bytes = 0
        else:
            self._idle_bytes += len(data)
            if self._idle_bytes > MAX_HEAD_BYTES:
                place = "trailer or a chunk size" if self.status else "header"
                raise HttpError(f"the response {place} exceeds {MAX_HEAD_BYTES} bytes")

    def end(self, reason: str) -> None:
        if self._to_the_end:
            self.complete = True
        elif not self.complete:
            where = f"after {self._body_bytes} bytes of the body" if self.status else "in the header"
            raise HttpError(f"the connection closed in the middle of the response: {where}" if self.began else reason)

    # Called by httptools. An HttpError raised here is the context of the HttpParserError from `feed_data`.

    def on_message_begin(self) -> None:
        """A message starts. After the response, it is one that was not requested."""
        self.keep_alive = self.keep_alive and not self.complete

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count += 1
        if self._count > MAX_FIELDS:
            raise HttpError(f"the response has more than {MAX_FIELDS} header fields")
        self._fields.setdefault(name.lower(), []).append(value)

    def on_headers_complete(self) -> None:
        """The header is complete. Interim responses are skipped."""
        if self.complete:
            return
        assert self._parser is not None
        fields, status = self._fields, self._parser.get_status_code()
        self._fields = {}
        if status == 101:
            raise HttpError("the server switches to another protocol without being asked to")
        if status < 200:
            return
        self.status, self.headers_ns, self.keep_alive = status, self.latest_ns, self._parser.should_keep_alive()
        encodings, codings = _listed(fields, b"content-encoding"), _listed(fields, b"transfer-encoding")
        if encodings - {"identity"}:
            raise HttpError(f"the body is encoded as {', '.join(sorted(encodings))}, which was not requested")
        if codings - {"chunked"}:
            raise HttpError(f"the transfer-encoding is {', '.join(sorted(codings))}, expected chunked")
        lengths = fields.get(b"content-length")
        if lengths is not None:
            self._check_size(int(lengths[0]))
        self._to_the_end = lengths is None and not codings and status not in {204, 304}

    def on_body(self, part: bytes) -> None:
        self._body_bytes += len(part)
        self._check_size(self._body_bytes)
        self._sink(self.latest_ns, part)

    def on_message_complete(self) -> None:
        """The response is complete, unless it was an interim one."""
        self.complete = self.status > 0

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise HttpError(f"the body has {size} bytes; the limit is {self._max_bytes}")


def _listed(fields: Mapping[bytes, list[bytes]], name: bytes) -> set[str]:
    """Return the members of a list-valued field, in lower case."""
    values = b",".join(fields.get(name, ())).decode("latin-1").lower().split(",")
    return {part for each in values if (part := each.strip(" \t"))}


def request_head(method: str, path: str, authority: str, size: int, headers: Mapping[str, str] | None = None) -> bytes:
    """The head of a request with a JSON body of `size` bytes."""
    fields = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    return (
        f"{method} {path} HTTP/1.1\r\nHost: {authority}\r\n{fields}"
        f"Content-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    ).encode()


class Connection:
    """A connection to `address` (host:port or a URL). `open` connects, also again after a close."""

    def __init__(self, address: str) -> None:
        url = urlsplit(address if "://" in address else f"http://{address}")
        if url.scheme not in {"http", "https"} or url.hostname is None:
            raise ValueError(f"{address!r} is not http://HOST:PORT")
        try:
            url.hostname.encode("idna")  # connecting would fail without naming the address
        except UnicodeError as error:
            raise ValueError(f"{address!r}: there can be no host {url.hostname!r}") from error
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._host, self._port = url.hostname, url.port or (443 if self._tls else 80)
        self._authority = url.netloc.rpartition("@")[2]
        self.base = url.path.rstrip("/")
        """Path of the URL, the prefix of every request's path."""
        self._socket: TimestampedSocket | None = None
        self.answer = Parser(lambda _now_ns, _part: None)
        """The latest response, as far as it has arrived."""

    @property
    def late_ns(self) -> int:
        """Delay between arrival and reading of the last bytes."""
        return 0 if self._socket is None else self._socket.late_ns

    def pause(self) -> None:
        if self._socket is not None:
            self._socket.pause()

    def resume(self) -> None:
        if self._socket is not None:
            self._socket.resume()

    async def open(self) -> bool:
        """Connect unless connected. Returns True if it connected. Raises OSError."""
        if self._socket is not None and self._socket.open:
            return False
        self._socket = await TimestampedSocket.connect(self._host, self._port, self._tls)
        return True

    def close(self) -> None:
        """Close the connection and drop a pending response."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    async def request(
        self,
        method: str,
        path: str,
        body: bytes,
        sink: Arrived,
        headers: Mapping[str, str] | None = None,
        *,
        max_bytes: int = MAX_MESSAGE_BYTES,
    ) -> int:
        """Send a request on the open connection. Returns the status after the whole body has passed through `sink`.

        Raises HttpError, including for a ProtocolError from `sink`. After a cancelled request, the connection must be
        closed.
        """
        assert self._socket is not None
        socket, self.answer = self._socket, Parser(sink, max_bytes=max_bytes)
        answer = self.answer
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def forward(tell: Callable[[], None]) -> None:
            if done.done():
                answer.keep_alive = False
                return
            try:
                tell()
                if answer.complete:
                    done.set_result(None)
            except ProtocolError as error:
                done.set_exception(error)

        socket.arrived = lambda now_ns, data: forward(lambda: answer.feed(now_ns, data))
        socket.ended = lambda reason: forward(lambda: answer.end(reason))
        socket.mark_request()
        socket.write(request_head(method, f"{self.base}{path}", self._authority, len(body), headers) + body)
        try:
            await done
        except ProtocolError as error:
            self.close()
            raise HttpError(str(error)) from None
        if not answer.keep_alive:
            self.close()
        return answer.status


async def fetch(
    address: str,
    path: str,
    *,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    method: str = "GET",
    body: bytes = b"",
) -> tuple[int, bytes]:
    """Send one request on a new connection. Returns status and body, all within `timeout_s`.

    Raises HttpError or OSError without a response, ValueError for an invalid address.
    """
    connection, answer = Connection(address), bytearray()

    async def ask() -> int:
        await connection.open()
        return await connection.request(method, path, body, lambda _now_ns, part: answer.extend(part), headers)

    try:
        return await asyncio.wait_for(ask(), timeout_s), bytes(answer)
    except asyncio.TimeoutError:  # a different class than TimeoutError in Python 3.10
        raise HttpError(f"no complete response within {timeout_s:g} s") from None
    finally:
        connection.close()
