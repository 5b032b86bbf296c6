"""CPUs of GPUs, by a made-up sysfs."""

from __future__ import annotations

from pathlib import Path

from trtllm_pipeline.base.machine.gpus import Device
from trtllm_pipeline.base.machine.model import Gpu
from trtllm_pipeline.base.machine.placement import cpus_of

BUSES = ("0000:1b:00.0", "0000:3b:00.0", "0000:9b:00.0", "0000:bb:00.0")


def devices(*buses: str | None) -> list[Device]:
    return [
        Device(Gpu(index, f"GPU-{index}", "GPU", 1, 90), f"GPU-{index}", bus=bus) for index, bus in enumerate(buses)
    ]


def sysfs(folder: Path, near: dict[str, str], siblings: dict[int, str]) -> Path:
    for bus, cpus in near.items():
        (folder / "bus/pci/devices" / bus).mkdir(parents=True)
        (folder / "bus/pci/devices" / bus / "local_cpulist").write_text(f"{cpus}\n")
    for cpu, threads in siblings.items():
        topology = folder / f"devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{threads}\n")
    return folder


def test_each_gpu_has_whole_cores_of_its_own_node(tmp_path: Path) -> None:
    # Two sockets of four cores with two threads each: CPU n and n + 8 are one core.
    near = {bus: "0-3,8-11" if place < 2 else "4-7,12-15" for place, bus in enumerate(BUSES)}
    found = cpus_of(
        devices(*BUSES), range(16), sysfs=sysfs(tmp_path, near, {cpu: f"{cpu % 8},{cpu % 8 + 8}" for cpu in range(16)})
    )
    assert found == {"GPU-0": (0, 1, 8, 9), "GPU-1": (2, 3, 10, 11), "GPU-2": (4, 5, 12, 13), "GPU-3": (6, 7, 14, 15)}


def test_only_cpus_that_may_be_used_are_dealt_out(tmp_path: Path) -> None:
    near = {BUSES[0]: "0-7", BUSES[1]: "0-7"}
    assert cpus_of(devices(*BUSES[:2]), {2, 3, 6}, sysfs=sysfs(tmp_path, near, {})) == {"GPU-0": (2,), "GPU-1": (3, 6)}


def test_where_it_is_not_known_what_is_near_all_are_dealt_out(tmp_path: Path) -> None:
    folder = sysfs(tmp_path, {BUSES[0]: "0-1"}, {})
    assert cpus_of(devices(BUSES[0], None), range(4), sysfs=folder) == {"GPU-0": (0, 1), "GPU-1": (2, 3)}
    assert cpus_of(devices(*BUSES[:2]), range(5), sysfs=tmp_path / "none") == {"GPU-0": (0, 1), "GPU-1": (2, 3, 4)}


def test_fewer_cores_than_gpus_are_shared(tmp_path: Path) -> None:
    assert cpus_of(devices(*BUSES), {0, 1}, sysfs=tmp_path) == {f"GPU-{index}": (0, 1) for index in range(4)}


def test_without_gpus_there_is_nothing_to_place(tmp_path: Path) -> None:
    assert cpus_of([], {0}, sysfs=tmp_path) == {}
