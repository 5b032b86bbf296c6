"""Looks at a model's folder without reading the weights: is it whole, and is everything in it what its name says?"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.errors import DownloadError, FailureClass
from trtllm_pipeline.hub.files import INDEX, read_index, weight_files

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


def check_folder(folder: Path, model: str) -> None:
    """Check a model's folder: configuration, tokenizer, every safetensors header, the index against the shards.

    Raises DownloadError naming the first file that is not as it must be.
    """
    names = {path.name for path in folder.iterdir() if path.is_file()}
    for name in sorted(names):
        check_not_pointer(folder / name, model)
    if not isinstance(_json(folder / "config.json", model), dict):
        raise _damaged(model, "config.json", "it is not a JSON object")
    if not names.intersection(_TOKENIZERS) and not any(name.endswith(".tiktoken") for name in names):
        raise _damaged(model, str(folder.name), "there is no tokenizer in it")
    for name in sorted(name for name in names if name.endswith(".json") and name != "config.json"):
        _json(folder / name, model)
    shards = {name: tensors(folder / name, model) for name in weight_files(folder, names, model)}
    if INDEX in names:
        placed = read_index(folder / INDEX)
        for tensor, shard in placed.items():
            if tensor not in shards[shard]:
                raise _damaged(model, shard, f"the index places {tensor} in it, but it is not there")
        for shard, found in shards.items():
            if unlisted := sorted(found.keys() - placed.keys()):
                raise _damaged(model, shard, f"it holds {unlisted[0]}, which the index does not name")


def tensors(path: Path, model: str) -> Mapping[str, Mapping[str, Any]]:
    """The header of a safetensors file, tensor name -> its entry, checked against the file's length.

    Raises DownloadError when the header is not JSON, or the tensors do not fill the file exactly.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 10 or not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise _damaged(model, path.name, f"a header of {length} bytes does not fit a file of {size}")
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_no_duplicates)
        header.pop("__metadata__", None)
        places = sorted((*entry["data_offsets"], name) for name, entry in header.items())
        position = 0
        for begin, end, name in places:
            entry = header[name]
            bits = _BITS.get(entry["dtype"])
            if begin != position or end < begin:
                raise _damaged(model, path.name, f"tensor {name} is at {begin} to {end}, expected from {position}")
            if bits is not None and 8 * (end - begin) != math.prod(entry["shape"]) * bits:
                raise _damaged(
                    model,
                    path.name,
                    f"tensor {name} has {end - begin} bytes, which is not {entry['shape']} of {entry['dtype']}",
                )
            position = end
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(model, path.name, f"its header cannot be read: {error!r}") from error
    if 8 + length + position != size:
        raise _damaged(model, path.name, f"its tensors end at byte {8 + length + position}, the file at {size}")
    return dict(header)


def check_not_pointer(path: Path, model: str) -> None:
    """Raise DownloadError when the file is what git leaves of a big file without git-lfs."""
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise DownloadError(
                f"{model}: {path.name} is a git-lfs pointer, not the file itself",
                failure=FailureClass.USER,
                hint="in the clone it comes from, run `git lfs install && git lfs pull`",
            )


def _json(path: Path, model: str) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise _damaged(model, path.name, "it is missing") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(model, path.name, f"it is not JSON: {error}") from error


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name stands in it twice")
    return result


def _damaged(model: str, name: str, reason: str) -> DownloadError:
    return DownloadError(
        f"{model}: {name} is not usable: {reason}",
        failure=FailureClass.USER,
        hint="get the model again, or from another source",
    )
