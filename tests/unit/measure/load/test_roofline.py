from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.nvml import Board, nvml
from trtllm_pipeline.measure.load import roofline
from trtllm_pipeline.measure.load.roofline import bytes_per_token, cpu_bandwidth, limit

TIED = {"tie_word_embeddings": True, "vocab_size": 1000, "hidden_size": 100}


def engine(folder: Path, config: dict[str, Any], *ranks: int) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    for rank, size in enumerate(ranks):
        (folder / f"rank{rank}.engine").write_bytes(b"x" * size)
    return folder


@pytest.mark.parametrize(
    ("config", "weight_bits", "expected"),
    [
        ({}, 16, 3_000),
        ({"torch_dtype": "float16"}, 16, 6_000),
        ({"torch_dtype": "bfloat16"}, 8, 3_000),
        ({"torch_dtype": "float16", "vocab_size": 50, "hidden_size": 10}, 16, 5_000),
        ({"torch_dtype": "float16", "vocab_size": 50, "hidden_size": 10, "tie_word_embeddings": True}, 16, 6_000),
        ({"vocab_size": 1000, "hidden_size": 10}, 16, None),
        ({}, 0, None),
        ({"num_local_experts": 8}, 16, None),
        ({"vision_config": {}}, 16, None),
    ],
)
def test_weights_in_files_of_torch_are_at_least_a_part_of_their_size(
    tmp_path: Path, config: dict[str, Any], weight_bits: int, expected: int | None
) -> None:
    """The files are not opened: 32 bits are loaded as 16, of the embedding one row is read."""
    engine(tmp_path, config)
    for number in (1, 2):
        (tmp_path / f"pytorch_model-{number:05}-of-00002.bin").write_bytes(b"x" * 3_000)
    (tmp_path / "training_args.bin").write_bytes(b"anything")
    found, reason = bytes_per_token(tmp_path, weight_bits)
    assert found == expected
    assert (reason == "") == (expected is not None)
    if expected == 6_000:
        (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 1_000)
        assert bytes_per_token(tmp_path, weight_bits)[0] == 1_000


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"weights_bytes": 10**6, "geometry": TIED}, 10**6),
        ({"weights_bytes": 10**6, "geometry": {**TIED, "tie_word_embeddings": False}}, 600_000),
        ({"weights_bytes": 300_000, "geometry": {**TIED, "tie_word_embeddings": False}}, None),
        ({"weights_bytes": 10**6, "pretrained_config": {"moe": {"num_experts": 8}}}, None),
        ({"weights_bytes": 10**6, "build_config": {"speculative_decoding_mode": 2}}, None),
        ({"weights_bytes": 10**6, "build_config": {"speculative_decoding_mode": 1}}, 10**6),
        ({}, None),
    ],
)
def test_weights_a_token_reads(tmp_path: Path, config: dict[str, Any], expected: int | None) -> None:
    found, reason = bytes_per_token(engine(tmp_path, config))
    assert found == expected
    assert (reason == "") == (expected is not None)


def test_an_engine_of_files_runs_on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = engine(tmp_path, {"pretrained_config": TIED}, 500, 500)
    monkeypatch.setattr(roofline, "gpu_bandwidth", lambda: (1e6, "NVML"))
    assert limit(folder, tp=2).pass_s == pytest.approx(1000 / 2e6)
    monkeypatch.setattr(roofline, "gpu_bandwidth", lambda: (None, ""))
    assert limit(folder, tp=2).pass_s is None


def test_a_cpu_may_beat_our_own_reading_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement may have shared the machine or its caches, unlike a GPU's data sheet."""
    folder = engine(tmp_path, {"weights_bytes": 10**6, "geometry": TIED})
    monkeypatch.setattr(roofline, "cpu_bandwidth", lambda _size: 1e9)
    assert limit(folder).pass_s == pytest.approx(1e-3 / roofline.CPU_MARGIN)
    assert roofline.CPU_MARGIN >= 4


def test_no_engine_is_no_limit(tmp_path: Path) -> None:
    assert asdict(limit(tmp_path)) == {
        "pass_s": None,
        "weight_bytes": None,
        "reason": "the engine's config.json: it is missing",
    }


def test_reading_memory_takes_time() -> None:
    """Between slow memory and the fastest caches. A broken clock or an empty loop would be far outside."""
    assert 1e9 < cpu_bandwidth(8 << 20) < 1e13


