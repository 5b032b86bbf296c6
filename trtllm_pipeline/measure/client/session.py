"""Requests to a model and their responses over any protocol. A session sends one request at a time and times the response."""

from __future__ import annotations

import asyncio
import sys
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from trtllm_pipeline.base import FailureClass, ServerError
from trtllm_pipeline.measure.client import fields
from trtllm_pipeline.measure.client.transport import ProtocolError
from trtllm_pipeline.measure.client.transport.http import Connection, HttpError, fetch
from trtllm_pipeline.measure.client.transport.timestamped_socket import MAX_MESSAGE_BYTES, MAX_STREAM_BYTES

_SPARE_MESSAGES: Final = 1 << 12
_MESSAGES_PER_TOKEN: Final = 64
"""Enough messages per token for several choices, a role and usage, in addition to the spare ones."""


class InputTensor(NamedTuple):
    """An input of several dimensions, as bytes of the model's data type. Only gRPC supports it."""

    shape: tuple[int, ...]
    """Without the batch dimension."""
    values: bytes


Option = bool | int | float | str | Sequence[str] | Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A text generation request. `options` are additional input tensors by name, such as `{"top_k": 1}`."""

    text: str
    max_tokens: int
    options: Mapping[str, Option | InputTensor] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()
    """The same as chat messages, for chat endpoints."""


def most_tokens(max_tokens: int) -> int:
    """Upper limit for the tokens or messages of a response to a request for `max_tokens`, including several choices."""
    return _SPARE_MESSAGES + _MESSAGES_PER_TOKEN * max_tokens


class TextChunk(NamedTuple):
    """A response that contained text."""

    time_ns: int
    text: str
    tokens: int | None
    """Output tokens of the request so far, as counted by the server; None if it does not count."""
    reasoning: bool = False


@dataclass(slots=True)
class Answer:
    """Everything observed about one request. Times are CLOCK_MONOTONIC nanoseconds. None means that the event did not
    occur.

    The generated text is the joined texts of `events`. `output_tokens` is the server's count for all of it, including
    tokens without text, which may arrive after the last event. A failed request has `error` and keeps the data received
    before.
    """

    sent_ns: int = 0
    connected_ns: int | None = None
    """When the connection was opened, if this request had to connect. It precedes `sent_ns`."""
    headers_ns: int | None = None
    """HTTP: when the header was complete."""
    first_byte_ns: int | None = None
    """First bytes of the body, or first gRPC message."""
    first_event_ns: int | None = None
    """First whole response, with or without text."""
    role_ns: int | None = None
    """OpenAI chat: the message that only has the role."""
    silent_ns: int | None = None
    """Arrival of the first chunk without text before the first text, except the role's chunk."""
    silent: int = 0
    """Number of these chunks."""
    unread: str | None = None
    """OpenAI: an unknown field with strings in these chunks, possibly generated text."""
    events: list[TextChunk] = field(default_factory=list)
    usage_ns: int | None = None
    """OpenAI: the message with the server's counts."""
    output_tokens: int | None = None
    input_tokens: int | None = None
    """Input tokens as counted by the server."""
    cached_tokens: int | None = None
    """Input tokens found in the server's KV cache."""
    total_tokens: int | None = None
    """OpenAI: sum of input and output tokens from the server."""
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    """Accepted draft tokens, if `return_perf_metrics` was requested and the server reports them."""
    finish_reason: str | None = None
    """The server's finish reason, if it sends one: stop, length, ..."""
    end_ns: int = 0
    log_probs: list[float] = field(default_factory=list)
    """Log probabilities of the latest chunk's tokens, if `return_log_probs` was requested."""
    top_log_probs: list[list[tuple[int, float]]] = field(default_factory=list)
    """The most likely tokens at each position of the latest chunk, if `return_top_log_probs` was requested: id, log probability."""
    late_ns: int = 0
    """Longest delay between arrival and reading of this response's bytes, caused by load on the client. A single event keeps
    its arrival time. Several events in one read get that of the last."""
    error: str | None = None
    timed_out: bool = False

    @property
    def text(self) -> str:
        """The generated text without reasoning."""
        return "".join(event.text for event in self.events if not event.reasoning)

    def arrived(self, now_ns: int, late_ns: int) -> None:
        """Record the arrival of bytes of a body."""
        if self.first_byte_ns is None:
            self.first_byte_ns = now_ns
        if late_ns > self.late_ns:
            self.late_ns = late_ns

    def began(self, now_ns: int) -> None:
        """Record the arrival of a response."""
        if self.first_byte_ns is None:
            self.first_byte_ns = now_ns
        if self.first_event_ns is None:
            self.first_event_ns = now_ns

    def received(self, now_ns: int, text: str, tokens: int | None, *, reasoning: bool = False) -> None:
        """Record one response, with or without text, and the server's count of its tokens."""
        self.began(now_ns)
        if tokens is not None:
            self.output_tokens = (self.output_tokens or 0) + tokens
        if text:
            self.events.append(TextChunk(now_ns, text, None if tokens is None else self.output_tokens, reasoning))
        elif not self.events:
            self.silent_ns = now_ns if self.silent_ns is None else self.silent_ns
            self.silent += 1

    def whole(self) -> None:
        """Record the end of the response. Only called if the protocol marks the end separately from the last chunk."""


