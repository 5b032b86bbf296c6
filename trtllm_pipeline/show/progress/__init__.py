"""Observers of a run: progress on stderr for humans and programs.

    live     a redrawn grid of cells x stages, with failures printed permanently above it
    plain    one line per event, for logs and pipes
    quiet    failures only
    json     one JSON object per line, for programs (events: see `lines.JsonObserver`)

All observers share the state in `tracker.Tracker`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal, TextIO

if TYPE_CHECKING:
    from trtllm_pipeline.show.progress.lines import QuietObserver
    from trtllm_pipeline.show.progress.live import LiveObserver

Mode = Literal["auto", "live", "plain", "json", "quiet"]


def observer(stream: TextIO, *, mode: Mode = "auto") -> QuietObserver | LiveObserver:
    """The observer for `mode`. "auto" is live if `stream` is a terminal that can redraw and CI is not set."""
    if mode == "auto":
        dumb = os.environ.get("TERM", "") in {"", "dumb", "unknown"} or bool(os.environ.get("CI"))
        mode = "live" if stream.isatty() and not dumb else "plain"
    if mode == "live":
        from trtllm_pipeline.show.progress.live import LiveObserver

        return LiveObserver(stream)
    from trtllm_pipeline.show.progress import lines

    kinds = {"plain": lines.PlainObserver, "json": lines.JsonObserver, "quiet": lines.QuietObserver}
    return kinds[mode](stream)
