"""The executor of a cluster, on a cluster that only pretends; its nodes' answers are written here."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.jobs import end, job, submit
from tests.helpers.waiting import eventually
from trtllm_pipeline.base.domain import Resources, Scope
from trtllm_pipeline.base.errors import FailureClass, RemoteError, StageError, StateError, UsageError
from trtllm_pipeline.base.files.writing import read_object, write_json
from trtllm_pipeline.base.machine.model import Gpu, Machine, TensorRTLLM, from_json
from trtllm_pipeline.orchestrate.clusters import agent, cluster, exchange
from trtllm_pipeline.orchestrate.clusters.cluster import (
    ClusterExecutor,
    ClusterNode,
    KnownNodes,
    chosen,
    in_common,
    machine_of,
)
from trtllm_pipeline.orchestrate.run.executor import Ended, Job, Ready, Usage, read_job
from trtllm_pipeline.orchestrate.run.scheduler import Capacity, NodeCame, NodeGone
from trtllm_pipeline.orchestrate.store.remote_store import Remote
from trtllm_pipeline.tensorrt.stage import failure

LOST = StageError("lost with its node: gone", failure=FailureClass.LOST)
USAGE = Usage(2.0, 1.0, 1000)


class PretendCluster:
    """Runs nothing. What is put into `ended` has ended."""

    machine = Machine(cpus=4, cpu="of a node")
    nodes = (Capacity(4, downloads=0, node="one"),)

    def __init__(self) -> None:
        self.started: list[Job] = []
        self.ended: dict[str, StageError | None] = {}
        self.cancelled: list[str] = []
        self.leftovers: list[str] = []
        self.changed: list[NodeGone | NodeCame] = []

    def start(self, job: Job, command: Sequence[str]) -> str:
        self.started.append(job)
        return f"ticket {len(self.started)}"

    def over(self, timeout_s: float) -> Mapping[str, StageError | None]:
        ended, self.ended = self.ended, {}
        return ended

    def left(self, attempt: Path) -> str | None:
        return "left" if attempt.name in self.leftovers else None

    def cancel(self, tickets: Sequence[str]) -> None:
        self.cancelled += tickets
        self.ended |= dict.fromkeys(tickets, LOST)

    def changes(self) -> Sequence[NodeGone | NodeCame]:
        changed, self.changed = self.changed, []
        return changed

    def close(self) -> None: ...


@pytest.fixture
def pretend() -> PretendCluster:
    return PretendCluster()


@pytest.fixture
def executor(pretend: PretendCluster) -> Iterator[ClusterExecutor]:
    executor = ClusterExecutor(pretend)
    yield executor
    executor.close()


@pytest.fixture
def through_exchange(pretend: PretendCluster, tmp_path: Path) -> Iterator[ClusterExecutor]:
    (tmp_path / "exchange").mkdir()
    executor = ClusterExecutor(pretend, exchange.Exchange(str(tmp_path / "exchange")))
    yield executor
    executor.close()


def answer(of: Job, *, ready: Sequence[Job] = (), ended: Mapping[str, bool] | None = None) -> None:
    told = {run: {"failed": failed, "usage": asdict(USAGE)} for run, failed in (ended or {}).items()}
    answers = {"host": "h", "system": {"cpu": "of the node"}, "ready": [each.id for each in ready], "ended": told}
    write_json(agent.folder_of(Path(of.attempt)) / agent.ANSWERS, answers)


def orders(of: Job) -> dict[str, object]:
    return read_object(agent.folder_of(Path(of.attempt)) / agent.ORDERS) or {}


def test_a_job_that_names_a_node_goes_to_the_cluster_and_its_answer_comes_back(
    pretend: PretendCluster, executor: ClusterExecutor, tmp_path: Path
) -> None:
    build = submit(executor, job(tmp_path, "build", resources=Resources(gpus=2)))
    assert executor.wait(0.0) == []
    answer(build, ended={"build": False})
    pretend.ended["ticket 1"] = None
    assert executor.wait(0.0) == [Ended(build.id, None, USAGE, {"cpu": "of the node"})]
    assert not agent.folder_of(Path(build.attempt)).exists(), "nothing is left of what was said"


def test_a_job_without_a_node_runs_here(pretend: PretendCluster, executor: ClusterExecutor, tmp_path: Path) -> None:
    executor.submit(job(tmp_path, "download", node=""), [])
    (event,) = executor.wait(60.0)
    assert isinstance(event, Ended)
    assert event.error is None
    assert not pretend.started


def test_why_it_failed_is_what_its_node_left(
    pretend: PretendCluster, executor: ClusterExecutor, tmp_path: Path
) -> None:
    build = submit(executor, job(tmp_path, "build"))
    failure.write(Path(build.attempt), StageError("build: no room", failure=FailureClass.USER, hint="make some"))
    answer(build, ended={"build": True})
    pretend.ended["ticket 1"] = None
    (event,) = executor.wait(0.0)
    assert isinstance(event, Ended)
    assert (event.error.message, event.error.failure, event.error.hint) == (
        "build: no room",
        FailureClass.USER,
        "make some",
    )


def test_a_service_and_what_runs_inside_are_one_task_and_end_together(
    pretend: PretendCluster, executor: ClusterExecutor, tmp_path: Path
) -> None:
    serve = job(tmp_path, "serve", Scope.SERVICE)
    perf = job(tmp_path, "perf", Scope.IN_SERVICE, inputs={"service": f"{serve.attempt}/service.json"})
    executor.submit(serve, [])
    answer(serve, ready=[serve])
    assert executor.wait(0.0) == [Ready(serve.id)]
    assert executor.wait(0.0) == [], "which is said once"
    executor.submit(perf, [])
    executor.stop(perf.id, 5.0)
    assert [each.id for each in pretend.started] == ["serve"]
    assert orders(serve)["jobs"] == [perf.attempt]
    pretend.ended["ticket 1"] = LOST
    lost = {event.id: event.error for event in executor.wait(0.0) if isinstance(event, Ended)}
    assert {run: error and (error.message, error.failure) for run, error in lost.items()} == {
        "serve": ("serve: lost with its node: gone", FailureClass.LOST),
        "perf": ("perf: stopped", FailureClass.BUG),
    }


def test_what_has_not_begun_is_cancelled_and_what_has_begun_is_asked_first(
    pretend: PretendCluster, executor: ClusterExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, runs = job(tmp_path, "waits"), job(tmp_path, "runs")
    executor.submit(waits, [])
    executor.submit(runs, [])
    answer(runs)
    for each in (waits, runs):
        executor.stop(each.id, 5.0)
    assert [event.id for event in (*executor.wait(0.0), *executor.wait(0.0))] == ["waits"]
    assert pretend.cancelled == ["ticket 1"]
    assert orders(runs)["stop"] == {"runs": 5.0}
    executor.stop(runs.id, 0.0)  # asked a second time
    assert [event.id for event in (*executor.wait(0.0), *executor.wait(0.0))] == ["runs"]


def test_an_agent_that_ends_without_an_answer_has_lost_it(
    pretend: PretendCluster, executor: ClusterExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(executor, job(tmp_path, "build"))
    pretend.ended["ticket 1"] = None
    assert executor.wait(0.0) == [], "the answer may still come, over a slow file system"
    monkeypatch.setattr(cluster, "_ANSWER_S", 0.0)
    (event,) = executor.wait(0.0)
    assert isinstance(event, Ended)
    assert event.error.failure is FailureClass.LOST


def test_what_a_server_that_was_stopped_took_comes_through_an_exchange_too(
    pretend: PretendCluster, through_exchange: ClusterExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "_POLL_S", 0.2)
    executor = through_exchange
    serve = submit(executor, job(tmp_path, "serve", Scope.SERVICE))
    parcel = tmp_path / "exchange" / "parcels" / (agent.folder_of(Path(serve.attempt)) / "parcel").read_text()
    parcel.mkdir(parents=True, exist_ok=True)

    def say(**answers: object) -> None:
        said = {"host": "h", "system": {}, "ready": [serve.id], "ended": {}, **answers}
        write_json(parcel / "answers.json", {"answers": said, "logs": {}, "progress": {}})

    say()
    while Ready(serve.id) not in executor.wait(10.0):
        pass
    executor.stop(serve.id, 5.0)
    write_json(parcel / "result.json", {"files": [], "records": []})
    say(ended={serve.id: {"failed": False, "usage": asdict(USAGE)}})
    pretend.ended["ticket 1"] = None
    assert end(executor) == Ended(serve.id, None, USAGE, {})


def parcel_of(of: Job, url: Path, **more: object) -> Path:
    """A job, as the pipeline sends it; in the workspace's place there is nothing else."""
    of.write(url.parent / "job.json")
    shutil.rmtree(of.attempt)
    parcel = url / "parcels" / f"{Path(of.attempt).name}-0"
    parcel.mkdir(parents=True)
    told = {"job": (url.parent / "job.json").read_text(), "artifacts": [], "files": {}, "views": {}, **more}
    write_json(parcel / "parcel.json", told)
    return parcel


