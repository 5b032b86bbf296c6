"""The SQLite index of a workspace (artifacts, attempts, runs, durations) and the history it can be rebuilt from.

The index is redundant: artifacts have their manifests, digests of files can be read again, and every other row is also a
line of `history.jsonl`, where a later line for the same row counts. So a lost or damaged index is rebuilt without loss.
Conversely, `store repair` restores lines that the history has lost from a sound index.
WAL with synchronous=NORMAL survives a kill at any time; a power loss may cost the last rows. Rows of attempts are
written in groups: when they started, with whatever is asked next; when they ended well, with all that was published with them.
"""

from __future__ import annotations

import itertools
import json
import os
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

from trtllm_pipeline.base import (
    Fingerprint,
    Json,
    StageError,
    StateError,
    encoding,
    reading,
    stamp,
    stamped_digest,
    write_all,
)
from trtllm_pipeline.orchestrate.store.database import DamagedError, Database, Rows
from trtllm_pipeline.orchestrate.store.manifest import Manifest
from trtllm_pipeline.tensorrt import OUT

HISTORY: Final = "history.jsonl"

_TABLES: Final = (
    """CREATE TABLE artifacts (
  fingerprint TEXT PRIMARY KEY, stage TEXT NOT NULL, label TEXT NOT NULL, files TEXT NOT NULL,
  manifest_bytes INTEGER NOT NULL, size_bytes INTEGER NOT NULL, duration_s REAL NOT NULL, key TEXT NOT NULL,
  published_s REAL NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE attempts (
  id INTEGER PRIMARY KEY, run TEXT NOT NULL, stage TEXT NOT NULL, fingerprint TEXT NOT NULL, number INTEGER NOT NULL,
  started_s REAL NOT NULL, folder TEXT NOT NULL, ended_s REAL, outcome TEXT, failure TEXT, message TEXT, hint TEXT)""",
    "CREATE INDEX attempts_by_fingerprint ON attempts (fingerprint)",
    """CREATE TABLE runs (
  number INTEGER PRIMARY KEY, run TEXT NOT NULL UNIQUE, matrix TEXT NOT NULL, command TEXT NOT NULL,
  started_s REAL NOT NULL, ended_s REAL, exit_code INTEGER)""",
    """CREATE TABLE latest (
  cell TEXT NOT NULL, stage TEXT NOT NULL, fingerprint TEXT NOT NULL, key TEXT, PRIMARY KEY (cell, stage)) WITHOUT ROWID""",
    """CREATE TABLE peaks (
  attempt INTEGER PRIMARY KEY, label TEXT NOT NULL, system TEXT NOT NULL, expected TEXT NOT NULL, taken TEXT NOT NULL)""",
    "CREATE TABLE infeasible (fingerprint TEXT PRIMARY KEY, reason TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE pins (request TEXT PRIMARY KEY, pinned TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE digests (path TEXT PRIMARY KEY, stamp TEXT NOT NULL, digest TEXT NOT NULL) WITHOUT ROWID",
)
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    **dict.fromkeys(("fingerprint", "stage", "label", "files", "run", "folder", "matrix", "command"), (str,)),
    **dict.fromkeys(("cell", "reason", "request", "pinned", "path", "stamp", "digest"), (str,)),
    **dict.fromkeys(("system", "expected", "taken"), (str,)),
    **dict.fromkeys(("key", "outcome", "failure", "message", "hint"), (str, type(None))),
    **dict.fromkeys(("id", "number", "attempt", "manifest_bytes", "size_bytes"), (int,)),
    **dict.fromkeys(("duration_s", "published_s", "started_s"), (int, float)),
    "ended_s": (int, float, type(None)),
    "exit_code": (int, type(None)),
}
"""Columns of all tables -> types of their values: a flipped bit may change the type of one."""
_FILE: Final = (str, int)
"""Types of a file's path and size."""
_LOGGED: Final = {
    "runs": (1, 7),
    "attempts": (1, 12),
    "latest": (2, 3),
    "peaks": (1, 5),
    "infeasible": (1, 2),
    "pins": (1, 2),
}
"""Tables of what no manifest has -> number of leading values that identify a row, and that a line of the history has."""
_EVENTS: Final = {
    **{
        table: f"INSERT OR REPLACE INTO {table} VALUES ({','.join('?' * size)})"  # noqa: S608 - our own words
        for table, (_, size) in _LOGGED.items()
    },
    "latest": "INSERT OR REPLACE INTO latest SELECT new.*, key FROM "
    "(SELECT ? AS cell, ? AS stage, ? AS fingerprint) AS new LEFT JOIN artifacts USING (fingerprint)",
    "latest service": "INSERT OR REPLACE INTO latest VALUES (?, ?, ?, ?)",
    "no infeasible": "DELETE FROM infeasible",
    "no pins": "DELETE FROM pins",
}
"""Events of the history, and the statement that applies each to the index, at once and when the index is rebuilt."""
_AMONG: Final = "fingerprint IN (SELECT value FROM json_each(?))"
"""Of a JSON list of any length."""
_TAIL_BYTES: Final = 64 << 10
"""Of the history, in which its newest event is looked for."""
_FEW: Final = 1000
"""Artifacts that are looked up one by one."""

