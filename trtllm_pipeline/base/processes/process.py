"""Starts, ends and accounts for processes: the pipeline's side of the guardian, and a server as a group of processes.

Every stage process of one invocation is a child of one guardian (see `guardian.py` for its guarantees and protocol). If
the guardian itself is killed, its stage processes continue as orphans. `read_events` notices immediately, kills all
that it can recognize, and reports it. A process that survives even that (both were killed at the same moment) still
holds its claim: the lock is released when the stage run's last process ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias

from trtllm_pipeline.base.errors import FailureClass, PipelineError, ServerError, StateError
from trtllm_pipeline.base.processes.secrets import without_secrets

_PACKET_BYTES: Final = 65536
# Imported rather than run as a script, to use its compiled form. Appended to the path, so that it shadows no other
# module.
_GUARDIAN: Final = "import sys; sys.path.append(sys.argv[1]); import guardian; guardian.main(*map(int, sys.argv[2:]))"

FIND_REASON: Final = "find the reason (out of memory? see `dmesg`)"
_SERVER: Final = "server"
_START_S: Final = 30.0
_KILL_S: Final = 10.0
"""Killed processes end immediately, except those waiting in the kernel for a GPU or a disk."""
OPEN_FILES: Final = 256
"""Files that a process or server may need in addition to a load's connections."""


