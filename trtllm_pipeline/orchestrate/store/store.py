"""The store of a workspace: looks up artifacts, creates attempts, and publishes them atomically.

    WORKSPACE/
      state.db                   index; `store repair` rebuilds it from manifests and history
      history.jsonl              what the index knows and no manifest says
      store/STAGE/FINGERPRINT/   an artifact: manifest.json, job.json, log, out/ (the files themselves)
      work/FINGERPRINT.N/        attempt N: job.json, log, out/; becomes the artifact by one rename
      work/FINGERPRINT.lock      the claim of whoever works on it
      work/FINGERPRINT.pulled/   around an artifact that is pulled
      work/partial/              partial downloads, to be continued
      runs/RUN_ID/               plan, report and lock file of each run
      damaged/STAGE/FINGERPRINT/ damaged artifacts that verify and repair set aside

`docs/formats.md` describes these files.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from trtllm_pipeline.base import Fingerprint, Json, StageError, StateError, disk, uncollected
from trtllm_pipeline.orchestrate.store import claims, manifest
from trtllm_pipeline.orchestrate.store.index import Artifact, AttemptRow, Index, Peak, Published
from trtllm_pipeline.orchestrate.store.manifest import Discrepancy, Kind, Manifest, inspect, whole
from trtllm_pipeline.tensorrt import OUT, PROGRESS_FILE

logger = logging.getLogger(__name__)

INDEX: Final = "state.db"
LOG: Final = "log"
_ATTEMPT: Final = re.compile(r"[0-9a-f]{32}\.(\d+|manifest|pulled)")
"""Directories in `work/`: an attempt at a stage run, a manifest on its way, or an artifact that is pulled."""
_USERS: Final = "users.lock"
"""Claimed together by all that use artifacts which they have found, alone by whoever removes some."""
_AT_ONCE: Final = 200
"""Artifacts that are claimed at once to be removed: each has an open file."""
_STALE_AFTER_S: Final = 7 * 86400
_CLAIM: Final = re.compile(r"([0-9a-f]{32})\.lock")
"""Files there: the claim on a stage run."""
CLUSTER: Final = ".cluster"
"""Ends the name of a directory beside an attempt: what is said between its node and the pipeline."""
_LARGE_BYTES: Final = 32 << 20
"""More is synced to the disk before it is published, so that a group of small artifacts does not wait for it."""
_DIRTY_BYTES: Final = 256 << 20
_DIRTY_BYTES_EACH: Final = 16 << 20
"""Where more waits to be written, of other programs too, an artifact's files are synced one by one: that takes as long as
writing so much."""


@dataclass(slots=True)
class Attempt:
    """A private directory to work in."""

    id: int
    stage: str
    fingerprint: Fingerprint
    number: int
    path: str

    @property
    def folder(self) -> Path:
        """The directory."""
        return Path(self.path)  # of many short stage runs, nobody asks for it

    @property
    def out(self) -> Path:
        """Where the stage's program writes."""
        return self.folder / OUT

    @property
    def log(self) -> Path:
        """Standard output and error of the stage's commands."""
        return self.folder / LOG


class Written(NamedTuple):
    """What an attempt has written, before it is read."""

    files: list[os.DirEntry[str]] | None
    """Files and links of its result; None where nobody has looked."""
    size_bytes: int
    """Together."""


NOT_LOOKED: Final = Written(None, 0)


def is_workspace(folder: Path) -> bool:
    """Whether `directory` is a workspace. It may have lost its index."""
    return (folder / INDEX).exists() or (folder / "store").is_dir()


