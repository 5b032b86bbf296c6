"""The launch stage: a server from its first second to its last, and everything that kills it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.helpers.embedded_engines import script_engine
from tests.helpers.launched import LaunchStage, responds
from tests.helpers.triton_client import Client, Stream
from tests.helpers.waiting import eventually
from trtllm_pipeline.base.errors import FailureClass, ServerError
from trtllm_pipeline.base.machine import triton_installation
from trtllm_pipeline.base.processes.guardian import proc_file, process_table
from trtllm_pipeline.measure.client import recognise
from trtllm_pipeline.measure.client import triton as asking
from trtllm_pipeline.tensorrt.embedded import repository
from trtllm_pipeline.tensorrt.embedded.params import RepositoryEmbedded
from trtllm_pipeline.tensorrt.embedded.runtime import Limits
from trtllm_pipeline.tensorrt.servers import triton_server

PROGRAM = """
import json, sys
from pathlib import Path
from trtllm_pipeline.base.errors import PipelineError
from trtllm_pipeline.tensorrt.stage.launch import run
from trtllm_pipeline.tensorrt.stage.base import StageContext
from trtllm_pipeline.tensorrt.stage.params import LaunchEmbedded, load
repository, attempt = map(Path, sys.argv[1:3])
try:
    run(StageContext(load(LaunchEmbedded, json.loads(sys.argv[3]), {"restarts": 0}), {"repository": repository}, {}, attempt / "out", attempt))
except PipelineError as error:
    print(f"{type(error).__name__} {getattr(error, 'failure', '')}: {error} ({error.hint})")
    sys.exit(1)
"""


class Service(LaunchStage):
    def __init__(self, models: Path, attempt: Path, **params: object) -> None:
        super().__init__(attempt, PROGRAM, str(models), str(attempt), json.dumps(params))

    def client(self) -> Client:
        service = self.ready()
        ports = triton_server.Ports(*(int(str(service[name]).split(":")[1]) for name in triton_server.Ports._fields))
        models = ("ensemble", "tensorrt_llm_bls")
        return Client(
            triton_server.TritonProcess(
                process=self.process, ports=ports, output=self.attempt / "log", prefix="", models=models, loaded=models
            )
        )

    def end(self) -> tuple[int, str]:
        status = self.process.wait(180)
        return status, self.log()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    engine = script_engine(folder / "engine")
    (folder / "repository").mkdir()
    repository.write(
        folder / "repository", engine, engine, RepositoryEmbedded(max_batch_size=Limits.read(engine).max_batch_size)
    )
    return folder / "repository"


@contextmanager
def launched(models: Path, attempt: Path, **params: object) -> Iterator[Service]:
    service = Service(models, attempt, **params)
    try:
        yield service
    finally:
        if service.process.poll() is None:
            service.process.terminate()
            try:
                service.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(service.process.pid, signal.SIGKILL)


def alive(session: int) -> list[str]:
    """Command lines of the processes in a session."""
    return [
        proc_file(pid, "cmdline").replace(b"\0", b" ").decode()
        for pid, each in process_table().items()
        if each.session == session
    ]


def gone(session: int) -> bool:
    return eventually(lambda: not alive(session))


def shared_memory(pid: int) -> list[str]:
    """What servers that `pid` has started have in shared memory, and in the system's temporary directory."""
    marks = {path: path.read_text() for path in triton_server.TEMPORARY.glob("python_env_*/trtllm-pipeline")}
    folders = [str(path.parent) for path, prefix in marks.items() if f"-{pid}-" in prefix]
    return [*folders, *(name for name in os.listdir(triton_server.SHARED_MEMORY) if f"-{pid}-" in name)]


def listening_on(port: int) -> set[str]:
    """The addresses something listens on at this port, as the kernel writes them."""
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port}


@pytest.mark.seam
def test_a_service_says_where_it_is_and_ends_when_told(models: Path, tmp_path: Path) -> None:
    with launched(models, tmp_path / "attempt") as service:
        said = service.ready()
        assert said["schema"] == 1
        assert said["model"] == "ensemble"
        assert said["bls_model"] == "tensorrt_llm_bls"
        assert said["server"] == {"name": "triton", "version": "2.51.0"}
        assert service.client().text(text_input="s", max_tokens=4) == "top-"
        for name in triton_server.Ports._fields:
            host, port = str(said[name]).split(":")
            assert host == "127.0.0.1"
            assert listening_on(int(port)) in ({"0100007F"}, {"0000000000000000FFFF00000100007F"})
            assert asyncio.run(recognise.kind_of(str(said[name]))) == name
        folder, *regions = shared_memory(service.process.pid)
        assert len(regions) == 4
        service.process.terminate()
        assert service.end()[0] == 0
        assert not Path(folder).exists()
        assert not (service.attempt / "service.json").exists()
        assert gone(service.process.pid)
        assert not shared_memory(service.process.pid)


