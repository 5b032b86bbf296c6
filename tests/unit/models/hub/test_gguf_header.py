"""Sizes of tensors in files of GGUF, and of what a token reads of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")

from gguf import GGMLQuantizationType, GGUFWriter

from trtllm_pipeline.measure.load import roofline
from trtllm_pipeline.measure.load.roofline import bytes_per_token, limit
from trtllm_pipeline.models.hub import gguf_header


def gguf(path: Path, *, tied: bool = False, experts: int = 0) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.0])
    writer.add_bool("general.some", True)
    if experts:
        writer.add_expert_count(experts)
    writer.add_tensor("token_embd.weight", np.zeros((100, 32), dtype=np.float16))
    writer.add_tensor("blk.0.attn_output.weight", np.zeros((32, 32), dtype=np.float32))
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((64, 34), dtype=np.uint8), raw_dtype=GGMLQuantizationType.Q8_0)
    if not tied:
        writer.add_tensor("output.weight", np.zeros((100, 32), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_weights_of_a_gguf_file_or_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = gguf(tmp_path / "model-Q8_0.gguf")
    assert gguf_header.read(path).tensors == {
        "token_embd.weight": 6400,
        "blk.0.attn_output.weight": 4096,
        "blk.0.ffn_up.weight": 64 * 34,
        "output.weight": 6400,
    }
    read = 4096 + 64 * 34 + 6400
    assert bytes_per_token(path) == bytes_per_token(tmp_path) == (read, "")
    assert bytes_per_token(tmp_path, 4)[0] == read, "its server keeps the bits that it has"
    monkeypatch.setattr(roofline, "gpu_bandwidth", lambda: (1e9, "NVML"))
    assert limit(path).pass_s == limit(tmp_path).pass_s == pytest.approx(read / 1e9)
    (tmp_path / "mmproj-model-f16.gguf").write_bytes(b"what looks at images")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert bytes_per_token(tmp_path) == (read, "")
    gguf(path, tied=True)
    assert bytes_per_token(tmp_path) == (read, ""), "the embedding is the head"
    gguf(path, experts=8)
    assert "mixture" in bytes_per_token(tmp_path)[1]
    gguf(tmp_path / "model-Q4_0.gguf")
    found, reason = bytes_per_token(tmp_path)
    assert found is None
    assert "2 GGUF models" in reason


def test_a_gguf_model_in_parts_is_one(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"m-{number:05}-of-00002.gguf").touch()
    assert len(gguf_header.files(tmp_path)) == 2


def test_a_gguf_file_that_is_cut_is_not_known(tmp_path: Path) -> None:
    whole = gguf(tmp_path / "model.gguf").read_bytes()
    for length in range(0, len(whole), max(1, len(whole) // 200)):
        (tmp_path / "model.gguf").write_bytes(whole[:length])
        found, reason = bytes_per_token(tmp_path)
        assert (found is None) == (reason != "")
        if length < 400:
            assert "cannot use model.gguf" in reason
