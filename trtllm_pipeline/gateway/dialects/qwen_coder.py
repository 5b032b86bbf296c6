"""Qwen3-Coder, and others with its form: calls as tags, each argument's text as it is.

`<tool_call> <function=NAME> <parameter=KEY> text </parameter> </function> </tool_call>`, each on a line of its own.
"""

from __future__ import annotations

import json
from typing import Any, Final

from trtllm_pipeline.gateway.dialects.base import Dialect, Object
from trtllm_pipeline.gateway.dialects.parsing import BrokenError, Emit, Reader, Steps

_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
_WORDS: Final = {"True": True, "False": False, "None": None}
_FUNCTION: Final = "<function="
_PARAMETER: Final = "<parameter="
_PARAMETER_ENDS: Final = ("\n</parameter>", "</parameter>")


class QwenCoder(Dialect):
    """The schema of a tool says which arguments are texts. Source: https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct"""

    name = "qwen3-coder"
    markers = ("<tool_call>", _FUNCTION)
    ends = ("<|im_end|>",)
    takes_tools = True

    def beginning(self, name: str, schemas: Object, *, guided: bool) -> tuple[str, Object | None]:
        """The tag of the function; arguments in tags follow no JSON schema."""
        return f"<tool_call>\n{_FUNCTION}" + (f"{name}>\n" if name else ""), None

    def calls(self, reader: Reader, marker: str) -> Steps[None]:
        """One call."""
        if marker != _FUNCTION:
            yield from reader.space()
            yield from reader.need(_FUNCTION)
        name = (yield from reader.until(">")).strip()
        if not name or "\n" in name:
            raise BrokenError
        properties = reader.expected.tools.get(name, {}).get("properties")
        types = properties if isinstance(properties, dict) else {}
        yield from reader.call(name, lambda emit: _arguments(reader, types, emit))
        yield from reader.space()
        yield from reader.take("</tool_call>")


def _arguments(reader: Reader, types: dict[str, Any], emit: Emit) -> Steps[None]:
    emit("{")
    first = True
    while True:
        yield from reader.space()
        if (yield from reader.take("</function>")):
            break
        yield from reader.need(_PARAMETER)
        key = (yield from reader.until(">")).strip()
        yield from reader.take("\n")
        emit(f"{'' if first else ', '}{json.dumps(key, ensure_ascii=False)}: ")
        first = False
        schema = types.get(key)
        if _type_names(schema) == {"string"}:
            yield from _text(reader, emit)
        else:
            parts: list[str] = []
            yield from _value(reader, parts.append)
            emit(_converted("".join(parts), _type_names(schema)))
    emit("}")


def _text(reader: Reader, emit: Emit) -> Steps[None]:
    emit('"')
    yield from _value(reader, lambda piece: emit(json.dumps(piece, ensure_ascii=False)[1:-1]))
    emit('"')


def _value(reader: Reader, emit: Emit) -> Steps[None]:
    if (yield from reader.copy(emit, *_PARAMETER_ENDS)) is None:
        raise BrokenError


def _type_names(schema: Any) -> set[str]:
    """The types that a schema allows; string where it says none."""
    if not isinstance(schema, dict):
        return {"string"}
    found: set[str] = set()
    for one in (schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())):
        kind = one.get("type") if isinstance(one, dict) else None
        found.update([kind] if isinstance(kind, str) else kind if isinstance(kind, list) else [])
    return found & _TYPES.keys() or ({"string"} if not schema.get("enum") else set(_TYPES))


def _converted(text: str, allowed: set[str]) -> str:
    """A value in JSON: of an allowed type where it can be read as one, else the text."""
    text = text.strip()
    try:
        value = _WORDS[text] if text in _WORDS else json.loads(text)
        fits = any(isinstance(value, _TYPES[name]) for name in allowed)
        if fits and (not isinstance(value, bool) or "boolean" in allowed):
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        pass
    return json.dumps(text, ensure_ascii=False)
