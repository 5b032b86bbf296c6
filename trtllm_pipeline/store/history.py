"""The history of a workspace, one event per line: everything in the index that no manifest has.

Lines are only appended, each in one write. Each line begins with its checksum, so that damaged lines are detected.
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
        """Append `events` in one write. After an OSError nothing was added, or an incomplete line that readers skip."""
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
        """All events, the oldest first; None for a damaged line. Raises OSError."""
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
