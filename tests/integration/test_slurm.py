"""Stage runs as jobs of a real Slurm: three nodes on this machine, of two types, that are lost and come back, and a pipeline that is killed."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers.jobs import end, job, submit
from tests.helpers.waiting import eventually
from trtllm_pipeline.base.domain import Resources
from trtllm_pipeline.base.errors import FailureClass
from trtllm_pipeline.orchestrate.clusters.cluster import ClusterExecutor
from trtllm_pipeline.orchestrate.clusters.slurm_cluster import SlurmCluster
from trtllm_pipeline.tensorrt.servers.triton_server import unused_ports

pytestmark = [
    pytest.mark.programs("slurmctld", "slurmd", "munged"),
    pytest.mark.skipif(os.getuid() != 0, reason="needs root"),
]
TINY = Path(__file__).parents[2] / "matrices/tiny.yaml"
HOLD = """
import fcntl, os

if os.environ.get("SLURM_JOB_NAME") == "convert":
    with open({path!r}) as hold:
        fcntl.flock(hold, fcntl.LOCK_SH)
"""
"""A sitecustomize.py: converts do not begin while a file is locked."""

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge/socket
SlurmctldPort={ports[0]}
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdTimeout=10
KillWait=5
MinJobAge=600
MpiDefault=none
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 Gres=gpu:h100:2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 Gres=gpu:h100:2 State=UNKNOWN
NodeName=n3 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]} CPUs=2 Gres=gpu:l40s:1 State=UNKNOWN
PartitionName=work Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
PartitionName=mixed Nodes=n1,n2,n3 MaxTime=INFINITE State=UP
"""
GPUS = """
AutoDetect=off
NodeName=n1,n2 Name=gpu Type=h100 File=/dev/null
NodeName=n1,n2 Name=gpu Type=h100 File=/dev/zero
NodeName=n3 Name=gpu Type=l40s File=/dev/full
"""


def tell(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=280).stdout


def states() -> dict[str, str]:
    """The state of each node."""
    lines = tell("sinfo", "--partition=mixed", "-N", "-h", "-o", "%N %T").splitlines()
    return dict(line.split() for line in lines)


