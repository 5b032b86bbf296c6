"""Worlds of ranks under a real mpirun: stand-in ranks on any machine, and the real Triton as every rank."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers import needed
from tests.helpers.launched import LaunchStage, responds
from tests.helpers.mpi_worlds import Stage, seen_over
from tests.helpers.waiting import eventually
from trtllm_pipeline.base.errors import FailureClass, ServerError
from trtllm_pipeline.base.machine import triton_installation
from trtllm_pipeline.base.processes.process import Exited, Group, Guardian, ProcessEvent
from trtllm_pipeline.tensorrt.servers import mpi_server, triton_server

PROGRAM = """
import json, sys
from pathlib import Path
from trtllm_pipeline.base.errors import PipelineError
from trtllm_pipeline.base.machine.model import Gpu, Machine, TensorRTLLM
from trtllm_pipeline.tensorrt.stage.launch import ranks, serve
from trtllm_pipeline.tensorrt.stage.base import StageContext
from trtllm_pipeline.tensorrt.stage.params import LaunchFrontend, load
repository, engine, attempt = map(Path, sys.argv[1:4])
gpus = tuple(Gpu(index, f"GPU-{index}", "stand-in", 1 << 30, 90) for index in range(2))
machine = Machine(2, "cpu", gpus, tensorrt_llm=TensorRTLLM("0.16.0"))
try:
    context = StageContext(load(LaunchFrontend, json.loads(sys.argv[4]), {"restarts": 0}), {"repository": repository, "engine": engine}, {}, attempt, attempt)
    serve(context, ranks(context, machine))
except PipelineError as error:
    print(f"{type(error).__name__} {getattr(error, 'failure', '')}: {error} ({error.hint})")
    sys.exit(1)
