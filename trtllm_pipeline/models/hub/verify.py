"""Checks that a model's directory is complete and its files are valid, without reading the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import DownloadError, user_files
from trtllm_pipeline.models.files import model_files
from trtllm_pipeline.models.files.model_files import Fields
from trtllm_pipeline.models.hub.files import CONFIGURATION, INDEX, MODEL, TOKENIZER, described, read_index, weight_files

# Source: https://github.com/huggingface/safetensors (format and limits)
_MAX_HEADER_BYTES: Final = 100_000_000
_BITS: Final = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_POINTER: Final = b"version https://git-lfs.github.com/spec/v1"
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def check_folder(folder: Path, model: str, *, form: str = MODEL) -> None:
    """Check a model's directory: configuration, tokenizer, all safetensors headers, and the index against the shards.

    `form` is one of `files.CONFIGURATION`. Only a model, with or without its weights, needs a tokenizer. Raises
    DownloadError that names the first invalid file.
    """
    present = model_files.names(folder)
    small = described(present, form)
    for name in small:
        check_not_pointer(folder, name, model)
    Fields.read(folder, CONFIGURATION[form])
    if (
        form in {MODEL, TOKENIZER}
        and not present.intersection(_TOKENIZERS)
        and not any(name.endswith(".tiktoken") for name in present)
    ):
        raise _damaged(model, str(folder.name), "it has no tokenizer")
    for name in small:
        if name.endswith(".json"):
            model_files.read_json(folder, name)
    shards = {}
    for name in weight_files(folder, present, model, form):
        check_not_pointer(folder, name, model)
        shards[name] = tensors(folder, name)
    if INDEX in small:
        placed = read_index(folder)
        for tensor, shard in placed.items():
            if tensor not in shards[shard].tensors:
                raise _damaged(model, shard, f"the index places {tensor} in it, but it does not contain that tensor")
        for shard, actual in shards.items():
            if unlisted := sorted(actual.tensors.keys() - placed.keys()):
                raise _damaged(model, shard, f"it contains {unlisted[0]}, which the index does not list")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Range of its bytes, from the start of the file."""
    end: int


@dataclass(frozen=True, slots=True)
class Shard:
    """The header of a safetensors file."""

    path: Path
    """Path with links resolved."""
    tensors: Mapping[str, TensorEntry]


def tensors(folder: Path, name: str) -> Shard:
    """The tensors of a safetensors file in a model's directory, checked against the file's length.

    Raises DownloadError if the file is missing, its header cannot be read, or the tensors do not fill it exactly.
    """
    path = model_files.find(folder, name)
    if path is None:
        raise _damaged(folder.name, name, "it is missing")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 10 or not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise _damaged(folder.name, name, f"a header of {length} bytes does not fit a file of {size} bytes")
        text = file.read(length)
    try:
        header = Fields.of(user_files.decode(text, unique=True), path).values
        entries = {key: _tensor(key, entry, 8 + length) for key, entry in header.items() if key != "__metadata__"}
    except ValueError as error:
        raise _damaged(folder.name, name, f"cannot read its header: {error}") from error
    position = 8 + length
    for key, tensor in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != position or tensor.end < tensor.begin:
            place = f"{tensor.begin - 8 - length} to {tensor.end - 8 - length}"
            raise _damaged(
                folder.name, name, f"tensor {key} is at {place}, expected to start at {position - 8 - length}"
            )
        bits = _BITS.get(tensor.dtype)
        if bits is not None and 8 * (tensor.end - tensor.begin) != math.prod(tensor.shape) * bits:
            what = f"{list(tensor.shape)} of {tensor.dtype}"
            raise _damaged(
                folder.name, name, f"tensor {key} has {tensor.end - tensor.begin} bytes, which does not match {what}"
            )
        position = tensor.end
    if position != size:
        raise _damaged(folder.name, name, f"its tensors end at byte {position}, but the file ends at byte {size}")
    return Shard(path, entries)


def _tensor(name: str, entry: object, data: int) -> TensorEntry:
    """One header entry. `data` is the offset of the tensors' bytes. Raises ValueError for an invalid entry."""
    given: Mapping[str, Any] = entry if isinstance(entry, dict) else {}
    dtype, shape, place = (given.get(key) for key in ("dtype", "shape", "data_offsets"))
    whole = [
        value if isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value) else None
        for value in (shape, place)
    ]
    if not isinstance(dtype, str) or whole[0] is None or whole[1] is None or len(whole[1]) != 2:
        raise ValueError(f"tensor {name} needs dtype, shape and two data_offsets")
    return TensorEntry(dtype, tuple(whole[0]), data + whole[1][0], data + whole[1][1])


def check_not_pointer(folder: Path, name: str, model: str) -> None:
    """Raise DownloadError if the file is a git-lfs pointer."""
    path = model_files.find(folder, name)
    if path is None:
        return
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise DownloadError(
                f"{model}: {name} is a git-lfs pointer, not the file itself",
                hint="run `git lfs install && git lfs pull` in the clone it comes from",
            )


def _damaged(model: str, name: str, reason: str) -> DownloadError:
    return DownloadError(
        f"{model}: cannot use {name}: {reason}", hint="download the model again, or from another source"
    )
