"""Responses in the format of OpenAI's Responses API: a list of items, streamed as events with a type and a number."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from trtllm_pipeline.serve.gateway.api_error import ApiError
from trtllm_pipeline.serve.gateway.choice import Choice, Token
from trtllm_pipeline.serve.gateway.dialects.parsing import CallArguments, CallStart, Content, Delta, Reasoning
from trtllm_pipeline.serve.gateway.model_texts import ModelTexts
from trtllm_pipeline.serve.gateway.openai_answers import Answers, TokenUsage, named_log_probs
from trtllm_pipeline.serve.gateway.parsed_request import ParsedRequest

_TEXT: Final = {Content: ("message", "msg", "output_text"), Reasoning: ("reasoning", "rs", "reasoning_text")}
"""Kind of text -> type of its item, prefix of the item's id, type of its part."""


class ResponseAnswers(Answers):
    """Writes the response to one request."""

    def __init__(self, request: ParsedRequest, texts: ModelTexts | None) -> None:
        super().__init__(request, texts)
        self._response = {
            "id": _id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": request.model,
            "output": [],
            **request.repeated,
            "usage": None,
        }
        self._output: list[dict[str, Any]] = []
        self._kind: type[Delta] | None = None
        """Parts of the item in progress, the last of `_output`."""
        self._numbered = 0

    def role(self, index: int) -> str:  # noqa: ARG002
        """The events that a response starts with."""
        return "".join(self._typed(f"response.{each}", response=self._response) for each in ("created", "in_progress"))

    def events(self, index: int, deltas: Sequence[Delta], tokens: Sequence[Token]) -> str:  # noqa: ARG002
        """Events for the text added to the response."""
        if not deltas and tokens:
            deltas = (Content(""),)
        log_probs = named_log_probs(self._texts, tokens) if self._log_probs else []
        last = len(deltas) - 1
        return "".join(self._added(delta, log_probs if number == last else []) for number, delta in enumerate(deltas))

    def finish(self, index: int, reason: str) -> str:  # noqa: ARG002
        cut = reason == "length"
        events = self._closed("incomplete" if cut else "completed")
        self._response["status"] = "incomplete" if cut else "completed"
        self._response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        self._response["output"] = self._output
        return events

    def end(self, usage: Callable[[], TokenUsage]) -> bytes:
        """The event that ends the stream, with the whole response."""
        self._response["usage"] = _usage(usage())
        return self._typed(f"response.{self._response['status']}", response=self._response).encode()

    def failed(self, failure: ApiError) -> bytes:
        error = json.loads(failure.body)["error"]
        return self._typed(
            "error", **{name: error[name] for name in ("code", "message", "param")}, error=error
        ).encode()

    def _added(self, delta: Delta, log_probs: list[dict[str, Any]]) -> str:
        if isinstance(delta, CallStart):
            call = {"type": "function_call", "call_id": delta.id, "name": delta.name, "arguments": ""}
            return self._opened(CallArguments, _id("fc"), call)
        events = ""
        if not isinstance(delta, CallArguments):
            kind, prefix, part = _TEXT[type(delta)]
            if self._kind is not type(delta):
                own: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
                events = self._opened(type(delta), _id(prefix), {"type": kind, **own, "content": []})
                events += self._of_item("content_part.added", content_index=0, part=_part(part))
                self._output[-1]["content"] = [_part(part)]
            content = self._output[-1]["content"][0]
            content["text"] += delta.text
            more = {"content_index": 0, "delta": delta.text}
            if part == "output_text":
                content["logprobs"] += log_probs
                more["logprobs"] = log_probs
            return events + self._of_item(f"{part}.delta", **more)
        self._output[-1]["arguments"] += delta.text
        return self._of_item("function_call_arguments.delta", delta=delta.text)

    def _opened(self, kind: type[Delta], name: str, item: dict[str, Any]) -> str:
        events = self._closed("completed")
        self._kind = kind
        self._output.append({"id": name, "status": "in_progress", **item})
        return events + self._typed(
            "response.output_item.added", output_index=len(self._output) - 1, item=self._output[-1]
        )

    def _closed(self, status: str) -> str:
        """End the item in progress, if there is one."""
        kind, self._kind = self._kind, None
        if kind is None:
            return ""
        item = self._output[-1]
        item["status"] = status
        if kind is CallArguments:
            done = {"name": item["name"], "arguments": item["arguments"]}
            events = self._of_item("function_call_arguments.done", **done)
        else:
            part = item["content"][0]
            done = {name: part[name] for name in ("text", "logprobs") if name in part}
            events = self._of_item(f"{part['type']}.done", content_index=0, **done)
            events += self._of_item("content_part.done", content_index=0, part=part)
        return events + self._typed("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _of_item(self, name: str, /, **more: object) -> str:
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return self._typed(f"response.{name}", **place, **more)

    def _typed(self, name: str, /, **more: object) -> str:
        event = {"type": name, "sequence_number": self._numbered, **more}
        self._numbered += 1
        return f"event: {name}\ndata: {json.dumps(event)}\n\n"

    def whole(self, choices: Iterable[Choice], prompts: Sequence[str], usage: TokenUsage) -> bytes:  # noqa: ARG002
        for choice in choices:
            self.events(choice.index, choice.deltas, choice.tokens)
            self.finish(choice.index, str(choice.finish))
        return json.dumps({**self._response, "usage": _usage(usage)}).encode()


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def _part(kind: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": kind, "text": ""}
    return {**part, "annotations": [], "logprobs": []} if kind == "output_text" else part


def _usage(usage: TokenUsage) -> dict[str, Any] | None:
    counts = usage.to_json()
    if counts is None:
        return None
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},  # unknown; the type has no null
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
