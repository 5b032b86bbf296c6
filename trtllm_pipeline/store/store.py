"""The store of a workspace: looks artifacts up, gives out attempts, publishes them whole or not at all.

    WORKSPACE/
      state.db                   index, rebuilt from manifests and history when lost or damaged
      history.jsonl              what the index knows and no manifest says
      store/STAGE/FINGERPRINT/   an artifact: manifest.json, job.json, log, out/ (the files themselves)
      work/FINGERPRINT.N/        attempt N: job.json, log, out/; becomes the artifact by one rename
      work/FINGERPRINT.lock      the claim of whoever works on it
      work/partial/              broken downloads, to be gone on with
      runs/RUN_ID/               plan, report and lock file of each run

`docs/formats.md` says what is in these files.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trtllm_pipeline.domain import Fingerprint, Json
from trtllm_pipeline.errors import StageError, StateError
from trtllm_pipeline.stages.base import PROGRESS_FILE
from trtllm_pipeline.store import claims, manifest
from trtllm_pipeline.store.index import ArtifactRow, Index
from trtllm_pipeline.store.manifest import Manifest

logger = logging.getLogger(__name__)

LOG: Final = "log"
JOB: Final = "job.json"
OUT: Final = "out"
_GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP})
"""What the system says of a file that is not there, or of a link that leads nowhere."""
_DURABLE_AFTER_S: Final = 1.0
"""Work that took longer than this is worth an fsync of its files before it is published."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A published artifact whose files are all there."""

    stage: str
    fingerprint: Fingerprint
    path: str
    size_bytes: int
    duration_s: float

    @property
    def folder(self) -> Path:
        """The folder around it, with manifest, job and log."""
        return Path(self.path)  # a large plan has many that nobody opens

    @property
    def out(self) -> Path:
        """The folder with its files."""
        return Path(f"{self.path}/{OUT}")


@dataclass(slots=True)
class Attempt:
    """A private folder to work in."""

    id: int
    stage: str
    fingerprint: Fingerprint
    number: int
    folder: Path

    @property
    def out(self) -> Path:
        """Where the stage's program writes."""
        return self.folder / OUT

    @property
    def log(self) -> Path:
        """Standard output and error of the stage's commands."""
        return self.folder / LOG


