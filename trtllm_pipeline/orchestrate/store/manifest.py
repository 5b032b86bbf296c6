"""The manifest of an artifact: its files with sizes and digests, and its provenance. Checks files against it.

The manifest is the last file written before publication. A directory without a valid manifest is not an artifact.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import Fingerprint, Json, StateError, canonical, digest_file, fingerprint, reading, writing
from trtllm_pipeline.base import digest as digests
from trtllm_pipeline.tensorrt import OUT

SCHEMA: Final = 1
NAME: Final = "manifest.json"
ENVELOPE: Final = "provenance.intoto.jsonl"
"""The signed statement of an artifact, written after publication. `provenance/` checks it."""
_GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP})
"""Errors for a missing file or a broken link."""


class NoManifestError(StateError):
    """The directory has no valid manifest, so it is not an artifact."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file or symbolic link below its directory. A link has a target and no digest."""

    path: str
    size: int
    digest: str | None = None
    link: str | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The data of a published artifact. Its fingerprint is the hash of the canonical text `key`."""

    stage: str
    fingerprint: Fingerprint
    key: str
    label: str
    files: tuple[FileEntry, ...]
    provenance: Mapping[str, Json]
    records: tuple[FileEntry, ...] = ()
    """Files next to the result, such as the job and the log."""

    @property
    def size_bytes(self) -> int:
        """Sum of the sizes of its files."""
        return sum(entry.size for entry in self.files)

    @property
    def tree(self) -> str:
        """BLAKE3 of all files together: of the lines "DIGEST  PATH", ordered by the paths' bytes.

        Without links, `find . -type f | cut -c3- | LC_ALL=C sort | xargs -r b3sum | b3sum` gives the same.
        """
        lines = sorted((entry.path.encode(), content_digest(entry)) for entry in self.files)
        return digests.digest_text("".join(f"{digest}  {path.decode()}\n" for path, digest in lines))

    @property
    def anonymous(self) -> Manifest:
        """Return the same without user and host, for publication."""
        return replace(self, provenance={name: value for name, value in self.provenance.items() if name != "made_by"})

    def to_json(self) -> dict[str, Json]:
        """Return the file's content, with the key as a readable tree."""
        content: dict[str, Json] = {
            "schema": SCHEMA,
            "stage": self.stage,
            "fingerprint": self.fingerprint,
            "label": self.label,
            "key": json.loads(self.key),
            "files": listed(self.files),
            "records": listed(self.records),
            "provenance": dict(self.provenance),
        }
        return {**content, "digest": fingerprint(canonical(content))}

    def seconds(self, name: str, default: float) -> float:
        """Return a number of the provenance."""
        value = self.provenance.get(name)
        return float(value) if isinstance(value, (int, float)) else default

    def write(self, folder: Path) -> None:
        writing.write_once(folder / NAME, writing.object_text(self.to_json()))


def inputs(manifest: Manifest) -> dict[str, Fingerprint]:
    """Fingerprints of an artifact's inputs by name, also of those of which its key only has some files' digest."""
    made_from = manifest.provenance.get("made_from")
    named = json.loads(manifest.key).get("inputs", {})
    fingerprints = {**named, **(made_from if isinstance(made_from, dict) else {})}
    return {name: Fingerprint(each) for name, each in fingerprints.items() if isinstance(each, str)}


def content_digest(entry: FileEntry) -> str:
    """Return the BLAKE3 of a file's content, or of a link's target as text."""
    return digests.digest_text(entry.link) if entry.link is not None else str(entry.digest)


def listed(files: Iterable[FileEntry]) -> list[Json]:
    return [
        {"path": entry.path, "link": entry.link}
        if entry.link is not None
        else {"path": entry.path, "size": entry.size, "blake3": entry.digest}
        for entry in files
    ]


def entries(content: Any) -> tuple[FileEntry, ...]:
    """Return the files of such JSON. Raises KeyError, TypeError."""
    files = tuple(
        FileEntry(entry["path"], 0, link=entry["link"])
        if "link" in entry
        else FileEntry(entry["path"], entry["size"], entry["blake3"])
        for entry in content
    )
    for each in files:
        if not (type(each.path) is str and type(each.size) is int and type(each.link or each.digest) is str):
            raise TypeError(f"{each} is not a file")
    return files


