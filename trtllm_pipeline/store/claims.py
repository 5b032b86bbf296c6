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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from trtllm_pipeline.errors import StateError


class Claim:
    """A held flock. `fd` may be inherited by child processes; `release` frees it for them as well."""

    __slots__ = ("_remove", "fd", "path")

    def __init__(self, fd: int, path: Path, *, remove: bool) -> None:
        self.fd = fd
        self.path = path
        self._remove = remove

    def release(self) -> None:
        """Release the claim; may be called twice."""
        if self.fd < 0:
            return
        if self._remove:
            # Unlinked while it is held: whoever waits on the old inode notices in `take` that it is not the file any more.
            self.path.unlink(missing_ok=True)
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        os.close(self.fd)
        self.fd = -1


def take(path: Path, *, shared: bool = False, remove: bool = True) -> Claim | None:
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
            current = path.stat().st_ino
        except FileNotFoundError:
            current = -1
        if os.fstat(fd).st_ino == current:
            return Claim(fd, path, remove=remove)
        os.close(fd)


def is_held(path: Path) -> bool:
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
    if not (os.access(base, os.W_OK | os.X_OK) and Path(base).is_dir()):
        base = tempfile.gettempdir()
    folder = Path(base) / f"trtllm-pipeline-{os.getuid()}"
    hint = "move it away, or set XDG_RUNTIME_DIR to a folder that you own"
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise StateError(
                f"{folder} is not a folder that you own; the pipeline keeps its GPU locks there", hint=hint
            ) from None
    except OSError as error:
        raise StateError(f"cannot create {folder}: {error.strerror}", hint=hint) from error
    return folder


def lease_machine(
    gpus: tuple[str, ...], *, exclusive: bool, others: Sequence[str] = ()
) -> tuple[list[Claim], tuple[str, ...]] | None:
    """Claims on the machine (shared, or exclusive) and on as many GPUs as in `gpus`, with the GPUs' names.

    GPUs that another invocation holds are replaced by `others`; None if too few are left. So two invocations, also on
    different workspaces, never share a GPU, and nothing runs beside a measurement.
    """
    folder = machine_leases()
    machine = take(folder / "machine", shared=not exclusive, remove=False)
    if machine is None:
        return None
    held, names = [machine], list[str]()
    for gpu in dict.fromkeys((*gpus, *others)):
        if len(names) == len(gpus):
            break
        claim = take(folder / f"gpu-{gpu}", remove=False)
        if claim is not None:
            held.append(claim)
            names.append(gpu)
    if len(names) < len(gpus):
        for other in held:
            other.release()
        return None
    return held, tuple(names)


def machine_users(gpus: Sequence[str], *, exclusive: bool) -> tuple[str, ...]:
    """The processes that `lease_machine` waits for, as their command lines; those that the kernel tells of, perhaps none."""
    folder = machine_leases()
    found: dict[int, None] = {}
    for name in ("machine", *(f"gpu-{gpu}" for gpu in gpus)):
        # Those that share the machine are in nobody's way who shares it too.
        alone = name == "machine" and not exclusive
        found |= dict.fromkeys(pid for pid, shared in _holders(folder / name) if not (alone and shared))
    found.pop(os.getpid(), None)
    return tuple(filter(None, map(_command_line, found)))


def _holders(path: Path) -> Iterator[tuple[int, bool]]:
    """Process ids of those that hold a claim, with whether they share it. Source: proc_locks(5)."""
    try:
        found = path.stat()
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    for line in lines:
        words = line.split()
        if len(words) > _PLACE and words[1] == "FLOCK" and words[_PLACE] == place:
            yield int(words[4]), words[3] == "READ"


_PLACE: Final = 5
"""Of a lock's device and inode, in a line of /proc/locks."""


def _command_line(pid: int) -> str | None:
    """None of a process that has ended, or belongs to another user."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    line = b" ".join(words).decode(errors="replace").strip()
    return f"process {pid} ({textwrap.shorten(line, 100)})" if line else None
