"""One answer as it arrives: stop words, accumulated texts, reasons of its end, and the events that it becomes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trtllm_pipeline.serve.gateway.choice import Choice
from trtllm_pipeline.serve.gateway.dialects.parsing import CallArguments, CallStart, Content, Reasoning
from trtllm_pipeline.serve.gateway.openai_answers import Answers, TokenUsage
from trtllm_pipeline.serve.gateway.parsed_request import ParsedRequest
from trtllm_pipeline.serve.gateway.stops import StopWords


class Watched:
    def __init__(
        self, *stops: str, accumulates: bool = False, max_tokens: int = 10, wants_tokens: bool = False, **more: Any
    ) -> None:
        self.enough = 0
        self.changes: list[tuple[int, bool]] = []
        """Tokens of each response, and whether there was output in it."""
        self.choice = Choice(
            0,
            StopWords(stops),
            None,
            max_tokens=max_tokens,
            accumulates=accumulates,
            wants_tokens=wants_tokens,
            changed=lambda _choice, tokens, output: self.changes.append((tokens, output)),
            enough=lambda _choice: self._enough(),
            **more,
        )

    def _enough(self) -> None:
        self.enough += 1

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.choice.deltas if isinstance(delta, Content))


def test_the_end_of_an_answer_that_the_server_sends_whole_and_does_not_count() -> None:
    for text, reason in (("a b c", "length"), ("a b", "stop")):
        watched = Watched(max_tokens=3, count=lambda text: len(text.split()))
        watched.choice.received(0, text, None)
        watched.choice.end()
        assert (watched.choice.finish, watched.choice.output_tokens) == (reason, None)


def test_texts_that_nobody_takes_are_joined() -> None:
    watched = Watched()
    for part in ("a", "", "b", "c"):
        watched.choice.received(0, part, 1)
    assert watched.choice.deltas == [Content("abc")]
    assert watched.changes == [(1, True), (1, False), (1, True), (1, True)]
    watched.choice.end()
    assert (watched.choice.finish, watched.choice.output_tokens) == ("stop", 4)


def test_a_stop_word_ends_it_and_what_comes_after_is_not_taken() -> None:
    watched = Watched("END")
    for part in ("one E", "N", "D two", "three"):
        watched.choice.received(0, part, 1)
    watched.choice.end()
    assert (watched.text, watched.choice.finish, watched.enough) == ("one ", "stop", 1)
    assert watched.choice.output_tokens == 3


def test_what_was_held_for_a_stop_word_comes_at_the_end() -> None:
    watched = Watched("END", max_tokens=2)
    watched.choice.received(0, "one", 1)
    watched.choice.received(0, " EN", 1)
    assert watched.text == "one "
    watched.choice.end()
    assert (watched.text, watched.choice.finish) == ("one EN", "length")
    assert watched.changes == [(1, True), (1, True), (0, True)]


def test_text_that_is_held_back_is_no_output_yet() -> None:
    watched = Watched("END")
    for part in ("", "E", "N", "x"):
        watched.choice.received(0, part, 1)
    assert watched.changes == [(1, False), (1, False), (1, False), (1, True)]


def test_accumulated_texts_become_what_each_added() -> None:
    watched = Watched(accumulates=True)
    for part in ("h", "h\ufffd", "hé", "hé", "hé w"):
        watched.choice.received(0, part, 1)
    assert watched.text == "hé w"


def test_log_probabilities_of_servers_that_repeat_them() -> None:
    watched = Watched(wants_tokens=True)
    for part, given in (("a", [-1.0]), ("b", [-1.0, -2.0])):
        watched.choice.log_probs = given
        watched.choice.received(0, part, 1)
    assert [(token.text, token.log_probs) for token in watched.choice.tokens] == [("a", [-1.0]), ("b", [-2.0])]


def parsed(events: str) -> list[dict[str, Any]]:
    assert events.endswith("\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in events.split("\n\n") if event]


def test_events_are_json_whatever_the_text_holds() -> None:
    answers = Answers(ParsedRequest("chat", 'm"\n\u2028', include_usage=True), None)
    text = '"\\\n\r\u2028</s>\x00é😀\ud800'
    deltas = (Content(text), Reasoning("why"), CallStart(0, "call_1", 'f"'), CallArguments(0, '{"a": 1}'))
    events = parsed(answers.events(1, deltas, ()))
    assert [event["choices"][0]["delta"] for event in events] == [
        {"content": text},
        {"reasoning_content": "why"},
        {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": {"name": 'f"', "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 1}'}}]},
    ]
    assert {event["model"] for event in events} == {'m"\n\u2028'}
    assert all(event["usage"] is None and event["choices"][0]["index"] == 1 for event in events)
    (last,) = parsed(answers.end(lambda: TokenUsage(2, 3)).decode().removesuffix("data: [DONE]\n\n"))
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 5)


@pytest.mark.parametrize(("prompt", "completion"), [(None, 1), (1, None)])
def test_a_count_that_nobody_knows_is_no_count(prompt: int | None, completion: int | None) -> None:
    assert TokenUsage(prompt, completion).to_json() is None
