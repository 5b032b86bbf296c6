"""The SQLite file of an index: opened, created and rebuilt here.

SQLite's write-ahead log and its locks order the uses of the file. Every open connection also holds a shared flock on
`state.lock`. Creating or replacing the file takes it exclusively, so the file is never exchanged while it is in use.

Damage is never repaired during a run. It raises StateError, and `pipeline store repair` rebuilds the file.
The index of a read-only workspace is read into memory, because SQLite would have to write next to the file.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import sqlite3
import stat
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final, TypeVar

from trtllm_pipeline.base import StateError, reading

logger = logging.getLogger(__name__)

T = TypeVar("T")
Rows = dict[str, list[tuple[Any, ...]]]
"""The rows of some tables, by the table's name."""

_PATIENCE_S: Final = 30.0
"""How long to wait for other processes, whose uses of the file take milliseconds."""
_LOOK_S: Final = 0.02
"""How long to wait for the file's lock before looking again whether the file exists."""
_REPAIR_PATIENCE_S: Final = 2.0
_READS: Final = 5
"""How often to read a read-only index: a process that opens or closes the file may interfere."""
_WRITER_AFTER_S: Final = 0.1
"""A lock that is held longer belongs to a writer, not to a reader."""
_SMALL_BYTES: Final = 4 << 20
"""Up to this size, checking the whole file for damage takes a few milliseconds."""
_APPLICATION: Final = 0x54504C00
"""Plus the schema's number, the application id in SQLite's header: a flipped bit makes the two disagree."""
_PARTS: Final = ("", "-wal", "-shm")
EMPTY: Final = "which are empty"
"""For messages if the manifests and the history are empty."""
_FULL: Final = "database or disk is full"
_IO_ERROR: Final = "disk I/O error"
_LOG_INDEX_BYTES: Final = 32 << 10
_LONG_PATH: Final = 500
"""Usual builds of SQLite may reject longer paths, in bytes."""
_NOT_WRITABLE: Final = "attempt to write a readonly database"
_BUSY: Final = ("database is locked", "database table is locked", "locking protocol")
_NOT_DAMAGE: Final = (_FULL, _NOT_WRITABLE, *_BUSY, _IO_ERROR, "unable to open database file", "out of memory")
"""SQLite's messages for problems of the environment. All others mean damage."""


