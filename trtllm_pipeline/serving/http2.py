"""gRPC for measuring: messages over HTTP/2, each with the time it arrived.

grpc.aio hands a message on long after it came: with 256 streams of 20 events a second the median was 2.5 ms late.
`Http2` frames one connection, for either side; `GrpcCall` is a client's call on a connection of its own.
Sources: RFC 9113 (HTTP/2), RFC 7541 (header compression, done by `hpack`), and gRPC's doc/PROTOCOL-HTTP2.md.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal
from urllib.parse import unquote

import hpack

from trtllm_pipeline.serving.wire import Wire

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PUSH_PROMISE, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = (
    0, 1, 3, 4, 5, 6, 7, 8, 9,
)  # fmt: skip
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
_INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE = 4, 5
_DEFAULT_WINDOW: Final = 65_535
_WINDOW: Final = 2**31 - 1
"""Largest there is: what a measured server sends is never held back."""
STATUS: Final = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
"""Names of gRPC's status codes, by number."""

Headers = Sequence[tuple[str, str]]
Kind = Literal["headers", "data", "reset"]


class Http2Error(Exception):
    """The peer broke off, or what it says is not HTTP/2."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame as it travels."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def message(data: bytes) -> bytes:
    """A gRPC message as it travels: not compressed."""
    return struct.pack(">BI", 0, len(data)) + data


@dataclass(slots=True)
class _Outgoing:
    """What a stream still has to send, and how much of it the peer takes."""

    window: int
    unsent: bytearray = field(default_factory=bytearray)
    end: bool = False


class Http2:
    """The framing of one connection. `write` sends bytes; `on(now_ns, kind, stream, value, ended)` is told what came.

    The value is decoded headers, the bytes of a data frame, or the error code of a reset.
    """

    def __init__(
        self, write: Callable[[bytes], None], on: Callable[[int, Kind, int, Headers | bytes | int, bool], None]
    ) -> None:
        self._write = write
        self._on = on
        self._rest = b""
        self._encoder, self._decoder = hpack.Encoder(), hpack.Decoder()
        self._block: tuple[int, bool, bytes] | None = None
        self._window, self._initial_window, self._max_frame = _DEFAULT_WINDOW, _DEFAULT_WINDOW, 16_384
        self._received = 0
        self._streams: dict[int, _Outgoing] = {}

    def start(self) -> None:
        """Say what this side takes: as much as there is."""
        settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, _WINDOW)
        grant = struct.pack(">I", _WINDOW - _DEFAULT_WINDOW)
        self._write(frame(_SETTINGS, 0, 0, settings) + frame(_WINDOW_UPDATE, 0, 0, grant))

    def headers(self, stream: int, fields: Headers, *, end: bool = False) -> None:
        """Send headers, or with `end` and data before them, trailers. They fit a frame."""
        outgoing = self._streams.setdefault(stream, _Outgoing(self._initial_window))
        block = self._encoder.encode(list(fields), huffman=False)
        self._write(frame(_HEADERS, _END_HEADERS | (_END_STREAM if end else 0), stream, block))
        if end:
            outgoing.end = True

    def data(self, stream: int, data: bytes, *, end: bool = False) -> None:
        """Send data, the part beyond the peer's window when it has room."""
        outgoing = self._streams.get(stream)
        if outgoing is not None:
            outgoing.unsent += data
            outgoing.end |= end
            self._flush(stream, outgoing)

    def reset(self, stream: int) -> None:
        """Give a stream up."""
        if self._streams.pop(stream, None) is not None:
            self._write(frame(_RST_STREAM, 0, stream, struct.pack(">I", 8)))

    def forget(self, stream: int) -> None:
        """A stream has ended on both sides."""
        self._streams.pop(stream, None)

    def feed(self, now_ns: int, data: bytes) -> None:
        """One read. Raises Http2Error."""
        self._rest = self._rest + data if self._rest else data
        position = 0
        while len(self._rest) - position >= 9:
            size = int.from_bytes(self._rest[position : position + 3], "big")
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
            raise Http2Error("headers were not continued")
        if kind == _DATA:
            self._received += len(payload)
            if self._received >= _WINDOW // 2:
                self._grant(stream)
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
                raise Http2Error("headers are continued that did not begin")
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
        elif kind == _GOAWAY and int.from_bytes(payload[4:8], "big"):
            raise Http2Error(f"the server sent GOAWAY: {payload[8:].decode(errors='replace') or payload[4:8].hex()}")

    def _header_block(self, now_ns: int, flags: int, block: tuple[int, bool, bytes]) -> None:
        if not flags & _END_HEADERS:
            self._block = block
            return
        self._block = None
        stream, ended, data = block
        try:
            fields = [(str(name), str(value)) for name, value in self._decoder.decode(data)]
        except (hpack.HPACKError, UnicodeDecodeError) as error:
            raise Http2Error(f"headers cannot be read: {error}") from error
        self._streams.setdefault(stream, _Outgoing(self._initial_window))
        self._on(now_ns, "headers", stream, fields, ended)

    def _settings(self, payload: bytes) -> None:
        for identifier, value in struct.iter_unpack(">HI", payload):
            if identifier == _INITIAL_WINDOW_SIZE:
                for outgoing in self._streams.values():
                    outgoing.window += value - self._initial_window
                self._initial_window = value
            elif identifier == _MAX_FRAME_SIZE:
                self._max_frame = value
        self._write(frame(_SETTINGS, _ACK, 0))
        self._grown(0, 0)

    def _grant(self, stream: int) -> None:
        more = struct.pack(">I", self._received)
        self._write(frame(_WINDOW_UPDATE, 0, 0, more) + frame(_WINDOW_UPDATE, 0, stream, more))
        self._received = 0

    def _grown(self, stream: int, more: int) -> None:
        if stream == 0:
            self._window += more
        elif stream in self._streams:
            self._streams[stream].window += more
        for number, outgoing in list(self._streams.items()):
            if outgoing.unsent:
                self._flush(number, outgoing)

    def _flush(self, stream: int, outgoing: _Outgoing) -> None:
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
    """Takes gRPC messages out of a stream's data."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Messages that `data` completes. Raises Http2Error for compressed ones, which were not asked for."""
        self._rest = self._rest + data if self._rest else data
        found = []
        position = 0
        while len(self._rest) - position >= 5:
            compressed, size = struct.unpack_from(">BI", self._rest, position)
            if compressed:
                raise Http2Error("the server sent a compressed message")
            end = position + 5 + size
            if len(self._rest) < end:
                break
            found.append(self._rest[position + 5 : end])
            position = end
        self._rest = self._rest[position:]
        return found


