"""The SQLite index of a workspace: artifacts, attempts, runs and durations.

It is redundant: artifacts have their manifests, and everything else is also written to the history (`history.jsonl`). So
whoever finds the index lost or damaged rebuilds it without loss. Conversely, `store repair` restores lines that the history
has lost from a sound index.
WAL with synchronous=NORMAL survives a kill at any time; a power loss may cost the last rows.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from trtllm_pipeline.domain import Fingerprint, Json
from trtllm_pipeline.store.database import EMPTY, DamagedError, Database, Rows
from trtllm_pipeline.store.history import NAME as HISTORY
from trtllm_pipeline.store.history import Event, History, Value
from trtllm_pipeline.store.manifest import Manifest

SCHEMA: Final = 3

_TABLES: Final = (
    """CREATE TABLE artifacts (
  fingerprint TEXT PRIMARY KEY, stage TEXT NOT NULL, label TEXT NOT NULL, key TEXT NOT NULL,
  files TEXT NOT NULL, manifest_bytes INTEGER NOT NULL, size_bytes INTEGER NOT NULL, duration_s REAL NOT NULL,
  published_s REAL NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE attempts (
  id INTEGER PRIMARY KEY, run TEXT NOT NULL, stage TEXT NOT NULL, fingerprint TEXT NOT NULL, number INTEGER NOT NULL,
  folder TEXT NOT NULL, started_s REAL NOT NULL, ended_s REAL, outcome TEXT, failure TEXT, message TEXT, hint TEXT)""",
    "CREATE INDEX attempts_by_fingerprint ON attempts (fingerprint)",
    """CREATE TABLE runs (
  number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, matrix TEXT NOT NULL, command TEXT NOT NULL,
  started_s REAL NOT NULL, ended_s REAL, exit_code INTEGER)""",
    """CREATE TABLE latest (
  cell TEXT NOT NULL, stage TEXT NOT NULL, fingerprint TEXT NOT NULL, key TEXT, PRIMARY KEY (cell, stage)) WITHOUT ROWID""",
    "CREATE TABLE infeasible (fingerprint TEXT PRIMARY KEY, message TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE pins (request TEXT PRIMARY KEY, pinned TEXT NOT NULL) WITHOUT ROWID",
)
_EVENTS: Final = {
    "run": "INSERT OR REPLACE INTO runs (number, id, matrix, command, started_s) VALUES (?, ?, ?, ?, ?)",
    "run_ended": "UPDATE runs SET ended_s = ?, exit_code = ? WHERE id = ?",
    "attempt": "INSERT OR REPLACE INTO attempts (id, run, stage, fingerprint, number, folder, started_s) "
    "VALUES (?, ?, ?, ?, ?, ?, ?)",
    "attempt_ended": "UPDATE attempts SET ended_s = ?, outcome = ?, folder = ?, failure = ?, message = ?, hint = ? "
    "WHERE id = ?",
    "latest": "INSERT OR REPLACE INTO latest SELECT new.*, key FROM "
    "(SELECT ? AS cell, ? AS stage, ? AS fingerprint) AS new LEFT JOIN artifacts USING (fingerprint)",
    "infeasible": "INSERT OR REPLACE INTO infeasible VALUES (?, ?)",
    "infeasible_forgotten": "DELETE FROM infeasible",
    "pin": "INSERT OR REPLACE INTO pins VALUES (?, ?)",
    "pins_forgotten": "DELETE FROM pins",
}
"""Events of the history, and the statement that applies each to the index, at once and when the index is rebuilt."""

_KEYS: Final = {"runs": 1, "attempts": 1, "latest": 2, "infeasible": 1, "pins": 1}
"""Tables of what no manifest has -> number of leading values that identify a row."""
_FORGOTTEN: Final = {"infeasible": "infeasible_forgotten", "pins": "pins_forgotten"}

_TEXT: Final = (str,)
_WHOLE: Final = (int,)
_NUMBER: Final = (int, float)
_MAYBE: Final = type(None)


T = TypeVar("T")
Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ArtifactRow:
    """A published artifact in the index.

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
    """One attempt at a stage run. `outcome` is None while it runs, or if its pipeline was killed."""

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
    """A workspace's `state.db` and the history it can be rebuilt from. Other processes may write at the same time.

    `manifests` returns all manifests with their file sizes. With `read_only` nothing is written, and changes are lost at the
    end. Raises StateError if the index cannot be used.
    """

    def __init__(
        self, path: Path, manifests: Callable[[], Iterable[tuple[Manifest, int]]], *, read_only: bool = False
    ) -> None:
        self.history = History(path.with_name(HISTORY))
        self._workspace = path.parent
        self._manifests = manifests
        self._read_only = read_only
        self._database = Database(
            path, schema=SCHEMA, tables=_TABLES, fill=self._fill, known=_known, read_only=read_only
        )

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def remake(self) -> str:
        """Rebuild the file, keeping what a sound one had. Returns a description of what is lost."""
        return self._database.remake() or EMPTY

    def _fill(self, db: sqlite3.Connection, known: Rows) -> str | None:
        artifacts = events = damaged = 0
        for found, manifest_bytes in self._manifests():
            _add_artifact(db, found, manifest_bytes)
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
        for name, values in lacked:
            db.execute(_EVENTS[name], values)
        if lacked:
            self.history.append(lacked)
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

    def _rows(self, query: str, values: Sequence[Value], *types: tuple[type, ...]) -> list[Row]:
        """The rows of a query, with the types of all values checked."""
        return self._read(query, values, types, lambda row: row)

    def _read(
        self, query: str, values: Sequence[Value], types: Sequence[tuple[type, ...]], make: Callable[[Row], T]
    ) -> list[T]:
        """As `_rows`, with `make` applied to each row."""

        def read(db: sqlite3.Connection) -> list[T]:
            rows = db.execute(query, values).fetchall()
            for row in rows:
                if not all(map(isinstance, row, types)):
                    raise DamagedError(f"a row of other types: {str(row)[:80]}")
            return [make(row) for row in rows]

        return self._database.run(read)

    def _change(self, *events: Event) -> int:
        """Apply events and append them to the history. Returns the number of rows that the last one changed."""

        def change(db: sqlite3.Connection) -> int:
            changed = 0
            if len(events) > 1:
                db.execute("BEGIN IMMEDIATE")
            for name, values in events:
                changed = db.execute(_EVENTS[name], values).rowcount
            self._remember(events)
            if len(events) > 1:
                db.execute("COMMIT")
            return changed

        return self._database.run(change)

    def _remember(self, events: Sequence[Event]) -> None:
        if not self._read_only:
            self.history.append(events)

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
            types = (_TEXT, _TEXT, _TEXT, _TEXT, _WHOLE, _WHOLE, _NUMBER)
            for artifact in self._read(query, part, types, _artifact_row):
                found[artifact.fingerprint] = artifact
        return found

    def all_artifacts(self) -> list[ArtifactRow]:
        """Every published artifact, by stage and label."""
        query = "SELECT fingerprint FROM artifacts ORDER BY stage, label, fingerprint"
        order = [row[0] for row in self._rows(query, (), _TEXT)]
        found = self.artifacts(order)
        return [found[fingerprint] for fingerprint in order if fingerprint in found]

    def add_artifact(self, manifest: Manifest, manifest_bytes: int) -> None:
        """Record a published artifact, whose manifest file has this size."""
        self._database.run(lambda db: _add_artifact(db, manifest, manifest_bytes))

    def remove_artifact(self, fingerprint: Fingerprint) -> None:
        """Forget an artifact whose files are gone."""
        self._database.run(lambda db: db.execute("DELETE FROM artifacts WHERE fingerprint = ?", (fingerprint,)))

    def durations(self) -> dict[str, float]:
        """Mean seconds of the latest artifacts by label ("stage/toolchain/model/precision") and by each prefix of it."""
        totals: dict[str, tuple[float, int]] = {}
        query = "SELECT label, duration_s FROM artifacts ORDER BY published_s DESC LIMIT 2000"
        for label, seconds in self._rows(query, (), _TEXT, _NUMBER):
            parts = label.split("/")
            for depth in range(1, len(parts) + 1):
                prefix = "/".join(parts[:depth])
                total, count = totals.get(prefix, (0.0, 0))
                totals[prefix] = (total + seconds, count + 1)
        return {prefix: total / count for prefix, (total, count) in totals.items()}

    # attempts

    def last_attempt(self, fingerprint: Fingerprint) -> int:
        """Number of the latest attempt at this stage run, 0 if there was none."""
        query = "SELECT coalesce(max(number), 0) FROM attempts WHERE fingerprint = ?"
        return int(self._rows(query, (fingerprint,), _WHOLE)[0][0])

    def begin_attempt(self, run: str, stage: str, fingerprint: Fingerprint, number: int, folder: Path) -> int:
        """Record that an attempt starts; returns its id."""
        values: tuple[Value, ...] = (run, stage, fingerprint, number, self._name(folder), time.time())
        return self._begin("attempt", values)

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
        self._change(("attempt_ended", (time.time(), outcome, self._name(folder), failure, message, hint, attempt)))

    def attempts(self, fingerprints: Iterable[Fingerprint]) -> dict[Fingerprint, AttemptRow]:
        """The latest attempt at each of `fingerprints` that has one."""
        wanted = set(fingerprints)
        if not wanted:
            return {}
        latest = self._attempts("id IN (SELECT max(id) FROM attempts GROUP BY fingerprint)", ())
        return {attempt.fingerprint: attempt for attempt in latest if attempt.fingerprint in wanted}

    def attempts_of(self, run: str) -> tuple[AttemptRow, ...]:
        """All attempts of a run, in the order of their start."""
        return self._attempts("run = ? ORDER BY id", (run,))

    def _attempts(self, where: str, values: tuple[str, ...]) -> tuple[AttemptRow, ...]:
        columns = "id, run, stage, fingerprint, number, folder, started_s, ended_s, outcome, failure, message, hint"
        known = (_WHOLE, _TEXT, _TEXT, _TEXT, _WHOLE, _TEXT, _NUMBER)
        later = ((*_NUMBER, _MAYBE), *[(str, _MAYBE)] * 4)
        query = f"SELECT {columns} FROM attempts WHERE {where}"  # noqa: S608 - our own words
        return tuple(self._read(query, values, (*known, *later), self._attempt_row))

    def _attempt_row(self, row: Row) -> AttemptRow:
        number, run, stage, fingerprint, attempt, folder, *rest = row
        return AttemptRow(number, run, stage, Fingerprint(fingerprint), attempt, self._workspace / folder, *rest)

    def _name(self, folder: Path) -> str:
        """A folder's path relative to the workspace, which may be moved."""
        return str(folder.relative_to(self._workspace) if folder.is_relative_to(self._workspace) else folder)

    # runs

    def begin_run(self, run: str, matrix: str, command: tuple[str, ...]) -> None:
        """Record that a run starts."""
        self._begin("run", (run, matrix, json.dumps(command), time.time()))

    def end_run(self, run: str, exit_code: int) -> None:
        """Record how a run ended."""
        self._change(("run_ended", (time.time(), exit_code, run)))

    def runs(self) -> tuple[RunRow, ...]:
        """All runs, the newest first, independent of the clock."""
        query = "SELECT id, matrix, command, started_s, ended_s, exit_code FROM runs ORDER BY number DESC"
        types = (_TEXT, _TEXT, _TEXT, _NUMBER, (*_NUMBER, _MAYBE), (int, _MAYBE))
        return tuple(self._read(query, (), types, _run_row))

    def _begin(self, event: str, values: Sequence[Value]) -> int:
        """Apply an event with the next free number, which is returned."""

        def begin(db: sqlite3.Connection) -> int:
            number = int(db.execute(_EVENTS[event], (None, *values)).lastrowid or 0)
            self._remember([(event, (number, *values))])
            return number

        return self._database.run(begin)

    # what cells last had, for explanations

    def latest(self, cells: Iterable[str]) -> dict[tuple[str, str], tuple[Fingerprint, str]]:
        """For (cell, stage): fingerprint and key of the newest result whose key is known."""
        wanted = set(cells)
        query = "SELECT cell, stage, fingerprint, key FROM latest WHERE key IS NOT NULL"
        rows = self._rows(query, (), _TEXT, _TEXT, _TEXT, _TEXT)
        return {(row[0], row[1]): (row[2], row[3]) for row in rows if row[0] in wanted}

    def set_latest(self, rows: Iterable[tuple[str, str, Fingerprint]]) -> None:
        """Record (cell, stage, fingerprint) as the newest results of the cells, in one transaction."""
        self._change(*(("latest", row) for row in rows))

    # remembered answers

    def add_infeasible(self, fingerprint: Fingerprint, message: str) -> None:
        """Remember that these inputs can never work."""
        self._change(("infeasible", (fingerprint, message)))

    def forget_infeasible(self) -> int:
        """Forget all remembered impossibilities; returns how many."""
        return self._change(("infeasible_forgotten", ()))

    def infeasible(self) -> dict[Fingerprint, str]:
        """All remembered impossibilities with their reason."""
        return {row[0]: row[1] for row in self._rows("SELECT fingerprint, message FROM infeasible", (), _TEXT, _TEXT)}

    def pin(self, request: str) -> Mapping[str, Json] | None:
        """What a request for a model was pinned to, such as a branch to a commit."""
        rows = self._rows("SELECT pinned FROM pins WHERE request = ?", (request,), _TEXT)
        try:
            value = json.loads(rows[0][0]) if rows else None
        except ValueError:
            return None  # asked for again, as if it had never been pinned
        return value if isinstance(value, dict) else None

    def set_pin(self, request: str, pinned: Mapping[str, Json]) -> None:
        """Remember what a request for a model was pinned to."""
        self._change(("pin", (request, json.dumps(pinned))))

    def forget_pins(self) -> int:
        """Forget all pins, so that the hubs are asked again; returns how many."""
        return self._change(("pins_forgotten", ()))


def _known(db: sqlite3.Connection) -> Rows:
    """The rows that no manifest has. Raises DamagedError for a row of other types than were written."""
    types: Mapping[str, tuple[type, ...]] = {"TEXT": _TEXT, "INTEGER": _WHOLE, "REAL": _NUMBER}
    known: Rows = {}
    for table in _KEYS:
        columns = [
            types[kind] if needed or place else (*types[kind], _MAYBE)
            for _, _, kind, needed, _, place in db.execute(f"PRAGMA table_info({table})")
        ]
        known[table] = db.execute(f"SELECT * FROM {table}").fetchall()  # noqa: S608 - our own words
        for row in known[table]:
            if not all(map(isinstance, row, columns)):
                raise DamagedError(f"a row of other types: {str(row)[:80]}")
    for run in known["runs"]:
        _list(run[3])
    return known


def _lacked(db: sqlite3.Connection, known: Rows, *, sound: bool) -> list[Event]:
    """The events that a history lost, by what `known` has and `db`, which was made from that history, has not.

    Where both differ, a sound history is right: a flipped bit within a value does not show in an index.
    """
    lacked: list[Event] = []
    for table, rows in known.items():
        size = _KEYS[table]
        told = {row[:size]: row for row in db.execute(f"SELECT * FROM {table}")}  # noqa: S608 - our own words
        if not sound and table in _FORGOTTEN and told.keys() - {row[:size] for row in rows}:
            lacked.append((_FORGOTTEN[table], ()))
            told = {}
        for row in rows:
            events = _events(table, row)
            before = _events(table, told[row[:size]]) if row[:size] in told else []
            # The event of a beginning makes the row anew, so that of the end has to follow.
            if len(events) > len(before) or (not sound and len(events) == len(before) and events != before):
                lacked += events
    return lacked


def _events(table: str, row: Row) -> list[Event]:
    """The events of a row."""
    if table == "runs":
        number, run, matrix, command, started, ended, exit_code = row
        begun: Event = ("run", (number, run, matrix, command, started))
        return [begun] if ended is None else [begun, ("run_ended", (ended, exit_code, run))]
    if table == "attempts":
        begun = ("attempt", row[:7])
        folder, (ended, outcome, *why) = row[5], row[7:]
        return [begun] if ended is None else [begun, ("attempt_ended", (ended, outcome, folder, *why, row[0]))]
    return [(table.removesuffix("s"), row[:3])]


def _add_artifact(db: sqlite3.Connection, manifest: Manifest, manifest_bytes: int) -> None:
    files = [[entry.path, entry.size] for entry in manifest.files]
    duration, finished = (manifest.provenance.get(name) for name in ("duration_s", "finished_s"))
    db.execute(
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
            finished if isinstance(finished, (int, float)) else time.time(),
        ),
    )


def _artifact_row(row: Row) -> ArtifactRow:
    files = tuple((name, size) for name, size in _pairs(row[3]))
    return ArtifactRow(Fingerprint(row[0]), row[1], row[2], files, row[4], row[5], row[6])


def _run_row(row: Row) -> RunRow:
    return RunRow(row[0], row[1], tuple(map(str, _list(row[2]))), *row[3:])


def _pairs(text: str) -> list[Any]:
    pairs = _list(text)
    if not all(isinstance(pair, list) and [type(part) for part in pair] == [str, int] for pair in pairs):
        raise DamagedError(f"no files with sizes: {text[:80]}")
    return pairs


def _list(text: str) -> list[Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"no JSON: {text[:80]}") from error
    if not isinstance(value, list):
        raise DamagedError(f"no list: {text[:80]}")
    return value
