"""Findings of `pipeline doctor`: checks of this machine, and the toolchains it can use.

A check covers one thing and suggests a fix for a problem. Checks never raise and need only the standard library, because
people run them when something is missing.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import Json, Machine, TensorRTLLM, assume, distribution_of, gpus, memory, probe, version_of
from trtllm_pipeline.measure import lm_eval
from trtllm_pipeline.tensorrt import catalog as toolchains
from trtllm_pipeline.tensorrt import releases

_GIB: Final = 2**30
_LEAST_DISK: Final = 50 * _GIB
"""16-bit weights of a 7B model take 15 GB and are stored three times: model, checkpoint, engine."""
_SHM: Final = memory.SHARED
_LEAST_SHM: Final = 1 * _GIB
"""Triton's Python backend passes tensors through it; Docker provides 64 MiB by default."""
_LEAST_OPEN_FILES: Final = 1024
_BUSY: Final = 0.05
"""Maximum share of GPU memory used by the driver. A GPU with more counts as in use."""
_SOURCE_INSTALL: Final = "python3 -m pip install -e ."


class CheckStatus(str, Enum):
    """Result of a check."""

    OK = "ok"
    WARNING = "warning"
    """Present, but with a problem."""
    MISSING = "missing"
    """Missing or unusable. Whether it is needed depends on the toolchain."""


