"""The time left of a run, for other processes: `left.json` in the run's directory, held as long as the run continues.

    file = TimeLeft(directory)     the run: file.write(seconds, complete) repeatedly, then file.close()
    read(directory)                other processes: seconds and whether they are reliable, or None if the run is not active

The estimate comes from the run, because only the run has learned its durations and knows the nodes.
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
"""Fixed size in bytes. The file is overwritten in place, because the lock belongs to the file and not to its name."""


class TimeLeft:
    """The file of an active run. A killed run no longer holds its lock. A finished run removes it."""

    def __init__(self, folder: Path) -> None:
        self._claim = claims.take(folder / NAME)

    def write(self, seconds: float, complete: bool) -> None:
        """Write the current estimate. Raises OSError."""
        if self._claim is not None:
            estimate = {"schema": 1, "time_s": round(time.time(), 3), "left_s": round(seconds, 3), "complete": complete}
            os.pwrite(self._claim.fd, f"{json.dumps(estimate):<{_WIDTH}}\n".encode(), 0)

    def close(self) -> None:
        """Remove the file at the end of the run."""
        if self._claim is not None:
            self._claim.release()


def goes_on(folder: Path) -> bool:
    return claims.is_held(folder / NAME)


def read(folder: Path) -> tuple[float, bool] | None:
    """Time left of the run in `folder` by its own estimate, in seconds, and whether it is reliable. None without an estimate."""
    if not goes_on(folder):
        return None
    data = read_object(folder / NAME) or {}
    try:
        since_s = max(0.0, time.time() - float(data["time_s"]))
        return max(0.0, float(data["left_s"]) - since_s), bool(data["complete"])
    except (KeyError, TypeError, ValueError):
        return None
