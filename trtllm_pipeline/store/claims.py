"""Claims tell who works on what, across all invocations on one workspace and one machine.

A claim is an flock on a small file. The processes of a stage run inherit the file descriptor, so the claim is held as
long as any of them lives, even if the pipeline itself was killed. It disappears with the last process, and never has to
be removed by hand.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeAlias

from trtllm_pipeline.domain import Exclusive
from trtllm_pipeline.errors import StateError

CLAIMS: Final = "work"
"""Folder of a workspace's claims on stage runs, and of the attempts at them."""
SERVERS: Final = "serve"
"""Folder of a workspace's kept servers, each of which holds the claim `LOCK` in a folder of its own."""
LOCK: Final = "lock"


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
    """The claim on `path`, or None if another process holds it. Never waits."""
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
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Shared and for a moment: whoever wants it just then finds it busy once, and looks again.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def machine_leases() -> Path:
    """Folder of the claims on this machine and its GPUs, shared by all of a user's workspaces.

    Raises StateError if something else, or another user's folder, is in its place.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    # After `su`, and in containers, the variable names a folder that is not there, or another user's.
    if not (os.access(base, os.W_OK | os.X_OK) and os.path.isdir(base)):
        base = tempfile.gettempdir()
    folder = os.path.join(base, f"trtllm-pipeline-{os.getuid()}")
    hint = "move it away, or set XDG_RUNTIME_DIR to a folder that you own"
    try:
        os.mkdir(folder, mode=0o700)
    except FileExistsError:
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise StateError(
                f"{folder} is not a folder that you own; the pipeline keeps its GPU locks there", hint=hint
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
) -> tuple[list[Claim], tuple[str, ...]] | None:
    """Claims on the machine, as `exclusive` says, and on as many GPUs as in `gpus`, with the GPUs' names.

    GPUs that another invocation holds are replaced by `others`; None if too few are left. So two invocations, also on
    different workspaces, never share a GPU, and nothing runs beside a measurement but what may.
    """
    held = (enter or _enter)(exclusive)
    if held is None:
        return None
    names = list[str]()
    for gpu in dict.fromkeys((*gpus, *others)):
        if len(names) == len(gpus):
            break
        claim = take(machine_leases() / f"gpu-{gpu}", remove=False)
        if claim is not None:
            held.append(claim)
            names.append(gpu)
    if len(names) < len(gpus):
        for other in held:
            other.release()
        return None
    return held, tuple(names)


_WORK: Final = "machine"
_MEASURING: Final = "measuring"
_STANDING: Final = "standing"
"""The claim of servers that stand by themselves, besides that of those that work."""
_SHARED: Final = {Exclusive.NONE: _WORK, Exclusive.GPU: _MEASURING}
"""The claim that those of one kind share. Who must be alone takes both for itself."""
_LOOKS: Final = 4
_LOOK_S: Final = 0.002
"""How long others' looks at a claim, each of some microseconds, may be in the way."""


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
    if held is not None and (claim := take(machine_leases() / _STANDING, shared=True, remove=False)) is not None:
        held.append(claim)
    return held


def enter_beside_standing(exclusive: Exclusive) -> list[Claim] | None:
    """The `Entry` of what is done by hand. It may measure beside servers that stand by themselves: one of them is what it asks."""
    if exclusive is Exclusive.NONE:
        return _enter(exclusive)
    claim = _take_soon(machine_leases() / _MEASURING, shared=exclusive is Exclusive.GPU)
    if claim is None:
        return None
    # From now on nothing begins; what works already is waited for.
    if _holders(machine_leases() / _WORK).keys() - _holders(machine_leases() / _STANDING).keys():
        claim.release()
        return None
    return [claim]


def _take_soon(path: Path, *, shared: bool) -> Claim | None:
    for _ in range(_LOOKS):
        claim = take(path, shared=shared, remove=False)
        if claim is not None:
            return claim
        time.sleep(_LOOK_S)
    return None


class SharedEntry:
    """An `Entry` for what one process runs at the same time: those of one kind hold the claims on the machine together.

    It is asked to `let_go` when nothing more begins for now. While they are held nobody who may not be beside them can come, so they need not be looked at for each. Two that must be alone
    are such as the process itself puts together: a server is loaded beside the one before (`execution/scheduler.py`).
    """

    def __init__(self) -> None:
        self._held: dict[Exclusive, list[Claim]] = {}
        self._parts: dict[Exclusive, int] = {}

    def __call__(self, exclusive: Exclusive) -> list[Claim] | None:
        """See `Entry`."""
        if exclusive not in self._held:
            self.let_go()  # it may be in our own way
            found = _enter(exclusive)
            if found is None:
                return None
            self._held[exclusive], self._parts[exclusive] = found, 0
        held = self._held[exclusive]
        self._parts[exclusive] += len(held)
        return [_Part(claim, lambda: self._leave(exclusive)) for claim in held]

    def _leave(self, exclusive: Exclusive) -> None:
        self._parts[exclusive] -= 1

    def let_go(self) -> None:
        """Release what nobody holds any more: until then it may be taken up again, which others do not notice."""
        for exclusive in [each for each, parts in self._parts.items() if not parts]:
            del self._parts[exclusive]
            for claim in self._held.pop(exclusive):
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


def machine_users(
    gpus: Sequence[str], *, exclusive: Exclusive = Exclusive.NONE, beside_standing: bool = False
) -> tuple[str, ...]:
    """The processes that `lease_machine` waits for: id, workspace, command line; those that the kernel tells of, perhaps none.

    `beside_standing`: it was asked to `enter_beside_standing`.
    """
    folder = machine_leases()
    found: dict[int, None] = {}
    standing = _holders(folder / _STANDING) if beside_standing else {}
    for name in (_WORK, _MEASURING, *(f"gpu-{gpu}" for gpu in gpus)):
        # Those that share a claim are in nobody's way who shares it too.
        shares = name == _SHARED.get(exclusive)
        holders = _holders(folder / name).items()
        found |= dict.fromkeys(
            pid for pid, shared in holders if not ((shares and shared) or (name == _WORK and pid in standing))
        )
    return _said(found)


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
    workspace = _workspace_of(pid)
    where = "" if workspace is None else f" in workspace {workspace}"
    return f"process {pid}{where} ({textwrap.shorten(line, 100)})" if line else None


def _workspace_of(pid: int) -> Path | None:
    """The workspace in which a process has claimed a stage run or keeps a server; None where none can be seen."""
    try:
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                claim = each.readlink()
                if claim.suffix == ".lock" and claim.parent.name == CLAIMS:
                    return claim.parent.parent
                if claim.name == LOCK and claim.parent.parent.name == SERVERS:
                    return claim.parents[2]
    except OSError:
        pass
    return None