@dataclass(frozen=True, slots=True)
class MachineCheck:
    """The result of one check."""

    id: str
    """Stable: `GROUP.NAME`."""
    status: CheckStatus
    value: Json
    """Machine-readable value: a version, a path, a number of bytes, or None."""
    detail: str
    hint: str | None = None

    @property
    def group(self) -> str:
        return self.id.partition(".")[0]

    @property
    def needed_by(self) -> tuple[str, ...]:
        """Names of the toolchains that need it. Empty if only some models need it."""
        return _NEEDED_BY.get(self.id, _NEEDED_BY.get(self.group, toolchains.names()))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Usability of one toolchain."""

    name: str
    summary: str
    missing: str | None
    """Missing requirement, or None if the toolchain can be used."""
    hint: str | None


_GPU_TOOLCHAINS: Final = ("tensorrt_llm", "tensorrt_llm_pytorch")
_NEEDED_BY: Final[Mapping[str, tuple[str, ...]]] = {
    "gpu": _GPU_TOOLCHAINS,
    "tensorrt_llm": _GPU_TOOLCHAINS,
    "tensorrt_llm.build": _GPU_TOOLCHAINS[:1],
    "quantize": _GPU_TOOLCHAINS,
    "accuracy": (),
    "hub": (),
}
"""Group or id of a check -> the toolchains that need it, if not all do."""
NEXT: Final[Mapping[str, str]] = {
    "embedded": "python3 -m pip install 'trtllm-pipeline[embedded]', under Python 3.10 to 3.12",
    "tensorrt_llm": "run in an NGC image that has TensorRT-LLM up to 1.2, or install that from NVIDIA's package index",
    "tensorrt_llm_pytorch": "run in an NGC image that has TensorRT-LLM 1.0 or later, or install that from NVIDIA's "
    "package index",
}


def examine(survey: probe.Survey, workspace: Path) -> tuple[MachineCheck, ...]:
    """All checks of this machine, by group. The only program it runs is `mpirun --version`."""
    return (
        *_host(survey.machine),
        *_gpu(survey.graphics),
        *_tensorrt_llm(survey.machine, survey.problems),
        *_triton(survey.machine),
        *_quantize(survey.machine),
        _lm_eval(),
        *_space(workspace),
        *_limits(survey.machine),
        *_hubs(),
    )


def examine_assumed(machine: Machine) -> tuple[MachineCheck, ...]:
    devices = tuple(gpus.Device(gpu, gpu.uuid) for gpu in machine.gpus)
    return (
        *_gpu(gpus.Graphics(devices, devices, source="--assume")),
        *_tensorrt_llm(machine, {}),
        *_triton(machine),
        _model_optimizer(machine),
    )


def judge(machine: Machine) -> tuple[Verdict, ...]:
    verdicts = []
    for name in toolchains.names():
        try:
            toolchain = toolchains.load(name)
            summary, missing = toolchain.summary, toolchain.missing(machine)
        except ImportError as error:
            summary, missing = "", f"cannot be loaded: {error}"
        verdicts.append(Verdict(name, summary, missing, NEXT.get(name) if missing else None))
    return tuple(verdicts)


_LOOKS: Final = {
    (CheckStatus.OK, False): ("✓", "+", "green"),
    (CheckStatus.WARNING, False): ("!", "!", "yellow"),
    (CheckStatus.MISSING, False): ("✗", "X", "red"),
    (CheckStatus.MISSING, True): ("·", "-", "dim"),
}
"""Status and whether no toolchain needs the missing thing -> symbol, ASCII symbol, style."""
TITLES: Final = {
    "host": "this host",
    "gpu": "GPUs",
    "tensorrt_llm": "TensorRT-LLM",
    "triton": "Triton Inference Server",
    "quantize": "quantization",
    "accuracy": "standard tasks",
    "space": "disk and shared memory",
    "limits": "limits",
    "hub": "model hubs",
}
_HINT_INDENT: Final = " " * 13 + "do: "


@dataclass(frozen=True, slots=True)
class MarkedLine:
    """A line of text. `status` adds a mark before it. `gray` means that no toolchain needs the missing thing."""

    text: str
    status: CheckStatus | None = None
    gray: bool = False

    def mark(self, *, ascii_only: bool) -> tuple[str, str]:
        if self.status is None:
            return "", ""
        symbol, plain, style = _LOOKS[self.status, self.gray]
        return f"  {plain if ascii_only else symbol} {self.status.value:<8} ", style


@dataclass(frozen=True, slots=True)
class Examination:
    """All findings of `pipeline doctor`."""

    machine: Machine
    checks: tuple[MachineCheck, ...]
    verdicts: tuple[Verdict, ...]
    toolchain: str | None = None

    @property
    def assume(self) -> str:
        return assume.describe(self.machine)

    @property
    def exit_code(self) -> int:
        """0, or 3 if no toolchain, or not the requested one, can be used."""
        wanted = [verdict for verdict in self.verdicts if self.toolchain in {None, verdict.name}]
        return 0 if any(verdict.missing is None for verdict in wanted) else 3

    def lines(self) -> Iterator[MarkedLine]:
        usable = [verdict for verdict in self.verdicts if verdict.missing is None]
        wanted = [each for each in self.verdicts if each.name == self.toolchain] or usable[:1] or self.verdicts
        names = {each.name for each in wanted}
        wrong = [
            each for each in self.checks if each.status is not CheckStatus.OK and names.intersection(each.needed_by)
        ]
        if wanted[0].missing is None:
            look = f"; see {', '.join(each.id for each in wrong)} below" if wrong else ""
            yield MarkedLine(f"ready: pipeline run uses the toolchain {wanted[0].name}{look}")
        elif self.toolchain is not None:
            yield MarkedLine(f"not ready: the toolchain {self.toolchain} cannot be used on this machine")
        else:
            yield MarkedLine("not ready: no toolchain can be used on this machine")
        yield from (MarkedLine(""), MarkedLine("toolchains"))
        width = max(len(verdict.name) for verdict in self.verdicts)
        for verdict in self.verdicts:
            status = CheckStatus.MISSING if verdict.missing else CheckStatus.OK
            gray = verdict.missing is not None and verdict.name not in names
            yield from _with_hint(
                f"{verdict.name:<{width}}  {verdict.missing or verdict.summary}", verdict.hint, status, gray
            )
        width = max(len(check.id.partition(".")[2]) for check in self.checks)
        for group, checks in groupby(self.checks, lambda check: check.group):
            yield from (MarkedLine(""), MarkedLine(TITLES[group]))
            for check in checks:
                name = check.id.partition(".")[2].replace("_", " ")
                gray = check.status is CheckStatus.MISSING and not names.intersection(check.needed_by)
                yield from _with_hint(f"{name:<{width}}  {check.detail}", check.hint, check.status, gray)
        yield from (
            MarkedLine(""),
            MarkedLine("to plan for this machine elsewhere:"),
            MarkedLine(f"  --assume '{self.assume}'"),
        )

    def text(self, encoding: str | None) -> str:
        """The findings as plain text, in ASCII if `encoding` is not a Unicode encoding."""
        ascii_only = "utf" not in (encoding or "").lower()
        return "\n".join(f"{line.mark(ascii_only=ascii_only)[0]}{line.text}" for line in self.lines())

    def to_json(self) -> dict[str, Json]:
        """The JSON form, see docs/reference/machines.md."""
        about = {"sm": self.machine.sm, "identity": dict(probe.identity(self.machine)), "assume": self.assume}
        return {
            "schema": 1,
            "checks": [
                {**asdict(each), "status": each.status.value, "group": each.group, "needed_by": list(each.needed_by)}
                for each in self.checks
            ],
            "machine": {**asdict(self.machine), **about},
            "toolchains": [{**asdict(each), "usable": each.missing is None} for each in self.verdicts],
        }


def _with_hint(text: str, hint: str | None, status: CheckStatus, gray: bool) -> Iterator[MarkedLine]:
    yield MarkedLine(text, status, gray)
    if hint and not gray:
        yield MarkedLine(f"{_HINT_INDENT}{hint}")


def run(workspace: Path, *, assumed: str | None = None, toolchain: str | None = None) -> Examination:
    """Examine this machine, or an assumed machine in the syntax of `--assume`. Raises UsageError."""
    if assumed is not None:
        machine = assume.parse(assumed)
        checks = examine_assumed(machine)
    else:
        survey = probe.survey()
        machine, checks = survey.machine, examine(survey, workspace)
    if toolchain is not None:
        toolchains.load(toolchain)
    return Examination(machine, checks, judge(machine), toolchain)


def _check(
    check_id: str, value: Json, detail: str, hint: str | None = None, status: CheckStatus = CheckStatus.WARNING
) -> MachineCheck:
    """A check result. Without a hint, the status is OK."""
    return MachineCheck(check_id, status if hint else CheckStatus.OK, value, detail, hint)


def _missing(check_id: str, detail: str, hint: str, value: Json = None) -> MachineCheck:
    return MachineCheck(check_id, CheckStatus.MISSING, value, detail, hint)


def _host(machine: Machine) -> Iterator[MachineCheck]:
    total = os.cpu_count() or machine.cpus
    share = f"{machine.cpus} of {total} CPUs, limited by affinity or quota" if machine.cpus < total else f"{total} CPUs"
    yield _check("host.cpus", machine.cpus, f"{share}: {machine.cpu}")
    physical, allowed = memory.physical_bytes(), memory.host_bytes()
    why = f" of {_size(physical)}, limited by cgroup" if allowed < physical else ""
    yield _check("host.memory", allowed, f"{_size(allowed)}{why}")
    python = ".".join(map(str, sys.version_info[:3]))
    yield _check("host.python", python, f"{python}: {sys.executable}")
    yield _packages()


def _packages() -> MachineCheck:
    """Check the project's own dependencies, from its metadata."""
    distribution = distribution_of("trtllm-pipeline")
    if distribution is None:
        detail, hint = (
            "the project runs from a directory and is not installed",
            f"install it with its dependencies: {_SOURCE_INSTALL}",
        )
        return _check("host.packages", None, detail, hint)
    needed = [text for text in distribution.requires or () if "extra ==" not in text]
    names = [match[0] for match in (re.match(r"[\w.-]+", text) for text in needed) if match]
    absent = [name for name in names if distribution_of(name) is None]
    if absent:
        hint = f"python3 -m pip install {' '.join(absent)}"
        return _missing("host.packages", f"not installed: {', '.join(absent)}", hint, [*absent])
    return _check("host.packages", [], f"all {len(names)} required packages")


