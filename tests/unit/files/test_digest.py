from __future__ import annotations

import hashlib
import os
import random
import time
from pathlib import Path

import pytest
from blake3 import blake3

from trtllm_pipeline.files import digest
from trtllm_pipeline.files.digest import StatCache, digest_file


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "_SETTLED_NS", 0)


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, 3_000_001])
def test_the_digest_is_blake3_of_the_content(tmp_path: Path, size: int) -> None:
    content = random.Random(size).randbytes(size)
    (tmp_path / "f").write_bytes(content)
    assert digest_file(tmp_path / "f") == blake3(content).hexdigest()


def test_a_second_look_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"content")
    with StatCache(tmp_path / "cache") as cache:
        first = cache.digest(file)
    monkeypatch.setattr(digest, "digest_file", lambda _: pytest.fail("it was read again"))
    assert cache.digest(file) == first
    assert StatCache(tmp_path / "cache").digest(file) == first


def test_a_change_is_seen_even_with_size_and_time_set_back(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"one")
    cache = StatCache(tmp_path / "cache")
    before, status = cache.digest(file), file.stat()
    time.sleep(0.02)
    file.write_bytes(b"two")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert cache.digest(file) == blake3(b"two").hexdigest() != before


def test_what_was_written_a_moment_ago_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "_SETTLED_NS", 10**12)
    file = tmp_path / "f"
    file.write_bytes(b"one")
    StatCache(tmp_path / "cache").digest(file)
    assert not (tmp_path / "cache").exists()


def test_a_file_from_before_the_clock_was_set_back_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"one")
    now = time.time_ns()
    monkeypatch.setattr("time.time_ns", lambda: now - 10**15)
    StatCache(tmp_path / "cache").digest(file)
    assert (tmp_path / "cache").exists()


def test_without_keeping_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"one")
    (tmp_path / "cache").write_bytes(b"\n" * 500)
    cache = StatCache(tmp_path / "cache", keep=False)
    assert cache.digest(tmp_path / "f") == cache.digest(tmp_path / "f")
    assert (tmp_path / "cache").read_bytes() == b"\n" * 500


def test_torn_lines_and_foreign_bytes_only_cost_reading(tmp_path: Path) -> None:
    file, memory = tmp_path / "f", tmp_path / "cache"
    file.write_bytes(b"one")
    with StatCache(memory) as cache:
        cache.digest(file)
    odd = b'[["/list"], 1, 2, 3, 4, "d"]\n' + b"[" * 100_000 + b"\n\xff\xfe\n{}\n"
    memory.write_bytes(b'["/half", 3, ' + b"\n" + odd + memory.read_bytes() + b'["/torn", 1')
    assert StatCache(memory).digest(file) == blake3(b"one").hexdigest()
    memory.write_bytes(hashlib.sha256(b"x").digest())
    assert StatCache(memory).digest(file) == blake3(b"one").hexdigest()


def test_a_memory_of_mostly_old_lines_is_rewritten(tmp_path: Path) -> None:
    file, memory = tmp_path / "f", tmp_path / "cache"
    file.write_bytes(b"one")
    with StatCache(memory) as cache:
        cache.digest(file)
    line = memory.read_bytes()
    memory.write_bytes(line * 200)
    StatCache(memory)
    assert memory.read_bytes() == line


def test_processes_may_share_a_memory(tmp_path: Path) -> None:
    memory = tmp_path / "cache"
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    with StatCache(memory) as one, StatCache(memory) as two:
        one.digest(tmp_path / "a")
        two.digest(tmp_path / "b")
    assert len(memory.read_bytes().splitlines()) == 2