@pytest.mark.parametrize("asked", ["parcel.json", "orders.json"])
def test_an_agent_waits_for_an_exchange_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setattr(exchange, "_POLL_S", 0.01)
    build = job(tmp_path / "work", "build")
    parcel = parcel_of(build, tmp_path / "exchange")
    remote = Remote(str(tmp_path / "exchange"))
    read, refused = remote.read, list[str]()

    def read_soon(name: str) -> bytes | None:
        if name.endswith(asked) and not refused:
            refused.append(name)
            raise RemoteError("no answer")
        return read(name)

    monkeypatch.setattr(remote, "read", read_soon)
    exchange._Node(remote, parcel.name).run()
    assert refused
    assert build.id in json.loads((parcel / "answers.json").read_text())["answers"]["ended"]


def test_what_cannot_be_sent_at_once_is_sent_again(
    through_exchange: ClusterExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "_POLL_S", 0.01)
    write, refused = Remote.write, list[str]()

    def write_soon(self: Remote, name: str, content: bytes) -> None:
        if name.endswith("parcel.json") and not refused:
            refused.append(name)
            raise RemoteError("no answer")
        write(self, name, content)

    monkeypatch.setattr(Remote, "write", write_soon)
    submit(through_exchange, job(tmp_path, "build"))
    assert eventually(lambda: list(tmp_path.glob("exchange/parcels/*/parcel.json")))
    assert refused


