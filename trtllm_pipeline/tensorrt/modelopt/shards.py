"""Writes a safetensors file piece by piece, concurrently with the computation of the pieces.

The format starts with a header that has the position of every tensor. So space is reserved for it, and the rest is filled
with blanks, which the format allows. Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, final

from trtllm_pipeline.base import FailureClass, StageError

if TYPE_CHECKING:
    import torch

_HEADER_BYTES: Final = 256
"""Space for one tensor's entry: twice the need of the longest names."""
_DTYPES: Final = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "int64": "I64",
    "int32": "I32",
    "int8": "I8",
    "uint8": "U8",
}
_CHUNK_BYTES: Final = 64 << 20
_WRITERS: Final = 4


@final
class ShardWriter:
    """One file. A context manager: leaving it waits for all writes and completes the file."""

    def __init__(self, path: Path, tensors: int) -> None:
        """Open `path` for at most `tensors` tensors."""
        self._path = path
        self._begin = 8 + _HEADER_BYTES * (tensors + 1)
        self._end = 0
        self._entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._pool = ThreadPoolExecutor(_WRITERS, thread_name_prefix="shard")
        self._writes: list[Future[None]] = []

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                for write in self._writes:
                    write.result()
                header = json.dumps(self._entries, separators=(",", ":")).encode()
                room = self._begin - 8
                assert len(header) <= room, f"{self._path}: the names need more than {room} bytes"
                os.pwrite(self._file, room.to_bytes(8, "little") + header.ljust(room), 0)
        finally:
            self._pool.shutdown(cancel_futures=True)
            os.close(self._file)

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Queue tensors on the CPU for writing. They must not change anymore.

        Raises StageError if one would be unaligned, which readers reject.
        """
        import torch

        # The widest types first, so that narrow ones with odd sizes do not shift them.
        for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
            if self._end % tensor.element_size():
                raise StageError(
                    f"{name}: tensors before it in {self._path.name} use {self._end} bytes, so it would be unaligned",
                    failure=FailureClass.INFEASIBLE,
                    hint="choose a parallelism with whole words in each rank's part",
                )
            size = tensor.numel() * tensor.element_size()
            offsets = [self._end, self._end + size]
            self._entries[name] = {
                "dtype": _DTYPES[str(tensor.dtype).removeprefix("torch.")],
                "shape": list(tensor.shape),
                "data_offsets": offsets,
            }
            data = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
            for start in range(0, size, _CHUNK_BYTES):
                part = data[start : start + _CHUNK_BYTES]
                self._writes.append(self._pool.submit(self._write, part, self._begin + self._end + start))
            self._end += size

    def _write(self, data: memoryview, offset: int) -> None:
        while data:
            written = os.pwrite(self._file, data, offset)
            data, offset = data[written:], offset + written
