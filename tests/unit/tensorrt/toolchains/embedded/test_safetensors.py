"""Reading weights: values of every type, shards, and files that are not what they say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")

from trtllm_pipeline.base.errors import StageError
from trtllm_pipeline.models.hub.tensor_values import to_bfloat16
from trtllm_pipeline.tensorrt.embedded import safetensors
from trtllm_pipeline.tensorrt.embedded.safetensors import Weights


def write_raw(path: Path, entries: dict[str, tuple[str, np.ndarray]], *, cut: int = 0) -> None:
    header, data = {}, b""
    for name, (dtype, array) in entries.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + array.nbytes],
        }
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[: len(data) - cut])


def test_every_type_reads_as_float32(tmp_path: Path) -> None:
    values = np.array([[1.0, -2.5], [0.15625, 3e4]])
    write_raw(
        tmp_path / "model.safetensors",
        {
            "half": ("F16", values.astype(np.float16)),
            "single": ("F32", values.astype(np.float32)),
            "double": ("F64", values),
            "brain": ("BF16", to_bfloat16(values.astype(np.float32))),
            "empty": ("F32", np.zeros((0, 2), dtype=np.float32)),
            "scalar": ("F32", np.float32(7).reshape(())),
        },
    )
    weights = Weights(tmp_path)
    for name in ("half", "single", "double"):
        assert weights[name].dtype == np.float32
        np.testing.assert_array_equal(weights[name], values.astype(np.float32))
    np.testing.assert_allclose(weights["brain"], values, rtol=2**-8)
    assert weights["empty"].shape == (0, 2)
    assert weights["scalar"] == 7
    assert weights.dtypes() == ("BF16", "F16", "F32", "F64")
    assert sum(values.size for values in weights.values()) == 17


def test_bfloat16_rounds_to_nearest_even(tmp_path: Path) -> None:
    # 1 + 2^-8 lies halfway between 1 and the next bfloat16; the even one is 1. Beyond halfway goes up.
    values = np.array([1.0 + 2**-8, 1.0 + 3 * 2**-8, 1.0 + 2**-8 + 2**-12], dtype=np.float32)
    safetensors.write(tmp_path / "model.safetensors", {"w": values})
    np.testing.assert_array_equal(Weights(tmp_path)["w"], [1.0, 1.0 + 2**-6, 1.0 + 2**-7])


def test_shards_follow_the_index(tmp_path: Path) -> None:
    one, two = np.ones((2, 2), dtype=np.float32), np.full((3,), 2, dtype=np.float32)
    write_raw(tmp_path / "a.safetensors", {"one": ("F32", one)})
    write_raw(tmp_path / "b.safetensors", {"two": ("F32", two)})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"one": "a.safetensors", "two": "b.safetensors"}}))
    weights = Weights(tmp_path)
    assert sorted(weights) == ["one", "two"]
    np.testing.assert_array_equal(weights["two"], two)

    index.write_text(json.dumps({"weight_map": {"one": "a.safetensors", "two": "a.safetensors"}}))
    with pytest.raises(StageError, match="places two in it"):
        Weights(tmp_path)
    index.write_text(json.dumps({"weight_map": {"one": "../a.safetensors"}}))
    with pytest.raises(StageError, match="not a plain file name"):
        Weights(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff" * 64, "does not fit a file"),
        ((4).to_bytes(8, "little") + b"nope", "cannot read its header"),
        (b"", "does not fit a file"),
    ],
)
def test_damage_is_told(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(StageError, match=words):
        Weights(tmp_path)


def test_missing_cut_and_quantized_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="missing"):
        Weights(tmp_path)
    write_raw(tmp_path / "model.safetensors", {"w": ("F32", np.ones(8, dtype=np.float32))}, cut=4)
    with pytest.raises(StageError, match="tensors end at byte"):
        Weights(tmp_path)
    write_raw(tmp_path / "model.safetensors", {"w": ("F8_E4M3", np.ones(8, dtype=np.uint8))})
    with pytest.raises(StageError, match="F8_E4M3"):
        Weights(tmp_path)