class Store:
    """One workspace, opened. Creating one creates its folders. Raises StateError when it cannot be used.

    One that cannot be written, such as a colleague's or an archive, can be looked at: what would be written down is
    kept in memory, and nothing is made, mended or removed.
    """

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace.absolute()
        self.artifacts_dir = self.workspace / "store"
        self._artifacts = str(self.artifacts_dir)
        self.work_dir = self.workspace / "work"
        self.runs_dir = self.workspace / "runs"
        database = self.workspace / "state.db"
        self.unwritable = self._unwritable(database)
        """What of the workspace may not be written, or None where all may."""
        if self.unwritable is None:
            try:
                for folder in (self.artifacts_dir, self.work_dir, self.runs_dir):
                    folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StateError(
                    f"{workspace}: cannot be a workspace: {error.strerror}",
                    hint="choose another folder with --workspace DIR",
                ) from error
        self.index = Index(database, self._manifests, read_only=self.unwritable is not None)

    def _unwritable(self, database: Path) -> Path | None:
        if not (database.exists() or self.artifacts_dir.is_dir()):
            return None  # not a workspace yet; whether it can be one shows when it is made
        parts = (self.workspace, self.artifacts_dir, self.work_dir, self.runs_dir, database)
        return next((part for part in parts if part.exists() and not os.access(part, os.W_OK)), None)

    def check_writable(self) -> None:
        """Raise StateError when nothing can be written here."""
        if self.unwritable is not None:
            raise StateError(
                f"{self.workspace}: can only be looked at: {self.unwritable} may not be written",
                hint="work in a copy of it (cp -r), or in another --workspace; status, report, logs, plan, explain, "
                "compare, recommend and store verify need not write",
            )

    def _manifests(self) -> Iterator[tuple[Manifest, int]]:
        """All there are, each with its file's size. What is none is left to whoever wants that artifact."""
        for stage in _names(self.artifacts_dir):
            for name in _names(self.artifacts_dir / stage):
                folder = self.artifacts_dir / stage / name
                with suppress(StateError):
                    yield manifest.read(folder), _manifest_bytes(folder)

    def close(self) -> None:
        """Close the index."""
        self.index.close()

    # looking up

    def folder(self, stage: str, fingerprint: Fingerprint) -> Path:
        """Where this artifact is, or will be."""
        return Path(self._path(stage, fingerprint))

    def _path(self, stage: str, fingerprint: Fingerprint) -> str:
        return f"{self._artifacts}/{stage}/{fingerprint}"

    def present(self, wanted: Mapping[Fingerprint, str]) -> dict[Fingerprint, Artifact]:
        """Those of `wanted` (fingerprint -> stage) that are published with every file in place, of the right size.

        An artifact with a missing or changed file is forgotten and moved away, so that it is made again. One that was
        published but is not in the index, because the pipeline was killed in between, is taken in. Raises StateError for
        one that cannot be judged, since its files cannot be read or another release wrote it.
        """
        rows = self.index.artifacts(wanted)
        names = {stage: set(_names(self.artifacts_dir / stage)) for stage in set(wanted.values())}
        looked_at = (
            self._look(stage, fingerprint, rows.get(fingerprint), there=fingerprint in names[stage])
            for fingerprint, stage in wanted.items()
        )
        return {artifact.fingerprint: artifact for artifact in looked_at if artifact is not None}

    def get(self, stage: str, fingerprint: Fingerprint) -> Artifact | None:
        """One artifact, if it is there and whole; as `present`, without listing what else there is."""
        row = self.index.artifacts((fingerprint,)).get(fingerprint)
        return self._look(stage, fingerprint, row, there=self.folder(stage, fingerprint).is_dir())

    def _look(self, stage: str, fingerprint: Fingerprint, row: ArtifactRow | None, *, there: bool) -> Artifact | None:
        if not there:
            if row is not None:
                self.index.remove_artifact(fingerprint)
            return None
        path = self._path(stage, fingerprint)
        if row is None or not _whole(path, row):
            # The manifest decides: the index may not know it yet, or be damaged where nothing else shows it.
            if self._adopt(Path(path)) is None:
                return None
            row = self.index.artifacts((fingerprint,)).get(fingerprint)
        if row is not None and _whole(path, row):
            return Artifact(stage, fingerprint, path, row.size_bytes, row.duration_s)
        self._discard(Path(path), fingerprint)
        return None

    def _adopt(self, folder: Path) -> Manifest | None:
        try:
            found = manifest.read(folder)
        except manifest.NoManifestError:
            self._discard(folder, Fingerprint(folder.name))
            return None
        self.index.add_artifact(found, _manifest_bytes(folder))
        return found

    def _discard(self, folder: Path, fingerprint: Fingerprint) -> None:
        self.index.remove_artifact(fingerprint)
        if self.unwritable is not None:
            return
        away = self.work_dir / f"{fingerprint}.discarded.{os.getpid()}"
        try:
            folder.rename(away)
        except FileNotFoundError:
            return
        shutil.rmtree(away, ignore_errors=True)

    # working

    def claim(self, fingerprint: Fingerprint) -> claims.Claim | None:
        """The right to work on this stage run, or None when another process has it."""
        return claims.take(self.work_dir / f"{fingerprint}.lock")

    def claimed(self) -> frozenset[Fingerprint]:
        """What is worked on now, or was when a pipeline was killed; `is_claimed` tells."""
        names = (name for name in _names(self.work_dir) if name.endswith(".lock"))
        return frozenset(Fingerprint(name.removesuffix(".lock")) for name in names)

    def is_claimed(self, fingerprint: Fingerprint) -> bool:
        """Whether some process works on this stage run now."""
        return claims.is_held(self.work_dir / f"{fingerprint}.lock")

    def begin(self, run: str, stage: str, fingerprint: Fingerprint) -> Attempt:
        """A fresh attempt folder. The caller holds the claim, so what older attempts left is nobody's and goes."""
        number = 1 + self.index.last_attempt(fingerprint)
        shutil.rmtree(self.work_dir / f"{fingerprint}.{number - 1}", ignore_errors=True)
        while True:
            folder = self.work_dir / f"{fingerprint}.{number}"
            try:
                folder.mkdir()
                break
            except FileExistsError:  # the index was lost, and with it the count
                shutil.rmtree(folder, ignore_errors=True)
                number += 1
        (folder / OUT).mkdir()
        return Attempt(
            self.index.begin_attempt(run, stage, fingerprint, number, folder), stage, fingerprint, number, folder
        )

    def seal(self, attempt: Attempt, key: str, label: str, provenance: Mapping[str, Json]) -> Manifest:
        """Digest the attempt's files and write the manifest. Reads every byte once; may run in a thread.

        Raises StageError when the attempt left nothing, or something an artifact cannot hold.
        """
        try:
            files = manifest.scan(attempt.out)
        except StateError as error:
            raise StageError(f"{attempt.stage}: {error.message}", log=attempt.log) from error
        if not files:
            raise StageError(f"{attempt.stage}: ended well but left no files in {attempt.out}", log=attempt.log)
        (attempt.folder / PROGRESS_FILE).unlink(missing_ok=True)
        sealed = Manifest(attempt.stage, attempt.fingerprint, key, label, files, provenance)
        for entry in files:
            path = attempt.out / entry.path
            # A file with other names may be the user's own: a local model is linked where it cannot be cloned.
            if entry.link is None and (stat := path.stat()).st_nlink == 1:
                path.chmod(stat.st_mode & ~0o222)
        # Nobody looks for it here, and the rename that publishes it comes later: no need to write it beside and rename.
        text = json.dumps(sealed.to_json(), indent=1, ensure_ascii=False)
        (attempt.folder / manifest.NAME).write_text(f"{text}\n", encoding="utf-8")
        if _duration(sealed) >= _DURABLE_AFTER_S:
            _sync(attempt.folder)
        return sealed

    def publish(self, attempt: Attempt, sealed: Manifest) -> Artifact:
        """Make the attempt the artifact, by one rename, and record it."""
        final = self.folder(attempt.stage, attempt.fingerprint)
        final.parent.mkdir(exist_ok=True)
        if final.exists():
            self._discard(final, attempt.fingerprint)
        attempt.folder.rename(final)
        self.index.add_artifact(sealed, _manifest_bytes(final))
        self.index.end_attempt(attempt.id, "succeeded", folder=final)
        return Artifact(attempt.stage, attempt.fingerprint, str(final), sealed.size_bytes, _duration(sealed))

    def fail(self, attempt: Attempt, outcome: str, error: StageError | None) -> None:
        """Record how an attempt ended that did not succeed. Its folder stays, for the log, until the next attempt."""
        self.index.end_attempt(
            attempt.id,
            outcome,
            folder=attempt.folder,
            failure=error.failure.value if error else None,
            message=error.message if error else None,
            hint=error.hint if error else None,
        )

    # upkeep

    def repair(self) -> tuple[int, str]:
        """Make the index anew from the manifests and the history; returns how many artifacts there are and what is lost.

        Folders without a manifest are removed; raises StateError, and removes nothing, for one that cannot be read or
        that another release wrote.
        """
        self.check_writable()
        lost = self.index.remake()
        count = 0
        for stage in _names(self.artifacts_dir):
            for name in _names(self.artifacts_dir / stage):
                if self._adopt(self.artifacts_dir / stage / name) is not None:
                    count += 1
        return count, lost

    def verify(self, tell: Callable[[str], None]) -> tuple[int, list[Fingerprint]]:
        """Read every artifact's files again and compare them with the manifest's digests.

        Returns how many artifacts were read and which were damaged; those are removed, and so made again by a run.
        `tell` is given a line for each. Raises StateError for one that cannot be read or that another release wrote.
        """
        from trtllm_pipeline.digest import digest_file

        checked, damaged = 0, []
        for row in self.index.all_artifacts():
            checked += 1
            folder = self.folder(row.stage, row.fingerprint)
            try:
                for entry in manifest.read(folder).files:
                    path = folder / OUT / entry.path
                    if entry.digest is not None and digest_file(path) != entry.digest:
                        raise _DamageError(f"{path}: its content changed")
                    if entry.link is not None and not path.exists():
                        raise _DamageError(f"{path}: its target {entry.link} is gone")
            except (_DamageError, manifest.NoManifestError, OSError) as error:
                if isinstance(error, OSError) and error.errno not in _GONE:
                    raise manifest.unreadable(error, folder) from error
                tell(f"{row.stage} {row.fingerprint}: {error}")
                damaged.append(row.fingerprint)
                self._discard(folder, row.fingerprint)
        return checked, damaged

    def sweep(self) -> int:
        """Remove what killed pipelines left in `work/`, except failed attempts, whose logs are kept. Returns how many."""
        self.check_writable()
        removed = 0
        folders = [name for name in _names(self.work_dir) if not name.endswith(".lock") and name != "partial"]
        latest = self.index.attempts({Fingerprint(name.split(".")[0]) for name in folders})
        for name in folders:
            fingerprint = Fingerprint(name.split(".")[0])
            row = latest.get(fingerprint)
            if row is not None and row.outcome is not None and row.folder.name == name:
                continue
            claim = self.claim(fingerprint)
            if claim is not None:
                shutil.rmtree(self.work_dir / name, ignore_errors=True)
                claim.release()
                removed += 1
        return removed


