"""The history of a workspace, one event a line: what the index knows and no manifest says.

Lines are only ever appended, each in one write, so what was written stays as it was; each begins with its checksum,
so a line that was damaged is told from one that was not.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

NAME: Final = "history.jsonl"

Value = str | int | float | None
Event = tuple[str, Sequence[Value]]
"""What happened, and its values in the order of the index's statement for it."""


class History:
    """The file of events of a workspace."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, events: Iterable[Event]) -> None:
        """Add `events` at the end, in one write. Raises OSError, having added nothing or a line that is passed over."""
        # The line's end comes first: after a write that was cut short, the next one still begins a line.
        data = b"".join(b"\n" + _line([name, *values]) for name, values in events)
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            written = os.write(fd, data)
            while written < len(data):
                written += os.write(fd, data[written:])
        finally:
            os.close(fd)

    def events(self) -> Iterator[Event | None]:
        """Every event, the oldest first; None for a line that is damaged. Raises OSError."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            for line in file:
                if line.strip():
                    yield _event(line.strip())


def _line(event: Sequence[Value]) -> bytes:
    text = json.dumps(event, ensure_ascii=True, separators=(",", ":")).encode()
    return b"%08x %b" % (zlib.crc32(text), text)


def _event(line: bytes) -> Event | None:
    checksum, _, text = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        return None
    name, *values = json.loads(text)
    return name, values
