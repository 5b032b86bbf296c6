"""Detects the hardware and software of this machine, and describes what is broken.

Versions come from package metadata, so nothing heavy is imported. Without a GPU, it starts no process.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from trtllm_pipeline import PACKAGE, __version__
from trtllm_pipeline.base.domain import Json
from trtllm_pipeline.base.errors import ServerError
from trtllm_pipeline.base.machine import gpus, memory, placement, triton_installation
from trtllm_pipeline.base.machine.model import Machine, TensorRTLLM, TritonServer, cpu_count, cpu_name
from trtllm_pipeline.base.machine.packages import distribution_of, version_of

EXAMPLES_VARIABLE: Final = "TENSORRT_LLM_EXAMPLES"
TEMPLATES_VARIABLE: Final = "TENSORRT_LLM_TEMPLATES"
QUANTIZING_VARIABLE: Final = "MODEL_OPTIMIZER_PYTHON"
"""Names the interpreter of another environment: TensorRT-LLM pins an older Model Optimizer than our worker needs."""
TREES: Final = (
    "/app/tensorrt_llm",
    "/app",
    "/code/tensorrt_llm",
    "/opt/tritonserver/tensorrtllm_backend",
    "/tensorrtllm_backend",
    "/workspace/TensorRT-LLM",
    "/workspace/tensorrtllm_backend",
    "~/TensorRT-LLM",
    "~/tensorrtllm_backend",
)
"""Directories where NGC images and users keep the sources of TensorRT-LLM, or of the Triton backend that has them."""
_MPIRUNS: Final = ("/usr/local/mpi/bin/mpirun", "/opt/hpcx/ompi/bin/mpirun")
"""Paths in NGC images, for a changed PATH."""
_SCRIPTS: Final = ("llama/convert_checkpoint.py", "models/core/llama/convert_checkpoint.py", "quantization/quantize.py")
"""One of these identifies the required examples directory. The first two are the layouts up to 0.19 and from 0.20."""
_TEMPLATES: Final = ("inflight_batcher_llm/tensorrt_llm/config.pbtxt", "llmapi/tensorrt_llm/config.pbtxt")


@dataclass(frozen=True, slots=True)
class Survey:
    """An installation and its problems."""

    machine: Machine
    graphics: gpus.Graphics
    problems: Mapping[str, str]
    """By part (`release`, `examples`, `templates`): why the one that exists cannot be used."""


def this_machine() -> Machine:
    """This machine. The first call takes a few hundredths of a second without a GPU. The result is cached."""
    return survey().machine


@lru_cache(maxsize=1)
def survey() -> Survey:
    """This machine and what is broken on it. Never raises."""
    graphics = gpus.look()
    problems: dict[str, str] = {}
    tensorrt_llm = _tensorrt_llm(problems)
    quantizing = os.environ.get(QUANTIZING_VARIABLE) or None
    machine = Machine(
        cpus=cpu_count(),
        cpu=cpu_name(),
        gpus=tuple(device.gpu for device in graphics.devices),
        driver=graphics.driver,
        cuda=graphics.cuda,
        tensorrt_llm=tensorrt_llm,
        model_optimizer=version_of(
            "nvidia-modelopt", _others(quantizing or (tensorrt_llm.python if tensorrt_llm else None))
        ),
        model_optimizer_python=quantizing,
        torch=version_of("torch"),
        triton=_triton(),
        mpirun=shutil.which("mpirun") or next(filter(os.path.exists, _MPIRUNS), None),
        memory_bytes=memory.host_bytes(),
        shared_bytes=memory.shared_bytes(),
    )
    return Survey(machine, graphics, problems)


def cpus_near(uuids: Iterable[str]) -> tuple[int, ...]:
    """The CPUs near these GPUs of this machine, see `placement`."""
    near = placement.cpus_of(survey().graphics.everything)
    return tuple(sorted({cpu for uuid in uuids for cpu in near.get(uuid, ())}))


def identity(machine: Machine) -> Mapping[str, Json]:
    """The versions that results may depend on, by the names in `Stage.identity`. Each stage selects its own.

    `sm` decides whether an engine loads at all, `gpu` determines its speed, so building and measuring depend on it.
    Number and identity of GPUs, the host, its driver and all paths are left out: they do not affect a stage's output.
    """
    return {
        "tensorrt_llm": machine.tensorrt_llm.release if machine.tensorrt_llm else None,
        "sm": machine.sm,
        "gpu": ", ".join(sorted({gpu.name for gpu in machine.gpus})) or None,
        "model_optimizer": machine.model_optimizer,
        "triton": machine.triton.version if machine.triton else None,
    }


def here() -> dict[str, Json]:
    """A short record of this machine and its software, for results. None for missing parts.

    The names are those of `conditions.FIELDS`. It contains no host or user name. All GPUs are listed: the cell's
    layout determines which of them a stage uses.
    """
    surveyed = survey()
    machine = surveyed.machine
    devices = [each.gpu for each in surveyed.graphics.everything]
    return {
        "cpu": machine.cpu,
        "cores": machine.cpus,
        "memory_gib": round(memory.physical_bytes() / 2**30),
        "gpus": [f"{gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB" for gpu in devices],
        "driver": machine.driver,
        "cuda": machine.cuda,
        "triton": machine.triton.version if machine.triton else None,
        "tensorrt_llm": machine.tensorrt_llm.release if machine.tensorrt_llm else None,
        "xllamacpp": version_of("xllamacpp"),
        "torch": machine.torch,
        "model_optimizer": machine.model_optimizer,
        "os": _os_name(),
        "kernel": f"{os.uname().sysname} {os.uname().release}",
        "python": sys.version.split()[0],
        "pipeline": __version__,
        "commit": commit(),
    }


def maker() -> dict[str, Json]:
    """The same with the digest of the code, for the provenance of artifacts made here."""
    return {**here(), "code": code_digest()}


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Digest of this package's files, 16 hexadecimal digits. Not part of keys: most changes do not affect results."""
    from hashlib import blake2b

    package, digest = PACKAGE, blake2b(digest_size=8)
    for folder, folders, files in os.walk(package):
        folders[:] = sorted(each for each in folders if each != "__pycache__")
        for path in (Path(folder, name) for name in sorted(files)):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(package)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


