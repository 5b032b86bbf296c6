"""Families that write calls as JSON after a marker: Hermes and Qwen, Phi, Granite."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from trtllm_pipeline.measure import Chat
from trtllm_pipeline.serve.gateway.dialects.dialect import Dialect, Object
from trtllm_pipeline.serve.gateway.dialects.parsing import Reader, Steps


class JsonCalls(Dialect):
    """Calls as `{"name": ..., "arguments": {...}}`, or lists of these, each after one of `markers`."""

    takes_tools = True
    opening: ClassVar[str] = ""
    """Text before a call's object."""
    closings: ClassVar[tuple[str, ...]] = ()
    """Optional text after it."""
    arguments_key: ClassVar[str] = "arguments"
    in_lists: ClassVar[bool] = False
    """True if calls are in lists. A call of an offered tool at the start of a response is recognized without its
    marker, which backends drop if it is a special token.
    """

    def beginning(self, name: str, schemas: Object, *, guided: bool) -> tuple[str, Object | None]:
        if name:
            encoded = json.dumps(name, ensure_ascii=False)
            return f'{self.opening}{{"name": {encoded}, "{self.arguments_key}": ', schemas[name] if guided else None
        if not guided:
            return f'{self.opening}{{"name": "', None
        return self.opening, {"anyOf": [self._object(one, schema) for one, schema in schemas.items()]}

    def _object(self, name: str, schema: Object) -> Object:
        return {
            "type": "object",
            "properties": {"name": {"const": name}, self.arguments_key: schema},
            "required": ["name", self.arguments_key],
            "additionalProperties": False,
        }

    def grammar(self, reader: Reader) -> Steps[None]:
        """Starts with calls whose marker was dropped."""
        if self.in_lists and reader.expected.tools:
            yield from reader.space()
            if (yield from reader.ahead("[{")) and (yield from reader.attempt(reader.calls_in_json(declared=True))):
                yield from reader.space()
                reader.settle()
        yield from super().grammar(reader)

    def calls(self, reader: Reader, marker: str) -> Steps[None]:
        yield from reader.calls_in_json()
        if self.closings:
            yield from reader.space()
            yield from reader.close(*self.closings)


class Hermes(JsonCalls):
    """Hermes 2 Pro and 3, Qwen2.5, Qwen3, QwQ, and others with the same format. Their markers are not special tokens.

    Source: https://qwen.readthedocs.io/en/latest/framework/function_call.html
    """

    name = "hermes"
    markers = ("<tool_call>",)
    closings = ("</tool_call>",)
    ends = ("<|im_end|>",)
    opening = "<tool_call>\n"


class InContent(JsonCalls):
    """Families whose templates do not support earlier calls: these become part of the message's content."""

    in_lists = True

    def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], variables: Object) -> Chat:
        """Earlier calls as the model wrote them."""
        for message in messages:
            calls = message.pop("tool_calls", None)
            if calls:
                items = [
                    {"name": call["function"]["name"], "arguments": call["function"]["arguments"]} for call in calls
                ]
                closing = self.closings[0] if self.closings else ""
                message["content"] += f"{self.markers[0]}{json.dumps(items, ensure_ascii=False)}{closing}"
        return super().chat(messages, tools, variables)


class Phi(InContent):
    """Phi-4-mini and Phi-4-multimodal: the system message carries the tools, as JSON text.

    Templates of other Phi models accept tools as usual, and request `functools[...]`. Source:
    https://huggingface.co/microsoft/Phi-4-mini-instruct
    """

    name = "phi"
    markers = ("<|tool_call|>", "functools[")
    closings = ("<|/tool_call|>",)
    ends = ("<|end|>", "<|endoftext|>")
    opening = "<|tool_call|>["

    def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], variables: Object) -> Chat:
        """The messages with the tools in the system message, which is added if there is none."""
        if tools:
            if messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": ""})
            messages[0]["tools"] = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
        return super().chat(messages, tools, variables)

    def calls(self, reader: Reader, marker: str) -> Steps[None]:
        """A list. With functools, it starts in the marker."""
        if marker.endswith("["):
            reader.back(1)
        yield from super().calls(reader, marker)


class Granite(InContent):
    """Granite 3. Granite 4 uses the format of Hermes. Source: https://www.ibm.com/granite/docs/models/granite"""

    name = "granite"
    markers = ("<|tool_call|>", "<tool_call>")
    ends = ("<|end_of_text|>",)
    opening = "<|tool_call|>["
