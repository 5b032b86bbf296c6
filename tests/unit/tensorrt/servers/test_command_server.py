"""A server that a command line has started: the messages about its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trtllm_pipeline.base.errors import FailureClass
from trtllm_pipeline.tensorrt.others.server import CommandServer
from trtllm_pipeline.tensorrt.servers.command_lines import Ports
from trtllm_pipeline.tensorrt.servers.server_process import ServerProcess
from trtllm_pipeline.tensorrt.servers.trtllm_serve import OpenAiServer
from trtllm_pipeline.tensorrt.stage.params import LaunchOpenAi

PORTS = Ports(8000, 8001, 8002)
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 224.00 MiB.\n"
NO_BLOCKS = "RuntimeError: No free blocks left\n"


class Ended(ServerProcess):
    pid = 1

    def poll(self) -> int | None:
        return 1

    def stop(self, timeout_s: float) -> int | None:
        return 1


@pytest.mark.parametrize("log", [OUT_OF_MEMORY, NO_BLOCKS])
def test_only_servers_of_a_repository_are_changed_by_its_settings(tmp_path: Path, log: str) -> None:
    path = tmp_path / "server.log"
    path.write_text(log)
    common: dict[str, Any] = {"process": Ended(), "ports": PORTS, "output": path}
    mine = CommandServer(**common, name="transformers", params=LaunchOpenAi(command="transformers serve")).died()
    assert (mine.failure, mine.setting) == (FailureClass.OUT_OF_MEMORY, None)
    theirs = OpenAiServer(**common).died()
    assert theirs.setting.startswith("settings.repository.")
