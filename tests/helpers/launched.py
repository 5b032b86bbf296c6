"""The launch stage in its own process, as an executor would run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from tests.helpers.waiting import eventually


class LaunchStage:
    """Runs `program`, a text in Python, whose process writes `service.json` into `attempt`."""

    def __init__(self, attempt: Path, program: str, *words: str, **environment: str) -> None:
        attempt.mkdir()
        self.attempt = attempt
        with (attempt / "log").open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program, *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
            )

    def log(self) -> str:
        return (self.attempt / "log").read_text()

    def ready(self) -> dict[str, Any]:
        """The content of `service.json`, once it is there."""
        path = self.attempt / "service.json"
        assert eventually(lambda: path.exists() or self.process.poll() is not None)
        assert path.exists(), self.log()
        return dict(json.loads(path.read_text()))


def responds(url: str) -> bool:
    try:
        return httpx.get(url, timeout=60).is_success
    except httpx.TransportError:
        return False


def still_running(marker: str) -> list[str]:
    """Command lines of the living processes that have `marker` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                living = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
                if living and marker.encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
    return found
