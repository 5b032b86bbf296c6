"""Stage runs on a real Ray cluster: two nodes on this machine, one of which is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.jobs import end, isolated, job, may_isolate, submit
from tests.helpers.trtllm_runs import Lane
from tests.helpers.waiting import eventually
from trtllm_pipeline.base.domain import Resources
from trtllm_pipeline.base.errors import FailureClass, StageError, UsageError
from trtllm_pipeline.orchestrate.clusters.cluster import ClusterExecutor
from trtllm_pipeline.orchestrate.run.executor import Ended, ExecutorEvent
from trtllm_pipeline.orchestrate.run.scheduler import NodeCame, NodeGone
from trtllm_pipeline.orchestrate.store.index import AttemptRow
from trtllm_pipeline.orchestrate.store.store import Store

pytest.importorskip("ray", reason="needs the extra [ray]")

from ray.cluster_utils import Cluster

from trtllm_pipeline.orchestrate.clusters.ray_cluster import RayCluster

TINY = Path(__file__).parents[2] / "matrices/tiny.yaml"
H100 = {"num_cpus": 2, "num_gpus": 2, "resources": {"accelerator_type:H100": 1}, "object_store_memory": 80_000_000}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A cluster of two nodes that say that they have two H100 each."""
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("leases")))
    before = signal.getsignal(signal.SIGTERM)  # a process that starts nodes gets one that ends them, and itself
    cluster = Cluster(initialize_head=True, head_node_args={**H100, "include_dashboard": False})
    cluster.add_node(**H100)
    yield cluster
    cluster.shutdown()
    signal.signal(signal.SIGTERM, before)
    patch.undo()


@pytest.fixture
def connected(nodes: Any) -> Iterator[RayCluster]:
    cluster = RayCluster(nodes.address)
    yield cluster
    cluster.close()


@pytest.fixture
def executor(connected: RayCluster) -> Iterator[ClusterExecutor]:
    executor = ClusterExecutor(connected)
    yield executor
    executor.close()


def appears(path: Path) -> str:
    assert eventually(lambda: path.exists() and bool(path.read_text())), f"{path} does not appear"
    return path.read_text()


def happens(executor: ClusterExecutor) -> ExecutorEvent:
    """The next that happens."""
    found: list[ExecutorEvent] = []
    assert eventually(lambda: found.extend(executor.wait(0.1)) or found), "nothing happens"
    return found[0]


def alive(address: str) -> list[dict[str, Any]]:
    """The nodes of a cluster, asked by another process: one process is in one cluster."""
    asked = f"import ray, json; ray.init({address!r}, logging_level=50); print(json.dumps(ray.nodes()))"
    told = subprocess.run([sys.executable, "-c", asked], check=True, capture_output=True, text=True, timeout=280).stdout
    return [node for node in json.loads(told.splitlines()[-1]) if node["Alive"]]


def run_words(workspace: Path, address: str, *options: str) -> list[str]:
    """A command line: `pipeline run` of a cell of the tiny matrix on a cluster."""
    command = [sys.executable, "-m", "trtllm_pipeline", "run", "-m", str(TINY), "--cells", "*/fp16/*"]
    return [*command, "--executor", "ray", "--ray-address", address, "-w", str(workspace), "--format", "json", *options]


def run_matrix(workspace: Path, address: str, *options: str) -> subprocess.CompletedProcess[str]:
    """It, run to its end."""
    words = run_words(workspace, address, *options)
    return subprocess.run(words, check=False, capture_output=True, text=True, timeout=400)


@contextmanager
def serving(workspace: Path, address: str) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """It, once its server is up: with the server's node and process."""
    words = run_words(workspace, address)
    run = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        up: list[Path] = []
        assert eventually(lambda: bool(up.extend(workspace.glob("work/*/service.json")) or up)), "a server is up"
        node = json.loads((up[0].parent / "job.json").read_bytes())["node"]
        yield run, node, json.loads(up[0].read_bytes())["pid"]
    finally:
        run.kill()
        run.communicate()


def finished(workspace: Path) -> dict[Path, int]:
    """The artifacts, each with the inode that it has as long as it is not made again."""
    return {path: path.parent.stat().st_ino for path in workspace.glob("store/*/*/manifest.json")}


