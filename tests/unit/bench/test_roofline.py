from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from trtllm_pipeline.bench import roofline
from trtllm_pipeline.bench.roofline import bytes_per_token, cpu_bandwidth, limit

TIED = {"tie_word_embeddings": True, "vocab_size": 1000, "hidden_size": 100}


def engine(folder: Path, config: dict[str, Any], *ranks: int) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    for rank, size in enumerate(ranks):
        (folder / f"rank{rank}.engine").write_bytes(b"x" * size)
    return folder


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
    monkeypatch.setattr(roofline, "gpu_bandwidth", lambda: 1e6)
    assert limit(folder, tp=2).pass_s == pytest.approx(1000 / 2e6)
    monkeypatch.setattr(roofline, "gpu_bandwidth", lambda: None)
    assert limit(folder, tp=2).pass_s is None


def test_a_cpu_may_beat_our_own_reading_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reading may have shared the machine, or found the caches taken; a GPU's data sheet did not."""
    folder = engine(tmp_path, {"weights_bytes": 10**6, "geometry": TIED})
    monkeypatch.setattr(roofline, "cpu_bandwidth", lambda _size: 1e9)
    assert limit(folder).pass_s == pytest.approx(1e-3 / roofline.CPU_MARGIN)
    assert roofline.CPU_MARGIN >= 4


def test_no_engine_is_no_limit(tmp_path: Path) -> None:
    assert limit(tmp_path).to_json() == {
        "pass_s": None,
        "weight_bytes": None,
        "reason": "the engine's config.json: it is missing",
    }


def test_reading_memory_takes_time() -> None:
    """Between a slow memory and the fastest caches; a clock or a loop that does nothing would be far out."""
    assert 1e9 < cpu_bandwidth(8 << 20) < 1e13


class Nvml:
    """nvidia-ml-py with one GPU: 5120 bits at 2619 MHz, an H100 SXM's HBM3."""

    class NVMLError(Exception):
        pass

    def __init__(self, devices: int = 1, *, wrong: bool = False) -> None:
        self.devices, self.wrong = devices, wrong

    def nvmlInit(self) -> None:  # noqa: N802
        if self.wrong:
            raise self.NVMLError("no driver")

    def nvmlShutdown(self) -> None: ...  # noqa: N802

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.devices

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetMemoryBusWidth(self, _device: int) -> int:  # noqa: N802
        return 5120

    def nvmlDeviceGetMaxClockInfo(self, _device: int, kind: int) -> int:  # noqa: N802
        assert kind == 2, "the memory's clock"
        return 2619


def test_bandwidth_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())  # type: ignore[arg-type]
    assert roofline.gpu_bandwidth() == pytest.approx(3.352e12, rel=1e-3)  # 3.35 TB/s in its data sheet
    for none in (Nvml(devices=0), Nvml(wrong=True), None):
        monkeypatch.setitem(sys.modules, "pynvml", none)  # type: ignore[arg-type]
        assert roofline.gpu_bandwidth() is None


def test_the_names_are_those_of_the_real_library() -> None:
    real = pytest.importorskip("pynvml")
    assert all(name.startswith("__") or name in {"devices", "wrong"} or hasattr(real, name) for name in vars(Nvml))
