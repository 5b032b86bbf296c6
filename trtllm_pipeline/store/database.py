"""The SQLite file of an index, which is opened, created, read and replaced under one lock, and never trusted.

Every use goes through `Database.run`, where damage is detected. Whoever detects damage rebuilds the file and continues.
Opening, creating, closing and replacing take an exclusive flock on `state.lock`, all other uses a shared one: SQLite's own
locks cover neither the first start nor a file that is replaced while it is in use.

The index of a read-only workspace is read into memory with its write-ahead log, because SQLite would have to write beside
the file.
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
from typing import Any, ClassVar, Final, TypeVar

from trtllm_pipeline.errors import StateError
from trtllm_pipeline.files import reading

logger = logging.getLogger(__name__)

T = TypeVar("T")
Rows = dict[str, list[tuple[Any, ...]]]
"""The rows of some tables, by the table's name."""

_PATIENCE_S: Final = 30.0
"""How long to wait for other processes, whose uses of the file take milliseconds."""
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
    """The file has content that was never written to it. `suffix` names the file that is set aside."""

    def __init__(self, message: str, *, suffix: str = "damaged") -> None:
        line = " ".join(message.split())[:100]
        super().__init__(line if suffix != "damaged" else f"the index is damaged: {line}")
        self.suffix = suffix


_BROKEN: Final = (sqlite3.Error, DamagedError, UnicodeDecodeError)
"""Exceptions from using a damaged file. SQLite quotes it in messages, which then may not decode either."""


