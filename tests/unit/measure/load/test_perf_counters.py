from __future__ import annotations

import asyncio
import json
import socket
import sys
from dataclasses import asdict
from typing import Any

import pytest

from tests.helpers import metrics_pages
from tests.helpers.nvml import Board, nvml
from tests.helpers.waiting import eventually
from trtllm_pipeline.base.machine import gpus
from trtllm_pipeline.measure.load import counters
from trtllm_pipeline.measure.load.events import GaugeSample, GaugesRecord, GpuDevice, GpuRecord, GpuSample, TritonRecord
from trtllm_pipeline.measure.load.result import GpuUse, LevelResult, levels_of, read_record

BEFORE = """\
# HELP nv_inference_request_success Number of successful inference requests, all batch sizes
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="ensemble",version="1"} 10
nv_inference_request_success{model="tensorrt_llm",version="1"} 10
nv_inference_request_success{model="idle",version="1"} 3
nv_inference_queue_duration_us{model="tensorrt_llm",version="1"} 5000
nv_inference_compute_infer_duration_us{model="tensorrt_llm",version="1"} 1e5
nv_gpu_power_usage{gpu_uuid="GPU-1"} 70.5
"""
AFTER = (
    BEFORE.replace('"} 10', '"} 14')
    .replace(" 5000", " 9000")
    .replace(" 1e5", " 1.8e5")
    .replace('model="tensorrt_llm",version="1"} 14', 'model="tensorrt_llm",version="1"} 12', 1)
    + 'nv_inference_request_success{model="tensorrt_llm",version="2"} 2\n'
)


def test_growth_of_tritons_counters_is_time_per_request() -> None:
    grown = counters.growth(counters.parse(BEFORE), counters.parse(AFTER))
    assert set(grown) == {"ensemble", "tensorrt_llm"}, "idle models are left out"
    summary = counters.per_request(grown)
    assert isinstance(summary["tensorrt_llm"]["requests"], int), "told without a point"
    assert summary["tensorrt_llm"] == {"requests": 4, "queue_ms": 1.0, "compute_infer_ms": 20.0}


def test_an_endpoint_that_is_none_or_hangs_has_no_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # accepts connections without responding
        for address in (f"127.0.0.1:{deaf.getsockname()[1]}", "http://:x"):
            assert asyncio.run(counters.triton(address)) is None


def test_gpu_samples_are_summed_up_and_what_is_missing_stays_missing() -> None:
    second = 1_000_000_000
    samples = [[0, 100.0, 5.0, 1500.0, None, None], [second, 300.0, 9.0, 1300.0, None, None]]
    told = counters.gpu_summary({"name": "G", "uuid": "u", "samples": samples})
    assert (told["power_w"], told["energy_j"], told["memory_bytes"]) == (200.0, 200.0, 9)
    assert (told["sm_clock_mhz"], told["sm_clock_mhz_min"], told["busy_percent"]) == (1400, 1300, None)
    assert told["temperature_c"] is None


BOARD: dict[str, Any] = {"name": "NVIDIA Something", "memory": 2 << 30, "free": 1 << 30, "milliwatts": 70_500}
BOARD |= {"sm_mhz": 1410, "celsius": 61}
"""Of its load nothing is known."""


def test_gpus_are_sampled_while_the_block_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board("GPU-1", **BOARD)
    monkeypatch.setitem(sys.modules, "pynvml", module := nvml([board]))
    monkeypatch.setattr(counters, "SAMPLE_S", 0.005)
    with counters.gpus() as devices:
        assert eventually(lambda: board.reads >= 4)
        assert devices == []
    assert module.shut_down
    told = counters.gpu_summary(devices[0])
    assert (told["name"], told["power_w"], told["memory_bytes"]) == ("NVIDIA Something", 70.5, 1 << 30)
    assert (told["sm_clock_mhz"], told["busy_percent"], told["temperature_c"]) == (1410, None, 61)
    assert len(devices[0]["samples"]) > 2


def test_gauges_of_a_page_with_an_engine_and_of_triton_alone() -> None:
    page = metrics_pages.triton(3)
    assert counters.gauges(page) == (6.0, 2.0, 0.25)
    alone = "\n".join(line for line in page.splitlines() if not line.startswith("nv_trt_llm"))
    assert counters.gauges(alone) == (None, 2.0, None)
    assert counters.gauges("") == (None, None, None)


def test_gauges_are_looked_at_while_the_block_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "GAUGES_S", 0.005)
    steps = iter(range(10_000))

    async def page(_address: str) -> tuple[str | None, str]:
        return metrics_pages.triton(1) if next(steps) % 2 else None, ""

    monkeypatch.setattr(counters, "metrics_page", page)
    with counters.watching("here:1") as found:
        assert eventually(lambda: len(found) >= 3)
    summary = counters.gauges_summary([GaugeSample(*sample) for sample in found])  # type: ignore[arg-type]
    assert summary == {
        "in_flight": 6.0,
        "in_flight_max": 6.0,
        "waiting": 2.0,
        "waiting_max": 2.0,
        "kv_cache_use": 0.25,
        "kv_cache_use_max": 0.25,
    }
    with counters.watching(None) as none:
        pass
    assert none == []