def _gpu(graphics: gpus.Graphics) -> Iterator[MachineCheck]:
    for problem in graphics.problems:
        yield _check("gpu.problem", problem, problem, "run nvidia-smi for details")
    if graphics.driver:
        cuda = f", for CUDA up to {graphics.cuda}" if graphics.cuda else ""
        yield _check("gpu.driver", graphics.driver, f"{graphics.driver}{cuda}, reported by {graphics.source}")
    if not graphics.everything:
        hint = "TensorRT-LLM needs one (in a container: docker run --gpus all), the embedded toolchain does not"
        yield _missing("gpu.devices", "no NVIDIA GPU is visible", hint, 0)
        return
    used, total = len(graphics.devices), len(graphics.everything)
    yield _check(
        "gpu.devices",
        used,
        f"{used}" if used == total else f"{used} of {total}, by {gpus.MASK_VARIABLE}",
        None if used else f"unset {gpus.MASK_VARIABLE}, or name a device that nvidia-smi -L lists",
        CheckStatus.MISSING,
    )
    for number, device in enumerate(graphics.devices):
        yield _device(number, device)
    names: list[Json] = [name for _, name in sorted({(device.gpu.sm, device.gpu.name) for device in graphics.devices})]
    if len(names) > 1:
        yield _check(
            "gpu.mixed",
            names,
            f"different GPUs: {', '.join(map(str, names))}; plans assume the weakest",
            f"{gpus.MASK_VARIABLE} with UUIDs leaves those of one kind (by index, CUDA counts the fastest first unless "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID)",
        )


