"""Answers with log probabilities, which the scripted servers of the other tests do not send, in OpenAI's shapes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.openai_shapes import chunk_of, shaped
from trtllm_pipeline.serve.gateway.choice import Choice
from trtllm_pipeline.serve.gateway.openai_answers import Answers, TokenUsage
from trtllm_pipeline.serve.gateway.parsed_request import read
from trtllm_pipeline.serve.gateway.stops import StopWords

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}], "logprobs": True}
COMPLETION = {"model": "m", "prompt": "x", "logprobs": 0}


def choice_of(*parts: tuple[str, float]) -> Choice:
    """A choice whose tokens came one by one."""
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
    for text, log_prob in parts:
        choice.log_probs = [log_prob]
        choice.received(1, text, 1)
    choice.end()
    return choice


@pytest.mark.parametrize("chat", [True, False])
def test_log_probabilities(chat: bool) -> None:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

    answers = Answers(read("chat" if chat else "completions", CHAT if chat else COMPLETION), None)
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
    events = (
        answers.events(0, choice.deltas, choice.tokens) + answers.finish(0, "stop") + answers.usage(TokenUsage(3, 2))
    )
    chunks = [chunk_of(event, chat=chat) for event in events.strip().split("\n\n")]
    assert [len(chunk.choices) for chunk in chunks] == [1, 1, 0]
    assert chunks[0].choices[0].logprobs is not None
    assert chunks[-1].usage.total_tokens == 5
