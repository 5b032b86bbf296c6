"""HTTP/1.1 and HTTP/2 however the bytes are cut, and OpenAI's messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise

import pytest

from trtllm_pipeline.measure.client import conversation, fields, openai
from trtllm_pipeline.measure.client.session import Answer, ServerSentEvents
from trtllm_pipeline.measure.client.transport import http, http2
from trtllm_pipeline.measure.client.transport.http2 import Headers, Http2, Http2Error, Kind, Messages

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5;ext=1\r\nhello\r\n7\r\n w\xc3\xb6rl\r\r\n1\r\nd\r\n0\r\nTrailer: x\r\n\r\n"
)
LENGTH = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\nsorry"
TO_THE_END = b"HTTP/1.0 200 OK\r\n\r\nall of it"


def read(raw: bytes, *cuts: int, end: bool = False) -> tuple[int, list[tuple[int, bytes]], bool]:
    """(status, parts with the number of the read, keep-alive) of a response that arrives in pieces."""
    parts: list[tuple[int, bytes]] = []
    answer = http.Parser(lambda now_ns, part: parts.append((now_ns, part)))
    edges = [0, *cuts, len(raw)]
    for number, (start, stop) in enumerate(pairwise(edges)):
        if start < stop:
            answer.feed(number, raw[start:stop])
    if end:
        answer.end("closed")
    assert answer.complete
    return answer.status, parts, answer.keep_alive


@pytest.mark.parametrize("raw", [CHUNKED, LENGTH], ids=["chunked", "length"])
def test_answers_survive_every_cut(raw: bytes) -> None:
    status, parts, keep = read(raw)
    whole = b"".join(part for _, part in parts)
    assert keep
    for cut in range(1, len(raw)):
        got, cut_parts, kept = read(raw, cut)
        assert (got, b"".join(part for _, part in cut_parts), kept) == (status, whole, True)


def test_a_part_has_the_time_of_its_read() -> None:
    at = CHUNKED.index(b"7\r\n")
    assert read(CHUNKED, at)[1] == [(0, b"hello"), (1, b" w\xc3\xb6rl\r"), (1, b"d")]


def test_an_answer_without_length_ends_with_the_connection() -> None:
    assert read(TO_THE_END, TO_THE_END.index(b"all"), end=True) == (200, [(1, b"all of it")], False)
    with pytest.raises(http.HttpError, match="closed in the middle"):
        read(LENGTH[:-1], end=True)
    with pytest.raises(http.HttpError, match="not an HTTP response"):
        read(b"SSH-2.0-OpenSSH\r\n\r\n")
    with pytest.raises(http.HttpError, match="closed"):
        read(b"", end=True)


def pair() -> tuple[Http2, Http2, list[tuple[Kind, int, Headers | bytes | int, bool]], bytearray]:
    """A sender, a receiver, the receiver's events, and the undelivered bytes."""
    events: list[tuple[Kind, int, Headers | bytes | int, bool]] = []
    travelling = bytearray()
    sender = Http2(travelling.extend, lambda *_: None)
    receiver = Http2(
        lambda data: sender.feed(0, data),
        lambda _now_ns, kind, stream, value, ended: events.append((kind, stream, value, ended)),
        serving=True,
    )
    return sender, receiver, events, travelling


def exchange(deliver: Callable[[Http2, bytes], None]) -> tuple[list[object], list[bytes]]:
    sender, receiver, told, travelling = pair()
    sender.start()
    sender.headers(1, ((":status", "200"), ("content-type", "application/grpc")))
    for text in ("é", "", "longer text " * 9):
        sender.data(1, http2.message(text.encode()))
    sender.headers(1, (("grpc-status", "0"), ("grpc-message", "a%20b")), end=True)
    deliver(receiver, bytes(travelling))
    messages = Messages()
    received = [one for kind, _, value, _ in told if kind == "data" for one in messages.feed(value)]  # type: ignore[arg-type]
    return [entry for entry in told if entry[0] == "headers"], received


