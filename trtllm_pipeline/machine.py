"""What this machine has that plans depend on: CPUs we may use, the CPU's name, GPUs."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Final

_QUOTA_FILE: Final = Path("/sys/fs/cgroup/cpu.max")


def cpu_count() -> int:
    """CPUs this process may keep busy: those of its affinity mask, or fewer where its cgroup has a quota."""
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
    """The processor's name as Linux reports it, or the architecture where it reports none."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return os.uname().machine
