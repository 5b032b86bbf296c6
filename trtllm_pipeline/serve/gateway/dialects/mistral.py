"""Mistral: `[TOOL_CALLS]` and a list of objects, or a name and its arguments, which newer tokenizers write."""

from __future__ import annotations

import hashlib
import secrets
import string
from typing import Any, Final

from trtllm_pipeline.measure import Chat
from trtllm_pipeline.serve.gateway.dialects.dialect import Object
from trtllm_pipeline.serve.gateway.dialects.json_calls import JsonCalls
from trtllm_pipeline.serve.gateway.dialects.parsing import BrokenError, Reader, Steps

_ALPHANUMERIC: Final = string.ascii_letters + string.digits
_ID_LENGTH: Final = 9


class Mistral(JsonCalls):
    """All markers are control tokens. If a backend drops them, calls of offered tools are still recognized at the start
    of the response. Templates reject call ids of another form, so ids of other models are replaced.

    Source: https://github.com/mistralai/mistral-common (tokens/tokenizers)
    """

    name = "mistral"
    markers = ("[TOOL_CALLS]",)
    ends = ("</s>",)
    reasoning = {"[THINK]": "[/THINK]", "<think>": "</think>"}
    in_lists = True
    by_name = False
    """True if a call is written as a name and arguments."""

    def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], variables: Object) -> Chat:
        """Converts call ids to nine letters and digits."""
        for message in messages:
            for call in message.get("tool_calls", ()):
                call["id"] = _short(str(call.get("id")))
            if message["role"] == "tool":
                message["tool_call_id"] = _short(str(message.get("tool_call_id")))
        return super().chat(messages, tools, variables)

    def new_id(self) -> str:
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(_ID_LENGTH))

    def beginning(self, name: str, schemas: Object, *, guided: bool) -> tuple[str, Object | None]:
        """The marker, followed by the name or the start of a list."""
        if not self.by_name:
            beginning, guide = super().beginning(name, schemas, guided=guided)
            return f"[TOOL_CALLS] [{beginning}", guide
        return (f"[TOOL_CALLS]{name}[ARGS]", schemas[name] if guided else None) if name else ("[TOOL_CALLS]", None)

    def grammar(self, reader: Reader) -> Steps[None]:
        """Starts with calls whose marker was dropped."""
        if reader.expected.tools:
            yield from reader.space()
            openings = [f"{name}{{" for name in reader.expected.tools]
            while (opening := (yield from reader.take(*openings))) is not None:
                reader.back(1)
                if not (yield from reader.attempt(reader.call(opening[:-1], reader.arguments))):
                    break
        yield from super().grammar(reader)

    def calls(self, reader: Reader, marker: str) -> Steps[None]:
        """Either form."""
        yield from reader.space()
        if (yield from reader.ahead("[", "{")):
            yield from reader.calls_in_json()
            return
        name, value = "", None
        while value is None:
            name += yield from reader.character()
            if len(name) > 256 or "\n" in name:
                raise BrokenError
            value = yield from reader.take("[CALL_ID]", "[ARGS]", "{")
        if value == "[CALL_ID]":
            yield from reader.until("[ARGS]")
        elif value == "{":
            reader.back(1)
        yield from reader.space()
        yield from reader.call(name.strip(), reader.arguments)


class MistralByName(Mistral):
    """Tokenizers since version 11."""

    name = "mistral-v11"
    by_name = True


def _short(identifier: str) -> str:
    if len(identifier) == _ID_LENGTH and identifier.isascii() and identifier.isalnum():
        return identifier
    return hashlib.sha256(identifier.encode(errors="replace")).hexdigest()[:_ID_LENGTH]
