"""Content digests of files, cached so that unchanged files are not read again."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Final

_SMALL_BYTES: Final = 1 << 20
# A file changed this shortly before it was read could change again without its times showing it: file systems stamp
# with the kernel's tick, up to 10 ms.
_SETTLED_NS: Final = 100_000_000


def digest_file(path: Path) -> str:
    """BLAKE3 of a file's content, 64 hexadecimal digits. Big files are mapped and hashed on all cores."""
    from blake3 import blake3

    if path.stat().st_size < _SMALL_BYTES:
        return blake3(path.read_bytes()).hexdigest()
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


_Stamp = tuple[int, int, int, int]


class StatCache:
    """Digests by path, size, modification time, change time and inode, kept in a file of JSON lines.

    The change time is in it because nobody can set it back. Processes may share the file: each appends whole lines and
    reads what was there when it started. Losing the file, or a line of it, only costs reading again. With `keep` false
    nothing is written.
    """

    def __init__(self, path: Path, *, keep: bool = True) -> None:
        self._path = path
        self._keep = keep
        self._known: dict[str, tuple[_Stamp, str]] = {}
        lines = 0
        try:
            with path.open("rb") as file:
                for line in file:
                    lines += 1
                    try:
                        name, size, mtime, ctime, inode, digest = json.loads(line)
                        self._known[name] = ((size, mtime, ctime, inode), digest)
                    except (ValueError, TypeError, RecursionError):
                        continue  # damaged, or the last line of a process that was killed
        except FileNotFoundError:
            pass
        if keep and lines > 2 * len(self._known) + 100:
            self._compact()
        self._descriptor: int | None = None

    def __enter__(self) -> StatCache:  # noqa: PYI034 - typing.Self is younger than Python 3.10
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; the digests are in it already."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def digest(self, path: str | Path) -> str:
        """BLAKE3 of the file's content, from memory when its stamp is as it was."""
        name = os.path.abspath(path)  # noqa: PTH100 - pathlib would take longer than all the rest
        known = self._known.get(name)
        stamp = _stamp(name)
        if known is not None and known[0] == stamp:
            return known[1]
        while True:
            digest = digest_file(Path(name))
            after = _stamp(name)
            if after == stamp:
                break
            stamp = after  # written to while it was read
        # A clock that was set back leaves files from the future, which did not change just now either.
        now = time.time_ns()
        if min(abs(now - stamp[1]), abs(now - stamp[2])) > _SETTLED_NS:
            self._known[name] = (stamp, digest)
            if not self._keep:
                return digest
            if self._descriptor is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.write(self._descriptor, _line(name, stamp, digest))
        return digest

    def _compact(self) -> None:
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        temporary.write_bytes(b"".join(_line(name, *known) for name, known in self._known.items()))
        temporary.replace(self._path)


def _stamp(path: str) -> _Stamp:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _line(name: str, stamp: _Stamp, digest: str) -> bytes:
    return json.dumps([name, *stamp, digest], ensure_ascii=True).encode() + b"\n"
