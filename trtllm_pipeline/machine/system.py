"""A short record of this machine and its software, for results."""

from __future__ import annotations

import os
import platform
from functools import lru_cache
from pathlib import Path

from trtllm_pipeline import __version__
from trtllm_pipeline.domain import Json
from trtllm_pipeline.machine import probe


def here() -> dict[str, Json]:
    """This machine and its software, by the names of `bench.conditions.FIELDS`; None for what is not there.

    Names no host and no user. GPUs are all that are there: which of them a stage uses is the cell's layout.
    """
    seen = probe.survey()
    machine = seen.machine
    gpus = [f"{each.gpu.name}, {each.gpu.memory_bytes / 2**30:.0f} GiB" for each in seen.graphics.everything]
    return {
        "cpu": machine.cpu,
        "cores": machine.cpus,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "gpus": list(gpus),
        "driver": machine.driver,
        "cuda": machine.cuda,
        "triton": machine.triton.version if machine.triton else None,
        "tensorrt_llm": machine.tensorrt_llm.release if machine.tensorrt_llm else None,
        "xllamacpp": probe.version_of("xllamacpp"),
        "torch": machine.torch,
        "model_optimizer": machine.model_optimizer,
        "os": _os_name(),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "pipeline": __version__,
        "commit": commit(),
    }


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME") or platform.system()
    except OSError:
        return platform.system()


@lru_cache(maxsize=1)
def commit() -> str | None:
    """Commit of the checkout this code is in, with `-dirty` for changes that are in none; None where it is in none."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # an installed package may lie in somebody else's checkout
        return None
    import subprocess

    command = ("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
