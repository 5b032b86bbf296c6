"""Reads safetensors files, one or sharded, without torch and without holding more than the tensor asked for.

Format: an unsigned 64-bit little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data.
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trtllm_pipeline.errors import FailureClass, StageError

INDEX_FILE: Final = "model.safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"
# numpy has no bfloat16: such tensors are mapped as 16-bit integers and widened by a shift.
_DTYPES: Final = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_MAX_HEADER_BYTES: Final = 100_000_000


@dataclass(frozen=True, slots=True)
class _Entry:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Of the first byte, from the start of the file."""


class Weights(Mapping[str, NDArray[np.float32]]):
    """The tensors of a model folder by name. `weights[name]` reads one, as float32, whatever it is stored in."""

    def __init__(self, folder: Path) -> None:
        """Read the headers of every file of the model in `folder`.

        Raises StageError where files are missing, damaged, or disagree with their index.
        """
        self._entries: dict[str, _Entry] = {}
        index = folder / INDEX_FILE
        if not index.is_file():
            self._entries.update(_read_header(folder / SINGLE_FILE))
            return
        placed = _read_json(index).get("weight_map")
        if not isinstance(placed, dict) or not placed:
            raise _damaged(index, "it has no weight_map")
        for shard in sorted(set(placed.values())):
            if Path(shard).name != shard:
                raise _damaged(index, f"shard {shard!r} is not a plain file name")
            found = _read_header(folder / shard)
            if missing := sorted(name for name, file in placed.items() if file == shard and name not in found):
                raise _damaged(folder / shard, f"the index places {missing[0]} in it, but it is not there")
            self._entries.update(found)

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        entry = self._entries[name]
        raw = np.memmap(
            entry.file, dtype=_DTYPES[entry.dtype], mode="r", offset=entry.offset, shape=entry.shape or (1,)
        )
        if entry.dtype == "BF16":
            wide = raw.astype(np.uint32)
            wide <<= 16
            return wide.view(np.float32).reshape(entry.shape)
        return np.array(raw, dtype=np.float32).reshape(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        # The inherited form would read the tensor.
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return self._entries[name].shape

    def dtypes(self) -> tuple[str, ...]:
        """Data types in use, in safetensors' names, sorted."""
        return tuple(sorted({entry.dtype for entry in self._entries.values()}))

    def parameters(self) -> int:
        """Number of values in all tensors."""
        return sum(math.prod(entry.shape) for entry in self._entries.values())


def write(path: Path, tensors: Mapping[str, NDArray[np.float32]]) -> None:
    """Write `tensors` to `path` as bfloat16, rounding to nearest even."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in tensors.items():
        end = position + 2 * tensor.size
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(to_bfloat16(tensor).tobytes())


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of `values` as bfloat16, rounded to nearest even. Finite values only."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _read_header(path: Path) -> dict[str, _Entry]:
    if not path.is_file():
        raise StageError(
            f"{path.name} is missing in {path.parent}",
            failure=FailureClass.INFEASIBLE,
            hint="a model folder needs safetensors weights; models that only come as .bin or .pt are not converted",
        )
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise _damaged(path, f"a header of {length} bytes does not fit a file of {size}")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise _damaged(path, "its header is not JSON") from error
    entries = {}
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = fields["dtype"], tuple(int(n) for n in fields["shape"])
            begin, end = (int(n) for n in fields["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(path, f"the header of tensor {name} is malformed") from error
        if dtype not in _DTYPES:
            raise StageError(
                f"tensor {name} in {path} has type {dtype}; {', '.join(_DTYPES)} are converted",
                failure=FailureClass.INFEASIBLE,
                hint="start from the unquantized model",
            )
        if begin < 0 or end - begin != math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize or 8 + length + end > size:
            raise _damaged(path, f"tensor {name} does not fit its place in the file")
        entries[name] = _Entry(path, dtype, shape, 8 + length + begin)
    return entries


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(value, dict):
        raise _damaged(path, "it is not a JSON object")
    return value


def _damaged(path: Path, reason: str) -> StageError:
    return StageError(f"{path} is damaged: {reason}", failure=FailureClass.USER, hint="download the model again")
