"""Sizes of tensors in files other than safetensors: torch's `pytorch_model*.bin`, and GGUF. Requires neither torch nor
gguf.

Torch format: a zip file with a pickle of the tensors' shapes, and a file for the values of each storage. Nothing in a
pickle is executed: it may only name the types of tensors, no other function. GGUF format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import pickle
import re
import struct
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from trtllm_pipeline.base import DownloadError
from trtllm_pipeline.models.files.model_files import find

_SINGLE: Final = "pytorch_model.bin"
_SHARD: Final = re.compile(r"pytorch_model-\d{5}-of-\d{5}\.bin")
_MOST_HEADER_BYTES: Final = 100_000_000
_PICKLE: Final = "/data.pkl"
_BITS: Final = {
    **dict.fromkeys(("ByteStorage", "CharStorage", "BoolStorage"), 8),
    **dict.fromkeys(("HalfStorage", "BFloat16Storage", "ShortStorage"), 16),
    **dict.fromkeys(("FloatStorage", "IntStorage"), 32),
    **dict.fromkeys(("DoubleStorage", "LongStorage"), 64),
}
_SPLIT: Final = re.compile(r"(.*)-\d{5}-of-\d{5}\.gguf")
_SCALARS: Final = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""GGUF value type -> its letter in `struct`."""
_TEXT, _LIST = 8, 9
_ALIGNMENT: Final = 32


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    values: int
    bytes: int


# torch


def torch_files(folder: Path) -> list[str]:
    """The names of the torch files that a server reads from a model's directory."""
    names = sorted(file.name for file in folder.glob("pytorch_model*.bin"))
    return [_SINGLE] if _SINGLE in names else [name for name in names if _SHARD.fullmatch(name)]


def torch_tensors(folder: Path, name: str) -> dict[str, StoredTensor]:
    """The tensors in a torch file by name. Of tensors that share their values, only the first. Raises DownloadError."""
    path = find(folder, name)
    if path is None:
        raise _damaged(name, "it is missing")
    if not zipfile.is_zipfile(path):
        raise _damaged(name, "it was not written by torch of 2020 or later")
    try:
        with zipfile.ZipFile(path) as archive:
            (of,) = (each for each in archive.infolist() if each.filename.endswith(_PICKLE))
            if of.file_size > _MOST_HEADER_BYTES:
                raise _damaged(name, f"its table of tensors has {of.file_size} bytes")
            with archive.open(of) as file:
                loaded = _Tensors(file).load()
            top = of.filename.removesuffix("data.pkl")
            sizes = {each.filename.removeprefix(f"{top}data/"): each.file_size for each in archive.infolist()}
    except DownloadError:
        raise
    except Exception as error:  # a pickle may contain anything, and fail in any way
        raise _damaged(name, f"it cannot be read: {error}") from error
    tensors, known = {}, set[str]()
    for key, tensor in loaded.items() if isinstance(loaded, dict) else ():
        if isinstance(tensor, _Tensor) and tensor.storage not in known:
            known.add(tensor.storage)
            size = tensor.values * tensor.bits // 8
            if size > sizes.get(tensor.storage, 0):
                raise _damaged(name, f"tensor {key} has {size} bytes, the file {sizes.get(tensor.storage, 0)} of them")
            tensors[str(key)] = StoredTensor(tensor.values, size)
    return tensors


class _Storage(NamedTuple):
    bits: int
    key: str


class _Tensor(NamedTuple):
    values: int
    bits: int
    storage: str


class _Named(dict[Any, Any]):
    """Replaces an OrderedDict: it accepts attributes."""


class _Tensors(pickle.Unpickler):
    """Reads a pickle of tensors, and rejects any other."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _BITS:
            return _BITS[name]
        makers = {
            ("collections", "OrderedDict"): _Named,
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("torch._utils", "_rebuild_parameter"): _parameter,
        }
        if (module, name) not in makers:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return makers[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        _, bits, key, *_ = pid
        return _Storage(int(bits), str(key))


def _tensor(storage: _Storage, _offset: object, shape: Sequence[int], *_: object) -> _Tensor:
    return _Tensor(math.prod(shape), storage.bits, storage.key)


def _parameter(tensor: _Tensor, *_: object) -> _Tensor:
    return tensor


# GGUF


@dataclass(slots=True)
class Gguf:
    """The header of a GGUF file."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    experts: int = 0
    """Experts per layer. Each token uses some of them."""


def gguf_files(folder: Path) -> list[Path]:
    """The GGUF files of the only model in a directory, or the file itself. Raises DownloadError if there are several
    models.
    """
    if folder.is_file():
        return [folder]
    # The vision encoder has a separate file.
    files = sorted(path for path in folder.glob("*.gguf") if not path.name.startswith("mmproj"))
    models = {split[1] if (split := _SPLIT.fullmatch(path.name)) else path.name for path in files}
    if len(models) > 1:
        raise DownloadError(
            f"{folder} has {len(models)} GGUF models, and it is unknown which one is served", hint="name the file"
        )
    return files


def gguf_header(path: Path) -> Gguf:
    """The tensors of a GGUF file. Raises DownloadError."""
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
        places, values = {}, {}
        for _ in range(self._at_most(tensors, 24)):
            name = self._text()
            values[name] = math.prod(self._number("Q") for _ in range(self._at_most(self._number("I"), 8)))
            self._number("I")
            places[name] = self._number("Q")
        alignment = int(known.get("general.alignment") or _ALIGNMENT)
        start = -(-self._file.tell() // alignment) * alignment
        header = Gguf(experts=max((int(known[key]) for key in known if key.endswith(".expert_count")), default=0))
        # Each tensor extends to the next one, except for padding.
        ends = sorted({*places.values(), self._size - start})
        following = dict(pairwise(ends))
        for name, place in places.items():
            if place >= self._size - start:
                raise ValueError(f"tensor {name} extends beyond the file's end")
            header.tensors[name] = StoredTensor(values[name], following[place] - place)
        return header

    def _number(self, letter: str) -> Any:
        size = struct.calcsize(f"<{letter}")
        (value,) = struct.unpack(f"<{letter}", self._file.read(size))
        return value

    def _at_most(self, count: int, each: int) -> int:
        """`count`, if that many items of `each` bytes fit into the rest of the file."""
        if count * each > self._size - self._file.tell():
            raise ValueError(f"it has a count of {count} beyond the file's end")
        return count

    def _text(self) -> str:
        return self._file.read(self._at_most(self._number("Q"), 1)).decode()

    def _value(self, kind: int) -> Any:
        """A value. None for a list, which is not needed."""
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
