"""The NVIDIA GPUs of this machine, through NVML, or through `nvidia-smi` if nvidia-ml-py is not installed.

These functions do not raise. Problems are returned as messages.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from trtllm_pipeline.base.machine.memory import physical_bytes
from trtllm_pipeline.base.machine.model import Gpu

MASK_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
_MASK: Final = f"{MASK_VARIABLE}=".encode()
_NO_DEVICES: Final = frozenset({"-1", "NoDevFiles"})
"""Common spellings of "none". They work because no device has such a name."""
_DRIVERS: Final = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")
"""One of these exists if there is a driver: on Linux, in containers and sandboxes, in WSL."""
_SMI_FIELDS: Final = "index,uuid,name,memory.total,memory.free,compute_cap,mig.mode.current,driver_version"
_SMI_TIMEOUT_S: Final = 20.0
_LOOK_EVERY_S: Final = 0.1
_LOOK_SHARE: Final = 100
"""Memory is sampled again after this many times the duration of a sample."""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU or MIG slice, and its current use."""

    gpu: Gpu
    parent: str
    """UUID of the physical GPU. For a GPU that is not a MIG slice, its own."""
    free_bytes: int | None = None
    processes: int | None = None
    """Compute processes of all users on it. In a container, possibly only those of the container."""
    bus: str | None = None
    """PCI address of the physical GPU in the form of sysfs: 0000:3b:00.0."""


@dataclass(frozen=True, slots=True)
class Graphics:
    """The GPUs of this machine and their driver."""

    devices: tuple[Device, ...] = ()
    """The devices that CUDA_VISIBLE_DEVICES makes visible to this process, in its order."""
    everything: tuple[Device, ...] = ()
    """All devices, regardless of CUDA_VISIBLE_DEVICES."""
    driver: str | None = None
    cuda: str | None = None
    """Newest CUDA the driver supports."""
    source: str | None = None
    """NVML or nvidia-smi."""
    problems: tuple[str, ...] = ()


def look() -> Graphics:
    """All devices this process may use. Takes milliseconds without a GPU, otherwise as long as the driver takes."""
    result = _look()
    devices, problem = visible(result.devices, os.environ.get(MASK_VARIABLE))
    problems = (*result.problems, problem) if problem else result.problems
    return replace(result, devices=devices, everything=result.devices, problems=problems)


def visible(devices: Sequence[Device], mask: str | None) -> tuple[tuple[Device, ...], str | None]:
    """The devices that a CUDA_VISIBLE_DEVICES of `mask` selects, in its order, and what is wrong with it.

    Entries are indices, UUIDs or UUID prefixes that match one GPU only. A GPU in MIG mode stands for its slices. None
    selects all devices, an empty text none. As in CUDA, parsing stops at the first entry that matches no device.
    Source: CUDA C++ Programming Guide, CUDA Environment Variables.
    """
    if mask is None:
        return tuple(devices), None
    chosen: dict[str, Device] = {}
    for entry in map(str.strip, mask.split(",") if mask.strip() else ()):
        named = _named(entry, devices)
        if not named:
            after = "no device is visible" if not chosen else "this entry and those after it are ignored"
            problem = f"{MASK_VARIABLE}={mask}: no device matches {entry!r}; {after}"
            return tuple(chosen.values()), None if entry in _NO_DEVICES else problem
        chosen |= {device.gpu.uuid: device for device in named}
    return tuple(chosen.values()), None


