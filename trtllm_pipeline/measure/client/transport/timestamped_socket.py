"""A TCP connection that knows the arrival time of every read.

The kernel timestamps incoming packets (SO_TIMESTAMPNS) and returns the timestamp with the data. A busy event loop reads
late but records the arrival time, so the client's own load does not count as server latency. If several packets wait,
the timestamp is that of the last one. Without kernel timestamps (TLS, other systems) it is the time of the read.
Source: Linux, Documentation/networking/timestamping.rst; for TCP the timestamp is that of the last byte read.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

# asm-generic/socket.h; Python has no name for it. The control message has the option's number as its type.
_SO_TIMESTAMPNS: Final = 35
_TIMESPEC: Final = struct.Struct("@ll")
_READ_BYTES: Final = 1 << 16
_CONTROL_BYTES: Final = socket.CMSG_SPACE(_TIMESPEC.size)
# An older timestamp means that the wall clock was set, not that the read was late.
_MAX_AGE_NS: Final = 10_000_000_000
_SAME_MOMENT_NS: Final = 5_000

MAX_MESSAGE_BYTES: Final = 1 << 24
"""Limit for anything that is parsed as a whole in any protocol. Text of this size is parsed in less than a second."""
MAX_STREAM_BYTES: Final = 1 << 30
"""Limit for a response that is passed on in parts."""
MAX_UNSENT_BYTES: Final = 1 << 26
"""Limit for data that waits for a peer that does not read."""


Arrived = Callable[[int, bytes], None]
"""(CLOCK_MONOTONIC nanoseconds, bytes) of one read."""
Ended = Callable[[str], None]
"""Called once with the reason when the peer closes or the connection breaks."""


def _both_clocks() -> tuple[int, int]:
    """CLOCK_MONOTONIC and CLOCK_REALTIME at the same moment. Read again if the process was interrupted in between."""
    for _ in range(5):
        before_ns, unix_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        if after_ns - before_ns < _SAME_MOMENT_NS:
            break
    return before_ns, unix_ns


async def _handshake(loop: asyncio.AbstractEventLoop, sock: ssl.SSLSocket) -> None:
    """Not in a thread: one that waits for a silent peer would exceed every timeout."""
    while True:
        ready: asyncio.Future[None] = loop.create_future()
        try:
            return sock.do_handshake()
        except ssl.SSLWantReadError:
            loop.add_reader(sock, _set, ready)
        except ssl.SSLWantWriteError:
            loop.add_writer(sock, _set, ready)
        try:
            await ready
        finally:
            loop.remove_reader(sock)
            loop.remove_writer(sock)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


class TimestampedSocket:
    """An open connection. Set `arrived` and `ended` before the first await."""

    def __init__(self, sock: socket.socket) -> None:
        self.arrived: Arrived = lambda _now_ns, _data: None
        self.ended: Ended = lambda _reason: None
        self.open = True
        self.late_ns = 0
        """Delay between arrival and reading of the last bytes. 0 without kernel timestamps."""
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._unsent = bytearray()
        self._latest_ns = 0
        self._read = self._read_tls if isinstance(sock, ssl.SSLSocket) else self._read_stamped
        self._loop.add_reader(sock, self._readable)

    @classmethod
    async def connect(cls, host: str, port: int, tls: ssl.SSLContext | None = None) -> TimestampedSocket:
        """Connect. Raises OSError."""
        loop = asyncio.get_running_loop()
        try:  # an address needs no thread, unlike a name
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except socket.gaierror:
            addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for index, (family, kind, protocol, _name, address) in enumerate(addresses):
            sock = socket.socket(family, kind, protocol)
            try:
                sock.setblocking(False)
                await loop.sock_connect(sock, address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if tls is not None:
                    sock = tls.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
                    await _handshake(loop, sock)
                else:
                    with suppress(OSError):  # then times of reads are used
                        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
                return cls(sock)
            except BaseException as error:
                sock.close()
                if not isinstance(error, OSError) or index + 1 == len(addresses):
                    raise
        raise OSError(f"cannot resolve {host}")

    def mark_request(self) -> None:
        """Call before sending a request: responses never get an older time, even if the kernel's clock is changed."""
        self._latest_ns = max(self._latest_ns, time.monotonic_ns())

    def write(self, data: bytes) -> None:
        """Send as much as the kernel accepts now, and the rest when possible. `ended` reports a broken connection."""
        if len(self._unsent) + len(data) > MAX_UNSENT_BYTES:
            self._end(f"the server does not read from the connection; {len(self._unsent)} bytes are waiting")
            return
        if self._unsent:
            self._unsent += data
            return
        self._unsent += data[self._send(data) :]
        if self._unsent and self.open:
            self._loop.add_writer(self._sock, self._writable)

    def pause(self) -> None:
        """Pause reading, so that the peer has to wait."""
        if self.open:
            self._loop.remove_reader(self._sock)

    def resume(self) -> None:
        if self.open:
            self._loop.add_reader(self._sock, self._readable)

    def close(self) -> None:
        """Close at once, without a call of `ended`."""
        if self.open:
            self.open = False
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()

    def _send(self, data: bytes | bytearray) -> int:
        try:
            return self._sock.send(data)
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0
        except OSError as error:
            self._end(str(error))
            return len(data)

    def _writable(self) -> None:
        del self._unsent[: self._send(self._unsent)]
        if not self._unsent and self.open:
            self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        try:
            now_ns, data = self._read()
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError as error:
            self._end(str(error))
            return
        if data:
            self.arrived(now_ns, data)
        else:
            self._end("the server closed the connection")

    def _end(self, reason: str) -> None:
        if self.open:
            self.close()
            self.ended(reason)

    def _read_stamped(self) -> tuple[int, bytes]:
        data, control, _flags, _address = self._sock.recvmsg(_READ_BYTES, _CONTROL_BYTES)
        now_ns, unix_ns = _both_clocks()
        self.late_ns = 0
        if control:
            seconds, nanoseconds = _TIMESPEC.unpack(control[0][2])
            age_ns = unix_ns - seconds * 1_000_000_000 - nanoseconds
            if 0 <= age_ns < _MAX_AGE_NS:
                self.late_ns = age_ns
                now_ns -= age_ns
        self._latest_ns = max(self._latest_ns, now_ns)
        return self._latest_ns, data

    def _read_tls(self) -> tuple[int, bytes]:
        # Read all decrypted data: the socket does not become readable again for it.
        assert isinstance(self._sock, ssl.SSLSocket)
        data = self._sock.recv(_READ_BYTES)
        now_ns = time.monotonic_ns()
        while self._sock.pending():
            data += self._sock.recv(self._sock.pending())
        return now_ns, data
