"""Directories with only those model files that a stage's key contains, so that the stage cannot depend on others."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_FOLDER: Final = "inputs"
"""Directory of an attempt, while it runs."""


def make(attempt: Path, name: str, whole: Path, files: Sequence[str]) -> Path:
    """Create a directory in `attempt` for its input `name`, with hard links to `files` of the directory `whole`.

    Returns `whole` itself if links are impossible (no support in the file system, files of another user): copies of weights
    would cost more than they are worth.
    """
    view = attempt / _FOLDER / name
    try:
        for file in files:
            target = view / file
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(whole / file, target)
    except OSError:
        remove(attempt)
        return whole
    return view


def remove(attempt: Path) -> None:
    """Remove the views of `attempt`: they are not part of the result, and would keep a removed model on the disk."""
    shutil.rmtree(attempt / _FOLDER, ignore_errors=True)
