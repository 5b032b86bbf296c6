"""`pipeline serve status --watch` on a real terminal."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.helpers.terminals import Terminal
from tests.helpers.waiting import eventually

COMMAND = (sys.executable, "-m", "trtllm_pipeline", "serve", "status", "--watch")
NOTHING = "this workspace has no managed servers"


@pytest.mark.seam
def test_it_draws_until_ctrl_c_and_leaves_the_last_picture(tmp_path: Path) -> None:
    with closing(Terminal(COMMAND, {"TERM": "xterm-256color"}, tmp_path)) as screen:
        assert eventually(lambda: screen.look(0.1) and NOTHING in screen.seen), screen.seen
        screen.type("\x03")
        assert screen.process.wait(60) == 0, screen.seen
        while screen.look(0.1):
            pass
        assert "\x1b[?1049h" in screen.seen, "a screen of its own"
        assert NOTHING in screen.seen[screen.seen.rindex("\x1b[?1049l") :], "left again, with the table below"
