"""Answers of OpenAI-compatible servers: where they have their first output, and which of them are not whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_pipeline.serve.gateway.passing import AnswerCheck, StreamCutter, check_of

DONE = b"data: [DONE]\n\n"


def event(delta: dict[str, Any], finish_reason: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


ROLE, TEXT, STOP = event({"role": "assistant", "content": ""}), event({"content": "a"}), event({}, "stop")


def checked(*events: bytes) -> tuple[list[bool], str | None]:
    """Which events have output, and why the answer is not whole."""
    check = AnswerCheck()
    return [check.event(each) for each in events], check.failure


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "a"},
        {"content": [{"type": "text", "text": "a"}]},
        {"reasoning_content": "a"},
        {"reasoning": "a"},
        {"content": "", "reasoning_details": [{"type": "reasoning.text", "text": "a"}]},
        {"refusal": "a"},
        {"tool_calls": [{"index": 0, "id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
    ],
)
def test_whatever_carries_text_is_output(delta: dict[str, Any]) -> None:
    assert checked(ROLE, event(delta), STOP, DONE) == ([False, True, False, False], None)


@pytest.mark.parametrize(
    "other",
    [
        b": keep-alive\n\n",
        b"data:\n\n",
        b"event: ping\n\n",
        ROLE,
        event({"content": None, "role": "assistant"}),
        event({"tool_calls": [{"index": 0, "id": "1", "type": "function", "function": {"name": ""}}]}),
        event({"content": "", "reasoning_details": [{"type": "reasoning.text", "text": ""}]}),
        b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}\n\n',
        b'data: {"choices": null, "usage": null, "error": null}\n\n',
    ],
)
def test_what_carries_no_text_is_none(other: bytes) -> None:
    assert checked(other, TEXT, STOP, DONE) == ([False, True, False, False], None)


def test_completions_carry_text_beside_their_choice() -> None:
    parts = [
        b'data: {"choices": [{"index": 0, "text": "%s", "finish_reason": null}]}\r\n\r\n' % text for text in (b"", b"a")
    ]
    assert checked(*parts)[0] == [False, True]


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([], "without any choice"),
        ([DONE], "without any choice"),
        ([b": keep-alive\n\n", DONE], "without any choice"),
        ([ROLE, TEXT], "without a finish_reason"),
        ([ROLE, TEXT, DONE], "without a finish_reason"),
        ([TEXT, b'data: {"choices": [{"index": 1, "delta": {}, "finish_reason": "stop"}]}\n\n', DONE], "finish_reason"),
        ([TEXT, event({}, "abort"), DONE], "finish_reason abort"),
        ([TEXT, b'data: {"error": {"message": "it died", "code": 500}}\n\n', STOP, DONE], "it died"),
        ([TEXT, b'data: {"error": "it died"}\n\n', DONE], "it died"),
        ([TEXT, b'event: error\ndata: {"message": "it died"}\n\n', STOP, DONE], "it died"),
        ([TEXT, b'data: {"object": "error", "message": "it died"}\n\n', DONE], "it died"),
        ([TEXT, b"data: Internal Server Error\n\n", STOP], "expected a JSON object"),
        ([b'{"error": {"message": "it died"}}\n\n'], "it died"),
        ([b'{"choices": []}\n\n'], 'expected a stream of events, got {"choices": []}'),
    ],
)
def test_answers_that_are_not_whole(events: list[bytes], why: str) -> None:
    failure = checked(*events)[1]
    assert why in failure


def test_the_reason_may_come_with_the_text_and_before_the_counts() -> None:
    usage = b'data: {"choices": [], "usage": {"completion_tokens": 1}}\n\n'
    for events in ([event({"content": "a"}, "length"), usage, DONE], [TEXT, STOP], [event({}, "tool_calls"), DONE]):
        assert checked(*events)[1] is None


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "expected a JSON object"),
        (b"[]", "expected a JSON object"),
        (b"{}", "without any choice"),
        (b'{"choices": []}', "without any choice"),
        (b'{"choices": [{"message": {"content": "a"}, "finish_reason": null}]}', "without a finish_reason"),
        (b'{"error": {"message": "it died"}}', "it died"),
        (b'{"choices": [{"message": {"content": ""}, "finish_reason": "stop"}]}', None),
    ],
)
def test_whole_answers(body: bytes, why: str | None) -> None:
    check = AnswerCheck()
    check.whole(body)
    assert check.failure is None if why is None else why in str(check.failure)


@given(st.lists(st.sampled_from([b"data: 1\n", b"data: 2\r\n", b"\n", b"\r\n", b": x\n"]), max_size=9), st.data())
def test_a_stream_is_cut_alike_however_it_arrives(lines: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(lines)
    whole, pieces = StreamCutter(), StreamCutter()
    expected = list(whole.feed(stream))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    found: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += pieces.feed(stream[start:end])
    assert b"".join([*found, pieces.end()]) == stream
    assert (found, pieces.end()) == (expected, whole.end())


RESPONSE = {"object": "response", "status": "completed", "output": [], "usage": {"input_tokens": 3, "output_tokens": 2}}


def typed(kind: str, **more: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **more})}\n\n".encode()


@pytest.mark.parametrize(
    ("last", "failure"),
    [
        ([typed("response.completed", response=RESPONSE)], None),
        ([typed("response.incomplete", response={**RESPONSE, "status": "incomplete"}), DONE], None),
        (
            [typed("response.failed", response={"status": "failed", "error": {"message": "out of memory"}})],
            "out of memory",
        ),
        ([typed("error", code="x", message="out of memory")], "out of memory"),
        ([b'data: {"error": {"message": "out of memory"}}\n\n'], "out of memory"),
        ([], "ended before it was complete"),
        ([DONE], "ended before it was complete"),
    ],
)
def test_responses_are_followed(last: list[bytes], failure: str | None) -> None:
    check = check_of("responses")
    begun = typed("response.created", response={**RESPONSE, "status": "in_progress", "usage": None})
    events = [begun, typed("response.output_text.delta", delta="a"), *last]
    assert [check.event(each) for each in events] == [False, True, *[False] * len(last)]
    assert (check.failure is None) == (failure is None)
    assert (failure or "") in (check.failure or "")
    if failure is None:
        assert check.usage == {"prompt_tokens": 3, "completion_tokens": 2}


def test_a_whole_response_is_followed() -> None:
    check = check_of("responses")
    assert check.whole(json.dumps({**RESPONSE, "output": [{"type": "message"}]}).encode())
    assert check.failure is None
