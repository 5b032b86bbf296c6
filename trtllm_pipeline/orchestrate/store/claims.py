"""Claims show which process works on which stage run, across all invocations on one workspace and one machine.

A claim is an flock on a small file. The processes of a stage run inherit the file descriptor, so the claim lasts as
long as any of them, even if the pipeline is killed. It ends with the last process and never needs manual removal.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import stat
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from trtllm_pipeline.base import Exclusive, StateError, reading

CLAIMS: Final = "work"
"""Directory of a workspace's claims on stage runs, and of the attempts at them."""
SERVERS: Final = "serve"
"""Directory of a workspace's managed servers, each of which holds the claim `LOCK` in its own directory."""
LOCK: Final = "lock"
_LOOKS: Final = 4
_LOOK_S: Final = 0.002
"""How long to retry while another process checks the claim, which takes microseconds."""


class Claim:
    """A held flock, released at the end of a with block. Child processes may inherit `fd`, `release` frees it for them."""

    __slots__ = ("_remove", "fd", "path")

    def __init__(self, fd: int, path: str | Path, *, remove: bool) -> None:
        self.fd = fd
        self.path = path
        self._remove = remove

    def __enter__(self) -> None:
        """It is held already."""

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the claim. May be called twice."""
        if self.fd < 0:
            return
        if self._remove:
            # Unlinked while held: a process waiting on the old inode notices in `take` that the file has changed.
            with suppress(FileNotFoundError):
                os.unlink(self.path)
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        os.close(self.fd)
        self.fd = -1


def take(path: str | Path, *, shared: bool = False, remove: bool = True) -> Claim | None:
    """Take the claim on `path`. None if another process holds it. Waits some milliseconds at most, for other processes' checks."""
    for _ in range(_LOOKS - 1):
        claim = _take(path, shared=shared, remove=remove)
        if claim is not None or shared or is_held(path):
            return claim
        time.sleep(_LOOK_S)
    return _take(path, shared=shared, remove=remove)


def _take(path: str | Path, *, shared: bool, remove: bool) -> Claim | None:
    mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        try:
            current = os.stat(path).st_ino
        except FileNotFoundError:
            current = -1
        if os.fstat(fd).st_ino == current:
            return Claim(fd, path, remove=remove)
        os.close(fd)


def is_held(path: str | Path) -> bool:
    """Return True if a process holds the claim on `path`. Does not write."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Shared and brief: a process that takes it just then fails once, and `take` retries.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def machine_leases() -> Path:
    """Return the directory of claims on this machine and its GPUs, shared by all of a user's workspaces.

    Raises StateError if another file or another user's directory has its name.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    # After `su`, and in containers, the variable names a missing directory, or another user's.
    if not (os.access(base, os.W_OK | os.X_OK) and os.path.isdir(base)):
        base = tempfile.gettempdir()
    folder = os.path.join(base, f"trtllm-pipeline-{os.getuid()}")
    hint = "move it away, or set XDG_RUNTIME_DIR to a directory that you own"
    try:
        os.mkdir(folder, mode=0o700)
    except FileExistsError:
        status = os.lstat(folder)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise StateError(
                f"{folder} is not a directory that you own; the pipeline keeps its GPU locks there", hint=hint
            ) from None
    except OSError as error:
        raise StateError(f"cannot create {folder}: {error.strerror}", hint=hint) from error
    return Path(folder)


Entry: TypeAlias = Callable[[Exclusive, bool], "list[Claim] | None"]
"""Takes the claims on the machine itself, alongside only those that `exclusive` and `beside_standing` allow. None if others
exist."""


def lease_machine(
    gpus: tuple[str, ...],
    *,
    exclusive: Exclusive = Exclusive.NONE,
    others: Sequence[str] = (),
    enter: Entry | None = None,
    beside_standing: bool = False,
    place: WaitingPlace | None = None,
    by: str = "",
) -> tuple[list[Claim], tuple[str, ...]] | None:
    """Claim the machine, as `exclusive` says, and as many GPUs as in `gpus`. Returns claims and GPU names.

    GPUs that another invocation holds are replaced by `others`. None if too few are left. So two invocations, even on
    different workspaces, never share a GPU, and only allowed tasks run alongside a measurement. `beside_standing` allows
    standing servers, because the measurement may use one of them.

    With a `place`, it is also None while this lease would block earlier waiters. It then waits itself, in the name of
    `by`: call again, or leave the place.
    """
    wanted = tuple(dict.fromkeys((*gpus, *others))) if gpus else ()
    request = LeaseWanted(exclusive, len(gpus), frozenset(wanted))
    if place is not None and place.is_behind(request):
        leased = None
    else:
        leased = _lease(wanted, len(gpus), exclusive, enter or _enter, beside_standing=beside_standing)
    if place is not None:
        place.settle(request, by, got_it=leased is not None, beside_standing=beside_standing)
    return leased


