"""Claims tell who works on what, across all invocations on one workspace and one machine.

A claim is an flock on a small file. The processes of a stage run inherit the file descriptor, so the claim is held as
long as any of them lives, even if the pipeline itself was killed. It disappears with the last process, and never has to
be removed by hand.
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
"""How long others' looks at a claim, each of some microseconds, may be in the way."""


class Claim:
    """A held flock. `fd` may be inherited by child processes; `release` frees it for them as well."""

    __slots__ = ("_remove", "fd", "path")

    def __init__(self, fd: int, path: str | Path, *, remove: bool) -> None:
        self.fd = fd
        self.path = path
        self._remove = remove

    def release(self) -> None:
        """Release the claim; may be called twice."""
        if self.fd < 0:
            return
        if self._remove:
            # Unlinked while it is held: whoever waits on the old inode notices in `take` that it is not the file any more.
            with suppress(FileNotFoundError):
                os.unlink(self.path)
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        os.close(self.fd)
        self.fd = -1


def take(path: str | Path, *, shared: bool = False, remove: bool = True) -> Claim | None:
    """The claim on `path`, or None if another process holds it. Waits only for others' looks, some milliseconds at most."""
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
    """Whether some process has the claim on `path`. Writes nothing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Shared and for a moment: whoever wants it just then finds it busy once, and `take` looks again.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def machine_leases() -> Path:
    """Directory of the claims on this machine and its GPUs, shared by all of a user's workspaces.

    Raises StateError if something else, or another user's directory, is in its place.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    # After `su`, and in containers, the variable names a directory that is not there, or another user's.
    if not (os.access(base, os.W_OK | os.X_OK) and os.path.isdir(base)):
        base = tempfile.gettempdir()
    folder = os.path.join(base, f"trtllm-pipeline-{os.getuid()}")
    hint = "move it away, or set XDG_RUNTIME_DIR to a directory that you own"
    try:
        os.mkdir(folder, mode=0o700)
    except FileExistsError:
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise StateError(
                f"{folder} is not a directory that you own; the pipeline keeps its GPU locks there", hint=hint
            ) from None
    except OSError as error:
        raise StateError(f"cannot create {folder}: {error.strerror}", hint=hint) from error
    return Path(folder)


Entry: TypeAlias = Callable[[Exclusive], "list[Claim] | None"]
"""Takes the claims on the machine itself, beside those only that its argument allows; None if others are there."""


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
    """Claims on the machine, as `exclusive` says, and on as many GPUs as in `gpus`, with the GPUs' names.

    GPUs that another invocation holds are replaced by `others`; None if too few are left. So two invocations, also on
    different workspaces, never share a GPU, and nothing runs beside a measurement but what may.

    With a `place` it is also None as long as others wait whose way it would be in. Then it waits itself, in the name of
    `by`, and is to be asked for again, or left.
    """
    wanted = tuple(dict.fromkeys((*gpus, *others))) if gpus else ()
    asked = LeaseWanted(exclusive, len(gpus), frozenset(wanted))
    if place is not None and place.is_behind(asked):
        leased = None
    else:
        enter = enter or (enter_beside_standing if beside_standing else _enter)
        leased = _lease(wanted, len(gpus), exclusive, enter)
    if place is not None:
        place.settle(asked, by, got_it=leased is not None, beside_standing=beside_standing)
    return leased


def _lease(
    wanted: tuple[str, ...], count: int, exclusive: Exclusive, enter: Entry
) -> tuple[list[Claim], tuple[str, ...]] | None:
    held = enter(exclusive)
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
"""The claim of servers that stand by themselves, besides that of those that work; and, with a GPU's name, on each of their GPUs."""
_SHARED: Final = {Exclusive.NONE: _WORK, Exclusive.GPU: _MEASURING}
"""The claim that those of one kind share. Who must be alone takes both for itself."""


def _enter(exclusive: Exclusive) -> list[Claim] | None:
    folder = machine_leases()
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
        else:  # nobody has it, and whoever takes it from now on sees ours
            claim.release()
    return held


def enter_standing(exclusive: Exclusive) -> list[Claim] | None:
    """The `Entry` of a server that stands by itself, whoever asks it."""
    held = _enter(exclusive)
    if held is not None and (claim := _take_soon(machine_leases() / _STANDING, shared=True)) is not None:
        held.append(claim)
    return held


def _standing(gpu: str) -> Path:
    return machine_leases() / f"{_STANDING}-{gpu}"


def enter_beside_standing(exclusive: Exclusive) -> list[Claim] | None:
    """The `Entry` of what may measure beside servers that stand by themselves, because it may ask one of them."""
    if exclusive is Exclusive.NONE:
        return _enter(exclusive)
    claim = _take_soon(machine_leases() / _MEASURING, shared=exclusive is Exclusive.GPU)
    if claim is None:
        return None
    # From now on nothing starts; what works already is waited for.
    if _holders(machine_leases() / _WORK).keys() - _holders(machine_leases() / _STANDING).keys():
        claim.release()
        return None
    return [claim]


