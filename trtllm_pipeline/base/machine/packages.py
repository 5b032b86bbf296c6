"""Installed packages, from the metadata that pip leaves next to them. Nothing of a package is imported."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import Distribution


def distribution_of(package: str, folders: Iterable[str] = ()) -> Distribution | None:
    """A package's metadata, in `folders` or else on this Python's import path. None if it is not installed."""
    from importlib.metadata import Distribution

    return next(iter(Distribution.discover(name=package, path=list(folders) or sys.path)), None)


def version_of(package: str, folders: Iterable[str] = ()) -> str | None:
    """Version in the metadata of a package. None without it: an interrupted installation may leave an empty directory."""
    found = distribution_of(package, folders)
    text = (found.read_text("METADATA") or found.read_text("PKG-INFO") or "") if found else ""
    version = re.search(r"^Version: *(\S+)", text, re.MULTILINE)
    return version[1] if version else None