def _lease(
    wanted: tuple[str, ...], count: int, exclusive: Exclusive, enter: Entry, *, beside_standing: bool
) -> tuple[list[Claim], tuple[str, ...]] | None:
    held = enter(exclusive, beside_standing)
    if held is None:
        return None
    names = list[str]()
    for gpu in wanted:
        if len(names) == count:
            break
        claim = take(machine_leases() / f"gpu-{gpu}", remove=False)
        if claim is not None:
            held.append(claim)
            names.append(gpu)
            if enter is enter_standing and (mark := _take_soon(_standing(gpu), shared=False)) is not None:
                held.append(mark)
    if len(names) < count:
        for other in held:
            other.release()
        return None
    return held, tuple(names)


_WORK: Final = "machine"
_MEASURING: Final = "measuring"
_STANDING: Final = "standing"
"""The claim of standing servers, in addition to the shared one; with a GPU's name, the claim on each of their GPUs."""
_SHARED: Final = {Exclusive.NONE: _WORK, Exclusive.GPU: _MEASURING}
"""The claim that tasks of one kind share. An exclusive task takes both kinds."""


def _enter(exclusive: Exclusive, beside_standing: bool) -> list[Claim] | None:
    folder = machine_leases()
    if beside_standing and exclusive is not Exclusive.NONE:
        measures = _take_soon(folder / _MEASURING, shared=exclusive is Exclusive.GPU)
        # From now on no task starts; wait for running ones.
        if measures and _holders(folder / _WORK).keys() - _holders(folder / _STANDING).keys():
            measures.release()
            return None
        return None if measures is None else [measures]
    shared = _SHARED.get(exclusive)
    held: list[Claim] = []
    for name in sorted((_WORK, _MEASURING), key=lambda name: name != shared):
        claim = _take_soon(folder / name, shared=name == shared)
        if claim is None:
            for other in held:
                other.release()
            return None
        if shared is None or name == shared:
            held.append(claim)
        else:  # it is free, and later processes see our claim
            claim.release()
    return held


def enter_standing(exclusive: Exclusive, beside_standing: bool) -> list[Claim] | None:
    """The `Entry` of a standing server, which any process may use."""
    held = _enter(exclusive, beside_standing)
    if held is not None and (claim := _take_soon(machine_leases() / _STANDING, shared=True)) is not None:
        held.append(claim)
    return held


def _standing(gpu: str) -> Path:
    return machine_leases() / f"{_STANDING}-{gpu}"


def _take_soon(path: Path, *, shared: bool) -> Claim | None:
    for _ in range(_LOOKS):
        claim = _take(path, shared=shared, remove=False)
        if claim is not None:
            return claim
        time.sleep(_LOOK_S)
    return None


class SharedEntry:
    """An `Entry` for concurrent tasks of one process: tasks of one kind share the claims on the machine.

    Call `let_go` when no more tasks start for now. While the claims are held, conflicting tasks cannot start, so they need
    not be checked for each task. Two exclusive tasks share them only if the process itself combines them: a server is
    loaded alongside the previous one (`orchestrate/run/scheduler.py`).
    """

    def __init__(self) -> None:
        self._held: dict[tuple[Exclusive, bool], list[Claim]] = {}
        self._parts: dict[tuple[Exclusive, bool], int] = {}

    def __call__(self, exclusive: Exclusive, beside_standing: bool) -> list[Claim] | None:
        kind = exclusive, beside_standing and (exclusive, False) not in self._held  # that excludes more
        if kind not in self._held:
            self.let_go()  # our own claim may be the obstacle
            claims = _enter(*kind)
            if claims is None:
                return None
            self._held[kind], self._parts[kind] = claims, 0
        held = self._held[kind]
        self._parts[kind] += len(held)
        return [_Part(claim, lambda: self._leave(kind)) for claim in held]

    def _leave(self, kind: tuple[Exclusive, bool]) -> None:
        self._parts[kind] -= 1

    def let_go(self) -> None:
        """Release claims that tasks no longer hold. Until then, a new task can reuse them, unnoticed by others."""
        for kind in [each for each, parts in self._parts.items() if not parts]:
            del self._parts[kind]
            for claim in self._held.pop(kind):
                claim.release()