_encode: Final = encoding(json.JSONEncoder(separators=(",", ":")))

T = TypeVar("T")
Row = tuple[Any, ...]
Value = str | int | float | None
Event = tuple[str, Sequence[Value]]
"""A row that was written, by its table, or rows that were removed."""


@dataclass(slots=True)  # not frozen, as Cell
class Artifact:
    """A published artifact. Nobody changes it. `files` are paths below `out` with their sizes, `size_bytes` their sum."""

    fingerprint: Fingerprint
    stage: str
    label: str
    files: tuple[tuple[str, int], ...]
    manifest_bytes: int = field(compare=False)
    """Size of the manifest itself."""
    size_bytes: int
    duration_s: float
    published_s: float = field(compare=False)
    path: str

    @property
    def folder(self) -> Path:
        """The directory around it, with manifest, job and log."""
        return Path(self.path)  # a large plan has many that nobody opens

    @property
    def out(self) -> Path:
        """The directory with its files."""
        return Path(f"{self.path}/{OUT}")


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """One attempt at a stage run. `outcome` is None while it runs, or if its pipeline was killed."""

    id: int
    run: str
    stage: str
    fingerprint: Fingerprint
    number: int
    started_s: float
    folder: Path
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

    @property
    def seconds(self) -> float | None:
        """How long it took; None of one that continues or was killed, and where the clock was set back meanwhile."""
        return None if self.ended_s is None or self.ended_s < self.started_s else self.ended_s - self.started_s


@dataclass(frozen=True, slots=True)
class Peak:
    """What one stage run took of memory and disk, in bytes by kind, beside what was expected of it."""

    label: str
    """As of durations: stage/toolchain/model/precision."""
    system: str
    """What it ran on, as far as that matters for memory."""
    expected: Mapping[str, int]
    taken: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Published:
    """What is to be recorded of an attempt that succeeded."""

    attempt: int
    manifest: Manifest
    artifact: Artifact
    ended_s: float
    peak: Peak | None = None


@dataclass(slots=True)
class _Begun:
    """An attempt that has not ended."""

    values: Row
    """The first of its row, but for the id."""
    id: int | None = None
    """None until it is written."""


