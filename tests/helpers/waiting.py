"""Waiting for conditions: nothing in a test may take a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 50.0
"""Long enough for a busy machine, and shorter than pytest's own limit of a test."""


def eventually(true: Callable[[], object], timeout_s: float = PATIENCE_S) -> bool:
    """Whether a condition comes to hold."""
    deadline = time.monotonic() + timeout_s
    while not (holds := bool(true())) and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds
