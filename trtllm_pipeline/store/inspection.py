"""Compares the files of an artifact with its manifest."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from trtllm_pipeline.domain import Json
from trtllm_pipeline.stages.base import OUT
from trtllm_pipeline.store import manifest
from trtllm_pipeline.store.manifest import FileEntry, Manifest

_GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP})
"""Errors for a missing file or a broken link."""


class Kind(str, Enum):
    """What a discrepancy means for the artifact."""

    DAMAGED = "damaged"
    """The result has changed, so it is no longer used."""
    RECORD = "record"
    """The job, log or another file beside the result has changed."""
    DERIVED = "derived"
    """Compiled Python modules that a server wrote; they can be removed."""
    UNLISTED = "unlisted"
    """A file that is not in the manifest."""
    MODE = "mode"
    """A file of the result is writable or unreadable."""


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """One discrepancy. `path` is relative to the artifact's folder, and empty for the whole artifact."""

    stage: str
    fingerprint: str
    kind: Kind
    path: str
    message: str

    def __str__(self) -> str:
        """One line for people."""
        where = f"{self.stage} {self.fingerprint}"
        return f"{where}: {self.path}: {self.message}" if self.path else f"{where}: {self.message}"

    def to_json(self) -> dict[str, Json]:
        """As `store verify` and `store repair` print it."""
        return {
            "stage": self.stage,
            "fingerprint": self.fingerprint,
            "kind": self.kind.value,
            "path": self.path,
            "message": self.message,
        }


def inspect(folder: Path, *, contents: bool) -> tuple[Discrepancy, ...]:
    """Discrepancies of the artifact in `folder`; with `contents`, every byte of its result is read.

    Raises StateError if it cannot be read or another release wrote it.
    """

    def finding(kind: Kind, path: str, message: str) -> Discrepancy:
        return Discrepancy(folder.parent.name, folder.name, kind, path, message)

    try:
        sealed = manifest.read(folder)
    except manifest.NoManifestError as error:
        return (finding(Kind.DAMAGED, manifest.NAME, error.message.removeprefix(f"{folder}/{manifest.NAME}: ")),)
    try:
        return tuple(finding(*found) for found in _inspect(folder, sealed, contents=contents))
    except OSError as error:
        raise manifest.unreadable(error, folder) from error


_Found = tuple[Kind, str, str]


def _inspect(folder: Path, sealed: Manifest, *, contents: bool) -> Iterator[_Found]:
    there = {str(path.relative_to(folder)): path for path in manifest.walk(folder)}
    there.pop(manifest.NAME)
    for entry in sealed.files:
        name = f"{OUT}/{entry.path}"
        path = there.pop(name, None)
        wrong = "is missing" if path is None else _wrong(path, entry, contents=contents)
        if wrong is not None:
            yield Kind.DAMAGED, name, wrong
        elif path is not None and entry.link is None:
            yield from ((Kind.MODE, name, why) for why in _mode(path))
    for entry in sealed.records:
        path = there.pop(entry.path, None)
        wrong = "is missing" if path is None else _wrong(path, entry, contents=True)
        if wrong is not None:
            yield Kind.RECORD, entry.path, wrong
    for name, path in there.items():
        if path.parent.name == "__pycache__" or path.suffix == ".pyc":
            yield Kind.DERIVED, name, "was compiled by a server"
        elif name.startswith(f"{OUT}/") or sealed.records:  # older manifests list the result alone
            yield Kind.UNLISTED, name, "is not in the manifest"


def _wrong(path: Path, entry: FileEntry, *, contents: bool) -> str | None:
    """The discrepancy of a file or link, or None."""
    found = path.lstat()
    if entry.link is not None:
        if not stat.S_ISLNK(found.st_mode):
            return "is not the link it was"
        if (target := str(path.readlink())) != entry.link:
            return f"leads to {target}, not to {entry.link}"
        return None if path.exists() else f"its target {entry.link} is gone"
    if not stat.S_ISREG(found.st_mode):
        return "is not the file it was"
    if found.st_size != entry.size:
        return f"has {found.st_size} bytes, not {entry.size}"
    if contents:
        from trtllm_pipeline.files.digest import digest_file

        if digest_file(path) != entry.digest:
            return "its content changed"
    return None


def _mode(path: Path) -> Iterator[str]:
    found = path.lstat()
    # A file with other names may be the user's own, whose modes are left alone.
    if found.st_nlink == 1 and found.st_mode & 0o222:
        yield "may be written to"
    if not found.st_mode & 0o400:
        yield "may not be read"


def whole(folder: str, files: tuple[tuple[str, int], ...], manifest_bytes: int) -> bool:
    """Whether the manifest and all files exist with their sizes. Links count as size 0 and must not be broken.

    This is the quick check at every start. Raises StateError if the files cannot be read.
    """
    try:
        if os.stat(f"{folder}/{manifest.NAME}").st_size != manifest_bytes:
            return False
        for name, size in files:
            path = f"{folder}/{OUT}/{name}"
            if os.stat(path).st_size != size and not os.path.islink(path):
                return False
    except OSError as error:
        if error.errno in _GONE:
            return False
        raise manifest.unreadable(error, folder) from error
    return True