MADE_BY: Final = "PIPELINE_MADE_BY"
"""Name for the maker of artifacts, in place of user and host. If empty, none is recorded."""


def made_by() -> dict[str, Json]:
    """The builder of artifacts, for their provenance: user and host, or a name that the user chose."""
    configured = os.environ.get(MADE_BY)
    if configured is not None:
        return {"user": configured.encode(errors="replace").decode()} if configured else {}
    import getpass

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in containers, a user id without a name
        user = f"uid {os.getuid()}"
    return {"user": user.encode(errors="replace").decode(), "host": os.uname().nodename}


def _os_name() -> str:
    import platform  # imports subprocess on Python 3.10

    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME") or platform.system()
    except OSError:
        return platform.system()


@lru_cache(maxsize=1)
def commit() -> str | None:
    """Commit of the checkout that has this code, with `-dirty` for uncommitted changes. None outside a checkout."""
    root = PACKAGE.parent
    if not (root / ".git").exists():  # an installed package may be inside another project's checkout
        return None
    import subprocess

    # Not `git describe --dirty`: it writes the index, and leaves its lock if the pipeline is killed meanwhile.
    command = ("git", "--no-optional-locks", "-C", str(root), "status", "--porcelain=v2", "--branch", "-uno")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"^# branch\.oid ([0-9a-f]{12})", done.stdout, re.MULTILINE)
    if done.returncode != 0 or match is None:
        return None
    return match[1] + ("-dirty" if re.search("^[^#]", done.stdout, re.MULTILINE) else "")


def _others(python: str | None) -> list[str]:
    """Package directories of another interpreter. Empty for this one and for None."""
    if python is None or python == sys.executable:
        return []
    return packages_of(python) or [str(Path(python).parent)]  # other programs have none


def packages_of(python: str) -> list[str]:
    """Package directories of an interpreter's environment."""
    prefix = Path(python).parent.parent
    libraries = (prefix / "lib", prefix / "local" / "lib")  # the second is where Debian's own Python installs to
    return [str(folder) for lib in libraries for folder in lib.glob("python3*/*-packages")]


