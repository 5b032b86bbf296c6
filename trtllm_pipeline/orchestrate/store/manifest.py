"""The manifest of an artifact (its files with sizes and digests, and how it was made), and whether the files agree with it.

It is the last file written before an artifact is published. A directory without a valid manifest is not an artifact.
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

from trtllm_pipeline.base import (
    Fingerprint,
    Json,
    StateError,
    canonical,
    digest_file,
    digest_text,
    fingerprint,
    object_text,
    reading,
    write_once,
)
from trtllm_pipeline.tensorrt import OUT

SCHEMA: Final = 1
NAME: Final = "manifest.json"
ENVELOPE: Final = "provenance.intoto.jsonl"
"""The signed statement of an artifact, written after it was published; `provenance/` judges it."""
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
    """What is known of a published artifact. `key` is the canonical text its fingerprint is the hash of."""

    stage: str
    fingerprint: Fingerprint
    key: str
    label: str
    files: tuple[FileEntry, ...]
    provenance: Mapping[str, Json]
    records: tuple[FileEntry, ...] = ()
    """Files beside the result, such as the job and the log; empty in manifests of older releases."""

    @property
    def size_bytes(self) -> int:
        """Sum of the sizes of its files."""
        return sum(entry.size for entry in self.files)

    @property
    def tree(self) -> str:
        """BLAKE3 of all files together: of the lines "DIGEST  PATH" in the order of the paths' bytes.

        `find . -type f | cut -c3- | LC_ALL=C sort | xargs -r b3sum | b3sum` is the same, where there is no link.
        """
        lines = sorted((entry.path.encode(), content_digest(entry)) for entry in self.files)
        return digest_text("".join(f"{digest}  {path.decode()}\n" for path, digest in lines))

    @property
    def anonymous(self) -> Manifest:
        """The same without who made it, for strangers."""
        return replace(self, provenance={name: told for name, told in self.provenance.items() if name != "made_by"})

    def to_json(self) -> dict[str, Json]:
        """The file's content; the key stands in it as a tree, for people."""
        return {**self._content(), "key": json.loads(self.key)}

    def _content(self) -> dict[str, Json]:
        """The same without the key: it is text of the form that the digest is of."""
        content: dict[str, Json] = {
            "schema": SCHEMA,
            "stage": self.stage,
            "fingerprint": self.fingerprint,
            "label": self.label,
            "key": None,
            "files": listed(self.files),
            "records": listed(self.records),
            "provenance": dict(self.provenance),
        }
        before, name, behind = canonical(content).partition('"key":null')
        return {**content, "digest": fingerprint(f"{before}{name[:-4]}{self.key}{behind}")}

    def seconds(self, name: str, default: float) -> float:
        """A number of the provenance."""
        value = self.provenance.get(name)
        return float(value) if isinstance(value, (int, float)) else default

    def write(self, folder: str | Path) -> int:
        """Write it into `directory`; returns its size in bytes."""
        return write_once(f"{folder}/{NAME}", object_text(self._content(), key=self.key))


def inputs(manifest: Manifest) -> dict[str, Fingerprint]:
    """Fingerprint of each stage run that an artifact was made from, by input name.

    The key has the digest of the files that were read instead, where an input was not read whole.
    """
    made_from = manifest.provenance.get("made_from")
    named = json.loads(manifest.key).get("inputs", {})
    found = {**named, **(made_from if isinstance(made_from, dict) else {})}
    return {name: Fingerprint(each) for name, each in found.items() if isinstance(each, str)}


def content_digest(entry: FileEntry) -> str:
    """BLAKE3 of a file's content, and of a link's target as text."""
    return digest_text(entry.link) if entry.link is not None else str(entry.digest)


def listed(files: Iterable[FileEntry]) -> list[Json]:
    """Files as JSON has them."""
    return [
        {"path": entry.path, "link": entry.link}
        if entry.link is not None
        else {"path": entry.path, "size": entry.size, "blake3": entry.digest}
        for entry in files
    ]


def entries(told: Any) -> tuple[FileEntry, ...]:
    """The same back. Raises KeyError, TypeError."""
    found = tuple(
        FileEntry(entry["path"], 0, link=entry["link"])
        if "link" in entry
        else FileEntry(entry["path"], entry["size"], entry["blake3"])
        for entry in told
    )
    for each in found:
        if not (type(each.path) is str and type(each.size) is int and type(each.link or each.digest) is str):
            raise TypeError(f"{each} is not a file")
    return found


def read(folder: Path) -> Manifest:
    """The manifest of the artifact in `directory`, STAGE/FINGERPRINT.

    Raises NoManifestError if there is none, or if it is damaged or belongs to another artifact. Any other StateError does
    not count against the artifact: another release wrote the manifest, or it cannot be read now.
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
    """The manifest of this artifact from a file's content; `name` says in errors where it is from. Raises as `read`."""
    try:
        data = json.loads(content.decode("utf-8"))
        digest = data.pop("digest", None)
        # Before all else that it says: a flipped bit makes another schema as well.
        if digest is not None and digest != fingerprint(canonical(data)):
            raise ValueError("its content changed")
        if data["schema"] != SCHEMA:
            raise StateError(
                f"{name}: the manifest has schema {data['schema']}, but this release reads schema {SCHEMA}",
                hint="use the release that wrote it, another --workspace, or move the artifact's directory away",
            )
        if digest is None and "records" in data:  # those of older releases have neither
            raise ValueError("its digest is missing")
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
            entries(data.get("records", ())),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NoManifestError(f"{name}: not the manifest of this artifact: {error}") from error