def test_frames_survive_every_cut() -> None:
    def at_once(receiver: Http2, data: bytes) -> None:
        receiver.feed(0, data)

    expected = exchange(at_once)
    assert [one.decode() for one in expected[1]] == ["é", "", "longer text " * 9]
    assert expected[0][-1] == ("headers", 1, [("grpc-status", "0"), ("grpc-message", "a%20b")], True)
    for step in range(1, 40):

        def cut(receiver: Http2, data: bytes, step: int = step) -> None:
            for start in range(0, len(data), step):
                receiver.feed(0, data[start : start + step])

        assert exchange(cut) == expected


def test_data_waits_for_the_window() -> None:
    sender, receiver, told, travelling = pair()
    sender.headers(1, ((":path", "/x"),))
    big = bytes(200_000)
    sender.data(1, big, end=True)
    receiver.feed(0, bytes(travelling))
    got = sum(len(value) for kind, _, value, _ in told if kind == "data" and isinstance(value, bytes))
    assert got == 65_535, "more than the peer allows"
    travelling.clear()
    receiver.start()  # its settings and window reach the sender at once
    receiver.feed(0, bytes(travelling))
    data = [value for kind, _, value, _ in told if kind == "data" and isinstance(value, bytes)]
    assert sum(map(len, data)) == len(big)
    assert max(map(len, data)) <= 16_384
    assert told[-1][3], "the last frame ends the stream"


def test_what_is_not_understood_is_an_error() -> None:
    with pytest.raises(Http2Error, match="compressed"):
        Messages().feed(b"\x01\0\0\0\x01x")
    _, receiver, _, _ = pair()
    with pytest.raises(Http2Error, match="GOAWAY: bye"):
        receiver.feed(0, http2.frame(7, 0, 0, bytes(7) + b"\x02bye"))
    _, receiver, _, _ = pair()
    with pytest.raises(Http2Error, match="CONTINUATION frame is missing"):
        receiver.feed(0, http2.frame(1, 0, 1, b"") + http2.frame(0, 0, 1, b""))
    assert http2._status({"grpc-status": "5", "grpc-message": "no%20model"}) == "NOT_FOUND: no model"
    assert http2._status({":status": "502"}) == "UNKNOWN: HTTP status 502"


def chat(*bodies: object) -> Answer:
    """An OpenAI session's Answer from a stream of messages, one millisecond apart."""
    client = openai.OpenAiClient("http://x:1/v1/", "m", "chat", stream=True, timeout_s=1)
    assert client.url == "http://x:1/v1"
    session = openai._OpenAiSession(client)
    answer, events = Answer(), ServerSentEvents()
    for number, body in enumerate(bodies):
        text = body if isinstance(body, str) else json.dumps(body)
        for event in events.feed(f"data: {text}\n\n".encode()):
            session._parse(number, event.data, answer)
    return answer