class History:
    """The history of a workspace, one event per line.

    Lines are only appended, each in one write, and start with their checksum, so that damaged lines are detected.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, events: Iterable[Event]) -> None:
        """Append `events`, in one write unless the kernel cuts it short. After an OSError a first part of them may be
        there, the last line of it incomplete, which readers skip.
        """
        texts = [_encode([name, *values]).encode() for name, values in events]
        # The line's end comes first: after a write that was cut short, the next one still starts a line.
        data = b"".join(b"\n%08x %b" % (zlib.crc32(text), text) for text in texts)
        try:
            fd = reading.open_fd(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        except reading.NotAFileError as error:
            raise self._unusable(error) from error
        try:
            write_all(fd, data)
        finally:
            os.close(fd)

    def _unusable(self, error: reading.NotAFileError) -> StateError:
        return StateError(
            f"{self.path} {error.strerror}", hint="move it away; pipeline store repair writes the history again"
        )

    def newest(self) -> Event | None:
        """The newest event that is readable; None if there is none near the end. Raises StateError, OSError."""
        try:
            file = self._file()
        except FileNotFoundError:
            return None
        with file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
        return next(filter(None, (_event(line) for line in reversed(lines))), None)

    def events(self) -> Iterator[Event | None]:
        """All events, the oldest first; None for a damaged line. Raises StateError, OSError."""
        try:
            file = self._file()
        except FileNotFoundError:
            return
        with file:
            for line in filter(None, map(bytes.strip, file)):
                yield _event(line)

    def _file(self) -> BinaryIO:
        try:
            return reading.open_file(self.path)
        except reading.NotAFileError as error:
            raise self._unusable(error) from error


def _event(line: bytes) -> Event | None:
    """The event in a line of the history; None for a damaged one."""
    checksum, _, text = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        return None
    name, *values = json.loads(text)
    return name, values


class Index(Database):
    """A workspace's `state.db` and its history. Other processes may write at the same time.

    `manifests` returns all manifests with their file sizes. With `read_only` nothing is written, and changes are lost at the
    end. Raises StateError if the index cannot be used.
    """

    SCHEMA = 6
    TABLES = _TABLES

    def __init__(
        self, path: Path, manifests: Callable[[], Iterable[tuple[Manifest, int]]], *, read_only: bool = False
    ) -> None:
        self.history = History(path.with_name(HISTORY))
        self._workspace = path.parent
        self._manifests = manifests
        self._runs: dict[str, Row] = {}
        """Rows of runs that have not ended."""
        self._begun: dict[int, _Begun] = {}
        """Attempts that have not ended, by the number that they have here."""
        self._unwritten: dict[int, None] = {}
        """Those of them that are not in the file yet."""
        self._numbers = itertools.count()
        super().__init__(path, read_only=read_only)

    def _fill(self, db: sqlite3.Connection, known: Rows) -> str | None:
        db.executemany("INSERT OR REPLACE INTO digests VALUES (?, ?, ?)", known.pop("digests", ()))
        artifacts = events = damaged = 0
        for found, manifest_bytes in self._manifests():
            _add_artifact(db, found, self.artifact(found, manifest_bytes))
            artifacts += 1
        for event in self.history.events():
            events += 1
            try:
                if event is None:
                    raise KeyError
                db.execute(_EVENTS[event[0]], event[1])
            except (KeyError, sqlite3.Error):
                damaged += 1
        lacked = _lacked(db, known, sound=events > 0 and not damaged)
        if lacked:
            self._apply(db, lacked)
        for cell, stage, found, key in known.get("latest", ()):  # its artifact may be gone
            change = "UPDATE latest SET key = ? WHERE (cell, stage, fingerprint) = (?, ?, ?) AND key IS NULL"
            db.execute(change, (key, cell, stage, found))
        if damaged:
            kept = "; everything in the old index is kept" if known else ""
            return f"without {damaged} of {events} lines of {HISTORY}, which are damaged{kept}"
        if lacked:
            return f"and from the old index, which had what {HISTORY} lacks"
        if events:
            return "nothing is lost"
        return f"without the history of runs, since {HISTORY} is missing" if artifacts else None

    def _is_behind(self, db: sqlite3.Connection) -> bool:
        """By the newest line of the history, which is written before the row: all that is lost of a log is its end."""
        name, values = self.history.newest() or ("", ())
        if name not in _EVENTS:
            return False  # of another release
        if name.startswith("no "):
            return db.execute(f"SELECT 1 FROM {name[3:]}").fetchone() is not None  # noqa: S608 - our own words
        table = name.partition(" ")[0]
        first, size = _LOGGED[table]
        row = tuple(values[:size])
        columns = [column[1] for column in db.execute(f"PRAGMA table_info({table})")][:size]
        if [column for column, value in zip(columns, row, strict=False) if type(value) not in _TYPES[column]]:
            return False
        identified = " AND ".join(f"{column} = ?" for column in columns[:first])
        found = db.execute(f"SELECT {','.join(columns)} FROM {table} WHERE {identified}", row[:first])  # noqa: S608 - our own words
        return row not in found.fetchall()

    def _known(self, db: sqlite3.Connection) -> Rows:
        """The rows that no manifest has."""
        tables = (*_LOGGED, "digests")
        known = {table: _typed(db.execute(f"SELECT * FROM {table}")) for table in tables}  # noqa: S608 - our own words
        for run in known["runs"]:
            _words(run[3])
        return known

    def run(self, operation: Callable[[sqlite3.Connection], T]) -> T:
        """See `Database.run`. What was begun is written before."""
        self.commit()
        return super().run(operation)

    def close(self) -> None:
        """See `Database.close`. What was begun is written before."""
        self.commit()
        super().close()

    def _rows(self, query: str, values: Sequence[Value] = ()) -> list[Row]:
        """The rows of a query."""
        return self._read(query, values, lambda row: row)

    def _read(self, query: str, values: Sequence[Value], make: Callable[[Row], T]) -> list[T]:
        """What `make` makes of each row of a query; it raises DamagedError for values that were never written."""
        return self.run(lambda db: [make(row) for row in _typed(db.execute(query, values))])

    def _apply(self, db: sqlite3.Connection, events: Sequence[Event]) -> int:
        """Apply events and append them to the history. Returns the number of rows that the last one changed."""
        changed = 0
        for name, values in events:
            changed = db.execute(_EVENTS[name], values).rowcount
        if not self._read_only:
            self.history.append(events)
        return changed

    def _change(self, *events: Event) -> int:
        """As `_apply`, in one transaction."""

        def change(db: sqlite3.Connection) -> int:
            if len(events) == 1:
                return self._apply(db, events)
            db.execute("BEGIN IMMEDIATE")
            changed = self._apply(db, events)
            db.execute("COMMIT")
            return changed

        return self.run(change)

    # artifacts

    def artifacts(self, fingerprints: Iterable[Fingerprint]) -> dict[Fingerprint, Artifact]:
        """Those of `fingerprints` that are published."""
        wanted = frozenset(fingerprints)
        most = 2 * len(wanted)
        if most > _FEW and most > self._rows("SELECT count(*) AS number FROM artifacts")[0][0]:
            found = self._artifacts("", (), wanted)  # one row after another takes half as long as looking each up
        else:
            found = self._artifacts(f"WHERE {_AMONG}", (json.dumps([*wanted]),))
        return {artifact.fingerprint: artifact for artifact in found}

    def published(self) -> set[Fingerprint]:
        """The fingerprints of all artifacts."""
        return {row[0] for row in self._rows("SELECT fingerprint FROM artifacts")}

    def keys(self, fingerprints: Iterable[Fingerprint]) -> dict[Fingerprint, str]:
        """The keys of those of `fingerprints` that are published."""
        query = f"SELECT fingerprint, key FROM artifacts WHERE {_AMONG}"  # noqa: S608 - our own words
        return dict(self._rows(query, (json.dumps(list(fingerprints)),)))

    def all_artifacts(self) -> list[Artifact]:
        """Every published artifact, by stage and label."""
        return self._artifacts("ORDER BY stage, label, fingerprint", ())

    def _artifacts(
        self, which: str, values: Sequence[str], among: frozenset[Fingerprint] | None = None
    ) -> list[Artifact]:
        columns = "fingerprint, stage, label, files, manifest_bytes, size_bytes, duration_s, published_s"
        query = f"SELECT {columns} FROM artifacts {which}"  # noqa: S608 - our own words

        def read(db: sqlite3.Connection) -> list[Artifact]:
            rows = _typed(db.execute(query, values))
            return self._made_of(rows if among is None else [row for row in rows if row[0] in among])

        return self.run(read)

    def _made_of(self, rows: Sequence[Row]) -> list[Artifact]:
        """The artifacts of rows. Their files are decoded at once, and those of many are alike. Raises DamagedError."""
        texts = list(dict.fromkeys([row[3] for row in rows]))
        decoded = _decoded(f"[{','.join(texts)}]", list)
        if len(decoded) != len(texts):
            raise DamagedError("no files with sizes")
        files, folder = dict[str, tuple[tuple[str, int], ...]](), f"{self._workspace}/store"
        for text, pairs in zip(texts, decoded, strict=True):
            try:
                files[text] = tuple([(name, size) for name, size in pairs if (type(name), type(size)) == _FILE])
            except (TypeError, ValueError):
                files[text] = ()
            if len(files[text]) != len(pairs):
                raise DamagedError(f"no files with sizes: {text[:80]}")
        return [
            Artifact(
                row[0], row[1], row[2], files[row[3]], row[4], row[5], row[6], row[7], f"{folder}/{row[1]}/{row[0]}"
            )
            for row in rows
        ]

    def add_artifact(self, manifest: Manifest, artifact: Artifact) -> Artifact:
        """Record an artifact that no attempt of this process left."""
        self.run(lambda db: _add_artifact(db, manifest, artifact))
        return artifact

    def artifact(self, manifest: Manifest, manifest_bytes: int) -> Artifact:
        """An artifact in its place, whose manifest file has this size; recorded or not."""
        return Artifact(
            manifest.fingerprint,
            manifest.stage,
            manifest.label,
            tuple((entry.path, entry.size) for entry in manifest.files),
            manifest_bytes,
            manifest.size_bytes,
            manifest.seconds("duration_s", 0.0),
            manifest.seconds("finished_s", time.time()),
            f"{self._workspace}/store/{manifest.stage}/{manifest.fingerprint}",
        )

    def remove_artifacts(self, fingerprints: Iterable[Fingerprint]) -> None:
        """Forget artifacts whose files are gone."""
        query = f"DELETE FROM artifacts WHERE {_AMONG}"  # noqa: S608 - our own words
        names = json.dumps(list(fingerprints))
        self.run(lambda db: db.execute(query, (names,)))

    def durations(self) -> dict[str, float]:
        """Mean seconds of the latest artifacts by label ("stage/toolchain/model/precision") and by each prefix of it."""
        took: dict[str, list[float]] = {}
        for label, seconds in self._rows(
            "SELECT label, duration_s FROM artifacts ORDER BY published_s DESC LIMIT 2000"
        ):
            while label:
                took.setdefault(label, []).append(seconds)
                label = label.rpartition("/")[0]
        return {label: sum(all_s) / len(all_s) for label, all_s in took.items()}

    def add_peak(self, attempt: int, peak: Peak) -> None:
        """Record what an attempt took that has not ended."""
        self.commit()
        self._change(_peak_event(self._begun[attempt].id or 0, peak))

    def peaks(self) -> list[Peak]:
        """What the latest stage runs took, the newest first."""

        def peak(row: Row) -> Peak:
            expected, taken = (_decoded(text, dict) for text in row[2:])
            return Peak(row[0], row[1], expected, taken)

        query = "SELECT label, system, expected, taken FROM peaks ORDER BY attempt DESC LIMIT 2000"
        return self._read(query, (), peak)

    def taken(self, run: str) -> dict[Fingerprint, Mapping[str, int]]:
        """What the stage runs that succeeded in a run took, as `Peak.taken`."""
        query = "SELECT fingerprint, taken FROM peaks JOIN attempts ON id = attempt WHERE run = ? ORDER BY attempt"
        return dict(self._read(query, (run,), lambda row: (row[0], _decoded(row[1], dict))))

    # attempts

    def begin_attempt(self, run: str, stage: str, fingerprint: Fingerprint, number: int, folder: str | Path) -> int:
        """An attempt that starts now; returns what it is called until it ends. It is written with whatever comes next."""
        name = next(self._numbers)
        self._begun[name] = _Begun((run, stage, fingerprint, number, time.time(), self._name(folder)))
        self._unwritten[name] = None
        return name

    def commit(self) -> None:
        """Write the attempts that have begun, so that others see them."""
        if self._unwritten:
            self._write_attempts({})

    def end_attempt(self, attempt: int, outcome: str, folder: str | Path, error: StageError | None = None) -> None:
        """Record how an attempt ended, and where its directory now is."""
        why = (error.failure.value, error.message, error.hint) if error else (None, None, None)
        self._write_attempts({attempt: (self._name(folder), time.time(), outcome, *why)})

    def record(self, group: Sequence[Published]) -> None:
        """Record in one transaction that attempts succeeded, what they took, and the artifacts that came of them."""
        self._write_attempts(
            {
                each.attempt: (self._name(each.artifact.path), each.ended_s, "succeeded", None, None, None)
                for each in group
            },
            group,
        )

    def _write_attempts(self, ends: Mapping[int, Row], published: Sequence[Published] = ()) -> None:
        """Write what has started and what has ended of the attempts, and what was published, in one transaction.

        `ends` are the last values of their rows, from the directory on.
        """
        wanted = {**self._unwritten, **dict.fromkeys(ends)}

        def write(db: sqlite3.Connection) -> dict[int, int]:
            ids: dict[int, int] = {}
            events: list[Event] = []
            db.execute("BEGIN IMMEDIATE")
            for name in wanted:
                begun = self._begun[name]
                *first, folder = begun.values
                row = (begun.id, *first, *ends.get(name, (folder, *[None] * 5)))
                ids[name] = int(db.execute(_EVENTS["attempts"], row).lastrowid or 0)
                events.append(("attempts", (ids[name], *row[1:])))
            for each in published:
                _add_artifact(db, each.manifest, each.artifact)
                if each.peak is not None:
                    event = _peak_event(ids[each.attempt], each.peak)
                    db.execute(_EVENTS[event[0]], event[1])
                    events.append(event)
            if not self._read_only:
                self.history.append(events)
            db.execute("COMMIT")
            return ids

        for name, number in super().run(write).items():
            self._begun[name].id = number
        for name in ends:  # only now: on a full disk the end is written again, as a failure
            del self._begun[name]
        self._unwritten.clear()

    def attempts(self, fingerprints: Iterable[Fingerprint]) -> dict[Fingerprint, AttemptRow]:
        """The latest attempt at each of `fingerprints` that has one."""
        newest = f"SELECT max(id) FROM attempts WHERE {_AMONG} GROUP BY fingerprint"  # noqa: S608 - our own words
        latest = self._attempts(f"id IN ({newest})", (json.dumps(list(fingerprints)),))
        return {attempt.fingerprint: attempt for attempt in latest}

    def attempts_of(self, run: str) -> tuple[AttemptRow, ...]:
        """All attempts of a run, in the order of their start."""
        return self._attempts("run = ? ORDER BY id", (run,))

    def _attempts(self, where: str, values: tuple[str, ...]) -> tuple[AttemptRow, ...]:
        def attempt(row: Row) -> AttemptRow:
            return AttemptRow(*[*row[:6], self._workspace / row[6], *row[7:]])

        return tuple(self._read(f"SELECT * FROM attempts WHERE {where}", values, attempt))  # noqa: S608 - our own words

    def _name(self, folder: str | Path) -> str:
        """A directory's path relative to the workspace, which may be moved."""
        return str(folder).removeprefix(f"{self._workspace}/")

    # runs

    def begin_run(self, run: str, matrix: str, command: tuple[str, ...]) -> None:
        """Record that a run starts."""
        values = (run, matrix, json.dumps(command), time.time(), None, None)

        def begin(db: sqlite3.Connection) -> Row:
            row = (int(db.execute(_EVENTS["runs"], (None, *values)).lastrowid or 0), *values)
            if not self._read_only:
                self.history.append([("runs", row)])
            return row

        self._runs[run] = self.run(begin)

    def end_run(self, run: str, exit_code: int) -> None:
        """Record how a run ended."""
        self._change(("runs", (*self._runs[run][:-2], time.time(), exit_code)))
        del self._runs[run]

    def runs(self) -> tuple[RunRow, ...]:
        """All runs, the newest first, independent of the clock."""
        query = "SELECT run, matrix, command, started_s, ended_s, exit_code FROM runs ORDER BY number DESC"
        return tuple(self._read(query, (), lambda row: RunRow(*[*row[:2], _words(row[2]), *row[3:]])))

    # what cells last had, for explanations

    def latest(self, cells: Iterable[str]) -> dict[tuple[str, str], tuple[Fingerprint, str]]:
        """For (cell, stage): fingerprint and key of the newest result whose key is known."""
        query = "SELECT cell, stage, fingerprint, key FROM latest WHERE cell IN (SELECT value FROM json_each(?))"
        rows = self._rows(query, (json.dumps(list(cells)),))
        return {(row[0], row[1]): (row[2], row[3]) for row in rows if row[3] is not None}

    def latest_fingerprints(self) -> set[tuple[str, str, Fingerprint]]:
        """The same, as (cell, stage, fingerprint) of all cells."""
        return set(self._rows("SELECT cell, stage, fingerprint FROM latest WHERE key IS NOT NULL"))

    def set_latest(
        self, rows: Iterable[tuple[str, str, Fingerprint]], services: Iterable[tuple[str, str, Fingerprint, str]] = ()
    ) -> None:
        """Record (cell, stage, fingerprint) as the newest results of the cells, in one transaction.

        And the `services` that they were measured on, which leave no artifact to know their key by.
        """
        self._change(*(("latest", row) for row in rows), *(("latest service", row) for row in services))

    # remembered answers

    def add_infeasible(self, fingerprint: Fingerprint, reason: str) -> None:
        """Remember that these inputs can never work."""
        self._change(("infeasible", (fingerprint, reason)))

    def forget_infeasible(self) -> int:
        """Forget all remembered impossibilities; returns how many."""
        return self._change(("no infeasible", ()))

    def infeasible(self) -> dict[Fingerprint, str]:
        """All remembered impossibilities with their reason."""
        return dict(self._rows("SELECT fingerprint, reason FROM infeasible"))

    def pin(self, request: str) -> Mapping[str, Json] | None:
        """What a request for a model was pinned to, such as a branch to a commit."""
        found = self._read("SELECT pinned FROM pins WHERE request = ?", (request,), lambda row: _decoded(row[0], dict))
        return found[0] if found else None

    def set_pin(self, request: str, pinned: Mapping[str, Json]) -> None:
        """Remember what a request for a model was pinned to."""
        self._change(("pins", (request, json.dumps(pinned))))

    def forget_pins(self) -> int:
        """Forget all pins, so that the hubs are asked again; returns how many."""
        return self._change(("no pins", ()))

    def digest(self, path: Path) -> str:
        """BLAKE3 of a file's content, which is read again only if the file's stamp is another. Raises OSError."""
        name = str(path.absolute())
        key = name.encode(errors="backslashreplace").decode()  # names of files may be no valid text, SQLite's texts are
        known = self._rows("SELECT stamp, digest FROM digests WHERE path = ?", (key,))
        if known and known[0][0] == stamp(name):
            return str(known[0][1])
        found = stamped_digest(name)
        if found[0] is not None:
            self.run(lambda db: db.execute("INSERT OR REPLACE INTO digests VALUES (?, ?, ?)", (key, *found)))
        return found[1]


