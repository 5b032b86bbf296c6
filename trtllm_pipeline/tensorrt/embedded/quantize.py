"""The precisions of the embedded toolchain, and the encoding of weights as GGUF blocks.

The block formats and their encoder are GGML's: llama.cpp's shared library, which comes with the runtime, exports GGML's
public `ggml_quantize_chunk`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from trtllm_pipeline.base import FailureClass, StageError, model
from trtllm_pipeline.models import tensor_values

Array = NDArray[np.float32]
BLOCK: Final = 32
"""Values that share a scale, in every quantized type used here."""


@dataclass(frozen=True, slots=True)
class GgufPrecision:
    """Storage of the weights of one precision. Norms and biases are float32 in all of them.

    `benchmarks/fidelity.py` has the maximum distance of each from the float reference.
    """

    linear: GGMLQuantizationType
    """The projections of the layers."""
    embedding: GGMLQuantizationType
    """Token embedding and output head. Quantized ones stay at 8 bits: they decide every token, and llama.cpp does the same."""

    @property
    def group_size(self) -> int | None:
        """Number of values that share a scale. None without scales."""
        return BLOCK if GGML_QUANT_SIZES[self.linear][0] == BLOCK else None


_T: Final = GGMLQuantizationType
PRECISIONS: Final[Mapping[str, GgufPrecision]] = {
    "fp32": GgufPrecision(_T.F32, _T.F32),
    "fp16": GgufPrecision(_T.F16, _T.F16),
    "bf16": GgufPrecision(_T.BF16, _T.BF16),
    "int8_wo": GgufPrecision(_T.Q8_0, _T.Q8_0),
    # 4.5 bits a value, rounded to nearest on an even grid.
    "int4_wo": GgufPrecision(_T.Q4_0, _T.Q8_0),
}


def encode(values: Array, kind: GGMLQuantizationType) -> NDArray[Any]:
    """`values` (rows, columns) in the form of `kind`: floats of the same shape, or uint8 blocks (rows, bytes).

    Raises StageError if the values do not fit this form.
    """
    if kind == _T.F32:
        return np.ascontiguousarray(values, dtype=np.float32)
    if not np.isfinite(values).all():
        raise _infeasible("the weights contain NaN or infinity", "the model is damaged")
    if kind == _T.F16:
        largest = float(np.abs(values).max(initial=0.0))
        if largest > np.finfo(np.float16).max:
            hint = "use precision bf16, fp32, int8_wo or int4_wo"
            raise _infeasible(f"a weight of {largest:g} is beyond the range of fp16, 65504", hint)
        return values.astype(np.float16)
    if kind == _T.BF16:
        return tensor_values.to_bfloat16(values).view(np.uint8)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    rows, columns = values.shape
    if columns % block:
        raise blocks_do_not_fit(columns, kind)
    source = np.ascontiguousarray(values, dtype=np.float32)
    output = np.empty((rows, columns // block * block_bytes), dtype=np.uint8)
    quantize_chunk = _ggml_quantize_chunk()

    tables = (source.ctypes.data, output.ctypes.data)

    def run(first: int, count: int) -> int:
        return int(quantize_chunk(int(kind), *tables, first * columns, count, columns, None))

    # ctypes releases the interpreter lock, so threads run in parallel.
    workers = max(1, min(model.cpu_count(), rows // 64))
    starts = [rows * index // workers for index in range(workers + 1)]
    with ThreadPoolExecutor(workers) as pool:
        written = sum(pool.map(run, starts[:-1], np.diff(starts).tolist()))
    if written != output.size:
        raise StageError(f"GGML wrote {written} bytes of {kind.name}, expected {output.size}")
    return output


def blocks_do_not_fit(columns: int, kind: GGMLQuantizationType) -> StageError:
    """The error for rows of this many values that cannot be stored as `kind`."""
    words = f"rows of {columns} values do not divide into {kind.name} blocks of {GGML_QUANT_SIZES[kind][0]}"
    return _infeasible(words, "use precision fp16 for this model")


def _infeasible(reason: str, hint: str) -> StageError:
    return StageError(reason, failure=FailureClass.INFEASIBLE, hint=hint)


@cache
def _ggml_quantize_chunk() -> Any:
    """GGML's quantizer: (type, source, destination, first value, rows, columns, importance) -> bytes written."""
    import xllamacpp.xllamacpp as library

    try:
        function = ctypes.CDLL(library.__file__).ggml_quantize_chunk
    except (OSError, AttributeError) as error:
        raise StageError(
            f"the installed xllamacpp ({library.__file__}) does not export ggml_quantize_chunk",
            failure=FailureClass.USER,
            hint="pip install --force-reinstall 'trtllm-pipeline[embedded]'",
        ) from error
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    return function
