"""Servers that stall, lie about lengths, drip, or never stop: every request ends at its limit, and says what was wrong."""

from __future__ import annotations

import asyncio
import itertools
import json
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from trtllm_pipeline.base.errors import PipelineError
from trtllm_pipeline.measure.client.conversation import Conversation
from trtllm_pipeline.measure.client.transport import http2
from trtllm_pipeline.measure.client.transport.http import HttpError
from trtllm_pipeline.measure.client.transport.timestamped_socket import TimestampedSocket
from trtllm_pipeline.measure.load.prompts import Prompt
from trtllm_pipeline.measure.load.target import Target, service_at
from trtllm_pipeline.show.cli.app import main
from trtllm_pipeline.tensorrt.servers.command_lines import Ports
from trtllm_pipeline.tensorrt.servers.trtllm_serve import OpenAiServer

LIMIT_S = 0.4
NEVER_S = 3600.0
"""The lies continue for longer than pytest lets a test run, or for ever."""
OK = b"HTTP/1.1 200 OK\r\n"
EVENTS = OK + b"Content-Type: text/event-stream\r\nConnection: close\r\n\r\n"
PART = {"text_output": "a", "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]}
CONFIG = {
    "name": "m",
    "max_batch_size": 1,
    "input": [
        {"name": name, "data_type": kind}
        for name, kind in (("text_input", "TYPE_STRING"), ("max_tokens", "TYPE_INT32"))
    ],
    "model_transaction_policy": {"decoupled": True},
}

Say = Iterator[bytes | float]
"""What is sent, and how long nothing is between."""


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def whole(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body


def for_ever(*parts: bytes | float) -> Say:
    return itertools.cycle(parts)


LIES: dict[str, Callable[[], Say]] = {
    "silent": lambda: iter([NEVER_S]),
    "garbage": lambda: iter([b"\x8b\x1f" * 500]),
    "drip": lambda: (each for byte in OK * 99 for each in (bytes([byte]), 0.05)),
    "drip of a body": lambda: itertools.chain([EVENTS], for_ever(b"d", 0.05)),
    "huge head": lambda: itertools.chain([OK], for_ever(b"X-A: " + b"y" * 1000 + b"\r\n")),
    "404": lambda: iter([whole(404, b"")]),
    "half a body": lambda: iter([OK + b"Content-Length: 1000\r\n\r\n{", NEVER_S]),
    "half and closed": lambda: iter([OK + b"Content-Length: 1000\r\n\r\n{"]),
    "negative length": lambda: iter([OK + b"Content-Length: -5\r\n\r\nabc", NEVER_S]),
    "stalled events": lambda: iter([EVENTS + event(PART), NEVER_S]),
    "endless events": lambda: itertools.chain([EVENTS], for_ever(event(PART) * 100)),
    "no end": lambda: iter([EVENTS + event(PART)]),
}
MANY_WAYS = ("silent", "drip of a body", "garbage", "huge head", "half a body", "endless events", "no end", "404")
"""One of each way to hang or to lie. What is wrong with a message itself is tested in tests/unit/measure/client."""
FRAMES: dict[str, Callable[[], Say]] = {
    "silent": lambda: iter([NEVER_S]),
    "closed": lambda: iter([]),
    "garbage": lambda: iter([b"\x8b\x1f" * 500]),
    "settings alone": lambda: iter([b"\0\0\0\4\0\0\0\0\0", NEVER_S]),
    "goaway": lambda: iter([b"\0\0\0\4\0\0\0\0\0\0\0\x08\x07\0\0\0\0\0\0\0\0\0\0\0\0\1", NEVER_S]),
    "big frame": lambda: iter([b"\xff\xff\xff\0\0\0\0\0\1" + b"x" * 100_000, NEVER_S]),
    "headers without end": lambda: iter([b"\0\0\0\4\0\0\0\0\0\0\x10\0\1\4\0\0\0\1" + b"\xff" * 4096, NEVER_S]),
    "endless pings": lambda: itertools.chain(
        [b"\0\0\0\4\0\0\0\0\0"], for_ever((b"\0\0\x08\6\0\0\0\0\0" + bytes(8)) * 100)
    ),
}


class Liar:
    """Answers GET like an honest server unless `about_all`, and everything else with a lie."""

    def __init__(self, lie: Callable[[], Say], *, about_all: bool) -> None:
        self._lie, self._about_all = lie, about_all
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._ended = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._ended.set()
        self._listening.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=(self._listening.accept()[0],), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            asked = connection.recv(1 << 16)
            while not self._about_all and asked.startswith(b"GET"):
                body = CONFIG if b"/config" in asked else {"data": [{"id": "m"}]}
                connection.sendall(whole(200, json.dumps(body).encode()))
                asked = connection.recv(1 << 16)
            for part in self._lie():
                if self._ended.is_set():
                    return
                if isinstance(part, bytes):
                    connection.sendall(part)
                else:
                    self._ended.wait(part)


Start = Callable[..., Liar]


@pytest.fixture
def start() -> Iterator[Start]:
    liars: list[Liar] = []

    def start(lie: Callable[[], Say], *, about_all: bool = False) -> Liar:
        liars.append(Liar(lie, about_all=about_all))
        return liars[-1]

    yield start
    for liar in liars:
        liar.close()


def error_of(port: int, protocol: str, interface: str, limit_s: float = LIMIT_S) -> str | None:
    """How a request ends, which may be with the error of the client that looks at the server before."""
    target = Target(protocol, service_at(f"127.0.0.1:{port}", interface, "m"), "m", limit_s, 4)

    async def ask() -> str | None:
        async with target.client() as client:
            answer = await client.session().generate(target.generation(Prompt("1", "x"), 0))
            json.dumps([answer.text, answer.error], ensure_ascii=False).encode()
            return answer.error

    try:
        return asyncio.run(ask())
    except PipelineError as error:
        return str(error)


@pytest.mark.parametrize("lie", MANY_WAYS)
def test_a_request_ends_in_words_at_its_limit(start: Start, lie: str) -> None:
    for protocol, interface in (("http", "http"), ("openai_chat", "openai"), ("openai_chat_unary", "openai")):
        for about_all in (False, True):
            error = error_of(start(LIES[lie], about_all=about_all).port, protocol, interface)
            # Text that nobody said was the last is an answer of generate_stream, and an answer may have no text.
            assert error or (protocol == "http" and lie in {"no end", "404"}), (protocol, about_all)


@pytest.mark.seam
@pytest.mark.parametrize(
    ("lie", "told"),
    [
        ("silent", "no complete response within 0.4 s: received nothing"),
        ("drip", "no complete response within 0.4 s: received nothing"),
        ("drip of a body", "no complete response within 3 s: received data but no text"),
        ("stalled events", "no complete response within 3 s: received 1 chunks, the last "),
        ("half and closed", "the connection closed in the middle of the response: after 1 bytes"),
        ("negative length", "invalid HTTP response: Invalid character in Content-Length"),
        ("endless events", "the server sent more than 4352 messages for a response of 4 tokens"),
    ],
)
def test_the_words_say_what_the_server_did(start: Start, lie: str, told: str) -> None:
    # What comes before the limit has time for it.
    limit_s = LIMIT_S if "within 0.4 s" in told else 3.0 if "within 3 s" in told else 60.0
    assert (error_of(start(LIES[lie]).port, "openai_chat", "openai", limit_s) or "").startswith(told)


@pytest.mark.parametrize("lie", FRAMES)
def test_a_call_ends_in_words_at_its_limit(start: Start, lie: str) -> None:
    from trtllm_pipeline.measure.client.session import GenerationRequest
    from trtllm_pipeline.measure.client.triton import Client, ServedModel, _GrpcStream, _GrpcUnary

    async def ask(session_kind: type[_GrpcUnary]) -> str | None:
        client = Client(service_at(f"127.0.0.1:{start(FRAMES[lie]).port}", "grpc", "m"), "m", "grpc", timeout_s=LIMIT_S)
        inputs = {"text_input": "TYPE_STRING", "max_tokens": "TYPE_INT32"}
        client.model = ServedModel("m", batched=True, decoupled=True, inputs=inputs, accumulates=False, counts=False)
        session = session_kind(client)
        answer = await session.generate(GenerationRequest("x", 4))
        return answer.error

    for session_kind in (_GrpcStream, _GrpcUnary):
        assert asyncio.run(ask(session_kind))
    assert error_of(start(FRAMES[lie]).port, "grpc", "grpc")


def test_a_reset_before_the_first_byte_ends_a_call_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    connect = TimestampedSocket.connect

    async def reset(host: str, port: int) -> TimestampedSocket:
        connected = await connect(host, port)
        peer, _ = listening.accept()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        # The reset has to arrive before the client writes, which reads nothing until then.
        select.select([connected._sock], [], [])
        return connected

    async def ask() -> None:
        call = http2.GrpcCall(f"127.0.0.1:{listening.getsockname()[1]}")
        await call.connect()
        await http2.unary(call, "/x", b"")

    monkeypatch.setattr(TimestampedSocket, "connect", reset)
    with listening, pytest.raises(http2.Http2Error, match=r"^UNAVAILABLE: 127\.0\.0\.1:\d+: .*reset by peer$"):
        asyncio.run(ask())


@pytest.mark.parametrize("lie", MANY_WAYS)
def test_what_launch_asks_ends_too(start: Start, lie: str) -> None:
    port = start(LIES[lie], about_all=True).port
    with suppress(OSError, HttpError):
        asked = OpenAiServer(process=SimpleNamespace(), ports=Ports(port, 0, 0), output=Path())
        asked.request("GET", "/health", timeout_s=LIMIT_S)


def test_a_silent_peer_does_not_hold_a_handshake(start: Start) -> None:
    port = start(LIES["silent"]).port
    target = Target("openai_chat", service_at(f"https://127.0.0.1:{port}", "openai", "m"), "m", LIMIT_S, 4)

    async def look() -> None:
        async with target.client():
            pass

    with pytest.raises(PipelineError, match=r"no complete response within 0.4 s"):
        asyncio.run(look())


PROTOCOLS = ("openai_chat", "openai_chat_unary", "openai_completions", "openai_completions_unary")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_error_is_told_in_the_servers_words(start: Start, protocol: str) -> None:
    """Other forms of errors are in tests/unit/measure/client/test_wire_formats.py."""

    def told(status: int, body: bytes) -> str | None:
        return error_of(start(lambda: iter([whole(status, body)])).port, protocol, "openai", 60.0)

    assert told(200, b'{"error": {"message": "the engine died", "code": 500}}') == "the engine died"
    assert told(200, b'{\n "detail": "the engine died"\n}\r\n\r\n') == "the engine died"
    assert told(503, b'{"message": "the engine died"}') == "HTTP status 503: the engine died"
    for status, size in ((200, 4000), (503, 4000 + len("HTTP status 503: "))):
        error = told(status, json.dumps({"error": "died" * 1000}).encode()) or ""
        assert error.endswith(f"... ({size} characters)")
        assert error.count("characters") == 1, "it is shortened once"


@pytest.mark.parametrize("protocol", PROTOCOLS[::2])
@pytest.mark.parametrize("before", [b"", event(PART)])
def test_an_error_event_is_told_in_the_servers_words(start: Start, protocol: str, before: bytes) -> None:
    for data, told in (
        (b'{"message": "the engine died"}', "the engine died"),
        (b'{"code": 500}', '{"code": 500}'),
        (b"the engine died", "expected a JSON object, got b'the engine died'"),
    ):
        parts = [EVENTS, before, b"event: error\ndata: " + data + b"\n\n", event(PART), b"data: [DONE]\n\n"]
        assert error_of(start(lambda: iter(parts)).port, protocol, "openai", 60.0) == told  # noqa: B023


def test_a_whole_answer_is_not_a_stream(start: Start) -> None:
    body = b'{"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]}'
    error = error_of(start(lambda: iter([whole(200, body)])).port, "openai_chat", "openai", 60.0)
    assert error == f"expected a stream of events, got {body.decode()}"


@pytest.mark.parametrize(
    "lie",
    [
        [EVENTS, event(PART), b'event: error\ndata: {"message": "the engine died"}\n\n'],
        [whole(200, b'{"object": "error", "message": "the engine died"}')],
    ],
)
def test_a_chat_ends_with_the_servers_words(start: Start, lie: list[bytes]) -> None:
    asked = Conversation(f"http://127.0.0.1:{start(lambda: iter(lie)).port}", "m", options={})
    with pytest.raises(PipelineError, match=r"^the server failed: the engine died$"):
        asked.ask("hi", lambda _piece, _thought: None)


@pytest.mark.seam
def test_perf_says_what_the_server_did(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"http://127.0.0.1:{start(LIES['negative length'], about_all=True).port}"
    assert main(["bench", "load", "-u", url, "--protocol", "openai", "--model", "m", "--request-timeout-s", "60"]) == 1
    assert "Invalid character in Content-Length" in capsys.readouterr().err
