"""HTTP/1.1 for measuring: one keep-alive connection, every part of a body handed on as it arrives.

httpx took 250 µs of processor time for each streamed event, so that from about 60 streams of 20 events a second on
the client was slower than the server it measured. This does what Triton's generate endpoints need and no more.
Source of the framing: RFC 9112, sections 6 and 7.1.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

CHUNK_BYTES: Final = 1 << 16


class HttpError(Exception):
    """The peer broke off, or what it says is not HTTP/1.1."""


class Connection:
    """A connection to `address` (host:port), opened when it is first needed and again after it was closed."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        """Connect unless connected. Raises OSError."""
        if self._reader is None or self._writer is None or self._reader.at_eof():
            self.close()
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port)

    def close(self) -> None:
        """Close; anything under way is lost."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    async def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, AsyncIterator[bytes]]:
        """Send a request on the open connection; the status and the parts of the body, which must be read to its end.

        Raises OSError or HttpError, as does reading the parts.
        """
        assert self._reader is not None
        assert self._writer is not None
        self._writer.write(
            f"{method} {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        try:
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            status = int(head[0].split(" ", 2)[1])
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, IndexError) as error:
            self.close()
            raise HttpError(f"no HTTP answer from {self._host}:{self._port}: {error}") from error
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        return status, self._body(self._reader, fields)

    async def _body(self, reader: asyncio.StreamReader, fields: dict[str, str]) -> AsyncIterator[bytes]:
        try:
            if fields.get("transfer-encoding", "").lower() == "chunked":
                while size := int((await reader.readline()).split(b";")[0], 16):
                    yield (await reader.readexactly(size + 2))[:-2]
                while (await reader.readline()).strip():
                    pass  # trailer fields
            else:
                left = int(fields.get("content-length", "0"))
                while left:
                    part = await reader.read(min(left, CHUNK_BYTES))
                    if not part:
                        raise asyncio.IncompleteReadError(b"", left)
                    left -= len(part)
                    yield part
        except (asyncio.IncompleteReadError, ValueError) as error:
            self.close()
            raise HttpError(f"the answer from {self._host}:{self._port} broke off: {error}") from error
        if fields.get("connection", "").lower() == "close":
            self.close()
