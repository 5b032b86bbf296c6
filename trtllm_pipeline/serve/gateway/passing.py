"""Inspects the response of an OpenAI-compatible server while it is passed on: has it output yet, and is it complete?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from trtllm_pipeline.measure import ProtocolError, fields, timestamped_socket
from trtllm_pipeline.serve.gateway.parsed_request import Endpoint

_EVENT_END: Final = re.compile(rb"\r?\n\r?\n|\r\r")
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_DONE: Final = b"[DONE]"
_NO_OUTPUT: Final = frozenset({"role", "type", "id", "index", "format"})
"""Fields of a message and its parts that are not model output."""
_FAILED: Final = frozenset({"error", "abort"})
"""Finish reasons for a response that its server aborted, in vLLM and SGLang."""
_FAILED_RESPONSES: Final = frozenset({"failed", "cancelled"})
_COUNTS: Final = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens"}


class StreamCutter:
    """Splits a stream into whole events, each including the empty line that ends it."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, part: bytes) -> Iterator[bytes]:
        """The events completed by `part`. Raises ProtocolError for an event larger than MAX_MESSAGE_BYTES."""
        searched = max(0, len(self._rest) - 3)
        self._rest += part
        start = 0
        for end in _EVENT_END.finditer(self._rest, searched):
            yield bytes(self._rest[start : end.end()])
            start = end.end()
        del self._rest[:start]
        if len(self._rest) > timestamped_socket.MAX_MESSAGE_BYTES:
            raise ProtocolError(f"an event in the response exceeds {timestamped_socket.MAX_MESSAGE_BYTES} bytes")

    def end(self) -> bytes:
        """The event that the end of the response cut off."""
        return bytes(self._rest)


class AnswerCheck:
    """Inspects a response. `failure` is set as soon as it is known that the response cannot be complete."""

    def __init__(self) -> None:
        self.error: str | None = None
        self.done = False
        """True after the event that ends a stream."""
        self.usage: Mapping[str, Any] = {}
        self._finished: dict[Any, bool] = {}
        """For each choice so far, True if it has ended."""

    def event(self, event: bytes) -> bool:
        """Read a server-sent event. Returns whether it has output."""
        if (instead := fields.not_a_stream(event)) is not None:
            self.error = self.error or instead
            return False
        lines = [line.partition(b":") for line in _LINE_END.split(event)]
        data = b"\n".join(value.removeprefix(b" ") for name, _, value in lines if name == b"data")
        failed = any(name == b"event" and value.strip() == b"error" for name, _, value in lines)
        self.done |= data.strip() == _DONE
        return bool(data) and not self.done and self.whole(data, failed=failed)

    def whole(self, data: bytes, *, failed: bool = False) -> bool:
        """Read an object. Returns whether it has output. `failed`: the server reported an error."""
        try:
            body = fields.parse(data)
        except ProtocolError as broken:
            self.error = self.error or str(broken)
            return False
        return self._read(body, failed=failed)

    def _read(self, body: Mapping[str, Any], *, failed: bool) -> bool:
        if (error := fields.error_of(body, failed=failed)) is not None:
            self.error = self.error or error
            return False
        usage, choices = body.get("usage"), body.get("choices")
        self.usage = usage if isinstance(usage, dict) else self.usage
        output = False
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                output |= self._choice(choice)
        return output

    def _choice(self, choice: Mapping[str, Any]) -> bool:
        index, reason = choice.get("index"), choice.get("finish_reason")
        index = index if isinstance(index, int) else 0
        self._finished[index] = self._finished.get(index, False) or bool(reason)
        if isinstance(reason, str) and reason in _FAILED:
            self.error = self.error or f"the response ended with finish_reason {reason}"
        return any(_has_output(choice.get(name)) for name in ("delta", "message", "text"))

    @property
    def failure(self) -> str | None:
        """Why a response that ends here is incomplete. None for a complete one."""
        if self.error is not None:
            return self.error
        if not self._finished:
            return "the response ended without any choice"
        return None if all(self._finished.values()) else "the response ended without a finish_reason"


class ResponseCheck(AnswerCheck):
    """As `AnswerCheck`, for the Responses API. Its events have types."""

    def __init__(self) -> None:
        super().__init__()
        self._ended = False

    def _read(self, body: Mapping[str, Any], *, failed: bool) -> bool:
        response = body.get("response")
        response = response if isinstance(response, dict) else body
        failed = failed or body.get("type") == "error" or response.get("status") in _FAILED_RESPONSES
        if (error := fields.error_of(response, failed=failed)) is not None:
            self.error = self.error or error
            return False
        if isinstance(usage := response.get("usage"), dict):
            self.usage = {name: usage.get(theirs) for name, theirs in _COUNTS.items()}
        if response.get("status") in {"completed", "incomplete"} and response.get("object") == "response":
            self._ended = True
        return bool(body.get("delta") or body.get("output"))

    @property
    def failure(self) -> str | None:
        """Why a response that ends here is incomplete. None for a complete one."""
        return self.error or (None if self._ended else "the response ended before it was complete")


def check_of(endpoint: Endpoint) -> AnswerCheck:
    return ResponseCheck() if endpoint == "responses" else AnswerCheck()


def _has_output(value: object) -> bool:
    """True if a message, or part of it, has text: content, reasoning or a tool call, in any field."""
    if isinstance(value, dict):
        return any(_has_output(each) for name, each in value.items() if name not in _NO_OUTPUT)
    if isinstance(value, list):
        return any(map(_has_output, value))
    return isinstance(value, str) and bool(value)
