"""gRPC for measurements: messages over HTTP/2, each with its arrival time.

grpc.aio delivers messages late: with 256 streams of 20 events per second, the median delay was 2.5 ms. `Http2` does the
framing of one connection, for client and server. `GrpcCall` is a client's call on its own connection. Anything that a
peer sends results in a message or an Http2Error, within the limits below. Sources: RFC 9113 (HTTP/2), RFC 7541 (header
compression, done by `hpack`), and gRPC's doc/PROTOCOL-HTTP2.md.
"""

from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Literal
from urllib.parse import unquote

import hpack

from trtllm_pipeline.measure.client.transport import ProtocolError
from trtllm_pipeline.measure.client.transport.timestamped_socket import (
    MAX_MESSAGE_BYTES,
    MAX_STREAM_BYTES,
    TimestampedSocket,
)

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PUSH_PROMISE, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = (
    0, 1, 3, 4, 5, 6, 7, 8, 9,
)  # fmt: skip
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
_INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE = 4, 5
_DEFAULT_WINDOW: Final = 65_535
_WINDOW: Final = 2**31 - 1
"""The maximum, so that flow control never slows down a measured server."""
MAX_FRAME_BYTES: Final = 16_384
"""Limit for a received frame. This side never announces a larger one."""
_FINISH_S: Final = 5.0
"""How long to wait for the server to end a call that this side has ended."""
MAX_HEADER_BYTES: Final = 1 << 15
"""Limit for one encoded header block. `hpack` limits the decoded headers to 64 KiB and its table to 4 KiB."""
_OF_A_STREAM: Final = frozenset({_DATA, _HEADERS, _RST_STREAM, _CONTINUATION})
_OF_THE_CONNECTION: Final = frozenset({_SETTINGS, _PING, _GOAWAY})
_SIZES: Final = {_RST_STREAM: 4, _PING: 8, _WINDOW_UPDATE: 4}
_REFUSED_STREAM: Final = 7
STATUS: Final = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
"""Names of gRPC's status codes, by number."""
HTTP_1: Final = "the port speaks HTTP/1.1, not gRPC"

Headers = Sequence[tuple[str, str]]
Kind = Literal["headers", "data", "reset"]


class Http2Error(ProtocolError):
    """The peer closed the connection, did not speak HTTP/2 or gRPC, or exceeded a limit."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def message(data: bytes) -> bytes:
    """An encoded gRPC message, uncompressed."""
    return struct.pack(">BI", 0, len(data)) + data


@dataclass(slots=True)
class _Stream:
    """Data waiting to be sent on a stream, the peer's window, and received bytes not yet granted back."""

    window: int
    unsent: bytearray = field(default_factory=bytearray)
    end: bool = False
    received: int = 0


