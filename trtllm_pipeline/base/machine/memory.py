"""Memory limits of programs on this machine: the host's memory, limited by control groups, and /dev/shm."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

_CGROUP: Final = Path("/proc/self/cgroup")
_CGROUPS: Final = Path("/sys/fs/cgroup")
SHARED: Final = "/dev/shm"  # noqa: S108  looked at only


def physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def host_bytes() -> int:
    """Memory of the host, or less if the control groups of this process limit it."""
    physical = physical_bytes()
    return min(physical, _cgroup_bytes() or physical)


def shared_bytes() -> int | None:
    """Size of /dev/shm. None if it does not exist."""
    try:
        return shutil.disk_usage(SHARED).total
    except OSError:
        return None


def _cgroup_bytes() -> int | None:
    """The smallest memory limit of the control groups above this process, in bytes; cgroup v2 and v1."""
    limits = []
    try:
        lines = _CGROUP.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        root = _CGROUPS / ("memory" if controllers else "")
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        if controllers in {"", "memory"}:
            # In a container, the path may be the host's, of which only the root is visible.
            group = root / path.lstrip("/")
            limits += [_number(each / name) for each in (group, *group.parents) if each.is_relative_to(root)]
    return min((limit for limit in limits if limit is not None), default=None)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such file, or "max"
        return None
