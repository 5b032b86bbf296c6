"""NVIDIA GPUs, by an NVML that tells what we make it tell, and by what nvidia-smi prints."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers.nvml import Board, nvml
from trtllm_pipeline.base.machine import gpus
from trtllm_pipeline.base.machine.gpus import Device, Graphics, look, visible
from trtllm_pipeline.base.machine.model import Gpu

GIB = 2**30


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with a driver and without a mask, on whose PATH there is nothing but what a test puts there."""
    (tmp_path / "driver").touch()
    monkeypatch.setattr(gpus, "_DRIVERS", (str(tmp_path / "driver"),))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def seen(monkeypatch: pytest.MonkeyPatch, *boards: Board, init_fails: bool = False) -> Graphics:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(list(boards), init_fails=init_fails))
    return look()


def test_a_machine_without_a_driver_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpus, "_DRIVERS", (str(tmp_path / "none"),))
    assert seen(monkeypatch, Board("GPU-a")) == Graphics()


def test_gpus_have_their_address_as_sysfs_writes_it_and_slices_that_of_their_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Board("GPU-a", bus=b"00000000:3B:00.0")
    sliced = Board("GPU-b", bus="00000001:D8:00.0", slices=[Board("MIG-c"), Board("MIG-d")])
    found = seen(monkeypatch, whole, sliced, Board("GPU-e"))
    assert [each.bus for each in found.devices] == ["0000:3b:00.0", "0001:d8:00.0", "0001:d8:00.0", None]


def test_nvml_tells_all_there_is_to_know(monkeypatch: pytest.MonkeyPatch) -> None:
    found = seen(monkeypatch, Board(b"GPU-a"), Board("GPU-b", "NVIDIA L4", 23 * GIB, 3 * GIB, (8, 9), processes=2))
    both = (
        Device(Gpu(0, "GPU-a", "NVIDIA H100 80GB HBM3", 80 * GIB, 90), "GPU-a", 79 * GIB, 0),
        Device(Gpu(1, "GPU-b", "NVIDIA L4", 23 * GIB, 89), "GPU-b", 3 * GIB, 2),
    )
    assert found == Graphics(
        devices=both,
        everything=both,
        driver="580.65.06",
        cuda="12.8",
        source="NVML",
    )


def test_a_slice_is_a_device_and_knows_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    piece = Board("MIG-1", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9 * GIB, 9 * GIB, capability=None)
    found = seen(monkeypatch, Board("GPU-a"), Board("GPU-b", slices=[piece]), Board("GPU-c", slices=[]))
    assert [device.gpu.uuid for device in found.devices] == ["GPU-a", "MIG-1"]
    assert found.devices[1].gpu == Gpu(1, "MIG-1", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9 * GIB, 90, mig=True)
    assert found.devices[1].parent == "GPU-b"
    assert len(found.problems) == 1
    assert "GPU 2 is in MIG mode" in found.problems[0]


def test_a_broken_gpu_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    found = seen(monkeypatch, Board("GPU-a", lost=True), Board(None), Board("GPU-c"))
    assert [device.gpu.index for device in found.devices] == [2]
    assert [problem[:5] for problem in found.problems] == ["GPU 0", "GPU 1"]


def test_a_gpu_without_memory_of_its_own_has_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = seen(monkeypatch, Board("GPU-a", "NVIDIA GB10", None, capability=(12, 1)))
    text = Path("/proc/meminfo").read_text().split("MemTotal:")[1]
    assert found.devices[0].gpu.memory_bytes == int(text.split()[0]) * 1024
    assert found.devices[0].free_bytes is None


def test_a_driver_that_does_not_answer_is_a_problem_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    found = seen(monkeypatch, Board("GPU-a"), init_fails=True)
    assert found.devices == ()
    assert found.problems == ("the NVIDIA driver does not respond: Driver/library version mismatch",)


def test_the_mask_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,5")
    found = seen(monkeypatch, Board("GPU-a"), Board("GPU-b"))
    assert [device.gpu.uuid for device in found.devices] == ["GPU-b"]
    assert [device.gpu.uuid for device in found.everything] == ["GPU-a", "GPU-b"]
    assert len(found.problems) == 1


# ------------------------------------------------------------------------------------------------------- nvidia-smi


def smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Graphics:
    """What is seen without nvidia-ml-py, where this script is nvidia-smi."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    if script:
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "nvidia-smi").chmod(0o755)
    return look()


def test_nvidia_smi_is_asked_where_the_package_is_missing(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (
        "0, GPU-a, NVIDIA H200, 143771, 143160, 9.0, Disabled, 580.65.06",
        "1, GPU-b, NVIDIA H200, 143771, 1000, 9.0, Enabled, 580.65.06",
        "2, GPU-c, NVIDIA T4, 15360, 15000, 7.5, [N/A], 580.65.06",
        "3, GPU-d, NVIDIA X, 1, 1, [N/A], [N/A], 580.65.06",
    )
    echoes = "; ".join(f"echo '{line}'" for line in lines)
    fields = "index,uuid,name,memory.total,memory.free,compute_cap,mig.mode.current,driver_version"
    found = smi(driver, f'[ "$1" = "--query-gpu={fields}" ] || exit 2; {echoes}', monkeypatch)
    assert [device.gpu for device in found.devices] == [
        Gpu(0, "GPU-a", "NVIDIA H200", 143771 * 2**20, 90),
        Gpu(2, "GPU-c", "NVIDIA T4", 15360 * 2**20, 75),
    ]
    assert found.devices[0].free_bytes == 143160 * 2**20
    assert (found.driver, found.source) == ("580.65.06", "nvidia-smi")
    assert "GPU 1 is in MIG mode" in found.problems[0]
    assert "GPU-d" in found.problems[1]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'Field \"compute_cap\" is not a valid field'; exit 2", "compute_cap"),
        ("exit 9", "exit code 9"),
        ("", "neither nvidia-ml-py nor nvidia-smi"),
    ],
)
def test_what_nvidia_smi_cannot_do_is_said(
    driver: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    found = smi(driver, script, monkeypatch)
    assert found.devices == ()
    assert len(found.problems) == 1
    assert words in found.problems[0]


def test_an_nvidia_smi_that_hangs_is_given_up(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_SMI_TIMEOUT_S", 0.2)
    assert "timed out" in smi(driver, "exec /bin/sleep 20", monkeypatch).problems[0]


# ------------------------------------------------------------------------------------------------- CUDA_VISIBLE_DEVICES

DEVICES = (
    Device(Gpu(0, "GPU-8932f937", "A", GIB, 90), "GPU-8932f937"),
    Device(Gpu(1, "GPU-89aa0000", "A", GIB, 90), "GPU-89aa0000"),
    Device(Gpu(2, "MIG-1111", "A MIG", GIB, 90, mig=True), "GPU-77770000"),
    Device(Gpu(2, "MIG-2222", "A MIG", GIB, 90, mig=True), "GPU-77770000"),
)


@pytest.mark.parametrize(
    ("mask", "uuids"),
    [
        (None, ["GPU-8932f937", "GPU-89aa0000", "MIG-1111", "MIG-2222"]),
        ("", []),
        (" ", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0", ["GPU-8932f937"]),
        ("1,0", ["GPU-89aa0000", "GPU-8932f937"]),
        ("1, 0", ["GPU-89aa0000", "GPU-8932f937"]),
        ("0,-1,1", ["GPU-8932f937"]),
        ("0,0", ["GPU-8932f937"]),
        ("GPU-89aa0000", ["GPU-89aa0000"]),
        ("GPU-893", ["GPU-8932f937"]),
        ("GPU-893,1", ["GPU-8932f937", "GPU-89aa0000"]),
        ("MIG-2222", ["MIG-2222"]),
        ("MIG-2", ["MIG-2222"]),
        ("2", ["MIG-1111", "MIG-2222"]),
        ("GPU-777", ["MIG-1111", "MIG-2222"]),
        ("MIG-2222,GPU-777", ["MIG-2222", "MIG-1111"]),
    ],
)
def test_a_mask_leaves_what_it_names_in_its_order(mask: str | None, uuids: list[str]) -> None:
    left, problem = visible(DEVICES, mask)
    assert [device.gpu.uuid for device in left] == uuids
    assert problem is None


@pytest.mark.parametrize(
    ("mask", "uuids", "words"),
    [
        ("0,7,1", ["GPU-8932f937"], "'7'; this entry and those after it are ignored"),
        ("GPU-89", [], "'GPU-89'; no device is visible"),
        ("MIG-", [], "'MIG-'"),
        ("gpu-8932f937", [], "'gpu-8932f937'"),
        ("0,", ["GPU-8932f937"], "''"),
        ("\u0660", [], "no device is visible"),
    ],
)
def test_an_entry_that_names_nothing_ends_the_mask_and_is_said(mask: str, uuids: list[str], words: str) -> None:
    left, problem = visible(DEVICES, mask)
    assert [device.gpu.uuid for device in left] == uuids
    assert words in problem


def test_the_peak_of_a_stage_run_is_that_of_its_fullest_gpu_without_what_was_there_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    boards = [Board("GPU-a", free=70 * GIB), Board("GPU-b", free=80 * GIB), Board("GPU-c", free=80 * GIB)]
    monkeypatch.setitem(sys.modules, "pynvml", nvml(boards))
    monkeypatch.setattr(gpus, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(gpus, "_LOOK_SHARE", 0)
    peaks = gpus.GpuPeaks()
    peaks.begin("run", ["GPU-a", "GPU-b"])
    peaks.begin("without", [])
    for free in (60, 40, 75):
        boards[0].free, boards[1].free, boards[2].free = free * GIB, (free + 20) * GIB, 0
        peaks.look()
    assert peaks.end("run") == 30 * GIB, "70 - 40 on the first, 20 on the second, the third is another's"
    assert peaks.end("without") is None
    assert peaks.end("run") is None
    peaks.close()


def test_without_nvml_no_peak_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    peaks = gpus.GpuPeaks()
    peaks.begin("run", ["GPU-a"])
    peaks.look()
    assert peaks.end("run") is None
    peaks.close()


def test_the_names_are_those_of_the_real_library() -> None:
    real = pytest.importorskip("pynvml")
    assert [name for name in vars(nvml([])) if name.startswith(("nvml", "NVML")) and not hasattr(real, name)] == []
