"""The time left of a run, for other processes: `left.json` in the run's directory, held as long as the run continues.

    told = TimeLeft(directory)     the run: told.say(seconds, complete), again and again; told.close()
    read(directory)                whoever looks: seconds, and whether they are known; None where the run does not continue

It is the run's own estimate: nobody else knows what it has learnt, and which nodes there are.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import read_object
from trtllm_pipeline.orchestrate import claims

NAME: Final = "left.json"
_WIDTH: Final = 100
"""Bytes, always the same: it is written over what was there, since a lock is on a file and not on a name."""


class TimeLeft:
    """The file of a run that continues. A run that was killed holds it no more; one that ends removes it."""

    def __init__(self, folder: Path) -> None:
        self._claim = claims.take(folder / NAME)

    def say(self, seconds: float, complete: bool) -> None:
        """What is expected now. Raises OSError."""
        if self._claim is not None:
            told = {"schema": 1, "time_s": round(time.time(), 3), "left_s": round(seconds, 3), "complete": complete}
            os.pwrite(self._claim.fd, f"{json.dumps(told):<{_WIDTH}}\n".encode(), 0)

    def close(self) -> None:
        """The run is over."""
        if self._claim is not None:
            self._claim.release()


def goes_on(folder: Path) -> bool:
    """Whether the run in `directory` continues."""
    return claims.is_held(folder / NAME)


def read(folder: Path) -> tuple[float, bool] | None:
    """Seconds until the end of the run in `directory` as it expects them, and whether they are known; None if nobody says so."""
    if not goes_on(folder):
        return None
    told = read_object(folder / NAME) or {}
    try:
        since_s = max(0.0, time.time() - float(told["time_s"]))
        return max(0.0, float(told["left_s"]) - since_s), bool(told["complete"])
    except (KeyError, TypeError, ValueError):
        return None