"""


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


@pytest.mark.parametrize(("world_size", "release"), [(1, "0.16.0"), (1, "1.2.0"), (2, "0.8.0"), (4, "1.2.0")])
def test_a_world_is_ready_and_ends(stage: Stage, world_size: int, release: str) -> None:
    with stage.world(world_size, release=release) as world:
        said = world.service()
        assert said["kind"] == "triton"
        assert (said["model"], said["bls_model"]) == ("ensemble", "tensorrt_llm_bls")
        assert said["ranks"] == [stage.report(rank)["pid"] for rank in range(world_size)]
        assert said["pid"] == stage.report(0)["pid"]
        assert httpx.get(f"http://{said['http']}/v2/health/ready", timeout=60).is_success
        for rank in range(world_size):
            told = stage.report(rank)
            assert told["size"] == world_size
            assert set(told["cpus"]) == os.sched_getaffinity(0), "mpirun has bound it to a core"
            assert f"shm-region-prefix-name={world.prefix}{rank}_" in " ".join(told["argv"])
            assert "complains" in world.rank_log(rank).read_text()
        assert len(list(triton_server.SHARED_MEMORY.glob(f"{world.prefix}*"))) == world_size
        assert world.process.mpirun == (world_size > 1 or (release == "0.16.0" and shutil.which("mpirun") is not None))


def test_a_world_starts_from_a_pasted_command(stage: Stage) -> None:
    mpirun = needed.program("mpirun")
    ports = triton_server.free_ports()
    pasted = mpi_server.pasted_command(
        stage.installed, stage.repository, 2, mpirun=mpirun, ports=ports, host="127.0.0.1"
    )
    shell = subprocess.Popen(["bash", "-c", pasted.to_shell()], start_new_session=True)
    try:
        ready = f"http://127.0.0.1:{ports.http}/v2/health/ready"
        assert eventually(lambda: shell.poll() is not None or responds(ready))
        assert [stage.report(rank)["size"] for rank in range(2)] == [2, 2]
    finally:
        os.killpg(shell.pid, signal.SIGINT)
        shell.wait(60)


def test_the_ranks_are_one_mpi_world(stage: Stage) -> None:
    stage.order("mpi")
    with stage.world(3):
        assert [stage.report(rank)["mpi"] for rank in range(3)] == [[0, 3], [1, 3], [2, 3]]


def test_two_worlds_side_by_side(stage: Stage) -> None:
    with stage.world(2, name="a") as one, stage.world(2, name="b") as other:
        assert not set(one.ports) & set(other.ports)
        assert one.prefix != other.prefix
        one.stop(3.0)
        assert other.process.poll() is None
        assert other.ready()


@pytest.mark.parametrize(
    ("order", "value", "words", "failure"),
    [
        ("exit.1", 3, "rank 1 of 2 ended with exit status 3", FailureClass.BUG),
        ("exit.0", 7, "rank 0 of 2 ended with exit status 7", FailureClass.BUG),
        ("exit.1", 0, "rank 1 of 2 ended", FailureClass.BUG),  # mpirun itself would wait for the others for ever
        ("signal.1", signal.SIGKILL, "rank 1 of 2 was ended by signal SIGKILL", FailureClass.BUG),
        ("abort.1", 5, "rank 1 of 2 ended with exit status 5", FailureClass.BUG),
    ],
)
def test_a_dead_rank_is_seen_at_once_with_its_log(
    stage: Stage, order: str, value: int, words: str, failure: FailureClass
) -> None:
    if order.startswith("abort"):
        stage.order("mpi")
    with stage.world(2) as world:
        stage.order(order, value)
        error = seen_over(world)
    assert error.failure is failure
    if order.startswith("abort") and any(words in error.message for words in ("ORTE_ERROR_LOG", "[warn] Epoll")):
        # Now and then Open MPI 4, or libevent in it, loses its own words about which rank aborted; its exit status is left.
        assert error.message.startswith("mpirun ended with exit status 5")
        return
    assert error.message.startswith(words)
    assert f"rank {order[-1]} was told: {order[:-2]} {value}" in error.message


def test_a_rank_that_dies_before_the_world_is_ready(stage: Stage) -> None:
    stage.order("never")
    stage.order("exit.1", 9)
    world = stage.start(2)
    try:
        with pytest.raises(ServerError, match="rank 1 of 2 ended with exit status 9") as error:
            world.wait_ready(180)
    finally:
        world.stop(1.0)
    assert "rank 1 was told: exit 9" in error.value.message
    assert stage.left(world.prefix) == []


def test_a_world_that_never_gets_ready(stage: Stage) -> None:
    stage.order("never")
    world = stage.start(2)
    try:
        with pytest.raises(ServerError, match="not ready after 10 s") as error:
            world.wait_ready(10)
    finally:
        world.stop(2.0)
    assert error.value.failure is FailureClass.TIMEOUT
    assert "rank 0 complains" in error.value.message
    assert stage.left(world.prefix) == []


def test_ranks_that_are_deaf_are_stopped(stage: Stage) -> None:
    stage.order("deaf")
    with stage.world(2) as world:
        world.stop(2.0)
        assert stage.left(world.prefix) == []


def test_a_killed_mpirun_takes_its_ranks_with_it(stage: Stage) -> None:
    stage.order("deaf")
    with stage.world(2) as world:
        os.kill(world.process.pid, signal.SIGKILL)
        assert eventually(lambda: world.process.poll() is not None)
        assert "mpirun was ended by signal SIGKILL" in world.died().message
        assert eventually(lambda: not any("stand_in" in line for line in stage.left()))


def test_a_port_lost_between_test_and_start_is_passing(stage: Stage) -> None:
    ports = triton_server.free_ports()
    with socket.socket() as other:
        other.bind((triton_server.LOOPBACK, ports.grpc))
        other.listen()
        world = stage.start(2, ports=ports)
        try:
            with pytest.raises(ServerError, match="rank 0 of 2 ended with exit status 1") as error:
                world.wait_ready(180)
        finally:
            world.stop(1.0)
    assert error.value.failure is FailureClass.TRANSIENT


def test_mpirun_needs_no_ssh(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    for found in (needed.program("mpirun"), shutil.which("sh")):
        assert found
        (stage.folder / "bin" / Path(found).name).symlink_to(Path(found).resolve())
    monkeypatch.setenv("PATH", str(stage.folder / "bin"))
    monkeypatch.setattr(sys, "executable", str(stage.folder / "bin" / "python"))  # whose directory is put on PATH
    (stage.folder / "bin" / "python").symlink_to(Path(os.path.realpath("/proc/self/exe")))
    with stage.world(2) as world:
        assert world.ready()


def test_an_mpirun_of_any_name_and_place_will_do(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = stage.folder / "launcher"
    launcher.symlink_to(needed.program("mpirun"))
    monkeypatch.setattr(shutil, "which", lambda name: name if name == str(launcher) else None)
    with stage.world(2, mpirun=str(launcher)) as world:
        assert world.process.mpirun
        assert world.service()["ranks"] == [stage.report(rank)["pid"] for rank in range(2)]


def test_a_program_that_mpirun_cannot_start(stage: Stage) -> None:
    (stage.folder / "bin" / "tritonserver").chmod(0o644)
    world = stage.start(2)
    try:
        with pytest.raises(ServerError, match="mpirun ended with exit status"):
            world.wait_ready(180)
    finally:
        world.stop(1.0)


@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "PMIX_RANK"])
def test_mpirun_is_never_nested(stage: Stage, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ServerError, match=f"inside a parallel job \\({variable} is set\\)") as error:
        stage.start(2)
    assert "srun --mpi=pmix" in str(error.value.hint)


def test_a_world_whose_guardian_is_killed_ends_with_words(stage: Stage) -> None:
    stage.order("deaf")
    with stage.world(2) as world:
        os.kill(world.process._guardian.pid, signal.SIGKILL)
        with pytest.raises(ServerError, match=r"that supervises the server .pid .*was killed; all processes below"):
            eventually(lambda: world.process.poll() is not None)
        assert not stage.left()
        assert world.process.poll() == -signal.SIGKILL


def test_a_group_that_ends_at_once_is_not_missed(tmp_path: Path) -> None:
    for _ in range(20):
        group = Group(["sh", "-c", "exit 3"], env=os.environ, cwd=tmp_path, log=tmp_path / "log")
        assert group.wait(60) == 3
        assert group.stop(1.0) == 3


def test_a_group_passes_on_the_claims_it_was_given(tmp_path: Path) -> None:
    with (tmp_path / "claim").open("w") as claim:
        os.set_inheritable(claim.fileno(), True)
        group = Group(["sh", "-c", "ls -l /proc/self/fd"], env=os.environ, cwd=tmp_path, log=tmp_path / "log")
        assert group.wait(60) == 0
        group.stop(1.0)
    assert str(tmp_path / "claim") in (tmp_path / "log").read_text()


def make_engine(folder: Path, rank_files: int) -> Path:
    """An engine of two ranks, with as many files."""
    needed.program("mpirun")
    folder.mkdir()
    mapping = {"world_size": 2, "tp_size": 2, "pp_size": 1}
    config = {"version": "0.16.0", "pretrained_config": {"mapping": mapping}}
    (folder / "config.json").write_text(json.dumps(config))
    for rank in range(rank_files):
        (folder / f"rank{rank}.engine").write_bytes(b"engine")
    return folder


class Launched(LaunchStage):
    """For an engine of two ranks."""

    def __init__(self, stage: Stage, *, rank_files: int = 2, **params: object) -> None:
        attempt, engine = stage.folder / "attempt", make_engine(stage.folder / "engine", rank_files)
        super().__init__(attempt, PROGRAM, str(stage.repository), str(engine), str(attempt), json.dumps(params))


@pytest.fixture
def launched(stage: Stage) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def start(**params: Any) -> Launched:
        started.append(Launched(stage, **params))
        return started[-1]

    yield start
    for each in started:
        each.process.terminate()
        each.process.wait(60)
    assert eventually(lambda: not stage.left())


def test_the_stage_says_where_it_is_and_ends_when_told(stage: Stage, launched: Callable[..., Launched]) -> None:
    service = launched()
    said = service.ready()
    assert said["server"] == {"name": "stand-in", "version": "1"}
    assert "rank 0 complains" in (service.attempt / said["log"]).read_text()
    service.process.terminate()
    assert service.process.wait(60) == 0
    assert not (service.attempt / "service.json").exists()
    assert stage.left(f"trtllm-pipeline-{os.stat('/proc/self/ns/pid').st_ino}-{service.process.pid}-") == []


def test_nothing_is_left_when_the_stage_is_killed(stage: Stage, launched: Callable[..., Launched]) -> None:
    stage.order("deaf")
    service = launched()
    service.ready()
    service.process.kill()
    service.process.wait()
    assert eventually(lambda: not stage.left()), stage.left()
    triton_server.remove_stale_leftovers()  # as the next server does; a rank that mpirun kills cannot do it itself
    prefix = f"trtllm-pipeline-{os.stat('/proc/self/ns/pid').st_ino}-{service.process.pid}-"
    assert stage.left(prefix) == []


def test_a_world_is_started_again_on_its_ports(stage: Stage, launched: Callable[..., Launched]) -> None:
    service = launched(restarts=1)
    before = service.ready()
    os.kill(before["ranks"][1], signal.SIGKILL)
    assert eventually(lambda: service.ready()["pid"] != before["pid"])
    assert service.ready()["http"] == before["http"]


def test_the_contract_is_looked_at_first(stage: Stage, launched: Callable[..., Launched]) -> None:
    service = launched(rank_files=1)
    assert service.process.wait(60) == 1
    assert "FailureClass.USER" in service.log()
    assert "rank files: the engine needs one file for each of 2 ranks, found rank0.engine" in service.log()
    assert not list(stage.orders.iterdir()), "a rank was started"


def test_a_guardian_reports_a_killed_stage_when_its_ranks_are_gone(stage: Stage) -> None:
    stage.order("deaf")
    engine = make_engine(stage.folder / "engine", rank_files=2)
    attempt = stage.folder / "attempt"
    attempt.mkdir()
    argv = [sys.executable, "-c", PROGRAM, str(stage.repository), str(engine), str(attempt), "{}"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with Guardian() as guardian:
        guardian.spawn("launch", argv, env=env, cwd=attempt, log=attempt / "log")
        assert eventually((attempt / "service.json").exists)
        guardian.signal("launch", signal.SIGKILL)
        events: list[ProcessEvent] = []
        assert eventually(lambda: events.extend(guardian.read_events()) or any(map(is_exit, events)))
        assert not any("stand_in" in line or "mpirun" in line for line in stage.left())
    assert stage.left() == []


def is_exit(event: ProcessEvent) -> bool:
    return isinstance(event, Exited)


TRITON_MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("text_output", each.as_numpy())])
                for each in (pb_utils.get_input_tensor_by_name(request, "text_input") for request in requests)]
"""


