"""The parent of all stage processes: a small program that outlives a killed pipeline just long enough to clean up.

    python -I -S guardian.py FD TABLE

`process.Guardian` starts it and holds the other end of FD, a SOCK_SEQPACKET socket. TABLE is a memory file that lists
the first process of each running stage run, for the other end, in case this process is killed. Every message is one
JSON object. A message too long for a packet is sent as the packet `@` and a memory file:

    {"do": "spawn", "id", "argv", "env", "cwd", "log", "measure"}  and, as SCM_RIGHTS, file descriptors to inherit
    {"do": "signal", "id", "signal", "whole"}           to the stage run's first process, or to all of its processes
    {"do": "end", "id", "grace_s"}                      interrupt all, after the grace terminate all, then kill all

    {"event": "spawned", "id", "pid"}
    {"event": "refused", "id", "message"}               the stage run could not be started
    {"event": "exited", "id", "returncode", "wall_s", "user_s", "sys_s", "max_rss_bytes", "peak_bytes", "shared_bytes",
     "written_bytes", "swept"}
    {"event": "crashed", "traceback"}                   a bug in this program

Each stage run is a session. This process is a subreaper, so all leftovers of a stage run become its children,
daemons too. When the first process of a stage run has ended, the rest of it is terminated and shortly after killed. Only
then is it reported as exited: its GPUs and files are free. A process belongs to a stage run by session, by descent, or by
a variable in its environment. A daemon that has left all three is killed when this program ends. The program ends, with
all of its processes, when the other end of the socket is closed for any reason. Signals to the pipeline do not reach it:
it has its own session and ignores them.

With `measure`, the memory of all processes of a stage run is sampled while they run. A page that several of them share
counts once (`Pss`), so the sum is the machine's memory in use. Sampling takes at most 1% of the time, becomes rare in a
long run, and is repeated before a stage run is ended. For a single process, the kernel's own peak covers the time
between samples. /dev/shm is measured as a whole, so files of other programs count too.

This module imports no other module of the package, so that it starts quickly.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time

MARK = "TRTLLM_PIPELINE_STAGE_RUN"
"""Environment variable of every process of a stage run: "GUARDIAN_PID.NUMBER"."""
CLOSE_GRACE_S = 5.0
"""Time for services to stop their servers when the pipeline is gone."""
SWEEP_GRACE_S = 2.0
"""Time for helpers that outlive their parent on purpose (resource trackers) to clean up."""
PACKET_BYTES = 65536
"""Longest message sent as a packet. The kernel's default send buffer takes three times as much."""
MAX_FDS = 64
"""Limit for the file descriptors of one message: claims on a stage run, the machine and its GPUs."""
SHARED = "/dev/shm"  # noqa: S108  looked at only
LOOK_EVERY_S = 0.2
LOOK_SHARE = 100
"""Memory is sampled again after this many times the duration of a sample, but not before 1/50 of the run's age."""
_AGE_SHARE = 50
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_BLOCK_BYTES = 512
"""The kernel's unit for a process's writes to disks. Source: getrusage(2), fs/proc: `ru_oublock`."""
_PR_SET_CHILD_SUBREAPER = 36
_IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT)
# Python ignores the last two. Child processes expect the default for all of them.
_RESTORED = (*_IGNORED, signal.SIGPIPE, signal.SIGXFSZ)


class Process:
    """One line of the process table."""

    __slots__ = ("exit_code", "parent", "session", "start_time", "zombie")

    def __init__(self, stat: bytes) -> None:
        fields = stat[stat.rindex(b")") + 2 :].split()  # the preceding name may contain spaces and parentheses
        self.zombie = fields[0] in b"ZX"
        self.parent = int(fields[1])
        self.session = int(fields[3])
        self.start_time = int(fields[19])
        self.exit_code = int(fields[49])  # a wait status. 0 while it runs, or if it is not our child


