"""Triton's `config.pbtxt`: parsed with line numbers, placeholders found and filled, written as protobuf text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from trtllm_pipeline.base import ServerError

if TYPE_CHECKING:
    ModelConfig = Any  # the message class is created at run time, so type checkers do not know it

FILE_NAME: Final = "config.pbtxt"
FaultKind = Literal["syntax", "field", "enum", "value"]

_PARTS: Final = re.compile(
    r"""(?P<comment>\#[^\n]*)|(?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|\$\{(?P<bare>\w+)\}"""
)
_PLACEHOLDER: Final = re.compile(r"\$\{(\w+)\}")
_KINDS: Final[tuple[tuple[str, FaultKind], ...]] = (
    ("has no field named", "field"),
    ("has no value named", "enum"),
    ("Value out of range", "value"),
    ("Couldn't parse", "value"),
    ("Expected string", "value"),
)


FLOAT_TYPES: Final = {"float32": "TYPE_FP32", "float16": "TYPE_FP16", "bfloat16": "TYPE_BF16"}
"""TensorRT-LLM's name for a data type -> Triton's."""


class ModelConfigError(ServerError):
    """The text is not a valid ModelConfig. `line` counts from 1. `kind` is the kind of fault: names, values or syntax."""

    def __init__(self, message: str, *, source: str, line: int | None, kind: FaultKind) -> None:
        super().__init__(f"{source}{'' if line is None else f':{line}'}: {message}")
        self.fault = message
        self.line = line
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Placeholder:
    """One `${name}` in a text, outside comments."""

    name: str
    line: int
    quoted: bool
    """True if it is inside a string, in a text that parses without a value. A bare one is a number or an enum value."""


def parse(text: str, *, source: str = FILE_NAME, allow_unknown: bool = False) -> ModelConfig:
    """The ModelConfig message in a text. Raises ModelConfigError with the line; `source` is the text's name.

    With `allow_unknown`, fields of other Triton versions are ignored.
    """
    from google.protobuf import text_format

    from trtllm_pipeline.models.triton_repository.triton_messages import model_config_pb2

    try:
        return text_format.Parse(text, model_config_pb2.ModelConfig(), allow_unknown_field=allow_unknown)
    except text_format.ParseError as error:
        message = re.sub(r"^\d+:\d+ : ", "", str(error))
        message = re.sub(r"^'.*': ", "", message, flags=re.DOTALL).rstrip(".")
        kind: FaultKind = next((kind for words, kind in _KINDS if words in message), "syntax")
        raise ModelConfigError(message, source=source, line=error.GetLine(), kind=kind) from error


def read(path: Path, *, allow_unknown: bool = False) -> ModelConfig:
    """The ModelConfig of a file. See `parse`. Raises ModelConfigError, and OSError if it cannot be read."""
    return parse(path.read_text(encoding="utf-8"), source=str(path), allow_unknown=allow_unknown)


def to_text(config: ModelConfig, *, as_utf8: bool = True) -> str:
    """`config` as protobuf text for `parse`, with non-ASCII letters escaped unless `as_utf8`."""
    from google.protobuf import text_format

    return str(text_format.MessageToString(config, as_utf8=as_utf8))


def data_type_name(number: int) -> str:
    """The name of a tensor's `data_type`, such as TYPE_FP16."""
    from trtllm_pipeline.models.triton_repository.triton_messages import model_config_pb2

    return str(model_config_pb2.DataType.Name(number))


def data_type_number(word: str) -> int:
    """The number of a `data_type`, such as TYPE_FP16."""
    from trtllm_pipeline.models.triton_repository.triton_messages import model_config_pb2

    return int(model_config_pb2.DataType.Value(word))


def string_parameters(config: ModelConfig) -> dict[str, str]:
    return {key: value.string_value for key, value in config.parameters.items()}


def placeholders(text: str) -> Iterator[Placeholder]:
    """All `${name}` in `text` outside comments, in order."""
    for part in _PARTS.finditer(text):
        line = text.count("\n", 0, part.start()) + 1
        if part["bare"] is not None:
            yield Placeholder(part["bare"], line, quoted=False)
        elif part["string"] is not None:
            yield from (Placeholder(name, line, quoted=True) for name in _PLACEHOLDER.findall(part["string"]))


def substitute(text: str, value: Callable[[Placeholder], str]) -> str:
    """`text` without comments. `value` replaces each placeholder, escaped as needed inside strings."""
    names = placeholders(text)

    def part(match: re.Match[str]) -> str:
        if match["comment"] is not None:
            return ""
        if match["bare"] is not None:
            return value(next(names))
        return _PLACEHOLDER.sub(lambda _: escaped(value(next(names))), match["string"])

    return _PARTS.sub(part, text)


def escaped(value: str) -> str:
    """`value` escaped for a protobuf string."""
    from google.protobuf import text_encoding

    return str(text_encoding.CEscape(value.encode(), as_utf8=False))


def without_comments(text: str) -> str:
    """`text` with comments replaced by blanks, so that lines and columns stay the same."""
    return _PARTS.sub(lambda part: " " * len(part[0]) if part["comment"] is not None else part[0], text)
