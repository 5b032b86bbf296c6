"""The limits of every parser, and the words for what is beyond them."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

import pytest
from tritonclient.grpc import service_pb2

from trtllm_pipeline.measure.client import openai, session, triton
from trtllm_pipeline.measure.client.service import Service
from trtllm_pipeline.measure.client.session import Answer, ServerSentEvents
from trtllm_pipeline.measure.client.transport import ProtocolError, http, http2
from trtllm_pipeline.measure.client.transport.http2 import Http2, Messages
from trtllm_pipeline.measure.client.transport.timestamped_socket import MAX_MESSAGE_BYTES

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


def read(raw: bytes, **options: int) -> tuple[http.Parser, bytes]:
    body = bytearray()
    answer = http.Parser(lambda _now_ns, part: body.extend(part), **options)
    answer.feed(0, raw)
    return answer, bytes(body)


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (OK + b"Content-Length: -5\r\n\r\nabc", "invalid HTTP response: Invalid character in Content-Length: "),
        (OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabc", "Duplicate Content-Length"),
        (OK + b"Content-Length: 99999999999\r\n\r\nabc", "has 99999999999 bytes; the limit is 16777216"),
        (CHUNKED + b"-5\r\nabc", "invalid HTTP response: Invalid character in chunk size: "),
        (CHUNKED + b"FFFFFFFFFFFFFFFFF\r\nabc", "Chunk size overflow"),
        (CHUNKED + b"1;" + b"e" * 70_000, "trailer or a chunk size exceeds 65536 bytes"),
        (CHUNKED + b"1\r\nab", "Expected LF after chunk data"),
        (CHUNKED + b"0\r\n" + b"a: b\r\n" * 20_000, "has more than 256 header fields"),
        (OK + b"Transfer-Encoding: gzip\r\n\r\n", "transfer-encoding is gzip, expected chunked"),
        (OK + b"Content-Encoding: gzip\r\n\r\n", "is encoded as gzip, which was not requested"),
        (OK + b"a: b\r\n" * 300 + b"\r\n", "has more than 256 header fields"),
        (OK + b"a: " + b"b" * 70_000, "response header exceeds 65536 bytes"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 3000, "response header exceeds 65536 bytes"),
        (OK + b"a b: c\r\n\r\n", "invalid HTTP response: Invalid header token: "),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "switches to another protocol"),
        (b"HTTP/1.1 2000 OK\r\n\r\n", "invalid HTTP response: Invalid response status: b'HTTP/1.1 2000 OK"),
        (b"\0\0\0\4\0\0\0\0\0", "not an HTTP response: Expected HTTP/"),
    ],
)
def test_what_is_no_answer_is_refused_in_words(raw: bytes, told: str) -> None:
    with pytest.raises(http.HttpError) as caught:
        read(raw)
    assert told in str(caught.value)


def test_a_body_without_length_has_one_limit_more() -> None:
    answer, body = read(b"HTTP/1.0 200 OK\r\n\r\n12345", max_bytes=5)
    assert (answer.status, body) == (200, b"12345")
    with pytest.raises(http.HttpError, match="has 6 bytes; the limit is 5"):
        answer.feed(0, b"6")


def test_a_chunk_beyond_the_limit_is_refused_when_its_bytes_arrive() -> None:
    answer, body = read(CHUNKED + b"FFFFFFFFFFFFFFFF\r\n12345", max_bytes=5)
    assert body == b"12345"
    with pytest.raises(http.HttpError, match="has 6 bytes; the limit is 5"):
        answer.feed(0, b"6")


def test_what_follows_an_answer_belongs_to_no_other() -> None:
    answer, body = read(OK + b"Content-Length: 3\r\n\r\nabcHTTP/1.1 200 OK\r\n\r\n")
    assert (answer.complete, answer.keep_alive, body) == (True, False, b"abc")
    answer, body = read(OK + b"Content-Length: 3\r\n\r\nabc")
    assert answer.keep_alive
    answer.feed(0, b"junk")
    assert (answer.complete, answer.keep_alive, body) == (True, False, b"abc")


def test_a_fault_of_the_reader_is_its_own() -> None:
    def sink(_now_ns: int, _part: bytes) -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        http.Parser(sink).feed(0, OK + b"Content-Length: 3\r\n\r\nabc")


def test_an_event_has_a_limit_however_it_comes() -> None:
    for stream in (b"data: " + b"x" * 100_000, b"x" * 100_000, b"data: x\n" * 12_500, b"{\n" * 50_000):
        events = ServerSentEvents()
        with pytest.raises(ProtocolError, match="an event in the response exceeds"):  # noqa: PT012
            for _ in range(MAX_MESSAGE_BYTES // 50_000):
                list(events.feed(stream))
    events = ServerSentEvents()
    for _ in range(1000):  # comments and blank lines keep nothing
        assert list(events.feed(b": " + b"y" * 50_000 + b"\n\n")) == []
    assert list(events.feed(b"data: x\n\n")) == [(b"x", False)]


def framed(*frames: bytes) -> Http2:
    connection = Http2(lambda _data: None, lambda *_: None)
    connection.headers(1, ((":path", "/x"),))
    for each in frames:
        connection.feed(0, each)
    return connection


@pytest.mark.parametrize(
    ("frame", "told"),
    [
        (b"\xff\xff\xff\0\0\0\0\0\1", "a frame of 16777215 bytes starts with"),
        (
            http2.frame(1, 0, 1, bytes(16_000)) + 3 * http2.frame(9, 0, 1, bytes(16_000)),
            "headers exceed 32768",
        ),
        (http2.frame(1, 4, 1, b"\x3f\xff\xff\xff\xff\x0f"), "cannot decode headers"),
        (http2.frame(1, 4, 1, b"\xff" * 16_000), "cannot decode headers: Variable integer representation is too long$"),
        (http2.frame(1, 4, 1, b"\xff"), "cannot decode headers: Unable to decode HPACK integer representation$"),
        (http2.frame(1, 4, 1, b"\x40\x01a\x7f\xa1\x1f" + b"x" * 4000 + b"\xbe" * 12_000), "cannot decode headers"),
        (http2.frame(4, 0, 0, struct.pack(">HI", 4, 2**31)), "initial window is 2147483648"),
        (http2.frame(4, 0, 0, struct.pack(">HI", 5, 0)), "maximum frame size is 0; it must be at least 16384"),
        (http2.frame(8, 0, 0, struct.pack(">I", 2**31 - 1)), "window exceeds 2147483647"),
        (http2.frame(8, 0, 1, struct.pack(">I", 2**31 - 1)), "window exceeds 2147483647"),
        (http2.frame(5, 4, 1, bytes(4)), "the server sent PUSH_PROMISE"),
        (http2.frame(0, 0, 0, b"x"), "a frame of type 0 is on stream 0"),
        (http2.frame(4, 0, 1), "a frame of type 4 is on stream 1"),
        (http2.frame(6, 0, 0, b"short"), "malformed"),
        (http2.frame(4, 0, 0, b"short"), "malformed"),
        (http2.frame(0, 8, 1), "malformed"),  # padded, without a length
        (http2.frame(0, 8, 1, b"\x09padding"), "malformed"),  # more than there is
        (http2.frame(1, 8 | 4, 1, b"\x09padding"), "malformed"),
        (http2.frame(7, 0, 0, b"short"), "malformed"),
    ],
)
def test_frames_beyond_the_protocol_are_refused(frame: bytes, told: str) -> None:
    with pytest.raises(http2.Http2Error, match=told):
        framed(frame)


def test_a_server_opens_no_streams_at_its_client() -> None:
    heard: list[object] = []
    connection = Http2(lambda _data: None, lambda *told: heard.append(told))
    block = http2.hpack.Encoder().encode([(":status", "200")])
    for stream in range(2, 2000, 2):
        connection.feed(0, http2.frame(1, 4, stream, block))
    assert not connection._streams
    assert not heard


def test_an_orderly_goaway_ends_later_streams_and_the_connection() -> None:
    heard: list[tuple[object, ...]] = []
    connection = Http2(lambda _data: None, lambda *told: heard.append(told))
    for stream in (1, 3):
        connection.headers(stream, ((":path", "/x"),))
    connection.feed(5, http2.frame(7, 0, 0, struct.pack(">II", 1, 0)))
    assert connection.going
    assert heard == [(5, "reset", 3, 7, True)]


def test_windows_are_kept_of_each_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "_WINDOW", 1 << 17)
    sent: list[bytes] = []
    connection = Http2(sent.append, lambda *_: None)
    for stream in (1, 3):
        connection.headers(stream, ((":path", "/x"),))
    sent.clear()
    for stream in (1, 3) * 3:
        connection.feed(0, http2.frame(0, 0, stream, bytes(16_000)))
    granted = [(int.from_bytes(each[5:9], "big"), int.from_bytes(each[9:], "big")) for each in sent]
    assert granted == [(0, 80_000)], "a stream that is not half used up needs no more"


def test_a_message_has_a_limit() -> None:
    with pytest.raises(http2.Http2Error, match="a message has 16777217 bytes; the limit is 16777216"):
        Messages().feed(struct.pack(">BI", 0, MAX_MESSAGE_BYTES + 1))


class Peer:
    """A socket to a server that sends given bytes as soon as a call has been sent."""

    def __init__(self) -> None:
        self.open, self.late_ns = True, 0
        self.arrived: Callable[[int, bytes], None]
        self.ended: Callable[[str], None]
        self.server = Http2(lambda data: self.arrived(0, data) if self.open else None, lambda *_: None, serving=True)

    async def connect(self, _host: str, _port: int) -> Peer:
        return self

    def mark_request(self) -> None:
        pass

    def write(self, data: bytes) -> None:
        self.server.feed(0, data.removeprefix(http2.PREFACE))

    def close(self) -> None:
        self.open = False

    def answer(self, *messages: bytes) -> None:
        self.server.headers(1, ((":status", "200"),))
        for each in messages:
            self.server.data(1, http2.message(each))
        self.server.headers(1, (("grpc-status", "0"),), end=True)


@pytest.mark.parametrize("messages", [(b"a",), (b"a", b"b"), (b"a",) * 20])
def test_a_unary_call_has_one_answer(monkeypatch: pytest.MonkeyPatch, messages: tuple[bytes, ...]) -> None:
    peer = Peer()
    monkeypatch.setattr(http2, "TimestampedSocket", peer)

    async def ask() -> bytes:
        call = http2.GrpcCall("x:1")
        await call.connect()
        asyncio.get_running_loop().call_soon(peer.answer, *messages)
        return (await http2.unary(call, "/s/M", b"q"))[1]

    if len(messages) == 1:
        assert asyncio.run(ask()) == b"a"
        assert peer.open
    else:
        with pytest.raises(http2.Http2Error, match="the server sent a second message for /s/M, which has one"):
            asyncio.run(ask())
        assert not peer.open


def test_a_stream_has_a_limit_for_each_question(monkeypatch: pytest.MonkeyPatch) -> None:
    peer, ends, count = Peer(), [], [0]
    monkeypatch.setattr(http2, "TimestampedSocket", peer)
    monkeypatch.setattr(http2, "MAX_STREAM_BYTES", 40_000)

    async def ask() -> None:
        call = http2.GrpcCall("x:1")
        await call.connect()
        call.start("/s/M")
        call.arrived = lambda _now_ns, _message: count.__setitem__(0, count[0] + 1)
        call.ended = ends.append
        peer.server.headers(1, ((":status", "200"),))
        for _ in range(5):  # a stream stays open for many questions
            call.send(b"q")
            for _ in range(3):
                peer.server.data(1, http2.message(bytes(10_000)))
        assert (count, ends) == ([15], [])
        call.send(b"q")
        for _ in range(9):
            peer.server.data(1, http2.message(bytes(10_000)))

    asyncio.run(ask())
    assert ends == ["INTERNAL: the response has 40020 bytes so far; the limit is 40000"]
    assert count == [18]
    assert not peer.open


def calls_of(kind: type[triton._GrpcUnary]) -> triton._GrpcUnary:
    """A session with a decoupled model."""
    client = triton.Client(Service("", "x:1", None, None, "m", None), "m", "grpc", timeout_s=5)
    inputs = {"text_input": "TYPE_STRING", "max_tokens": "TYPE_INT32"}
    client.model = triton.ServedModel("m", batched=True, decoupled=True, inputs=inputs, accumulates=False, counts=False)
    return kind(client)


class StreamingPeer(Peer):
    """A server of one stream: what the client does to it, in order. It ends a stream that the client has ended."""

    def __init__(self, *, ends: bool = True) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.ends = ends
        self.server = Http2(lambda data: self.arrived(0, data) if self.open else None, self.on, serving=True)

    def on(self, _now_ns: int, kind: http2.Kind, _stream: int, _value: object, ended: bool) -> None:
        self.seen.append("end" if kind == "data" and ended else kind)
        if kind == "data" and ended and self.ends:
            asyncio.get_running_loop().call_soon(lambda: self.server.headers(1, (("grpc-status", "0"),), end=True))

    def close(self) -> None:
        self.seen.append("closed")
        super().close()

    def respond(self, message: service_pb2.ModelStreamInferResponse) -> None:
        self.server.headers(1, ((":status", "200"),))
        self.server.data(1, http2.message(message.SerializeToString()))


def final() -> service_pb2.ModelStreamInferResponse:
    response = service_pb2.ModelStreamInferResponse()
    response.infer_response.parameters["triton_final_response"].bool_param = True
    return response


@pytest.mark.parametrize(
    ("response", "ends", "seen"),
    [
        (final(), True, ["headers", "data", "end", "closed"]),
        (service_pb2.ModelStreamInferResponse(error_message="too long"), True, ["headers", "data", "end", "closed"]),
        (final(), False, ["headers", "data", "end", "reset", "closed"]),
        (None, True, ["headers", "data", "reset", "closed"]),
    ],
    ids=["whole", "refused", "server does not end it", "in progress"],
)
def test_a_stream_is_only_cancelled_while_a_request_is_in_progress(
    monkeypatch: pytest.MonkeyPatch,
    response: service_pb2.ModelStreamInferResponse | None,
    ends: bool,
    seen: list[str],
) -> None:
    """Triton can crash if a stream is cancelled while it still completes a response."""
    peer = StreamingPeer(ends=ends)
    monkeypatch.setattr(http2, "TimestampedSocket", peer)
    monkeypatch.setattr(http2, "_FINISH_S", 60.0 if ends else 0.0)

    async def ask() -> None:
        calls = calls_of(triton._GrpcStream)
        asking = asyncio.create_task(calls.generate(session.GenerationRequest("x", 4)))
        while "data" not in peer.seen:
            await asyncio.sleep(0)
        if response is None:
            asking.cancel()
        else:
            peer.respond(response)
        await asyncio.wait([asking])
        await calls.cancel()
        await calls.close()

    asyncio.run(ask())
    assert peer.seen == seen


class BreakingPeer(Peer):
    """Its connection breaks while the client writes for the nth time: the preface, settings, headers, the message."""

    def __init__(self, nth: int) -> None:
        super().__init__()
        self.left = nth

    def write(self, data: bytes) -> None:
        self.left -= 1
        if self.left:
            super().write(data)
        else:
            self.open = False
            self.ended("reset")


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", [triton._GrpcStream, triton._GrpcUnary])
def test_a_connection_that_breaks_while_a_call_is_sent_ends_the_call(
    monkeypatch: pytest.MonkeyPatch, kind: type[triton._GrpcUnary], nth: int
) -> None:
    async def ask() -> list[str | None]:
        calls, errors = calls_of(kind), []
        for _ in range(2):  # a call that broke does not spoil the next
            monkeypatch.setattr(http2, "TimestampedSocket", BreakingPeer(nth))
            errors.append((await calls.generate(session.GenerationRequest("x", 4))).error)
        return errors

    for error in asyncio.run(ask()):
        assert (error or "").endswith("UNAVAILABLE: x:1: reset")


def test_a_kept_connection_that_breaks_ends_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = BreakingPeer(5)
    monkeypatch.setattr(http2, "TimestampedSocket", peer)

    async def ask() -> None:
        call = http2.GrpcCall("x:1")
        await call.connect()
        asyncio.get_running_loop().call_soon(peer.answer, b"a")
        assert (await http2.unary(call, "/s/M", b"q"))[1] == b"a"
        assert not await call.connect()
        await asyncio.wait_for(http2.unary(call, "/s/M", b"q"), 5)

    with pytest.raises(http2.Http2Error, match=r"^UNAVAILABLE: x:1: reset$"):
        asyncio.run(ask())


def test_a_status_that_is_no_number_has_words() -> None:
    assert http2._status({"grpc-status": "²", "grpc-message": "x"}) == "status ²: x"
    assert http2._status({"grpc-status": "9" * 5000, "grpc-message": "x"}) == f"status {'9' * 20}: x"
    assert len(http2._status({"grpc-status": "5", "grpc-message": "x" * 9000}) or "") < 1100


def response(**raw: bytes) -> service_pb2.ModelInferResponse:
    made = service_pb2.ModelInferResponse()
    for name, content in raw.items():
        made.outputs.add(name=name)
        made.raw_output_contents.append(content)
    return made


def test_a_tensor_that_is_cut_off_is_refused() -> None:
    with pytest.raises(ProtocolError, match="text_output in the server's response is truncated: 6 of 9 bytes"):
        triton.text_output(response(text_output=b"\5\0\0\0ab"))
    with pytest.raises(ProtocolError, match="num_output_tokens in the server's response is truncated"):
        triton.token_count(response(num_output_tokens=b"\1"), "num_output_tokens")
    with pytest.raises(ProtocolError, match="num_output_tokens in the server's response is -1, expected a number"):
        triton.token_count(response(num_output_tokens=b"\xff\xff\xff\xff"), "num_output_tokens")
    empty = service_pb2.ModelInferResponse()
    empty.outputs.add(name="text_output")
    with pytest.raises(ProtocolError, match="text_output in the server's response is empty"):
        triton.text_output(empty)


def said(body: str) -> Answer:
    """An OpenAI session's Answer from one message."""
    session = openai._OpenAiSession(openai.OpenAiClient("http://x:1", "m", "chat", stream=True, timeout_s=1))
    answer = Answer()
    session._parse(0, body.encode("latin-1"), answer)
    return answer


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("[" * 5000, "expected a JSON object"),
        ("[]", "expected a JSON object, got b'[]'"),
        ("7", "expected a JSON object, got b'7'"),
        ('{"choices": 5}', "choices in the server's response is 5, expected a list"),
        ('{"choices": [7]}', "a choice in the server's response is 7, expected an object"),
        (
            '{"choices": [{"delta": {"content": {"a": 1}}}]}',
            'content in the server\'s response is {"a": 1}, expected text',
        ),
        (
            '{"choices": [{"delta": {}, "finish_reason": 5}]}',
            "finish_reason in the server's response is 5, expected text",
        ),
        ('{"choices": [{"delta": {"tool_calls": [{"function": 1}]}}]}', "a function in the server's response is 1"),
        (
            '{"usage": {"completion_tokens": -5}}',
            "completion_tokens in the server's response is -5, expected a number of",
        ),
        ('{"usage": {"completion_tokens": 1e400}}', "completion_tokens in the server's response is Infinity"),
        ('{"usage": {"completion_tokens": true}}', "completion_tokens in the server's response is true"),
        ('{"usage": {"prompt_tokens": 99999999999999999999}}', "prompt_tokens in the server's response is 9999"),
    ],
)
def test_a_message_of_another_form_is_refused_in_words(body: str, told: str) -> None:
    assert told in (said(body).error or "")