def _device(number: int, device: gpus.Device) -> MachineCheck:
    gpu = device.gpu
    text = f"{gpu.name}, {_size(gpu.memory_bytes)}, compute capability {gpu.sm // 10}.{gpu.sm % 10}, {gpu.uuid}"
    taken = 0 if device.free_bytes is None else gpu.memory_bytes - device.free_bytes
    if not device.processes and taken <= _BUSY * gpu.memory_bytes:
        return _check(f"gpu.{number}", gpu.uuid, text)
    whose = f" by {device.processes} processes" if device.processes else ""
    return _check(
        f"gpu.{number}",
        gpu.uuid,
        f"{text}; in use{whose}, {_size(taken)} taken",
        f"other processes distort measurements: nvidia-smi lists them; {gpus.MASK_VARIABLE} can exclude this GPU",
    )


def _tensorrt_llm(machine: Machine, problems: Mapping[str, str]) -> Iterator[MachineCheck]:
    installation = machine.tensorrt_llm
    if installation is None:
        yield _missing(
            "tensorrt_llm.release",
            problems.get("release", "TensorRT-LLM is not installed"),
            "run in one of NVIDIA's images, or install the wheel from NVIDIA's package index (PyPI has only a stub)",
        )
    else:
        yield _check(
            "tensorrt_llm.release", installation.release, f"{installation.release}, under {installation.python}"
        )
        yield from _transformers(installation)
        yield _or_missing(
            "tensorrt_llm.build",
            installation.build,
            "no trtllm-build: only the PyTorch backend is available",
            "releases up to 1.2 include it; later releases load models directly and need no engine",
        )
        yield _or_missing(
            "tensorrt_llm.serve",
            installation.serve,
            "no trtllm-serve",
            "releases since 0.15 include it; Triton works without it",
        )
        for part, what, variable, without in (
            ("examples", "example scripts", probe.EXAMPLES_VARIABLE, "quantizing and converting need Model Optimizer"),
            ("templates", "Triton templates", probe.TEMPLATES_VARIABLE, "configurations are written without them"),
        ):
            yield _or_missing(
                f"tensorrt_llm.{part}",
                getattr(installation, part),
                problems.get(part, f"no {what} of release {installation.release}; {without}"),
                f"set {variable} to the directory of the same release",
                CheckStatus.WARNING if part in problems else CheckStatus.MISSING,
            )
    if machine.mpirun is None:
        detail = "no mpirun, needed for engines on several GPUs"
        yield _missing("tensorrt_llm.mpirun", detail, "apt-get install openmpi-bin")
    else:
        version = "" if machine.assumed else _first_line(machine.mpirun, "--version")
        yield _check("tensorrt_llm.mpirun", machine.mpirun, f"{machine.mpirun} {version}".rstrip())


def _transformers(installation: TensorRTLLM) -> Iterator[MachineCheck]:
    """Compare the installed transformers with the version that the release requires, if both are known."""
    try:
        required = releases.transformers_of(installation.release)
    except ImportError:  # host.packages reports what is missing
        return
    found = installation.transformers
    if required is None or found is None:
        return
    differs = found != required
    yield _check(
        "tensorrt_llm.transformers",
        found,
        f"{found}, and release {installation.release} requires {required}" if differs else found,
        f"{installation.python} -m pip install transformers=={required}" if differs else None,
    )


def _triton(machine: Machine) -> Iterator[MachineCheck]:
    installation = machine.triton
    if installation is None:
        hint = f"run in one of NVIDIA's Triton images, or {NEXT['embedded']}"
        yield _missing("triton.server", "no tritonserver", hint)
        return
    yield _check(
        "triton.server", installation.version, f"{installation.version or 'of unknown version'}: {installation.path}"
    )
    names, python = ", ".join(installation.backends) or "nothing", "python" in installation.backends
    yield _check(
        "triton.backends",
        list(installation.backends),
        names if python else f"no Python backend, only: {names}",
        None if python else "every toolchain needs the Python backend: use an image whose tag ends in py3",
    )


def _model_optimizer(machine: Machine) -> MachineCheck:
    return _or_missing(
        "quantize.model_optimizer",
        machine.model_optimizer,
        "NVIDIA Model Optimizer is not installed; quantization then needs TensorRT-LLM's example scripts",
        f"install 'trtllm-pipeline[quantize]' into an environment, and set {probe.QUANTIZING_VARIABLE} to its python",
    )


