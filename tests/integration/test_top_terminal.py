"""`pipeline serve top` over pages as servers give them, and on a real terminal."""

from __future__ import annotations

import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
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


@pytest.mark.parametrize("key", [b"q", b"\x03"])
def test_it_draws_on_a_terminal_until_it_is_told_to_end(key: bytes, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(theirs)
    with metrics_pages.served(pages()) as host:
        process = subprocess.Popen(
            # Ctrl-C reaches those whose terminal this is.
            [
                "setsid",
                "--ctty",
                "--wait",
                sys.executable,
                "-m",
                "trtllm_pipeline",
                "serve",
                "top",
                "-u",
                host,
                "--interval-s",
                "0.2",
            ],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=tmp_path,
            env={**os.environ, "TERM": "xterm-256color"},
        )
        shown, deadline, pressed = b"", time.monotonic() + 60, False
        while process.poll() is None:
            assert time.monotonic() < deadline, shown
            if select.select([ours], [], [], 0.1)[0]:
                shown += os.read(ours, 65536)
            if not pressed and shown.count(b"rates of the last") >= 3:
                os.write(ours, key)
                pressed = True
        while select.select([ours], [], [], 0.1)[0]:
            shown += os.read(ours, 65536)
    try:
        assert process.returncode == 0, shown
        assert b"\x1b[?1049h" in shown  # a screen of its own, left again
        assert shown.rindex(b"\x1b[?1049l") > shown.rindex(b"\x1b[?1049h")
        assert host.encode() in shown[shown.rindex(b"\x1b[?1049l") :]
        assert termios.tcgetattr(theirs) == before
    finally:
        os.close(ours)
        os.close(theirs)
