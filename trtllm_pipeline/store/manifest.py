"""The manifest of an artifact: its files with sizes and digests, and how it was made.

It is the last file written before an artifact is published. A folder without a valid manifest is not an artifact.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.domain import Fingerprint, Json
from trtllm_pipeline.errors import StateError
from trtllm_pipeline.fingerprint import canonical, fingerprint

SCHEMA: Final = 1
NAME: Final = "manifest.json"


class NoManifestError(StateError):
    """The folder has no valid manifest, so it is not an artifact."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file or symbolic link below its folder. A link has a target and no digest."""

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

    def to_json(self) -> dict[str, Json]:
        """The file's content; the key stands in it as a tree, for people."""
        content: dict[str, Json] = {
            "schema": SCHEMA,
            "stage": self.stage,
            "fingerprint": self.fingerprint,
            "label": self.label,
            "key": json.loads(self.key),
            "files": _listed(self.files),
            "records": _listed(self.records),
            "provenance": dict(self.provenance),
        }
        return {**content, "digest": fingerprint(canonical(content))}

    def without(self, records: Collection[str]) -> Manifest:
        """The same without these records, which are lost."""
        return replace(self, records=tuple(entry for entry in self.records if entry.path not in records))

    def write(self, folder: Path) -> None:
        """Write it into `folder`."""
        text = json.dumps(self.to_json(), indent=1, ensure_ascii=False)
        (folder / NAME).write_text(f"{text}\n", encoding="utf-8")


def _listed(entries: tuple[FileEntry, ...]) -> list[Json]:
    return [
        {"path": entry.path, "link": entry.link}
        if entry.link is not None
        else {"path": entry.path, "size": entry.size, "blake3": entry.digest}
        for entry in entries
    ]


def _entries(listed: Any) -> tuple[FileEntry, ...]:
    return tuple(
        FileEntry(entry["path"], 0, link=entry["link"])
        if "link" in entry
        else FileEntry(entry["path"], entry["size"], entry["blake3"])
        for entry in listed
    )


def read(folder: Path) -> Manifest:
    """The manifest of the artifact in `folder`, STAGE/FINGERPRINT.

    Raises NoManifestError if there is none, or if it is damaged or belongs to another artifact. Any other StateError does
    not count against the artifact: another release wrote the manifest, or it cannot be read now.
    """
    path = folder / NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        digest = data.pop("digest", None)
        # Before all else that it says: a flipped bit makes another schema as well.
        if digest is not None and digest != fingerprint(canonical(data)):
            raise ValueError("its content changed")
        if data["schema"] != SCHEMA:
            raise StateError(
                f"{path}: the manifest has schema {data['schema']}, but this release reads schema {SCHEMA}",
                hint="use the release that wrote it, another --workspace, or move the artifact's folder away",
            )
        if digest is None and "records" in data:  # those of older releases have neither
            raise ValueError("its digest is missing")
        key = canonical(data["key"])
        if not (data["fingerprint"] == folder.name == fingerprint(key) and data["stage"] == folder.parent.name):
            raise ValueError(f"its key belongs to {data['stage']} {fingerprint(key)}")
        return Manifest(
            data["stage"],
            Fingerprint(data["fingerprint"]),
            key,
            data["label"],
            _entries(data["files"]),
            dict(data["provenance"]),
            _entries(data.get("records", ())),
        )
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise NoManifestError(f"{path}: is missing") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NoManifestError(f"{path}: not the manifest of this artifact: {error}") from error
    except OSError as error:
        raise unreadable(error, path) from error


def unreadable(error: OSError, path: str | Path) -> StateError:
    """The error for a file of an artifact that is there, for all one can tell, but cannot be looked at."""
    return StateError(
        f"cannot read {error.filename or path}: {error.strerror}; the artifact is kept",
        hint="check the disk and the file's permissions, or move the artifact's folder away to have it made again",
    )


def scan(out: Path) -> tuple[FileEntry, ...]:
    """Every file and link below `out` with size and BLAKE3 digest, sorted by path.

    Raises StateError for what an artifact cannot hold: sockets, devices, links that lead nowhere.
    """
    return tuple(_entry(path, str(path.relative_to(out))) for path in sorted(walk(out)))


def scan_records(attempt: Path, out: Path) -> tuple[FileEntry, ...]:
    """Every file of an attempt beside its result: job, log and what its programs left there."""
    beside = (path for path in sorted(walk(attempt)) if not path.is_relative_to(out) and path.name != NAME)
    return tuple(_entry(path, str(path.relative_to(attempt))) for path in beside if path.is_file())


def size_bytes(out: Path) -> int:
    """Bytes that `scan` would have to read at most."""
    return sum(path.lstat().st_size for path in walk(out))


def walk(folder: Path) -> Iterator[Path]:
    """Everything below `folder` that is not a folder."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from walk(Path(entry.path))
            else:
                yield Path(entry.path)


# Published files never change, so one digest serves every hard link to the same content within a run.
_digests: dict[tuple[int, int, int, int], str] = {}


def _entry(path: Path, name: str) -> FileEntry:
    if path.is_symlink():
        if not path.exists():
            raise StateError(f"{path} is a link to {path.readlink()}, which does not exist")
        return FileEntry(name, 0, link=str(path.readlink()))
    if not path.is_file():
        raise StateError(f"{path}: an artifact may only contain files, folders and links")
    stat = path.stat()
    identity = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    digest = _digests.get(identity)
    if digest is None:
        from trtllm_pipeline.files.digest import digest_file

        digest = _digests[identity] = digest_file(path)
    return FileEntry(name, stat.st_size, digest)
