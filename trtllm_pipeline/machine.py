"""What this machine has that plans depend on: CPUs we may use, the CPU's name, GPUs."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path


def cpu_count() -> int:
    """CPUs this process may run on; cgroup and affinity limits of containers show in the affinity mask only."""
    return len(os.sched_getaffinity(0))


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
