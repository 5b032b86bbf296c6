"""The manifest of an artifact: which files it has, of which size and content, and how it came to be.

It is the last file written before an artifact is published. A folder without a valid one is not an artifact.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trtllm_pipeline.domain import Fingerprint, Json
from trtllm_pipeline.errors import StateError

SCHEMA: Final = 1
NAME: Final = "manifest.json"


class NoManifestError(StateError):
    """The folder has no manifest, or what is in its place is none: so it is not an artifact."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file or symbolic link below `out/`. A link has a target and no digest."""

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

    @property
    def size_bytes(self) -> int:
        """Sum of the sizes of its files."""
        return sum(entry.size for entry in self.files)

    def to_json(self) -> dict[str, Json]:
        """The file's content; the key stands in it as a tree, for people."""
        files: list[Json] = [
            {"path": entry.path, "link": entry.link}
            if entry.link is not None
            else {"path": entry.path, "size": entry.size, "blake3": entry.digest}
            for entry in self.files
        ]
        return {
            "schema": SCHEMA,
            "stage": self.stage,
            "fingerprint": self.fingerprint,
            "label": self.label,
            "key": json.loads(self.key),
            "files": files,
            "provenance": dict(self.provenance),
        }


def read(folder: Path) -> Manifest:
    """The manifest in `folder`.

    Raises NoManifestError when there is none. Another StateError says nothing against the artifact: the manifest was
    written by another release, or cannot be read just now.
    """
    from trtllm_pipeline.fingerprint import canonical

    path = folder / NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise StateError(
                f"{path}: manifest schema {data['schema']}, this release reads {SCHEMA}",
                hint="use the release that wrote it, another --workspace, or move the artifact's folder away",
            )
        files = tuple(
            FileEntry(entry["path"], 0, link=entry["link"])
            if "link" in entry
            else FileEntry(entry["path"], entry["size"], entry["blake3"])
            for entry in data["files"]
        )
        return Manifest(
            data["stage"],
            Fingerprint(data["fingerprint"]),
            canonical(data["key"]),
            data["label"],
            files,
            data["provenance"],
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError) as error:
        raise NoManifestError(f"{path}: not a manifest: {error}") from error
    except OSError as error:
        raise unreadable(error, path) from error


def unreadable(error: OSError, path: str | Path) -> StateError:
    """The error for a file of an artifact that is there, for all one can tell, but cannot be looked at."""
    return StateError(
        f"{error.filename or path}: cannot be read: {error.strerror}; the artifact is kept",
        hint="see to the disk or the file's permissions, or move the artifact's folder away to have it made again",
    )


def scan(out: Path) -> tuple[FileEntry, ...]:
    """Every file and link below `out` with size and BLAKE3 digest, sorted by path.

    Raises StateError for what an artifact cannot hold: sockets, devices, links that lead nowhere.
    """
    return tuple(_entry(path, str(path.relative_to(out))) for path in sorted(_walk(out)))


def size_bytes(out: Path) -> int:
    """Bytes that `scan` would have to read at most."""
    return sum(path.lstat().st_size for path in _walk(out))


def _walk(folder: Path) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path))
            else:
                yield Path(entry.path)


# Published files never change, so one digest serves every hard link to the same content within a run.
_digests: dict[tuple[int, int, int, int], str] = {}


def _entry(path: Path, name: str) -> FileEntry:
    if path.is_symlink():
        if not path.exists():
            raise StateError(f"{path}: link to {path.readlink()}, which does not exist")
        return FileEntry(name, 0, link=str(path.readlink()))
    if not path.is_file():
        raise StateError(f"{path}: an artifact holds files, folders and links only")
    stat = path.stat()
    identity = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    digest = _digests.get(identity)
    if digest is None:
        from trtllm_pipeline.digest import digest_file

        digest = _digests[identity] = digest_file(path)
    return FileEntry(name, stat.st_size, digest)
