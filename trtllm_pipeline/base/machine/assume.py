"""`--assume`: a `Machine` from one line of text, to plan for another machine, and the line for a machine.

tensorrt_llm==0.12.0,8xH100
tensorrt_llm==0.12.0,sm=90,gpus=8,gpu_memory_gib=80
"""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from trtllm_pipeline.base.errors import UsageError
from trtllm_pipeline.base.machine import gpu_types
from trtllm_pipeline.base.machine.model import Gpu, Machine, TensorRTLLM, TritonServer

if TYPE_CHECKING:
    from packaging.version import Version

EXAMPLE: Final = "--assume 8xH100,tensorrt_llm==1.2"
_SEVERAL: Final = "--assume '2xH100,tensorrt_llm==1.2.0; 2xL40S,tensorrt_llm==1.2.0'"
_BETWEEN_TYPES: Final = ";"
ASSUMED: Final = "assumed"
"""Placeholder for a version or name that was not given. It equals no real one, so results are never mixed up."""
LAST_WITH_ENGINES: Final = "1.3.0rc20"
"""The last release with `trtllm-build`, by its documentation. Later ones are assumed to lack it, unless `build=yes` is given."""
_FIRST_WITH_SERVE: Final = "0.15"
_FIRST_WITH_BENCH: Final = "0.12"
_FIRST_WITH_MODEL_OPTIMIZER: Final = "0.10"
"""TensorRT-LLM's package has depended on it since then."""
_LEAST_BYTES: Final = 2**30 // 10
"""The smallest memory size that a line can express: Docker gives a container 64 MiB of /dev/shm."""
_CPUS_PER_GPU: Final = 8
_EXAMPLES: Final = "/app/examples"
_TEMPLATES: Final = "/app/all_models"
"""Both are paths in NGC's Triton image with TensorRT-LLM."""
_OF_GPUS: Final = ("sm", "gpu_memory_gib", "gpu")
_OF_TENSORRT_LLM: Final = ("build", "serve", "bench", "examples", "templates")
KEYS: Final = (
    "tensorrt_llm",
    "gpus",
    *_OF_GPUS,
    *_OF_TENSORRT_LLM,
    "triton",
    "model_optimizer",
    "transformers",
    "cpus",
    "memory_gib",
    "shm_gib",
)
HERE: Final = "here"
"""Refers to this machine."""
_FOLLOW: Final = {
    "tensorrt_llm": ("build", "serve", "bench", "examples", "triton", "model_optimizer", "transformers"),
    "sm": ("gpu", "gpu_memory_gib"),
    "gpus": _OF_GPUS,
}
"""Key -> keys that no longer describe this machine once it is changed."""
_VERSIONS: Final = ("tensorrt_llm", "triton", "model_optimizer", "transformers")
"""Keys that also accept `==`."""


def parse(text: str) -> Machine:
    """The machine that a line describes, or several that differ in their GPUs. Raises UsageError with all faults of the
    line.

    Missing values get the usual value for the release and the compute capability. Memory is rounded to a tenth of a
    GiB. Without `memory_gib` and `shm_gib`, the host's memory and /dev/shm are unknown, and not checked. A line that
    starts with `here` describes this machine, with the other values of the line in place of its own.
    """
    machines = [_parse(each) for each in text.strip(f"{_BETWEEN_TYPES} ").split(_BETWEEN_TYPES)]
    if len(machines) == 1:
        return machines[0]
    types = [gpu_types.short(machine.gpus[0].name).lower() if machine.gpus else "" for machine in machines]
    if "" in types or len(set(types)) < len(types):
        raise UsageError(f"--assume {text}: expected machines with GPUs of different names", hint=_SEVERAL)
    return replace(machines[0], types=tuple(zip(types, machines, strict=True)))


def _parse(text: str) -> Machine:
    first, _, others = text.partition(",")
    read = _AssumedValues(_here(others) if first.strip() == HERE else text)
    gpus = _gpus(read)
    tensorrt_llm = _tensorrt_llm(read)
    machine = Machine(
        cpus=read.whole("cpus", 1, 65536, _CPUS_PER_GPU * max(1, len(gpus))),
        cpu=ASSUMED,
        gpus=gpus,
        tensorrt_llm=tensorrt_llm,
        model_optimizer=read.name(
            "model_optimizer",
            usually=tensorrt_llm is not None
            and _version(tensorrt_llm.release) >= _version(_FIRST_WITH_MODEL_OPTIMIZER),
        ),
        torch=ASSUMED if tensorrt_llm else None,  # the package depends on it
        triton=_triton(read, tensorrt_llm),
        mpirun="mpirun",
        memory_bytes=read.gibibytes("memory_gib"),
        shared_bytes=read.gibibytes("shm_gib"),
        assumed=True,
    )
    if read.faults:
        faults = "".join(f"\n  {fault}" for fault in read.faults)
        raise UsageError(f"--assume {text}: cannot describe a machine with it{faults}", hint=EXAMPLE)
    return machine


