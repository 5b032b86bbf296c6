from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from trtllm_pipeline.hub import files


def test_what_pip_removes_while_its_files_are_counted_counts_nothing(
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
    assert files.folder_bytes(tmp_path) == 5