class DamagedError(Exception):
    """The file has content that was never written to it."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split())[:100])


_BROKEN: Final = (sqlite3.Error, DamagedError, UnicodeDecodeError)
"""Exceptions from using a damaged file. SQLite quotes it in messages, which then may not decode either."""


class Database(ABC):
    """One connection to `path`. Raises StateError if it cannot be used; for damage, only `run` does, for `remake`."""

    SCHEMA: ClassVar[int]
    """The release of the tables."""
    TABLES: ClassVar[tuple[str, ...]]
    """The statements that create them."""

    @abstractmethod
    def _fill(self, db: sqlite3.Connection, known: Rows) -> str | None:
        """Add all rows of the manifests and the history. Returns a description of what is lost. None if both are empty.

        `known` has rows of the file that is rebuilt.
        """

    @abstractmethod
    def _is_behind(self, db: sqlite3.Connection) -> bool:
        """Return True if written rows are missing: SQLite silently drops the rest of a damaged write-ahead log."""

    @abstractmethod
    def _known(self, db: sqlite3.Connection) -> Rows:
        """The rows to keep. Raises DamagedError for values that were never written."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self._read_only = read_only
        self._db: sqlite3.Connection | None = None
        self._fault: StateError | None = None
        self._lock: BinaryIO | None = None
        """Closed with this object, so that a command that ended does not keep others from rebuilding the file."""
        lock = path.with_name("state.lock")
        try:
            self._lock = os.fdopen(reading.open_fd(lock, os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT), "rb")
        except reading.NotAFileError as error:
            raise StateError(f"{lock} {error.strerror}", hint="move it away") from error
        except OSError as error:
            if not read_only:
                raise self._unusable(str(error.strerror)) from error
        self._read_into_memory() if read_only else self._open()

    def run(self, operation: Callable[[sqlite3.Connection], T]) -> T:
        """Return the result of `operation`, which is one transaction. `operation` may raise DamagedError.

        Raises StateError, or OSError if the disk is full.
        """
        if self._fault is not None:
            raise self._fault
        assert self._db is not None
        try:
            with _rolled_back(self._db):
                return operation(self._db)
        except FileNotFoundError as error:  # the history
            raise self._unusable(str(error.strerror)) from error
        except _BROKEN as error:
            raise self._explained(error) from error

    def remake(self) -> str:
        """Rebuild the file, keeping sound rows. Describes what is lost. Raises StateError while others have it open."""
        self._shut()
        if not self._wait_for_lock(fcntl.LOCK_EX, _REPAIR_PATIENCE_S):
            self._open()
            raise StateError(
                f"{self.path}: another process uses the index, so it cannot be rebuilt now",
                hint="wait until all commands on this workspace have ended, then run pipeline store repair again",
            )
        damaged, known = False, Rows()
        try:
            with closing(self._connect()) as db:
                self._check(db, thoroughly=True)
                known = self._known(db)
        except FileNotFoundError:
            pass
        except _BROKEN as error:
            self._explained(error)
            damaged = True
        lost = self._make(known, keep_old=damaged)
        self._open()
        return lost or EMPTY

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._shut()
        if self._lock is not None:
            self._lock.close()

    # opening

    def _open(self) -> None:
        """Open the file. Create it first if it is missing. Holds the shared lock from then on."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            exists = os.path.lexists(self.path)
            # Another process may create the file meanwhile. It then shares the lock for as long as it works.
            if not self._wait_for_lock(fcntl.LOCK_SH if exists else fcntl.LOCK_EX, _LOOK_S):
                if time.monotonic() > deadline:
                    raise self._busy()
                continue
            if exists and os.path.lexists(self.path):
                break
            if not exists and not os.path.lexists(self.path):
                self._log("is missing; it was rebuilt", self._make(Rows()))
        self._fault = None
        try:
            self._db = self._connect()
            self._check(self._db, thoroughly=self.path.stat().st_size <= _SMALL_BYTES)
            if self._is_behind(self._db):
                self._catch_up(self._db)
        except _BROKEN as error:
            self._shut()
            self._fault = self._explained(error)

    def _shut(self) -> None:
        if self._db is not None:
            self._db.close()
        self._db = None

    def _wait_for_lock(self, mode: int, patience_s: float) -> bool:
        deadline = time.monotonic() + patience_s
        while self._lock is not None:
            try:
                fcntl.flock(self._lock, mode | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.002)
            except OSError:
                if not self._read_only:  # some network file systems refuse locks on read-only files
                    raise
                break
        return True

    def _connect(self, path: Path | None = None, mode: str = "mode=rw") -> sqlite3.Connection:
        """A connection to an existing file. Raises DamagedError if it is not a regular file."""
        path = path or self.path
        for part in _PARTS:
            file = Path(f"{path}{part}")
            if (not part or file.exists()) and not stat.S_ISREG(file.stat().st_mode):
                raise DamagedError(f"{file.name} is not a file")
        db = sqlite3.connect(f"{path.as_uri()}?{mode}", uri=True, timeout=_PATIENCE_S, isolation_level=None)
        try:
            db.execute("PRAGMA synchronous=NORMAL")
        except sqlite3.Error:
            db.close()
            raise
        return db

    def _check(self, db: sqlite3.Connection, *, thoroughly: bool) -> None:
        """Raise DamagedError or sqlite3.Error for an invalid file, StateError for one of a newer release."""
        numbers = [db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("user_version", "application_id")]
        schema, application = numbers
        if application in {0, _APPLICATION + schema} and 0 < schema < self.SCHEMA:
            raise DamagedError("an older release wrote it")
        if application == _APPLICATION + schema and schema > self.SCHEMA:
            raise StateError(
                f"{self.path}: the index has schema {schema}, but this release reads schema {self.SCHEMA}",
                hint="use the release that wrote it, or move state.db away to have it rebuilt",
            )
        if numbers != [self.SCHEMA, _APPLICATION + self.SCHEMA]:
            raise DamagedError("trtllm-pipeline did not write its header")
        tables = [row[0] for row in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid")]
        if tables != list(self.TABLES):
            raise DamagedError("trtllm-pipeline did not write its tables")
        if thoroughly:
            result = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if result != "ok":
                raise DamagedError(str(result))

    def _catch_up(self, db: sqlite3.Connection) -> None:
        """Add the rows that a killed process did not commit, or that were in a damaged write-ahead log."""
        with _rolled_back(db):
            db.execute("BEGIN IMMEDIATE")
            if self._is_behind(db):  # not only between another process's line of the history and its commit
                latest = {"latest": self._known(db)["latest"]}
                self._log("lacked rows; they were restored", self._fill(db, latest))
            db.execute("COMMIT")

    # errors

    def _explained(self, error: Exception) -> StateError:
        """The error for users. Its message says whether the file is damaged. Raises OSError for a full disk."""
        message = str(error)
        if isinstance(error, (sqlite3.ProgrammingError, sqlite3.InterfaceError)):
            raise error  # a bug of ours
        if message in _BUSY:
            raise self._busy() from error
        # If even the log's index does not fit, SQLite reports an I/O error.
        if message == _FULL or (message == _IO_ERROR and _free_bytes(self.path.parent) < _LOG_INDEX_BYTES):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path)) from error
        # A flipped bit in the header also forbids writing.
        if message in _NOT_DAMAGE and not (message == _NOT_WRITABLE and os.access(self.path, os.W_OK)):
            raise self._unusable(message) from error
        line = str(DamagedError(message))
        return StateError(
            f"{self.path}: the index is damaged: {line}",
            hint="pipeline store repair rebuilds it from the manifests and the history",
        )

    def _busy(self) -> StateError:
        return StateError(
            f"{self.path}: another process has locked the index for {_PATIENCE_S:.0f} s",
            hint="find the process that uses this workspace: it may be suspended (Ctrl-Z), or its disk may hang",
        )

    def _unusable(self, why: str) -> StateError:
        if not self.path.parent.is_dir():
            return StateError(
                f"{self.path.parent}: the workspace was moved or removed while it was in use",
                hint="give its new path with --workspace DIR; if it was removed, pipeline run --matrix FILE creates a new one",
            )
        length = len(os.fsencode(self.path.absolute()))
        return StateError(
            f"{self.path}: cannot use the index: {why}",
            hint="check the disk and the permissions, or choose another --workspace"
            + (f", with a path shorter than {length} bytes" if length > _LONG_PATH else ""),
        )

    # creating

    def _make(self, known: Rows, *, keep_old: bool = False) -> str | None:
        """Create the file and put it in its place. `keep_old` keeps a damaged one as `state.db.damaged`.

        The caller holds the exclusive lock. The old file goes before its write-ahead log. If this process is killed in
        between, the file is missing, and the next process to open it creates it.
        """
        new = self.path.with_name(f"{self.path.name}.new")
        try:
            for part in _PARTS:
                Path(f"{new}{part}").unlink(missing_ok=True)
            with closing(sqlite3.connect(new, isolation_level=None)) as db:
                db.execute("PRAGMA journal_mode=WAL")
                db.execute("PRAGMA synchronous=OFF")
                lost = self._create(db, known)
        except sqlite3.Error as error:
            raise self._explained(error) from error
        with new.open("rb") as file:
            os.fsync(file.fileno())  # otherwise a power cut could leave an empty file under the name
        for part in _PARTS:
            old, kept = Path(f"{self.path}{part}"), Path(f"{self.path}.damaged{part}")
            if keep_old:
                _remove(kept)
            if keep_old and old.exists():
                old.rename(kept)
            else:
                _remove(old)
        new.replace(self.path)
        return lost

    def _create(self, db: sqlite3.Connection, known: Rows) -> str | None:
        for statement in ("BEGIN", *self.TABLES):
            db.execute(statement)
        lost = self._fill(db, known)
        db.execute(f"PRAGMA user_version={self.SCHEMA}")
        db.execute(f"PRAGMA application_id={_APPLICATION + self.SCHEMA}")
        db.execute("COMMIT")
        return lost

    def _log(self, change: str, lost: str | None) -> None:
        if lost is not None:
            logger.warning("%s: the index %s from the manifests and the history, %s", self.path, change, lost)

    def _read_into_memory(self) -> None:
        """Read the file into memory. If it is not sound, read the manifests and the history instead."""
        self._db = sqlite3.connect(":memory:", isolation_level=None)
        problem = "is missing"
        for _ in range(_READS):
            try:
                with self._readable() as db:
                    self._check(db, thoroughly=True)
                    db.backup(self._db)
                return
            except FileNotFoundError:
                if not self.path.exists():
                    break
            except _BROKEN as error:
                problem = f"is damaged: {DamagedError(str(error))}"
        self._log(f"{problem}; it was read", self._create(self._db, Rows()))

    @contextmanager
    def _readable(self) -> Iterator[sqlite3.Connection]:
        """A connection that writes nothing next to the file."""
        if not self._wait_for_lock(fcntl.LOCK_EX, _WRITER_AFTER_S):
            with closing(self._connect(self.path, "mode=ro&readonly_shm=1")) as db:
                db.execute("BEGIN")
                yield db
            return
        # No process has it open, so SQLite needs a directory in which it may write.
        try:
            with tempfile.TemporaryDirectory(prefix="pipeline-index-") as directory:
                for part in ("", "-wal"):
                    if (file := Path(f"{self.path}{part}")).is_file():
                        shutil.copyfile(file, f"{directory}/copy{part}")
                with closing(self._connect(Path(directory, "copy"))) as db:
                    if self._is_behind(db):
                        raise DamagedError("it lacks rows")
                    yield db
        finally:
            if self._lock is not None:
                fcntl.flock(self._lock, fcntl.LOCK_UN)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _free_bytes(folder: Path) -> float:
    try:
        usage = os.statvfs(folder)
    except OSError:
        return float("inf")
    return usage.f_bavail * usage.f_frsize


@contextmanager
def _rolled_back(db: sqlite3.Connection) -> Iterator[None]:
    """Roll back the transaction if the block raises."""
    try:
        yield
    except BaseException:
        if db.in_transaction:  # some errors have rolled back already
            with suppress(sqlite3.Error):  # the original error is more useful
                db.execute("ROLLBACK")
        raise