def of_process(pid: int) -> frozenset[str]:
    """UUIDs of the physical GPUs that a process was started with, by its CUDA_VISIBLE_DEVICES. Empty if unknown."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return frozenset()
    masks = [each.partition(b"=")[2].decode(errors="replace") for each in environment if each.startswith(_MASK)]
    devices, _ = visible(_look().devices, masks[0] if masks else None)
    return frozenset(device.parent for device in devices)


def _named(entry: str, devices: Sequence[Device]) -> list[Device]:
    if entry.isascii() and entry.isdecimal():
        return [device for device in devices if device.gpu.index == int(entry)]
    if entry.startswith("MIG-"):
        matching = [device for device in devices if device.gpu.mig and device.gpu.uuid.startswith(entry)]
        return matching if len(matching) == 1 else []
    if entry.startswith("GPU-"):
        matching = [device for device in devices if device.parent.startswith(entry)]
        return matching if len({device.parent for device in matching}) == 1 else []
    return []


def _look() -> Graphics:
    if not any(map(os.path.exists, _DRIVERS)):
        return Graphics()  # before any import: every plan calls this
    with nvml() as ask:
        if ask is None:
            return _by_nvidia_smi()
        if ask.error is not None:
            return Graphics(problems=(f"the NVIDIA driver does not respond: {ask.error}",))
        return _by_nvml(ask)


@contextlib.contextmanager
def nvml() -> Iterator[Nvml | None]:
    """NVML while the block runs. None if nvidia-ml-py is not installed."""
    try:
        module = importlib.import_module("pynvml")
    except ImportError:
        yield None
        return
    ask = Nvml(module)
    try:
        module.nvmlInit()
    except module.NVMLError as error:
        ask.error = str(error)
        yield ask
        return
    try:
        yield ask
    finally:
        with contextlib.suppress(module.NVMLError):
            module.nvmlShutdown()


class Nvml:
    """NVML, with None for everything that this driver, device or version of nvidia-ml-py does not support."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self.error: str | None = None
        """Why it cannot be queried: the driver does not respond."""

    def handles(self) -> list[Any]:
        """The GPUs that respond."""
        count = 0 if self.error is not None else self("nvmlDeviceGetCount") or 0
        handles = (self("nvmlDeviceGetHandleByIndex", index) for index in range(count))
        return [handle for handle in handles if handle is not None]

    def __call__(self, function: str, *args: object) -> Any:
        """The result of an NVML function, or None."""
        try:
            answer = getattr(self._module, function)(*args)
        except (self._module.NVMLError, AttributeError):
            return None
        return answer.decode() if isinstance(answer, bytes) else answer


class GpuPeaks:
    """Peak GPU memory of stage runs, sampled from NVML's figures for whole devices.

    Memory in use when a stage run started belongs to others and does not count. Pipelines give a stage run exclusive
    use of its GPUs.
    """

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._ask: Nvml | None = None
        self._opened = False
        self._watched: dict[str, dict[str, tuple[Any, int]]] = {}
        """Stage run -> UUID -> handle, and bytes in use when it started."""
        self._peaks: dict[str, int] = {}
        self._next = 0.0

    def begin(self, run_id: str, gpus: Sequence[str]) -> None:
        if not gpus:
            return
        if not self._opened:
            self._opened, self._ask = True, self._stack.enter_context(nvml())
        if self._ask is None or self._ask.error is not None:
            return
        handles = {uuid: self._ask("nvmlDeviceGetHandleByUUID", uuid.encode()) for uuid in gpus}
        used = {uuid: (handle, self._used(handle)) for uuid, handle in handles.items() if handle is not None}
        self._watched[run_id] = {
            uuid: (handle, before) for uuid, (handle, before) in used.items() if before is not None
        }
        self._next = 0.0

    def look(self) -> None:
        """Sample the GPUs of all watched stage runs, unless this was just done."""
        now = time.monotonic()
        if not self._watched or now < self._next:
            return
        for run_id, devices in self._watched.items():
            for handle, before in devices.values():
                used = self._used(handle)
                if used is not None:
                    self._peaks[run_id] = max(self._peaks.get(run_id, 0), used - before)
        self._next = now + max(_LOOK_EVERY_S, _LOOK_SHARE * (time.monotonic() - now))

    def end(self, run_id: str) -> int | None:
        """Stop watching a stage run. Returns its peak in bytes on the fullest GPU, or None without a sample."""
        self._watched.pop(run_id, None)
        return self._peaks.pop(run_id, None)

    def close(self) -> None:
        self._stack.close()

    def _used(self, handle: object) -> int | None:
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle) if self._ask is not None else None
        return int(memory.used) if memory else None


