"""The text in a message of an OpenAI-compatible server, or in a delta of one, whatever field carries it.

Servers only agree on `content` and `tool_calls`. Reasoning arrives as `reasoning_content`, `reasoning` or `thinking`, in the
objects of `reasoning_details`, or among the parts of a `content` that is a list. The name of a field decides whether its
strings are text, at any depth. Text in a field with another name is ignored, which the gate `unseen_text` detects.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

from trtllm_pipeline.measure.client import fields

_ANSWER: Final = ("content", "text", "refusal")
_REASONING: Final = ("reasoning_content", "reasoning")
_CALLS: Final = ("tool_calls", "function_call")
_KNOWN: Final = frozenset({*_ANSWER, *_REASONING, *_CALLS, "role"})
_THOUGHTS: Final = frozenset({"reasoning", "thinking", "think", "thought", "thoughts", "analysis", "rationale", "cot"})
_TEXTS: Final = _THOUGHTS | {"content", "text", "refusal", "summary", "commentary", "transcript", "answer", "output"}
_OTHER: Final = frozenset(
    {
        "id",
        "ids",
        "type",
        "kind",
        "format",
        "role",
        "name",
        "index",
        "model",
        "effort",
        "signature",
        "encrypted",
        "data",
    }
    | {"url", "logprobs", "annotation", "annotations", "citation", "citations", "context", "filter", "documents"}
    | {"source", "sources", "search", "usage", "metadata"}
)
"""Words in names of fields without generated text at any depth, even with a word of `_TEXTS`."""
_DEEPEST: Final = 12
_WORD: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")


class ResponseText(NamedTuple):
    """The texts that a message or delta adds."""

    reasoning: str
    text: str
    """Content or a refusal."""
    calls: str
    """Names and arguments of tool calls, which are generated text too."""
    unread: str | None
    """The first unknown field with strings: possibly generated text."""


class _Piece(NamedTuple):
    text: str
    kind: Literal["text", "reasoning", "unread"]
    field: str


def read(message: Mapping[str, Any]) -> ResponseText:
    """The texts of a message or delta. Raises ProtocolError if a known field has a value of the wrong type."""
    text = reasoning = calls = ""
    unread: str | None = None
    others: list[tuple[str, object]] = []
    for name, value in message.items():
        if value is None or value == "" or name == "role":
            continue
        if name in _CALLS:
            calls = _calls(message)
        elif isinstance(value, list) or name not in _KNOWN:
            others.append((name, value))
        elif name in _ANSWER:
            text += fields.text(value, name)
        else:
            reasoning = reasoning or fields.text(value, name)
    for name, value in others:
        pieces = list(_pieces(value, name))
        reply, thought = _joined(pieces, "text"), _joined(pieces, "reasoning")
        # Some servers repeat a text in several fields, so the first one that has a text counts.
        text, reasoning = (text + reply if name in _ANSWER else text or reply), reasoning or thought
        unread = unread or next((piece.field for piece in pieces if piece.kind == "unread"), None)
    return ResponseText(reasoning, text, calls, unread)


def _joined(pieces: Iterable[_Piece], kind: str) -> str:
    return "".join(piece.text for piece in pieces if piece.kind == kind)


def _pieces(value: object, name: str, *, thought: bool = False, depth: int = 0) -> Iterator[_Piece]:
    """Each string in a field that may be text."""
    words = _words(name)
    if depth > _DEEPEST or words & _OTHER:
        return
    thought = thought or bool(words & _THOUGHTS)
    if isinstance(value, str) and value:
        known: Literal["text", "reasoning"] = "reasoning" if thought else "text"
        yield _Piece(fields.text(value, name), known if words & _TEXTS else "unread", name)
    elif isinstance(value, list):
        for each in value:
            yield from _pieces(each, name, thought=thought, depth=depth + 1)
    elif isinstance(value, dict):
        kind = value.get("type")
        thought = thought or (isinstance(kind, str) and bool(_words(kind) & _THOUGHTS))
        for key, each in value.items():
            yield from _pieces(each, key, thought=thought, depth=depth + 1)


@lru_cache(maxsize=256)
def _words(name: str) -> frozenset[str]:
    """The words of a name such as `reasoning_details`, `reasoning.text` or `thinkingBlocks`."""
    return frozenset(word.lower() for word in _WORD.findall(name[:100]))


def _calls(message: Mapping[str, Any]) -> str:
    called = [fields.mapping(each, "a tool call") for each in fields.items(message.get("tool_calls"), "tool_calls")]
    made = [fields.mapping(call.get("function") or call.get("custom"), "a function") for call in called]
    made.append(fields.mapping(message.get("function_call"), "function_call"))
    return "".join(fields.text(each.get(name), name) for each in made for name in ("name", "arguments", "input"))