def read(folder: Path) -> Manifest:
    """Return the manifest of the artifact in `folder`, STAGE/FINGERPRINT.

    Raises NoManifestError if it is missing or damaged or belongs to another artifact. Other StateErrors do not mean
    damage: another release wrote the manifest, or it cannot be read now.
    """
    path = folder / NAME
    try:
        content = reading.read_bytes(path)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise NoManifestError(f"{path}: is missing") from error
    except OSError as error:
        raise unreadable(error, path) from error
    return decode(content, folder.parent.name, folder.name, str(path))


def decode(content: bytes, stage: str, fingerprint_: str, name: str) -> Manifest:
    """Return the manifest of this artifact from a file's content. Errors show `name` as its source. Raises like `read`."""
    try:
        data = json.loads(content.decode("utf-8"))
        # Before other checks: a flipped bit can change the schema too.
        digest = data.pop("digest", None)
        if digest != fingerprint(canonical(data)):
            raise ValueError("its digest is missing" if digest is None else "its content changed")
        if data["schema"] != SCHEMA:
            raise StateError(
                f"{name}: the manifest has schema {data['schema']}, but this release reads schema {SCHEMA}",
                hint="use the release that wrote it, another --workspace, or move the artifact's directory away",
            )
        key = canonical(data["key"])
        if not (data["fingerprint"] == fingerprint_ == fingerprint(key) and data["stage"] == stage):
            raise ValueError(f"its key belongs to {data['stage']} {fingerprint(key)}")
        if not (isinstance(data["key"], dict) and isinstance(data["label"], str)):
            raise TypeError("its key or its label has another type")
        return Manifest(
            data["stage"],
            Fingerprint(data["fingerprint"]),
            key,
            data["label"],
            entries(data["files"]),
            dict(data["provenance"]),
            entries(data["records"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NoManifestError(f"{name}: not the manifest of this artifact: {error}") from error


def unreadable(error: OSError, path: str | Path) -> StateError:
    """Return the error for an artifact's file that probably exists but cannot be inspected."""
    return StateError(
        f"cannot read {error.filename or path}: {error.strerror}; the artifact is kept",
        hint="check the disk and the file's permissions, or move the artifact's directory away to have it rebuilt",
    )


def scan(out: str | Path) -> tuple[FileEntry, ...]:
    """Return all files and links below `out` with size and BLAKE3 digest, sorted by path.

    Raises StateError for files that an artifact cannot hold: sockets, devices, broken links.
    """
    above = len(f"{out}/")
    return _sorted(_entry(each, each.path[above:]) for each in below(out))


def scan_records(attempt: str | Path) -> tuple[FileEntry, ...]:
    """Return all files of an attempt outside its result: job, log and other files of its programs."""
    above = len(f"{attempt}/")
    records = below(attempt, without=OUT)
    return _sorted(_entry(each, each.path[above:]) for each in records if each.name != NAME and each.is_file())


def _sorted(files: Iterable[FileEntry]) -> tuple[FileEntry, ...]:
    return tuple(sorted(files, key=lambda entry: entry.path.split("/")))


def walk(folder: Path) -> Iterator[Path]:
    """Yield all paths below `folder` except directories."""
    return (Path(each.path) for each in below(folder))


def below(folder: Path | str, without: str = "") -> Iterator[os.DirEntry[str]]:
    """Yield the same in the kernel's order, except the content of one directory."""
    with os.scandir(folder) as listing:
        for each in listing:
            if not each.is_dir(follow_symlinks=False):
                yield each
            elif each.name != without:
                yield from below(each.path)


# Published files never change, so one digest serves every hard link to the same content within a run.
_digests: dict[tuple[int, int, int, int], str] = {}
_REMEMBERED_BYTES: Final = 1 << 20
"""Rereading smaller files is faster than caching them."""


def _entry(entry: os.DirEntry[str], name: str) -> FileEntry:
    if entry.is_symlink():
        target = str(Path(entry.path).readlink())
        if not Path(entry.path).exists():
            raise StateError(f"{entry.path} is a link to {target}, which does not exist")
        return FileEntry(name, 0, link=target)
    if not entry.is_file():
        raise StateError(f"{entry.path}: an artifact may only contain files, directories and links")
    status = entry.stat()
    if status.st_size < _REMEMBERED_BYTES:
        return FileEntry(name, status.st_size, digest_file(entry.path))
    identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    if identity not in _digests:
        _digests[identity] = digest_file(entry.path)
    return FileEntry(name, status.st_size, _digests[identity])


class Kind(str, Enum):
    """Kinds of discrepancies."""

    DAMAGED = "damaged"
    """The result has changed, so it is no longer used."""
    RECORD = "record"
    """The job, log or another file next to the result has changed."""
    DERIVED = "derived"
    """Compiled Python modules that a server wrote. They can be removed."""
    UNLISTED = "unlisted"
    """A file that is not in the manifest."""
    MODE = "mode"
    """A file of the result is writable or unreadable."""
    PROVENANCE = "provenance"
    """The signed statement is wrong, or does not meet a policy."""


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """One discrepancy. `path` is relative to the artifact's directory, and empty for the whole artifact."""

    stage: str
    fingerprint: str
    kind: Kind
    path: str
    message: str

    def __str__(self) -> str:
        where = f"{self.stage} {self.fingerprint}"
        return f"{where}: {self.path}: {self.message}" if self.path else f"{where}: {self.message}"


def inspect(folder: Path, *, contents: bool) -> tuple[Discrepancy, ...]:
    """Return the discrepancies of the artifact in `folder`; with `contents`, every byte of its result is read.

    Raises StateError if it cannot be read or another release wrote it.
    """

    def finding(kind: Kind, path: str, message: str) -> Discrepancy:
        return Discrepancy(folder.parent.name, folder.name, kind, path, message)

    try:
        sealed = read(folder)
    except NoManifestError as error:
        return (finding(Kind.DAMAGED, NAME, error.message.removeprefix(f"{folder}/{NAME}: ")),)
    try:
        return tuple(finding(*each) for each in _inspect(folder, sealed, contents=contents))
    except OSError as error:
        raise unreadable(error, folder) from error


def _inspect(folder: Path, sealed: Manifest, *, contents: bool) -> Iterator[tuple[Kind, str, str]]:
    remaining = {str(path.relative_to(folder)): path for path in walk(folder)}
    remaining.pop(NAME)
    for entry in sealed.files:
        name = f"{OUT}/{entry.path}"
        path = remaining.pop(name, None)
        if (wrong := _wrong(path, entry, contents=contents)) is not None:
            yield Kind.DAMAGED, name, wrong
        elif path is not None and entry.link is None:
            status = path.lstat()
            # A file with other hard links may be the user's own, whose modes are left alone.
            if status.st_nlink == 1 and status.st_mode & 0o222:
                yield Kind.MODE, name, "is writable"
            if not status.st_mode & 0o400:
                yield Kind.MODE, name, "is not readable"
    for entry in sealed.records:
        if (wrong := _wrong(remaining.pop(entry.path, None), entry, contents=True)) is not None:
            yield Kind.RECORD, entry.path, wrong
    remaining.pop(ENVELOPE, None)
    for name, path in remaining.items():
        if path.parent.name == "__pycache__" or path.suffix == ".pyc":
            yield Kind.DERIVED, name, "was compiled by a server"
        else:
            yield Kind.UNLISTED, name, "is not in the manifest"


def _wrong(path: Path | None, entry: FileEntry, *, contents: bool) -> str | None:
    """Return the discrepancy of a file or link, or None."""
    if path is None:
        return "is missing"
    status = path.lstat()
    if entry.link is not None:
        if not stat.S_ISLNK(status.st_mode):
            return "is not the original link"
        if (target := str(path.readlink())) != entry.link:
            return f"leads to {target}, not to {entry.link}"
        return None if path.exists() else f"its target {entry.link} is gone"
    if not stat.S_ISREG(status.st_mode):
        return "is not the original file"
    if status.st_size != entry.size:
        return f"has {status.st_size} bytes, not {entry.size}"
    return "its content changed" if contents and digest_file(path) != entry.digest else None


def whole(folder: Path, files: tuple[tuple[str, int], ...], manifest_bytes: int) -> bool:
    """Return True if the manifest and all files exist with their sizes. Links count as size 0 and must not be broken.

    This is the quick check at every start. Raises StateError if the files cannot be read.
    """
    try:
        if os.stat(f"{folder}/{NAME}").st_size != manifest_bytes:
            return False
        for name, size in files:
            path = f"{folder}/{OUT}/{name}"
            if os.stat(path).st_size != size and not os.path.islink(path):
                return False
    except OSError as error:
        if error.errno in _GONE:
            return False
        raise unreadable(error, folder) from error
    return True
