"""Disk use of directories, and error messages for a full disk: the file system and its free space."""

from __future__ import annotations

import errno
import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Final

_ROOM: Final = "free some space or choose another --workspace, then run `pipeline resume`; finished stages are kept"
_LIMIT: Final = "raise the limit (ulimit -f unlimited), then run `pipeline resume`; finished stages are kept"
_FULL: Final = {errno.ENOSPC, errno.EDQUOT}


def folder_bytes(folder: str | Path) -> int:
    """Total size of the files below `folder`, which may change meanwhile."""
    total = 0
    with suppress(OSError), os.scandir(folder) as usage:
        for each in usage:
            with suppress(OSError):
                is_folder = each.is_dir(follow_symlinks=False)
                total += folder_bytes(each.path) if is_folder else each.stat(follow_symlinks=False).st_size
    return total


def no_room(error: OSError, path: Path) -> str | None:
    """Describe the full disk or quota that caused `error` while writing at or below `path`. None for other errors."""
    if error.errno == errno.EFBIG:
        return f"files are limited to {_size(resource.getrlimit(resource.RLIMIT_FSIZE)[0])} here (ulimit -f)"
    if error.errno not in _FULL:
        return None
    existing = next(each for each in (path.absolute(), *path.absolute().parents) if os.path.exists(each))
    mount = existing
    while not mount.is_mount():
        mount = mount.parent
    if error.errno == errno.EDQUOT:
        return f"the quota of the file system at {mount} is used up"
    room = os.statvfs(existing)
    if room.f_files and not room.f_favail:
        return f"the file system at {mount} has no free inodes: all {room.f_files} are in use"
    free, whole = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    return f"no space is left on the file system at {mount}: {_size(free)} of {_size(whole)} are free"


def hint(error: OSError) -> str | None:
    """The hint for an error that `no_room` describes. None for other errors."""
    if error.errno == errno.EFBIG:
        return _LIMIT
    return _ROOM if error.errno in _FULL else None


def _size(size_bytes: float) -> str:
    for unit in ("B", "KB", "MB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.4g} GB"