def unreadable(error: OSError, path: str | Path) -> StateError:
    """The error for a file of an artifact that is there, for all one can tell, but cannot be looked at."""
    return StateError(
        f"cannot read {error.filename or path}: {error.strerror}; the artifact is kept",
        hint="check the disk and the file's permissions, or move the artifact's directory away to have it made again",
    )


def scan(out: str | Path, found: Iterable[os.DirEntry[str]] | None = None) -> tuple[FileEntry, ...]:
    """Every file and link below `out` with size and BLAKE3 digest, sorted by path. `found` are they, where they are known.

    Raises StateError for what an artifact cannot hold: sockets, devices, links that lead nowhere.
    """
    above = len(f"{out}/")
    return _sorted([_entry(each, each.path[above:]) for each in (below(out) if found is None else found)])


def scan_records(attempt: str | Path) -> tuple[FileEntry, ...]:
    """Every file of an attempt beside its result: job, log and what its programs left there."""
    above = len(f"{attempt}/")
    beside = below(attempt, without=OUT)
    return _sorted([_entry(each, each.path[above:]) for each in beside if each.name != NAME and each.is_file()])


def _sorted(found: list[FileEntry]) -> tuple[FileEntry, ...]:
    if len(found) > 1:
        found.sort(key=lambda entry: entry.path.split("/"))
    return tuple(found)


def walk(folder: Path) -> Iterator[Path]:
    """Everything below `directory` that is not a directory."""
    return (Path(each.path) for each in below(folder))


def below(folder: Path | str, without: str = "") -> Iterator[os.DirEntry[str]]:
    """The same as the kernel lists it, without what is below one directory in it."""
    with os.scandir(folder) as found:
        for each in found:
            if not each.is_dir(follow_symlinks=False):
                yield each
            elif each.name != without:
                yield from below(each.path)


# Published files never change, so one digest serves every hard link to the same content within a run.
_digests: dict[tuple[int, int, int, int], str] = {}
_REMEMBERED_BYTES: Final = 1 << 20
"""Smaller files are read again sooner than remembered."""


def _entry(entry: os.DirEntry[str], name: str) -> FileEntry:
    if entry.is_symlink():
        target = str(Path(entry.path).readlink())
        if not Path(entry.path).exists():
            raise StateError(f"{entry.path} is a link to {target}, which does not exist")
        return FileEntry(name, 0, link=target)
    if not entry.is_file():
        raise StateError(f"{entry.path}: an artifact may only contain files, directories and links")
    found = entry.stat()
    if found.st_size < _REMEMBERED_BYTES:
        return FileEntry(name, found.st_size, digest_file(entry.path))
    identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    if identity not in _digests:
        _digests[identity] = digest_file(entry.path)
    return FileEntry(name, found.st_size, _digests[identity])


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
    PROVENANCE = "provenance"
    """The signed statement is wrong, or is not what a policy asks for."""


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """One discrepancy. `path` is relative to the artifact's directory, and empty for the whole artifact."""

    stage: str
    fingerprint: str
    kind: Kind
    path: str
    message: str

    def __str__(self) -> str:
        """One line for people."""
        where = f"{self.stage} {self.fingerprint}"
        return f"{where}: {self.path}: {self.message}" if self.path else f"{where}: {self.message}"


def inspect(folder: Path, *, contents: bool) -> tuple[Discrepancy, ...]:
    """Discrepancies of the artifact in `directory`; with `contents`, every byte of its result is read.

    Raises StateError if it cannot be read or another release wrote it.
    """

    def finding(kind: Kind, path: str, message: str) -> Discrepancy:
        return Discrepancy(folder.parent.name, folder.name, kind, path, message)

    try:
        sealed = read(folder)
    except NoManifestError as error:
        return (finding(Kind.DAMAGED, NAME, error.message.removeprefix(f"{folder}/{NAME}: ")),)
    try:
        return tuple(finding(*found) for found in _inspect(folder, sealed, contents=contents))
    except OSError as error:
        raise unreadable(error, folder) from error


def _inspect(folder: Path, sealed: Manifest, *, contents: bool) -> Iterator[tuple[Kind, str, str]]:
    there = {str(path.relative_to(folder)): path for path in walk(folder)}
    there.pop(NAME)
    for entry in sealed.files:
        name = f"{OUT}/{entry.path}"
        path = there.pop(name, None)
        if (wrong := _wrong(path, entry, contents=contents)) is not None:
            yield Kind.DAMAGED, name, wrong
        elif path is not None and entry.link is None:
            found = path.lstat()
            # A file with other names may be the user's own, whose modes are left alone.
            if found.st_nlink == 1 and found.st_mode & 0o222:
                yield Kind.MODE, name, "may be written to"
            if not found.st_mode & 0o400:
                yield Kind.MODE, name, "may not be read"
    for entry in sealed.records:
        if (wrong := _wrong(there.pop(entry.path, None), entry, contents=True)) is not None:
            yield Kind.RECORD, entry.path, wrong
    there.pop(ENVELOPE, None)
    for name, path in there.items():
        if path.parent.name == "__pycache__" or path.suffix == ".pyc":
            yield Kind.DERIVED, name, "was compiled by a server"
        elif name.startswith(f"{OUT}/") or sealed.records:  # older manifests list the result alone
            yield Kind.UNLISTED, name, "is not in the manifest"


def _wrong(path: Path | None, entry: FileEntry, *, contents: bool) -> str | None:
    """The discrepancy of a file or link, or None."""
    if path is None:
        return "is missing"
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
    return "its content changed" if contents and digest_file(path) != entry.digest else None


def whole(folder: str, files: tuple[tuple[str, int], ...], manifest_bytes: int) -> bool:
    """Whether the manifest and all files exist with their sizes. Links count as size 0 and must not be broken.

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