def _quantize(machine: Machine) -> Iterator[MachineCheck]:
    yield _model_optimizer(machine)
    if machine.torch is None:
        hint = "python3 -m pip install torch (Model Optimizer needs it for calibration)"
        yield _missing("quantize.torch", "torch is not installed", hint)
    else:
        cuda = probe.torch_cuda()
        yield _check(
            "quantize.torch",
            machine.torch,
            f"{machine.torch}, {f'for CUDA {cuda}' if cuda else 'without CUDA: calibration runs on CPUs'}",
            "install a torch build with CUDA" if machine.gpus and cuda is None else None,
        )
    yield _or_missing(
        "quantize.transformers",
        version_of("transformers"),
        "transformers is not installed; quantization needs it to load models",
        "python3 -m pip install transformers",
    )


def _lm_eval() -> MachineCheck:
    found = lm_eval.installed()
    if found is None:
        detail = f"{lm_eval.missing()}; settings.accuracy.tasks needs it: {lm_eval.INSTALL}"
        return _missing("accuracy.lm_eval", detail, lm_eval.INSTALL)
    return _check("accuracy.lm_eval", found.version, f"{found.version or 'of unknown version'}: {found.argv[0]}")


def _space(workspace: Path) -> Iterator[MachineCheck]:
    yield _workspace(next(each for each in (workspace.absolute(), *workspace.absolute().parents) if each.exists()))
    try:
        shm = shutil.disk_usage(_SHM)
    except OSError as error:
        hint = "Triton's Python backend and NCCL need it; mount a tmpfs there"
        yield _missing("space.shm", f"{_SHM}: {error}", hint)
        return
    hint = "Triton's Python backend and NCCL use it: docker run --shm-size=2g, or more"
    text = f"{_size(shm.free)} free of {_size(shm.total)} in {_SHM}"
    yield _check("space.shm", shm.free, text, hint if shm.free < _LEAST_SHM else None)


def _workspace(folder: Path) -> MachineCheck:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return _check("space.workspace", None, f"{folder}: {error}", "name another directory with --workspace")
    where = f"{_size(free)} free in {folder}"
    if not os.access(folder, os.W_OK):
        hint = "name another directory with --workspace, or change its permissions"
        return _missing("space.workspace", f"{where}, not writable", hint, free)
    hint = "a 7B model takes about 50 GiB as model, checkpoint and engine: choose a larger disk with --workspace"
    return _check("space.workspace", free, where, hint if free < _LEAST_DISK else None)


def _limits(machine: Machine) -> Iterator[MachineCheck]:
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = memlock == resource.RLIM_INFINITY
    yield _check(
        "limits.memlock",
        None if unlimited else memlock,
        "unlimited locked memory" if unlimited else f"{_size(memlock)} of locked memory",
        "data exchange between GPUs needs locked memory: docker run --ulimit memlock=-1"
        if machine.gpus and not unlimited
        else None,
    )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    unlimited = files == resource.RLIM_INFINITY
    yield _check(
        "limits.open_files",
        None if unlimited else files,
        "unlimited open files" if unlimited else f"{files} open files",
        f"ulimit -n {_LEAST_OPEN_FILES}, or more for high concurrency"
        if files < _LEAST_OPEN_FILES and not unlimited
        else None,
    )


def _hubs() -> Iterator[MachineCheck]:
    env = os.environ
    cache = Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    home = Path(env.get("HF_HOME") or cache / "huggingface").expanduser()
    token_file = Path(env.get("HF_TOKEN_PATH") or home / "token").expanduser()
    yield _token(
        "hub.hugging_face", ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"), token_file, "hf auth login, or set HF_TOKEN"
    )
    credentials = Path("~/.modelscope/credentials/cookies").expanduser()
    yield _token("hub.modelscope", ("MODELSCOPE_API_TOKEN",), credentials, "set MODELSCOPE_API_TOKEN")


def _token(check_id: str, variables: tuple[str, ...], file: Path, how: str) -> MachineCheck:
    """Check whether a token exists, without reading its value."""
    named = next((name for name in variables if os.environ.get(name)), None)
    try:
        stored = file.stat().st_size > 0
    except OSError:
        stored = False
    if named or stored:
        return _check(check_id, True, f"a token, in {named or file}")
    return _missing(check_id, "no token; only gated models need one", how, False)


def _or_missing(
    check_id: str, value: str | None, without: str, hint: str, status: CheckStatus = CheckStatus.MISSING
) -> MachineCheck:
    return _check(check_id, None, without, hint, status) if value is None else _check(check_id, value, value)


def _first_line(*command: str) -> str:
    import subprocess

    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not start: {error}"
    return next(iter(done.stdout.splitlines()), "")


def _size(size_bytes: int) -> str:
    unit, factor = next((each for each in (("GiB", 2**30), ("MiB", 2**20)) if size_bytes >= each[1]), ("KiB", 2**10))
    return f"{size_bytes / factor:.1f} {unit}"
