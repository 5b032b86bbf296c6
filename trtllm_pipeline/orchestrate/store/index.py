"""The SQLite index of a workspace (artifacts, attempts, runs, durations) and the history it can be rebuilt from.

The index is redundant: artifacts have manifests, digests of files can be recomputed, and every other row is also a line of
`history.jsonl`, in which later lines for the same row win. So a lost or damaged index is rebuilt without loss.
Conversely, `store repair` restores lines that the history has lost from a sound index.
WAL with synchronous=NORMAL survives a kill at any time. A power loss may cost the last rows.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

from trtllm_pipeline.base import Fingerprint, Json, StageError, StateError, digest, reading, writing
from trtllm_pipeline.orchestrate.store.database import DamagedError, Database, Rows
from trtllm_pipeline.orchestrate.store.manifest import Manifest
from trtllm_pipeline.tensorrt import OUT

HISTORY: Final = "history.jsonl"
LOG: Final = "log"

_TABLES: Final = tuple(Path(__file__).with_name("schema.sql").read_text(encoding="utf-8").split(";\n")[:-1])
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
"""Tables not covered by manifests -> number of leading values that identify a row, and of values in a history line."""
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
"""Events of the history -> statement that applies each to the index, immediately and during a rebuild."""
_AMONG: Final = "fingerprint IN (SELECT value FROM json_each(?))"
"""Matches a JSON list of any length."""
_TAIL_BYTES: Final = 64 << 10
"""Size of the history's end that is searched for its newest event."""
_encode: Final = json.JSONEncoder(separators=(",", ":")).encode

T = TypeVar("T")
Row = tuple[Any, ...]
Value = str | int | float | None
Event = tuple[str, Sequence[Value]]
"""A written row with its table, or removed rows."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A published, immutable artifact. `files` are paths below `out` with their sizes, `size_bytes` their sum."""

    fingerprint: Fingerprint
    stage: str
    label: str
    files: tuple[tuple[str, int], ...]
    manifest_bytes: int = field(compare=False)
    size_bytes: int
    duration_s: float
    published_s: float = field(compare=False)
    folder: Path
    """The artifact directory, with manifest, job and log."""

    @property
    def out(self) -> Path:
        """The directory with its files."""
        return self.folder / OUT


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

    @property
    def out(self) -> Path:
        """Output directory of the stage's program."""
        return self.folder / OUT

    @property
    def log(self) -> Path:
        """Standard output and error of the stage's commands."""
        return self.folder / LOG


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
        """Duration. None if it is running or was killed, or if the clock was set back meanwhile."""
        return None if self.ended_s is None or self.ended_s < self.started_s else self.ended_s - self.started_s


@dataclass(frozen=True, slots=True)
class Peak:
    """Expected and actual memory and disk usage of one stage run, in bytes by kind."""

    label: str
    """Label as for durations: stage/toolchain/model/precision."""
    system: str
    """The parts of its system that matter for memory."""
    expected: Mapping[str, int]
    taken: Mapping[str, int]


