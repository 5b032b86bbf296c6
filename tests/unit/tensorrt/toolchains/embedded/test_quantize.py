"""Blocks against gguf's own reading of them."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")

import gguf

from trtllm_pipeline.base.errors import StageError
from trtllm_pipeline.tensorrt.embedded.quantize import PRECISIONS, encode

KINDS = gguf.GGMLQuantizationType
VALUES = np.random.default_rng(0).standard_normal((300, 96)).astype(np.float32)
# Root mean square error over root mean square value: half a step of an even grid, uniformly distributed, is step / sqrt(12).
ERROR = {"F32": 0.0, "F16": 3e-4, "BF16": 3e-3, "Q8_0": 0.006, "Q4_0": 0.1}


@pytest.mark.parametrize("name", PRECISIONS)
def test_error_is_that_of_the_format(name: str) -> None:
    kind = PRECISIONS[name].linear
    encoded = encode(VALUES, kind)
    back = gguf.quants.dequantize(encoded.view(np.uint8) if kind == KINDS.BF16 else encoded, kind)
    error = float(np.sqrt(np.mean((back.reshape(VALUES.shape) - VALUES) ** 2)))
    assert error <= ERROR[kind.name]
    assert kind == KINDS.F32 or error > ERROR[kind.name] / 10


@pytest.mark.parametrize("kind", [KINDS.Q8_0, KINDS.Q4_0])
def test_round_to_nearest_is_what_gguf_does(kind: object) -> None:
    np.testing.assert_array_equal(encode(VALUES, kind), gguf.quants.quantize(VALUES, kind))


def test_one_row_and_many_rows_agree() -> None:
    together = encode(VALUES, KINDS.Q4_0)
    np.testing.assert_array_equal(together, np.concatenate([encode(VALUES[i : i + 1], KINDS.Q4_0) for i in range(300)]))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(StageError, match="blocks of 32"):
        encode(VALUES[:, :40], KINDS.Q4_0)
    with pytest.raises(StageError, match="NaN"):
        encode(np.full((1, 32), np.nan, dtype=np.float32), KINDS.Q8_0)
    with pytest.raises(StageError, match="65504"):
        encode(np.full((1, 32), 1e5, dtype=np.float32), KINDS.F16)