def _names(folder: Path) -> Iterator[str]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                yield entry.name
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise StateError(f"{folder}: is not a folder", hint="nothing of ours: move it away") from None


class _DamageError(Exception):
    """A file of an artifact is not what its manifest says."""


def _manifest_bytes(folder: Path) -> int:
    return (folder / manifest.NAME).stat().st_size


def _whole(folder: str, row: ArtifactRow) -> bool:
    """Whether manifest and files are there with their sizes. Links count as size 0 and must lead somewhere.

    Raises StateError when that cannot be told.
    """
    try:
        if os.stat(f"{folder}/{manifest.NAME}").st_size != row.manifest_bytes:
            return False
        for name, size in row.files:
            path = f"{folder}/{OUT}/{name}"
            stat = os.stat(path)
            if stat.st_size != size and not os.path.islink(path):
                return False
    except OSError as error:
        if error.errno in _GONE:
            return False
        raise manifest.unreadable(error, folder) from error
    return True


def _duration(sealed: Manifest) -> float:
    value = sealed.provenance.get("duration_s")
    return float(value) if isinstance(value, (int, float)) else 0.0


def _sync(folder: Path) -> None:
    """Put a folder tree on the disk before its rename does, so that a power loss cannot publish empty files."""
    for base, _, files in os.walk(folder, topdown=False):
        for name in (*files, ""):
            path = os.path.join(base, name)
            if os.path.islink(path):
                continue
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