def real_repository(folder: Path) -> Path:
    """An engine model that says what it is told, and an ensemble of it alone."""
    tensors = """
input [{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }]
output [{ name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }]
max_batch_size: 4
"""
    (folder / "tensorrt_llm" / "1").mkdir(parents=True)
    (folder / "tensorrt_llm" / "1" / "model.py").write_text(TRITON_MODEL)
    (folder / "tensorrt_llm" / "config.pbtxt").write_text(
        f'name: "tensorrt_llm"\nbackend: "python"\ninstance_group [{{ kind: KIND_CPU count: 1 }}]\n{tensors}'
    )
    (folder / "ensemble" / "1").mkdir(parents=True)
    (folder / "ensemble" / "config.pbtxt").write_text(
        f'name: "ensemble"\nplatform: "ensemble"\n{tensors}\nensemble_scheduling {{ step [{{ model_name: "tensorrt_llm" '
        'model_version: -1 input_map { key: "text_input" value: "text_input" } '
        'output_map { key: "text_output" value: "text_output" } }] }\n'
    )
    return folder


def made_for(prefix: str) -> list[Path]:
    return [path for path in triton_server.TEMPORARY.glob("python_env_*/trtllm-pipeline") if path.read_text() == prefix]


def test_the_real_triton_as_every_rank(tmp_path: Path) -> None:
    if triton_installation.importlib.util.find_spec("pytriton") is None:
        pytest.skip("needs the embedded extra")
    installed = triton_installation.find()
    repository = real_repository(tmp_path / "repository")
    world = mpi_server.start(
        installed,
        repository,
        2,
        mpirun=needed.program("mpirun"),
        log=tmp_path / "server.log",
        ports=triton_server.free_ports(),
    )
    try:
        world.wait_ready(180)
        said = world.service()
        assert said["server"] == {"name": "triton", "version": "2.51.0"}
        assert said["bls_model"] is None
        answer = httpx.post(
            f"http://{said['http']}/v2/models/ensemble/generate", json={"text_input": "hello"}, timeout=60
        )
        assert answer.json()["text_output"] == "hello"
        for closed in ("logging", "trace/setting", "systemsharedmemory/status"):
            assert httpx.get(f"http://{said['http']}/v2/{closed}", timeout=60).status_code == 403
        assert httpx.post(f"http://{said['http']}/v2/repository/models/ensemble/load", timeout=60).status_code == 403
        files = list(triton_server.SHARED_MEMORY.glob(f"{world.prefix}*"))
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
        assert len(made_for(world.prefix)) == 2
        loaded = [set(dict(triton_server.stub_processes(pid)).values()) for pid, _ in world.process.ranks.values()]
        assert loaded == [{"tensorrt_llm"}] * 2
        stub = next(pid for pid, _ in triton_server.stub_processes(world.process.ranks[0][0]))
        os.kill(stub, signal.SIGKILL)
        dead: list[set[str]] = []
        assert eventually(lambda: any(dead) or bool(dead.append(world.dead_models())))
        assert dead[-1] == {"tensorrt_llm"}
    finally:
        world.stop(6.0)
    assert not list(triton_server.SHARED_MEMORY.glob(f"{world.prefix}*"))
    assert not made_for(world.prefix)
    assert not any(Path(f"/proc/{pid}").exists() for pid, _ in world.process.ranks.values())
