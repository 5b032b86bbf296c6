"""The store of a workspace: looks up artifacts, creates attempts, and publishes them atomically.

    WORKSPACE/
      state.db                   index. `store repair` rebuilds it from manifests and history
      history.jsonl              index rows that are in no manifest
      store/STAGE/FINGERPRINT/   an artifact: manifest.json, job.json, log, out/ (the files themselves)
      work/FINGERPRINT.N/        attempt N: job.json, log, out/; becomes the artifact by one rename
      work/FINGERPRINT.lock      the claim of the process that works on it
      work/FINGERPRINT.pulled/   an artifact being pulled
      work/partial/              partial downloads that can be resumed
      runs/RUN_ID/               plan, report and lock file of each run
      damaged/STAGE/FINGERPRINT/ damaged artifacts that verify and repair set aside

`docs/reference/formats.md` describes these files.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import Fingerprint, Json, StageError, StateError, disk
from trtllm_pipeline.orchestrate.store import claims, manifest
from trtllm_pipeline.orchestrate.store.index import Artifact, AttemptRow, Index, Peak
from trtllm_pipeline.orchestrate.store.manifest import Discrepancy, Kind, Manifest, inspect, whole
from trtllm_pipeline.tensorrt import OUT, PROGRESS_FILE

logger = logging.getLogger(__name__)

INDEX: Final = "state.db"
_ATTEMPT: Final = re.compile(r"[0-9a-f]{32}\.(\d+|manifest|pulled)")
"""Directories in `work/`: an attempt at a stage run, a temporary manifest, or an artifact being pulled."""
_USERS: Final = "users.lock"
"""Claimed shared by processes that use artifacts, exclusively by a process that removes some."""
_AT_ONCE: Final = 200
"""Artifacts claimed at a time for removal: each has an open file."""
_STALE_AFTER_S: Final = 7 * 86400
_CLAIM: Final = re.compile(r"([0-9a-f]{32})\.lock")
"""Claim files of stage runs in `work/`."""
CLUSTER: Final = ".cluster"
"""Suffix of the directory next to an attempt with the messages between its node and the pipeline."""


def is_workspace(folder: Path) -> bool:
    """Return True if `folder` is a workspace. Its index may be lost."""
    return (folder / INDEX).exists() or (folder / "store").is_dir()


class Store:
    """An open workspace. Its directories are created if necessary. Raises StateError if it cannot be used.

    A read-only workspace, such as a colleague's or an archive, can be inspected: records stay in memory, and nothing is
    created, repaired or removed.
    """

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace.absolute()
        self.artifacts_dir = self.workspace / "store"
        self.work_dir = self.workspace / claims.CLAIMS
        self.runs_dir = self.workspace / "runs"
        database = self.workspace / INDEX
        self.unwritable = self._unwritable(database)
        """The first read-only part of the workspace. None if all of it is writable."""
        if self.unwritable is None:
            try:
                for folder in (self.artifacts_dir, self.work_dir, self.runs_dir):
                    folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StateError(
                    f"{workspace} cannot be a workspace: {_obstacle(error, workspace)}",
                    hint="choose another directory with --workspace DIR",
                ) from error
        self.index = Index(database, self._manifests, read_only=self.unwritable is not None)
        self.close = self.index.close

    def _unwritable(self, database: Path) -> Path | None:
        if not is_workspace(self.workspace):
            return None  # not a workspace yet. Creating it will show errors
        parts = (self.workspace, self.artifacts_dir, self.work_dir, self.runs_dir, database)
        return next((part for part in parts if part.exists() and not os.access(part, os.W_OK)), None)

    def check_writable(self) -> None:
        """Raise StateError if the workspace is read-only."""
        if self.unwritable is not None:
            raise StateError(
                f"{self.workspace} is read-only: no permission to write {self.unwritable}",
                hint="work in another --workspace, or in a copy (cp -r) without its store/repository: repositories refer to "
                "files of this one, and `pipeline run` with --until repository writes them again; status, report, logs, "
                "plan, explain, compare, recommend, export and store verify do not write into it",
            )

    def _manifests(self) -> Iterator[tuple[Manifest, int]]:
        """Yield all valid manifests with their file sizes. Invalid ones are reported when the artifact is needed."""
        for folder in self._artifact_folders():
            with suppress(StateError):
                yield manifest.read(folder), _manifest_bytes(folder)

    # looking up

    def folder(self, stage: str, fingerprint: Fingerprint) -> Path:
        """Return the directory of this artifact, published or not."""
        return self.artifacts_dir / stage / fingerprint

    def present(self, wanted: Mapping[Fingerprint, str]) -> dict[Fingerprint, Artifact]:
        """Return those of `wanted` (fingerprint -> stage) that are published with all files of the right size.

        An artifact with a missing or changed file is set aside, so that it is rebuilt. An artifact that was published but
        not indexed, because the pipeline was killed in between, is added to the index. While its pipeline lives, it does
        not count as present. Raises StateError if its files cannot be read or another release wrote it.
        """
        rows = self.index.artifacts(wanted)
        names = self._folders(wanted, rows)
        looked = (
            self._look(stage, fingerprint, rows.get(fingerprint), exists=fingerprint in names[stage])
            for fingerprint, stage in wanted.items()
        )
        return {artifact.fingerprint: artifact for artifact in looked if artifact is not None}

    def listed(self, wanted: Mapping[Fingerprint, str]) -> set[Fingerprint]:
        """Return present artifacts without checking files: indexed ones with a directory count."""
        published = self.index.published()
        names = self._folders(wanted, published)
        return {
            fingerprint
            for fingerprint, stage in wanted.items()
            if fingerprint in names[stage]
            and (fingerprint in published or self._look(stage, fingerprint, None, exists=True) is not None)
        }

    def _folders(self, wanted: Mapping[Fingerprint, str], recorded: Collection[Fingerprint]) -> dict[str, set[str]]:
        """Return the names of all artifact directories by stage, except those of `wanted` that a process is about to record."""
        names = {stage: set(_names(self.artifacts_dir / stage)) for stage in set(wanted.values())}
        for fingerprint in [each for each in wanted if each not in recorded]:
            stage = wanted[fingerprint]
            if fingerprint in names[stage] and self.is_claimed(fingerprint):
                names[stage].remove(fingerprint)
        return names

    def get(self, stage: str, fingerprint: Fingerprint) -> Artifact | None:
        """Return one artifact if it is complete, as in `present`, without listing others."""
        if not self.folder(stage, fingerprint).is_dir():  # no index lookup needed. `present` corrects the index
            return None
        return self._look(stage, fingerprint, self.index.artifacts((fingerprint,)).get(fingerprint), exists=True)

    def _look(self, stage: str, fingerprint: Fingerprint, row: Artifact | None, *, exists: bool) -> Artifact | None:
        if not exists:
            if row is not None:
                self.index.remove_artifacts((fingerprint,))
            return None
        folder = self.folder(stage, fingerprint)
        if row is None or row.folder != folder or not whole(row.folder, row.files, row.manifest_bytes):
            # The manifest decides: the index may lack the artifact, or have undetected damage. An artifact that was
            # never recorded may not have reached the disk before a power cut, so it is read.
            findings = _inspected(folder, contents=row is None)
            if findings is None:
                return self._look(stage, fingerprint, row, exists=False)
            damage = _damage(findings)
            if damage is not None:
                logger.warning("%s; %s", damage, self._set_aside(stage, fingerprint))
                return None
            return self._adopt(folder)
        return row

    def _adopt(self, folder: Path) -> Artifact:
        artifact = self.index.artifact(sealed := manifest.read(folder), _manifest_bytes(folder))
        if self.unwritable is None:
            _sync(folder)
            self._sync_names(sealed.stage)
        return self.index.add_artifact(sealed, artifact)

    def _set_aside(self, stage: str, fingerprint: str) -> str:
        """Take a damaged artifact out of use but keep its files. Returns a description of the action."""
        self.index.remove_artifacts((Fingerprint(fingerprint),))
        return "left where it is" if self.unwritable is not None else self._move_aside(stage, fingerprint)

    def _move_aside(self, stage: str, fingerprint: str, name: str = ".") -> str:
        """Move an artifact, or one file of it, below `damaged/`. Returns a description of the action."""
        place = self.workspace / "damaged" / stage / fingerprint
        number = 1
        while os.path.lexists(place / name):
            number += 1
            place = place.with_name(f"{fingerprint}.{number}")
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            (self.artifacts_dir / stage / fingerprint / name).rename(target)
        except FileNotFoundError:  # another process has already done it
            return "it is gone already"
        return f"set aside as {target.relative_to(self.workspace)}"

    # working

    def _lock(self, fingerprint: Fingerprint) -> Path:
        return self.work_dir / f"{fingerprint}.lock"

    def claim(self, fingerprint: Fingerprint) -> claims.Claim | None:
        """Claim this stage run. None if another process holds it."""
        return claims.take(self._lock(fingerprint))

    def claimants(self, fingerprint: Fingerprint) -> tuple[str, ...]:
        """Return descriptions of the visible processes that hold it."""
        return claims.users(self._lock(fingerprint))

    def claimed(self) -> frozenset[Fingerprint]:
        """Return the stage runs that processes work on now."""
        return frozenset(filter(self.is_claimed, self._with_lock()))

    def _with_lock(self) -> list[Fingerprint]:
        """Return stage runs with a claim file. A killed pipeline leaves its file behind."""
        matches = [_CLAIM.fullmatch(name) for name in _names(self.work_dir)]
        return [Fingerprint(each[1]) for each in matches if each]

    def is_claimed(self, fingerprint: Fingerprint) -> bool:
        """Return True if a process works on this stage run now."""
        return claims.is_held(self._lock(fingerprint))

    def begin(self, run: str, stage: str, fingerprint: Fingerprint) -> AttemptRow:
        """Create an attempt directory. The caller holds the claim, so leftovers of older attempts are removed."""
        latest = self.index.attempts([fingerprint]).get(fingerprint)
        number = 1 if latest is None else latest.number + 1
        if latest is not None:
            shutil.rmtree(self.work_dir / f"{fingerprint}.{number - 1}", ignore_errors=True)
        while True:
            folder = self.work_dir / f"{fingerprint}.{number}"
            try:
                folder.mkdir()
                break
            except FileExistsError:  # created by another invocation since, or the index and its count were lost
                shutil.rmtree(folder, ignore_errors=True)
                number += 1
        (folder / OUT).mkdir()
        return self.index.begin_attempt(run, stage, fingerprint, number, folder)

    def unended(self, fingerprint: Fingerprint) -> Path | None:
        """Return the directory of the latest attempt if a killed invocation left it to a cluster; else None."""
        row = self.index.attempts([fingerprint]).get(fingerprint)
        if row is None or row.outcome is not None or not row.folder.with_name(f"{row.folder.name}{CLUSTER}").is_dir():
            return None
        return row.folder

    def join(self, run: str, stage: str, fingerprint: Fingerprint, folder: Path) -> AttemptRow:
        """Take over the attempt of a killed invocation in `folder` for this run."""
        return self.index.begin_attempt(run, stage, fingerprint, int(folder.suffix[1:]), folder)

    def seal(self, attempt: AttemptRow, key: str, label: str, provenance: Mapping[str, Json]) -> Manifest:
        """Digest the attempt's files, write the manifest, and sync all to the disk. Reads every byte once: run it in a
        thread.

        Raises StageError if the attempt left no files, or files that an artifact may not contain; OSError.
        """
        try:
            files = manifest.scan(attempt.out)
        except StateError as error:
            raise StageError(f"{attempt.stage}: {error.message}", log=attempt.log) from error
        if not files:
            raise StageError(f"{attempt.stage} succeeded but left no files in {attempt.out}", log=attempt.log)
        (attempt.folder / PROGRESS_FILE).unlink(missing_ok=True)
        records = manifest.scan_records(attempt.folder)
        sealed = Manifest(attempt.stage, attempt.fingerprint, key, label, files, provenance, records)
        for each in manifest.walk(attempt.out):
            # A file with other hard links may be the user's own: a local model is linked if it cannot be cloned.
            if not each.is_symlink() and (status := each.stat()).st_nlink == 1:
                each.chmod(status.st_mode & ~0o222)
        sealed.write(attempt.folder)
        _sync(attempt.folder)
        return sealed

    def publish(self, attempt: AttemptRow, sealed: Manifest, peak: Peak | None = None) -> Artifact:
        """Turn the sealed attempt into the artifact by one rename, and record it with its usage. Raises OSError for a full disk."""
        artifact = self._place(attempt.folder, sealed)
        self.index.record(attempt, sealed, artifact, peak)
        return artifact

    def _place(self, folder: Path, sealed: Manifest) -> Artifact:
        """Move a sealed directory to its place among the artifacts. After a power cut it is there, or was never recorded."""
        final = self.folder(sealed.stage, sealed.fingerprint)
        final.parent.mkdir(exist_ok=True)
        try:
            folder.rename(final)
        except OSError:
            if not os.path.lexists(final):
                raise
            self._set_aside(sealed.stage, sealed.fingerprint)
            folder.rename(final)
        self._sync_names(sealed.stage)
        return self.index.artifact(sealed, _manifest_bytes(final))

    def _sync_names(self, stage: str) -> None:
        _sync_one(self.artifacts_dir / stage)
        _sync_one(self.artifacts_dir)

    def arriving(self, stage: str, fingerprint: Fingerprint) -> Path:
        """Return the directory of an artifact being pulled. `sweep` removes that of a killed pull."""
        return self.work_dir / f"{fingerprint}.pulled" / stage / fingerprint

    def discard(self, stage: str, fingerprint: Fingerprint) -> None:
        """Remove the received files of an artifact. The caller holds the claim."""
        shutil.rmtree(self.arriving(stage, fingerprint).parents[1], ignore_errors=True)

    def receive(self, sealed: Manifest) -> Artifact:
        """Publish a received artifact by one rename. The caller holds the claim and has checked every file."""
        folder = self.arriving(sealed.stage, sealed.fingerprint)
        _sync(folder)
        artifact = self._place(folder, sealed)
        self.discard(sealed.stage, sealed.fingerprint)
        return self.index.add_artifact(sealed, artifact)

    @contextmanager
    def attaching(self, folder: Path) -> Iterator[Callable[[str], None]]:
        """Yield a function that atomically writes the signed statement of the artifact in `folder`.

        Claims the artifact meanwhile. Raises StateError if another process holds the claim.
        """
        self.check_writable()
        fingerprint = Fingerprint(folder.name)
        claim = self.claim(fingerprint)
        if claim is None:
            raise StateError(f"{folder}: another process works on it", hint="try again when it has ended")

        def write(envelope: str) -> None:
            temporary = self.work_dir / f"{fingerprint}.manifest"  # `sweep` removes a killed process's file
            temporary.mkdir(exist_ok=True)
            (temporary / manifest.ENVELOPE).write_text(envelope, encoding="utf-8")
            (temporary / manifest.ENVELOPE).replace(folder / manifest.ENVELOPE)
            temporary.rmdir()

        with claim:
            yield write

    def fail(self, attempt: AttemptRow, outcome: str, error: StageError | None) -> None:
        """Record a failed attempt. Its directory stays for the log until the next attempt."""
        self.index.end_attempt(attempt, outcome, error)

    # upkeep

    def _artifact_folders(self) -> Iterator[Path]:
        for stage in sorted(_names(self.artifacts_dir)):
            for name in sorted(_names(self.artifacts_dir / stage)):
                yield self.artifacts_dir / stage / name

    def repair(self) -> tuple[int, str, list[tuple[Discrepancy, str]]]:
        """Rebuild the index and repair artifacts, as far as possible without reading their contents.

        Returns the number of artifacts, a description of lost index data, and each discrepancy with the action taken.
        Raises StateError for an artifact that cannot be read or that another release wrote.
        """
        self.check_writable()
        lost = self.index.remake()
        count, done = 0, list[tuple[Discrepancy, str]]()
        for folder in self._artifact_folders():
            findings = _inspected(folder, contents=False)
            if findings is not None:
                done += self._put_right(folder, findings)
                count += _damage(findings) is None
        return count, lost, done

    def _put_right(self, folder: Path, findings: tuple[Discrepancy, ...]) -> Iterator[tuple[Discrepancy, str]]:
        damage = _damage(findings)
        if damage is not None:
            yield damage, self._set_aside(damage.stage, damage.fingerprint)
            return
        lost = [each.path for each in findings if each.kind is Kind.RECORD]
        for each in findings:
            path = folder / each.path
            if each.kind is Kind.MODE:
                path.chmod(path.stat().st_mode & ~0o222 | 0o400)
                yield each, "permissions restored"
            elif each.kind is Kind.DERIVED:
                path.unlink()
                if path.parent.name == "__pycache__" and not any(path.parent.iterdir()):
                    path.parent.rmdir()
                yield each, "removed"
            else:
                yield each, self._move_aside(each.stage, each.fingerprint, each.path)
        if lost:
            # A temporary file and a rename: if killed here, the artifact still has a manifest.
            temporary = self.work_dir / f"{folder.name}.manifest"
            temporary.mkdir(exist_ok=True)
            sealed = manifest.read(folder)
            replace(sealed, records=tuple(each for each in sealed.records if each.path not in lost)).write(temporary)
            (temporary / manifest.NAME).replace(folder / manifest.NAME)
            temporary.rmdir()
            self._adopt(folder)

    def verify(
        self, judge: Callable[[Path], Iterable[Discrepancy]] = lambda _: ()
    ) -> Iterator[list[tuple[Discrepancy, str]]]:
        """Compare the contents of every artifact with its manifest. Yields discrepancies with the actions taken.

        `judge` may add findings for an undamaged artifact. Damaged artifacts are set aside, so that a run rebuilds
        them. In a read-only workspace they stay. Other discrepancies are left to `repair`. Raises StateError for an
        artifact that cannot be read or that another release wrote.
        """
        for folder in self._artifact_folders():
            findings = _inspected(folder, contents=True)
            if findings is None:
                continue
            sound = _damage(findings) is None
            done = "left to `store repair`" if sound else self._set_aside(folder.parent.name, folder.name)
            judged = judge(folder) if sound else ()
            yield [(each, done) for each in findings] + [(each, "left as it is") for each in judged]

    def remove(self, unused: Callable[[], Sequence[Artifact]]) -> list[Artifact]:
        """Remove unused artifacts, except claimed ones. Returns the removed ones.

        `unused` is called when no run can start here, since runs that have started meanwhile may need some of them. Raises
        StateError while any run is active in the workspace, since it may be about to read one.
        """
        self.check_writable()
        alone = claims.take(self.work_dir / _USERS, remove=False)
        if alone is None or self.claimed():
            if alone is not None:
                alone.release()
            raise StateError(
                f"{self.workspace}: a run in this workspace may need these artifacts",
                hint="try again when it has ended; pipeline status shows running stages",
            )
        removed: list[Artifact] = []
        with alone:
            artifacts = unused()
            for start in range(0, len(artifacts), _AT_ONCE):
                removed += self._remove(artifacts[start : start + _AT_ONCE])
        return removed

    def _remove(self, artifacts: Sequence[Artifact]) -> list[Artifact]:
        claimed = {each.fingerprint: claim for each in artifacts if (claim := self.claim(each.fingerprint)) is not None}
        gone = [each for each in artifacts if each.fingerprint in claimed]
        for each in gone:
            # One rename to a place that `sweep` covers if this process is killed, so no partial artifact remains.
            with suppress(FileNotFoundError):
                each.folder.rename(self.work_dir / f"{each.fingerprint}.0")
        self.index.remove_artifacts(claimed)
        for claim in claimed.values():  # before the slow part: claimed artifacts are shown as running
            claim.release()
        for fingerprint in claimed:
            shutil.rmtree(self.work_dir / f"{fingerprint}.0", ignore_errors=True)
        return gone

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Prevent removal of artifacts while the block runs. Raises StateError during a removal."""
        self.check_writable()
        shared = claims.take(self.work_dir / _USERS, shared=True, remove=False)
        if shared is None:
            raise StateError(
                f"{self.workspace}: another process is removing unused artifacts (pipeline store prune)",
                hint="try again in a moment",
            )
        with shared:
            yield

    def sweep(self) -> list[Path]:
        """Remove leftovers of killed pipelines from `work/`, except failed attempts with logs. Returns the removed directories."""
        self.check_writable()
        for fingerprint in self._with_lock():  # killed after publication, before the release of the claim
            claim = self.claim(fingerprint)
            if claim is not None:
                claim.release()
        for name in [name for name in _names(self.work_dir) if name.endswith(CLUSTER)]:
            if not (self.work_dir / name.removesuffix(CLUSTER)).is_dir():
                shutil.rmtree(self.work_dir / name, ignore_errors=True)
        removed = []
        for folder in self.left():
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
        return removed

    def left(self) -> Iterator[Path]:
        """Yield the abandoned attempts, which `sweep` removes. Each is claimed until the next one is requested."""
        # Other files are not ours: the given directory may not be a workspace.
        folders = [name for name in _names(self.work_dir) if _ATTEMPT.fullmatch(name)]
        latest = self.index.attempts({Fingerprint(name.split(".")[0]) for name in folders})
        for name in folders:
            fingerprint = Fingerprint(name.split(".")[0])
            if (self.work_dir / f"{name}{CLUSTER}").is_dir():  # a cluster may be using it
                continue
            if _is_log(latest.get(fingerprint), name) or (claim := self.claim(fingerprint)) is None:
                continue
            with claim:  # it may have failed meanwhile
                if not _is_log(self.index.attempts([fingerprint]).get(fingerprint), name):
                    yield self.work_dir / name

    def stale(self) -> list[Path]:
        """Return partial downloads that have not been written to for a long time."""
        oldest_s = time.time() - _STALE_AFTER_S
        partial = (each for each in (self.work_dir / "partial").glob("*") if each.is_dir())
        return [each for each in partial if max(path.lstat().st_mtime for path in (each, *each.rglob("*"))) < oldest_s]

    def remove_stale(self, folders: Iterable[Path]) -> None:
        """Remove some of these, except those in use by a process."""
        for folder in folders:
            claim = claims.take(folder.with_name(f"{folder.name}.lock"), remove=False)
            if claim is not None:
                shutil.rmtree(folder, ignore_errors=True)
                claim.release()


