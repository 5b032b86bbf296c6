"""Finds processes of a loading server that were killed by a signal, and that the server keeps waiting for.

Triton does not notice that a Python model's process has died and never reaps it. Such a process stays a zombie below the
server, with its signal in the process table. Reaped processes were expected to end. A server may end other processes
itself, so these only count if the kernel has killed something for lack of memory.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import FailureClass, guardian
from trtllm_pipeline.tensorrt.diagnosis import out_of_memory

STUB: Final = "triton_python_backend_stub"
LOOK_EVERY_S: Final = 0.05
"""A process that dies before it was listed has no name. Listing takes at most a tenth of the time."""
_LEFT_S: Final = 0.4
"""A process whose parent waits for it is reaped sooner."""


def model_run_by(pid: int) -> str | None:
    """The model that a living process runs; None if it is not a stub."""
    return model_of(guardian.proc_file(pid, "cmdline").split(b"\0"))


def model_of(command: list[bytes]) -> str | None:
    """The same from a command line, whose first argument is REPOSITORY/MODEL/VERSION/model.py."""
    if STUB.encode() not in command[0] or len(command) < 2:
        return None
    return Path(os.fsdecode(command[1])).parent.parent.name


class Watch:
    """Finds such processes below `root`. `before` are the kernel's counts at its start."""

    def __init__(self, root: int, before: out_of_memory.Counts) -> None:
        self._root = root
        self._before = before
        self._models: dict[int, str] = {}
        self._since: dict[int, float] = {}
        self._next = 0.0

    def look(self) -> tuple[str, int] | None:
        """The killed process and its signal, if there is one. Rate-limited if called often."""
        now = time.monotonic()
        if now < self._next:
            return None
        table = guardian.process_table(zombies=True)
        descendants = {pid: table[pid] for pid in guardian.with_descendants({self._root}, table) if pid != self._root}
        self._next = now + max(LOOK_EVERY_S, 10 * (time.monotonic() - now))
        self._since = {pid: self._since.get(pid, now) for pid, process in descendants.items() if process.zombie}
        for pid, process in descendants.items():
            if not process.zombie and (model := model_run_by(pid)):
                self._models[pid] = model
        for pid, since in self._since.items():
            signo = descendants[pid].exit_code & 0x7F
            if signo and now - since >= _LEFT_S and (who := self._who(pid, signo)):
                return who, signo
        return None

    def _who(self, pid: int, signo: int) -> str | None:
        """Description of a killed process; None if it does not matter."""
        if pid in self._models:
            return f"the process of model {self._models[pid]}"
        name = guardian.proc_file(pid, "comm").decode(errors="replace").strip()
        if STUB.startswith(name) and name:
            return f"the process of a Python model ({pid})"
        for_memory = signo == signal.SIGKILL and out_of_memory.verdict(self._before)[0] is FailureClass.OUT_OF_MEMORY
        return f"its process {pid} ({name})" if for_memory else None