class BaseClient(ABC):
    """Opens sessions to a model, one per request in flight, and closes them at its end. An async context manager."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._sessions: list[Session] = []
        self._closing: set[asyncio.Task[None]] = set()

    async def __aexit__(self, *_error: object) -> None:
        await asyncio.gather(*(session.close() for session in self._sessions))

    def session(self) -> Session:
        """A new session, closed with the client."""
        self._sessions.append(self._new_session())
        return self._sessions[-1]

    def drop(self, session: Session) -> None:
        """Drop an idle session. Its connection is closed soon."""
        self._sessions.remove(session)
        closing = asyncio.get_running_loop().create_task(session.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    @abstractmethod
    def _new_session(self) -> Session: ...

    async def _get(self, address: str, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        """Status and body of a GET request. Raises ServerError without a response."""
        try:
            return await fetch(address, path, timeout_s=self.timeout_s, headers=headers)
        except ValueError as error:
            raise ServerError(str(error), failure=FailureClass.USER) from error
        except (OSError, HttpError) as error:
            raise ServerError(
                f"no response from {address}: {error}",
                failure=FailureClass.TRANSIENT,
                hint="check that the server is running and that this is its address",
            ) from error


class Session(ABC):
    """One request at a time over one protocol. Errors of the server and the network are in `Answer.error`, never raised."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._messages = self._asked_tokens = 0

    async def open(self) -> None:
        """Connect. Errors appear with the first request."""
        with suppress(ProtocolError, OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._connect(), self._timeout_s)

    @abstractmethod
    async def _connect(self) -> bool: ...

    async def generate(self, request: GenerationRequest, answer: Answer | None = None) -> Answer:
        """Send `request` and wait for the complete response.

        A given `answer` of a subclass sees each response in `received` when it arrives. Call `cancel` after a cancelled
        call.
        """
        answer = Answer() if answer is None else answer
        message = self._encode(request)
        self._messages, self._asked_tokens = 0, request.max_tokens
        try:
            await _within(self._timeout_s, self._exchange(message, answer))
        except asyncio.TimeoutError:  # a different class than TimeoutError in Python 3.10
            answer.error = f"no complete response within {self._timeout_s:g} s: {_so_far(answer)}"
            answer.timed_out = True
        except (ProtocolError, OSError) as error:
            answer.error = str(error) or type(error).__name__
        answer.end_ns = time.monotonic_ns()
        answer.sent_ns = answer.sent_ns or answer.end_ns
        if max(answer.output_tokens or 0, *(event.tokens or 0 for event in answer.events), 0) > most_tokens(
            request.max_tokens
        ):
            answer.error = (
                f"the server counts {answer.output_tokens} tokens in a response limited to {request.max_tokens}"
            )
            answer.events = [event._replace(tokens=None) for event in answer.events]
            answer.output_tokens = None
        answer.error = answer.error and fields.shortened(answer.error)
        if answer.error is not None:
            await self.close()
        return answer

    def _count_message(self) -> None:
        """Count a message of the response. Raises ProtocolError if there are too many for any response."""
        self._messages += 1
        most = most_tokens(self._asked_tokens)
        if self._messages > most:
            raise ProtocolError(
                f"the server sent more than {most} messages for a response of {self._asked_tokens} tokens"
            )

    @abstractmethod
    def _encode(self, request: GenerationRequest) -> bytes: ...

    @abstractmethod
    async def _exchange(self, message: bytes, answer: Answer) -> None: ...

    async def cancel(self) -> None:
        """End the request whose `generate` was cancelled, also on the server if the protocol supports it."""
        await self.close()

    @abstractmethod
    async def close(self) -> None:
        """Release resources kept between requests."""


async def _within(timeout_s: float, work: Awaitable[None]) -> None:
    """asyncio.wait_for, which costs a task before Python 3.12. Raises asyncio.TimeoutError."""
    if sys.version_info < (3, 11):
        return await asyncio.wait_for(work, timeout_s)
    async with asyncio.timeout(timeout_s):
        return await work


def _so_far(answer: Answer) -> str:
    """Progress of an incomplete response, in words."""
    if not answer.sent_ns:
        return "not connected"
    if answer.events:
        ago_s = (time.monotonic_ns() - answer.events[-1].time_ns) / 1e9
        return f"received {len(answer.events)} chunks, the last {ago_s:.1f} s ago"
    if answer.first_byte_ns is not None:
        return "received data but no text"
    return "received nothing" if answer.headers_ns is None else "received headers but no body"


