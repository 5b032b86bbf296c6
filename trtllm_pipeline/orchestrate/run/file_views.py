"""Directories that show a stage only the files of a model that its key hangs on: what it cannot see, it cannot depend on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_FOLDER: Final = "inputs"
"""Of an attempt, as long as it runs."""


def make(attempt: Path, name: str, whole: Path, files: Sequence[str]) -> Path:
    """A directory in `attempt` for its input `name`, with hard links to those `files` of the directory `whole`.

    Where links cannot be made (a file system without them, files of another user) it is `whole` itself: copies of weights
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
    """Remove what was made in `attempt`: it is no part of the result, and would keep a removed model's bytes on the disk."""
    shutil.rmtree(attempt / _FOLDER, ignore_errors=True)