def look_up(pid: int) -> Process | None:
    """Process `pid`, or None if it does not exist or is not visible to us."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
        try:
            return Process(os.read(fd, 4096))
        finally:
            os.close(fd)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def process_table(*, zombies: bool = False) -> dict[int, Process]:
    """All living processes by pid; with `zombies`, also those that have ended."""
    entries = ((pid, look_up(pid)) for pid in map(int, filter(str.isdigit, os.listdir("/proc"))))
    return {pid: process for pid, process in entries if process and (zombies or not process.zombie)}


def with_descendants(roots: set[int], table: dict[int, Process]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        children.setdefault(process.parent, []).append(pid)
    family, stack = set(roots), list(roots)
    while stack:
        new = [pid for pid in children.get(stack.pop(), ()) if pid not in family]
        family.update(new)
        stack += new
    return family & table.keys()


def proc_file(pid: int, name: str) -> bytes:
    """A file of a process below /proc. Empty if the process is gone or not accessible."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:  # noqa: PTH123  # pathlib costs more than all of this program
            return file.read()
    except OSError:
        return b""


def is_marked(pid: int, mark: str) -> bool:
    """True if this process started with an environment that marks it as part of the stage run `mark`, e.g. "812.3".

    With a mark ending in a dot: part of any stage run of that guardian.
    """
    end = "" if mark.endswith(".") else "\0"
    return f"\0{MARK}={mark}{end}".encode() in b"\0" + proc_file(pid, "environ") + b"\0"


