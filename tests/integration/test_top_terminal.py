"""`pipeline serve top` over pages as servers give them, and on a real terminal."""

from __future__ import annotations

import shlex
import sys
import termios
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from tests.helpers import metrics_pages
from tests.helpers.terminals import Terminal
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


class Screen(Terminal):
    """A terminal of many colours."""

    def __init__(self, folder: Path, *words: str) -> None:
        super().__init__(words, {"TERM": "xterm-256color"}, folder)

    def wait_for(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not true():
            assert time.monotonic() < deadline, self.seen
            self.look(0.1)

    def end(self) -> int:
        """Exit code of the program, which was told to end."""
        self.wait_for(lambda: self.process.poll() is not None)
        while self.look(0.1):
            pass
        return self.process.returncode


def top_of(host: str) -> list[str]:
    return [sys.executable, "-m", "trtllm_pipeline", "serve", "top", "-u", host, "--interval-s", "0.2"]


@pytest.mark.parametrize("key", ["q", "\x03"])
def test_it_draws_on_a_terminal_until_it_is_told_to_end(key: str, tmp_path: Path) -> None:
    with metrics_pages.served(pages()) as host, closing(Screen(tmp_path, *top_of(host))) as screen:
        before = termios.tcgetattr(screen.slave)
        screen.wait_for(lambda: screen.seen.count("rates of the last") >= 3)
        screen.type(key)
        assert screen.end() == 0, screen.seen
        shown = screen.seen
        assert "\x1b[?1049h" in shown  # a screen of its own, left again
        assert shown.rindex("\x1b[?1049l") > shown.rindex("\x1b[?1049h")
        assert host in shown[shown.rindex("\x1b[?1049l") :]
        assert termios.tcgetattr(screen.slave) == before


def test_ctrl_z_gives_the_shell_its_screen_and_keys(tmp_path: Path) -> None:
    def echoes() -> bool:
        return bool(termios.tcgetattr(screen.slave)[3] & termios.ECHO)

    with (
        metrics_pages.served(pages()) as host,
        closing(Screen(tmp_path, "bash", "--norc", "--noediting", "-i")) as screen,
    ):
        screen.type(f"{shlex.join(top_of(host))}\n")
        screen.wait_for(lambda: screen.seen.count("rates of the last") >= 3)
        assert not echoes()
        screen.type("\x1a")
        screen.wait_for(lambda: "Stopped" in screen.seen)
        shown = screen.seen
        assert shown.rindex("Stopped") > shown.rindex("\x1b[?1049l") > shown.rindex("\x1b[?1049h")
        assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor is seen"
        assert echoes()
        screen.type("fg\n")
        screen.wait_for(lambda: screen.seen.count("\x1b[?1049h") == 2 and not echoes())
        screen.type("q")
        screen.wait_for(lambda: screen.seen.count("\x1b[?1049l") == 2 and echoes())
        screen.type("exit\n")
        assert screen.end() == 0, screen.seen
