"""A `trtllm-serve` process: an OpenAI-compatible server that starts the workers of its other GPUs itself."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trtllm_pipeline.client.transport.http import HttpError
from trtllm_pipeline.errors import ServerError
from trtllm_pipeline.processes import out_of_memory
from trtllm_pipeline.processes.group import Group
from trtllm_pipeline.serving.command_lines import LOOPBACK, Ports
from trtllm_pipeline.serving.server import all_ok, ask, diagnose, until_ready
from trtllm_pipeline.serving.triton import WILDCARDS


@dataclass(slots=True)
class OpenAiServer:
    """A running server; a `server.Server`. Its workers have sessions of their own, but end with it all the same."""

    process: Group
    ports: Ports
    """The first is its only port."""
    log: Path
    name: str
    """Name of its program."""
    host: str
    before: out_of_memory.Counts = field(default_factory=out_of_memory.counts)

    def ready(self) -> bool:
        """Whether it reports that it is healthy."""
        return all_ok(self.host, self.ports.http, ("/health",))

    def wait_ready(self, timeout_s: float, ended: threading.Event | None = None) -> None:
        """Wait until it is ready or `ended` is set. Raises ServerError when it ends by itself or takes too long."""
        until_ready(self, self.name, timeout_s, ended)

    def died(self) -> ServerError:
        """Why it has ended, from its exit status and its log."""
        return diagnose(self.name, self.process.poll(), self.log, before=self.before)

    def dead_models(self) -> set[str]:
        """Always empty: it ends with its workers."""
        return set()

    def service(self) -> dict[str, object]:
        """What clients need to know. Raises ServerError when it serves no model."""
        try:
            models = json.loads(ask(self.host, self.ports.http, "GET", "/v1/models")[1])["data"]
            model = str(models[0]["id"])
        except (OSError, HttpError, ValueError, LookupError, TypeError) as error:
            raise ServerError(f"{self.name} does not report which model it serves: {error!r}", log=self.log) from error
        address = f"{self.host}:{self.ports.http}"
        return {
            "kind": "openai",
            "pid": self.process.pid,
            "http": address,
            "grpc": "",
            "metrics": None,
            "url": f"http://{address}",
            "model": model,
            "bls_model": None,
            "server": {"name": self.name, "version": self._version()},
        }

    def _version(self) -> str | None:
        try:
            status, answer = ask(self.host, self.ports.http, "GET", "/version")
            return str(json.loads(answer)["version"]) if status == 200 else None
        except (OSError, HttpError, ValueError, LookupError, TypeError):
            return None

    def stop(self, timeout_s: float) -> int | None:
        """Interrupt it, then terminate and kill all its processes."""
        return self.process.stop(timeout_s)


def start(command: Sequence[str], *, log: Path, ports: Ports, host: str = LOOPBACK) -> OpenAiServer:
    """Start `command`, a trtllm-serve command line without address, at `host` and the first of `ports`."""
    words = [*command, "--host", host, "--port", str(ports.http)]
    process = Group(words, env=os.environ, cwd=log.parent, log=log)
    return OpenAiServer(process, ports, log, Path(command[0]).name, LOOPBACK if host in WILDCARDS else host)