def attempts(workspace: Path) -> list[AttemptRow]:
    """All of the latest run."""
    store = Store(workspace)
    run, *_ = store.index.runs()
    found = store.index.attempts_of(run.id)
    store.close()
    return list(found)


def runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_sigterm_stays_what_it_was(nodes: Any) -> None:
    def mine(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, mine)
    try:
        cluster = RayCluster(nodes.address)
        after = signal.getsignal(signal.SIGTERM)
        cluster.close()
        assert (after, signal.getsignal(signal.SIGTERM)) == (mine, mine)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_job_runs_with_its_gpus_and_its_log_is_here(
    connected: RayCluster, executor: ClusterExecutor, tmp_path: Path
) -> None:
    assert [(node.cpus, len(node.gpus), node.downloads) for node in connected.nodes] == [(2, 2, 0), (2, 2, 0)]
    command = ("sh", "-c", 'echo "has $CUDA_VISIBLE_DEVICES"; exit 3')
    gang = job(tmp_path, "gang", command=command, resources=Resources(gpus=2), node=connected.nodes[0].node)
    submit(executor, gang)
    ended = end(executor)
    assert ended.error is not None
    assert ended.error.message == "gang: ended with exit code 3; its last line: has 0,1"
    assert (Path(gang.attempt) / "log").read_text() == "has 0,1\n"
    assert ended.usage.wall_s > 0.0


def test_stopping_ends_every_process_on_the_node(
    connected: RayCluster, executor: ClusterExecutor, tmp_path: Path
) -> None:
    command = ("sh", "-c", "sleep 600 & echo $! > pid; wait")
    long = submit(executor, job(tmp_path, "long", command=command, node=connected.nodes[1].node))
    pid = int(appears(Path(long.attempt) / "pid"))
    executor.stop(long.id, 1.0)
    assert end(executor).error is not None
    assert not runs(pid)


@pytest.mark.parametrize(
    ("command", "failure", "said"),
    [
        (("sh", "-c", "echo the disk is full >&2; exit 75"), FailureClass.TRANSIENT, "the disk is full"),
        (("sh", "-c", "kill -9 $$"), FailureClass.TRANSIENT, "SIGKILL"),
        ((sys.executable, "-m", "no_such_module"), FailureClass.USER, "No module named no_such_module"),
        (("/no/such/python",), FailureClass.USER, "No such file or directory: '/no/such/python'"),
    ],
)
def test_only_a_node_without_our_environment_is_the_users_fault(
    connected: RayCluster, tmp_path: Path, command: tuple[str, ...], failure: FailureClass, said: str
) -> None:
    ticket = connected.start(job(tmp_path, "build", node=connected.nodes[0].node), command)
    ended: dict[str, StageError | None] = {}
    assert eventually(lambda: bool(ended.update(connected.over(0.5)) or ended))
    error = ended[ticket]
    assert error is not None
    assert error.failure is failure
    assert error.message.startswith("its agent failed: ")
    assert error.message.endswith(said)
    assert (error.hint is None) == (failure is FailureClass.TRANSIENT)


def test_what_ran_on_a_killed_node_is_lost_and_runs_on_another(
    nodes: Any, connected: RayCluster, executor: ClusterExecutor, tmp_path: Path
) -> None:
    other = nodes.add_node(**H100)
    came = happens(executor)
    assert isinstance(came, NodeCame)
    assert (came.node.cpus, len(came.node.gpus)) == (2, 2)
    third = came.node.node
    command = ("sh", "-c", "echo $$ > pid; exec sleep 600")
    doomed = submit(executor, job(tmp_path, "doomed", command=command, node=third))
    pid = int(appears(Path(doomed.attempt) / "pid"))
    nodes.remove_node(other, allow_graceful=False)
    told = [happens(executor), happens(executor)]
    assert NodeGone(third) in told
    (ended,) = [each for each in told if isinstance(each, Ended)]
    assert ended.error is not None
    assert ended.error.failure is FailureClass.LOST
    assert ended.error.message.startswith("doomed: lost with its node: ")
    assert eventually(lambda: not runs(pid)), "the guardian ended it"
    again = job(tmp_path, "again", node=third)  # started before it was known
    submit(executor, again)
    assert end(executor).error is None, "another node took it"


