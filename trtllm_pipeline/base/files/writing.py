"""Writes JSON files that the pipeline reads back, and CSV values that no spreadsheet runs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base.domain import Json
from trtllm_pipeline.base.files.reading import read_bytes

_encode: Final = json.JSONEncoder(ensure_ascii=False).encode


def json_lines(**parts: Json | Iterator[Json]) -> Iterator[str]:
    """An object as lines of JSON text. An iterator becomes a list, one line per item."""
    before = "{"
    for name, part in parts.items():
        if isinstance(part, Iterator):
            yield f"{before}{_encode(name)}: ["
            comma = ""
            for item in part:
                yield comma + _encode(item)
                comma = ","
            yield "]"
        else:
            yield f"{before}{_encode(name)}: {_encode(part)}"
        before = ","
    yield "}"


def object_text(data: Mapping[str, Json]) -> str:
    """An object as JSON text with one line for each member, and for each item of a list."""

    def text(part: Json) -> str:
        if not part or not isinstance(part, list):
            return _encode(part)
        items = ",\n  ".join(map(_encode, part))
        return f"[\n  {items}\n ]"

    parts = ",\n ".join(f"{_encode(name)}: {text(part)}" for name, part in data.items())
    return f"{{\n {parts}\n}}\n"


def csv_value(value: object) -> object:
    """`value`, with an apostrophe before text that a spreadsheet would run as a formula."""
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        try:
            float(value)
        except ValueError:
            return f"'{value}"
    return value


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file of the pipeline. None if the file is missing or has other content."""
    try:
        data = json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def write_json(path: Path, value: object, *, indent: int = 1) -> None:
    """Write `value` as JSON. Readers see the old file or the new one, never a part."""
    write_lines(path, (json.dumps(value, indent=indent, ensure_ascii=False),))


def write_once(path: str | Path, text: str) -> None:
    """Write a text file that does not have readers yet."""
    try:
        Path(path).write_bytes(text.encode())
    except OSError as error:
        error.filename = os.fspath(path)  # so that the message can name the full disk
        raise


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a text file. Readers see the old one or the new one, never a part."""
    _write(path, (f"{line}\n" for line in lines))


def write_text(path: Path, text: str) -> None:
    """Write a text file as `write_lines` does, keeping its line ends."""
    _write(path, (text,))


def _write(path: Path, parts: Iterable[str]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            file.writelines(parts)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
