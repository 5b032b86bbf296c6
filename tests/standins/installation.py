"""Lays out a GPU machine with one release of TensorRT-LLM, in a folder, for tests."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import tokenizers
from packaging.version import Version

from tests.standins import faults, refusals, releases
from tests.standins.faults import Fault
from tests.standins.programs import FACTS, INVOCATIONS, llm_api

_ROOT: Final = Path(__file__).resolve().parents[2]
_NAMES: Final = {80: "NVIDIA A100-SXM4-80GB", 89: "NVIDIA L40S", 90: "NVIDIA H100 80GB HBM3", 100: "NVIDIA B200"}
_VISUAL: Final = "build_visual_engine.py"
"""Whatever a release calls it."""
_FIRST_VISUAL: Final = Version("0.16.0")
"""From which on the program is as the stand-in's."""
_QUANTIZER: Final = "model_optimizer"
"""Our quantization worker, under a Python of its own."""
_SCRIPT: Final = '''\
#!{python} -IS
"""Stand-in of TensorRT-LLM {release}: see tests/standins."""
import sys

sys.path.insert(0, {root!r})
from tests.standins.programs import main

sys.exit(main({tool!r}, {folder!r}, sys.argv[1:]))
'''


@dataclass(frozen=True, slots=True)
class Invocation:
    """One start of a program. `ended` and `exit` are None while it runs, and for ever when it was killed."""

    tool: str
    """Its name; a converter's with the family: `convert_checkpoint.py:llama`."""
    argv: tuple[str, ...]
    cwd: str
    cuda_visible_devices: str | None
    no_usage_stats: str | None
    """TRTLLM_NO_USAGE_STATS, which turns telemetry off."""
    release: str
    rank: int
    started: float
    """Unix time, as `ended`."""
    ended: float | None = None
    exit: int | None = None


@dataclass(frozen=True, slots=True)
class Installation:
    """What `install` made."""

    folder: Path
    release: str
    environment: dict[str, str] = field(default_factory=dict)
    """To be added to os.environ: PATH and PYTHONPATH with the programs and packages in front of what is there now."""

    @property
    def bin(self) -> Path:
        """The folder of programs."""
        return self.folder / "bin"

    @property
    def examples(self) -> Path:
        """The folder `examples` of the source tree; empty for an installation without."""
        return self.folder / "examples"

    def program(self, tool: str) -> Path:
        """Path of a program or script, there or not: `trtllm-build`, `quantize.py`, `convert_checkpoint.py:llama`."""
        return self.folder / _place(tool, Version(self.release))

    def invocations(self, tool: str | None = None) -> list[Invocation]:
        """Starts of programs so far, in order; of one tool if given (`convert_checkpoint.py` means all families)."""
        file = self.folder / INVOCATIONS
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        records: dict[str, dict[str, Any]] = {}
        for line in map(json.loads, lines):
            records.setdefault(line.pop("id"), {}).update(line)
        return [
            Invocation(**{**record, "argv": tuple(record["argv"])})
            for record in records.values()
            if tool is None or tool in {record["tool"], record["tool"].partition(":")[0]}
        ]

    def fail(self, tool: str, *planned: Fault) -> None:
        """Let the next starts of `tool` go wrong; see `faults`."""
        faults.add(self.folder, tool, *planned)

    def heal(self) -> None:
        """Let everything work again."""
        faults.clear(self.folder)


