from __future__ import annotations

import random
from pathlib import Path

import pytest
from blake3 import blake3

from trtllm_pipeline.files.digest import digest_file


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, 3_000_001])
def test_the_digest_is_blake3_of_the_content(tmp_path: Path, size: int) -> None:
    content = random.Random(size).randbytes(size)
    (tmp_path / "f").write_bytes(content)
    assert digest_file(tmp_path / "f") == blake3(content).hexdigest()
