"""The index remembers digests of files, so that none is read twice."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from blake3 import blake3

from trtllm_pipeline.base.files import digest
from trtllm_pipeline.orchestrate.store.store import Store

ONE = blake3(b"one").hexdigest()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(digest, "_SETTLED_NS", 0)
    file = tmp_path / "f"
    file.write_bytes(b"one")
    return file


def store(file: Path) -> Store:
    return Store(file.with_name("w"))


def never_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "digest_file", lambda _: pytest.fail("it was read again"))


def test_a_new_index_still_knows_them(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = store(file)
    assert before.index.digest(file) == ONE
    before.index.remake()
    never_again(monkeypatch)
    assert before.index.digest(file) == ONE


def test_names_of_files_need_not_be_text(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = file.rename(Path(os.fsdecode(os.fsencode(file) + b"\xff")))
    assert store(file).index.digest(odd) == ONE
    never_again(monkeypatch)
    assert store(file).index.digest(odd) == ONE


def test_a_change_is_seen_even_with_size_and_time_set_back(file: Path) -> None:
    index = store(file).index
    before, status = index.digest(file), file.stat()
    time.sleep(0.02)
    file.write_bytes(b"two")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert index.digest(file) == blake3(b"two").hexdigest() != before


def test_what_was_written_a_moment_ago_is_not_remembered(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "_SETTLED_NS", 10**12)
    index = store(file).index
    assert index.digest(file) == ONE
    monkeypatch.setattr(digest, "digest_file", lambda _: "read again")
    assert index.digest(file) == "read again"


def test_what_is_written_while_it_is_read_is_read_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: Path) -> str:
        found = blake3(path.read_bytes()).hexdigest()
        if found == ONE:
            path.write_bytes(b"two, longer")
        return found

    monkeypatch.setattr(digest, "digest_file", read)
    assert store(file).index.digest(file) == blake3(b"two, longer").hexdigest()


def test_a_file_from_before_the_clock_was_set_back_is_remembered(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns()
    monkeypatch.setattr("time.time_ns", lambda: now - 10**15)
    index = store(file).index
    assert index.digest(file) == ONE
    never_again(monkeypatch)
    assert index.digest(file) == ONE


def test_two_may_share_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = store(file).index, store(file).index
    other = file.with_name("g")
    other.write_bytes(b"two")
    assert (one.digest(file), two.digest(other)) == (ONE, blake3(b"two").hexdigest())
    never_again(monkeypatch)
    assert (two.digest(file), one.digest(other)) == (ONE, blake3(b"two").hexdigest())
