"""Counters of the server and the GPUs while a level runs: Triton's own times; power, memory, clocks."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from trtllm_pipeline.base import gpus as gpu_devices
from trtllm_pipeline.base import user_files
from trtllm_pipeline.measure.client.transport.http import HttpError, fetch

if TYPE_CHECKING:
    from trtllm_pipeline.measure.load.events import (
        GaugeSample,
        GaugesRecord,
        GpuDevice,
        GpuRecord,
        GpuSample,
        TritonRecord,
    )
    from trtllm_pipeline.measure.load.result import GpuUse, TritonUse

TRITON: Final = {
    "nv_inference_request_success": "requests",
    "nv_inference_count": "inferences",
    "nv_inference_exec_count": "executions",
    "nv_inference_request_duration_us": "request_us",
    "nv_inference_queue_duration_us": "queue_us",
    "nv_inference_compute_input_duration_us": "compute_input_us",
    "nv_inference_compute_infer_duration_us": "compute_infer_us",
    "nv_inference_compute_output_duration_us": "compute_output_us",
}
"""Triton's counters -> our names. Source: Triton user guide, "Metrics"."""
SAMPLE_S: Final = 0.1
GAUGES_S: Final = 1.0
LEAST_READINGS: Final = 4
"""Fewer different readings from a DCGM exporter do not resolve a level."""
_UNSEEN_NS: Final = 1_000_000_000
"""How long GPUs may be unsampled at either end."""
TIMEOUT_S: Final = 10.0
"""Timeout for one read of the counters: a hanging endpoint must not delay the run."""
_CLOCK_SM: Final = 1
_TEMPERATURE_GPU: Final = 0
"""As in nvml.h."""
_LINE: Final = re.compile(r"(\w+)\{([^}]*)\} +(\d{1,30}(?:\.\d{0,30})?(?:[eE][+-]?\d{1,2})?)", re.ASCII)
_ENGINE_GAUGE: Final = re.compile(r'(?:request_type|kv_cache_block_type)="(\w+)"')
_MODEL: Final = re.compile(r'(?:^|,)model="([^"]*)"')

Counters = dict[str, dict[str, float]]
"""Model -> counter -> value."""


def parse(text: str) -> Counters:
    """Triton's counters in a metrics page (Prometheus text), summed over versions of a model."""
    counters: Counters = {}
    for name, labels, value in samples(text):
        if name in TRITON and (model := _MODEL.search(labels)):
            values = counters.setdefault(model[1], {})
            values[TRITON[name]] = values.get(TRITON[name], 0.0) + value
    return counters


def samples(text: str) -> Iterator[tuple[str, str, float]]:
    """Name, labels and value of each labeled sample in a page of Prometheus text. Values other than counts are skipped."""
    for line in text.splitlines():
        if match := _LINE.fullmatch(line):
            yield match[1], match[2], float(match[3])


def growth(before: Counters, after: Counters) -> Counters:
    """Difference of two readings, for models that served requests in between."""
    grown = {
        model: {name: value - before.get(model, {}).get(name, 0.0) for name, value in values.items()}
        for model, values in after.items()
    }
    return {model: values for model, values in grown.items() if values.get("requests", 0) > 0}


async def triton(address: str | None) -> Counters | None:
    """The counters at a metrics endpoint (host:port); None without an endpoint, or if it is not Triton's."""
    if address is None:
        return None
    page, _ = await metrics_page(address)
    return None if page is None else parse(page) or None


async def speculation(url: str) -> tuple[int, int] | None:
    """Drafted and accepted tokens of the iterations since the last read of trtllm-serve's `/metrics`, which reports each
    iteration once. None if it reports none. Source: `specDecodingStats` of its statistics of iterations.
    """
    page, _ = await metrics_page(urlsplit(url).netloc or url)
    try:
        statistics = user_files.decode(page or "")
    except ValueError:
        return None
    pairs: list[tuple[int, int]] = []
    for each in statistics if isinstance(statistics, list) else ():
        match each:
            case {"specDecodingStats": {"numDraftTokens": int(drafted), "numAcceptedTokens": int(accepted)}}:
                pairs += [(drafted, accepted)] if min(drafted, accepted) >= 0 else []
    return (sum(drafted for drafted, _ in pairs), sum(accepted for _, accepted in pairs)) if pairs else None


async def metrics_page(address: str) -> tuple[str | None, str]:
    """Text of a metrics endpoint, or None and why it cannot be read."""
    try:
        status, body = await fetch(address, "/metrics", timeout_s=TIMEOUT_S)
    except (OSError, HttpError, ValueError) as error:
        return None, f"cannot be read: {str(error) or type(error).__name__}"
    return (body.decode(errors="replace"), "") if status == HTTPStatus.OK else (None, f"HTTP status {status}")


