"""GPUs of other machines by their DCGM exporters."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest

from tests.helpers import metrics_pages
from trtllm_pipeline.measure.load import counters, dcgm
from trtllm_pipeline.measure.load.dcgm import Exporters, gpus_of
from trtllm_pipeline.measure.load.events import GpuDevice, GpuRecord, GpuSample

SECOND = 1_000_000_000


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcgm, "SAMPLE_S", 0.005)


class Pages:
    """An exporter's page, a new one each time it is read."""

    def __init__(self, page: Callable[[int], str]) -> None:
        self._page = page
        self.steps = 0

    def __call__(self) -> str:
        self.steps += 1
        return self._page(self.steps)


def sampled(exporters: Exporters, enough: Callable[[], bool]) -> tuple[list[dict[str, Any]], list[str]]:
    """The devices and problems of a block that lasts until there are `enough` readings."""
    problems: list[str] = []
    with exporters.sampled(problems) as devices:
        while not enough():
            threading.Event().wait(0.005)
        assert devices == []
    return devices, problems


def test_a_page_is_read_in_the_units_of_local_readings() -> None:
    first, second = gpus_of(metrics_pages.dcgm(2, gpus=2))
    assert (first.index, first.name, second.index) == (0, "NVIDIA H100 80GB HBM3", 1)
    assert first.uuid != second.uuid
    assert first.values == (350.5, 71_680 * 1024**2, 1755.0, 97.0, 58.0, 701.0)


def test_a_gpu_in_parts_or_shared_by_pods_is_one() -> None:
    labels = 'gpu="0",UUID="GPU-a",modelName="NVIDIA H100"'
    lines = [f'DCGM_FI_DEV_FB_USED{{{labels},GPU_I_PROFILE="1g.10gb",GPU_I_ID="{part}"}} 1024' for part in (7, 8)]
    lines += [f'DCGM_FI_DEV_POWER_USAGE{{{labels},pod="{pod}"}} 100' for pod in ("x", "y")]
    (gpu,) = gpus_of("\n".join(lines))
    assert gpu.values == (100.0, 2048 * 1024**2, None, None, None, None)


def test_chosen_gpus_of_several_exporters_are_sampled() -> None:
    a, b = (Pages(lambda step, host=host: metrics_pages.dcgm(step, gpus=2, host=host)) for host in "ab")  # type: ignore[misc]
    with metrics_pages.served({"/metrics": a}) as one, metrics_pages.served({"/metrics": b}) as other:
        urls = (f"http://{one}/metrics", other)
        devices, problems = sampled(Exporters(urls, (1,)), lambda: min(a.steps, b.steps) > 4)
    assert [(device["exporter"], device["uuid"]) for device in devices] == [(urls[0], "GPU-a-1"), (urls[1], "GPU-b-1")]
    assert problems == []
    assert all(len(device["samples"]) > 4 for device in devices)
    told = counters.gpu_summary(devices[0])
    assert (told["power_w"], told["memory_bytes"], told["busy_percent"]) == (350.5, 71_680 * 1024**2, 97.0)


def test_what_is_missing_is_named_and_the_rest_is_there() -> None:
    def page(step: int) -> str:
        return "\n".join(line for line in metrics_pages.dcgm(step).splitlines() if "ENERGY" not in line)

    with socket.socket() as closed, metrics_pages.served({"/metrics": (pages := Pages(page))}) as url:
        closed.bind(("127.0.0.1", 0))  # it does not listen
        gone = f"127.0.0.1:{closed.getsockname()[1]}"
        devices, problems = sampled(Exporters((url, gone, f"{url}/other"), (0, 9)), lambda: pages.steps > 4)
    assert len(devices) == 1
    assert sorted(problem.partition(" [")[0] for problem in problems) == sorted(
        [
            f"{url}/other: HTTP status 404",
            f"{url}: does not report DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
            f"{url}: has no GPU 9",
            f"{gone}: cannot be read:",
        ]
    )


def test_another_page_is_not_an_exporters() -> None:
    with metrics_pages.served({"/metrics": (pages := Pages(metrics_pages.triton))}) as url:
        devices, problems = sampled(Exporters((url,)), lambda: pages.steps > 1)
    assert devices == []
    assert problems == [f"{url}: reports no GPU; expected metrics such as DCGM_FI_DEV_FB_USED"]


def device(*readings: tuple[float, float | None, float | None], **about: Any) -> GpuDevice:
    """One with samples of (seconds, watts, joules)."""
    samples = [
        GpuSample(round(at_s * SECOND), watts, 5.0, 1755.0, 97.0, 58.0, joules) for at_s, watts, joules in readings
    ]
    return {"name": "G", "uuid": "u", "exporter": "here:9400", "samples": samples, **about}  # type: ignore[typeddict-item]


def record(*devices: GpuDevice) -> GpuRecord:
    return {"type": "gpu", "concurrency": 1, "request_rate": None, "repeat": 0, "devices": [*devices]}


def test_energy_is_the_growth_of_the_counter_between_its_updates() -> None:
    # Collected every 5 s and read every second: 300 W until 10 s, then 500 W.
    steps = [(0, 1000.0), (5, 2500.0), (10, 4000.0), (15, 6500.0), (20, 9000.0)]
    readings = chain.from_iterable(((at + late, 100.0, joules) for late in range(5)) for at, joules in steps)
    one = device(*readings)
    assert [update.joules for update in counters.updates(one)] == [2500.0, 4000.0, 6500.0, 9000.0]
    assert counters.energy_j([record(one)], 5 * SECOND, 20 * SECOND) == pytest.approx(6500.0)
    assert counters.energy_j([record(one)], 7 * SECOND, 12 * SECOND) == pytest.approx(3 * 300.0 + 2 * 500.0)
    assert counters.energy_j([record(one)], 3 * SECOND, 22 * SECOND) == pytest.approx(2 * 300 + 6500 + 2 * 500)
    two = record(one, device(*((at, 10.0, at * 10.0) for at in range(20)), uuid="v"))
    assert counters.energy_j([two], 5 * SECOND, 15 * SECOND) == pytest.approx(4000.0 + 100.0)


def test_too_few_readings_give_no_energy() -> None:
    held = device(*((at, 300.0, 1000.0 if at < 4 else 2000.0) for at in range(8)))
    assert counters.energy_j([record(held)], SECOND, 7 * SECOND) is None


def test_power_stands_in_for_a_missing_counter() -> None:
    changing = device(*((at, 200.0 + at % 2 * 100, None) for at in range(11)))
    assert counters.energy_j([record(changing)], 0, 10 * SECOND) == pytest.approx(2500.0)
