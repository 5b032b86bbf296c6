"""An index that lacks rows is completed from the history, and never read as empty."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.helpers.signed import publish
from trtllm_pipeline.base.domain import Fingerprint
from trtllm_pipeline.base.errors import StateError
from trtllm_pipeline.orchestrate.store.store import Store

_HEADER_BYTES, _FRAME_BYTES = 32, 24 + 4096
"""Of a write-ahead log of SQLite, https://www.sqlite.org/fileformat2.html#the_write_ahead_log."""


def flipped(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def worked_in(folder: Path) -> Path:
    """A workspace whose process ended without closing its index: all rows are in the write-ahead log."""
    store = Store(folder / "w")
    store.index.begin_run("first", "m.yaml", ("run",))
    publish(store)
    store.index.end_run("first", 0)
    shutil.copytree(folder / "w", folder / "left")
    store.close()
    return folder / "left"


@pytest.mark.parametrize(
    "damage",
    [
        lambda wal: flipped(wal, 0),  # its header: none of it counts
        lambda wal: flipped(wal, _HEADER_BYTES + _FRAME_BYTES + 1000),
        lambda wal: flipped(wal, wal.stat().st_size - 1000),  # the newest rows alone
        Path.unlink,
    ],
)
@pytest.mark.parametrize("read_only", [False, True])
def test_a_damaged_log_is_noticed(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
    read_only: bool,
) -> None:
    left = worked_in(tmp_path)
    damage(left / "state.db-wal")
    if read_only:
        monkeypatch.setattr(Store, "_unwritable", lambda _self, database: database)
    store = Store(left)
    (run,) = store.index.runs()
    assert (run.id, run.exit_code) == ("first", 0)
    assert len(store.index.all_artifacts()) == 1
    (told,) = [record.message for record in caplog.records]
    assert "nothing is lost" in told
    store.close()
    caplog.clear()
    assert len(Store(left).index.runs()) == 1
    assert len(caplog.records) == (1 if read_only else 0)


def test_a_process_that_was_killed_before_it_committed_loses_nothing(tmp_path: Path) -> None:
    left = worked_in(tmp_path)
    store = Store(left)
    store.index.history.append([("runs", (2, "second", "m.yaml", "[]", 1.0, None, None))])
    store.close()
    assert [run.id for run in Store(left).index.runs()] == ["second", "first"]


def test_an_index_that_has_all_is_taken_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the newest event of the history is."""
    store = Store(tmp_path / "w")
    artifact = publish(store)
    store.index.begin_run("first", "m.yaml", ("run",))
    changes: list[Callable[[], object]] = [
        lambda: store.index.end_run("first", 1),
        lambda: store.index.set_latest([("cell", "build", artifact.fingerprint)]),
        lambda: store.index.set_latest([], [("cell", "launch", Fingerprint("0" * 32), "{}")]),
        lambda: store.index.add_infeasible(artifact.fingerprint, "x"),
        store.index.forget_infeasible,
        lambda: store.index.set_pin("a", {}),
        store.index.forget_pins,
        lambda: store.index.history.append([("of another release", (1, 2))]),
        lambda: store.index.history.append([("runs", ("not", "a", "row"))]),
    ]
    for change in changes:
        change()
        Store(tmp_path / "w").close()
    assert caplog.records == []


def test_what_was_forgotten_stays_forgotten(tmp_path: Path) -> None:
    store = Store(tmp_path / "w")
    store.index.set_pin("a", {})
    store.index.history.append([("no pins", ())])
    store.close()
    assert Store(tmp_path / "w").index.pin("a") is None


@pytest.mark.parametrize("part", ["", "-wal", "-shm"])
@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_what_is_not_a_file_is_an_error_until_repair_sets_it_aside(
    tmp_path: Path, make: Callable[[Path, str], None], part: str, kind: str
) -> None:
    left = worked_in(tmp_path)
    make(left / f"state.db{part}", kind)
    store = Store(left)
    with pytest.raises(StateError, match=f"state.db{part} is not a file"):
        store.index.runs()
    assert store.repair()[:2] == (1, "nothing is lost")
    assert len(store.index.runs()) == 1
    store.close()
    with closing(sqlite3.connect(left / "state.db")) as db:
        assert db.execute("SELECT run FROM runs").fetchall() == [("first",)]