class History:
    """The history of a workspace, one event per line.

    Lines are only appended, each in one write, and start with their checksum, so that damaged lines are detected.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, events: Iterable[Event]) -> None:
        """Append `events`, in one write if the kernel allows. After an OSError, a part may be in the file."""
        texts = [_encode([name, *values]).encode() for name, values in events]
        # The newline comes first: after a short write, the next event still starts a line.
        data = b"".join(b"\n%08x %b" % (zlib.crc32(text), text) for text in texts)
        try:
            fd = reading.open_fd(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        except reading.NotAFileError as error:
            raise self._unusable(error) from error
        try:
            writing.write_all(fd, data)
        finally:
            os.close(fd)

    def _unusable(self, error: reading.NotAFileError) -> StateError:
        return StateError(
            f"{self.path} {error.strerror}", hint="move it away, then rewrite the history with pipeline store repair"
        )

    def newest(self) -> Event | None:
        """Return the newest readable event. None if there is none near the end. Raises StateError, OSError."""
        try:
            file = self._file()
        except FileNotFoundError:
            return None
        with file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
        return next(filter(None, (_event(line) for line in reversed(lines))), None)

    def events(self) -> Iterator[Event | None]:
        """Yield all events, oldest first. None for a damaged line. Raises StateError, OSError."""
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
    """Return the event in a history line. None if the line is damaged."""
    checksum, _, text = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        return None
    name, *values = json.loads(text)
    return name, values


class Index(Database):
    """A workspace's `state.db` and its history. Other processes may write at the same time.

    `manifests` returns all manifests with their file sizes. With `read_only`, changes stay in memory and are lost at the
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
        super().__init__(path, read_only=read_only)

    def _fill(self, db: sqlite3.Connection, known: Rows) -> str | None:
        db.executemany("INSERT OR REPLACE INTO digests VALUES (?, ?, ?)", known.pop("digests", ()))
        artifacts = events = damaged = 0
        for manifest, manifest_bytes in self._manifests():
            _add_artifact(db, manifest, self.artifact(manifest, manifest_bytes))
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
        for cell, stage, fingerprint, key in known.get("latest", ()):  # its artifact may have been removed
            change = "UPDATE latest SET key = ? WHERE (cell, stage, fingerprint) = (?, ?, ?) AND key IS NULL"
            db.execute(change, (key, cell, stage, fingerprint))
        if damaged:
            kept = "; everything in the old index is kept" if known else ""
            return f"without {damaged} of {events} lines of {HISTORY}, which are damaged{kept}"
        if lacked:
            return f"and from the old index, which had what {HISTORY} lacks"
        if events:
            return "nothing is lost"
        return f"without the history of runs, since {HISTORY} is missing" if artifacts else None

    def _is_behind(self, db: sqlite3.Connection) -> bool:
        """Check the newest line of the history, which is written before its row: a damaged write-ahead log only loses its end."""
        name, values = self.history.newest() or ("", ())
        if name not in _EVENTS:
            return False  # from another release
        if name.startswith("no "):
            return db.execute(f"SELECT 1 FROM {name[3:]}").fetchone() is not None  # noqa: S608 - our own words
        table = name.partition(" ")[0]
        first, size = _LOGGED[table]
        row = tuple(values[:size])
        columns = [column[1] for column in db.execute(f"PRAGMA table_info({table})")][:size]
        if [column for column, value in zip(columns, row, strict=False) if type(value) not in _TYPES[column]]:
            return False
        identified = " AND ".join(f"{column} = ?" for column in columns[:first])
        rows = db.execute(f"SELECT {','.join(columns)} FROM {table} WHERE {identified}", row[:first])  # noqa: S608 - our own words
        return row not in rows.fetchall()

    def _known(self, db: sqlite3.Connection) -> Rows:
        """Return the rows that are in no manifest."""
        tables = (*_LOGGED, "digests")
        known = {table: _typed(db.execute(f"SELECT * FROM {table}")) for table in tables}  # noqa: S608 - our own words
        for run in known["runs"]:
            _words(run[3])
        return known

    def _rows(self, query: str, values: Sequence[Value] = ()) -> list[Row]:
        return self._read(query, values, lambda row: row)

    def _read(self, query: str, values: Sequence[Value], make: Callable[[Row], T]) -> list[T]:
        """Return `make` of each row of a query. `make` raises DamagedError for values that were never written."""
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
        """Like `_apply`, in one transaction."""

        def change(db: sqlite3.Connection) -> int:
            if len(events) == 1:
                return self._apply(db, events)
            db.execute("BEGIN IMMEDIATE")
            changed = self._apply(db, events)
            db.execute("COMMIT")
            return changed

        return self.run(change)

    def _insert(self, table: str, values: Row) -> Row:
        """Add a row with a new id. Returns it."""

        def insert(db: sqlite3.Connection) -> Row:
            row = (db.execute(_EVENTS[table], (None, *values)).lastrowid, *values)
            if not self._read_only:
                self.history.append([(table, row)])
            return row

        return self.run(insert)

    # artifacts

    def artifacts(self, fingerprints: Iterable[Fingerprint]) -> dict[Fingerprint, Artifact]:
        known = self._artifacts(f"WHERE {_AMONG}", (json.dumps([*fingerprints]),))
        return {artifact.fingerprint: artifact for artifact in known}

    def published(self) -> set[Fingerprint]:
        return {row[0] for row in self._rows("SELECT fingerprint FROM artifacts")}

    def keys(self, fingerprints: Iterable[Fingerprint]) -> dict[Fingerprint, str]:
        """Return the keys of the published artifacts of `fingerprints`."""
        query = f"SELECT fingerprint, key FROM artifacts WHERE {_AMONG}"  # noqa: S608 - our own words
        return dict(self._rows(query, (json.dumps(list(fingerprints)),)))

    def all_artifacts(self) -> list[Artifact]:
        """Return all published artifacts by stage and label."""
        return self._artifacts("ORDER BY stage, label, fingerprint", ())

    def _artifacts(self, which: str, values: Sequence[str]) -> list[Artifact]:
        columns = "fingerprint, stage, label, files, manifest_bytes, size_bytes, duration_s, published_s"

        def artifact(row: Row) -> Artifact:
            files = _decoded(row[3], list)
            if any(not isinstance(each, list) or tuple(map(type, each)) != _FILE for each in files):
                raise DamagedError(f"no files with sizes: {row[3][:80]}")
            return Artifact(*[*row[:3], tuple(map(tuple, files)), *row[4:], self._folder(row[1], row[0])])

        return self._read(f"SELECT {columns} FROM artifacts {which}", values, artifact)  # noqa: S608 - our own words

    def _folder(self, stage: str, fingerprint: str) -> Path:
        return self._workspace / "store" / stage / fingerprint

    def add_artifact(self, manifest: Manifest, artifact: Artifact) -> Artifact:
        """Record an artifact that is not from an attempt of this process."""
        self.run(lambda db: _add_artifact(db, manifest, artifact))
        return artifact

    def artifact(self, manifest: Manifest, manifest_bytes: int) -> Artifact:
        """Return the artifact of a manifest with this file size, recorded or not."""
        return Artifact(
            manifest.fingerprint,
            manifest.stage,
            manifest.label,
            tuple((entry.path, entry.size) for entry in manifest.files),
            manifest_bytes,
            manifest.size_bytes,
            manifest.seconds("duration_s", 0.0),
            manifest.seconds("finished_s", time.time()),
            self._folder(manifest.stage, manifest.fingerprint),
        )

    def remove_artifacts(self, fingerprints: Iterable[Fingerprint]) -> None:
        """Forget artifacts whose files are gone."""
        query = f"DELETE FROM artifacts WHERE {_AMONG}"  # noqa: S608 - our own words
        names = json.dumps(list(fingerprints))
        self.run(lambda db: db.execute(query, (names,)))

    def durations(self) -> dict[str, float]:
        """Return mean seconds of the latest artifacts by label ("stage/toolchain/model/precision") and by each prefix of it."""
        took: dict[str, list[float]] = {}
        for label, seconds in self._rows(
            "SELECT label, duration_s FROM artifacts ORDER BY published_s DESC LIMIT 2000"
        ):
            for each in prefixes(label):
                took.setdefault(each, []).append(seconds)
        return {label: sum(all_s) / len(all_s) for label, all_s in took.items()}

    def add_peak(self, attempt: int, peak: Peak) -> None:
        """Record the usage of an attempt that has not ended."""
        self._change(_peak_event(attempt, peak))

    def peaks(self) -> list[Peak]:
        """Return the usage of the latest stage runs, newest first."""

        def peak(row: Row) -> Peak:
            expected, taken = (_decoded(text, dict) for text in row[2:])
            return Peak(row[0], row[1], expected, taken)

        query = "SELECT label, system, expected, taken FROM peaks ORDER BY attempt DESC LIMIT 2000"
        return self._read(query, (), peak)

    def taken(self, run: str) -> dict[Fingerprint, Mapping[str, int]]:
        """Return `Peak.taken` of the successful stage runs of a run."""
        query = "SELECT fingerprint, taken FROM peaks JOIN attempts ON id = attempt WHERE run = ? ORDER BY attempt"
        return dict(self._read(query, (run,), lambda row: (row[0], _decoded(row[1], dict))))

    # attempts

    def begin_attempt(self, run: str, stage: str, fingerprint: Fingerprint, number: int, folder: Path) -> AttemptRow:
        """Record that an attempt starts."""
        values = (run, stage, fingerprint, number, time.time(), self._name(folder), *[None] * 5)
        return self._attempt(self._insert("attempts", values))

    def end_attempt(self, attempt: AttemptRow, outcome: str, error: StageError | None) -> None:
        """Record the end of an attempt without an artifact."""
        why = (error.failure.value, error.message, error.hint) if error else (None, None, None)
        self._change(self._end(attempt, outcome, attempt.folder, *why))

    def record(self, attempt: AttemptRow, manifest: Manifest, artifact: Artifact, peak: Peak | None = None) -> None:
        """Record a successful attempt, its artifact and its usage in one transaction."""
        end = self._end(attempt, "succeeded", artifact.folder, None, None, None)

        def write(db: sqlite3.Connection) -> None:
            db.execute("BEGIN IMMEDIATE")
            _add_artifact(db, manifest, artifact)
            self._apply(db, [end] if peak is None else [end, _peak_event(attempt.id, peak)])
            db.execute("COMMIT")

        self.run(write)

    def _end(self, attempt: AttemptRow, outcome: str, folder: Path, *why: str | None) -> Event:
        begun = attempt.id, attempt.run, attempt.stage, attempt.fingerprint, attempt.number, attempt.started_s
        return "attempts", (*begun, self._name(folder), time.time(), outcome, *why)

    def attempts(self, fingerprints: Iterable[Fingerprint]) -> dict[Fingerprint, AttemptRow]:
        """Return the latest attempt by fingerprint, if there is one."""
        newest = f"SELECT max(id) FROM attempts WHERE {_AMONG} GROUP BY fingerprint"  # noqa: S608 - our own words
        latest = self._attempts(f"id IN ({newest})", (json.dumps(list(fingerprints)),))
        return {attempt.fingerprint: attempt for attempt in latest}

    def attempts_of(self, run: str) -> tuple[AttemptRow, ...]:
        """Return all attempts of a run in order of start."""
        return self._attempts("run = ? ORDER BY id", (run,))

    def _attempts(self, where: str, values: tuple[str, ...]) -> tuple[AttemptRow, ...]:
        return tuple(self._read(f"SELECT * FROM attempts WHERE {where}", values, self._attempt))  # noqa: S608 - our own words

    def _attempt(self, row: Row) -> AttemptRow:
        return AttemptRow(*[*row[:6], self._workspace / row[6], *row[7:]])

    def _name(self, folder: Path) -> str:
        """Return a directory's path relative to the workspace, which may be moved."""
        return str(folder).removeprefix(f"{self._workspace}/")

    # runs

    def begin_run(self, run: str, matrix: str, command: tuple[str, ...]) -> None:
        self._runs[run] = self._insert("runs", (run, matrix, json.dumps(command), time.time(), None, None))

    def end_run(self, run: str, exit_code: int) -> None:
        self._change(("runs", (*self._runs[run][:-2], time.time(), exit_code)))
        del self._runs[run]

    def runs(self) -> tuple[RunRow, ...]:
        """Return all runs, newest first, independent of the clock."""
        query = "SELECT run, matrix, command, started_s, ended_s, exit_code FROM runs ORDER BY number DESC"
        return tuple(self._read(query, (), lambda row: RunRow(*[*row[:2], _words(row[2]), *row[3:]])))

    # latest artifacts of cells, for explanations

    def latest(self, cells: Iterable[str]) -> dict[tuple[str, str], tuple[Fingerprint, str]]:
        """Return for (cell, stage) the fingerprint and key of the newest result with a known key."""
        query = "SELECT cell, stage, fingerprint, key FROM latest WHERE cell IN (SELECT value FROM json_each(?))"
        rows = self._rows(query, (json.dumps(list(cells)),))
        return {(row[0], row[1]): (row[2], row[3]) for row in rows if row[3] is not None}

    def latest_fingerprints(self) -> set[tuple[str, str, Fingerprint]]:
        """Return the same as (cell, stage, fingerprint) for all cells."""
        return set(self._rows("SELECT cell, stage, fingerprint FROM latest WHERE key IS NOT NULL"))

    def set_latest(
        self, rows: Iterable[tuple[str, str, Fingerprint]], services: Iterable[tuple[str, str, Fingerprint, str]] = ()
    ) -> None:
        """Record (cell, stage, fingerprint) as the newest results of the cells, in one transaction.

        `services` are those used for measurements. They come with their keys, since they have no artifacts.
        """
        self._change(*(("latest", row) for row in rows), *(("latest service", row) for row in services))

    # cached results

    def add_infeasible(self, fingerprint: Fingerprint, reason: str) -> None:
        self._change(("infeasible", (fingerprint, reason)))

    def forget_infeasible(self) -> int:
        """Forget all infeasible inputs. Returns their number."""
        return self._change(("no infeasible", ()))

    def infeasible(self) -> dict[Fingerprint, str]:
        return dict(self._rows("SELECT fingerprint, reason FROM infeasible"))

    def pin(self, request: str) -> Mapping[str, Json] | None:
        """Return the pin of a model request, such as the commit of a branch."""
        pins = self._read("SELECT pinned FROM pins WHERE request = ?", (request,), lambda row: _decoded(row[0], dict))
        return pins[0] if pins else None

    def set_pin(self, request: str, pinned: Mapping[str, Json]) -> None:
        self._change(("pins", (request, json.dumps(pinned))))

    def forget_pins(self) -> int:
        """Forget all pins, so that the hubs are queried again. Returns their number."""
        return self._change(("no pins", ()))

    def digest(self, path: Path) -> str:
        """Return the BLAKE3 of a file's content, which is read again only if the file's stamp has changed. Raises OSError."""
        name = str(path.absolute())
        # File names may be invalid text, which SQLite does not accept.
        key = name.encode(errors="backslashreplace").decode()
        known = self._rows("SELECT stamp, digest FROM digests WHERE path = ?", (key,))
        if known and known[0][0] == digest.stamp(name):
            return str(known[0][1])
        stamped = digest.stamped_digest(name)
        if stamped[0] is not None:
            self.run(lambda db: db.execute("INSERT OR REPLACE INTO digests VALUES (?, ?, ?)", (key, *stamped)))
        return stamped[1]


