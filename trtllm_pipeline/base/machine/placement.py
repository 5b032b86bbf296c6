"""Assigns CPUs to GPUs, so that measurements running at the same time do not share any."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from trtllm_pipeline.base.machine.gpus import Device

_SYSFS: Final = Path("/sys")


def cpus_of(
    devices: Sequence[Device], allowed: Collection[int] | None = None, *, sysfs: Path = _SYSFS
) -> dict[str, tuple[int, ...]]:
    """UUID -> CPUs for each of `devices`, all of a machine: whole cores near the device, divided among the devices they
    are near.

    Memory is allocated on the node of the CPU that touches it first, so it is near as well. Only the CPUs in `allowed`
    count, by default those of this process. Devices share the cores near them if there are fewer cores than devices.
    """
    usable = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
    near: dict[frozenset[int], list[str]] = {}
    for device in devices:
        near.setdefault(_near(device, usable, sysfs), []).append(device.gpu.uuid)
    if sum(map(len, near)) > len(frozenset().union(*near)):  # unknown for some
        near = {usable: [device.gpu.uuid for device in devices]}
    chosen: dict[str, tuple[int, ...]] = {}
    for cpus, uuids in near.items():
        cores = sorted({_core(cpu, cpus, sysfs) for cpu in cpus})
        many = len(uuids)
        for place, uuid in enumerate(uuids):
            share = cores[place * len(cores) // many : (place + 1) * len(cores) // many]
            chosen[uuid] = tuple(sorted(cpu for core in (share if len(cores) >= many else cores) for cpu in core))
    return chosen


def _near(device: Device, usable: frozenset[int], sysfs: Path) -> frozenset[int]:
    """The CPUs on a device's NUMA node. All CPUs if it is unknown."""
    if device.bus is None:
        return usable
    return _listed(sysfs / "bus/pci/devices" / device.bus / "local_cpulist") & usable or usable


def _core(cpu: int, cpus: frozenset[int], sysfs: Path) -> tuple[int, ...]:
    """The CPUs of its core."""
    threads = _listed(sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") & cpus
    return tuple(sorted(threads | {cpu}))


def _listed(path: Path) -> frozenset[int]:
    """The CPUs in a list such as "0-3,8". Empty if it cannot be parsed. Source: cpuset(7), List format."""
    try:
        parts = [part.partition("-") for part in path.read_text(encoding="ascii").strip().split(",")]
        return frozenset(cpu for first, _, last in parts for cpu in range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return frozenset()
