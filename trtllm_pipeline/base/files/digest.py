"""Content digests of files, and stamps that identify an unchanged file without reading it."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from trtllm_pipeline.base.files.reading import open_fd

_SMALL_BYTES: Final = 1 << 20
# A file changed shortly before it was read could change again with the same times: file systems use the kernel's tick
# for them, up to 10 ms.
_SETTLED_NS: Final = 100_000_000


def digest_file(path: str | Path) -> str:
    """BLAKE3 of a file's content, 64 hexadecimal digits. Big files are mapped and hashed on all cores."""
    from blake3 import blake3

    with os.fdopen(open_fd(path), "rb") as file:
        if os.fstat(file.fileno()).st_size >= _SMALL_BYTES:
            return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
        return blake3(file.read()).hexdigest()


def digest_text(text: str) -> str:
    """BLAKE3 of a text in UTF-8, 64 hexadecimal digits."""
    from blake3 import blake3

    return blake3(text.encode()).hexdigest()


def digests_of_file(path: Path) -> tuple[str, str]:
    """BLAKE3 and SHA-256 of a file's content, in one read."""
    from blake3 import blake3

    ours, theirs = blake3(max_threads=blake3.AUTO), hashlib.sha256()
    _read(path, ours.update, theirs.update)
    return ours.hexdigest(), theirs.hexdigest()


def sha256_of_file(path: Path) -> str:
    """SHA-256 of a file's content, 64 hexadecimal digits."""
    digest = hashlib.sha256()
    _read(path, digest.update)
    return digest.hexdigest()


def _read(path: Path, *takers: Callable[[memoryview], object]) -> None:
    """Pass a file's content to each of `takers`, in pieces."""
    with os.fdopen(open_fd(path), "rb", buffering=0) as file:
        buffer = memoryview(bytearray(min(4 << 20, os.fstat(file.fileno()).st_size + 1)))
        while size := file.readinto(buffer):
            for take in takers:
                take(buffer[:size])


def stamp(path: str) -> str:
    """Size, modification time, change time and inode of a file. The change time cannot be set back."""
    status = os.stat(path)
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"


def stamped_digest(path: str) -> tuple[str | None, str]:
    """A file's stamp and digest. The stamp is None if the file might change without changing its stamp."""
    before = None
    while before != (after := stamp(path)):  # written while it was read
        before, digest = after, digest_file(Path(path))
    changed = [int(part) for part in after.split()[1:3]]
    # After a clock was set back, files from the future have not just changed either.
    settled = min(abs(time.time_ns() - when) for when in changed) > _SETTLED_NS
    return after if settled else None, digest
