"""A terminal with a program in it, as a person sees it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path


class Terminal:
    """24 lines of 80 columns, and a program in them, which Ctrl-C and Ctrl-Z reach."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], folder: Path | None = None) -> None:
        self._master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = subprocess.Popen(
            words,
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            cwd=folder,
            env={**os.environ, **environment},
            start_new_session=True,
            preexec_fn=self._controlling,  # noqa: PLW1509 - Ctrl-C comes from the terminal
        )
        self.seen = ""
        """What was shown and nobody has taken yet."""

    def _controlling(self) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def look(self, timeout_s: float) -> bool:
        """Whether more was shown in this time."""
        if not select.select([self._master], [], [], timeout_s)[0]:
            return False
        self.seen += os.read(self._master, 65536).decode(errors="replace").replace("\r\n", "\n")
        return True

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self.slave)
