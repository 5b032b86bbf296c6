"""The parts of a machine that plans depend on: CPUs, GPUs, and the software that builds and serves models.

`probe.py` detects the `Machine`. `--assume` describes one, to plan for another machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base.machine import gpu_types

_QUOTA_FILE: Final = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU, or one MIG slice of one."""

    index: int
    uuid: str
    """Its name in CUDA_VISIBLE_DEVICES. Does not depend on the order of devices."""
    name: str
    memory_bytes: int
    sm: int
    """Compute capability as one number: 90 is 9.0."""
    mig: bool = False


@dataclass(frozen=True, slots=True)
class TensorRTLLM:
    """An installed TensorRT-LLM: its release, and the paths of its parts."""

    release: str
    """Release in its package metadata, such as 0.12.0 or 1.3.0rc3."""
    build: str | None = None
    """Path of `trtllm-build`. Its presence, not the release, determines whether engines can be built."""
    serve: str | None = None
    """Path of `trtllm-serve`."""
    examples: str | None = None
    """Directory `examples` in the source tree of this release. Wheels lack it."""
    templates: str | None = None
    """Directory `all_models` with this release's Triton model templates."""
    python: str = "python3"
    """Interpreter with the package installed. Example scripts run in it."""
    transformers: str | None = None
    """Version of transformers in that interpreter. None if unknown."""
    bench: str | None = None
    """Path of `trtllm-bench`."""


@dataclass(frozen=True, slots=True)
class TritonServer:
    """An installed Triton Inference Server, as far as plans need it. Its files are a `TritonInstallation`."""

    path: str
    version: str | None
    backends: tuple[str, ...]
    openai: str | None = None
    """Path of `main.py` of its OpenAI frontend, if present."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Everything that a plan may know about its machine."""

    cpus: int
    cpu: str
    gpus: tuple[Gpu, ...] = ()
    """The GPUs that this process may use. Respects CUDA_VISIBLE_DEVICES."""
    driver: str | None = None
    cuda: str | None = None
    """Newest CUDA that the driver supports, such as 13.0."""
    tensorrt_llm: TensorRTLLM | None = None
    model_optimizer: str | None = None
    """Version of NVIDIA Model Optimizer."""
    model_optimizer_python: str | None = None
    """Interpreter of a separate environment that has it. None for TensorRT-LLM's."""
    torch: str | None = None
    triton: TritonServer | None = None
    mpirun: str | None = None
    memory_bytes: int | None = None
    """Host memory that programs may use. None if unknown."""
    shared_bytes: int | None = None
    """Size of /dev/shm. None if unknown."""
    assumed: bool = False
    """Described by `--assume`, not detected. For plans only."""
    types: tuple[tuple[str, Machine], ...] = ()
    """(cluster with several GPU types) The type in lower case, and a machine with it. The first is this machine."""

    @property
    def sm(self) -> int | None:
        """Compute capability of the weakest GPU; None without GPUs."""
        return min((gpu.sm for gpu in self.gpus), default=None)

    def of(self, gpu: str | None) -> Machine:
        """The machine with only GPUs of one type. With None, or if there is only one type, this machine."""
        return self if not (gpu and self.types) else dict(self.types).get(gpu.lower(), self)

    def lacks(self, gpu: str) -> str | None:
        """Why nothing can run on a type of GPU here, which may be part of its name (H100). None if it can."""
        names = {name for name, _ in self.types} or {each.name for each in self.gpus}
        known = gpu_types.counted(gpu)[1]
        right = {
            name
            for name in names
            if (name == gpu.lower() if self.types else _words(gpu) <= _words(name) or (known and known.name == name))
        }
        if right and (self.types or right == names):
            return None
        hint = "; CUDA_VISIBLE_DEVICES can leave those of one type" if right else ""
        return f"it is for GPUs of type {gpu}; there are {', '.join(sorted(names)) or 'none'}{hint}"


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))


def from_json(data: Mapping[str, Any]) -> Machine:
    """The machine that `dataclasses.asdict` converted to `data`. Raises TypeError, KeyError, ValueError for others."""
    parts: dict[str, Any] = {"gpus": tuple(Gpu(**gpu) for gpu in data["gpus"])}
    parts["types"] = tuple((name, from_json(each)) for name, each in data["types"])
    if (tensorrt_llm := data["tensorrt_llm"]) is not None:
        parts["tensorrt_llm"] = TensorRTLLM(**tensorrt_llm)
    if (triton := data["triton"]) is not None:
        parts["triton"] = TritonServer(**{**triton, "backends": tuple(triton["backends"])})
    return Machine(**{**data, **parts})


def cpu_count() -> int:
    """CPUs this process may keep busy: those of its affinity mask, or fewer if its cgroup has a quota."""
    return limited_by_quota(len(os.sched_getaffinity(0)))


def limited_by_quota(cpus: int) -> int:
    """`cpus`, or as many whole CPUs (at least one) as the cgroup's quota allows (`docker run --cpus`); cgroup v2 only."""
    try:
        quota, period = _QUOTA_FILE.read_text(encoding="ascii").split()
        return cpus if quota == "max" else min(cpus, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        return cpus


@lru_cache(maxsize=1)
def cpu_name() -> str:
    """The processor's name as Linux reports it, or else the architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return os.uname().machine