def _lacked(db: sqlite3.Connection, known: Rows, *, sound: bool) -> list[Event]:
    """Return the events that a history lost: rows of `known` that are not in `db`, which was built from that history.

    A complete row wins. Otherwise a sound history wins: an index cannot detect a flipped bit within a value.
    """
    lacked: list[Event] = []
    for table, rows in known.items():
        first, size = _LOGGED[table]
        ours = {row[:first]: row[:size] for row in rows}
        rebuilt = {row[:first]: row[:size] for row in db.execute(f"SELECT * FROM {table}")}  # noqa: S608 - our own words
        if not sound and f"no {table}" in _EVENTS and rebuilt.keys() - ours.keys():
            lacked.append((f"no {table}", ()))
            rebuilt = {}
        for name, row in ours.items():
            missing = row.count(None) - rebuilt[name].count(None) if name in rebuilt else -1
            if missing < 0 or (missing == 0 and not sound and row != rebuilt[name]):
                lacked.append((table, row))
    return lacked


def prefixes(label: str) -> Iterator[str]:
    """Yield a label (stage/toolchain/model/precision, with the GPU type if the cell names one) and its shorter prefixes."""
    while label:
        yield label
        label = label.rpartition("/")[0]


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
    """Return all rows. Raises DamagedError for a value whose type differs from its column's."""
    names = [name for name, *_ in rows.description]
    values = rows.fetchall()
    for name, column in zip(names, zip(*values, strict=True), strict=False):  # no rows have no columns
        if other := set(map(type, column)).difference(_TYPES[name]):
            raise DamagedError(f"{name} of another type: {', '.join(sorted(each.__name__ for each in other))}")
    return values


def _words(text: str) -> tuple[str, ...]:
    return tuple(map(str, _decoded(text, list)))


def _decoded(text: str, kind: type[T]) -> T:
    """Return the value of a JSON text. Raises DamagedError if it is not of this kind."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"no JSON: {text[:80]}") from error
    if not isinstance(value, kind):
        raise DamagedError(f"no {kind.__name__}: {text[:80]}")
    return value
