"""A process that is an OpenAI-compatible server: `trtllm-serve`, which starts the workers on its other GPUs itself, or
Triton's own OpenAI front end, which includes Triton.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trtllm_pipeline.base import Group, ServerError, without_secrets
from trtllm_pipeline.measure import ProtocolError
from trtllm_pipeline.models import model_names
from trtllm_pipeline.tensorrt.servers.command_lines import LOOPBACK, TRTLLM_SERVE, OpenAiWays, Ports, openai_argv
from trtllm_pipeline.tensorrt.servers.server_process import Server, StoppableProcess
from trtllm_pipeline.tensorrt.servers.triton_server import reached_at


@dataclass(kw_only=True)
class OpenAiServer(Server):
    """A running server. Its workers have separate sessions, but end with it all the same."""

    process: StoppableProcess
    ways: OpenAiWays = TRTLLM_SERVE
    names_port: int | None = None
    """Port of the server that reports the model's name. None for its own."""

    def ready_paths(self) -> tuple[str, ...]:
        """It is healthy only if its workers are."""
        return (self.ways.ready,)

    def service(self) -> dict[str, object]:
        """The information for clients. Raises ServerError if it serves no model."""
        try:
            models = json.loads(self.request("GET", "/v1/models", port=self.names_port)[1])["data"]
            names = [str(each["id"]) for each in models]
            model = (
                model_names.ENSEMBLE if model_names.ENSEMBLE in names else names[0]
            )  # Triton's lists every model of the repository
        except (OSError, ProtocolError, ValueError, LookupError, TypeError) as error:
            raise ServerError(f"{self.name} does not report which model it serves: {error!r}", log=self.log) from error
        address = f"{self.host}:{self.ports.http}"
        return {
            "kind": "openai",
            "pid": self.process.pid,
            "http": address,
            "grpc": "",
            "metrics": address if self.ways.metrics else None,
            "url": f"http://{address}",
            "model": model,
            "bls_model": None,
            "server": {"name": self.name, "version": self._version()},
        }

    def _version(self) -> str | None:
        try:
            status, answer = self.request("GET", "/version")
            return str(json.loads(answer)["version"]) if status == 200 else None
        except (OSError, ProtocolError, ValueError, LookupError, TypeError):
            return None

    def stop(self, timeout_s: float) -> int | None:
        return self.process.stop(timeout_s)


def start(
    command: Sequence[str], *, log: Path, ports: Ports, host: str = LOOPBACK, ways: OpenAiWays = TRTLLM_SERVE
) -> OpenAiServer:
    """Start `command`, an OpenAI server's command line without address, at `host` and the first of `ports`."""
    process = Group(openai_argv(command, host, ports, ways), env=without_secrets(os.environ), cwd=log.parent, log=log)
    name = ways.name or Path(command[0]).name
    return OpenAiServer(process=process, ports=ports, output=log, name=name, host=reached_at(host), ways=ways)
