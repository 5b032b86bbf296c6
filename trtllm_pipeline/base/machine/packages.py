"""Versions of installed packages, from the metadata that pip leaves next to them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path


def version_of(package: str, folders: Iterable[str] = ()) -> str | None:
    """Version in a package's metadata, in `directories` or else on this Python's import path. None without it."""
    text = ""
    metadata = next(_metadata_of(package, list(folders) or sys.path), None)
    for name in ("METADATA", "PKG-INFO") if metadata else ():  # an interrupted installation leaves neither
        with suppress(OSError):
            text = text or Path(metadata or "", name).read_text("utf-8", "replace")
    version = re.search(r"^Version: *(\S+)", text, re.MULTILINE)
    return version[1] if version else None


def _metadata_of(package: str, folders: Iterable[str]) -> Iterator[str]:
    """Directories with a package's metadata, found as importlib.metadata does, whose import takes longer than this."""

    def normal(name: str) -> str:
        return re.sub(r"[-_.]+", "_", name).lower()

    wanted = normal(package)
    for folder in folders:
        with suppress(OSError):
            for name in os.listdir(folder or "."):
                if (
                    name.endswith((".dist-info", ".egg-info"))
                    and normal(name.rpartition(".")[0].partition("-")[0]) == wanted
                ):
                    yield os.path.join(folder, name)
