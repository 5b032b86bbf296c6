"""Runs the commands of a page from top to bottom, as a reader would, and writes their output into the page.

    python docs/walk.py docs/first-hour.md

A block of commands (`sh`) may be followed by a block with their output (`text`). Long output is cut in the middle. Commands that
install are skipped. They run in a new directory with the matrices and recipes of this checkout.
`tests/integration/test_first_hour.py` runs the same steps.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
_STEP: Final = re.compile(
    r"^```sh\n(?P<commands>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.MULTILINE | re.DOTALL
)
_INSTALLS: Final = re.compile(r"^(python3 -m venv|source) ", re.MULTILINE)
_MOST_LINES: Final = 28
_LAST_LINES: Final = 12
_COLUMNS: Final = 100
_LIMIT_S: Final = 600


@dataclass(frozen=True)
class Step:
    """A block of commands, and the output that the page shows, or None."""

    commands: str
    output: str | None
    span: tuple[int, int]
    """Start and end of the output in the page."""


def steps(text: str) -> Iterator[Step]:
    """The blocks of commands of a page, without those that install."""
    for match in _STEP.finditer(text):
        if not _INSTALLS.search(match["commands"]):
            yield Step(match["commands"], match["output"], match.span("output"))


def environment(folder: Path) -> dict[str, str]:
    """As in a terminal of fixed width, with this Python's programs first on PATH, and GPU locks of its own."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "COLUMNS": str(_COLUMNS), "XDG_RUNTIME_DIR": str(folder)}


def perform(commands: str, folder: Path) -> str:
    """Run a block of commands and return stdout. Raises CalledProcessError, with both streams, if the last of them fails."""
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", commands],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        check=True,
        timeout=_LIMIT_S,
    )
    return done.stdout


def shown(output: str) -> str:
    """Output as the page shows it: no trailing blanks, and not too long."""
    lines = [line.rstrip() for line in output.rstrip().splitlines()]
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES - _LAST_LINES], "...", *lines[-_LAST_LINES:]]
    return "".join(f"{line}\n" for line in lines)


def prepare(folder: Path) -> None:
    """Copy the directories of a clone that the commands of a page use."""
    for name in ("matrices", "recipes", "examples"):
        shutil.copytree(ROOT / name, folder / name)


def main() -> int:
    """Run a page and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="a page of docs/")
    page: Path = parser.parse_args().page
    text = page.read_text(encoding="utf-8")
    written, end = [], 0
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for step in steps(text):
            sys.stderr.write(step.commands)
            output = perform(step.commands, Path(folder))
            if step.output is not None:
                written += [text[end : step.span[0]], shown(output)]
                end = step.span[1]
    page.write_text("".join([*written, text[end:]]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
