"""Gateway processes: started from a configuration, and looked at from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.helpers import chat_models
from trtllm_pipeline.serve.gateway.gateway_config import GatewayConfig


class Usage(NamedTuple):
    """What a process holds."""

    descriptors: int
    threads: int
    children: int
    memory_bytes: int


class Process(NamedTuple):
    """A process of this machine."""

    pid: int

    def usage(self) -> Usage:
        """What it holds now."""
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8").splitlines()
        )
        children = [task / "children" for task in Path(f"/proc/{self.pid}/task").iterdir()]
        return Usage(
            len(os.listdir(f"/proc/{self.pid}/fd")),
            int(status["Threads"]),
            sum(len(each.read_text(encoding="utf-8").split()) for each in children if each.exists()),
            int(status["VmRSS"].split()[0]) * 1024,
        )

    def memory_bytes(self) -> int:
        """Memory that it uses."""
        return self.usage().memory_bytes


def process_of(started: subprocess.Popen[str]) -> Process:
    """A process that was started."""
    return Process(started.pid)


@contextmanager
def listening(folder: Path, config: GatewayConfig) -> Iterator[str]:
    """The URL of a gateway, up to /v1, that runs as long as the context."""
    path = folder / "config.json"
    config.write(path)
    process = subprocess.Popen(
        [sys.executable, "-m", "trtllm_pipeline.serve.gateway", str(path)], stdout=subprocess.DEVNULL, text=True
    )
    try:
        yield chat_models._url(folder / "gateway.json", process)
    finally:
        process.terminate()
        assert process.wait(60) == 0
