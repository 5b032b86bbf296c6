"""A `trtllm-serve` process: an OpenAI-compatible server that starts the workers of its other GPUs itself."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trtllm_pipeline.client.transport.http import HttpError
from trtllm_pipeline.errors import ServerError
from trtllm_pipeline.processes.process import Group
from trtllm_pipeline.serving.command_lines import LOOPBACK, Ports, openai_argv
from trtllm_pipeline.serving.server import Server
from trtllm_pipeline.serving.triton import reached_at


@dataclass(kw_only=True)
class OpenAiServer(Server):
    """A running server. Its workers have sessions of their own, but end with it all the same."""

    process: Group

    def ready_paths(self) -> tuple[str, ...]:
        """It is healthy only with its workers."""
        return ("/health",)

    def service(self) -> dict[str, object]:
        """What clients need to know. Raises ServerError when it serves no model."""
        try:
            models = json.loads(self.request("GET", "/v1/models")[1])["data"]
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
            status, answer = self.request("GET", "/version")
            return str(json.loads(answer)["version"]) if status == 200 else None
        except (OSError, HttpError, ValueError, LookupError, TypeError):
            return None

    def stop(self, timeout_s: float) -> int | None:
        """Interrupt it, then terminate and kill all its processes."""
        return self.process.stop(timeout_s)


def start(command: Sequence[str], *, log: Path, ports: Ports, host: str = LOOPBACK) -> OpenAiServer:
    """Start `command`, a trtllm-serve command line without address, at `host` and the first of `ports`."""
    process = Group(openai_argv(command, host, ports), env=os.environ, cwd=log.parent, log=log)
    return OpenAiServer(process=process, ports=ports, output=log, name=Path(command[0]).name, host=reached_at(host))