@pytest.mark.parametrize("name", ["build.1-0", "perf.1-0"])
def test_an_agent_does_not_wait_for_a_pipeline_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(exchange, "_POLL_S", 0.01)
    (tmp_path / "parcels" / "build.1-0").mkdir(parents=True)
    node = exchange._Node(Remote(str(tmp_path)), "build.1-0")
    monkeypatch.setattr(exchange, "_PATIENCE_S", 0.1)
    with pytest.raises(StateError, match=f"{name}: no parcel and no sign of life"):
        node.parcel(name)
    monkeypatch.setattr(exchange, "_PATIENCE_S", 60.0)
    node.over.set()
    with pytest.raises(StateError, match=f"{name}: its agent has ended"):
        node.parcel(name)


def test_an_agent_waits_as_long_as_the_pipeline_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_POLL_S", 0.01)
    now_s, heard = [0.0], list[bytes]()
    monkeypatch.setattr(exchange, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    parcel = tmp_path / "parcels" / "build.1-0"
    parcel.mkdir(parents=True)
    node = exchange._Node(Remote(str(tmp_path)), "build.1-0")
    read = node.remote.read

    def hear(name: str) -> bytes | None:
        content = read(name)
        heard.extend([] if content is None else [content])
        return content

    monkeypatch.setattr(node.remote, "read", hear)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(node.parcel, "build.1-0")
        for beat in range(5):
            write_json(parcel / "orders.json", {"beat": beat})
            written = (parcel / "orders.json").read_bytes()
            assert eventually(lambda written=written: written in heard)
            now_s[0] += 0.9 * exchange._PATIENCE_S
        assert not waiting.done()
        write_json(parcel / "parcel.json", {"job": "it"})
        assert waiting.result(60.0) == {"job": "it"}


@pytest.mark.parametrize("asked", ["send_files", "read"])
def test_what_nobody_foresaw_in_the_pool_is_said(
    through_exchange: ClusterExecutor,
    pretend: PretendCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
) -> None:
    def odd(*_: object) -> None:
        raise RuntimeError("odd")

    monkeypatch.setattr(exchange, "_POLL_S", 0.01)
    monkeypatch.setattr(exchange, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(Remote, asked, odd)
    prompts = tmp_path / "prompts"
    prompts.touch()
    submit(through_exchange, job(tmp_path, "build", files={"prompts": str(prompts)}))
    error = end(through_exchange).error
    assert error.message.endswith(": RuntimeError: odd")
    assert error.failure is FailureClass.TRANSIENT


def test_what_is_on_its_way_when_an_agent_ends_does_not_stay(
    through_exchange: ClusterExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parcel arrives while the agent is cancelled."""
    monkeypatch.setattr(exchange, "_POLL_S", 0.01)
    write, arrives = Remote.write, threading.Event()

    def write_late(self: Remote, name: str, content: bytes) -> None:
        if name.endswith("parcel.json"):
            arrives.wait(60.0)
        write(self, name, content)

    monkeypatch.setattr(Remote, "write", write_late)
    build = submit(through_exchange, job(tmp_path, "build"))
    parcels = tmp_path / "exchange" / "parcels"
    assert eventually(lambda: list(parcels.glob("*/orders.json")))
    through_exchange.stop(build.id, 5.0)
    assert end(through_exchange).error is not None
    arrives.set()
    through_exchange.close()
    assert not list(parcels.iterdir())


def test_an_agent_that_cannot_do_its_part_ends_once_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A job that is to run in its service reads what is damaged there."""
    monkeypatch.setattr(exchange, "_POLL_S", 0.01)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    serve, perf = job(tmp_path / "work", "serve", Scope.SERVICE, command=("sleep", "1")), job(tmp_path / "work", "perf")
    parcel = parcel_of(serve, tmp_path / "exchange")
    parcel_of(perf, tmp_path / "exchange", files={"prompts": []})
    write_json(parcel / "orders.json", {"jobs": [perf.attempt], "stop": {}, "beat": 0})
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        exchange._Node(Remote(str(tmp_path / "exchange")), parcel.name).run()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == [signal.SIGTERM]
    assert f"{perf.attempt}: its inputs cannot be fetched: " in capfd.readouterr().err
    assert not list((tmp_path / "work").iterdir())


def test_what_a_killed_agent_left_on_its_node_is_removed_by_the_next(tmp_path: Path) -> None:
    work, url = tmp_path / "work", tmp_path / "exchange"
    doomed = job(work, "doomed", command=("sh", "-c", "echo up; exec sleep 600"))
    command = [sys.executable, "-m", exchange.__name__, str(url), parcel_of(doomed, url).name]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment) as killed:
        log = Path(doomed.attempt) / "log"
        assert eventually(lambda: log.exists() and log.read_text() == "up\n")
        other = job(work, "other")
        parcel_of(other, url)
        again = [*command[:-1], "other.1-0"]
        assert subprocess.run(again, env=environment, check=False, timeout=60).returncode == 0
        assert Path(doomed.attempt).is_dir(), "it lives"
        killed.kill()
    assert Path(doomed.attempt).is_dir()
    assert subprocess.run(again, env=environment, check=False, timeout=60).returncode == 0
    assert not list(work.iterdir())


def test_a_node_that_is_at_fault_is_not_the_users(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    url = tmp_path / "exchange"
    name = parcel_of(job(tmp_path / "work", "build"), url).name
    shutil.rmtree(tmp_path / "work")
    (tmp_path / "work").write_text("a file is in the workspace's place")
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        assert exchange.main([str(url), name]) == os.EX_TEMPFAIL
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert capfd.readouterr().err.splitlines()[-1].startswith(f"{tmp_path}/work")


def test_what_an_earlier_invocation_left_is_adopted_but_for_servers(
    pretend: PretendCluster, executor: ClusterExecutor, tmp_path: Path
) -> None:
    build, serve = job(tmp_path, "build"), job(tmp_path, "serve", Scope.SERVICE)
    for each in (build, serve):
        each.write(Path(each.attempt) / "job.json")
        agent.folder_of(Path(each.attempt)).mkdir()
    assert not executor.adopt(Path(build.attempt)), "Slurm does not know it, and it has not ended"
    pretend.leftovers = ["build.1", "serve.1"]
    assert executor.adopt(Path(build.attempt))
    assert not executor.adopt(Path(serve.attempt))
    assert pretend.cancelled == ["left"]
    pretend.ended.clear()
    executor.submit(build, [])
    assert not pretend.started
    answer(build, ended={"build": False})
    pretend.ended["left"] = None
    assert [event.id for event in executor.wait(0.0)] == ["build"]


@pytest.mark.parametrize(
    ("through", "scope"),
    [
        pytest.param("executor", Scope.SERVICE, id="to a service"),
        pytest.param("through_exchange", Scope.ARTIFACT, id="while it sends"),
    ],
)
def test_the_pipeline_says_that_it_lives(
    through: str, scope: Scope, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor: ClusterExecutor = request.getfixturevalue(through)
    sent = submit(executor, job(tmp_path, "sent", scope))
    monkeypatch.setattr(agent, "BEAT_S", -1.0)
    executor.wait(0.0)
    assert orders(sent)["beat"] == 1


def test_a_plan_is_for_the_types_of_accelerators_that_are_named_or_the_only_one() -> None:
    mixed = [ClusterNode("head", 0, 0, None), ClusterNode("cpus", 8, 0, None)]
    mixed += [ClusterNode(name, 8, 8, kind) for name, kind in (("a", "H100"), ("b", "A100"), ("c", "H100"))]
    assert [node.name for node in chosen(mixed, ["H100"])] == ["a", "c"]
    assert [node.name for node in chosen(mixed[:3], [])] == ["a"]
    assert [node.name for node in chosen(mixed[:2], [])] == ["cpus"]
    assert [node.name for node in chosen(mixed, ["h100", "a100"])] == ["a", "c", "b"], "spelt as in the matrix"
    assert [node.name for node in chosen(mixed, ["L40S", "A100"])] == ["b"], "what there is of them"
    with pytest.raises(UsageError, match="has several accelerator types: A100, H100"):
        chosen(mixed, [])
    with pytest.raises(UsageError, match="has no node with B200; it has A100, H100"):
        chosen(mixed, ["B200"])
    with pytest.raises(UsageError, match="the cluster has no node with CPUs"):
        chosen(mixed[:1], [])


def test_a_plan_is_for_what_nodes_have_in_common() -> None:
    found = Machine(4, "of a node", (Gpu(0, "GPU-a", "H100", 80, 90),), tensorrt_llm=TensorRTLLM("1.0.0"))
    common = in_common(found, [ClusterNode("a", 16, 8, "H100"), ClusterNode("b", 12, 4, "H100")])
    assert (common.cpus, len(common.gpus), {gpu.name for gpu in common.gpus}) == (12, 4, {"H100"})
    assert from_json(json.loads(json.dumps(asdict(common)))) == common


def test_each_type_of_gpu_has_a_machine_of_its_own() -> None:
    sms = {"H100": 90, "L40S": 89}
    nodes = [
        ClusterNode(name, cpus, 2, kind) for name, cpus, kind in (("a", 8, "H100"), ("b", 8, "L40S"), ("c", 4, "H100"))
    ]

    def look(node: ClusterNode) -> Machine:
        assert node.name != "c", "one of each type is asked"
        return Machine(64, "of a node", (Gpu(0, "0", f"NVIDIA {node.accelerator}", 80, sms[str(node.accelerator)]),))

    machine = machine_of(nodes, ["H100", "l40s", "B200"], look)
    assert [(machine.of(gpu).sm, machine.of(gpu).cpus, len(machine.of(gpu).gpus)) for gpu in ("H100", "L40S")] == [
        (90, 4, 2),
        (89, 8, 2),
    ]
    assert (machine.sm, machine.lacks("L40s")) == (90, None)
    assert machine.lacks("B200") == "it is for GPUs of type B200; there are h100, l40s"
    assert from_json(json.loads(json.dumps(asdict(machine)))) == machine
    assert machine_of([nodes[0]], [], look).types == (), "a cluster of one type is like a machine"


# The agent, on a job of real processes.


def test_an_agent_runs_a_job_as_this_machine_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    build = job(tmp_path, "build")
    build.write(Path(build.attempt) / "job.json")
    assert read_job(Path(build.attempt) / "job.json") == build
    agent.folder_of(Path(build.attempt)).mkdir()
    agent.run(Path(build.attempt))
    answers = read_object(agent.folder_of(Path(build.attempt)) / agent.ANSWERS)
    assert answers["ended"]["build"]["failed"] is False


def test_an_agent_whose_pipeline_is_gone_ends_its_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(agent, "SILENCE_S", 0.3)
    serve = job(tmp_path, "serve", Scope.SERVICE, command=("sleep", "600"))
    serve.write(Path(serve.attempt) / "job.json")
    agent.folder_of(Path(serve.attempt)).mkdir()
    agent.run(Path(serve.attempt))
    answers = read_object(agent.folder_of(Path(serve.attempt)) / agent.ANSWERS)
    assert answers["ended"]["serve"]["failed"] is True


def test_nodes_that_go_and_come_are_told_once_and_only_those_of_the_type() -> None:
    one, two = ClusterNode("one", 8, 2, "H100"), ClusterNode("two", 8, 2, "H100")
    there = [one, two, ClusterNode("other", 8, 2, "L40S")]
    known = KnownNodes([one, two], lambda: there, every_s=0.0)
    assert known.changes() == []
    there.remove(two)
    assert known.changes() == [NodeGone("two")]
    assert known.changes() == []
    there += [two, ClusterNode("three", 4, 1, "H100"), ClusterNode("no CPUs", 0, 1, "H100")]
    assert known.changes() == [NodeCame(two.capacity), NodeCame(Capacity(4, ("three/0",), 0, "three", "h100"))]


def test_nodes_are_looked_at_only_so_often_and_nothing_follows_from_no_answer() -> None:
    looks: list[int] = []

    def away() -> Sequence[ClusterNode]:
        looks.append(1)
        raise UsageError("the controller is away")

    one = ClusterNode("one", 8, 2, None)
    assert KnownNodes([one], away, every_s=60.0).changes() == []
    assert not looks
    assert KnownNodes([one], away, every_s=0.0).changes() == []
    assert looks


def test_the_executor_passes_on_what_becomes_of_nodes(pretend: PretendCluster, executor: ClusterExecutor) -> None:
    pretend.changed = [NodeGone("one")]
    assert executor.wait(0.0) == [NodeGone("one")]
    assert executor.wait(0.0) == []