class GrpcCall:
    """A client's call on a connection of its own, kept for the next call when it ends well.

    `arrived(now_ns, message)` gets each message; `ended(reason)` is called when the call has ended, with None when its
    status is OK, else with words.
    """

    def __init__(self, address: str) -> None:
        self.arrived: Callable[[int, bytes], None] = lambda _now_ns, _message: None
        self.ended: Callable[[str | None], None] = lambda _reason: None
        self.open = False
        """A call is under way."""
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._wire: Wire | None = None
        self._stream = -1

    @property
    def late_ns(self) -> int:
        """How long after their arrival the latest bytes were read."""
        return 0 if self._wire is None else self._wire.late_ns

    async def connect(self) -> bool:
        """Connect unless connected; whether that was needed. Raises Http2Error."""
        if self._wire is not None and self._wire.open:
            return False
        try:
            self._wire = wire = await Wire.connect(self._host.strip("[]"), self._port)
        except OSError as error:
            raise Http2Error(f"{STATUS[14]}: {self._host}:{self._port}: {error}") from error
        self._http2, self._stream = Http2(wire.write, self._on), -1
        wire.arrived, wire.ended = self._feed, self._broken
        wire.write(PREFACE)
        self._http2.start()
        return True

    def start(self, path: str) -> None:
        """Begin a call of `path` on the open connection."""
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
        """Send one message of the call."""
        self._http2.data(self._stream, message(data), end=last)

    def close(self) -> None:
        """End the call and the connection."""
        self.open = False
        if self._wire is not None:
            if self._wire.open:
                self._http2.reset(self._stream)
            self._wire.close()
        self._wire = None

    def _feed(self, now_ns: int, data: bytes) -> None:
        try:
            self._http2.feed(now_ns, data)
        except Http2Error as error:
            self.close()
            self.ended(f"{STATUS[13]}: {error}")

    def _broken(self, reason: str) -> None:
        if self.open:
            self.open = False
            self.ended(f"{STATUS[14]}: {self._host}:{self._port}: {reason}")

    def _on(self, now_ns: int, kind: Kind, stream: int, value: Headers | bytes | int, ended: bool) -> None:
        if stream != self._stream or not self.open:
            return
        if kind == "data":
            assert isinstance(value, bytes)
            for found in self._messages.feed(value):
                self.arrived(now_ns, found)
        if not ended:
            return
        self.open = False
        self._http2.forget(stream)
        if kind == "headers":
            assert not isinstance(value, (bytes, int))
            self.ended(_status(dict(value)))
        else:
            self.ended(f"{STATUS[14]}: the stream ended without a status ({kind} {value!r:.40})")


def _status(trailers: dict[str, str]) -> str | None:
    """Words for a call's end, None when it went well."""
    code = trailers.get("grpc-status", "2")
    if code == "0":
        return None
    name = STATUS[int(code)] if code.isdigit() and int(code) < len(STATUS) else f"status {code}"
    said = unquote(trailers.get("grpc-message", "")) or f"HTTP status {trailers.get(':status')}"
    return f"{name}: {said}"


async def unary(call: GrpcCall, path: str, data: bytes) -> tuple[int, bytes]:
    """One message to `path` on an open connection, and the one that comes back with its time.

    Raises Http2Error with the status otherwise.
    """
    call.start(path)
    done: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
    answers: list[tuple[int, bytes]] = []
    call.arrived = lambda now_ns, answer: answers.append((now_ns, answer))
    call.ended = lambda reason: None if done.done() else done.set_result(reason)
    call.send(data, last=True)
    reason = await done
    if reason is not None or not answers:
        raise Http2Error(reason or "there was no answer")
    return answers[0]