def test_no_cluster_is_said_at_once() -> None:
    with pytest.raises(UsageError, match=r"no Ray cluster at 127\.0\.0\.1:1: "):
        RayCluster("127.0.0.1:1")
    for address in ("127.0.0.1", ":x", "127.0.0.1:99999"):
        with pytest.raises(UsageError, match=f"no Ray cluster at {address}: expected HOST:PORT"):
            RayCluster(address)


def test_a_matrix_is_brought_up_to_date_on_ray(nodes: Any, tmp_path: Path) -> None:
    """Embedded, whole: servers and what is measured inside them are tasks of Ray as well."""
    pytest.importorskip("xllamacpp", reason="needs the extra [embedded]")
    done = run_matrix(tmp_path / "w", nodes.address)
    assert done.returncode == 0, done.stderr
    assert '"status": "done"' in done.stdout
    again = run_matrix(tmp_path / "w", nodes.address)
    assert "nothing to do: everything is up to date" in again.stderr, again.stderr
    assert not list((tmp_path / "w/work").glob("*.cluster"))


def test_a_matrix_whose_servers_node_is_killed_is_measured_on_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xllamacpp", reason="needs the extra [embedded]")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=2), cluster.add_node(num_cpus=2)]
        with serving(tmp_path / "w", cluster.address) as (run, node, server):
            made = finished(tmp_path / "w")
            (doomed,) = (each for each in nodes if each.node_id.startswith(node.rpartition("-")[2]))
            cluster.remove_node(doomed, allow_graceful=False)
            out, said = run.communicate(timeout=300)
            assert run.returncode == 0, said
            assert eventually(lambda: not runs(server))
    finally:
        cluster.shutdown()
        signal.signal(signal.SIGTERM, before)
    assert '"status": "done"' in out
    assert {path.parent.parent.name for path in made} >= {"convert", "build"}
    assert made.items() <= finished(tmp_path / "w").items()
    tried = attempts(tmp_path / "w")
    assert [each.failure for each in tried if each.stage == "launch"] == ["lost", None]
    assert {each.failure for each in tried} == {"lost", None}
    done = [each.stage for each in tried if each.outcome == "succeeded" and each.stage != "launch"]
    assert len(done) == len(set(done)), "nothing that was finished is made again"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_pipeline_that_is_ended_while_a_node_serves_goes_on_where_it_was(
    nodes: Any, tmp_path: Path, how: signal.Signals
) -> None:
    pytest.importorskip("xllamacpp", reason="needs the extra [embedded]")
    with serving(tmp_path / "w", nodes.address) as (run, _, server):
        run.send_signal(how)
        run.communicate(timeout=280)
        assert run.returncode == (130 if how is signal.SIGINT else -how)
        assert eventually(lambda: not runs(server)), "nothing is left on the node"
    made = finished(tmp_path / "w")
    assert {path.parent.parent.name for path in made} >= {"convert", "build"}
    again = run_matrix(tmp_path / "w", nodes.address)
    assert again.returncode == 0, again.stderr
    assert '"status": "done"' in again.stdout
    assert made.items() <= finished(tmp_path / "w").items()
    assert not {path.parent.name for path in made} & {each.fingerprint for each in attempts(tmp_path / "w")}


def ray_node(address: str, *options: str) -> list[str]:
    """A command that is a node of a cluster as long as it runs."""
    ray = str(Path(sys.executable).with_name("ray"))
    return [ray, "start", f"--address={address}", "--num-cpus=2", "--block", *options]


TYPES = """\
name: types
axes:
  model: [tiny]
  precision: [fp16, fp8]
  max_batch_size: [2]
  lengths: ["256,32"]
  gpu: [H100, L40S, B200]
settings:
  quantize: { calibration: { samples: 8 } }
"""