def return_free_memory() -> None:
    """Return freed memory to the system: glibc keeps freed memory below blocks in use."""
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def allow_open_files(connections: int = 0) -> None:
    """Raise the soft limit of open files for this many connections, if the hard limit allows it.

    Raises StateError if it does not: programs that run out of files hang or fail without a message.
    """
    needed = OPEN_FILES + connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= needed:
        return
    if hard != unlimited and hard < needed:
        raise StateError(
            f"a process may open {hard} files here, but {needed} are needed",
            hint=f"raise the limit with ulimit -n {needed}, or docker run --ulimit nofile={needed}",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def running_since(pid: int) -> int | None:
    """Start time of process `pid` in clock ticks since boot, which tells a reused pid apart. None if it has ended."""
    from trtllm_pipeline.base.processes.guardian import look_up

    process = look_up(pid)
    return None if process is None or process.zombie else process.start_time


@dataclass(frozen=True, slots=True)
class Spawned:
    """A process was started."""

    id: str
    pid: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A process could not be started. `message` says why."""

    id: str
    message: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A process and all its descendants have ended.

    `returncode` is negative for a signal. Times and memory are for the first process and the children it waited for;
    `max_rss_bytes` is the largest of them, not their sum. `swept` counts leftover processes.

    If measured, `peak_bytes` is the peak memory of all its processes together, and `shared_bytes` the maximum growth of
    /dev/shm. Otherwise they are the largest process's memory, and 0. `written_bytes` went to disks.
    """

    id: str
    returncode: int
    wall_s: float
    user_s: float
    sys_s: float
    max_rss_bytes: int
    peak_bytes: int
    shared_bytes: int
    written_bytes: int
    swept: int


ProcessEvent: TypeAlias = Spawned | Refused | Exited


class Guardian:
    """A running guardian. As a context manager, it ends itself and all its processes.

    Add `fileno()` to a selector and call `read_events` when it is readable. Orders are sent without waiting for their
    effect, which is reported as an event.
    """

    def __init__(self, *, supervises: str = "the stages", claim_fds: Sequence[int] = ()) -> None:
        """`claim_fds` are inherited by the guardian itself: flocks on them last until it has ended."""
        self._supervises = supervises
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._table = os.memfd_create("stage runs")
        """The pids of the stage runs' first processes, written by the guardian."""
        self._environment = without_secrets(os.environ)
        theirs.set_inheritable(True)
        nothing = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0)
        python = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            _GUARDIAN,
            str(Path(__file__).parent),
            *map(str, (theirs.fileno(), self._table, *claim_fds)),
        ]
        with theirs:
            self.pid = os.posix_spawn(
                sys.executable,
                python,
                self._environment,
                file_actions=[
                    nothing,
                    (os.POSIX_SPAWN_DUP2, 0, 1),
                    (os.POSIX_SPAWN_DUP2, 0, 2),
                    # Duplicated onto themselves: no longer closed on exec.
                    *((os.POSIX_SPAWN_DUP2, fd, fd) for fd in (self._table, *claim_fds)),
                ],
                setsid=True,
                setsigmask=(),
            )

    def __enter__(self) -> Guardian:  # noqa: PYI034  # typing.Self is of Python 3.11
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Becomes readable when there is an event."""
        return self._socket.fileno()

    def spawn(
        self,
        run_id: str,
        argv: Sequence[str],
        *,
        cwd: str | Path,
        log: str | Path,
        env: Mapping[str, str] | None = None,
        also: Mapping[str, str] = MappingProxyType({}),
        claim_fds: Sequence[int] = (),
        measure: bool = False,
    ) -> None:
        """Start `argv` in a new session, with its output appended to `log`. `Spawned` or `Refused` follows.

        `run_id` is unique among running ones. The environment is `env`, or ours at the start of the guardian, plus
        `also`. A program without a slash is looked up on the PATH in it. The process and all its descendants inherit
        `claim_fds`: flocks on these last as long as any of them. With `measure`, their memory is added up while they
        live.
        """
        env = {**(self._environment if env is None else env), **also}
        program = argv[0] if "/" in argv[0] else shutil.which(argv[0], path=env.get("PATH", os.defpath))
        self._send(
            {
                "do": "spawn",
                "id": run_id,
                "argv": [program or argv[0], *argv[1:]],  # the guardian refuses what is not on PATH
                "env": env,
                "cwd": str(Path(cwd).absolute()),
                "log": str(Path(log).absolute()),
                "measure": measure,
            },
            claim_fds,
        )

    def signal(self, run_id: str, signo: int, *, whole: bool = False) -> None:
        """Send a signal to the stage run's first process, or with `whole` to all its processes. Does nothing if it has ended."""
        self._send({"do": "signal", "id": run_id, "signal": int(signo), "whole": whole})

    def end(self, run_id: str, grace_s: float) -> None:
        """Interrupt all processes of the stage run, terminate them after `grace_s`, kill them after as long again."""
        self._send({"do": "end", "id": run_id, "grace_s": grace_s})

    def read_events(self) -> list[ProcessEvent]:
        """Events since the last call. Never waits. Raises PipelineError if the guardian is gone."""
        events: list[ProcessEvent] = []
        while True:
            try:
                data = self._socket.recv(_PACKET_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if not events:
                    self._wake()
                return events
            except ConnectionResetError:
                data = b""
            if not data:
                self._lost("was killed")
            message = json.loads(data)
            kind = message.pop("event")
            if kind == "exited":
                events.append(Exited(**message))
            elif kind == "spawned":
                events.append(Spawned(**message))
            elif kind == "refused":
                events.append(Refused(**message))
            else:
                self._lost(f"failed:\n{message['traceback']}")

    def close(self) -> None:
        """End all stage runs, interrupting services first. Returns within seconds, when all processes have ended."""
        if self._socket.fileno() < 0:
            return
        self._socket.close()
        self._wake()
        with contextlib.suppress(ChildProcessError):  # already reaped elsewhere
            os.waitpid(self.pid, 0)
        os.close(self._table)

    def _wake(self) -> None:
        """Resume the guardian if it was stopped. It does not work while stopped. No effect on a running one."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def _send(self, message: dict[str, object], fds: Sequence[int] = ()) -> None:
        data = json.dumps(message).encode()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `read_events` will report it
            if len(data) <= _PACKET_BYTES:
                socket.send_fds(self._socket, [data], fds)
                return
            with open(os.memfd_create("message"), "r+b") as file:  # noqa: PTH123
                file.write(data)
                file.flush()
                socket.send_fds(self._socket, [b"@"], [*fds, file.fileno()])

    def _lost(self, how: str) -> None:
        """Kill the recognizable processes that the guardian left behind, and raise PipelineError."""
        from trtllm_pipeline.base.processes.guardian import is_marked, kill, process_table, with_descendants

        running = os.pread(self._table, os.fstat(self._table).st_size, 0).partition(b"\n")[0]
        sessions = set(map(int, running.split()))
        self.close()
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            table = process_table()
            known = {pid for pid, one in table.items() if one.session in sessions}
            marked = {pid for pid in table if is_marked(pid, f"{self.pid}.")}
            left = with_descendants(known | marked, table)
            if not left:
                break
            for pid in left:
                kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        raise PipelineError(
            f"the process that supervises {self._supervises} (pid {self.pid}) {how}; all processes below it were ended",
            hint=f"{FIND_REASON}, then run again; finished stages are kept",
        )


class Group:
    """A running program with all its descendants, including daemons. Always call `stop`, even after it has ended.

    mpirun puts its ranks into new process groups, and workers that MPI spawns into new sessions, so a signal to one
    group does not reach them all. A separate guardian is their common parent: it finds all descendants, and ends them
    when this process ends for any reason.
    """

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path) -> None:
        """Start `argv` with its output appended to `log`. Raises ServerError if it cannot be started."""
        self._guardian = Guardian(supervises="the server")
        self._said: list[Spawned | Refused] = []
        self.returncode: int | None = None
        """Exit status of the program, negative for a signal. Set after it and all its descendants have ended."""
        try:
            self._guardian.spawn(_SERVER, argv, env=env, cwd=cwd, log=log, claim_fds=_inherited())
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
        """Return its exit status after it and all its descendants have ended. Raises ServerError if the guardian was killed."""
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> int | None:
        """The same, after waiting up to `timeout_s` for the end."""
        if self.returncode is None:
            self._read(timeout_s)
        return self.returncode

    def interrupt(self) -> None:
        self._guardian.signal(_SERVER, signal.SIGINT)

    def stop(self, timeout_s: float) -> int | None:
        """Interrupt it, terminate all of it after half of `timeout_s`, and kill it after the other half."""
        try:
            if self.wait(0.0) is None:
                self.interrupt()
                if self.wait(timeout_s / 2) is None:
                    self._guardian.signal(_SERVER, signal.SIGTERM, whole=True)
                    if self.wait(timeout_s / 2) is None:
                        self._guardian.end(_SERVER, 0.0)
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
            self.returncode = -signal.SIGKILL  # the signal that it gets when its guardian is lost
            raise ServerError(error.message, hint=FIND_REASON) from error


def _inherited() -> list[int]:
    """Inherited descriptors that the server must hold: locks on GPUs, which must last as long as their user."""
    given = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) > 2 and os.get_inheritable(int(name)):
                given.append(int(name))
        except OSError:
            continue  # the descriptor used for this listing
    return given
