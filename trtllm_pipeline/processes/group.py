"""A server's process with all its descendants, including daemons, started and ended as one.

mpirun puts its ranks into process groups of their own, and workers that MPI spawns into sessions of their own, so no
signal to one group reaches them all. A guardian of its own is the parent of the whole (see `guardian.py`): it finds
what descends, and ends all of it when this process ends, in whatever way.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from trtllm_pipeline.errors import FailureClass, PipelineError, ServerError
from trtllm_pipeline.processes.process import Exited, Guardian, Refused, Spawned

_ID: Final = "server"
_START_S: Final = 30.0
_KILL_S: Final = 10.0
"""Killed processes end at once, except those that wait in the kernel for a GPU or a disk."""


class Group:
    """A running program with all its descendants. `stop` must be called, also after it has ended by itself."""

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path) -> None:
        """Start `argv`, its output appended to `log`. Raises ServerError when it cannot be started."""
        self._guardian = Guardian()
        self._said: list[Spawned | Refused] = []
        self.returncode: int | None = None
        """Exit status of the program, negative for a signal, once it and all below it are gone."""
        try:
            self._guardian.spawn(_ID, argv, env=env, cwd=cwd, log=log, claim_fds=_inherited())
            self._read(_START_S)
            started = self._said[0] if self._said else None
            if not isinstance(started, Spawned):
                why = started.message if started else "its guardian does not respond"
                raise ServerError(f"cannot start the server: {why}", failure=FailureClass.USER)
        except BaseException:
            self._guardian.close()
            raise
        self.pid = started.pid

    def poll(self) -> int | None:
        """Its exit status, once it and everything below it are gone. Raises ServerError when the guardian was killed."""
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> int | None:
        """The same, after waiting for the end for at most `timeout_s`."""
        if self.returncode is None:
            self._read(timeout_s)
        return self.returncode

    def interrupt(self) -> None:
        """Interrupt the program."""
        self._guardian.signal(_ID, signal.SIGINT)

    def stop(self, timeout_s: float) -> int | None:
        """Interrupt it, terminate all of it after half of `timeout_s`, kill it after the other half."""
        try:
            if self.wait(0.0) is None:
                self.interrupt()
                if self.wait(timeout_s / 2) is None:
                    self._guardian.signal(_ID, signal.SIGTERM, whole=True)
                    if self.wait(timeout_s / 2) is None:
                        self._guardian.end(_ID, 0.0)
                        self.wait(_KILL_S)
        finally:
            self._guardian.close()
        return self.returncode

    def _read(self, timeout_s: float) -> None:
        """Record events, waiting at most `timeout_s` for the first one."""
        if not select.select([self._guardian], [], [], timeout_s)[0]:
            return
        try:
            for event in self._guardian.read_events():
                if isinstance(event, Exited):
                    self.returncode = event.returncode
                else:
                    self._said.append(event)
        except PipelineError as error:
            self.returncode = -signal.SIGKILL  # which is what it gets when its guardian is lost
            raise ServerError(error.message, hint=error.hint) from error


def _inherited() -> list[int]:
    """Inherited descriptors that the server must hold: locks on GPUs, which must last as long as their user."""
    given = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) > 2 and os.get_inheritable(int(name)):
                given.append(int(name))
        except OSError:
            continue  # the one that has just listed them
    return given
