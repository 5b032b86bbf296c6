"""GPUs of other machines while a level runs, as reported by their DCGM exporters.

Readings have the form and units of `counters.gpus`. An exporter serves values that it collected up to one interval ago,
30 s by default, so equal consecutive values are one reading. Source: DCGM Exporter Metrics; DCGM field identifiers.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from trtllm_pipeline.measure.load import counters

_MEMORY: Final = "DCGM_FI_DEV_FB_USED"
FIELDS: Final[Mapping[str, float]] = {
    "DCGM_FI_DEV_POWER_USAGE": 1.0,
    _MEMORY: 1024.0**2,  # from MiB
    "DCGM_FI_DEV_SM_CLOCK": 1.0,
    "DCGM_FI_DEV_GPU_UTIL": 1.0,
    "DCGM_FI_DEV_GPU_TEMP": 1.0,
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 1e-3,  # from mJ
}
"""Field -> factor to the unit of its column in a sample: W, bytes, MHz, %, °C, J."""
SAMPLE_S: Final = 1.0
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Exporters:
    """DCGM exporters of the servers' machines."""

    urls: tuple[str, ...]
    indices: tuple[int, ...] = ()
    """GPUs on each machine. Empty: all."""

    @contextmanager
    def sampled(self, problems: list[str]) -> Iterator[list[dict[str, Any]]]:
        """Sample the GPUs while the block runs. The list of devices and `problems` fill when it ends."""
        devices: dict[str, dict[str, Any]] = {}
        lacking: Counter[str] = Counter()
        records: list[dict[str, Any]] = []
        looks = 0

        async def look() -> None:
            nonlocal looks
            looks += 1
            addresses = [url.rstrip("/").removesuffix("/metrics") for url in self.urls]
            pages = await asyncio.gather(*map(counters.metrics_page, addresses))
            for url, (page, problem) in zip(self.urls, pages, strict=True):
                found = {problem} if page is None else self._add(devices, url, page)
                lacking.update({f"{url}: {each}" for each in found})

        try:
            with counters.sampling(
                lambda: asyncio.run(look()), SAMPLE_S, name="DCGM", wait_s=3 * counters.TIMEOUT_S, ends=True
            ):
                yield records
        finally:
            records.extend(devices.values())
            problems.extend(f"{each} ({n} of {looks} times)" if n < looks else each for each, n in lacking.items())

    def _add(self, devices: dict[str, dict[str, Any]], url: str, page: str) -> set[str]:
        """Add the readings in a page to `devices`, by UUID. Returns what the page lacks."""
        now_ns, found = time.monotonic_ns(), gpus_of(page)
        if not found:
            return {f"reports no GPU; expected metrics such as {_MEMORY}"}
        lacking = {f"has no GPU {index}" for index in {*self.indices} - {each.index for each in found}}
        for gpu in found:
            if not self.indices or gpu.index in self.indices:
                about = {"name": gpu.name, "uuid": gpu.uuid, "exporter": url, "samples": []}
                devices.setdefault(gpu.uuid, about)["samples"].append([now_ns, *gpu.values])
                lacking |= {
                    f"does not report {name}" for name, value in zip(FIELDS, gpu.values, strict=True) if value is None
                }
        return lacking


@dataclass(frozen=True, slots=True)
class ExportedGpu:
    """A GPU on an exporter's page."""

    index: int | None
    uuid: str
    name: str
    values: tuple[float | None, ...]
    """In the order and units of FIELDS. None if not reported."""


def gpus_of(page: str) -> list[ExportedGpu]:
    """The GPUs on a page of Prometheus text. For a GPU in MIG mode, the memory is the sum of its instances."""
    gpus: dict[str, dict[str, dict[str, float]]] = {}
    about: dict[str, dict[str, str]] = {}
    for metric, text, value in counters.samples(page):
        if metric in FIELDS:
            labels = dict(_LABEL.findall(text))
            uuid = labels.get("UUID") or f"{labels.get('Hostname', '')}:{labels.get('gpu', '')}"
            about.setdefault(uuid, labels)
            parts = gpus.setdefault(uuid, {}).setdefault(metric, {})
            part = labels.get("GPU_I_ID", "")  # pods that share a GPU each have a line with its value
            parts[part] = max(parts.get(part, 0.0), value * FIELDS[metric])
    return [
        ExportedGpu(
            int(labels["gpu"]) if labels.get("gpu", "").isdecimal() else None,
            uuid,
            labels.get("modelName") or "unknown",
            tuple(
                (sum if name == _MEMORY else max)(parts[name].values()) if name in parts else None for name in FIELDS
            ),
        )
        for (uuid, parts), labels in zip(gpus.items(), about.values(), strict=True)
    ]