def test_a_printed_command_starts_the_server_and_leaves_the_repository_as_it_is(models: Path, tmp_path: Path) -> None:
    before = sorted(models.rglob("*"))
    launch = (sys.executable, "-m", "trtllm_pipeline", "stage", "launch", "--toolchain", "embedded")
    ports = [
        word for name, port in triton_server.free_ports()._asdict().items() for word in (f"--{name}-port", str(port))
    ]
    words = (*launch, "--repository", str(models), *ports, "--print", "--format", "json")
    printed = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
    with (tmp_path / "log").open("wb") as log:
        shell = subprocess.Popen(
            ["bash"], stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    assert shell.stdin is not None
    shell.stdin.write(printed["shell"].encode() + b"\n")
    shell.stdin.flush()  # the shell stays open, like a terminal
    url = f"http://127.0.0.1:{printed['ports']['http']}/v2/models/ensemble"
    try:
        assert eventually(lambda: shell.poll() is not None or responds(f"{url}/ready")), (tmp_path / "log").read_text()
        body = {"text_input": "abc", "max_tokens": 3, "bad_words": "", "stop_words": ""}
        assert httpx.post(f"{url}/generate", json=body, timeout=60).json()["text_output"]
    finally:
        os.killpg(shell.pid, signal.SIGINT)
        shell.stdin.close()
        shell.wait(60)
    assert gone(shell.pid)
    assert sorted(models.rglob("*")) == before


def test_an_open_stream_does_not_keep_it_from_ending(models: Path, tmp_path: Path) -> None:
    with launched(models, tmp_path / "attempt") as service:
        client = service.client()
        stream = Stream(client.grpc_url)
        stream.send("ensemble", "1", text_input="A", max_tokens=500, stream=True)
        stream.receive()
        service.process.terminate()
        assert service.end()[0] == 0
        assert gone(service.process.pid)
        assert not shared_memory(service.process.pid)
        stream.close(cancel=True)


def test_a_dead_model_process_is_brought_back(models: Path, tmp_path: Path) -> None:
    with launched(models, tmp_path / "attempt") as service:
        client = service.client()
        server = int(str(service.ready()["pid"]))
        victim = next(pid for pid, model in triton_server.stub_processes(server) if model == "tensorrt_llm")
        os.kill(victim, signal.SIGKILL)
        assert eventually(lambda: service.log().count("ready: ") >= 2), service.log()
        assert client.text(text_input="s", max_tokens=4) == "top-"
        assert client.text("tensorrt_llm_bls", text_input="s", max_tokens=4) == "top-"
        service.process.terminate()
        assert service.end()[0] == 0
        assert gone(service.process.pid)


def test_a_model_process_killed_while_the_server_loads_is_named_at_once(models: Path, tmp_path: Path) -> None:
    with launched(models, tmp_path / "attempt", ready_timeout_s=60) as service:
        victims: list[int] = []

        def found() -> bool:
            victims[:] = [pid for pid, model in stubs_of(service.process.pid) if model == "tensorrt_llm"]
            return bool(victims)

        assert eventually(found), service.log()
        os.kill(victims[0], signal.SIGSTOP)  # so that it continues loading until the launcher has seen it
        slept = naps(service.process.pid)
        assert eventually(lambda: naps(service.process.pid) > slept + 100)  # it looks between two naps
        os.kill(victims[0], signal.SIGKILL)
        status, log = service.end()
    assert status == 1
    assert "Triton was loading when the process of model tensorrt_llm was ended by signal SIGKILL" in log
    assert "FailureClass.BUG" in log
    assert "the kernel did not kill it" in log or "the kernel has no counter" in log
    assert gone(service.process.pid)
    assert not shared_memory(service.process.pid)


def naps(pid: int) -> int:
    """How often a process has given up the processor to wait for something."""
    (line,) = (each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("voluntary"))
    return int(line.split()[1])


def stubs_of(launcher: int) -> list[tuple[int, str]]:
    """Process ids and models of the Python model processes of the server that `launcher` started."""
    servers = [pid for pid, each in process_table().items() if each.parent == launcher]
    return [found for server in servers for found in triton_server.stub_processes(server)]


@pytest.mark.seam
def test_a_server_that_dies_is_reported(models: Path, tmp_path: Path) -> None:
    with launched(models, tmp_path / "attempt") as service:
        os.kill(int(str(service.ready()["pid"])), signal.SIGSEGV)
        status, log = service.end()
        assert status == 1
        assert "Triton was ended by signal SIGSEGV" in log or "Triton ended with exit status" in log
        assert "Started Metrics Service" in log, "the tail of the server's log is shown"
        assert gone(service.process.pid)
        assert not shared_memory(service.process.pid)


def test_a_server_that_dies_is_started_again_where_it_was(models: Path, tmp_path: Path) -> None:
    with launched(models, tmp_path / "attempt", restarts=1) as service:
        first = service.ready()
        os.kill(int(str(first["pid"])), signal.SIGSEGV)
        assert eventually(lambda: service.log().count("ready: ") >= 2), service.log()
        second = service.ready()
        assert {**second, "pid": 0} == {**first, "pid": 0}
        assert second["pid"] != first["pid"]
        assert service.client().text(text_input="s", max_tokens=4) == "top-"
        os.kill(int(str(second["pid"])), signal.SIGSEGV)
        assert service.end()[0] == 1
        assert gone(service.process.pid)
        assert not shared_memory(service.process.pid)


def test_a_stage_waits_for_a_server_that_is_started_again(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "RELOAD_PATIENCE_S", 200.0)

    async def ask(path: Path) -> str | None:
        async with asking.Client(asking.Service.read(path), "ensemble", "grpc", timeout_s=200) as client:
            return (await client.session().generate(asking.GenerationRequest("s", 4))).error

    with launched(models, tmp_path / "attempt") as service:
        server = int(str(service.ready()["pid"]))
        os.kill(
            next(pid for pid, model in triton_server.stub_processes(server) if model == "tensorrt_llm"), signal.SIGKILL
        )
        # Until then, it may answer over gRPC while it unloads its models.
        assert eventually(lambda: not Path(f"/proc/{server}").exists()), service.log()
        assert asyncio.run(ask(service.attempt / "service.json")) is None


def test_nothing_outlives_a_killed_launcher(models: Path, tmp_path: Path) -> None:
    with launched(models, tmp_path / "attempt") as service:
        service.ready()
        left = shared_memory(service.process.pid)
        service.process.kill()
        service.process.wait()
        assert gone(service.process.pid), alive(service.process.pid)
        killed = service.process.pid
    with launched(models, tmp_path / "next") as service:
        service.ready()  # clears what the killed one left
        assert len(left) == 5
        assert not Path(left[0]).exists()
        assert not shared_memory(killed)
        stale = [name for name in os.listdir(triton_server.SHARED_MEMORY) if name.startswith("trtllm-pipeline-")]
        assert all(f"-{service.process.pid}-" in name or Path(f"/proc/{name.split('-')[3]}").exists() for name in stale)


def test_it_ends_with_the_process_that_started_it(models: Path, tmp_path: Path) -> None:
    attempt = tmp_path / "attempt"
    attempt.mkdir()
    starter = subprocess.Popen(
        ["sh", "-c", '"$@" & echo $!; wait', "sh", sys.executable, "-c", PROGRAM, str(models), str(attempt), "{}"],
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert starter.stdout is not None
    launcher = int(starter.stdout.readline())
    assert eventually((attempt / "service.json").exists)
    starter.kill()
    starter.wait()
    assert gone(starter.pid), alive(starter.pid)
    assert not shared_memory(launcher)


@pytest.mark.seam
def test_a_taken_port_is_transient_and_named(models: Path, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind((triton_server.LOOPBACK, 0))
        other.listen()
        port = other.getsockname()[1]
        with launched(models, tmp_path / "attempt", http_port=port) as service:
            status, log = service.end()
    assert status == 1
    assert f"ServerError FailureClass.TRANSIENT: port {port} of 127.0.0.1 is used" in log


def test_a_port_lost_between_test_and_start_is_passing(models: Path, tmp_path: Path) -> None:
    ports = triton_server.free_ports()
    with socket.socket() as other:
        other.bind((triton_server.LOOPBACK, ports.grpc))
        other.listen()
        server = triton_server.start(
            triton_installation.find(), models, ("ensemble",), folder=tmp_path / "b", log=tmp_path / "log", ports=ports
        )
        try:
            with pytest.raises(ServerError) as error:
                server.wait_ready(180)
        finally:
            server.stop()
    assert error.value.failure is FailureClass.TRANSIENT


def test_a_model_that_cannot_be_loaded_is_reported_in_its_own_words(tmp_path: Path) -> None:
    engine = script_engine(tmp_path / "engine")
    (tmp_path / "repository").mkdir()
    repository.write(
        tmp_path / "repository", engine, engine, RepositoryEmbedded(max_batch_size=Limits.read(engine).max_batch_size)
    )
    (engine / "model.gguf").write_bytes(b"GGUF, but not really")
    with launched(tmp_path / "repository", tmp_path / "attempt") as service:
        status, log = service.end()
    assert status == 1
    assert "Triton could not load the model tensorrt_llm" in log
    assert "llama.cpp cannot load" in log
    assert gone(service.process.pid)
