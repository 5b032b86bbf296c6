"""Reads safetensors files, one or sharded, without torch and with only the requested tensor in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_pipeline.base import FailureClass, StageError
from trtllm_pipeline.models import INDEX, SINGLE, model_files, read_index, tensor_values, verify

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Weights(Mapping[str, "NDArray[np.float32]"]):
    """The tensors of a model directory by name. `weights[name]` reads one as float32, whatever its stored type."""

    def __init__(self, folder: Path) -> None:
        """Read the headers of every file of the model in `folder`.

        Raises StageError if files are missing, damaged, or do not match their index.
        """
        self._entries: dict[str, tuple[Path, verify.TensorEntry]] = {}
        placed = read_index(folder) if model_files.find(folder, INDEX) is not None else None
        for shard in [SINGLE] if placed is None else sorted(set(placed.values())):
            if Path(shard).name != shard:
                raise _damaged(folder / INDEX, f"shard {shard!r} is not a plain file name")
            in_shard = verify.tensors(folder, shard)
            here = in_shard.tensors if placed is None else [name for name, file in placed.items() if file == shard]
            if missing := sorted(name for name in here if name not in in_shard.tensors):
                raise _damaged(folder / shard, f"the index places {missing[0]} in it, but it does not have that tensor")
            for name, tensor in in_shard.tensors.items():
                if tensor.dtype not in tensor_values.DTYPES:
                    raise StageError(
                        f"tensor {name} in {folder / shard} has type {tensor.dtype}; expected {', '.join(tensor_values.DTYPES)}",
                        failure=FailureClass.INFEASIBLE,
                        hint="start from the unquantized model",
                    )
                self._entries[name] = in_shard.path, tensor

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        return tensor_values.read(*self._entries[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        # The inherited method would read the tensor.
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return self._entries[name][1].shape

    def dtypes(self) -> tuple[str, ...]:
        """Data types in use, in safetensors' names, sorted."""
        return tuple(sorted({entry.dtype for _, entry in self._entries.values()}))


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
            file.write(tensor_values.to_bfloat16(tensor).tobytes())


def _damaged(path: Path, reason: str) -> StageError:
    return StageError(f"{path} is damaged: {reason}", failure=FailureClass.USER, hint="download the model again")