def describe(machine: Machine) -> str:
    """The canonical and complete line for a machine: `parse(describe(m)) == m` for every `m` from `parse`.

    For a detected machine, all GPUs in the line are like the weakest one.
    """
    if machine.types:
        return _BETWEEN_TYPES.join(describe(each) for _, each in machine.types)
    parts: dict[str, object] = {}
    installed = machine.tensorrt_llm
    if installed:
        parts["tensorrt_llm="] = installed.release
    parts["gpus"] = len(machine.gpus)
    if machine.gpus:
        weakest = min(machine.gpus, key=lambda gpu: (gpu.sm, gpu.memory_bytes))
        parts["sm"] = weakest.sm
        parts["gpu_memory_gib"] = _tenths(weakest.memory_bytes)
        parts["gpu"] = weakest.name.replace(",", " ")
    if installed:
        parts |= {part: "yes" if getattr(installed, part) else "no" for part in _OF_TENSORRT_LLM}
    parts["triton"] = (machine.triton.version or ASSUMED) if machine.triton else "no"
    parts["model_optimizer"] = machine.model_optimizer or "no"
    if installed and installed.transformers is not None:
        parts["transformers"] = installed.transformers
    parts["cpus"] = machine.cpus
    for key, size_bytes in (("memory_gib", machine.memory_bytes), ("shm_gib", machine.shared_bytes)):
        if size_bytes is not None:
            parts[key] = _tenths(max(size_bytes, _LEAST_BYTES))
    return ",".join(f"{key}={value}" for key, value in parts.items())


def _tenths(size_bytes: int) -> str:
    """GiB, rounded to a tenth."""
    return f"{round(size_bytes * 10 / 2**30) / 10:.8g}"


