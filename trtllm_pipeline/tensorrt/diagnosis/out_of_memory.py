"""The kernel's counters of out-of-memory kills, the only evidence about the sender of a SIGKILL."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import FailureClass

MACHINE: Final = "/proc/vmstat"
OWN_GROUPS: Final = "/proc/self/cgroup"
_CGROUPS: Final = (
    # name of the hierarchy in /proc/self/cgroup -> its directory, the counter file of a group, in this order
    ("memory", "/sys/fs/cgroup/memory", "memory.oom_control"),
    ("", "/sys/fs/cgroup", "memory.events"),
    ("", "/sys/fs/cgroup/unified", "memory.events"),
)
_COUNT: Final = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)
_MESSAGES: Final = "/dev/kmsg"
HINTS: Final = {
    FailureClass.OUT_OF_MEMORY: "host memory ran out: use fewer workers (each loads the weights), or a machine or container "
    "with more memory",
    FailureClass.BUG: "a person or a program sent SIGKILL, such as an administrator, a batch system or a memory watchdog; "
    "run again if the cause was temporary",
}


@dataclass(frozen=True, slots=True)
class Counts:
    """Number of processes that the kernel has killed for lack of memory, by file. At most one of the two is set."""

    group: Mapping[str, int] = field(default_factory=dict)
    """Counter of this process's control group."""
    machine: Mapping[str, int] = field(default_factory=dict)
    """Counter of the whole machine, including processes of other users. Used only if the group has no counter."""
    at_s: float = 0.0
    """Read time, in seconds since boot."""


def counts() -> Counts:
    now = time.clock_gettime(time.CLOCK_MONOTONIC)
    for path in _group_files(OWN_GROUPS):
        if (count := _count(path)) is not None:
            return Counts(group={path: count}, at_s=now)
    count = _count(MACHINE)
    return Counts(machine={} if count is None else {MACHINE: count}, at_s=now)


def verdict(before: Counts | None) -> tuple[FailureClass, str, str]:
    """For a failure by SIGKILL since `before`: its class, whether the kernel reports lack of memory, and a hint."""
    now = counts()
    counters = {**now.group, **now.machine}
    if before is None or not counters:
        words = "the kernel has no counter that shows whether it was killed for lack of memory"
        return FailureClass.BUG, words, HINTS[FailureClass.BUG]
    ((path, count),) = counters.items()
    earlier = {**before.group, **before.machine}.get(path, count)
    if count <= earlier:
        words = f"the kernel did not kill it for lack of memory (oom_kill in {path} stayed at {count})"
        return FailureClass.BUG, words, HINTS[FailureClass.BUG]
    counted = f"oom_kill in {path} went from {earlier} to {count}"
    if now.machine:
        words = f"the kernel killed a process on this machine for lack of memory at that time ({counted})"
    else:
        kernel_message = _kernel_message(before.at_s)
        words = f"the kernel killed it for lack of memory ({counted}{f'; it says: {kernel_message}' if kernel_message else ''})"
    return FailureClass.OUT_OF_MEMORY, words, HINTS[FailureClass.OUT_OF_MEMORY]


@cache
def _group_files(groups: str) -> tuple[str, ...]:
    """Files that may have the count of this process's control group. In a container, the group is often the top."""
    try:
        lines = Path(groups).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    own = {name: path for _, names, path in (line.split(":", 2) for line in lines) for name in names.split(",")}
    return tuple(
        os.path.normpath(f"{folder}/{path}/{file}")
        for name, folder, file in _CGROUPS
        if name in own
        for path in (own[name], "")
    )


def _count(path: str) -> int | None:
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - half the calls of pathlib, before every command
            match = _COUNT.search(file.read())
    except OSError:
        return None
    return int(match[1]) if match else None


def _kernel_message(since_s: float) -> str | None:
    """The kernel's last message about a process killed for lack of memory, if its messages are readable."""
    message = None
    try:
        messages = os.open(_MESSAGES, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        while True:
            try:
                record = os.read(messages, 8192).decode("utf-8", "replace")
            except BrokenPipeError:
                continue  # overwritten during the read; try the next one
            head, _, text = record.partition(";")
            told_s = int(head.split(",")[2]) / 1e6
            if told_s >= since_s - 1.0 and "out of memory: Killed process" in text.replace("Out", "out"):
                message = text.partition("\n")[0]
    except (OSError, ValueError, IndexError):
        return message  # after the last message
    finally:
        os.close(messages)