def test_a_search_measures_its_cells_on_the_cluster(nodes: Any, tmp_path: Path) -> None:
    """Each step is a run of its own, in one process."""
    pytest.importorskip("xllamacpp", reason="needs the extra [embedded]")
    command = [sys.executable, "-m", "trtllm_pipeline", "search", "-m", str(TINY), "--executor", "ray"]
    command += ["--ray-address", nodes.address, "-w", str(tmp_path), "--budget", "2", "--format", "json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["cells"], told["spent"], len(told["tried"])) == (2, 2, 2)
    assert len(list((tmp_path / "runs").glob("*/search.json"))) == 2


def test_an_engine_is_built_on_the_type_that_it_will_serve_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of two types: on each a stand-in of TensorRT-LLM of its own, with GPUs of its own, that notes what it was asked."""
    matrix = tmp_path / "matrix.yaml"
    matrix.write_text(TYPES)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    head = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    lanes = {name: Lane(tmp_path / name, "0.16.0", sm=sm, gpus=1) for name, sm in (("H100", 90), ("L40S", 89))}
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "120")
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for name, lane in lanes.items():
            options = ("--num-gpus=1", "--resources", json.dumps({f"accelerator_type:{name}": 1}))
            command = ray_node(head.address, *options)
            nodes.append(subprocess.Popen(command, env=lane.environment, stdout=subprocess.DEVNULL))
            there = f"accelerator_type:{name}"
            assert eventually(lambda there=there: any(there in one["Resources"] for one in alive(head.address)))
        command = [sys.executable, "-m", "trtllm_pipeline", "run", "-m", str(matrix), "-w", str(tmp_path / "w")]
        command += ["--until", "build", "--executor", "ray", "--ray-address", head.address, "--format", "json"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr
    finally:
        for node in nodes:
            node.terminate()
            node.wait(60)
        head.shutdown()
        signal.signal(signal.SIGTERM, before)
    cells = {each["id"].partition("/")[2]: each for each in json.loads(done.stdout)["cells"]}
    assert {each["axes"]["gpu"] for each in cells.values()} == {"H100", "L40S", "B200"}
    reasons = {cell["reason"] for cell in cells.values() if cell["axes"]["gpu"] == "B200"}
    assert reasons == {"it is for GPUs of type B200; there are h100, l40s"}
    starts = {name: lane.starts() for name, lane in lanes.items()}
    assert [each["trtllm-build"] for each in starts.values()] == [2, 2]
    made = starts["H100"] + starts["L40S"]
    assert (made["convert_checkpoint.py:llama"], made["quantize.py"]) == (1, 1), "both types read the same checkpoints"
    engines = (tmp_path / "w/store/build").glob("*/out/**/*.json")
    told = {name: text for path in engines if (text := path.read_text()) for name in ("H100", "L40S") if name in text}
    assert set(told) == {"H100", "L40S"}, "each engine says what it was built on"


def test_a_matrix_on_a_node_that_does_not_see_the_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the workspace's place the node has a disk of its own: all that it reads and leaves passes through a directory."""
    pytest.importorskip("xllamacpp", reason="needs the extra [embedded]")
    workspace, exchange = tmp_path / "w", tmp_path / "exchange"
    workspace.mkdir()
    exchange.mkdir()
    if not may_isolate(workspace):
        pytest.skip("needs to be allowed to mount")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    before = signal.getsignal(signal.SIGTERM)
    head = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    isolated_node = isolated(workspace, *ray_node(head.address))
    node = subprocess.Popen(isolated_node, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    through = f"settings.cluster.exchange={exchange}"
    try:
        assert eventually(lambda: sum("CPU" in each["Resources"] for each in alive(head.address)))
        done = run_matrix(workspace, head.address, "--set", through)
        assert done.returncode == 0, done.stderr
        assert '"status": "done"' in done.stdout
        assert list((exchange / "artifacts").iterdir())
        assert eventually(lambda: not list((exchange / "parcels").iterdir()))
        assert not list((workspace / "work").glob("*.cluster"))
        again = run_matrix(workspace, head.address, "--set", through)
        assert "nothing to do: everything is up to date" in again.stderr, again.stderr
    finally:
        node.terminate()
        node.wait(60)
        head.shutdown()
        signal.signal(signal.SIGTERM, before)