class _AssumedValues:
    """The values of a line by key. Faults are collected in `faults`, and a harmless value is returned instead."""

    def __init__(self, text: str) -> None:
        self.faults: list[str] = []
        self.values: dict[str, str] = {}
        self.gpu: gpu_types.GpuType | None = None
        """The type of GPU in a part such as `2xH100`."""
        for part in map(str.strip, text.split(",")):
            if self._is_gpu(part):
                continue
            key, equals, value = map(str.strip, part.partition("="))
            key = key.lower().replace("-", "_")
            if key in _VERSIONS:
                value = value.removeprefix("=").strip()
            if not equals or not value:
                near = None if equals else gpu_types.near(part)
                self.gpu = self.gpu or gpu_types.GPU_TYPES.get(near or "")
                hint = "" if equals else gpu_types.instead(part)
                self.faults.append(f"{part!r}: expected KEY=VALUE, or GPUs such as 2xH100{hint}")
            elif key not in KEYS:
                nearest = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.5)
                did = f"did you mean {nearest[0]!r}?" if nearest else f"the keys are {', '.join(KEYS)}"
                self.faults.append(f"{part}: unknown key {key!r}; {did}")
            elif key in self.values:
                self.faults.append(f"{part}: {key} is given twice")
            else:
                self.values[key] = value

    def _is_gpu(self, part: str) -> bool:
        """True if `part` names GPUs. They are then recorded."""
        count, kind = gpu_types.counted(part)
        if kind is None:
            return False
        if self.gpu is not None:
            self.faults.append(f"{part}: GPUs are given twice; separate machines with {_BETWEEN_TYPES}")
        elif count is not None and "gpus" in self.values:
            self.faults.append(f"{part}: gpus is given twice")
        self.gpu = kind
        if count is not None:
            self.values.setdefault("gpus", count)
        return True

    def fault(self, key: str, expected: str) -> None:
        self.faults.append(f"{key}={self.values[key]}: {expected}")

    def refuse(self, keys: tuple[str, ...], why: str) -> None:
        for key in keys:
            if key in self.values:
                self.fault(key, why)

    def whole(self, key: str, least: int, most: int, usual: int) -> int:
        value = self.values.get(key)
        if value is None:
            return usual
        if value.isascii() and value.isdecimal() and least <= int(value) <= most:
            return int(value)
        self.fault(key, f"expected a whole number from {least} to {most}")
        return usual

    def gibibytes(self, key: str) -> int | None:
        """Bytes, rounded to a tenth of a GiB. None if the key is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        try:
            gib = float(value)
        except ValueError:
            gib = 0.0
        if not 0.1 <= gib <= 2**20:
            self.fault(key, "expected a number of GiB, such as 80")
            gib = 1.0
        return round(gib * 10) * 2**30 // 10

    def yes(self, key: str, *, usually: bool) -> bool:
        value = self.values.get(key)
        if value not in {None, "yes", "no"}:
            self.fault(key, "expected yes or no")
        return usually if value is None else value == "yes"

    def name(self, key: str, *, usually: bool) -> str | None:
        """A version or name; None for "no"."""
        value = self.values.get(key, "yes" if usually else "no")
        return None if value == "no" else ASSUMED if value == "yes" else value


def _here(changes: str) -> str:
    """The line for this machine, with changes. Values that depend on a changed one get their usual values."""
    from trtllm_pipeline.base.machine.probe import this_machine

    own = dict(part.split("=", 1) for part in describe(this_machine()).split(","))
    given = {
        part.partition("=")[0].strip().lower().replace("-", "_") if gpu_types.counted(part)[1] is None else "gpus"
        for part in changes.split(",")
    }
    follow = {key for changed in given for key in _FOLLOW.get(changed, ())}
    kept = [f"{key}={value}" for key, value in own.items() if key not in {*given, *follow}]
    return ",".join([*kept, *([changes] if changes.strip() else [])])


def _gpus(read: _AssumedValues) -> tuple[Gpu, ...]:
    count = read.whole("gpus", 0, 4096, 1)
    if count == 0:
        read.refuse(_OF_GPUS, "gpus=0 leaves no GPU for it to describe")
        if read.gpu is not None:
            read.faults.append(f"gpus=0: there is {read.gpu.name} too")
        return ()
    if "sm" not in read.values and read.gpu is None:
        read.faults.append("sm is missing; add a GPU (H100), the compute capability (sm=90 means 9.0), or gpus=0")
    sm = read.whole("sm", 50, 199, read.gpu.sm if read.gpu else 90)
    memory = _gpu_memory(read, sm)
    name = read.values.get("gpu", read.gpu.name if read.gpu else f"sm{sm}")
    if name.isdecimal():
        read.fault("gpu", "expected a name; the number of GPUs is set with gpus")
    return tuple(Gpu(index, f"GPU-assumed-{index}", name, memory, sm) for index in range(count))


def _gpu_memory(read: _AssumedValues, sm: int) -> int:
    given = read.gibibytes("gpu_memory_gib")
    if given is not None:
        return given
    kind = read.gpu or gpu_types.usual(sm)
    if kind is None:
        read.faults.append(f"gpu_memory_gib is missing, and there is no default for sm={sm}")
    return round((kind.memory_gib if kind else 1.0) * 10) * 2**30 // 10


def _tensorrt_llm(read: _AssumedValues) -> TensorRTLLM | None:
    value = read.values.get("tensorrt_llm")
    if value is None:
        read.refuse((*_OF_TENSORRT_LLM, "transformers"), "requires tensorrt_llm==RELEASE")
        return None
    from packaging.version import InvalidVersion

    try:
        release = _version(value)
    except InvalidVersion:
        read.fault("tensorrt_llm", "expected a release, such as 0.12.0 or 1.3.0rc3")
        release = _version(LAST_WITH_ENGINES)
    # The relevant example scripts were removed together with the engines.
    engines = release <= _version(LAST_WITH_ENGINES)
    return TensorRTLLM(
        release=_written(release),
        build="trtllm-build" if read.yes("build", usually=engines) else None,
        serve="trtllm-serve" if read.yes("serve", usually=release >= _version(_FIRST_WITH_SERVE)) else None,
        bench="trtllm-bench" if read.yes("bench", usually=release >= _version(_FIRST_WITH_BENCH)) else None,
        examples=_EXAMPLES if read.yes("examples", usually=engines) else None,
        templates=_TEMPLATES if read.yes("templates", usually=True) else None,
        transformers=_transformers(read),
    )


def _written(release: Version) -> str:
    """A release as in the package's metadata: 1.2 is 1.2.0."""
    from packaging.version import Version

    text, base = str(release), release.base_version
    return str(Version(text.replace(base, f"{base}.0", 1))) if len(release.release) == 2 else text


def _transformers(read: _AssumedValues) -> str | None:
    """A version. Default: the one that the release pins, if known."""
    from packaging.version import InvalidVersion

    value = read.values.get("transformers")
    try:
        return None if value is None else str(_version(value))
    except InvalidVersion:
        read.fault("transformers", "expected a version, such as 4.41.0")
        return None


def _triton(read: _AssumedValues, tensorrt_llm: TensorRTLLM | None) -> TritonServer | None:
    version = read.name("triton", usually=tensorrt_llm is not None)
    if version is None:
        return None
    engines = tensorrt_llm is not None and tensorrt_llm.build is not None
    return TritonServer("tritonserver", version, ("python", "tensorrtllm") if engines else ("python",))


def _version(release: str) -> Version:
    """The version without its local part (`+cu128`), which identifies the build of a release. Raises InvalidVersion."""
    from packaging.version import Version

    return Version(Version(release).public)
