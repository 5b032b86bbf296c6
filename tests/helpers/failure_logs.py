"""Logs of failures that people have met, written anew around the tools' own words: facts from the public issue that a
file's header names.

    # source: URL
    # stage: build
    # cause: KEY of the signature, or `unknown`
    # category: CATEGORY
    # lines: those that say the first cause, from the first one below this header: 12, 31, or NAME:12 of several logs
    # truth: what was wrong, where it was told

    the log; a failure with several logs has them below lines `==> NAME <==`

`development` are those that the signatures were written by. `held-out` were collected after that: whoever changes a
signature because of one of them moves it to `development`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent.parent / "data" / "failures"
UNKNOWN: Final = "unknown"
_PART: Final = re.compile(r"^==> (\S+) <==\n", re.MULTILINE)


@dataclass(frozen=True)
class FailureLog:
    """One failure, and what is known of it."""

    path: Path
    source: str
    stage: str
    cause: str
    category: str
    lines: frozenset[str]
    """Those that say the first cause, "LOG:NUMBER"."""
    text: str

    def lay_out(self, folder: Path) -> list[Path]:
        """Write its logs into `directory`, in their order."""
        parts = _PART.split(self.text)
        named = list(zip(parts[1::2], parts[2::2], strict=True)) if len(parts) > 1 else [("log", self.text)]
        paths = []
        for name, text in named:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            paths.append(path)
        return paths


def failure_logs(kind: str) -> Iterator[FailureLog]:
    """All of a directory: `development` or `held-out`."""
    for path in sorted((FOLDER / kind).glob("*.log")):
        head, _, text = path.read_text(encoding="utf-8").partition("\n\n")
        about = dict(line.removeprefix("# ").split(": ", 1) for line in head.splitlines())
        named = about.get("lines", "").replace(",", " ").split()
        lines = frozenset(each if ":" in each else f"log:{each}" for each in named)
        yield FailureLog(path, about["source"], about["stage"], about["cause"], about["category"], lines, text)