class HttpSession(Session):
    """POST of JSON. The response is JSON, or with `stream` server-sent events of JSON."""

    def __init__(self, address: str, path: str, *, stream: bool, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._connection = Connection(address)
        self._path = path
        self._stream = stream
        self._headers: dict[str, str] = {}

    async def _connect(self) -> bool:
        return await self._connection.open()

    async def _exchange(self, message: bytes, answer: Answer) -> None:
        connection, events, whole = self._connection, ServerSentEvents(), bytearray()

        async def post() -> int:
            answer.sent_ns = time.monotonic_ns()
            try:
                limit = MAX_STREAM_BYTES if self._stream else MAX_MESSAGE_BYTES
                return await connection.request("POST", self._path, message, arrived, self._headers, max_bytes=limit)
            finally:
                answer.headers_ns = connection.answer.headers_ns

        def arrived(now_ns: int, part: bytes) -> None:
            answer.arrived(now_ns, connection.late_ns)
            if self._stream and connection.answer.status == 200:
                for event in events.feed(part):
                    self._count_message()
                    self._parse(now_ns, event.data, answer, failed=event.failed)
            elif len(whole) < MAX_MESSAGE_BYTES:  # more would be useless as an error message
                whole.extend(part)

        new = await connection.open()
        if new:
            answer.connected_ns = time.monotonic_ns()
        try:
            status = await post()
        except HttpError:
            # A server may close a connection between requests at any time, even just as this one was sent. In that case
            # the server has not accepted it, so it is sent once more over a new connection (RFC 9112, section 9.5).
            if new or connection.answer.began:
                raise
            await connection.open()
            answer.connected_ns = time.monotonic_ns()
            status = await post()
        if not self._stream or status != 200:
            self._parse(connection.answer.latest_ns, whole, answer, failed=status != 200)
        elif answer.error is None:
            answer.error = events.error
        if status != 200:
            answer.error = f"HTTP status {status}: {answer.error}" if answer.error else f"HTTP status {status}"

    def _parse(self, now_ns: int, data: bytes | bytearray, answer: Answer, *, failed: bool = False) -> None:
        """Record one response. `failed`: the server reported an error."""
        try:
            body = fields.parse(data)
            message = fields.error_of(body, failed=failed)
            if message is None:
                self._take(now_ns, body, answer)
        except ProtocolError as error:
            message = str(error)
        answer.error = answer.error or message

    @abstractmethod
    def _take(self, now_ns: int, body: Mapping[str, Any], answer: Answer) -> None:
        """Record one response. Raises ProtocolError if it is invalid."""

    async def close(self) -> None:
        """Close the connection: it cannot be reused after an incomplete response."""
        self._connection.close()


class ServerSentEvent(NamedTuple):
    """A complete event."""

    data: bytes
    failed: bool
    """True if its type is `error`."""


class ServerSentEvents:
    """Incremental parser of a text/event-stream: takes bytes as they arrive, returns complete events.

    Source: WHATWG HTML, section 9.2.6 "Interpreting an event stream"; lines may end in LF, CRLF or CR.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        """The unfinished line."""
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._failed = False
        self._json = bytearray()
        """Lines from one that is no field but begins an object: a server's error in place of the stream."""
        self._after_cr = False

    def feed(self, chunk: bytes) -> Iterator[ServerSentEvent]:
        """Each event with data that `chunk` completes. Raises ProtocolError for one larger than MAX_MESSAGE_BYTES."""
        if not chunk:
            return
        # The second half of a CRLF does not end another line.
        start = int(self._after_cr and chunk.startswith(b"\n"))
        self._after_cr = chunk.endswith(b"\r")
        *ended, rest = chunk[start:].replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in ended:
            if self._line:
                line = bytes(self._line) + line
                self._line.clear()
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._data_bytes += len(line)
            elif not line:
                data, self._data, self._data_bytes = self._data, [], 0
                failed, self._failed = self._failed, False
                if data:
                    yield ServerSentEvent(b"\n".join(data), failed)
            elif line.startswith(b"event:"):
                self._failed = line[6:].strip() == b"error"
            elif self._json or line.lstrip().startswith(b"{"):
                self._json += line + b"\n"
        self._line += rest
        if len(self._line) + self._data_bytes + len(self._json) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"an event in the response exceeds {MAX_MESSAGE_BYTES} bytes")

    @property
    def error(self) -> str | None:
        """The error that the server sent in place of a stream, or of its next event."""
        return fields.not_a_stream(self._json + self._line)


def deltas(events: Sequence[TextChunk]) -> Iterator[TextChunk]:
    """Convert responses that each repeat the whole text so far into the text that each one added.

    Only characters that agree with the final text count, so a character that was incomplete at first counts once it is
    whole, and the parts join to the final text.
    """
    final = events[-1].text if events else ""
    shown = 0
    for event in events:
        # Bisect for the longest common prefix: comparing single characters takes seconds for long texts.
        text = event.text
        agreed = bisect_left(range(1, len(text) + 1), True, key=lambda size: not final.startswith(text[:size]))
        if agreed > shown:
            yield event._replace(text=final[shown:agreed])
            shown = agreed
