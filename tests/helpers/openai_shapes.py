"""Answers held against the types that OpenAI publishes, which its Python client brings."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import pytest
from pydantic import BaseModel

pytest.importorskip("openai")
M = TypeVar("M", bound=BaseModel)
OURS = {"reasoning_content", "max_model_len"}
"""Fields that OpenAI's API does not have; other servers write them as well."""


def shaped(kind: type[M], data: str | bytes) -> M:
    """`data` as OpenAI's type, strictly, and with no field that the type does not know, but ours."""
    found = kind.model_validate_json(data, strict=True)
    assert _unknown(found) <= OURS
    return found


def _unknown(value: Any) -> set[str]:
    if isinstance(value, BaseModel):
        inner = [_unknown(getattr(value, name)) for name in type(value).model_fields]
        return set(value.model_extra or {}).union(*inner)
    return set().union(*map(_unknown, value)) if isinstance(value, list) else set()


def chunk_of(event: str, *, chat: bool) -> Any:
    """The object in an event of a stream."""
    from openai.types import Completion
    from openai.types.chat import ChatCompletionChunk

    data = event.removeprefix("data: ")
    if chat:
        return shaped(ChatCompletionChunk, data)
    # OpenAI's type of a completion has no null here; its API sends it in all events but the last.
    found = json.loads(data)
    reasons = [choice["finish_reason"] for choice in found["choices"]]
    for choice in found["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
    chunk = shaped(Completion, json.dumps(found))
    for choice, reason in zip(chunk.choices, reasons, strict=True):
        choice.finish_reason = reason
    return chunk