def test_bandwidth_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """5120 bits at 2619 MHz: an H100 SXM's HBM3."""
    board = Board("GPU-0", bus_width=5120, memory_mhz=2619)
    monkeypatch.setitem(sys.modules, "pynvml", nvml([board]))
    bandwidth, source = roofline.gpu_bandwidth()
    assert (bandwidth, source) == (pytest.approx(3.352e12, rel=1e-3), "NVML")  # 3.35 TB/s in its data sheet
    for none in (nvml([]), nvml([board], init_fails=True), None):
        monkeypatch.setitem(sys.modules, "pynvml", none)  # type: ignore[arg-type]
        assert roofline.gpu_bandwidth()[0] is None


def test_a_gpu_that_does_not_tell_has_its_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml([Board("GPU-0", "NVIDIA H200")]))
    assert roofline.gpu_bandwidth() == (4.8e12, "the data sheet of NVIDIA H200")
    monkeypatch.setitem(sys.modules, "pynvml", nvml([Board("GPU-0", "NVIDIA Unheard-Of")]))
    assert roofline.gpu_bandwidth()[0] is None


def hugging_face(folder: Path, config: dict[str, Any], *shards: dict[str, int]) -> Path:
    """A model of 16 bits: tensor -> its number of values."""
    (folder / "config.json").write_text(json.dumps(config))
    for number, sizes in enumerate(shards, 1):
        begin, header = 0, {}
        for name, count in sizes.items():
            header[name] = {"dtype": "BF16", "shape": [count], "data_offsets": [begin, begin + 2 * count]}
            begin += 2 * count
        text = json.dumps(header).encode()
        path = folder / f"model-{number:05}-of-{len(shards):05}.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(begin))
    return folder


LLAMA = {"architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(
    ("config", "shards", "expected"),
    [
        (LLAMA, [{"model.embed_tokens.weight": 100, "a": 30}, {"b": 20, "lm_head.weight": 100}], 300),
        (LLAMA, [{"model.embed_tokens.weight": 100, "a": 30}], 260),
        (LLAMA, [{"visual.blocks.0.weight": 500, "model.vision_tower.x": 9, "a": 30}], 60),
        ({"num_local_experts": 8}, [{"a": 30}], None),
    ],
)
def test_weights_of_a_hugging_face_folder(
    tmp_path: Path, config: dict[str, Any], shards: list[dict[str, int]], expected: int | None
) -> None:
    found, reason = bytes_per_token(hugging_face(tmp_path, config, *shards))
    assert found == expected
    assert (reason == "") == (expected is not None)


def test_weights_that_a_folder_has_twice_are_read_once(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path, LLAMA, {"a": 30}, {"lm_head.weight": 100})
    named = {"a": "model-00001-of-00002.safetensors", "lm_head.weight": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    (other := tmp_path / "other").mkdir()
    hugging_face(other, LLAMA, {"layers.0.a": 30, "output.weight": 100})
    (other / "model-00001-of-00001.safetensors").rename(folder / "consolidated.safetensors")
    assert bytes_per_token(folder) == (260, "")
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00002-of-00002.safetensors").unlink()
    (folder / "model-00001-of-00002.safetensors").rename(folder / "model.safetensors")
    assert bytes_per_token(folder) == (60, "")


def test_a_server_may_keep_fewer_bits_than_the_files_have(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path, LLAMA, {"a": 30})
    assert [bytes_per_token(folder, bits)[0] for bits in (32, 16, 8, 4)] == [60, 60, 30, 15]
    header = json.dumps({"a": {"dtype": "F32", "shape": [30], "data_offsets": [0, 120]}}).encode()
    (shard,) = folder.glob("*.safetensors")
    shard.write_bytes(len(header).to_bytes(8, "little") + header + bytes(120))
    assert bytes_per_token(folder) == (60, ""), "servers load 32 bits as 16"
    found, reason = bytes_per_token(folder, 0)
    assert found is None
    assert "bits per weight" in reason


def test_a_hugging_face_folder_that_is_damaged_is_not_known(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path, LLAMA, {"a": 30})
    (shard,) = folder.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-4])
    found, reason = bytes_per_token(folder)
    assert found is None
    assert "model-00001" in reason


def test_a_model_runs_on_gpus_where_there_are_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hugging_face(tmp_path, LLAMA, {"a": 500_000})
    monkeypatch.setattr(roofline, "gpu_bandwidth", lambda: (1e9, "NVML"))
    assert asdict(limit(folder, tp=2)) == {"pass_s": 5e-4, "weight_bytes": 10**6, "reason": "2 x 1 GB/s by NVML"}
    monkeypatch.setattr(roofline, "gpu_bandwidth", lambda: (None, ""))
    monkeypatch.setattr(roofline, "cpu_bandwidth", lambda _size: 1e9)
    assert limit(folder).pass_s == pytest.approx(1e-3 / roofline.CPU_MARGIN)