def test_a_long_error_is_shortened() -> None:
    message = said('{"error": {"message": {"deep": %s}}}' % ("[" * 500 + "]" * 500)).error
    assert len(message) < 300


def test_an_endless_answer_ends() -> None:
    session = triton._Http(_client())
    session._asked_tokens = 2
    with pytest.raises(ProtocolError, match="more than 4224 messages for a response of 2 tokens"):  # noqa: PT012
        for _ in range(5000):
            session._count_message()


def _client() -> triton.Client:
    client = triton.Client(Service("x:1", "", None, None, "m", None), "m", "http", timeout_s=1)
    client.model = triton.ServedModel(
        "a b\r\nX: y", batched=True, decoupled=True, inputs={}, accumulates=False, counts=False
    )
    return client


def test_a_models_name_cannot_change_the_request() -> None:
    assert triton._Http(_client())._path == "/v2/models/a%20b%0D%0AX%3A%20y/generate_stream"


def test_a_type_that_is_not_known_has_a_name() -> None:
    config = triton.config_of(b'{"name": "m", "input": [{"name": "x", "data_type": 999}]}')
    model = triton.ServedModel.of(config)
    assert model.inputs == {"x": "999"}
    assert triton.data_types(config.input) == {"x": "999"}
    with pytest.raises(triton.ServerError, match="input x of m has type 999, which this client does not support"):
        triton.infer_request(model, {"x": 1}, request_id="1")


@pytest.mark.parametrize("body", ["[" * 9000, '{"max_batch_size": 1e400}', '{"parameters": {"\\ud800": {}}}', "{]"])
def test_a_configuration_that_is_none(body: str) -> None:
    with pytest.raises(ProtocolError):
        triton.config_of(body.encode())


def test_words_for_what_came_before_the_limit() -> None:
    answer = Answer()
    assert session._so_far(answer) == "not connected"
    answer.sent_ns = 1
    assert session._so_far(answer) == "received nothing"
    answer.headers_ns = 2
    assert session._so_far(answer) == "received headers but no body"
    answer.first_byte_ns = 3
    assert session._so_far(answer) == "received data but no text"
    answer.received(4, "a", None)
    assert session._so_far(answer).startswith("received 1 chunks, the last ")
