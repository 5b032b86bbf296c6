"""Reads values of tensors in safetensors files, and converts to bfloat16.

Format: an unsigned 64-bit little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the
data. Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from trtllm_pipeline.models.hub.verify import TensorEntry

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# numpy has no bfloat16: such tensors are mapped as 16-bit integers and widened by a shift.
DTYPES: Final = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""Supported data types, by their safetensors names."""


def read(path: Path, entry: TensorEntry) -> NDArray[np.float32]:
    """A tensor with one of `DTYPES`, as float32."""
    import numpy as np  # only with the first tensor: listing tensors does not need it

    raw = np.memmap(path, dtype=DTYPES[entry.dtype], mode="r", offset=entry.begin, shape=entry.shape or (1,))
    if entry.dtype == "BF16":
        wide = raw.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32).reshape(entry.shape)
    with np.errstate(over="ignore"):  # overflow of float64, which no model needs. The conversion detects infinity.
        return np.array(raw, dtype=np.float32).reshape(entry.shape)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of `values` as bfloat16, rounded to nearest even. Finite values only."""
    import numpy as np

    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