class Http2:
    """The framing of one connection. `write` sends bytes. `on(now_ns, kind, stream, value, ended)` is called with each
    event.

    The value is decoded headers, the bytes of a data frame, or the error code of a reset. The peer may open streams
    only with `serving`.
    """

    def __init__(
        self,
        write: Callable[[bytes], None],
        on: Callable[[int, Kind, int, Headers | bytes | int, bool], None],
        *,
        serving: bool = False,
    ) -> None:
        self.going = False
        """True if the peer accepts no more streams (GOAWAY)."""
        self._write = write
        self._on = on
        self._serving = serving
        self._rest = b""
        self._encoder, self._decoder = hpack.Encoder(), hpack.Decoder()
        self._block: tuple[int, bool, bytes] | None = None
        self._window, self._initial_window, self._max_frame = _DEFAULT_WINDOW, _DEFAULT_WINDOW, MAX_FRAME_BYTES
        self._received = 0
        self._streams: dict[int, _Stream] = {}

    def start(self) -> None:
        """Announce the maximum windows."""
        settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, _WINDOW)
        grant = struct.pack(">I", _WINDOW - _DEFAULT_WINDOW)
        self._write(frame(_SETTINGS, 0, 0, settings) + frame(_WINDOW_UPDATE, 0, 0, grant))

    def headers(self, stream: int, fields: Headers, *, end: bool = False) -> None:
        """Send headers, or trailers (with `end`, after data). They must fit a frame."""
        outgoing = self._streams.setdefault(stream, _Stream(self._initial_window))
        block = self._encoder.encode(list(fields), huffman=False)
        self._write(frame(_HEADERS, _END_HEADERS | (_END_STREAM if end else 0), stream, block))
        if end:
            outgoing.end = True

    def data(self, stream: int, data: bytes, *, end: bool = False) -> None:
        """Send data. Bytes beyond the peer's window wait for space."""
        outgoing = self._streams.get(stream)
        if outgoing is not None:
            outgoing.unsent += data
            outgoing.end |= end
            self._flush(stream, outgoing)

    def reset(self, stream: int) -> None:
        if self._streams.pop(stream, None) is not None:
            self._write(frame(_RST_STREAM, 0, stream, struct.pack(">I", 8)))

    def forget(self, stream: int) -> None:
        """Forget a stream that has ended on both sides."""
        self._streams.pop(stream, None)

    def feed(self, now_ns: int, data: bytes) -> None:
        """Process one read. Raises Http2Error."""
        self._rest = self._rest + data if self._rest else data
        position = 0
        while len(self._rest) - position >= 9:
            size = int.from_bytes(self._rest[position : position + 3], "big")
            if size > MAX_FRAME_BYTES:
                shown = self._rest[position : position + 9]
                if shown.startswith(b"HTTP/1."):
                    raise Http2Error(HTTP_1)
                raise Http2Error(f"a frame of {size} bytes starts with {shown!r}; the limit is {MAX_FRAME_BYTES}")
            end = position + 9 + size
            if len(self._rest) < end:
                break
            kind, flags, stream = struct.unpack_from(">BBI", self._rest, position + 3)
            try:
                self._frame(now_ns, kind, flags, stream & 0x7FFF_FFFF, self._rest[position + 9 : end])
            except (struct.error, IndexError) as error:
                raise Http2Error("a frame is malformed") from error
            position = end
        self._rest = self._rest[position:]

    def _frame(self, now_ns: int, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if self._block is not None and kind != _CONTINUATION:
            raise Http2Error("a CONTINUATION frame is missing")
        if kind in _OF_A_STREAM if stream == 0 else kind in _OF_THE_CONNECTION:
            raise Http2Error(f"a frame of type {kind} is on stream {stream}")
        if kind in _SIZES and len(payload) != _SIZES[kind]:
            raise Http2Error("a frame is malformed")
        if kind == _DATA:
            self._take(stream, len(payload))
            if flags & _PADDED:
                payload = _unpadded(payload)
            self._on(now_ns, "data", stream, payload, bool(flags & _END_STREAM))
        elif kind == _HEADERS:
            if flags & _PADDED:
                payload = _unpadded(payload)
            if flags & _PRIORITY:
                payload = payload[5:]
            self._header_block(now_ns, flags, (stream, bool(flags & _END_STREAM), payload))
        elif kind == _CONTINUATION:
            if self._block is None or self._block[0] != stream:
                raise Http2Error("a CONTINUATION frame without HEADERS")
            self._header_block(now_ns, flags, (*self._block[:2], self._block[2] + payload))
        elif kind == _SETTINGS and not flags & _ACK:
            self._settings(payload)
        elif kind == _PING and not flags & _ACK:
            self._write(frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW_UPDATE:
            self._grown(stream, int.from_bytes(payload, "big") & 0x7FFF_FFFF)
        elif kind == _RST_STREAM:
            self.forget(stream)
            self._on(now_ns, "reset", stream, int.from_bytes(payload, "big"), True)
        elif kind == _PUSH_PROMISE:
            raise Http2Error("the server sent PUSH_PROMISE, which was not enabled")
        elif kind == _GOAWAY:
            self._goaway(now_ns, payload)

    def _goaway(self, now_ns: int, payload: bytes) -> None:
        last, code = struct.unpack_from(">II", payload)
        if code:
            debug_text = payload[8:208].decode(errors="replace") or payload[4:8].hex()
            raise Http2Error(f"the server sent GOAWAY: {debug_text}")
        self.going = True
        for stream in [number for number in self._streams if number > last & 0x7FFF_FFFF]:
            self.forget(stream)
            self._on(now_ns, "reset", stream, _REFUSED_STREAM, True)

    def _header_block(self, now_ns: int, flags: int, block: tuple[int, bool, bytes]) -> None:
        if len(block[2]) > MAX_HEADER_BYTES:
            raise Http2Error(f"headers exceed {MAX_HEADER_BYTES} bytes")
        if not flags & _END_HEADERS:
            self._block = block
            return
        self._block = None
        stream, ended, data = block
        try:
            # Decode headers of closed streams too: they update the connection's table.
            fields = [(str(name), str(value)) for name, value in self._decoder.decode(data)]
        except (hpack.HPACKError, UnicodeDecodeError) as error:
            cause = re.sub(r"(:| from) <memory at \w+>", "", str(error))
            raise Http2Error(f"cannot decode headers: {cause[:200]}") from error
        if self._serving:
            self._streams.setdefault(stream, _Stream(self._initial_window))
        if stream in self._streams:
            self._on(now_ns, "headers", stream, fields, ended)

    def _settings(self, payload: bytes) -> None:
        for identifier, value in struct.iter_unpack(">HI", payload):
            if identifier == _INITIAL_WINDOW_SIZE:
                if value > _WINDOW:
                    raise Http2Error(f"the server's initial window is {value}; the limit is {_WINDOW}")
                for outgoing in self._streams.values():
                    outgoing.window += value - self._initial_window
                self._initial_window = value
            elif identifier == _MAX_FRAME_SIZE:
                if not MAX_FRAME_BYTES <= value < 1 << 24:
                    raise Http2Error(
                        f"the server's maximum frame size is {value}; it must be at least {MAX_FRAME_BYTES}"
                    )
                self._max_frame = value
        self._write(frame(_SETTINGS, _ACK, 0))
        self._grown(0, 0)

    def _take(self, stream: int, count: int) -> None:
        """Grant the received bytes back once half of a window is used up."""
        self._received += count
        if self._received >= _WINDOW // 2:
            self._write(frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", self._received)))
            self._received = 0
        if (known := self._streams.get(stream)) is not None:
            known.received += count
            if known.received >= _WINDOW // 2:
                self._write(frame(_WINDOW_UPDATE, 0, stream, struct.pack(">I", known.received)))
                known.received = 0

    def _grown(self, stream: int, more: int) -> None:
        if stream == 0:
            self._window += more
        elif stream in self._streams:
            self._streams[stream].window += more
        if self._window > _WINDOW or (stream in self._streams and self._streams[stream].window > _WINDOW):
            raise Http2Error(f"the server's window exceeds {_WINDOW}")
        for number, outgoing in list(self._streams.items()):
            if outgoing.unsent:
                self._flush(number, outgoing)

    def _flush(self, stream: int, outgoing: _Stream) -> None:
        while outgoing.unsent or outgoing.end:
            size = min(len(outgoing.unsent), self._window, outgoing.window, self._max_frame)
            if outgoing.unsent and size <= 0:
                return
            part = bytes(outgoing.unsent[:size])
            del outgoing.unsent[:size]
            self._window -= size
            outgoing.window -= size
            last = outgoing.end and not outgoing.unsent
            self._write(frame(_DATA, _END_STREAM if last else 0, stream, part))
            if last:
                outgoing.end = False


def _unpadded(payload: bytes) -> bytes:
    if payload[0] >= len(payload):
        raise Http2Error("a frame is malformed")
    return payload[1 : len(payload) - payload[0]]


class Messages:
    """Extracts gRPC messages from a stream's data."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Messages completed by `data`. Raises Http2Error for compressed messages, which were not requested."""
        rest = self._rest
        rest += data
        messages = []
        position = 0
        while len(rest) - position >= 5:
            compressed, size = struct.unpack_from(">BI", rest, position)
            if compressed:
                raise Http2Error("the server sent a compressed message")
            if size > MAX_MESSAGE_BYTES:
                raise Http2Error(f"a message has {size} bytes; the limit is {MAX_MESSAGE_BYTES}")
            end = position + 5 + size
            if len(rest) < end:
                break
            messages.append(bytes(rest[position + 5 : end]))
            position = end
        del rest[:position]
        return messages


class GrpcCall:
    """A client's call on its own connection, which stays open for the next call after a success.

    `arrived(now_ns, message)` is called with each message. `ended(reason)` is called when the call has ended: with None
    if its status is OK, otherwise with the reason.
    """

    def __init__(self, address: str) -> None:
        self.arrived: Callable[[int, bytes], None] = lambda _now_ns, _message: None
        self.ended: Callable[[str | None], None] = lambda _reason: None
        self.open = False
        """True while a call is in progress."""
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._socket: TimestampedSocket | None = None
        self._http2: Http2
        self._stream = -1
        self._received = 0
        self._broken_by = ""

    @property
    def late_ns(self) -> int:
        """Delay between arrival and reading of the last bytes."""
        return 0 if self._socket is None else self._socket.late_ns

    async def connect(self) -> bool:
        """Connect unless connected. Returns True if it connected. Raises Http2Error."""
        if self._socket is not None and self._socket.open:
            if not self._http2.going:
                return False
            self.close()
        try:
            self._socket = socket = await TimestampedSocket.connect(self._host.strip("[]"), self._port)
        except OSError as error:
            raise Http2Error(f"{STATUS[14]}: {self._host}:{self._port}: {error}") from error
        self._http2, self._stream = Http2(socket.write, self._on), -1
        socket.arrived, socket.ended = self._feed, self._broken
        socket.write(PREFACE)
        self._http2.start()
        return True

    def start(self, path: str) -> None:
        """Start a call of `path` on the open connection."""
        self._stream += 2
        self._messages, self.open = Messages(), True
        self._http2.headers(
            self._stream,
            (
                (":method", "POST"),
                (":scheme", "http"),
                (":path", path),
                (":authority", f"{self._host}:{self._port}"),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
                ("user-agent", "trtllm-pipeline"),
            ),
        )

    def send(self, data: bytes, *, last: bool = False) -> None:
        """Send one message of the call. The size limit applies to the response to each message: a stream may stay open
        for days.

        Raises Http2Error if the connection has broken since `connect`, even without a call of `ended`.
        """
        socket = self._socket
        assert socket is not None
        self._received = 0
        socket.mark_request()
        self._http2.data(self._stream, message(data), end=last)
        if not socket.open:
            self.open = False
            raise Http2Error(self._broken_by)

    async def finish(self) -> None:
        """End a call whose requests have all been answered: first this side, then the server's, then the connection.

        Otherwise the server would see the end as a cancellation. It becomes one if the server does not end the call in
        time.
        """
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.arrived = lambda _now_ns, _message: None
        self.ended = lambda _reason: None if ended.done() else ended.set_result(None)
        try:
            if self.open:
                self._http2.data(self._stream, b"", end=True)
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(ended, _FINISH_S)
        finally:
            self.close()

    def close(self) -> None:
        """End the call and the connection at once. A call in progress is cancelled."""
        self.open = False
        if self._socket is not None:
            if self._socket.open:
                self._http2.reset(self._stream)
            self._socket.close()
        self._socket = None

    def _feed(self, now_ns: int, data: bytes) -> None:
        try:
            self._http2.feed(now_ns, data)
        except ProtocolError as error:
            self.close()
            self.ended(f"{STATUS[13]}: {error}")

    def _broken(self, reason: str) -> None:
        self._broken_by = f"{STATUS[14]}: {self._host}:{self._port}: {reason}"
        if self.open:
            self.open = False
            self.ended(self._broken_by)

    def _on(self, now_ns: int, kind: Kind, stream: int, value: Headers | bytes | int, ended: bool) -> None:
        if stream != self._stream or not self.open:
            return
        if kind == "data":
            assert isinstance(value, bytes)
            self._received += len(value)
            if self._received > MAX_STREAM_BYTES:
                raise Http2Error(f"the response has {self._received} bytes so far; the limit is {MAX_STREAM_BYTES}")
            for message in self._messages.feed(value):
                self.arrived(now_ns, message)
        fields = {} if isinstance(value, (bytes, int)) else dict(value)
        if not ended and fields.get(":status", "200") == "200":
            return
        self.open = False
        self._http2.forget(stream)
        if fields:
            self.ended(_status(fields))
        else:
            self.ended(f"{STATUS[14]}: the stream ended without a status ({kind} {value!r:.40})")


def _status(trailers: dict[str, str]) -> str | None:
    """The error of a finished call. None for status OK."""
    code = trailers.get("grpc-status", "2")
    if code == "0":
        return None
    name = dict(zip(map(str, range(len(STATUS))), STATUS, strict=True)).get(code, f"status {code[:20]}")
    message = unquote(trailers.get("grpc-message", "")) or f"HTTP status {trailers.get(':status')}"
    return f"{name}: {message[:1000]}"


async def unary(call: GrpcCall, path: str, data: bytes) -> tuple[int, bytes]:
    """Send one message to `path` on an open connection. Returns arrival time and response. Raises Http2Error."""
    call.start(path)
    done: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
    answers: list[tuple[int, bytes]] = []

    def arrived(now_ns: int, answer: bytes) -> None:
        if answers:
            raise Http2Error(f"the server sent a second message for {path}, which has one")
        answers.append((now_ns, answer))

    call.arrived = arrived
    call.ended = lambda reason: None if done.done() else done.set_result(reason)
    call.send(data, last=True)
    reason = await done
    if reason is not None or not answers:
        raise Http2Error(reason or "the server sent no message")
    return answers[0]