def _by_nvml(ask: Nvml) -> Graphics:
    devices: list[Device] = []
    problems: list[str] = []
    for index in range(ask("nvmlDeviceGetCount") or 0):
        handle = ask("nvmlDeviceGetHandleByIndex", index)
        uuid = handle and ask("nvmlDeviceGetUUID", handle)
        capability = handle and ask("nvmlDeviceGetCudaComputeCapability", handle)
        if not uuid or not capability:
            problems.append(f"GPU {index} does not respond; run nvidia-smi to see why")
            continue
        sm = 10 * capability[0] + capability[1]
        mode = ask("nvmlDeviceGetMigMode", handle)
        if not mode or not mode[0]:
            devices.append(_device(ask, handle, handle, index, uuid, sm))
            continue
        numbers = range(ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0)
        slices = list(filter(None, (ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, number) for number in numbers)))
        if not slices:
            problems.append(f"GPU {index} is in MIG mode without a compute instance, so nothing can run on it")
        devices += [_device(ask, each, handle, index, uuid, sm) for each in slices if ask("nvmlDeviceGetUUID", each)]
    version = ask("nvmlSystemGetCudaDriverVersion_v2") or ask("nvmlSystemGetCudaDriverVersion")
    return Graphics(
        devices=tuple(devices),
        driver=ask("nvmlSystemGetDriverVersion"),
        cuda=f"{version // 1000}.{version % 1000 // 10}" if version else None,
        source="NVML",
        problems=tuple(problems),
    )


def _device(ask: Nvml, handle: object, physical: object, index: int, parent: str, sm: int) -> Device:
    """A GPU, or a slice of the one with handle `physical` and UUID `parent`."""
    mig = handle is not physical
    memory = ask("nvmlDeviceGetMemoryInfo", handle)
    running = ask("nvmlDeviceGetComputeRunningProcesses", handle)
    gpu = Gpu(
        index=index,
        uuid=ask("nvmlDeviceGetUUID", handle) if mig else parent,
        name=ask("nvmlDeviceGetName", handle) or "unknown",
        # GPUs that share the host's memory (GB10, Jetson) have no memory of their own to report.
        memory_bytes=memory.total if memory else physical_bytes(),
        sm=sm,
        mig=mig,
    )
    busy = None if running is None else len(running)
    return Device(gpu, parent, memory.free if memory else None, busy, _bus(ask, physical))


def _bus(ask: Nvml, physical: object) -> str | None:
    """NVML writes the domain with eight digits, sysfs with four."""
    pci = ask("nvmlDeviceGetPciInfo", physical)
    if not pci:
        return None
    address = pci.busId.decode() if isinstance(pci.busId, bytes) else str(pci.busId)
    domain, _, place = address.lower().partition(":")
    return f"{int(domain, 16):04x}:{place}"


def _by_nvidia_smi() -> Graphics:
    import subprocess

    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_SMI_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        return Graphics(
            problems=(
                "an NVIDIA driver is installed, but neither nvidia-ml-py nor nvidia-smi is available to query it",
            )
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Graphics(problems=(f"nvidia-smi does not respond: {error}",))
    if done.returncode != 0:
        output = (done.stdout + done.stderr).strip().splitlines()
        return Graphics(problems=(f"nvidia-smi failed: {output[-1] if output else f'exit code {done.returncode}'}",))
    return _parse_smi(done.stdout)


def _parse_smi(text: str) -> Graphics:
    devices: list[Device] = []
    problems: list[str] = []
    driver = None
    for line in filter(None, map(str.strip, text.splitlines())):
        try:
            index, uuid, name, total, free, capability, mig, driver = map(str.strip, line.split(","))
            major, minor = capability.split(".")
            sm = 10 * int(major) + int(minor)
            if mig == "Enabled":
                problems.append(f"GPU {index} is in MIG mode; install nvidia-ml-py to see its slices")
                continue
            gpu = Gpu(int(index), uuid, name, _mebibytes(total) or physical_bytes(), sm)
        except ValueError:
            problems.append(f"cannot parse this line of nvidia-smi: {line}")
            continue
        devices.append(Device(gpu, uuid, _mebibytes(free)))
    return Graphics(devices=tuple(devices), driver=driver, source="nvidia-smi", problems=tuple(problems))


def _mebibytes(text: str) -> int | None:
    return int(text) * 2**20 if text.isdecimal() else None
