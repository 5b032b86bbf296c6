"""HTTP/1.1 for measuring: one keep-alive connection, every part of a body handed on with the time it arrived.

httpx took 250 µs of processor time for each streamed event, so that from about 60 streams of 20 events a second on
the client was slower than the server it measured. This does what generate and chat endpoints need and no more.
Source of the framing: RFC 9112, sections 6 and 7.1.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import urlsplit

from trtllm_pipeline.serving.wire import Arrived, Wire

_MAX_HEAD_BYTES: Final = 1 << 16


class HttpError(Exception):
    """The peer broke off, or what it says is not HTTP/1.1."""


class Connection:
    """A connection to `address` (host:port or a URL), opened when it is first needed and again after it was closed."""

    def __init__(self, address: str) -> None:
        url = urlsplit(address if "://" in address else f"http://{address}")
        if url.scheme not in {"http", "https"} or url.hostname is None:
            raise ValueError(f"{address!r} is not http://HOST:PORT")
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._host, self._port = url.hostname, url.port or (443 if self._tls else 80)
        self._authority = url.netloc.rpartition("@")[2]
        self.base = url.path.rstrip("/")
        """Path of the URL, put before that of every request."""
        self._wire: Wire | None = None
        self.headers_ns: int | None = None
        """When the head of the latest answer was complete."""
        self.latest_ns = 0
        """When the latest bytes of its body arrived."""
        self.status = 0
        """Its status, as soon as the head is complete."""

    @property
    def late_ns(self) -> int:
        """How long after their arrival the latest bytes were read."""
        return 0 if self._wire is None else self._wire.late_ns

    async def open(self) -> bool:
        """Connect unless connected; whether that was needed. Raises OSError."""
        if self._wire is not None and self._wire.open:
            return False
        self._wire = await Wire.connect(self._host, self._port, self._tls)
        return True

    def close(self) -> None:
        """Close; anything under way is lost."""
        if self._wire is not None:
            self._wire.close()
        self._wire = None

    async def request(
        self, method: str, path: str, body: bytes, sink: Arrived, headers: Mapping[str, str] | None = None
    ) -> int:
        """Send a request on the open connection; the status, once the whole body has gone through `sink`.

        Raises HttpError. A request that is cancelled leaves the connection to be closed.
        """
        assert self._wire is not None
        wire, self.headers_ns, self.status = self._wire, None, 0
        answer = _Answer(self, sink, asyncio.get_running_loop().create_future())
        wire.arrived, wire.ended = answer.feed, answer.end
        fields = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        wire.write(
            f"{method} {self.base}{path} HTTP/1.1\r\nHost: {self._authority}\r\n{fields}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        try:
            status = await answer.done
        except HttpError as error:
            self.close()
            raise HttpError(f"{self._host}:{self._port}: {error}") from None
        if not answer.keep_alive:
            self.close()
        return status


class _Answer:
    """Takes the bytes of one answer apart as they come."""

    def __init__(self, connection: Connection, sink: Arrived, done: asyncio.Future[int]) -> None:
        self.done = done
        self.keep_alive = True
        self._connection = connection
        self._sink = sink
        self._rest = b""
        self._take: Callable[[int], bool] = self._head
        self._left = 0
        self._to_the_end = False

    def feed(self, now_ns: int, data: bytes) -> None:
        """One read."""
        if self.done.done():
            self.keep_alive = False
            return
        self._connection.latest_ns = now_ns
        self._rest = self._rest + data if self._rest else data
        try:
            while self._rest and not self.done.done() and self._take(now_ns):
                pass
        except (ValueError, IndexError) as error:
            self.done.set_exception(HttpError(f"this is no HTTP answer: {error}"))

    def end(self, reason: str) -> None:
        """No more will come."""
        if self.done.done():
            return
        if self._to_the_end:
            self.done.set_result(self._connection.status)
        else:
            self.done.set_exception(HttpError("the answer broke off" if self._connection.status else reason))

    # Each takes one piece off `_rest`; False when it needs more bytes first.

    def _head(self, now_ns: int) -> bool:
        head, blank, rest = self._rest.partition(b"\r\n\r\n")
        if not blank:
            if len(head) > _MAX_HEAD_BYTES:
                raise ValueError("its head does not end")
            return False
        lines = head.decode("latin-1").split("\r\n")
        if not lines[0].startswith("HTTP/1."):
            raise ValueError(repr(lines[0][:80]))
        self._rest, status = rest, int(lines[0].split(" ", 2)[1])
        if 100 <= status < 200:
            return True
        self._connection.status, self._connection.headers_ns = status, now_ns
        fields = {name.lower(): value.strip().lower() for name, _, value in (line.partition(":") for line in lines[1:])}
        self.keep_alive = fields.get("connection") != "close" and not lines[0].startswith("HTTP/1.0")
        if fields.get("transfer-encoding") == "chunked":
            self._take = self._size
        elif "content-length" in fields or status in {204, 304}:
            self._left, self._take = int(fields.get("content-length", "0")), self._length
            if not self._left:
                self.done.set_result(status)
        else:
            self._to_the_end, self.keep_alive, self._take = True, False, self._everything
        return True

    def _size(self, _now_ns: int) -> bool:
        line, end, rest = self._rest.partition(b"\r\n")
        if not end:
            return False
        self._left, self._rest = int(line.partition(b";")[0], 16), rest
        self._take = self._chunk if self._left else self._trailer
        return True

    def _chunk(self, now_ns: int) -> bool:
        if self._left:
            part, self._rest = self._rest[: self._left], self._rest[self._left :]
            self._left -= len(part)
            self._sink(now_ns, part)
            return True
        if len(self._rest) < 2:
            return False
        if self._rest[:2] != b"\r\n":
            raise ValueError("a chunk is longer than it says")
        self._rest, self._take = self._rest[2:], self._size
        return True

    def _trailer(self, _now_ns: int) -> bool:
        line, end, rest = self._rest.partition(b"\r\n")
        if not end:
            return False
        self._rest = rest
        if not line:
            self.done.set_result(self._connection.status)
        return True

    def _length(self, now_ns: int) -> bool:
        part, self._rest = self._rest[: self._left], self._rest[self._left :]
        self._left -= len(part)
        self._sink(now_ns, part)
        if not self._left:
            self.done.set_result(self._connection.status)
        return True

    def _everything(self, now_ns: int) -> bool:
        part, self._rest = self._rest, b""
        self._sink(now_ns, part)
        return True