def _take_soon(path: Path, *, shared: bool) -> Claim | None:
    for _ in range(_LOOKS):
        claim = _take(path, shared=shared, remove=False)
        if claim is not None:
            return claim
        time.sleep(_LOOK_S)
    return None


class SharedEntry:
    """An `Entry` for what one process runs at the same time: those of one kind hold the claims on the machine together.

    It is asked to `let_go` when nothing more starts for now. While they are held nobody who may not be beside them can come, so they need not be looked at for each. Two that must be alone
    are such as the process itself puts together: a server is loaded beside the one before (`orchestrate/run/scheduler.py`).
    """

    def __init__(self) -> None:
        self._held: dict[tuple[Exclusive, Entry], list[Claim]] = {}
        self._parts: dict[tuple[Exclusive, Entry], int] = {}

    def __call__(self, exclusive: Exclusive) -> list[Claim] | None:
        """See `Entry`."""
        return self._enter(exclusive, _enter)

    def beside_standing(self, exclusive: Exclusive) -> list[Claim] | None:
        """The same as `enter_beside_standing`."""
        if (exclusive, _enter) in self._held:  # which keeps more away
            return self._enter(exclusive, _enter)
        return self._enter(exclusive, enter_beside_standing)

    def _enter(self, exclusive: Exclusive, enter: Entry) -> list[Claim] | None:
        kind = exclusive, enter
        if kind not in self._held:
            self.let_go()  # it may be in our own way
            found = enter(exclusive)
            if found is None:
                return None
            self._held[kind], self._parts[kind] = found, 0
        held = self._held[kind]
        self._parts[kind] += len(held)
        return [_Part(claim, lambda: self._leave(kind)) for claim in held]

    def _leave(self, kind: tuple[Exclusive, Entry]) -> None:
        self._parts[kind] -= 1

    def let_go(self) -> None:
        """Release what nobody holds any more: until then it may be taken up again, which others do not notice."""
        for kind in [each for each, parts in self._parts.items() if not parts]:
            del self._parts[kind]
            for claim in self._held.pop(kind):
                claim.release()


class _Part(Claim):
    """What one of several has of a claim that they hold together."""

    __slots__ = ("_leave",)

    def __init__(self, whole: Claim, leave: Callable[[], None]) -> None:
        super().__init__(whole.fd, whole.path, remove=False)
        self._leave = leave

    def release(self) -> None:
        """Leave it."""
        if self.fd >= 0:
            self.fd = -1
            self._leave()


class LeaseWanted(NamedTuple):
    """What somebody asks `lease_machine` for."""

    exclusive: Exclusive
    gpus: int
    among: frozenset[str]
    """The GPUs that would do."""

    def is_in_the_way_of(self, waiter: LeaseWanted) -> bool:
        """Whether the other might come to it later, or never, if this started before."""
        beside = self.exclusive is waiter.exclusive and self.exclusive in _SHARED
        return not beside or not self.among.isdisjoint(waiter.among)


class WaitingPlace:
    """The place of one invocation among those that wait: who came later starts nothing that would be in its way.

    Else those that share a claim could follow one another without end, and whoever must be alone would never come to it. A place
    is a claim on a file of its own, whose name says since when and whose text says for what. So it is gone with its
    process, and as nobody waits for who came later, there is no circle. Who waits for a server that stands by itself has
    no place: that ends when a person says so.

    An invocation has one place. What else it would begin waits behind it as well: its scheduler knows what comes first.
    """

    def __init__(self) -> None:
        self._folder = ""
        self._claim: Claim | None = None
        self._asked: LeaseWanted | None = None
        self.by: str | None = None
        """Who waits in it; None where nobody does."""

    def is_behind(self, asked: LeaseWanted) -> bool:
        """Whether others come first. It is one system call where nobody waits."""
        return self._in_own_way(asked) or next(self._before(asked), None) is not None

    def settle(self, asked: LeaseWanted, by: str, *, got_it: bool, beside_standing: bool = False) -> None:
        """Wait, or wait no longer, now that this was asked for."""
        if self._asked is not None and asked != self._asked:
            return
        if got_it or self._never_ends(asked, beside_standing=beside_standing):
            self.leave()
            return
        if self._claim is None:
            self._take(asked)
        self.by = by if self._claim is not None else None

    def leave(self) -> None:
        """Wait no longer; may be called twice."""
        if self._claim is None:
            return
        self._claim.release()
        self._claim = self._asked = self.by = None
        with suppress(OSError):  # others wait as well
            Path(self._waiting).rmdir()

    def said(self, gpus: Sequence[str], exclusive: Exclusive) -> tuple[Sequence[str], Exclusive, tuple[str, ...]]:
        """Whom `machine_users` is to look for, and who is told besides: those that come first."""
        asked = LeaseWanted(exclusive, len(gpus), frozenset(gpus))
        if self._asked is not None and self._in_own_way(asked):
            gpus, exclusive, asked = tuple(self._asked.among), self._asked.exclusive, self._asked
        before = dict.fromkeys(pid for path in self._before(asked) for pid in _holders(path))
        return gpus, exclusive, tuple(f"{each}, which waits as well and came first" for each in _said(before))

    def _in_own_way(self, asked: LeaseWanted) -> bool:
        return self._asked is not None and asked != self._asked and asked.is_in_the_way_of(self._asked)

    @property
    def _waiting(self) -> str:
        if not self._folder:
            self._folder = str(machine_leases() / _WAITING)
        return self._folder

    def _before(self, asked: LeaseWanted) -> Iterator[Path]:
        try:
            names = os.listdir(self._waiting)
        except OSError:  # nobody waits
            return
        ours = os.path.basename(self._claim.path) if self._claim is not None and asked == self._asked else None
        for path in (Path(self._waiting, name) for name in names if ours is None or name < ours):
            if (waits := _waits_for(path)) is not None and asked.is_in_the_way_of(waits):
                yield path

    def _never_ends(self, asked: LeaseWanted, *, beside_standing: bool) -> bool:
        """Whether servers that stand by themselves hold what is waited for: until a person stops them."""
        if asked.exclusive is not Exclusive.NONE and not beside_standing:
            path = machine_leases() / _STANDING
            # A place that is there is not to be lost by others' looks.
            looked = take(path, remove=False) if self._claim is None else _take_soon(path, shared=False)
            if looked is None:
                return True
            looked.release()
        return len(asked.among) - sum(is_held(_standing(gpu)) for gpu in asked.among) < asked.gpus

    def _take(self, asked: LeaseWanted) -> None:
        with suppress(OSError):  # where there is no room for it, it is waited without
            Path(self._waiting).mkdir(exist_ok=True)
            claim = take(f"{self._waiting}/{time.monotonic_ns():020}-{os.getpid()}")
            if claim is not None:
                self._claim, self._asked = claim, asked
                os.write(claim.fd, " ".join((asked.exclusive.value, str(asked.gpus), *asked.among)).encode())


