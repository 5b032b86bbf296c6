"""`pipeline serve top` over pages as servers give them, and on a real terminal."""

from __future__ import annotations

import os
import pty
import select
import shlex
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from contextlib import closing
from fcntl import ioctl
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from tests.helpers import metrics_pages
from trtllm_pipeline.hosting import top

pytestmark = pytest.mark.integration


def pages() -> dict[str, Callable[[], str]]:
    gateway, steps = metrics_pages.Gateway(), iter(range(1, 1000))

    def page() -> str:
        gateway.step()
        return gateway.page()

    return {"/metrics": page, "/triton": lambda: metrics_pages.triton(next(steps))}


def test_pages_are_asked_and_merged(tmp_path: Path) -> None:
    with metrics_pages.served(pages()) as host:
        sample = top.once(tmp_path, [host, f"{host}/triton", f"{host}/nothing", "127.0.0.1:1"], interval_s=0.1)
    rows = {row.server: row for row in sample.rows}
    assert rows[host].model == "qwen"
    assert rows[host].rates.output_tokens_per_s == pytest.approx(800 / rows[host].rates.seconds)
    assert rows[f"{host}/triton"].reading.kv_cache_use == 0.25
    assert rows[f"{host}/nothing"].state == rows["127.0.0.1:1"].state == "no answer"
    assert metrics_pages.GPU in sample.gpus


class Screen:
    """A terminal, and a program in it, which Ctrl-C and Ctrl-Z reach."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._ours, self.theirs = pty.openpty()
        ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.shown = b""
        self.process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *words],
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            cwd=folder,
            env={**os.environ, "TERM": "xterm-256color"},
        )

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def wait_for(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not true():
            assert time.monotonic() < deadline, self.shown
            self._read()

    def end(self) -> int:
        """Exit code of the program, which was told to end."""
        self.wait_for(lambda: self.process.poll() is not None)
        while self._read():
            pass
        return self.process.returncode

    def _read(self) -> bool:
        if found := select.select([self._ours], [], [], 0.1)[0]:
            self.shown += os.read(self._ours, 65536)
        return bool(found)

    def close(self) -> None:
        self.process.kill()
        os.close(self._ours)
        os.close(self.theirs)


def top_of(host: str) -> list[str]:
    return [sys.executable, "-m", "trtllm_pipeline", "serve", "top", "-u", host, "--interval-s", "0.2"]


@pytest.mark.parametrize("key", [b"q", b"\x03"])
def test_it_draws_on_a_terminal_until_it_is_told_to_end(key: bytes, tmp_path: Path) -> None:
    with metrics_pages.served(pages()) as host, closing(Screen(tmp_path, *top_of(host))) as screen:
        before = termios.tcgetattr(screen.theirs)
        screen.wait_for(lambda: screen.shown.count(b"rates of the last") >= 3)
        screen.type(key)
        assert screen.end() == 0, screen.shown
        shown = screen.shown
        assert b"\x1b[?1049h" in shown  # a screen of its own, left again
        assert shown.rindex(b"\x1b[?1049l") > shown.rindex(b"\x1b[?1049h")
        assert host.encode() in shown[shown.rindex(b"\x1b[?1049l") :]
        assert termios.tcgetattr(screen.theirs) == before


def test_ctrl_z_gives_the_shell_its_screen_and_keys(tmp_path: Path) -> None:
    def echoes() -> bool:
        return bool(termios.tcgetattr(screen.theirs)[3] & termios.ECHO)

    with (
        metrics_pages.served(pages()) as host,
        closing(Screen(tmp_path, "bash", "--norc", "--noediting", "-i")) as screen,
    ):
        screen.type(f"{shlex.join(top_of(host))}\n".encode())
        screen.wait_for(lambda: screen.shown.count(b"rates of the last") >= 3)
        assert not echoes()
        screen.type(b"\x1a")
        screen.wait_for(lambda: b"Stopped" in screen.shown)
        shown = screen.shown
        assert shown.rindex(b"Stopped") > shown.rindex(b"\x1b[?1049l") > shown.rindex(b"\x1b[?1049h")
        assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l"), "the cursor is seen"
        assert echoes()
        screen.type(b"fg\n")
        screen.wait_for(lambda: screen.shown.count(b"\x1b[?1049h") == 2 and not echoes())
        screen.type(b"q")
        screen.wait_for(lambda: screen.shown.count(b"\x1b[?1049l") == 2 and echoes())
        screen.type(b"exit\n")
        assert screen.end() == 0, screen.shown