def delta(reason: str | None = None, **said: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": said, "finish_reason": reason}], "usage": None}


def test_every_moment_of_a_chat_is_noted() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
    answer = chat(
        delta(role="assistant", content=""),
        delta(reasoning_content="hm"),
        delta(content="Par"),
        delta(content="is"),
        delta("stop"),
        {"choices": [], "usage": usage},
        "[DONE]",
    )
    assert answer.error is None
    assert (answer.role_ns, answer.first_event_ns, answer.usage_ns) == (0, 0, 5)
    assert [tuple(event) for event in answer.events] == [
        (1, "hm", None, True),
        (2, "Par", None, False),
        (3, "is", None, False),
    ]
    assert (answer.text, answer.finish_reason) == ("Paris", "stop")
    assert (answer.input_tokens, answer.output_tokens, answer.cached_tokens) == (7, 5, 4)


def test_errors_and_calls_of_tools_in_a_chat() -> None:
    assert chat({"error": {"message": "too long", "code": 400}}).error == "too long"
    assert "expected a JSON object" in (chat("nonsense").error or "")
    call = {"index": 0, "function": {"name": "f", "arguments": '{"a"'}}
    assert chat(delta(tool_calls=[call]), delta(tool_calls=[{"function": {"arguments": ":1}"}}])).text == 'f{"a":1}'


@pytest.mark.parametrize(
    ("said", "reasoning", "text"),
    [
        ({"reasoning": "a"}, "a", ""),
        ({"thinking": "a"}, "a", ""),
        ({"content": "", "reasoning_details": [{"type": "reasoning.text", "text": "a", "signature": "s"}]}, "a", ""),
        ({"reasoning_details": [{"type": "reasoning.summary", "summary": "a", "format": "x-1", "id": "7"}]}, "a", ""),
        ({"content": None, "thinking_blocks": [{"type": "thinking", "thinking": "a", "signature": "s"}]}, "a", ""),
        ({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "a"}]}]}, "a", ""),
        ({"content": [{"type": "reasoning", "text": "a"}, {"type": "text", "text": "b"}]}, "a", "b"),
        ({"content": ["b", {"type": "output_text", "text": "c"}]}, "", "bc"),
        ({"content": None, "refusal": "b"}, "", "b"),
        ({"audio": {"id": "a", "data": "UklGRg==", "transcript": "b"}}, "", "b"),
        ({"provider_specific_fields": {"reasoning_content": "a"}}, "a", ""),
        ({"reasoningText": "a"}, "a", ""),
        ({"function_call": {"name": "f", "arguments": "{"}}, "", "f{"),
        ({"tool_calls": [{"type": "custom", "custom": {"name": "f", "input": "x"}}]}, "", "fx"),
        ({"content": "b", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, "", "bf{}"),
        # The same text in several fields is one text.
        ({"reasoning": "a", "reasoning_content": "a", "reasoning_details": [{"text": "a"}]}, "a", ""),
        # These fields hold no text.
        ({"name": "bot", "channel": "analysis", "tool_call_id": "7", "type": "message"}, "", ""),
        ({"content": "", "extra_content": {"google": {"thought_signature": "c2ln"}}}, "", ""),
        ({"reasoning_details": [{"type": "reasoning.encrypted", "data": "c2ln"}], "encrypted_content": "c2ln"}, "", ""),
        ({"annotations": [{"url_citation": {"title": "t", "content": "c"}}], "context": {"content": "c"}}, "", ""),
    ],
)
def test_a_text_counts_in_whatever_field_it_comes(said: dict[str, object], reasoning: str, text: str) -> None:
    answer = chat(delta(role="assistant", content=""), delta(**said), delta("stop"))
    assert answer.error is None
    assert "".join(event.text for event in answer.events if event.reasoning) == reasoning
    assert answer.text == text
    reply = conversation.Reply(0.0)
    shown: list[tuple[str, bool]] = []
    conversation._take(delta(**said), reply, lambda piece, thought: shown.append((piece, thought)))
    assert [piece for piece, thought in shown if thought] == [reasoning] * bool(reasoning)


def test_nesting_and_broken_characters_do_no_harm() -> None:
    deep: object = "a"
    for _ in range(500):
        deep = [deep]
    assert chat(delta(content=deep), delta(content=[{"text": "\ud83d"}])).text == "\ufffd"


def test_responses_before_the_first_text_are_noted() -> None:
    answer = chat(
        delta(role="assistant", content=""), delta(hidden="a"), delta(role="assistant", content=""), delta(content="b")
    )
    assert (answer.role_ns, answer.silent_ns, answer.silent, answer.unread) == (0, 1, 2, "hidden")
    answer = chat(delta(content=[{"type": "new", "blob": "a"}]), delta(content="b", hidden="c"))
    assert (answer.silent_ns, answer.silent, answer.unread) == (0, 1, "blob")
    answer = chat(delta(role="assistant", content=""), delta(content="b"), delta(content=""), delta("stop"))
    assert (answer.silent_ns, answer.silent, answer.unread) == (None, 0, None)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"error": {"message": "no"}}, "no"),
        ({"error": {"reason": "no"}}, '{"reason": "no"}'),
        ({"error": ""}, '""'),
        ({"detail": "Unknown model: m"}, "Unknown model: m"),
        ({"object": "error", "message": "too long"}, "too long"),
        ({"choices": []}, None),
    ],
)
def test_what_a_server_says_went_wrong_is_read_in_each_of_its_forms(body: dict[str, object], said: str | None) -> None:
    assert fields.error_of(body) == said
    if said is not None:
        assert conversation._refused("http://h", 400, json.dumps(body).encode()).message == f"http://h: {said}"


def test_an_error_of_no_known_form_is_shown() -> None:
    assert fields.error_of({"message": "no", "code": 1}, failed=True) == "no"
    assert fields.error_of({"code": 1}, failed=True) == '{"code": 1}'
    assert conversation._refused("http://h", 400, b'{"message": "no"}').message == "http://h: no"