def _lacked(db: sqlite3.Connection, known: Rows, *, sound: bool) -> list[Event]:
    """The events that a history lost, by what `known` has and `db`, which was made from that history, has not.

    A row that is complete is right. Else a sound history is: a flipped bit within a value does not show in an index.
    """
    lacked: list[Event] = []
    for table, rows in known.items():
        first, size = _LOGGED[table]
        ours = {row[:first]: row[:size] for row in rows}
        told = {row[:first]: row[:size] for row in db.execute(f"SELECT * FROM {table}")}  # noqa: S608 - our own words
        if not sound and f"no {table}" in _EVENTS and told.keys() - ours.keys():
            lacked.append((f"no {table}", ()))
            told = {}
        for name, row in ours.items():
            missing = row.count(None) - told[name].count(None) if name in told else -1
            if missing < 0 or (missing == 0 and not sound and row != told[name]):
                lacked.append((table, row))
    return lacked


def _peak_event(attempt: int, peak: Peak) -> Event:
    texts = (_encode(dict(each)) for each in (peak.expected, peak.taken))
    return "peaks", (attempt, peak.label, peak.system, *texts)


def _add_artifact(db: sqlite3.Connection, manifest: Manifest, artifact: Artifact) -> None:
    row = (
        artifact.fingerprint,
        artifact.stage,
        artifact.label,
        _encode(artifact.files),
        artifact.manifest_bytes,
        artifact.size_bytes,
        artifact.duration_s,
        manifest.key,
        artifact.published_s,
    )
    db.execute("INSERT OR REPLACE INTO artifacts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)


def _typed(rows: sqlite3.Cursor) -> list[Row]:
    """All rows. Raises DamagedError for a value of another type than its column has."""
    names = [name for name, *_ in rows.description]
    found = rows.fetchall()
    for name, column in zip(names, zip(*found, strict=True), strict=False):  # no columns of no rows
        if other := set(map(type, column)).difference(_TYPES[name]):
            raise DamagedError(f"{name} of another type: {', '.join(sorted(each.__name__ for each in other))}")
    return found


def _words(text: str) -> tuple[str, ...]:
    return tuple(map(str, _decoded(text, list)))


def _decoded(text: str, kind: type[T]) -> T:
    """The value of a JSON text. Raises DamagedError when it is not of this kind."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"no JSON: {text[:80]}") from error
    if not isinstance(value, kind):
        raise DamagedError(f"no {kind.__name__}: {text[:80]}")
    return value