def crash(slurm: Path, node: str) -> None:
    """End all that runs on a node at once, with the job's processes."""
    os.kill(int((slurm / f"slurmd-{node}.pid").read_text()), signal.SIGKILL)
    steps = [f"[{number}." for number in tell("squeue", "-h", "-w", node, "-o", "%i").split()]
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and (
                f"SLURMD_NODENAME={node}\0".encode() in (entry / "environ").read_bytes()
                or any(f"slurmstepd: {step}" in (entry / "cmdline").read_text() for step in steps)
            ):
                os.kill(int(entry.name), signal.SIGKILL)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a Slurm of two nodes, each with two GPUs by name."""
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("munge", "state"):
        (folder / name).mkdir()
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(CONFIGURATION.format(host=host, folder=folder, ports=unused_ports(4)))
    (folder / "gres.conf").write_text(GPUS)
    patch = pytest.MonkeyPatch()
    patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    patch.setenv("SINFO_PARTITION", "work")  # where nobody names one
    files = {"socket": "socket", "key-file": "key", "pid-file": "munged.pid", "log-file": "log", "seed-file": "seed"}
    tell("munged", "--force", *(f"--{option}={folder / 'munge' / name}" for option, name in files.items()))
    try:
        tell("slurmctld")
        for node in ("n1", "n2", "n3"):
            tell("slurmd", "-N", node)
        assert eventually(lambda: set(states().values()) == {"idle"}), "three nodes"
        yield folder
    finally:
        for pid in [*folder.glob("slurm*.pid"), folder / "munge" / "munged.pid"]:
            if pid.exists():
                os.kill(int(pid.read_text()), signal.SIGTERM)
        patch.undo()


@pytest.fixture
def executor(slurm: Path) -> Iterator[ClusterExecutor]:
    executor = ClusterExecutor(SlurmCluster(["--partition=work"]))
    yield executor
    executor.close()


def test_a_job_has_its_gpus_and_is_stopped_with_all_its_processes(executor: ClusterExecutor, tmp_path: Path) -> None:
    command = ("sh", "-c", 'echo "has $CUDA_VISIBLE_DEVICES"; sleep 600 & echo $! > pid; wait')
    gang = job(tmp_path, "gang", command=command, resources=Resources(gpus=2))
    submit(executor, gang)
    pid = Path(gang.attempt) / "pid"
    assert eventually(lambda: pid.exists() and bool(pid.read_text())), "it runs"
    executor.stop(gang.id, 2.0)
    assert end(executor).error is not None
    assert (Path(gang.attempt) / "log").read_text() == "has 0,1\n"
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()


def test_what_ran_on_a_lost_node_is_lost(executor: ClusterExecutor, slurm: Path, tmp_path: Path) -> None:
    doomed = job(tmp_path, "doomed", command=("sh", "-c", "echo > pid; sleep 600"))
    submit(executor, doomed)
    assert eventually((Path(doomed.attempt) / "pid").exists), "it runs"
    node = tell("squeue", "-h", "-o", "%N").strip()
    os.kill(int((slurm / f"slurmd-{node}.pid").read_text()), signal.SIGKILL)
    try:
        error = end(executor).error
    finally:
        tell("slurmd", "-N", node)
    assert error is not None
    assert error.failure is FailureClass.LOST
    # The second, if the daemon was just telling the controller of the start.
    reports = {f"doomed: lost with its node: Slurm reports {word}" for word in ("NODE_FAIL", "JobLaunchFailure")}
    assert error.message in reports
    assert eventually(lambda: "down" not in tell("sinfo", "-h", "-o", "%T")), "the node is back"


def test_a_job_goes_to_a_node_with_its_type_of_gpu(slurm: Path, tmp_path: Path) -> None:
    cluster = SlurmCluster(["--partition=mixed"], ["H100", "L40S"])
    assert [name for name, _ in cluster.machine.types] == ["h100", "l40s"]
    executor = ClusterExecutor(cluster)
    try:
        jobs = {}
        for kind in ("l40s", "h100"):
            jobs[kind] = submit(executor, job(tmp_path, kind, resources=Resources(gpus=1, accelerator=kind)))
            assert end(executor).error is None
    finally:
        executor.close()
    lines = tell("squeue", "-h", "--states=all", "-o", "%k|%N").splitlines()
    nodes = dict(line.split("|") for line in lines)
    assert nodes[jobs["l40s"].attempt] == "n3"
    assert nodes[jobs["h100"].attempt] in {"n1", "n2"}


def test_a_matrix_goes_on_while_nodes_go_down_and_come_back(slurm: Path, tmp_path: Path) -> None:
    """The node of a convert dies, then there is none for a while: what ran is run again, once, and what is done stays."""
    pytest.importorskip("xllamacpp", reason="needs the extra [embedded]")
    command = [
        sys.executable,
        "-m",
        "trtllm_pipeline",
        "run",
        "-m",
        str(TINY),
        "--until",
        "build",
        "--executor",
        "slurm",
    ]
    hold = (tmp_path / "hold").open("w")
    fcntl.flock(hold, fcntl.LOCK_EX)
    (tmp_path / "sitecustomize.py").write_text(HOLD.format(path=hold.name))
    run = subprocess.Popen(
        [*command, "-w", str(tmp_path / "w")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"]))},
        stderr=subprocess.PIPE,
        text=True,
    )

    def running() -> dict[str, str]:
        """Attempt -> node."""
        lines = tell("squeue", "-h", "--partition=work", "--states=RUNNING", "-o", "%j|%k|%N").splitlines()
        return {comment: node for name, comment, node in (line.split("|") for line in lines) if name == "convert"}

    try:
        assert eventually(lambda: bool(running())), "a convert runs"
        lost, node = next(iter(running().items()))
        other = "n2" if node == "n1" else "n1"
        tell("scontrol", "update", f"nodename={other}", "state=drain", "reason=test")
        crash(slurm, node)
        assert eventually(lambda: states()[node].startswith("down")), "its node is down"
        assert run.poll() is None, "it waits for a node"
        hold.close()
        tell("scontrol", "update", f"nodename={other}", "state=resume")
        tell("slurmd", "-N", node)
        _, said = run.communicate(timeout=280)
    finally:
        hold.close()
        run.kill()
    assert run.returncode == 0, said
    jobs = [line.split("|") for line in tell("squeue", "-h", "--states=all", "-o", "%T|%r|%k").splitlines()]
    ours = [(state, why, Path(attempt)) for state, why, attempt in jobs if attempt.startswith(str(tmp_path))]
    assert ("NODE_FAIL", lost) in {(state, str(attempt)) for state, _, attempt in ours}
    attempts = [(attempt.name.split(".")[0], state, why) for state, why, attempt in ours]
    done = [name for name, state, _ in attempts if state == "COMPLETED"]
    assert len({name for name, *_ in attempts}) == 4, "two converts, two builds"
    assert len(done) == len(set(done)), "each once"
    assert [name for name, *_ in attempts].count(Path(lost).name.split(".")[0]) > 1, "what ran is run again"
    # A node that comes back may also lose a job after its agent has answered.
    lost_last = {why for name, _, why in attempts if name not in done}
    assert lost_last <= {"NodeDown", "JobLaunchFailure"}, attempts
    assert eventually(lambda: set(states().values()) == {"idle"}), "both are back"


def test_what_a_killed_pipeline_left_in_the_queue_is_not_run_twice(slurm: Path, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="needs the extra [embedded]")
    pipeline = [sys.executable, "-m", "trtllm_pipeline"]
    where = ["-w", str(tmp_path / "w")]
    first = subprocess.Popen(
        [*pipeline, "run", "-m", str(TINY), "--until", "build", "--executor", "slurm", *where],
        stderr=subprocess.DEVNULL,
    )
    assert eventually(lambda: "convert" in tell("squeue", "-h", "-o", "%j")), "a convert is in the queue"
    tell("scontrol", "update", "partitionname=work", "state=DOWN")
    first.kill()
    first.wait()
    second = subprocess.Popen([*pipeline, "resume", *where], stderr=subprocess.PIPE, text=True)
    try:
        pending = "squeue", "-h", "--states=PENDING", "-o", "%j"
        assert eventually(lambda: "look" in tell(*pending)), "it has started, and wants to know the nodes"
    finally:
        tell("scontrol", "update", "partitionname=work", "state=UP")
    assert second.communicate(timeout=280)[1] is not None
    assert second.returncode == 0
    jobs = [line.split("|") for line in tell("squeue", "-h", "--states=all", "-o", "%j|%k").splitlines()]
    made = [comment for name, comment in jobs if comment.startswith(str(tmp_path)) and name in ("convert", "build")]
    assert len(made) == len(set(made)) == 4
    assert not list((tmp_path / "w/work").glob("*.cluster"))


def test_a_matrix_is_brought_up_to_date_by_slurm(slurm: Path, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="needs the extra [embedded]")
    command = [sys.executable, "-m", "trtllm_pipeline", "run", "-m", str(TINY), "--cells", "*/fp16/*"]
    done = subprocess.run(
        [*command, "--executor", "slurm", "-w", str(tmp_path / "w"), "--format", "json"],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert '"status": "done"' in done.stdout
