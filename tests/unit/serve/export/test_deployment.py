"""What a deployment knows of its cell."""

import os
from pathlib import Path

from trtllm_pipeline.serve.export.deployment import disk_bytes


def test_hard_links_count_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "weights").write_bytes(b"x" * 100)
    os.link(tmp_path / "a" / "weights", tmp_path / "same")
    (tmp_path / "config").write_bytes(b"y" * 10)
    (tmp_path / "link").symlink_to("config")
    assert disk_bytes(tmp_path) == 110