def gauges(text: str) -> tuple[float | None, float | None, float | None]:
    """Read Triton's metrics page: running requests and waiting requests of TensorRT-LLM's engines, and the share of KV
    cache blocks in use. None for a missing gauge. Triton itself only reports the requests that wait for each model.
    """
    engine: dict[tuple[str, str], float] = {}
    pending: list[float] = []
    for name, labels, value in samples(text):
        if name == "nv_inference_pending_request_count":
            pending.append(value)
        elif kind := _ENGINE_GAUGE.search(labels):
            at = (name, kind[1])
            engine[at] = engine.get(at, 0.0) + value
    requests, blocks = "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"
    used, most = engine.get((blocks, "used")), engine.get((blocks, "max"))
    waiting = engine.get((requests, "waiting"), max(pending, default=None))
    return engine.get((requests, "active")), waiting, None if used is None or not most else used / most


@contextmanager
def watching(address: str | None) -> Iterator[list[list[float | None]]]:
    """Sample the gauges of a metrics endpoint once a second while the block runs: time in ns, then the values of
    `gauges`. Runs in a thread so that the load's event loop never waits. Empty without an endpoint.
    """
    samples: list[list[float | None]] = []
    if address is None:
        yield samples
        return

    def look() -> None:
        page, _ = asyncio.run(metrics_page(address))
        values = gauges(page or "")
        if values != (None, None, None):
            samples.append([time.monotonic_ns(), *values])

    with sampling(look, GAUGES_S, name="gauges", wait_s=TIMEOUT_S):
        yield samples


