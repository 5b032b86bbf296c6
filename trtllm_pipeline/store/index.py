"""The SQLite index of a workspace: what is published, what was tried, which runs there were, how long things took.

Everything that matters can be rebuilt from the manifests (`Store.repair`); losing the index loses history, not results.
WAL with synchronous=NORMAL survives a kill at any instant; a power loss may cost the last rows, which come back from
the manifests as well.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.domain import Fingerprint, Json
from trtllm_pipeline.errors import StateError
from trtllm_pipeline.store.manifest import Manifest

SCHEMA: Final = 2

_TABLES: Final = """
CREATE TABLE IF NOT EXISTS artifacts (
  fingerprint TEXT PRIMARY KEY, stage TEXT NOT NULL, label TEXT NOT NULL, key TEXT NOT NULL,
  files TEXT NOT NULL, manifest_bytes INTEGER NOT NULL, size_bytes INTEGER NOT NULL, duration_s REAL NOT NULL,
  published_s REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS attempts (
  id INTEGER PRIMARY KEY, run TEXT NOT NULL, stage TEXT NOT NULL, fingerprint TEXT NOT NULL, number INTEGER NOT NULL,
  folder TEXT NOT NULL, started_s REAL NOT NULL, ended_s REAL, outcome TEXT, failure TEXT, message TEXT, hint TEXT);
CREATE INDEX IF NOT EXISTS attempts_by_fingerprint ON attempts (fingerprint);
CREATE TABLE IF NOT EXISTS runs (
  id TEXT PRIMARY KEY, matrix TEXT NOT NULL, command TEXT NOT NULL, started_s REAL NOT NULL, ended_s REAL,
  exit_code INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS latest (
  cell TEXT NOT NULL, stage TEXT NOT NULL, fingerprint TEXT NOT NULL, key TEXT NOT NULL,
  PRIMARY KEY (cell, stage)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS infeasible (fingerprint TEXT PRIMARY KEY, message TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS pins (request TEXT PRIMARY KEY, pinned TEXT NOT NULL) WITHOUT ROWID;
"""
_NAMES: Final = ("artifacts", "attempts", "runs", "latest", "infeasible", "pins")


class UnusableIndexError(Exception):
    """The file is damaged, or of an older release: it is to be put aside under `suffix`, and made anew."""

    def __init__(self, message: str, *, suffix: str) -> None:
        super().__init__(message)
        self.suffix = suffix


@dataclass(frozen=True, slots=True)
class ArtifactRow:
    """A published artifact as the index knows it.

    `files` are paths below `out/` with their sizes, `size_bytes` their sum; `manifest_bytes` is the manifest's own size.
    """

    fingerprint: Fingerprint
    stage: str
    label: str
    files: tuple[tuple[str, int], ...]
    manifest_bytes: int
    size_bytes: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """One attempt at a stage run. `outcome` is None while it runs, or when its pipeline was killed."""

    id: int
    run: str
    stage: str
    fingerprint: Fingerprint
    number: int
    folder: Path
    started_s: float
    ended_s: float | None
    outcome: str | None
    failure: str | None
    message: str | None
    hint: str | None


@dataclass(frozen=True, slots=True)
class RunRow:
    """One invocation of `run` or `resume`."""

    id: str
    matrix: str
    command: tuple[str, ...]
    started_s: float
    ended_s: float | None
    exit_code: int | None


class Index:
    """One connection to a workspace's `state.db`. Other processes may write at the same time.

    Opening raises UnusableIndexError for what can be rebuilt, StateError for what cannot be helped from here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._db = sqlite3.connect(path, timeout=30.0, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                self._db.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version={SCHEMA}; COMMIT;")
            elif version > SCHEMA:
                raise StateError(
                    f"{path}: index of schema {version}, this release reads {SCHEMA}",
                    hint="use the release that wrote it, or move state.db away: it is rebuilt from the manifests",
                )
            elif version < SCHEMA:
                self._db.close()
                raise UnusableIndexError(f"{path}: index of an older release", suffix=f"schema-{version}")
            for table in _NAMES:  # damage is better found here than in the middle of a run
                self._db.execute(f"SELECT * FROM {table} LIMIT 1").fetchone()  # noqa: S608
        except sqlite3.OperationalError as error:
            raise StateError(f"{path}: cannot open the index: {error}", hint="is the folder writable?") from error
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise UnusableIndexError(f"{path}: damaged index: {error}", suffix="damaged") from error

    def close(self) -> None:
        """Close the connection."""
        self._db.close()

    def sound(self) -> bool:
        """Whether every page of the file can be made sense of. Reads all of it."""
        try:
            return bool(self._db.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok")
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError:
            return False

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All changes inside are made together, or none; each alone would be a transaction of its own."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:  # some errors have rolled back already
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # artifacts

    def artifacts(self, fingerprints: Iterable[Fingerprint]) -> dict[Fingerprint, ArtifactRow]:
        """The rows of those of `fingerprints` that are published."""
        found: dict[Fingerprint, ArtifactRow] = {}
        wanted = list(fingerprints)
        for start in range(0, len(wanted), 500):
            part = wanted[start : start + 500]
            marks = ",".join("?" * len(part))
            columns = "fingerprint, stage, label, files, manifest_bytes, size_bytes, duration_s"
            query = f"SELECT {columns} FROM artifacts WHERE fingerprint IN ({marks})"  # noqa: S608
            for row in self._db.execute(query, part):
                files = tuple((name, size) for name, size in json.loads(row[3]))
                found[row[0]] = ArtifactRow(row[0], row[1], row[2], files, row[4], row[5], row[6])
        return found

    def all_artifacts(self) -> list[ArtifactRow]:
        """Every published artifact, by stage and label."""
        query = "SELECT fingerprint FROM artifacts ORDER BY stage, label, fingerprint"
        order = [row[0] for row in self._db.execute(query)]
        found = self.artifacts(order)
        return [found[fingerprint] for fingerprint in order]

    def add_artifact(self, manifest: Manifest, manifest_bytes: int) -> None:
        """Record a published artifact, whose manifest file has this size."""
        files = [[entry.path, entry.size] for entry in manifest.files]
        duration = manifest.provenance.get("duration_s")
        self._db.execute(
            "INSERT OR REPLACE INTO artifacts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                manifest.fingerprint,
                manifest.stage,
                manifest.label,
                manifest.key,
                json.dumps(files),
                manifest_bytes,
                manifest.size_bytes,
                duration if isinstance(duration, (int, float)) else 0.0,
                time.time(),
            ),
        )

    def remove_artifact(self, fingerprint: Fingerprint) -> None:
        """Forget an artifact whose files are gone."""
        self._db.execute("DELETE FROM artifacts WHERE fingerprint = ?", (fingerprint,))

    def key_of(self, fingerprint: Fingerprint) -> str | None:
        """The canonical key of a published artifact."""
        row = self._db.execute("SELECT key FROM artifacts WHERE fingerprint = ?", (fingerprint,)).fetchone()
        return row[0] if row else None

    def durations(self) -> dict[str, float]:
        """Mean seconds of the latest artifacts by label ("stage/toolchain/model/precision") and by each prefix of it."""
        totals: dict[str, tuple[float, int]] = {}
        query = "SELECT label, duration_s FROM artifacts ORDER BY published_s DESC LIMIT 2000"
        for label, seconds in self._db.execute(query):
            parts = label.split("/")
            for depth in range(1, len(parts) + 1):
                prefix = "/".join(parts[:depth])
                total, count = totals.get(prefix, (0.0, 0))
                totals[prefix] = (total + seconds, count + 1)
        return {prefix: total / count for prefix, (total, count) in totals.items()}

    # attempts

    def last_attempt(self, fingerprint: Fingerprint) -> int:
        """Number of the latest attempt at this stage run, 0 when it was never tried."""
        query = "SELECT max(number) FROM attempts WHERE fingerprint = ?"
        return int(self._db.execute(query, (fingerprint,)).fetchone()[0] or 0)

    def begin_attempt(self, run: str, stage: str, fingerprint: Fingerprint, number: int, folder: Path) -> int:
        """Record that an attempt starts; returns its id."""
        cursor = self._db.execute(
            "INSERT INTO attempts (run, stage, fingerprint, number, folder, started_s) VALUES (?, ?, ?, ?, ?, ?)",
            (run, stage, fingerprint, number, str(folder), time.time()),
        )
        return int(cursor.lastrowid or 0)

    def end_attempt(
        self,
        attempt: int,
        outcome: str,
        *,
        folder: Path,
        failure: str | None = None,
        message: str | None = None,
        hint: str | None = None,
    ) -> None:
        """Record how an attempt ended, and where its folder now is."""
        self._db.execute(
            "UPDATE attempts SET ended_s = ?, outcome = ?, folder = ?, failure = ?, message = ?, hint = ? WHERE id = ?",
            (time.time(), outcome, str(folder), failure, message, hint, attempt),
        )

    def attempts(self, fingerprints: Iterable[Fingerprint]) -> dict[Fingerprint, AttemptRow]:
        """The latest attempt at each of `fingerprints` that was ever tried."""
        wanted = set(fingerprints)
        if not wanted:
            return {}
        latest = self._attempts("id IN (SELECT max(id) FROM attempts GROUP BY fingerprint)", ())
        return {attempt.fingerprint: attempt for attempt in latest if attempt.fingerprint in wanted}

    def attempts_of(self, run: str) -> tuple[AttemptRow, ...]:
        """Every attempt that a run made, in the order they began."""
        return self._attempts("run = ? ORDER BY id", (run,))

    def _attempts(self, where: str, values: tuple[str, ...]) -> tuple[AttemptRow, ...]:
        columns = "id, run, stage, fingerprint, number, folder, started_s, ended_s, outcome, failure, message, hint"
        rows = self._db.execute(f"SELECT {columns} FROM attempts WHERE {where}", values)  # noqa: S608 - our own words
        found = []
        for row in rows:
            fields = (*row[:5], Path(row[5]), *row[6:])
            found.append(AttemptRow(*fields))
        return tuple(found)

    # runs

    def begin_run(self, run: str, matrix: str, command: tuple[str, ...]) -> None:
        """Record that a run starts."""
        self._db.execute(
            "INSERT INTO runs (id, matrix, command, started_s) VALUES (?, ?, ?, ?)",
            (run, matrix, json.dumps(command), time.time()),
        )

    def end_run(self, run: str, exit_code: int) -> None:
        """Record how a run ended."""
        self._db.execute("UPDATE runs SET ended_s = ?, exit_code = ? WHERE id = ?", (time.time(), exit_code, run))

    def runs(self) -> tuple[RunRow, ...]:
        """All runs, the newest first."""
        query = "SELECT id, matrix, command, started_s, ended_s, exit_code FROM runs ORDER BY started_s DESC, id DESC"
        return tuple(RunRow(row[0], row[1], tuple(json.loads(row[2])), *row[3:]) for row in self._db.execute(query))

    # what cells last had, for explanations

    def latest(self, cells: Iterable[str]) -> dict[tuple[str, str], tuple[Fingerprint, str]]:
        """For (cell, stage): fingerprint and key of the newest result."""
        wanted = set(cells)
        return {
            (row[0], row[1]): (row[2], row[3])
            for row in self._db.execute("SELECT cell, stage, fingerprint, key FROM latest")
            if row[0] in wanted
        }

    def set_latest(self, rows: Iterable[tuple[str, str, Fingerprint, str]]) -> None:
        """Remember (cell, stage, fingerprint, key) as each cell's newest results, in one transaction."""
        with self.transaction():
            self._db.executemany("INSERT OR REPLACE INTO latest VALUES (?, ?, ?, ?)", rows)

    # remembered answers

    def add_infeasible(self, fingerprint: Fingerprint, message: str) -> None:
        """Remember that these inputs can never work."""
        self._db.execute("INSERT OR REPLACE INTO infeasible VALUES (?, ?)", (fingerprint, message))

    def forget_infeasible(self) -> int:
        """Forget all remembered impossibilities; returns how many."""
        return self._db.execute("DELETE FROM infeasible").rowcount

    def infeasible(self) -> dict[Fingerprint, str]:
        """All remembered impossibilities with their reason."""
        return dict(self._db.execute("SELECT fingerprint, message FROM infeasible"))

    def pin(self, request: str) -> Mapping[str, Json] | None:
        """What a request for a model was pinned to before, e.g. a branch to a commit."""
        row = self._db.execute("SELECT pinned FROM pins WHERE request = ?", (request,)).fetchone()
        return _mapping(row[0]) if row else None

    def set_pin(self, request: str, pinned: Mapping[str, Json]) -> None:
        """Remember what a request for a model was pinned to."""
        self._db.execute("INSERT OR REPLACE INTO pins VALUES (?, ?)", (request, json.dumps(pinned)))

    def forget_pins(self) -> int:
        """Ask the hubs anew next time; returns how many pins were forgotten."""
        return self._db.execute("DELETE FROM pins").rowcount


def _mapping(text: str) -> Mapping[str, Json]:
    value: dict[str, Any] = json.loads(text)
    return value