def _is_log(latest: AttemptRow | None, name: str) -> bool:
    """Return True if `name` is the directory of the latest, ended attempt at a stage run: it is kept for the log."""
    return latest is not None and latest.outcome is not None and latest.folder.name == name


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise StateError(
            f"{folder} is not a directory", hint="trtllm-pipeline did not create it: move it away"
        ) from None


def _obstacle(error: OSError, workspace: Path) -> str:
    """Return why the directories of a workspace cannot be created."""
    if isinstance(error, FileExistsError):
        path = Path(error.filename)
        return f"{path} is a link to nothing: {path.readlink()}" if path.is_symlink() else f"{path} is not a directory"
    return disk.no_room(error, workspace) or error.strerror or str(error)


def _inspected(folder: Path, *, contents: bool) -> tuple[Discrepancy, ...] | None:
    """Return the findings of `inspect`. None if another process has removed the artifact."""
    try:
        findings = inspect(folder, contents=contents)
    except StateError:
        if folder.is_dir():
            raise
        return None
    return findings if folder.is_dir() else None


def _damage(findings: tuple[Discrepancy, ...]) -> Discrepancy | None:
    return next((each for each in findings if each.kind is Kind.DAMAGED), None)


def _manifest_bytes(folder: str | Path) -> int:
    return os.stat(f"{folder}/{manifest.NAME}").st_size


def _sync(folder: str | Path) -> None:
    """Sync a directory tree to the disk. Other leftovers of programs, such as sockets, cannot be opened."""
    for base, _, files in os.walk(folder, topdown=False):
        for name in files:
            path = os.path.join(base, name)
            if stat.S_ISREG(os.lstat(path).st_mode):
                _sync_one(path)
        _sync_one(base)


def _sync_one(path: str | Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        error.filename = os.fspath(path)  # so that the message names the disk
        raise
    finally:
        os.close(fd)