@contextmanager
def sampling(
    look: Callable[[], None], every_s: float, *, name: str, wait_s: float, ends: bool = False
) -> Iterator[None]:
    """Call `look` in a thread every `every_s` seconds while the block runs, with `ends` also at its start and end.
    Waits at most `wait_s` for the end of the thread.
    """
    stop = threading.Event()

    def keep_looking() -> None:
        if ends:
            look()
        while not stop.wait(every_s):
            look()
        if ends:
            look()

    thread = threading.Thread(target=keep_looking, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(wait_s)


def gauges_summary(samples: Sequence[GaugeSample]) -> dict[str, float]:
    """Mean and maximum of each reported gauge."""
    summary: dict[str, float] = {}
    for name, column in zip(("in_flight", "waiting", "kv_cache_use"), (1, 2, 3), strict=True):
        values = [value for sample in samples if (value := sample[column]) is not None]
        if values:
            summary |= {name: round(fmean(values), 3), f"{name}_max": round(max(values), 3)}
    return summary


@contextmanager
def gpus(pid: int | None = None) -> Iterator[list[dict[str, Any]]]:
    """Sample GPUs while the block runs: those that a process was started with, or all that NVML lists. The list fills
    when the block ends, and stays empty without GPUs.

    Each has `name`, `uuid` and `samples`: [time ns, watts, bytes in use, SM clock MHz, busy %, °C], null if unknown.
    """
    records: list[dict[str, Any]] = []
    with gpu_devices.nvml() as ask:
        handles = [] if ask is None else ask.handles()
        if ask is None or not handles:
            yield records
            return
        its_own = frozenset() if pid is None else gpu_devices.of_process(pid)
        handles = [each for each in handles if not its_own or ask("nvmlDeviceGetUUID", each) in its_own]
        devices: list[dict[str, Any]] = [
            {
                "name": ask("nvmlDeviceGetName", each) or "unknown",
                "uuid": ask("nvmlDeviceGetUUID", each) or "unknown",
                "samples": [],
            }
            for each in handles
        ]

        def look() -> None:
            for handle, device in zip(handles, devices, strict=True):
                device["samples"].append(sample(ask, handle))

        try:
            with sampling(look, SAMPLE_S, name="NVML", wait_s=5):
                yield records
        finally:
            records.extend(devices)


def sample(ask: gpu_devices.Nvml, handle: Any) -> list[float | None]:
    """Time ns, watts, bytes in use, SM clock MHz, busy %, °C of a GPU now. null if unknown."""
    milliwatts, memory = ask("nvmlDeviceGetPowerUsage", handle), ask("nvmlDeviceGetMemoryInfo", handle)
    load = ask("nvmlDeviceGetUtilizationRates", handle)
    values = (
        milliwatts and milliwatts / 1e3,
        memory and memory.used,
        ask("nvmlDeviceGetClockInfo", handle, _CLOCK_SM),
        load and load.gpu,
        ask("nvmlDeviceGetTemperature", handle, _TEMPERATURE_GPU),
    )
    return [time.monotonic_ns(), *(None if value is None else float(value) for value in values)]


def gpu_summary(device: GpuDevice) -> dict[str, Any]:
    """Mean power, energy, most memory, mean clock and load, highest temperature of a device."""

    def column(index: int) -> list[float]:
        return [value for row in readings if (value := row[index]) is not None]

    readings = device["samples"]
    watts, memory, clock, load, heat = map(column, (1, 2, 3, 4, 5))
    seconds = (readings[-1][0] - readings[0][0]) / 1e9 if len(readings) > 1 else 0.0
    return {
        "name": device["name"],
        "uuid": device["uuid"],
        "power_w": round(fmean(watts), 1) if watts else None,
        "energy_j": round(fmean(watts) * seconds, 1) if watts else None,
        "memory_bytes": int(max(memory)) if memory else None,
        "sm_clock_mhz": round(fmean(clock)) if clock else None,
        "sm_clock_mhz_min": round(min(clock)) if clock else None,
        "busy_percent": round(fmean(load), 1) if load else None,
        "temperature_c": round(max(heat)) if heat else None,
    }


def energy_j(records: Iterable[GpuRecord], start_ns: int, end_ns: int) -> float | None:
    """Joules that the GPUs of the records used between two times: by their own counters, otherwise by linear
    interpolation of power samples. None if samples are missing. Idle GPUs belong to other users and are left out.
    """
    total, known = 0.0, False
    for device in working(each for record in records for each in record["devices"]):
        if "exporter" in device:
            readings = updates(device)
            if len(readings) < LEAST_READINGS:
                return None
            if readings[0].joules is not None:
                known, total = True, total + _counted_j(readings, start_ns, end_ns)
                continue
        samples = [(each[0], watts) for each in device["samples"] if (watts := each[1]) is not None]
        if not samples or samples[0][0] > start_ns + _UNSEEN_NS or samples[-1][0] < end_ns - _UNSEEN_NS:
            return None
        inside = [(min(max(now_ns, start_ns), end_ns), watts) for now_ns, watts in samples]
        known = True
        total += sum((later - now) / 1e9 * (one + two) / 2 for (now, one), (later, two) in pairwise(inside))
        total += (inside[0][0] - start_ns) / 1e9 * inside[0][1] + (end_ns - inside[-1][0]) / 1e9 * inside[-1][1]
    return total if known else None


def updates(device: GpuDevice) -> list[GpuSample]:
    """The samples of an exported GPU at which a value changed: an exporter repeats its values until it has new ones."""
    return [later for earlier, later in pairwise(device["samples"]) if later[1:] != earlier[1:]]


def _counted_j(readings: Sequence[GpuSample], start_ns: int, end_ns: int) -> float:
    """Growth of an energy counter, interpolated between its readings and extrapolated linearly beyond them."""

    def at(time_ns: int) -> float:
        later = min(max(1, bisect_left(readings, time_ns, key=lambda each: each.time_ns)), len(readings) - 1)
        one, two = readings[later - 1], readings[later]
        share = (time_ns - one.time_ns) / (two.time_ns - one.time_ns)
        return (one.joules or 0.0) + share * ((two.joules or 0.0) - (one.joules or 0.0))

    return at(end_ns) - at(start_ns)


def working(devices: Iterable[GpuDevice]) -> list[GpuDevice]:
    """GPUs that were busy at any time, or do not report their use. All of them if none was busy."""
    every = list(devices)
    busy = [device for device in every if any(sample[4] is None or sample[4] > 0 for sample in device["samples"])]
    return busy or every


def gpu_use(records: Sequence[GpuRecord], joules: Sequence[float | None]) -> GpuUse | None:
    """Use of all GPUs of a level. `joules` has one value per repeat. None without records."""
    from trtllm_pipeline.measure.load.result import GpuUse

    summaries = [[gpu_summary(device) for device in working(record["devices"])] for record in records]
    if not any(summaries):
        return None

    def over(
        name: str, how: Callable[[Iterable[float]], float], each: Callable[[Iterable[float]], float]
    ) -> float | None:
        """`how` over the devices of a record, `each` over the records."""
        columns = [[value for one in of if (value := one[name]) is not None] for of in summaries]
        return round(each(how(values) for values in columns), 3) if all(columns) else None

    memory = over("memory_bytes", sum, max)
    return GpuUse(
        devices=max(map(len, summaries)),
        power_w=over("power_w", sum, fmean),
        energy_j=None if None in joules else round(sum(each for each in joules if each is not None), 3),
        memory_bytes=None if memory is None else int(memory),
        sm_clock_mhz=over("sm_clock_mhz", fmean, fmean),
        sm_clock_mhz_min=over("sm_clock_mhz_min", min, min),
        busy_percent=over("busy_percent", fmean, fmean),
        temperature_c=over("temperature_c", max, max),
    )


def triton_use(
    levels: Sequence[TritonRecord], gauges: Sequence[GaugesRecord], ours: Sequence[float | None]
) -> TritonUse | None:
    """Triton's metrics over all repeats of a level. `ours` is the client's mean in flight for each. None without records."""
    from trtllm_pipeline.measure.load.result import TritonUse

    if not levels and not gauges:
        return None
    models: Counters = {}
    for record in levels:
        for model, values in record["models"].items():
            of_model = models.setdefault(model, {})
            for name, value in values.items():
                of_model[name] = of_model.get(name, 0.0) + value
    known = [each for each in ours if each is not None]
    return TritonUse(
        models=per_request(models),
        **gauges_summary([sample for record in gauges for sample in record["samples"]]),
        in_flight_by_client=round(fmean(known), 3) if known else None,
    )


def per_request(models: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Requests of each model, and milliseconds a request spent in each part of it."""
    return {
        model: {
            "requests": round(values["requests"]),
            **{
                name.replace("_us", "_ms"): round(value / values["requests"] / 1e3, 3)
                for name, value in values.items()
                if name.endswith("_us")
            },
        }
        for model, values in models.items()
    }
