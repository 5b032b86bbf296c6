"""Opens the files of a workspace and of the cache. Only regular files are read: a named pipe would block forever."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

KINDS: Final = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
"""The kind of a directory entry that is not a file."""


class NotAFileError(IsADirectoryError):
    """A path is a directory, a named pipe, a socket or a device instead of a file."""

    def __init__(self, path: str | Path, mode: int) -> None:
        kind = KINDS.get(stat.S_IFMT(mode), "something else")
        super().__init__(errno.EISDIR, f"is {kind}, expected a file", os.fspath(path))


def open_fd(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file. With O_CREAT, the file is created if it is missing. Raises NotAFileError, OSError."""
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        # A pipe without a reader, a socket, or a directory opened for writing.
        if error.errno in {errno.ENXIO, errno.EISDIR}:
            raise NotAFileError(path, os.stat(path).st_mode) from error
        raise
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise NotAFileError(path, mode)
    return fd


def open_file(path: str | Path) -> BinaryIO:
    """A regular file opened for reading. Raises as `open_fd`."""
    return os.fdopen(open_fd(path), "rb")


def read_bytes(path: str | Path) -> bytes:
    """Content of a regular file. Raises as `open_fd`."""
    with open_file(path) as file:
        return file.read()


def read_text(path: str | Path, *, errors: str = "strict") -> str:
    """Text of a regular file in UTF-8. Raises as `open_fd`, and UnicodeDecodeError."""
    return read_bytes(path).decode("utf-8", errors)
