"""What holds for all tests."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Let tests send signals, to themselves and to what they start, however the test run itself was started.

    In the background of a script SIGINT is ignored, under nohup SIGHUP; both are inherited.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