_WAITING: Final = "waiting"
"""Directory of places, which is there only as long as somebody waits: who does not, looks for nothing more."""


def _waits_for(path: Path) -> LeaseWanted | None:
    """What is waited for in a place; None where nobody does. What a killed process left is removed."""
    with suppress(OSError, ValueError):  # left meanwhile, or just being taken
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
    """The processes that `lease_machine` waits for: id, workspace, command line; those that the kernel tells of, perhaps none.

    `gpus` are all that would do. `beside_standing`: it was asked to `enter_beside_standing`.
    """
    folder = machine_leases()
    first: tuple[str, ...] = ()
    if place is not None:
        gpus, exclusive, first = place.said(gpus, exclusive)
    found: dict[int, None] = {}
    standing = _holders(folder / _STANDING) if beside_standing else {}
    for name in (_WORK, _MEASURING, *(f"gpu-{gpu}" for gpu in gpus)):
        # Those that share a claim are in nobody's way who shares it too.
        shares = name == _SHARED.get(exclusive)
        holders = _holders(folder / name).items()
        found |= dict.fromkeys(
            pid for pid, shared in holders if not ((shares and shared) or (name == _WORK and pid in standing))
        )
    return (*_said(found), *first)


def users(path: Path) -> tuple[str, ...]:
    """The processes that have the claim on `path`, told as by `machine_users`."""
    return _said(_holders(path))


def _said(pids: Iterable[int]) -> tuple[str, ...]:
    return tuple(filter(None, (_said_of(pid) for pid in pids if pid != os.getpid())))


def _holders(path: Path) -> dict[int, bool]:
    """Process ids of those that hold a claim, with whether they share it. Source: proc_locks(5)."""
    try:
        found = path.stat()
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    locks = (words for line in lines if len(words := line.split()) > _PLACE)
    return {int(words[4]): words[3] == "READ" for words in locks if words[1] == "FLOCK" and words[_PLACE] == place}


_PLACE: Final = 5
"""Of a lock's device and inode, in a line of /proc/locks."""


def _said_of(pid: int) -> str | None:
    """None of a process that has ended, or belongs to another user."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    line = b" ".join(words).decode(errors="replace").strip()
    if not line:
        return None
    workspace, server = _place_of(pid)
    where = "" if workspace is None else f" in workspace {workspace}"
    if server is not None:  # it continues until somebody stops it
        stop = f"pipeline serve stop {server} -w {shlex.quote(str(workspace))}"
        return f"the managed server {server}{where} (process {pid}; {stop} ends it)"
    return f"process {pid}{where} ({textwrap.shorten(line, 100)})"


def _place_of(pid: int) -> tuple[Path | None, str | None]:
    """The workspace in which a process has claimed a stage run or keeps a server, and which server; None where none can be seen."""
    try:
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                claim = each.readlink()
                if claim.suffix == ".lock" and claim.parent.name == CLAIMS:
                    return claim.parent.parent, None
                if claim.name == LOCK and claim.parent.parent.name == SERVERS:
                    return claim.parents[2], claim.parent.name
    except OSError:
        pass
    return None, None