class Database(ABC):
    """One connection to `path`. Raises StateError when the file cannot be used, or was written by a newer release."""

    SCHEMA: ClassVar[int]
    """The release of the tables."""
    TABLES: ClassVar[tuple[str, ...]]
    """The statements that make them."""

    @abstractmethod
    def _fill(self, db: sqlite3.Connection, known: Rows) -> str | None:
        """Put into empty tables what there is to know. Returns words for what of it is lost; None if there was nothing.

        `known` is what `_known` took from a sound file that is made anew.
        """

    @abstractmethod
    def _is_behind(self, db: sqlite3.Connection) -> bool:
        """Whether rows are missing that were written: SQLite drops the rest of a damaged write-ahead log in silence."""

    @abstractmethod
    def _known(self, db: sqlite3.Connection) -> Rows:
        """The rows to keep. Raises DamagedError for values that were never written."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self._read_only = read_only
        self._db: sqlite3.Connection | None = None
        self._opened: tuple[int, int] | None = None
        """Device and inode of the file that is open."""
        self._lock = -1
        lock = path.with_name("state.lock")
        try:
            self._lock = reading.open_fd(lock, os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT)
        except reading.NotAFileError as error:
            raise StateError(f"{lock} {error.strerror}", hint="move it away") from error
        except OSError as error:
            if not read_only:
                raise self._unusable(str(error.strerror)) from error
        self._open()

    def run(self, operation: Callable[[sqlite3.Connection], T]) -> T:
        """What `operation` returns, on a sound file. It is called again after damage, so it must be one transaction.

        Raises DamagedError in `operation`, as all of SQLite's own words for damage, to have the file made anew.
        Raises StateError or OSError when the surroundings are to blame.
        """
        for attempt in (1, 2, 3):
            with self._locked(fcntl.LOCK_SH):
                if self._db is not None and (self._read_only or self._opened == self._there()):
                    try:
                        with _rolled_back(self._db):
                            return operation(self._db)
                    except _BROKEN as error:
                        damage = self._damage(error)
                else:
                    damage = None  # exchanged by somebody else meanwhile
            if damage is not None and attempt == 3:
                break
            self._open(damage)
        raise StateError(
            f"{self.path}: the index was damaged again right after it was rebuilt: {damage}",
            hint="check the disk, or move the file away and try again",
        )

    def remake(self) -> str:
        """Rebuild the file, keeping what a sound one had. Returns a description of what is lost."""
        with self._locked(fcntl.LOCK_EX):
            self._shut()
            damage, known = None, Rows()
            try:
                with closing(self._connect()) as db:
                    self._check(db, thoroughly=True)
                    known = self._known(db)
            except FileNotFoundError:
                pass
            except _BROKEN as error:
                damage = self._damage(error)
            lost = self._make(damage, known)
            self._use()
            return lost or EMPTY

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._db is not None:
            with self._locked(fcntl.LOCK_EX):
                self._shut()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # the lock

    @contextmanager
    def _locked(self, mode: int) -> Iterator[None]:
        if self._lock < 0:
            yield
            return
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fcntl.flock(self._lock, mode | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise self._busy() from None
                time.sleep(0.002)
            except OSError:
                if not self._read_only:  # some network file systems let nobody lock what he may not write
                    raise
                break
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _busy(self) -> StateError:
        return StateError(
            f"{self.path}: another process has locked the index for {_PATIENCE_S:.0f} s",
            hint="find the process that uses this workspace: it may be suspended (Ctrl-Z), or its disk may hang",
        )

    # opening

    def _there(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def _open(self, damage: DamagedError | None = None) -> None:
        """Open the file; rebuild it first if it is missing, or damaged and not yet replaced by another process."""
        if self._read_only:
            self._into_memory(damage)
            return
        with self._locked(fcntl.LOCK_EX):
            mine = self._opened
            self._shut()
            if self._there() is None:
                self._make(None)
            elif damage is not None and self._there() == mine:
                self._make(damage)
            try:
                if self._is_behind(self._use()):
                    raise _behind()
            except _BROKEN as error:
                self._shut()
                self._make(self._damage(error))
                self._use()

    def _use(self) -> sqlite3.Connection:
        self._db = self._connect()
        self._opened = self._there()
        self._check(self._db, thoroughly=self.path.stat().st_size <= _SMALL_BYTES)
        return self._db

    def _shut(self) -> None:
        if self._db is not None:
            self._db.close()
        self._db, self._opened = None, None

    def _connect(self, path: Path | None = None) -> sqlite3.Connection:
        """A connection to an existing file. Raises DamagedError if it is not a regular file."""
        path = path or self.path
        for part in _PARTS:
            there = Path(f"{path}{part}")
            if (not part or there.exists()) and not stat.S_ISREG(there.stat().st_mode):
                raise DamagedError(f"{there.name} is not a file")
        db = sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=_PATIENCE_S, isolation_level=None)
        try:
            db.execute("PRAGMA synchronous=NORMAL")
        except sqlite3.Error:
            db.close()
            raise
        return db

    def _check(self, db: sqlite3.Connection, *, thoroughly: bool) -> None:
        """Raise DamagedError or sqlite3.Error for an invalid file, StateError for one of a newer release."""
        found = [db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("user_version", "application_id")]
        schema, application = found
        if application in {0, _APPLICATION + schema} and 0 < schema < self.SCHEMA:
            raise DamagedError("the index was written by an older release", suffix=f"schema-{schema}")
        if application == _APPLICATION + schema and schema > self.SCHEMA:
            raise StateError(
                f"{self.path}: the index has schema {schema}, but this release reads schema {self.SCHEMA}",
                hint="use the release that wrote it, or move state.db away to have it rebuilt",
            )
        if found != [self.SCHEMA, _APPLICATION + self.SCHEMA]:
            raise DamagedError("its header was not written by trtllm-pipeline")
        tables = [row[0] for row in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid")]
        if tables != list(self.TABLES):
            raise DamagedError("its tables were not written by trtllm-pipeline")
        if thoroughly:
            said = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if said != "ok":
                raise DamagedError(str(said))

    def _damage(self, error: Exception) -> DamagedError:
        """The damage behind an error. Raises another error if the file is not the cause."""
        if isinstance(error, DamagedError):
            return error
        said = str(error)
        if isinstance(error, (sqlite3.ProgrammingError, sqlite3.InterfaceError)):
            raise error  # a mistake of ours
        if said in _BUSY:
            raise self._busy() from error
        # Where not even the log's index fits, SQLite calls it an I/O error.
        if said == _FULL or (said == _IO_ERROR and _free_bytes(self.path.parent) < _LOG_INDEX_BYTES):
            # As of any other file, so that it is told in one place.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path)) from error
        # A flipped bit in the header forbids writing as well.
        if said in _NOT_DAMAGE and not (said == _NOT_WRITABLE and os.access(self.path, os.W_OK)):
            raise self._unusable(said) from error
        return DamagedError(said)

    def _unusable(self, why: str) -> StateError:
        if not self.path.parent.is_dir():
            return StateError(
                f"{self.path.parent}: the workspace was moved or removed while it was in use",
                hint="give its new place with --workspace DIR; where it is gone, pipeline run --matrix FILE makes a new one",
            )
        length = len(os.fsencode(self.path.absolute()))
        return StateError(
            f"{self.path}: cannot use the index: {why}",
            hint="check the disk and the permissions, or choose another --workspace"
            + (f", with a path shorter than {length} bytes" if length > _LONG_PATH else ""),
        )

    # making

    def _make(self, damage: DamagedError | None, known: Rows | None = None) -> str | None:
        """Make the file, and put a damaged one in its place aside. The lock is held alone. Returns the words of `_fill`.

        Without `known` it is told in a line. Made beside and renamed. The old file goes before its write-ahead log: killed in
        between, there is none, so the next to open makes it.
        """
        new = self.path.with_name(f"{self.path.name}.new")
        try:
            for part in _PARTS:
                Path(f"{new}{part}").unlink(missing_ok=True)
            with closing(sqlite3.connect(new, isolation_level=None)) as db:
                db.execute("PRAGMA journal_mode=WAL")
                db.execute("PRAGMA synchronous=OFF")
                lost = self._filled(db, known)
        except sqlite3.Error as error:
            raise self._damage(error) from error
        for part in _PARTS:
            old = Path(f"{self.path}{part}")
            if damage is None:
                _remove(old)
                continue
            kept = Path(f"{self.path}.{damage.suffix}{part}")
            _remove(kept)
            if old.exists():
                old.rename(kept)
        new.replace(self.path)
        if known is None:
            self._tell(damage, "rebuilt", lost)
        return lost

    def _tell(self, damage: DamagedError | None, done: str, lost: str | None) -> None:
        """Log in one line that the file was rebuilt, and why."""
        if damage is not None or lost is not None:
            why = damage or "the index is missing"
            kept = f"; the old file is kept as {self.path.name}.{damage.suffix}" if damage else ""
            old = "" if self._read_only else kept
            sources = "from the manifests and the history"
            logger.warning("%s: %s; %s %s, %s%s", self.path, why, done, sources, lost or EMPTY, old)

    def _filled(self, db: sqlite3.Connection, known: Rows | None = None) -> str | None:
        for statement in ("BEGIN", *self.TABLES):
            db.execute(statement)
        lost = self._fill(db, known or {})
        db.execute(f"PRAGMA user_version={self.SCHEMA}")
        db.execute(f"PRAGMA application_id={_APPLICATION + self.SCHEMA}")
        db.execute("COMMIT")
        return lost

    def _into_memory(self, damage: DamagedError | None) -> None:
        """Read the file into memory, or if it is not sound, what it can be rebuilt from."""
        self._shut()
        self._db = sqlite3.connect(":memory:", isolation_level=None)
        if damage is None and self.path.exists():
            with self._locked(fcntl.LOCK_EX), tempfile.TemporaryDirectory(prefix="pipeline-index-") as folder:
                try:
                    for part in ("", "-wal"):
                        with_log = Path(f"{self.path}{part}")
                        if with_log.is_file():
                            shutil.copyfile(with_log, f"{folder}/copy{part}")
                    with closing(self._connect(Path(folder, "copy"))) as copy:
                        self._check(copy, thoroughly=True)
                        if self._is_behind(copy):
                            raise _behind()
                        copy.backup(self._db)
                    return
                except _BROKEN as error:
                    damage = self._damage(error)
                except FileNotFoundError:
                    pass  # a folder, or gone just now
            self._shut()
            self._db = sqlite3.connect(":memory:", isolation_level=None)
        self._tell(damage, "read", self._filled(self._db))


def _behind() -> DamagedError:
    return DamagedError(
        "the index lacks rows that were written, as after damage to its write-ahead log", suffix="behind"
    )


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _free_bytes(folder: Path) -> float:
    try:
        found = os.statvfs(folder)
    except OSError:
        return float("inf")
    return found.f_bavail * found.f_frsize


@contextmanager
def _rolled_back(db: sqlite3.Connection) -> Iterator[None]:
    """Roll back the transaction if the block raises."""
    try:
        yield
    except BaseException:
        if db.in_transaction:  # some errors have rolled back already
            with suppress(sqlite3.Error):  # what went wrong says more
                db.execute("ROLLBACK")
        raise
