from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest
from blake3 import blake3

from trtllm_pipeline.base.files.digest import digest_file, digests_of_file


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, 3_000_001])
def test_the_digest_is_blake3_of_the_content(tmp_path: Path, size: int) -> None:
    content = random.Random(size).randbytes(size)
    (tmp_path / "f").write_bytes(content)
    assert digest_file(tmp_path / "f") == blake3(content).hexdigest()


@pytest.mark.parametrize("size", [0, 1, 4 << 20, (4 << 20) + 1, 9_000_000])
def test_two_digests_in_one_read(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(random.Random(size).randbytes(size))
    assert digests_of_file(path) == (digest_file(path), hashlib.sha256(path.read_bytes()).hexdigest())


def test_a_file_of_which_the_kernel_does_not_tell_the_size() -> None:
    path = Path("/proc/self/limits")
    assert path.stat().st_size == 0
    assert digest_file(path) == blake3(path.read_bytes()).hexdigest() != blake3(b"").hexdigest()