def memory_of(pid: int) -> int:
    """Bytes of memory in use by a process. Shared pages count by its share, or in full if the kernel reports none."""
    for line in proc_file(pid, "smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    sizes = proc_file(pid, "statm").split()
    return int(sizes[1]) * _PAGE_BYTES if len(sizes) > 1 else 0


def shared_in_use() -> int:
    """Bytes in use in /dev/shm by all processes. 0 if it does not exist."""
    try:
        usage = os.statvfs(SHARED)
    except OSError:
        return 0
    return (usage.f_blocks - usage.f_bfree) * usage.f_frsize


def kill(pid: int, signo: int) -> None:
    """Send a signal to a process that may be gone, or belong to another user by now."""
    try:  # noqa: SIM105  # contextlib costs start-up time
        os.kill(pid, signo)
    except (ProcessLookupError, PermissionError):
        pass


class ProcessSession:
    """One session of processes: its first process is `pid`."""

    def __init__(self, run_id: str, pid: int, mark: str, *, measure: bool) -> None:
        self.id = run_id
        self.pid = pid
        self.mark = mark
        self.begin = time.monotonic()
        self.measure_at = self.begin + LOOK_EVERY_S if measure else float("inf")
        self.peak_bytes = self.shared_bytes = 0
        self.shared_before = shared_in_use() if measure else 0
        self.steps: list[tuple[float, int, bool]] = []  # when, which signal, to all or only the first process
        self.exited: dict[str, object] | None = None  # the message to send when all processes are gone
        self.swept: set[int] = set()
        self.look_at = self.pause = 0.0


class Supervisor:
    """The loop: reads orders, reaps children, keeps deadlines. It waits in a single place, for all of these at once."""

    def __init__(self, fd: int, table: int) -> None:
        self.pid = os.getpid()
        self.table = table
        self.runs: dict[str, ProcessSession] = {}
        self.mains: dict[int, ProcessSession] = {}  # by pid, until it is reaped
        self.number = 0
        self.outbox: list[bytes] = []
        self.open = True
        self.socket = socket.socket(fileno=fd)
        self.socket.setblocking(False)
        os.set_inheritable(fd, False)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for signo in _IGNORED:
            signal.signal(signo, signal.SIG_IGN)
        self.wake, wake = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler, nothing would be written to `wake`

    def loop(self) -> None:
        """Work until the socket is closed and every stage run has ended."""
        poll = select.poll()
        poll.register(self.wake, select.POLLIN)
        while self.open or self.runs:
            if self.open:
                poll.register(self.socket, select.POLLIN | (select.POLLOUT if self.outbox else 0))
            ready = dict(poll.poll(self.milliseconds()))
            if self.wake in ready:
                os.read(self.wake, 4096)
                self.reap()
            if self.open and self.socket.fileno() in ready:
                self.flush()
                if not self.receive():
                    poll.unregister(self.socket)
                    self.close()
            for run in list(self.runs.values()):
                self.step(run)

    def milliseconds(self) -> float | None:
        """Time until the next deadline. None if there is none."""
        due = [run.steps[0][0] for run in self.runs.values() if run.steps]
        due += [run.look_at if run.exited else run.measure_at for run in self.runs.values()]
        due = [when for when in due if when != float("inf")]
        return max(0.0, min(due) - time.monotonic()) * 1e3 if due else None

    # Messages.

    def send(self, event: str, **values: object) -> None:
        """Send without waiting: the other end may itself be waiting for us to read."""
        if self.open:
            self.outbox.append(json.dumps({"event": event, **values}).encode())
            self.flush()

    def flush(self) -> None:
        """Send as much as the socket accepts now."""
        try:
            while self.outbox:
                self.socket.send(self.outbox[0])
                del self.outbox[0]
        except BlockingIOError:
            pass
        except OSError:
            self.outbox.clear()  # the other end is gone, which reading will report

    def receive(self) -> bool:
        """Execute the received orders. Returns False if the other end is closed."""
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self.socket, PACKET_BYTES, MAX_FDS)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                return False
            if not data:
                return False
            if data == b"@":
                with open(fds.pop(), "rb") as file:  # noqa: PTH123
                    file.seek(0)
                    data = file.read()
            message = json.loads(data.decode())  # for bytes, it would first detect their encoding
            do, run = message["do"], self.runs.get(message["id"])
            if do == "spawn":
                self.spawn(message, fds)
                continue
            if run and run.exited is None and run.measure_at != float("inf"):
                self.measure(run)
            if run and do == "signal":
                self.signal(run, message["signal"], whole=message["whole"])
            elif run and do == "end":
                now, grace_s = time.monotonic(), message["grace_s"]
                steps = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
                run.steps = [(now + count * grace_s, signo, True) for count, signo in enumerate(steps)]

    def close(self) -> None:
        """The pipeline is gone: services get a moment to stop their servers, then everything ends."""
        self.open = False
        now = time.monotonic()
        for run in self.runs.values():
            run.steps = [(now, signal.SIGTERM, False), (now + CLOSE_GRACE_S, signal.SIGKILL, True)]

    # Stage runs.

    def spawn(self, message: dict[str, object], fds: list[int]) -> None:
        """Start a stage run. Sends "spawned" or "refused"."""
        run_id, argv, env, log = str(message["id"]), message["argv"], message["env"], str(message["log"])
        assert isinstance(argv, list)
        assert isinstance(env, dict)
        self.number += 1
        mark = f"{self.pid}.{self.number}"
        env[MARK] = mark
        doing = f"open the log {log}"
        output = -1
        try:
            if run_id in self.runs:
                raise FileExistsError(0, "it runs already")
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            doing = f"change to the directory {message['cwd']}"
            os.chdir(str(message["cwd"]))  # for the child: posix_spawn has no option for it
            doing = f"run {argv[0]}"
            # Descriptors received over the socket are inheritable. All others here are not.
            pid = os.posix_spawn(
                argv[0],
                argv,
                env,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, output, 1),
                    (os.POSIX_SPAWN_DUP2, output, 2),
                ],
                setsid=True,
                setsigmask=(),
                setsigdef=_RESTORED,
            )
        except (OSError, ValueError) as error:  # ValueError: a zero byte in an argument
            reason = error.strerror if isinstance(error, OSError) else error
            self.send("refused", id=run_id, message=f"cannot {doing}: {reason}")
        else:
            self.runs[run_id] = self.mains[pid] = ProcessSession(
                run_id, pid, mark, measure=bool(message.get("measure"))
            )
            self.write_table()
            self.send("spawned", id=run_id, pid=pid)
        finally:
            for fd in [*fds, output]:
                if fd >= 0:
                    os.close(fd)
            os.chdir("/")

    def write_table(self) -> None:
        os.pwrite(self.table, b" ".join([b"%d" % run.pid for run in self.runs.values()]) + b"\n", 0)

    def reap(self) -> None:
        """Reap all children that have ended: the stage runs' first processes, and orphans that became ours."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            run = self.mains.pop(pid, None)
            if run:
                run.exited = {
                    "id": run.id,
                    "returncode": os.waitstatus_to_exitcode(status),
                    "wall_s": time.monotonic() - run.begin,
                    "user_s": usage.ru_utime,
                    "sys_s": usage.ru_stime,
                    "max_rss_bytes": usage.ru_maxrss * 1024,
                    "peak_bytes": max(run.peak_bytes, usage.ru_maxrss * 1024),
                    "shared_bytes": run.shared_bytes,
                    "written_bytes": usage.ru_oublock * _BLOCK_BYTES,
                }
            for run in self.runs.values():
                run.look_at = 0.0  # it may be waiting for one of these to end

    def has_others(self) -> bool:
        """True if there is a child other than the stage runs' first processes. Otherwise, the stage runs have no
        leftovers.

        Children of an ended process become ours before it can be reaped, and only we reap, so no child is missed.
        """
        try:
            with open(f"/proc/self/task/{self.pid}/children", "rb") as file:  # noqa: PTH123
                pids = file.read()
        except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
            return True
        return any(int(pid) not in self.mains for pid in pids.split())

    def members(self, run: ProcessSession) -> set[int]:
        table = process_table()
        roots = set()
        for pid in with_descendants({self.pid}, table):  # ours, whatever its number
            process = table[pid]
            adopted = process.parent == self.pid and pid not in self.mains
            if process.session == run.pid or (adopted and is_marked(pid, run.mark)):
                roots.add(pid)
        return with_descendants(roots, table)

    def signal(self, run: ProcessSession, signo: int, *, whole: bool) -> None:
        """Send a signal to all processes of a stage run, or only to its first if that is alive."""
        for pid in self.members(run) if whole else {run.pid} & self.mains.keys():
            kill(pid, signo)

    def measure(self, run: ProcessSession) -> None:
        """Add up the memory of the stage run's processes, and schedule the next sample."""
        began = time.monotonic()
        run.peak_bytes = max(run.peak_bytes, sum(map(memory_of, self.members(run))))
        run.shared_bytes = max(run.shared_bytes, shared_in_use() - run.shared_before)
        now = time.monotonic()
        run.measure_at = now + max(LOOK_EVERY_S, LOOK_SHARE * (now - began), (now - run.begin) / _AGE_SHARE)

    def step(self, run: ProcessSession) -> None:
        """Take the next step for this stage run. Report it when its first process and all others have ended."""
        now = time.monotonic()
        if run.exited is None and run.measure_at <= now:
            self.measure(run)
        while run.steps and run.steps[0][0] <= now:
            _, signo, whole = run.steps.pop(0)
            self.signal(run, signo, whole=whole)
            if signo == signal.SIGKILL:
                run.steps = [(now + 0.1, signo, True)]  # processes forked meanwhile
        if run.exited is None or now < run.look_at:
            return
        left = self.members(run) if self.has_others() else None
        if not left:
            del self.runs[run.id]
            self.write_table()
            self.send("exited", **run.exited, swept=len(run.swept))
            return
        for pid in sorted(left - run.swept):  # parents first, or a shell continues with its next line
            kill(pid, signal.SIGTERM)
        if not run.swept:
            deadline = run.steps[-1][0] if run.steps else now + SWEEP_GRACE_S
            run.steps = [(min(deadline, now + SWEEP_GRACE_S), signal.SIGKILL, True)]
        run.swept |= left
        run.pause = min(2 * run.pause or 0.01, 0.25)
        run.look_at = now + run.pause

    def finish(self) -> None:
        """Kill all descendants of this process until none is left."""
        while True:
            for pid in with_descendants({self.pid}, process_table()) - {self.pid}:
                kill(pid, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(0.01)


def main(fd: int, table: int, *claims: int) -> None:
    """Run until the other end of `fd` is closed. The files in `claims` stay open until this ends."""
    for kept in (table, *claims):
        os.set_inheritable(kept, False)
    for name in os.listdir("/proc/self/fd"):
        # Inherited by the pipeline, but not intended for stage processes.
        if int(name) not in (0, 1, 2, fd, table, *claims):
            try:  # noqa: SIM105
                os.close(int(name))
            except OSError:
                pass  # the descriptor used for this listing
    guardian = Supervisor(fd, table)
    try:
        guardian.loop()
    except BaseException:
        import traceback

        guardian.send("crashed", traceback=traceback.format_exc())
        raise
    finally:
        guardian.finish()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
