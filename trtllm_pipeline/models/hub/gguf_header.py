"""Sizes of the tensors in GGUF files. The package gguf is not needed.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Final

from trtllm_pipeline.base import DownloadError
from trtllm_pipeline.models.files.model_files import find

_SPLIT: Final = re.compile(r"(.*)-\d{5}-of-\d{5}\.gguf")
_SCALARS: Final = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""Type of a value of GGUF -> its letter in `struct`."""
_TEXT, _LIST = 8, 9
_ALIGNMENT: Final = 32


@dataclass(slots=True)
class Gguf:
    """The header of a GGUF file."""

    tensors: dict[str, int] = field(default_factory=dict)
    """Bytes of each tensor by name."""
    experts: int = 0
    """Experts of a layer. A token uses some of them."""


def files(folder: Path) -> list[Path]:
    """The GGUF files of the one model in a directory, or a file itself. Raises DownloadError if there are several models."""
    if folder.is_file():
        return [folder]
    # The vision encoder has a separate file.
    found = sorted(path for path in folder.glob("*.gguf") if not path.name.startswith("mmproj"))
    models = {split[1] if (split := _SPLIT.fullmatch(path.name)) else path.name for path in found}
    if len(models) > 1:
        raise DownloadError(
            f"{folder} has {len(models)} GGUF models, and which of them is served is not known", hint="name the file"
        )
    return found


def read(path: Path) -> Gguf:
    """The header of a GGUF file. Raises DownloadError."""
    real = find(path.parent, path.name)
    if real is None:
        raise _damaged(path.name, "it is missing")
    try:
        with real.open("rb") as file:
            return _Header(file, real.stat().st_size).read()
    except (ValueError, struct.error, UnicodeDecodeError) as error:
        raise _damaged(path.name, f"cannot read its header: {error}") from error


class _Header:
    """Reads the header of a GGUF file."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self._size = file, size

    def read(self) -> Gguf:
        if self._file.read(4) != b"GGUF" or self._number("I") < 2:
            raise ValueError("it is not a GGUF file of version 2 or later")
        tensors, pairs = self._number("Q"), self._number("Q")
        known = {self._text(): self._value(self._number("I")) for _ in range(self._at_most(pairs, 12))}
        places = {}
        for _ in range(self._at_most(tensors, 24)):
            name = self._text()
            for _ in range(self._at_most(self._number("I"), 8)):
                self._number("Q")
            self._number("I")
            places[name] = self._number("Q")
        alignment = int(known.get("general.alignment") or _ALIGNMENT)
        start = -(-self._file.tell() // alignment) * alignment
        header = Gguf(experts=max((int(known[key]) for key in known if key.endswith(".expert_count")), default=0))
        # Each tensor lies up to the next one, but for some bytes between them.
        ends = sorted({*places.values(), self._size - start})
        following = dict(pairwise(ends))
        for name, place in places.items():
            if place >= self._size - start:
                raise ValueError(f"tensor {name} lies beyond the file's end")
            header.tensors[name] = following[place] - place
        return header

    def _number(self, letter: str) -> Any:
        size = struct.calcsize(f"<{letter}")
        (value,) = struct.unpack(f"<{letter}", self._file.read(size))
        return value

    def _at_most(self, count: int, each: int) -> int:
        """`count`, if that many items of `each` bytes fit into the rest of the file."""
        if count * each > self._size - self._file.tell():
            raise ValueError(f"it says that {count} things follow, which are not there")
        return count

    def _text(self) -> str:
        return self._file.read(self._at_most(self._number("Q"), 1)).decode()

    def _value(self, kind: int) -> Any:
        """A value; None for a list, of which nothing is needed."""
        if kind == _TEXT:
            return self._text()
        if kind != _LIST:
            return self._number(_SCALARS[kind]) if kind in _SCALARS else self._refuse(kind)
        kind, count = self._number("I"), self._number("Q")
        if kind in _SCALARS:
            size = struct.calcsize(f"<{_SCALARS[kind]}")
            self._file.seek(self._at_most(count, size) * size, 1)
            return None
        for _ in range(self._at_most(count, 1)):
            self._value(kind)
        return None

    def _refuse(self, kind: int) -> None:
        raise ValueError(f"unknown type {kind}")


def _damaged(name: str, reason: str) -> DownloadError:
    return DownloadError(f"cannot use {name}: {reason}", hint="download the model again, or from another source")
