"""Calls as Python writes them: `[get_weather(city="Berlin", days=2), now()]`."""

from __future__ import annotations

import ast
import json
import re
from typing import Any, Final

from trtllm_pipeline.serve.gateway.dialects.parsing import BrokenError, Emit, Reader, Steps

_NAME: Final = re.compile(r"[A-Za-z_][\w.\-]*")
_WORDS: Final = {"true": True, "false": False, "null": None}
_ESCAPES: Final = frozenset("\\'\"abfnrtvxuUN01234567")
_LONGEST: Final = 32_000
"""Length limit of one call in characters: Python needs milliseconds per thousand, during which all other streams wait.
"""


def python_calls(reader: Reader) -> Steps[None]:
    """One call or a list of calls, each forwarded when it is complete. Raises BrokenError."""
    yield from reader.listed(lambda in_list: _call(reader, declared=in_list))


def _call(reader: Reader, *, declared: bool) -> Steps[None]:
    name = yield from _name(reader)
    known = name in reader.expected.tools
    if not known and name.endswith(".call"):  # Llama's own tools
        name, known = name.removesuffix(".call"), True
    if declared and not known:
        raise BrokenError
    parts: list[str] = ["f("]
    yield from _brackets(reader, parts.append)
    arguments = _arguments("".join(parts))

    def read(emit: Emit) -> Steps[None]:
        yield from ()
        emit(arguments)

    yield from reader.call(name, read)


def _name(reader: Reader) -> Steps[str]:
    """A function's name, up to the parenthesis."""
    text = ""
    while not (yield from reader.take("(")):
        text += yield from reader.character()
        if not _NAME.fullmatch(text):
            raise BrokenError
    return text


def _brackets(reader: Reader, emit: Emit) -> Steps[None]:
    """The text up to the matching closing bracket."""
    depth, length = 1, 0
    while depth:
        marker = yield from reader.copy(emit, "(", ")", "[", "]", "{", "}", "'", '"')
        if marker is None:
            raise BrokenError
        emit(marker)
        if marker in "'\"":
            yield from _string(reader, marker, emit)
        else:
            depth += 1 if marker in "([{" else -1
        length += 1
        if length > _LONGEST:
            raise BrokenError


def _string(reader: Reader, quote: str, emit: Emit) -> Steps[None]:
    while True:
        marker = yield from reader.copy(emit, quote, "\\", "\n")
        if marker is None:
            raise BrokenError
        if marker == "\\":
            escaped = yield from reader.character()
            # Models write newlines and backslashes unescaped, which Python rejects.
            emit("\\n" if escaped == "\n" else f"\\{escaped}" if escaped in _ESCAPES else f"\\\\{escaped}")
        else:
            emit("\\n" if marker == "\n" else marker)
        if marker == quote:
            return


def _arguments(source: str) -> str:
    """The arguments of a call as JSON. Raises BrokenError."""
    try:
        if len(source) > _LONGEST:
            raise BrokenError
        call = ast.parse(source, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
            raise BrokenError
        given = {str(each.arg): _value(each.value) for each in call.keywords}
        return json.dumps(given, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise BrokenError from error


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {str(ast.literal_eval(key)): _value(value) for key, value in zip(keys, values, strict=True) if key}
        case _:
            return ast.literal_eval(node)
