"""gpt-oss: the channels of the harmony format. Every marker is a special token: without them, channels cannot be told
apart.
"""

from __future__ import annotations

import re
from typing import Any, Final

from trtllm_pipeline.measure import Chat
from trtllm_pipeline.serve.gateway.dialects.dialect import Dialect, Object
from trtllm_pipeline.serve.gateway.dialects.parsing import BrokenError, Content, Reader, Reasoning, Steps

_BODY: Final = "<|message|>"
_ENDS: Final = ("<|end|>", "<|return|>", "<|call|>")
_STARTS: Final = ("<|start|>", "<|channel|>")
_RECIPIENT: Final = re.compile(r"to=functions\.([^\s<]+)")


class Harmony(Dialect):
    """Analysis is reasoning, commentary to a function is a call, everything else is content.

    Source: https://cookbook.openai.com/articles/openai-harmony
    """

    name = "harmony"
    markers = (_BODY, *_ENDS, *_STARTS, "<|constrain|>")
    reasoning = {}
    takes_tools = True

    def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], variables: Object) -> Chat:
        """The template calls the reasoning of earlier messages `thinking`."""
        for message in messages:
            if "reasoning_content" in message:
                message.setdefault("thinking", message.pop("reasoning_content"))
            if not message["content"] and message.get("tool_calls"):
                del message["content"]
        return super().chat(messages, tools, variables)

    def beginning(self, name: str, schemas: Object, *, guided: bool) -> tuple[str, Object | None]:
        if not name:
            return "<|channel|>commentary to=functions.", None
        header = f"<|channel|>commentary to=functions.{name} <|constrain|>json{_BODY}"
        return header, schemas[name] if guided else None

    def grammar(self, reader: Reader) -> Steps[None]:
        """Consecutive messages. Text outside them is content."""
        while True:
            marker = yield from reader.pass_on(*_STARTS, *_ENDS)
            if marker is None:
                return
            if marker in _ENDS:
                reader.settle()
            else:
                yield from reader.attempt(self._message(reader))

    def _message(self, reader: Reader) -> Steps[None]:
        header = yield from reader.until(_BODY)
        recipient = _RECIPIENT.search(header)
        if recipient and reader.expected.tools:
            yield from reader.space()
            yield from reader.call(recipient[1], reader.arguments)
            yield from reader.space()
            yield from reader.take(*_ENDS)
            return
        if "<|start|>" in header:
            raise BrokenError
        reader.settle()
        thought = "analysis" in header
        end = yield from reader.pass_on(*_ENDS, *_STARTS, kind=Reasoning if thought else Content)
        if end in _STARTS:
            reader.back(len(end))
