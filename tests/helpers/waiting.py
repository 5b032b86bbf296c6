"""Waiting for conditions: nothing in a test may take a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable

patience_s = 50.0
"""Long enough for a busy machine, and shorter than pytest's own limit of a test. `tests/conftest.py` sets it for each test."""


def eventually(true: Callable[[], object]) -> bool:
    """Whether a condition comes to hold."""
    deadline = time.monotonic() + patience_s
    while not (holds := bool(true())) and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds
