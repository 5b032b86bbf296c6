"""Families that write calls as tags, with each argument's text unquoted: Qwen3-Coder and GLM."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Final

from trtllm_pipeline.serve.gateway.dialects.dialect import Dialect, Object
from trtllm_pipeline.serve.gateway.dialects.parsing import BrokenError, Emit, Reader, Steps

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


class TagCalls(Dialect):
    """A call is a name and, for each argument, a tag with its name and one with its text. The tool's schema defines
    which are text; the others are JSON.
    """

    takes_tools = True
    key: ClassVar[tuple[str, str]]
    """Text before an argument's name, and after it."""
    before_value: ClassVar[str] = ""
    after_value: ClassVar[tuple[str, ...]]
    end: ClassVar[str]

    def arguments(self, reader: Reader, name: str, emit: Emit) -> Steps[None]:
        """The arguments up to the end. Raises BrokenError."""
        properties = reader.expected.tools.get(name, {}).get("properties")
        types = properties if isinstance(properties, dict) else {}
        opening, closing = self.key
        emit("{")
        separator = ""
        while True:
            yield from reader.space()
            if (yield from reader.take(self.end)):
                break
            yield from reader.need(opening)
            key = (yield from reader.until(closing)).strip()
            if self.before_value:
                yield from reader.space()
                yield from reader.need(self.before_value)
            else:
                yield from reader.take("\n")
            emit(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            allowed = _type_names(types.get(key))
            if allowed == {"string"}:
                emit('"')
                yield from self._value(reader, lambda piece: emit(json.dumps(piece, ensure_ascii=False)[1:-1]))
                emit('"')
            else:
                parts: list[str] = []
                yield from self._value(reader, parts.append)
                emit(_converted("".join(parts), allowed))
        emit("}")

    def _value(self, reader: Reader, emit: Emit) -> Steps[None]:
        if (yield from reader.copy(emit, *self.after_value)) is None:
            raise BrokenError


class QwenCoder(TagCalls):
    """`<tool_call> <function=NAME> <parameter=KEY> text </parameter> </function> </tool_call>`, each on a separate
    line.

    Source: https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct, its chat template
    """

    name = "qwen3-coder"
    markers = ("<tool_call>", _FUNCTION)
    ends = ("<|im_end|>",)
    key = ("<parameter=", ">")
    after_value = ("\n</parameter>", "</parameter>")
    end = "</function>"

    def beginning(self, name: str, schemas: Object, *, guided: bool) -> tuple[str, Object | None]:
        """The tag of the function. Arguments in tags do not follow a JSON schema."""
        return f"<tool_call>\n{_FUNCTION}" + (f"{name}>\n" if name else ""), None

    def calls(self, reader: Reader, marker: str) -> Steps[None]:
        if marker != _FUNCTION:
            yield from reader.space()
            yield from reader.need(_FUNCTION)
        name = (yield from reader.until(">")).strip()
        if not name or "\n" in name:
            raise BrokenError
        yield from reader.call(name, lambda emit: self.arguments(reader, name, emit))
        yield from reader.space()
        yield from reader.close("</tool_call>")


class Glm(TagCalls):
    """`<tool_call>NAME <arg_key>KEY</arg_key> <arg_value>text</arg_value> </tool_call>`, on separate lines or not.

    Source: https://huggingface.co/zai-org/GLM-4.5, its chat template
    """

    name = "glm"
    markers = ("<tool_call>",)
    ends = ("<|user|>", "<|observation|>", "<|endoftext|>")
    key = ("<arg_key>", "</arg_key>")
    before_value = "<arg_value>"
    after_value = ("</arg_value>",)
    end = "</tool_call>"

    def beginning(self, name: str, schemas: Object, *, guided: bool) -> tuple[str, Object | None]:
        """The tag and the name. Arguments in tags do not follow a JSON schema."""
        return f"<tool_call>{name}" + ("\n" if name else ""), None

    def calls(self, reader: Reader, marker: str) -> Steps[None]:
        parts: list[str] = []
        value = yield from reader.copy(parts.append, "<arg_key>", self.end)
        name = "".join(parts).strip()
        if value is None or not name or "\n" in name or "{" in name:
            raise BrokenError
        reader.back(len(value))
        yield from reader.call(name, lambda emit: self.arguments(reader, name, emit))


def _type_names(schema: Any) -> set[str]:
    """The types that a schema allows. string if it names none."""
    if not isinstance(schema, dict):
        return {"string"}
    names: set[str] = set()
    for one in (schema, *_listed(schema.get("anyOf")), *_listed(schema.get("oneOf"))):
        kind = one.get("type") if isinstance(one, dict) else None
        names.update(each for each in (kind, *_listed(kind)) if isinstance(each, str))
    return names & _TYPES.keys() or ({"string"} if not schema.get("enum") else set(_TYPES))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _converted(text: str, allowed: set[str]) -> str:
    """A value as JSON: of an allowed type if it can be parsed as one, otherwise as text."""
    text = text.strip()
    try:
        value = _WORDS[text] if text in _WORDS else json.loads(text)
        fits = any(isinstance(value, _TYPES[name]) for name in allowed)
        if fits and (not isinstance(value, bool) or "boolean" in allowed):
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        pass
    return json.dumps(text, ensure_ascii=False)