def install(
    folder: Path,
    release: str,
    *,
    sm: int = 90,
    gpus: int = 8,
    examples: bool = True,
    templates: Path | None = None,
    packages: Mapping[str, str] | None = None,
    model_optimizer: str | None = None,
    hub_datasets: Iterable[str] = (),
) -> Installation:
    """Lay out `release` in the new or empty `folder`.

    `templates`: a folder `all_models`, shown where the release has its own. `packages`: versions of other Python packages
    that seem to be installed. `model_optimizer`: its version in a Python of its own. `hub_datasets`: names of data sets that
    can be had from the hub; none by default, as without a network.

    Raises ValueError for a release before the first that was recorded.
    """
    version = Version(release)
    engines = version < releases.FIRST_WITHOUT_ENGINES
    tools: dict[str, releases.Table | None] = {}
    if engines:
        tools["trtllm-build"] = releases.table("trtllm-build", release)
        if tools["trtllm-build"] is None:
            raise ValueError(f"nothing was recorded of TensorRT-LLM {release}")
    if version >= releases.FIRST_SERVE:
        tools[releases.SERVE] = releases.table(releases.SERVE, release)
    tools[releases.BENCH] = releases.table(releases.BENCH, release)
    if examples and engines:
        for name in ("quantize.py", "run.py", *(f"convert_checkpoint.py:{each}" for each in releases.families())):
            tools[name] = releases.table(name, release)
        if version >= _FIRST_VISUAL:
            tools[_VISUAL] = {}
    if model_optimizer is not None:
        tools[_QUANTIZER] = {}
    there = {name: table for name, table in tools.items() if table is not None}
    folder = folder.absolute()
    (folder / "bin").mkdir(parents=True)
    facts = {
        "release": release,
        "tools": there,
        "gpus": [
            {
                "index": index,
                "uuid": f"GPU-00000000-0000-0000-0000-{index:012d}",
                "name": _NAMES.get(sm, f"NVIDIA stand-in SM {sm}"),
                "memory_bytes": 80 << 30,
                "sm": sm,
            }
            for index in range(gpus)
        ],
        "hub_datasets": list(hub_datasets),
        "packages": str(Path(str(tokenizers.__file__)).parents[1]),
        **_ways(version),
    }
    (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")
    for tool in there:
        script = folder / _place(tool, version)
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(
            _SCRIPT.format(python=sys.executable, release=release, root=str(_ROOT), tool=tool, folder=str(folder)),
            encoding="utf-8",
        )
        script.chmod(0o755)
    site = folder / "site-packages"
    for name, number in {"tensorrt_llm": release, **(packages or {})}.items():
        _write_metadata(site, name, number)
    for module in ("pynvml.py", *(("sitecustomize.py",) if gpus else ())):
        shutil.copy(Path(__file__).parent / "site" / module, site)
    shutil.copy(_ROOT / "tests/helpers/nvml.py", site / "boards.py")
    environment = {
        "PATH": os.pathsep.join((str(folder / "bin"), os.environ.get("PATH", os.defpath))),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH")))),
    }
    if model_optimizer is not None:
        python = folder / _place(_QUANTIZER, version)
        _write_metadata(python.parents[1] / "lib/python3/site-packages", "nvidia-modelopt", model_optimizer)
        environment["MODEL_OPTIMIZER_PYTHON"] = str(python)
    if examples and engines:
        environment["TENSORRT_LLM_EXAMPLES"] = str(folder / "examples")
    if templates is not None:
        nested = version >= releases.FIRST_NESTED_EXAMPLES
        shown = folder / ("triton_backend" if nested else "") / "all_models"
        shown.parent.mkdir(exist_ok=True)
        shown.symlink_to(templates.absolute())
        environment["TENSORRT_LLM_TEMPLATES"] = str(shown)
    return Installation(folder, release, environment)


def _write_metadata(site: Path, name: str, version: str) -> None:
    """Let a package seem to be installed."""
    metadata = site / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")


def _place(tool: str, version: Version) -> Path:
    """Where a program is, from the installation's folder."""
    name, _, family = tool.partition(":")
    if name == "convert_checkpoint.py":
        nested = version >= releases.FIRST_NESTED_EXAMPLES and family not in releases.HEADS
        return Path("examples", *(("models", "core") if nested else ()), _former(family, nested=nested), name)
    if name == _VISUAL:
        nested = version >= releases.FIRST_NESTED_EXAMPLES
        script = "build_multimodal_engine.py" if version >= Version("0.19") else _VISUAL
        return Path("examples", *(("models", "core") if nested else ()), "multimodal", script)
    own = {
        "quantize.py": Path("examples/quantization/quantize.py"),
        "run.py": Path("examples/run.py"),
        _QUANTIZER: Path("model-optimizer/bin/python"),
    }
    return own.get(name, Path("bin") / name)


def _former(family: str, *, nested: bool) -> str:
    """The folder of GLM-4's script was that of all ChatGLM before."""
    return "chatglm" if family == "glm-4-9b" and not nested else family


def _ways(version: Version) -> dict[str, Any]:
    """What else differs from release to release, beyond options. Sources: release notes and issues of TensorRT-LLM."""
    at = version.release  # 1.1.0rc6 has the ways of 1.1.0, except where it is known better
    backend = None
    if at >= (1, 1) and version != Version("1.1.0rc6"):
        backend = "tensorrt"
    elif at >= (1, 0):
        backend = "trt"
    return {
        "engine_backend": backend,
        "knows_rope_type": at >= (0, 12),
        "llm_args": llm_api.of(str(version)),
        "refusals": {program: refusals.of(program, str(version)) for program in refusals.recorded()},
    }