class Store:
    """An open workspace; its directories are created if necessary. Raises StateError if it cannot be used.

    A read-only workspace, such as a colleague's or an archive, can be inspected: records stay in memory, and nothing is
    created, repaired or removed.
    """

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace.absolute()
        self.artifacts_dir = self.workspace / "store"
        self._artifacts = str(self.artifacts_dir)
        self.work_dir = self.workspace / claims.CLAIMS
        self._work = str(self.work_dir)
        self.runs_dir = self.workspace / "runs"
        database = self.workspace / INDEX
        self.unwritable = self._unwritable(database)
        """The first part of the workspace that is read-only; None if all of it can be written."""
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
            return None  # not a workspace yet; whether it can be one shows when it is made
        parts = (self.workspace, self.artifacts_dir, self.work_dir, self.runs_dir, database)
        return next((part for part in parts if part.exists() and not os.access(part, os.W_OK)), None)

    def check_writable(self) -> None:
        """Raise StateError if the workspace is read-only."""
        if self.unwritable is not None:
            raise StateError(
                f"{self.workspace} is read-only: no permission to write {self.unwritable}",
                hint="work in a copy of it (cp -r), or in another --workspace; status, report, logs, plan, explain, "
                "compare, recommend, export and store verify do not write into it",
            )

    def _manifests(self) -> Iterator[tuple[Manifest, int]]:
        """All valid manifests with their file sizes. Invalid ones are reported when the artifact is wanted."""
        for folder in self._artifact_folders():
            with suppress(StateError):
                yield manifest.read(folder), _manifest_bytes(folder)

    # looking up

    def folder(self, stage: str, fingerprint: Fingerprint) -> Path:
        """Directory of this artifact, published or not."""
        return self.artifacts_dir / stage / fingerprint

    @uncollected()
    def present(self, wanted: Mapping[Fingerprint, str]) -> dict[Fingerprint, Artifact]:
        """Those of `wanted` (fingerprint -> stage) that are published with all files of the right size.

        An artifact with a missing or changed file is set aside, so that it is made again. An artifact that was published
        but not indexed, because the pipeline was killed in between, is added to the index; while its pipeline lives, it is
        not there yet. Raises StateError if its files cannot be read or another release wrote it.
        """
        rows = self.index.artifacts(wanted)
        found, others = {}, {}
        for fingerprint, stage in wanted.items():
            row = rows.get(fingerprint)
            # Nearly all of a large plan are as they were: for them no call and no name that nobody needs.
            if row is not None and row.stage == stage and whole(row.path, row.files, row.manifest_bytes):
                found[fingerprint] = row
            else:
                others[fingerprint] = stage
        names = self._folders(others, rows)
        for fingerprint, stage in others.items():
            row = self._look(stage, fingerprint, rows.get(fingerprint), there=fingerprint in names[stage])
            if row is not None:
                found[fingerprint] = row
        return found

    def there(self, wanted: Mapping[Fingerprint, str]) -> set[Fingerprint]:
        """As `present`, for who only says what there is: no file is looked at of what the index has and a directory is there of."""
        published = self.index.published()
        names = self._folders(wanted, published)
        return {
            fingerprint
            for fingerprint, stage in wanted.items()
            if fingerprint in names[stage]
            and (fingerprint in published or self._look(stage, fingerprint, None, there=True) is not None)
        }

    def _folders(self, wanted: Mapping[Fingerprint, str], recorded: Collection[Fingerprint]) -> dict[str, set[str]]:
        """The names of all artifacts' directories, by stage, without those of `wanted` that somebody is about to record."""
        names = {stage: set(_names(self.artifacts_dir / stage)) for stage in set(wanted.values())}
        for fingerprint in [each for each in wanted if each not in recorded]:
            stage = wanted[fingerprint]
            if fingerprint in names[stage] and self.is_claimed(fingerprint):
                names[stage].remove(fingerprint)
        return names

    def get(self, stage: str, fingerprint: Fingerprint) -> Artifact | None:
        """One artifact if it is complete, as in `present`, without listing others."""
        if not os.path.isdir(
            f"{self._artifacts}/{stage}/{fingerprint}"
        ):  # the index need not be asked; it is put right by `present`
            return None
        return self._look(stage, fingerprint, self.index.artifacts((fingerprint,)).get(fingerprint), there=True)

    def _look(self, stage: str, fingerprint: Fingerprint, row: Artifact | None, *, there: bool) -> Artifact | None:
        if not there:
            if row is not None:
                self.index.remove_artifacts((fingerprint,))
            return None
        path = f"{self._artifacts}/{stage}/{fingerprint}"  # of a large plan, many
        if row is None or row.path != path or not whole(path, row.files, row.manifest_bytes):
            # The manifest decides: the index may not know it yet, or be damaged where nothing else shows it. What was
            # never recorded may not have reached the disk before a power cut: it is read.
            findings = _inspected(Path(path), contents=row is None)
            if findings is None:
                return self._look(stage, fingerprint, row, there=False)
            damage = _damage(findings)
            if damage is not None:
                logger.warning("%s; %s", damage, self._set_aside(stage, fingerprint))
                return None
            return self._adopt(Path(path))
        return row

    def _adopt(self, folder: Path) -> Artifact:
        artifact = self.index.artifact(sealed := manifest.read(folder), _manifest_bytes(folder))
        if self.unwritable is None:
            self.sync([artifact])
        return self.index.add_artifact(sealed, artifact)

    def _set_aside(self, stage: str, fingerprint: str) -> str:
        """Take a damaged artifact out of use but keep its files; returns what was done."""
        self.index.remove_artifacts((Fingerprint(fingerprint),))
        return "left where it is" if self.unwritable is not None else self._move_aside(stage, fingerprint)

    def _move_aside(self, stage: str, fingerprint: str, name: str = ".") -> str:
        """Move an artifact, or one file of it, below `damaged/`; returns what was done."""
        place = self.workspace / "damaged" / stage / fingerprint
        number = 1
        while os.path.lexists(place / name):
            number += 1
            place = place.with_name(f"{fingerprint}.{number}")
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            (self.artifacts_dir / stage / fingerprint / name).rename(target)
        except FileNotFoundError:  # somebody else has done it
            return "it is gone already"
        return f"set aside as {target.relative_to(self.workspace)}"

    # working

    def claim(self, fingerprint: Fingerprint) -> claims.Claim | None:
        """A claim on this stage run, or None if another process holds it."""
        return claims.take(f"{self._work}/{fingerprint}.lock")

    def claimants(self, fingerprint: Fingerprint) -> tuple[str, ...]:
        """The processes that have it, in words, as far as they can be seen."""
        return claims.users(Path(f"{self._work}/{fingerprint}.lock"))

    def claimed(self) -> frozenset[Fingerprint]:
        """The stage runs that a process works on now."""
        return frozenset(filter(self.is_claimed, self._with_lock()))

    def _with_lock(self) -> list[Fingerprint]:
        """Those with a file for their claim, which a killed pipeline leaves behind."""
        found = [_CLAIM.fullmatch(name) for name in _names(self.work_dir)]
        return [Fingerprint(each[1]) for each in found if each]

    def is_claimed(self, fingerprint: Fingerprint) -> bool:
        """Whether a process works on this stage run now."""
        return claims.is_held(f"{self._work}/{fingerprint}.lock")

    def tried(self, fingerprints: Iterable[Fingerprint]) -> dict[Fingerprint, int]:
        """Number of the latest attempt at each of these that has one."""
        return {fingerprint: row.number for fingerprint, row in self.index.attempts(fingerprints).items()}

    def begin(self, run: str, stage: str, fingerprint: Fingerprint, last: int | None = None) -> Attempt:
        """A new attempt directory; `last` is the number of the latest attempt, 0 for none, where it is known.

        The caller holds the claim, so leftovers of older attempts are removed.
        """
        number = 1 + (self.tried([fingerprint]).get(fingerprint, 0) if last is None else last)
        if number > 1:
            shutil.rmtree(self.work_dir / f"{fingerprint}.{number - 1}", ignore_errors=True)
        while True:
            name = f"{self._work}/{fingerprint}.{number}"
            try:
                os.mkdir(name)
                break
            except FileExistsError:  # another invocation's since, or the index was lost, and with it the count
                shutil.rmtree(name, ignore_errors=True)
                number += 1
        os.mkdir(f"{name}/{OUT}")
        return Attempt(
            self.index.begin_attempt(run, stage, fingerprint, number, name), stage, fingerprint, number, name
        )

    def unended(self, fingerprint: Fingerprint) -> Path | None:
        """The directory of the latest attempt if a killed invocation left it to a cluster; else None."""
        row = self.index.attempts([fingerprint]).get(fingerprint)
        if row is None or row.outcome is not None or not row.folder.with_name(f"{row.folder.name}{CLUSTER}").is_dir():
            return None
        return row.folder

    def join(self, run: str, stage: str, fingerprint: Fingerprint, folder: Path) -> Attempt:
        """The attempt of a killed invocation in `directory`, as one of this run."""
        number = int(folder.suffix[1:])
        attempt = self.index.begin_attempt(run, stage, fingerprint, number, folder)
        return Attempt(attempt, stage, fingerprint, number, str(folder))

    def written(self, attempt: Attempt) -> Written:
        """What an attempt has written. Where that cannot be listed it is nothing, and `seal` will tell why."""
        with suppress(OSError):
            files = list(manifest.below(f"{attempt.path}/{OUT}"))
            return Written(files, sum([each.stat(follow_symlinks=False).st_size for each in files]))
        return NOT_LOOKED

    def seal(
        self, attempt: Attempt, key: str, label: str, provenance: Mapping[str, Json], written: Written = NOT_LOOKED
    ) -> Manifest:
        """Digest the attempt's files and write the manifest. Reads every byte once; may run in a thread, and should for large ones.

        `written` is what `written` has found just now, where it was asked. Raises StageError if the attempt left no files, or something that an artifact may not contain.
        """
        folder = attempt.path  # as text: of short stage runs, paths are the most of it
        out = f"{folder}/{OUT}"
        found = list(manifest.below(out)) if written.files is None else written.files
        try:
            files = manifest.scan(out, found)
        except StateError as error:
            raise StageError(f"{attempt.stage}: {error.message}", log=attempt.log) from error
        if not files:
            raise StageError(f"{attempt.stage} succeeded but left no files in {out}", log=attempt.log)
        records = manifest.scan_records(folder)
        if any(entry.path == PROGRESS_FILE for entry in records):
            os.unlink(f"{folder}/{PROGRESS_FILE}")
            records = tuple(entry for entry in records if entry.path != PROGRESS_FILE)
        sealed = Manifest(attempt.stage, attempt.fingerprint, key, label, files, provenance, records)
        for each in found:
            # A file with other names may be the user's own: a local model is linked where it cannot be cloned.
            if not each.is_symlink() and (status := each.stat()).st_nlink == 1:
                os.chmod(each.path, status.st_mode & ~0o222)
        sealed.write(folder)
        if sealed.size_bytes > _LARGE_BYTES:
            _sync(folder)
        return sealed

    def publish(self, attempt: Attempt, sealed: Manifest, peak: Peak | None = None) -> Published:
        """Turn the attempt into the artifact by one rename. It has still to be synced, and then recorded with what it took.

        So a group of them shares what that costs, and after a power cut nothing is recorded that is not there.
        """
        return Published(attempt.id, sealed, self._place(attempt.path, sealed), time.time(), peak)

    def _place(self, folder: str | Path, sealed: Manifest) -> Artifact:
        """Move a sealed directory to where artifacts are."""
        final = f"{self._artifacts}/{sealed.stage}/{sealed.fingerprint}"
        try:
            os.rename(folder, final)
        except FileNotFoundError:  # the first of its stage
            Path(final).parent.mkdir(exist_ok=True)
            os.rename(folder, final)
        except OSError:
            if not os.path.lexists(final):
                raise
            self._set_aside(sealed.stage, sealed.fingerprint)
            os.rename(folder, final)
        return self.index.artifact(sealed, _manifest_bytes(final))

    def sync(self, artifacts: Sequence[Artifact]) -> None:
        """Bring artifacts to the disk, with their names. May run in a thread. Raises OSError."""
        little = max(_DIRTY_BYTES, len(artifacts) * _DIRTY_BYTES_EACH)
        if _dirty_bytes() <= little and _sync_one(self.artifacts_dir, _sync_file_system) == 0:
            return
        for artifact in artifacts:
            _sync(artifact.folder)
        for folder in {artifact.folder.parent for artifact in artifacts}:
            _sync_one(folder)
        _sync_one(self.artifacts_dir)

    def arriving(self, stage: str, fingerprint: Fingerprint) -> Path:
        """The directory of an artifact that is pulled, before it is published. `sweep` removes that of a killed pull."""
        return self.work_dir / f"{fingerprint}.pulled" / stage / fingerprint

    def discard(self, stage: str, fingerprint: Fingerprint) -> None:
        """Remove what has arrived of an artifact. The caller holds the claim."""
        shutil.rmtree(self.arriving(stage, fingerprint).parents[1], ignore_errors=True)

    def receive(self, sealed: Manifest) -> Artifact:
        """Publish what has arrived, by one rename. The caller holds the claim, and has checked every file."""
        folder = self.arriving(sealed.stage, sealed.fingerprint)
        _sync(folder)
        artifact = self._place(folder, sealed)
        self.discard(sealed.stage, sealed.fingerprint)
        self.sync([artifact])
        return self.index.add_artifact(sealed, artifact)

    @contextmanager
    def attaching(self, folder: Path) -> Iterator[Callable[[str], None]]:
        """A function that writes the signed statement of the artifact in `directory`, all of it or nothing.

        Nobody else signs or makes this artifact meanwhile. Raises StateError where somebody does.
        """
        self.check_writable()
        fingerprint = Fingerprint(folder.name)
        claim = self.claim(fingerprint)
        if claim is None:
            raise StateError(f"{folder}: another process works on it", hint="try again when it has ended")

        def write(envelope: str) -> None:
            beside = self.work_dir / f"{fingerprint}.manifest"  # a killed process's is swept
            beside.mkdir(exist_ok=True)
            (beside / manifest.ENVELOPE).write_text(envelope, encoding="utf-8")
            (beside / manifest.ENVELOPE).replace(folder / manifest.ENVELOPE)
            beside.rmdir()

        try:
            yield write
        finally:
            claim.release()

    def fail(self, attempt: Attempt, outcome: str, error: StageError | None) -> None:
        """Record a failed attempt. Its directory stays for the log until the next attempt."""
        self.index.end_attempt(attempt.id, outcome, attempt.path, error)

    # upkeep

    def _artifact_folders(self) -> Iterator[Path]:
        for stage in sorted(_names(self.artifacts_dir)):
            for name in sorted(_names(self.artifacts_dir / stage)):
                yield self.artifacts_dir / stage / name

    def repair(self) -> tuple[int, str, list[tuple[Discrepancy, str]]]:
        """Rebuild the index and repair artifacts, as far as possible without reading their contents.

        Returns the number of artifacts, what the index has lost, and every discrepancy with what was done about it. Raises
        StateError for an artifact that cannot be read or that another release wrote.
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
        lost = [found.path for found in findings if found.kind is Kind.RECORD]
        for found in findings:
            path = folder / found.path
            if found.kind is Kind.MODE:
                path.chmod(path.stat().st_mode & ~0o222 | 0o400)
                yield found, "permissions restored"
            elif found.kind is Kind.DERIVED:
                path.unlink()
                if path.parent.name == "__pycache__" and not any(path.parent.iterdir()):
                    path.parent.rmdir()
                yield found, "removed"
            else:
                yield found, self._move_aside(found.stage, found.fingerprint, found.path)
        if lost:
            # Beside and renamed: killed here, the artifact still has a manifest.
            beside = self.work_dir / f"{folder.name}.manifest"
            beside.mkdir(exist_ok=True)
            sealed = manifest.read(folder)
            replace(sealed, records=tuple(each for each in sealed.records if each.path not in lost)).write(beside)
            (beside / manifest.NAME).replace(folder / manifest.NAME)
            beside.rmdir()
            self._adopt(folder)

    def verify(
        self, judge: Callable[[Path], Iterable[Discrepancy]] = lambda _: ()
    ) -> Iterator[list[tuple[Discrepancy, str]]]:
        """Compare the contents of every artifact with its manifest; yields discrepancies with what was done about them.

        `judge` may have more to say of an artifact that is not damaged. Damaged artifacts are set aside, so that a run makes them again; in a read-only workspace nothing is moved. Other
        discrepancies are left to `repair`. Raises StateError for an artifact that cannot be read or that another release
        wrote.
        """
        for folder in self._artifact_folders():
            findings = _inspected(folder, contents=True)
            if findings is None:
                continue
            sound = _damage(findings) is None
            done = "left to `store repair`" if sound else self._set_aside(folder.parent.name, folder.name)
            judged = judge(folder) if sound else ()
            yield [(found, done) for found in findings] + [(found, "left as it is") for found in judged]

    def remove(self, unused: Callable[[], Sequence[Artifact]]) -> list[Artifact]:
        """Remove artifacts; returns those that were removed: not what somebody works on.

        `unused` is asked once nothing can begin here: what has run since its caller looked may need some of them. Raises
        StateError while anything runs in the workspace: it may be about to read one.
        """
        self.check_writable()
        alone = claims.take(self.work_dir / _USERS, remove=False)
        if alone is None or self.claimed():
            if alone is not None:
                alone.release()
            raise StateError(
                f"{self.workspace}: something is running in this workspace and may need what would be removed",
                hint="try again when it has ended; pipeline status shows what is running",
            )
        removed: list[Artifact] = []
        try:
            artifacts = unused()
            for start in range(0, len(artifacts), _AT_ONCE):
                removed += self._remove(artifacts[start : start + _AT_ONCE])
        finally:
            alone.release()
        return removed

    def _remove(self, artifacts: Sequence[Artifact]) -> list[Artifact]:
        claimed = {each.fingerprint: claim for each in artifacts if (claim := self.claim(each.fingerprint)) is not None}
        gone = [each for each in artifacts if each.fingerprint in claimed]
        for each in gone:
            # By one rename, to where `sweep` finds it if this process is killed: never half an artifact in its place.
            with suppress(FileNotFoundError):
                each.folder.rename(self.work_dir / f"{each.fingerprint}.0")
        self.index.remove_artifacts(claimed)
        for claim in claimed.values():  # before what takes long: what is claimed reads as running
            claim.release()
        for fingerprint in claimed:
            shutil.rmtree(self.work_dir / f"{fingerprint}.0", ignore_errors=True)
        return gone

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """As long as the block runs, nothing is removed here: it may need what it found. Raises StateError while something is."""
        self.check_writable()
        shared = claims.take(self.work_dir / _USERS, shared=True, remove=False)
        if shared is None:
            raise StateError(
                f"{self.workspace}: another process removes unused artifacts (pipeline store prune)",
                hint="try again in a moment",
            )
        try:
            yield
        finally:
            shared.release()

    def sweep(self) -> list[Path]:
        """Remove what killed pipelines left in `work/`, except failed attempts with their logs. Returns the directories removed."""
        self.check_writable()
        for fingerprint in self._with_lock():  # killed after it had published, before it let go
            claim = self.claim(fingerprint)
            if claim is not None:
                claim.release()
        for name in [name for name in _names(self.work_dir) if name.endswith(CLUSTER)]:
            if not (self.work_dir / name.removesuffix(CLUSTER)).is_dir():
                shutil.rmtree(self.work_dir / name, ignore_errors=True)
        removed = []
        for folder, claim in self._left():
            shutil.rmtree(folder, ignore_errors=True)
            claim.release()
            removed.append(folder)
        return removed

    def left(self) -> list[Path]:
        """The directories that `sweep` would remove."""
        found = []
        for folder, claim in self._left():
            claim.release()
            found.append(folder)
        return found

    def _left(self) -> Iterator[tuple[Path, claims.Claim]]:
        """Attempts that nobody continues with, each with a claim on it."""
        # Whatever else lies there is not ours: somebody may have named a directory that is no workspace.
        folders = [name for name in _names(self.work_dir) if _ATTEMPT.fullmatch(name)]
        latest = self.index.attempts({Fingerprint(name.split(".")[0]) for name in folders})
        for name in folders:
            fingerprint = Fingerprint(name.split(".")[0])
            if (self.work_dir / f"{name}{CLUSTER}").is_dir():  # a cluster may work in it
                continue
            if _is_log(latest.get(fingerprint), name) or (claim := self.claim(fingerprint)) is None:
                continue
            if _is_log(self.index.attempts([fingerprint]).get(fingerprint), name):  # it has failed since
                claim.release()
            else:
                yield self.work_dir / name, claim

    def stale(self) -> list[Path]:
        """Partial downloads that were not written to for long."""
        oldest_s = time.time() - _STALE_AFTER_S
        partial = (each for each in (self.work_dir / "partial").glob("*") if each.is_dir())
        return [each for each in partial if _newest_s(each) < oldest_s]

    def remove_stale(self, folders: Iterable[Path]) -> None:
        """Remove some of these, except those that a process continues now."""
        for folder in folders:
            claim = claims.take(folder.with_name(f"{folder.name}.lock"), remove=False)
            if claim is not None:
                shutil.rmtree(folder, ignore_errors=True)
                claim.release()


def _is_log(latest: AttemptRow | None, name: str) -> bool:
    """Whether the directory called `name` is that of the latest attempt at a stage run, which has ended: it stays for the log."""
    return latest is not None and latest.outcome is not None and latest.folder.name == name


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise StateError(f"{folder} is not a directory", hint="trtllm-pipeline did not make it: move it away") from None


def _obstacle(error: OSError, workspace: Path) -> str:
    """Why the directories of a workspace cannot be made."""
    if isinstance(error, FileExistsError):
        path = Path(error.filename)
        return f"{path} is a link to nothing: {path.readlink()}" if path.is_symlink() else f"{path} is not a directory"
    return disk.no_room(error, workspace) or error.strerror or str(error)


def _inspected(folder: Path, *, contents: bool) -> tuple[Discrepancy, ...] | None:
    """What `inspect` finds; None of an artifact that is gone by now: others remove what nobody needs."""
    try:
        found = inspect(folder, contents=contents)
    except StateError:
        if folder.is_dir():
            raise
        return None
    return found if folder.is_dir() else None


def _damage(findings: tuple[Discrepancy, ...]) -> Discrepancy | None:
    return next((found for found in findings if found.kind is Kind.DAMAGED), None)


def _newest_s(folder: Path) -> float:
    """When anything below `directory` was last written."""
    return max((path.lstat().st_mtime for path in (folder, *folder.rglob("*"))), default=0.0)


def _manifest_bytes(folder: str | Path) -> int:
    return os.stat(f"{folder}/{manifest.NAME}").st_size


def _dirty_bytes() -> int:
    """What programs have written that the disks do not have yet; 0 where the kernel does not tell."""
    try:
        with open("/proc/meminfo", "rb") as file:  # noqa: PTH123
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith(b"Dirty:")), 0)
    except OSError:
        return 0


def _sync_file_system(fd: int) -> int:
    """Sync all of the file system of an open file: one call for any number of files. Returns 0, or -1 where it cannot be."""
    import ctypes

    return int(ctypes.CDLL(None).syncfs(fd))


def _sync(folder: str | Path) -> None:
    """Sync a directory tree to the disk. What else programs leave beside a result, such as a socket, cannot be opened."""
    for base, _, files in os.walk(folder, topdown=False):
        for name in files:
            path = os.path.join(base, name)
            if stat.S_ISREG(os.lstat(path).st_mode):
                _sync_one(path)
        _sync_one(base)


def _sync_one(path: str | Path, how: Callable[[int], int | None] | None = None) -> int:
    """Sync a file or directory, or do another thing with it; returns what that returns, 0 for nothing."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return (how or os.fsync)(fd) or 0
    except OSError as error:
        error.filename = os.fspath(path)  # by which the user is told which disk it is
        raise
    finally:
        os.close(fd)
