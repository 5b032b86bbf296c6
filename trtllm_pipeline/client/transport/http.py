"""HTTP/1.1 for measurements: one keep-alive connection that passes on every part of a body with its time of arrival.

httpx took 250 µs of processor time per streamed event: above about 60 streams of 20 events a second, the client was
slower than the server. This module implements only what generate and chat endpoints need. Whatever a peer sends results
in a response or an HttpError, within the limits below.
Source of the framing: RFC 9112, sections 4 to 7.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import urlsplit

from trtllm_pipeline.client.transport import ProtocolError
from trtllm_pipeline.client.transport.timestamped_socket import (
    MAX_MESSAGE_BYTES,
    Arrived,
    TimestampedSocket,
)

MAX_HEAD_BYTES: Final = 1 << 16
"""Limit for the header of a response with the interim responses before it, and for its trailer."""
MAX_FIELDS: Final = 256
MAX_LINE_BYTES: Final = 1 << 12
"""Limit for a chunk size line."""

_STATUS_LINE: Final = re.compile(r"HTTP/1\.([01]) ([1-9]\d\d)(?: .*)?", re.ASCII)
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;.*)?", re.DOTALL)


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
        """When the header was complete."""
        self.latest_ns = 0
        """When the latest bytes arrived."""
        self.began = False
        """Whether a byte has arrived."""
        self.complete = False
        self.keep_alive = True
        """Whether another request may follow on this connection."""
        self._sink = sink
        self._max_bytes = max_bytes
        self._rest = b""
        self._take: Callable[[int, bytes, int], int] = self._head
        self._head_bytes = 0
        self._body_bytes = 0
        self._left = 0
        self._to_the_end = False

    def feed(self, now_ns: int, data: bytes) -> None:
        """One read."""
        self.began, self.latest_ns = True, now_ns
        buffer = self._rest + data if self._rest else data
        at = 0
        while not self.complete and at < len(buffer) and (taken := self._take(now_ns, buffer, at)):
            at += taken
        self._rest = buffer[at:]
        if self.complete and self._rest:  # nobody asked for more
            self.keep_alive, self._rest = False, b""

    def end(self, reason: str) -> None:
        """The connection is closed."""
        if self._to_the_end:
            self.complete = True
        elif not self.complete:
            where = f"after {self._body_bytes - self._left} bytes of the body" if self.status else "in the header"
            raise HttpError(f"the connection closed in the middle of the response: {where}" if self.began else reason)

    # Each of these parses one piece of `buffer` at `at` and returns its length; 0 means that more bytes are needed.

    def _head(self, now_ns: int, buffer: bytes, at: int) -> int:
        if not b"HTTP/1.".startswith(buffer[at : at + 7]):
            raise HttpError(f"not an HTTP response: {buffer[at : at + 40]!r}")
        end = buffer.find(b"\r\n\r\n", at)
        if self._head_bytes + (len(buffer) if end < 0 else end) - at > MAX_HEAD_BYTES:
            raise HttpError(f"the response header exceeds {MAX_HEAD_BYTES} bytes")
        if end < 0:
            return 0
        first, *lines = buffer[at:end].decode("latin-1").split("\r\n")
        match = _STATUS_LINE.fullmatch(first)
        if match is None:
            raise HttpError(f"not an HTTP response: {first[:40]!r}")
        fields, status = _fields(lines), int(match[2])
        taken = end + 4 - at
        self._head_bytes += taken
        if status == 101:
            raise HttpError("the server switches to another protocol without being asked to")
        if status < 200:
            return taken
        self.status, self.headers_ns = status, now_ns
        self.keep_alive = match[1] == "1" and "close" not in _listed(fields, "connection")
        self._expect_body(fields)
        return taken

    def _expect_body(self, fields: Mapping[str, list[str]]) -> None:
        encodings, codings = _listed(fields, "content-encoding"), _listed(fields, "transfer-encoding")
        if encodings - {"identity"}:
            raise HttpError(f"the body is encoded as {', '.join(sorted(encodings))}, which was not requested")
        if codings - {"chunked"}:
            raise HttpError(f"the transfer-encoding is {', '.join(sorted(codings))}, expected chunked")
        if codings:
            self._take = self._size
        elif self.status in {204, 304}:
            self.complete = True
        elif lengths := _listed(fields, "content-length"):
            (length,) = lengths if len(lengths) == 1 else ("",)
            if not (length.isascii() and length.isdigit()) or len(length) > 18:
                raise HttpError(
                    f"the content-length is {', '.join(sorted(lengths))[:40]!r}, expected a number of bytes"
                )
            self._expect(int(length))
            self._take, self.complete = self._length, not self._left
        else:
            self._to_the_end, self.keep_alive, self._take = True, False, self._everything

    def _expect(self, count: int) -> None:
        """Expect `count` more bytes of the body."""
        self._left = count
        self._body_bytes += count
        if self._body_bytes > self._max_bytes:
            raise HttpError(f"the body has {self._body_bytes} bytes; the limit is {self._max_bytes}")

    def _size(self, _now_ns: int, buffer: bytes, at: int) -> int:
        end = _line_end(buffer, at, MAX_LINE_BYTES, "the chunk size line")
        if end < 0:
            return 0
        match = _SIZE.fullmatch(buffer, at, end)
        if match is None:
            raise HttpError(f"the chunk size is {buffer[at : min(end, at + 40)]!r}, expected hexadecimal digits")
        self._expect(int(match[1], 16))
        self._take = self._chunk if self._left else self._trailer
        return end + 2 - at

    def _chunk(self, now_ns: int, buffer: bytes, at: int) -> int:
        if self._left:
            return self._part(now_ns, buffer, at)
        if not b"\r\n".startswith(buffer[at : at + 2]):
            raise HttpError("a chunk is longer than its size")
        if len(buffer) < at + 2:
            return 0
        self._take = self._size
        return 2

    def _trailer(self, _now_ns: int, buffer: bytes, at: int) -> int:
        end = _line_end(buffer, at, MAX_HEAD_BYTES - self._head_bytes, "the trailer")
        if end < 0:
            return 0
        self._head_bytes += end + 2 - at
        self.complete = end == at
        return end + 2 - at

    def _length(self, now_ns: int, buffer: bytes, at: int) -> int:
        taken = self._part(now_ns, buffer, at)
        self.complete = not self._left
        return taken

    def _everything(self, now_ns: int, buffer: bytes, at: int) -> int:
        self._expect(len(buffer) - at)
        return self._part(now_ns, buffer, at)

    def _part(self, now_ns: int, buffer: bytes, at: int) -> int:
        """Pass on the available part of the expected bytes."""
        part = buffer[at : at + self._left]
        self._left -= len(part)
        self._sink(now_ns, part)
        return len(part)


def _fields(lines: list[str]) -> dict[str, list[str]]:
    """Values of each header field by its lower-case name."""
    if len(lines) > MAX_FIELDS:
        raise HttpError(f"the answer has {len(lines)} header fields; the limit is {MAX_FIELDS}")
    fields: dict[str, list[str]] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not _NAME.fullmatch(name) or any(each in value for each in "\r\n\0"):
            raise HttpError(f"invalid header line: {line[:40]!r}")
        fields.setdefault(name.lower(), []).append(value.strip(" \t"))
    return fields


def _listed(fields: Mapping[str, list[str]], name: str) -> set[str]:
    """The members of a list-valued field, in lower case."""
    return {part for value in fields.get(name, ()) for each in value.split(",") if (part := each.strip(" \t").lower())}


def _line_end(buffer: bytes, at: int, limit: int, what: str) -> int:
    """End of the line at `at`; -1 if it is not complete yet."""
    end = buffer.find(b"\r\n", at)
    if (len(buffer) if end < 0 else end) - at > limit:
        raise HttpError(f"{what} exceeds {limit} bytes")
    return end


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
            url.hostname.encode("idna")  # as opening it does, which then says nothing of the address
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
        """Delay between arrival and reading of the latest bytes."""
        return 0 if self._socket is None else self._socket.late_ns

    def pause(self) -> None:
        """Read nothing of the response for the moment: its reader is slow."""
        if self._socket is not None:
            self._socket.pause()

    def resume(self) -> None:
        """Read again."""
        if self._socket is not None:
            self._socket.resume()

    async def open(self) -> bool:
        """Connect unless connected; whether that was needed. Raises OSError."""
        if self._socket is not None and self._socket.open:
            return False
        self._socket = await TimestampedSocket.connect(self._host, self._port, self._tls)
        return True

    def close(self) -> None:
        """Close the connection; a pending response is lost."""
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
        """Send a request on the open connection; the status, once the whole body has gone through `sink`.

        Raises HttpError, also for a ProtocolError of `sink`. A request that is cancelled leaves the connection to be closed.
        """
        assert self._socket is not None
        socket, self.answer = self._socket, Parser(sink, max_bytes=max_bytes)
        answer = self.answer
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def told(tell: Callable[[], None]) -> None:
            if done.done():
                answer.keep_alive = False
                return
            try:
                tell()
                if answer.complete:
                    done.set_result(None)
            except ProtocolError as error:
                done.set_exception(error)

        socket.arrived = lambda now_ns, data: told(lambda: answer.feed(now_ns, data))
        socket.ended = lambda reason: told(lambda: answer.end(reason))
        socket.asked()
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
    """Send one request on a connection of its own: status and body of the answer, all within `timeout_s`.

    Raises HttpError or OSError when there is no answer, ValueError for an address that is none.
    """
    connection, answer = Connection(address), bytearray()

    async def ask() -> int:
        await connection.open()
        return await connection.request(method, path, body, lambda _now_ns, part: answer.extend(part), headers)

    try:
        return await asyncio.wait_for(ask(), timeout_s), bytes(answer)
    except asyncio.TimeoutError:  # another class than TimeoutError in Python 3.10
        raise HttpError(f"no complete answer within {timeout_s:g} s") from None
    finally:
        connection.close()
