"""Answers with log probabilities, which the scripted servers of the other tests do not send, in OpenAI's shapes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.chat_models import write_model
from tests.helpers.openai_shapes import chunk_of, shaped
from trtllm_pipeline.serve.gateway.choice import Choice
from trtllm_pipeline.serve.gateway.model_texts import ModelTexts
from trtllm_pipeline.serve.gateway.openai_answers import Answers, TokenUsage
from trtllm_pipeline.serve.gateway.parsed_request import read
from trtllm_pipeline.serve.gateway.stops import StopWords

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}], "logprobs": True}
COMPLETION = {"model": "m", "prompt": "x", "logprobs": 0}


def choice_of(*parts: tuple[str, float], top: Sequence[list[tuple[int, float]]] = ()) -> Choice:
    """A choice whose tokens came one by one, with the most likely ones at each position."""
    choice = Choice(
        0,
        StopWords(()),
        None,
        max_tokens=9,
        accumulates=False,
        wants_tokens=True,
        changed=lambda _choice, _tokens, _output: None,
        enough=lambda _choice: None,
    )
    for (text, log_prob), best in zip_longest(parts, top):
        choice.log_probs = [log_prob]
        choice.top_log_probs = [best] if best else []
        choice.received(1, text, 1)
    choice.end()
    return choice


@pytest.mark.parametrize("chat", [True, False])
def test_log_probabilities(chat: bool) -> None:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

    request = {**(CHAT if chat else COMPLETION), "stream": True, "stream_options": {"include_usage": True}}
    answers = Answers(read("chat" if chat else "completions", request), None)
    choice = choice_of(("Hé", -0.5), ("llo", -0.25))
    data = answers.whole([choice], [], TokenUsage(3, 2))
    kind: Any = ChatCompletion if chat else Completion
    (found,) = shaped(kind, data).choices
    if chat:
        assert [(each.token, each.logprob, each.bytes) for each in found.logprobs.content] == [
            ("Hé", -0.5, [72, 195, 169]),
            ("llo", -0.25, [108, 108, 111]),
        ]
    else:
        assert json.loads(data)["choices"][0]["logprobs"]["text_offset"] == [0, 2]
        assert found.logprobs.token_logprobs == [-0.5, -0.25]
    events = answers.events(0, choice.deltas, choice.tokens) + answers.finish(0, "stop")
    *sent, done = (events + answers.end(lambda: TokenUsage(3, 2)).decode()).strip().split("\n\n")
    assert done == "data: [DONE]"
    chunks = [chunk_of(event, chat=chat) for event in sent]
    assert [len(chunk.choices) for chunk in chunks] == [1, 1, 0]
    assert chunks[0].choices[0].logprobs is not None
    assert chunks[-1].usage.total_tokens == 5


@pytest.mark.parametrize("chat", [True, False])
def test_the_most_likely_tokens(tmp_path: Path, chat: bool) -> None:
    """A token here is a byte; a part of a character has no bytes of a text."""
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

    request = {**CHAT, "top_logprobs": 2} if chat else {**COMPLETION, "logprobs": 2}
    answers = Answers(read("chat" if chat else "completions", request), ModelTexts(write_model(tmp_path), 1))
    choice = choice_of(("H", -0.5), ("i", -0.25), top=([(72, -0.5), (195, -1.5)], [(104, -0.125), (32, -2.0)]))
    kind: Any = ChatCompletion if chat else Completion
    (found,) = shaped(kind, answers.whole([choice], [], TokenUsage(3, 2))).choices
    if chat:
        assert [
            [(each.token, each.logprob, each.bytes) for each in token.top_logprobs] for token in found.logprobs.content
        ] == [
            [("H", -0.5, [72]), ("\ufffd", -1.5, None)],
            [("h", -0.125, [104]), (" ", -2.0, [32])],
        ]
    else:
        assert found.logprobs.top_logprobs == [{"H": -0.5, "\ufffd": -1.5}, {"h": -0.125, " ": -2.0}]