def torch_cuda() -> str | None:
    """CUDA version that the installed torch was built for, as 12.8, from its files. None for a CPU build, or without torch."""
    distribution = distribution_of("torch")
    try:
        text = Path(str(distribution.locate_file("torch/version.py"))).read_text("utf-8") if distribution else ""
    except OSError:
        text = ""
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def _tensorrt_llm(problems: dict[str, str]) -> TensorRTLLM | None:
    build, serve = _script("trtllm-build"), _script("trtllm-serve")
    spec = find_spec("tensorrt_llm")  # finds the package without importing it
    here = spec.origin if spec else None  # a plain directory of that name has no origin
    release, python = _of_script(build or serve) or (version_of("tensorrt_llm"), sys.executable)
    if release is None:
        if build or serve:
            problems["release"] = f"found {build or serve}, but no package metadata that names its release"
        return None
    if not (build or serve or here):
        # The package index has source packages of this name that only try to fetch the real one.
        problems["release"] = (
            f"package metadata names tensorrt_llm {release}, but neither the package nor its programs are installed"
        )
        return None
    trees = [Path(tree).expanduser() for tree in TREES]
    if here:
        trees.insert(0, Path(here).parent.parent)
    examples = _matching(
        "examples",
        release,
        (EXAMPLES_VARIABLE, _SCRIPTS),
        [folder for tree in trees for folder in (tree / "examples", tree / "tensorrt_llm" / "examples")],
        problems,
    )
    templates = _matching(
        "templates",
        release,
        (TEMPLATES_VARIABLE, _TEMPLATES),
        [folder for tree in trees for folder in (tree / "triton_backend" / "all_models", tree / "all_models")],
        problems,
    )
    transformers = version_of("transformers", _others(python))
    return TensorRTLLM(release, build, serve, examples, templates, python, transformers, _script("trtllm-bench"))


def _script(name: str) -> str | None:
    """A program from this Python's environment, even if it is not activated, or from PATH."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


def _of_script(script: str | None) -> tuple[str, str] | None:
    """Release and interpreter of the environment that a script belongs to, from its first line. None if unknown.

    `pipeline` may be installed in a separate environment, with TensorRT-LLM's programs on PATH.
    """
    if script is None:
        return None
    try:
        with Path(script).open("rb") as file:
            first = file.readline(512).decode(errors="replace")
    except OSError:
        return None
    words = first[2:].split() if first.startswith("#!") else []
    if not words or not Path(words[0]).is_absolute():
        return None
    python = words[0]
    release = version_of("tensorrt_llm", packages_of(python))
    return (release, python) if release else None


def _matching(
    part: str, release: str, wanted: tuple[str, tuple[str, ...]], folders: list[Path], problems: dict[str, str]
) -> str | None:
    """The first directory that has the required files and belongs to this release. One without a release is accepted.

    `wanted` is the variable that may name a directory, then the only candidate, and files of which it must have one.
    """
    variable, files = wanted
    named = os.environ.get(variable)
    for folder in [Path(named)] if named else folders:
        if not any((folder / file).is_file() for file in files):
            if named:
                problems[part] = f"{variable}={named}: the directory has none of {', '.join(files)}"
            continue
        of = _release_of(folder)
        if of is None or of == release.partition("+")[0]:
            problems.pop(part, None)
            return str(folder)
        problems.setdefault(part, f"{folder} belongs to release {of}, but TensorRT-LLM {release} is installed")
    return None


def _release_of(folder: Path) -> str | None:
    """Release of the source tree that contains a directory, according to the tree's version.py."""
    for above in list(folder.parents)[:2]:
        for package in (above / "tensorrt_llm", above / "tensorrt_llm" / "tensorrt_llm"):
            try:
                text = (package / "version.py").read_text(encoding="utf-8")
            except OSError:
                continue
            match = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
            if match:
                return match[1].partition("+")[0]
    return None


def _triton() -> TritonServer | None:
    try:
        installation = triton_installation.find()
    except ServerError:
        return None
    version: str | None = installation.source.removeprefix("tritonserver ")
    if version == "unknown":
        try:
            version = (installation.backends.parent / "TRITON_VERSION").read_text(encoding="ascii").strip() or None
        except (OSError, ValueError):
            version = None
    try:
        backends = sorted(entry.name for entry in installation.backends.iterdir() if entry.is_dir())
    except OSError:
        backends = []
    program = installation.backends.parent / triton_installation.OPENAI_PROGRAM
    return TritonServer(str(installation.binary), version, tuple(backends), str(program) if program.is_file() else None)