def test_only_gpus_of_the_servers_process_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml([Board(uuid, **BOARD) for uuid in ("GPU-0", "GPU-1")]))
    for its_own, expected in ((frozenset({"GPU-1"}), ["GPU-1"]), (frozenset(), ["GPU-0", "GPU-1"])):
        monkeypatch.setattr(gpus, "of_process", lambda pid, found=its_own: found if pid == 7 else frozenset())
        with counters.gpus(7) as devices:
            pass
        assert [device["uuid"] for device in devices] == expected


def device(watts: float, *, seconds: range, busy: float = 50.0, name: str = "a") -> GpuDevice:
    samples = [GpuSample(s * 10**9, watts, 2e9, 1500.0, busy, 60.0) for s in seconds]
    return {"name": "NVIDIA H200", "uuid": name, "samples": samples}


def record(*devices: GpuDevice, repeat: int = 0) -> GpuRecord:
    return {"type": "gpu", "concurrency": 4, "repeat": repeat, "devices": list(devices)}


def test_energy_is_power_over_the_time_that_is_asked_for() -> None:
    assert counters.energy_j([record(device(100, seconds=range(11)))], 2 * 10**9, 7 * 10**9) == pytest.approx(500)
    both = record(device(100, seconds=range(11)), device(50, seconds=range(11), name="b"))
    assert counters.energy_j([both], 2 * 10**9, 7 * 10**9) == pytest.approx(750)
    idle = record(device(100, seconds=range(11)), device(70, seconds=range(11), busy=0.0, name="b"))
    assert counters.energy_j([idle], 2 * 10**9, 7 * 10**9) == pytest.approx(500), "an idle GPU is another's"
    rising = device(0, seconds=range(11))
    rising["samples"] = [sample._replace(watts=10.0 * s) for s, sample in enumerate(rising["samples"])]
    # Samples outside are moved to the ends of the interval.
    assert counters.energy_j([record(rising)], 0, 10**10) == pytest.approx(500)


def test_energy_is_not_known_where_gpus_were_not_sampled_all_the_time() -> None:
    assert counters.energy_j([record(device(100, seconds=range(5)))], 0, 10 * 10**9) is None
    assert counters.energy_j([], 0, 10**9) is None
    silent = device(0, seconds=range(11))
    silent["samples"] = [sample._replace(watts=None) for sample in silent["samples"]]
    assert counters.energy_j([record(silent)], 0, 10**9) is None


def test_gpus_of_a_level_together() -> None:
    used = counters.gpu_use(
        [
            record(device(100, seconds=range(11)), device(60, seconds=range(11), name="b")),
            record(device(120, seconds=range(11)), device(60, seconds=range(11), name="b"), repeat=1),
        ],
        [500.0, 700.0],
    )
    assert (used.devices, used.power_w, used.energy_j, used.memory_bytes) == (2, 170.0, 1200.0, 4 * 10**9)
    assert (used.sm_clock_mhz, used.temperature_c) == (1500.0, 60.0)
    assert read_record(GpuUse, asdict(used)) == used
    assert read_record(GpuUse, {"power_w": 3}) is None
    assert counters.gpu_use([], []) is None
    partly = counters.gpu_use([record(device(100, seconds=range(11)))], [None])
    assert partly.energy_j is None


def test_what_triton_says_of_a_level_is_of_all_its_repeats() -> None:
    def grown(repeat: int, **models: dict[str, float]) -> TritonRecord:
        return {"type": "triton", "concurrency": 4, "repeat": repeat, "models": models}

    def looks(repeat: int, *samples: tuple[float | None, float | None, float | None]) -> GaugesRecord:
        items = [GaugeSample(second, *each) for second, each in enumerate(samples)]
        return {"type": "gauges", "concurrency": 4, "repeat": repeat, "samples": items}

    counted = [
        grown(0, engine={"requests": 10.0, "queue_us": 20_000.0, "compute_infer_us": 100_000.0}),
        grown(1, engine={"requests": 30.0, "queue_us": 0.0, "compute_infer_us": 300_000.0}),
    ]
    records = [looks(0, (4.0, 0.0, 0.25)), looks(1, (2.0, 3.0, 0.5), (None, None, 0.75))]
    use = counters.triton_use(counted, records, [3.5, None])
    assert use.models == {"engine": {"requests": 40, "queue_ms": 0.5, "compute_infer_ms": 10.0}}
    assert (use.in_flight, use.in_flight_max, use.in_flight_by_client) == (3.0, 4.0, 3.5)
    assert (use.waiting_max, use.kv_cache_use, use.kv_cache_use_max) == (3.0, 0.5, 0.75)
    level = LevelResult(concurrency=4, requests=40, triton_use=use)
    assert levels_of(json.loads(json.dumps([level.to_json()])))[0].triton_use == use
    assert counters.triton_use([], [], [3.5]) is None
    assert "triton_use" not in LevelResult(concurrency=4).to_json()


def test_a_gpu_that_is_lost_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml([Board("GPU-1", lost=True)]))
    with counters.gpus() as devices:
        pass
    assert devices == []