class _Part(Claim):
    """One holder's part of a shared claim."""

    __slots__ = ("_leave",)

    def __init__(self, whole: Claim, leave: Callable[[], None]) -> None:
        super().__init__(whole.fd, whole.path, remove=False)
        self._leave = leave

    def release(self) -> None:
        if self.fd >= 0:
            self.fd = -1
            self._leave()


class LeaseWanted(NamedTuple):
    """A request to `lease_machine`."""

    exclusive: Exclusive
    gpus: int
    among: frozenset[str]

    def is_in_the_way_of(self, waiter: LeaseWanted) -> bool:
        """Return True if this request, if started first, might delay the other one."""
        beside = self.exclusive is waiter.exclusive and self.exclusive in _SHARED
        return not beside or not self.among.isdisjoint(waiter.among)


class WaitingPlace:
    """The place of one invocation in the waiting line: later ones start no task that would block it.

    Otherwise, tasks that share a claim could follow one another forever, and an exclusive task would starve. A place is a
    claim on its own file, whose name has the start time and whose text has the request. So it ends with its process. Since
    earlier ones never wait for later ones, there is no deadlock. An invocation that waits for a standing server has no
    place: only a user ends that server.

    An invocation has one place. Its other tasks wait behind it too: its scheduler knows the order.
    """

    def __init__(self) -> None:
        self._claim: Claim | None = None
        self._request: LeaseWanted | None = None
        self.by: str | None = None
        """The stage run that waits in it. None if none does."""

    def is_behind(self, request: LeaseWanted) -> bool:
        """Return True if others come first."""
        return self._in_own_way(request) or next(self._before(request), None) is not None

    def settle(self, request: LeaseWanted, by: str, *, got_it: bool, beside_standing: bool = False) -> None:
        """Start or stop waiting after a request."""
        if self._request is not None and request != self._request:
            return
        if got_it or self._never_ends(request, beside_standing=beside_standing):
            self.leave()
            return
        if self._claim is None:
            self._take(request)
        self.by = by if self._claim is not None else None

    def leave(self) -> None:
        """Stop waiting. May be called twice."""
        if self._claim is None:
            return
        folder = Path(self._claim.path).parent
        self._claim.release()
        self._claim = self._request = self.by = None
        with suppress(OSError):  # others are waiting too
            folder.rmdir()

    def blockers(self, gpus: Sequence[str], exclusive: Exclusive) -> tuple[Sequence[str], Exclusive, tuple[str, ...]]:
        """Return the request for `machine_users`, and descriptions of the earlier waiters."""
        request = LeaseWanted(exclusive, len(gpus), frozenset(gpus))
        if self._request is not None and self._in_own_way(request):
            gpus, exclusive, request = tuple(self._request.among), self._request.exclusive, self._request
        before = dict.fromkeys(pid for path in self._before(request) for pid in _holders(path))
        return gpus, exclusive, tuple(f"{each}, which is also waiting and came first" for each in _descriptions(before))

    def _in_own_way(self, request: LeaseWanted) -> bool:
        return self._request is not None and request != self._request and request.is_in_the_way_of(self._request)

    def _before(self, request: LeaseWanted) -> Iterator[Path]:
        folder = machine_leases() / _WAITING
        try:
            names = os.listdir(folder)
        except OSError:  # no process waits
            return
        ours = os.path.basename(self._claim.path) if self._claim is not None and request == self._request else None
        for path in (folder / name for name in names if ours is None or name < ours):
            if (waits := _waits_for(path)) is not None and request.is_in_the_way_of(waits):
                yield path

    def _never_ends(self, request: LeaseWanted, *, beside_standing: bool) -> bool:
        """Return True if managed servers hold the requested leases. Only a user stops them."""
        if request.exclusive is not Exclusive.NONE and not beside_standing:
            path = machine_leases() / _STANDING
            # Keep an existing place despite other processes' checks.
            looked = take(path, remove=False) if self._claim is None else _take_soon(path, shared=False)
            if looked is None:
                return True
            looked.release()
        return len(request.among) - sum(is_held(_standing(gpu)) for gpu in request.among) < request.gpus

    def _take(self, request: LeaseWanted) -> None:
        with suppress(OSError):  # on a full disk, wait without a place
            folder = machine_leases() / _WAITING
            folder.mkdir(exist_ok=True)
            claim = take(folder / f"{time.monotonic_ns():020}-{os.getpid()}")
            if claim is not None:
                self._claim, self._request = claim, request
                os.write(claim.fd, " ".join((request.exclusive.value, str(request.gpus), *request.among)).encode())


_WAITING: Final = "waiting"
"""Directory of places. It exists only while a process waits, so that other processes skip the rest."""


def _waits_for(path: Path) -> LeaseWanted | None:
    """Return the request of a place. None if no process waits there. Removes the place of a killed process."""
    with suppress(OSError, ValueError):  # released meanwhile, or just being taken
        left = take(path)
        if left is None:
            exclusive, gpus, *among = reading.read_text(path).split()
            return LeaseWanted(Exclusive(exclusive), int(gpus), frozenset(among))
        left.release()
        path.parent.rmdir()
    return None


def machine_users(
    gpus: Sequence[str],
    *,
    exclusive: Exclusive = Exclusive.NONE,
    beside_standing: bool = False,
    place: WaitingPlace | None = None,
) -> tuple[str, ...]:
    """Return the processes that `lease_machine` waits for: id, workspace, command line. Empty if the kernel shows none.

    `gpus` are all acceptable ones.
    """
    folder = machine_leases()
    first: tuple[str, ...] = ()
    if place is not None:
        gpus, exclusive, first = place.blockers(gpus, exclusive)
    pids: dict[int, None] = {}
    standing = _holders(folder / _STANDING) if beside_standing else {}
    for name in (_WORK, _MEASURING, *(f"gpu-{gpu}" for gpu in gpus)):
        # Processes that share a claim do not block others that share it.
        shares = name == _SHARED.get(exclusive)
        holders = _holders(folder / name).items()
        pids |= dict.fromkeys(
            pid for pid, shared in holders if not ((shares and shared) or (name == _WORK and pid in standing))
        )
    return (*_descriptions(pids), *first)


def users(path: Path) -> tuple[str, ...]:
    """Return the processes that hold the claim on `path`, described as by `machine_users`."""
    return _descriptions(_holders(path))


def _descriptions(pids: Iterable[int]) -> tuple[str, ...]:
    return tuple(filter(None, (_description(pid) for pid in pids if pid != os.getpid())))


def _holders(path: Path) -> dict[int, bool]:
    """Return process ids that hold a claim -> whether they share it. Source: proc_locks(5)."""
    try:
        status = path.stat()
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    locks = (words for line in lines if len(words := line.split()) > _PLACE)
    return {int(words[4]): words[3] == "READ" for words in locks if words[1] == "FLOCK" and words[_PLACE] == place}


_PLACE: Final = 5
"""A lock's device and inode in a line of /proc/locks."""


def _description(pid: int) -> str | None:
    """Describe a process. None if it has ended or belongs to another user."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    line = b" ".join(words).decode(errors="replace").strip()
    if not line:
        return None
    workspace, server = _place_of(pid)
    where = "" if workspace is None else f" in workspace {workspace}"
    if server is not None:  # it runs until a user stops it
        stop = f"pipeline serve stop {server} -w {shlex.quote(str(workspace))}"
        return f"the managed server {server}{where} (process {pid}; {stop} ends it)"
    return f"process {pid}{where} ({textwrap.shorten(line, 100)})"


def _place_of(pid: int) -> tuple[Path | None, str | None]:
    """Return the workspace of a process's claim or managed server, and the server. None if not visible."""
    try:
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed in the meantime
                claim = each.readlink()
                if claim.suffix == ".lock" and claim.parent.name == CLAIMS:
                    return claim.parent.parent, None
                if claim.name == LOCK and claim.parent.parent.name == SERVERS:
                    return claim.parents[2], claim.parent.name
    except OSError:
        pass
    return None, None
