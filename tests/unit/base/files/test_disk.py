from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from trtllm_pipeline.base.files import disk


def test_what_is_removed_while_a_folder_is_counted_counts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "build-tracker").mkdir()
    (tmp_path / "model.whl").write_bytes(b"12345")
    scandir = os.scandir

    def removed(path: Any) -> Any:
        if str(path).endswith("build-tracker"):
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", removed)
    assert disk.folder_bytes(tmp_path) == 5
