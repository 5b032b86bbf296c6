"""Responses in the format of OpenAI's API: an object, or a stream of events whose fixed parts are written once."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, Final, NamedTuple

from trtllm_pipeline.serve.gateway.api_error import ApiError
from trtllm_pipeline.serve.gateway.choice import CUT, Choice, Token
from trtllm_pipeline.serve.gateway.dialects.parsing import CallArguments, CallStart, Content, Delta, Reasoning
from trtllm_pipeline.serve.gateway.model_texts import ModelTexts
from trtllm_pipeline.serve.gateway.parsed_request import ParsedRequest

DONE: Final = b"data: [DONE]\n\n"


class TokenUsage(NamedTuple):
    """Token counts of a request. None if unknown."""

    prompt: int | None
    completion: int | None

    def to_json(self) -> dict[str, Any] | None:
        """None if a count is unknown: a partial one would look complete."""
        if self.prompt is None or self.completion is None:
            return None
        total = self.prompt + self.completion
        return {"prompt_tokens": self.prompt, "completion_tokens": self.completion, "total_tokens": total}


def failed_event(failure: ApiError) -> bytes:
    return b"data: " + failure.body + b"\n\n"


class Answers:
    """Writes the responses of one request."""

    def __init__(self, request: ParsedRequest, texts: ModelTexts | None) -> None:
        self._chat = request.endpoint == "chat"
        self._texts = texts
        self._log_probs = request.logprobs
        self._id = f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = request.model
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        model = quoted(request.model)
        self._head = f'{{"id":"{self._id}","object":"{kind}","created":{self._created},"model":{model},"choices":['
        self._include_usage = request.include_usage
        self._usage = ',"usage":null' if request.include_usage else ""
        self._offsets: dict[int, int] = {}

    def role(self, index: int) -> str:
        """The event that starts a chat response. Empty for a completion."""
        return self._event(index, '{"role":"assistant","content":""}', []) if self._chat else ""

    def events(self, index: int, deltas: Sequence[Delta], tokens: Sequence[Token]) -> str:
        """Events for the text added to a choice."""
        if not deltas and tokens:
            deltas = (Content(""),)
        last = len(deltas) - 1
        return "".join(
            self._event(index, self._delta(delta), tokens if number == last else ())
            for number, delta in enumerate(deltas)
        )

    def finish(self, index: int, reason: str) -> str:
        return self._event(index, "{}" if self._chat else '""', (), f'"{reason}"')

    def end(self, usage: Callable[[], TokenUsage]) -> bytes:
        """The events that end the stream. If counts are requested, one event has the counts and no choice."""
        if not self._include_usage:
            return DONE
        return f'data: {self._head}],"usage":{json.dumps(usage().to_json())}}}\n\n'.encode() + DONE

    def failed(self, failure: ApiError) -> bytes:
        return failed_event(failure)

    def _event(self, index: int, delta: str, tokens: Sequence[Token], reason: str = "null") -> str:
        name = "delta" if self._chat else "text"
        log_probs = json.dumps(self._log_probs_of(index, tokens)) if self._log_probs and tokens else "null"
        return (
            f'data: {self._head}{{"index":{index},"{name}":{delta},"logprobs":{log_probs},"finish_reason":{reason}}}]'
            f"{self._usage}}}\n\n"
        )

    def _delta(self, delta: Delta) -> str:
        if isinstance(delta, Content):
            return f'{{"content":{quoted(delta.text)}}}' if self._chat else quoted(delta.text)
        if isinstance(delta, Reasoning):
            return f'{{"reasoning_content":{quoted(delta.text)}}}'
        if isinstance(delta, CallStart):
            function = f'{{"name":{quoted(delta.name)},"arguments":""}}'
            return (
                f'{{"tool_calls":[{{"index":{delta.index},"id":{quoted(delta.id)},"type":"function",'
                f'"function":{function}}}]}}'
            )
        return f'{{"tool_calls":[{{"index":{delta.index},"function":{{"arguments":{quoted(delta.text)}}}}}]}}'

    def whole(self, choices: Iterable[Choice], prompts: Sequence[str], usage: TokenUsage) -> bytes:
        """The response as one object. If requested, `prompts` precede the texts, one for each choice."""
        items = []
        for choice in choices:
            log_probs = self._log_probs_of(choice.index, choice.tokens) if self._log_probs else None
            value: dict[str, Any]
            if self._chat:
                value = {"message": _message(choice.deltas)}
            else:
                text = "".join(delta.text for delta in choice.deltas if isinstance(delta, Content))
                value = {"text": (prompts[choice.index] if prompts else "") + text}
            items.append({"index": choice.index, **value, "logprobs": log_probs, "finish_reason": choice.finish})
        kind = "chat.completion" if self._chat else "text_completion"
        body = {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": items}
        return json.dumps({**body, "usage": usage.to_json()}).encode()

    def _log_probs_of(self, index: int, generated: Sequence[Token]) -> dict[str, Any]:
        if self._chat:
            return {"content": named_log_probs(self._texts, generated), "refusal": None}
        tokens = [each for token in generated for each in _named(self._texts, token)]
        offsets = []
        at = self._offsets.get(index, 0)
        for text, _, _ in tokens:
            offsets.append(at)
            at += len(text)
        self._offsets[index] = at
        return {
            "tokens": [text for text, _, _ in tokens],
            "token_logprobs": [value for _, value, _ in tokens],
            "top_logprobs": [dict(top) for _, _, top in tokens] if any(top for _, _, top in tokens) else None,
            "text_offset": offsets,
        }


def named_log_probs(texts: ModelTexts | None, generated: Sequence[Token]) -> list[dict[str, Any]]:
    """Log probabilities of tokens, as in chats and responses."""
    return [
        {**_log_prob(text, value), "top_logprobs": [_log_prob(*each) for each in top]}
        for token in generated
        for text, value, top in _named(texts, token)
    ]


def _named(texts: ModelTexts | None, token: Token) -> list[tuple[str, float, list[tuple[str, float]]]]:
    """Text and log probability of each token, and of the most likely ones at its position.

    The server sends no ids of the chosen tokens: the tokenizer splits a text of several.
    """
    count = len(token.log_probs)
    if count == 0:
        return []
    pieces = [token.text] if count == 1 or texts is None else texts.pieces(token.text, count)
    pieces += [""] * (count - len(pieces))
    tops: list[list[tuple[str, float]]] = [[] for _ in pieces]
    if texts is not None:
        tops = [[(texts.token_text(number), value) for number, value in top] for top in token.top[:count]] + tops
    return list(zip(pieces, token.log_probs, tops, strict=False))


def _log_prob(text: str, value: float) -> dict[str, Any]:
    """A token with its log probability. The bytes are unknown for part of a character."""
    return {"token": text, "logprob": value, "bytes": None if CUT in text else list(text.encode())}


def _message(deltas: Iterable[Delta]) -> dict[str, Any]:
    content, reasoning = [], []
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        if isinstance(delta, Content):
            content.append(delta.text)
        elif isinstance(delta, Reasoning):
            reasoning.append(delta.text)
        elif isinstance(delta, CallStart):
            calls[delta.index] = {"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}}
        elif isinstance(delta, CallArguments):
            calls[delta.index]["function"]["arguments"] += delta.text
    message: dict[str, Any] = {"role": "assistant", "content": "".join(content) if content or not calls else None}
    message["refusal"] = None
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message
