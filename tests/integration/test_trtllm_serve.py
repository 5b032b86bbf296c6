"""The launch stage around a stand-in for `trtllm-serve`: from its first second to its last."""

from __future__ import annotations

import json
import socket
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.helpers.launched import LaunchStage, still_running
from tests.helpers.waiting import eventually
from trtllm_pipeline.base.errors import FailureClass, ServerError
from trtllm_pipeline.measure.client.service import Service
from trtllm_pipeline.tensorrt.servers import triton_server, trtllm_serve

STAND_IN = [sys.executable, str(Path(__file__).resolve().parents[1] / "standins" / "serve.py"), "Qwen/Qwen3-8B"]
PROGRAM = """
import json, sys
from pathlib import Path
from trtllm_pipeline.base.errors import PipelineError
from trtllm_pipeline.tensorrt.stage.launch import openai, serve
from trtllm_pipeline.tensorrt.stage.base import StageContext
from trtllm_pipeline.tensorrt.stage.params import LaunchFrontend, load
attempt = Path(sys.argv[1])
try:
    context = StageContext(load(LaunchFrontend, json.loads(sys.argv[2]), {"restarts": 0}), {"repository": attempt}, {}, attempt, attempt)
    serve(context, openai(context, json.loads(sys.argv[3])))
except PipelineError as error:
    print(f"{type(error).__name__} {getattr(error, 'failure', '')}: {error} ({error.hint})")
    sys.exit(1)
"""


class Launched(LaunchStage):
    def __init__(self, folder: Path, *options: str, **params: object) -> None:
        self.die = folder / "die"
        self.marker = f"TEST_MARKER_{uuid.uuid4().hex}"
        attempt, command = folder / "attempt", [*STAND_IN, "--die", str(self.die), *options]
        words = (str(attempt), json.dumps(params), json.dumps(command))
        super().__init__(attempt, PROGRAM, *words, **{self.marker: "1"})

    def left(self) -> list[str]:
        """Processes that were started from here and still run."""
        return still_running(self.marker)


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def start(*options: str, **params: object) -> Launched:
        started.append(Launched(tmp_path, *options, **params))
        return started[-1]

    yield start
    for each in started:
        each.process.terminate()
        each.process.wait(60)
        assert eventually(lambda: not each.left()), each.left()  # noqa: B023


@pytest.mark.seam
def test_it_says_where_it_is_and_ends_when_told(launched: Callable[..., Launched]) -> None:
    service = launched("--workers", "2")
    said = service.ready()
    assert said["kind"] == "openai"
    assert said["model"] == "Qwen/Qwen3-8B"
    assert said["server"]["version"] == "1.2.0"
    assert said["url"] == f"http://{said['http']}"
    assert said["http"].startswith("127.0.0.1:")
    assert httpx.get(f"{said['url']}/health", timeout=60).is_success
    assert "serving Qwen" in (service.attempt / said["log"]).read_text()
    assert Service.read(service.attempt / "service.json").model == "Qwen/Qwen3-8B"
    assert sum("time.sleep(300)" in line for line in service.left()) == 2
    service.process.terminate()
    assert service.process.wait(60) == 0
    assert not (service.attempt / "service.json").exists()
    assert not service.left()


@pytest.mark.seam
def test_a_dead_server_ends_the_stage_with_its_log(launched: Callable[..., Launched]) -> None:
    service = launched("--workers", "1", restarts=0)
    service.ready()
    service.die.write_text("3")
    assert service.process.wait(60) == 1
    assert "ended with exit status 3" in service.log()
    assert "    told to die" in service.log()


@pytest.mark.seam
def test_one_that_is_never_healthy(launched: Callable[..., Launched]) -> None:
    service = launched("--never", ready_timeout_s=6.0, stop_timeout_s=1.0)
    assert service.process.wait(60) == 1
    assert "FailureClass.TIMEOUT" in service.log()
    assert "was not ready after 6 s" in service.log()
    assert ":\n    serving Qwen" in service.log()


def test_a_port_lost_between_test_and_start_is_passing(tmp_path: Path) -> None:
    ports = triton_server.free_ports()
    with socket.socket() as other:
        other.bind((triton_server.LOOPBACK, ports.http))
        other.listen()
        server = trtllm_serve.start(STAND_IN, log=tmp_path / "server.log", ports=ports)
        try:
            with pytest.raises(ServerError, match="ended with exit status 1") as error:
                server.wait_ready(180)
        finally:
            server.stop(1.0)
    assert error.value.failure is FailureClass.TRANSIENT


@pytest.mark.seam
def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="cannot start the server: cannot run") as error:
        trtllm_serve.start(["trtllm-serve-nowhere", "m"], log=tmp_path / "log", ports=triton_server.free_ports())
    assert error.value.failure is FailureClass.USER
