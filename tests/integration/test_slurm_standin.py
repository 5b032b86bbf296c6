"""Jobs of Slurm, with a stand-in for its commands that starts real agents."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.jobs import end, job, submit
from tests.helpers.waiting import eventually
from tests.standins import slurm
from trtllm_pipeline.base.domain import Exclusive, Resources
from trtllm_pipeline.base.errors import FailureClass, UsageError
from trtllm_pipeline.base.machine import probe
from trtllm_pipeline.base.machine.model import Machine
from trtllm_pipeline.orchestrate.clusters import slurm_cluster
from trtllm_pipeline.orchestrate.clusters.cluster import ClusterExecutor
from trtllm_pipeline.orchestrate.clusters.slurm_cluster import SlurmCluster


@pytest.fixture(autouse=True)
def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "slurm"
    programs = slurm.install(folder, sys.executable)
    monkeypatch.setenv("SLURM_STANDIN", str(folder))
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(slurm_cluster, "_POLL_S", 0.05)
    return folder


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    monkeypatch.setattr(SlurmCluster, "_machine", lambda _self, _node: Machine(cpus=64, cpu="of a node"))
    return SlurmCluster(["--partition=gpu", "--account=us"])


@pytest.fixture
def executor(cluster: SlurmCluster) -> Iterator[ClusterExecutor]:
    executor = ClusterExecutor(cluster)
    yield executor
    executor.close()


@pytest.mark.seam
def test_the_nodes_are_those_that_can_run_something(cluster: SlurmCluster) -> None:
    assert [(node.node, node.cpus, len(node.gpus)) for node in cluster.nodes] == [("n1", 4, 2), ("n2", 4, 2)]
    assert cluster.machine.cpus == 4


def test_a_node_says_what_it_is() -> None:
    assert SlurmCluster([]).machine == replace(probe.this_machine(), cpus=4)


@pytest.mark.seam
def test_a_job_asks_for_what_it_needs_and_its_answer_comes_back(
    executor: ClusterExecutor, standin: Path, tmp_path: Path
) -> None:
    command = ("sh", "-c", "env > out/environment; echo said")
    need = Resources(gpus=2, exclusive=Exclusive.MACHINE)
    build = submit(executor, job(tmp_path, "build", command=command, resources=need))
    ended = end(executor)
    assert ended.error is None
    assert ended.system is not None
    assert (Path(build.attempt) / "log").read_text() == "said\n"
    asked = {
        "--exclusive=",
        "--gres=gpu:h100:2",
        "--cpus-per-task=1",
        "--partition=gpu",
        "--account=us",
        "--no-requeue=",
    }
    assert asked <= options(standin, 1)


def options(standin: Path, number: int) -> set[str]:
    """Of a job: NAME=VALUE each."""
    return set((standin / "jobs" / str(number)).read_text().split("|")[2].split())


def test_a_job_asks_for_its_type_of_gpu_as_slurm_spells_it(
    cluster: SlurmCluster, standin: Path, tmp_path: Path
) -> None:
    (standin / "nodes").write_text("n1|4|gpu:h100:2|idle\nn2|4|gpu:L40S:1|idle\nn3|4|gpu:a100:1|idle\n")
    both = SlurmCluster([], ["H100", "l40s"])
    assert [(node.node, node.accelerator) for node in both.nodes] == [("n1", "h100"), ("n2", "l40s")]
    assert [name for name, _ in both.machine.types] == ["h100", "l40s"]
    executor = ClusterExecutor(both)
    asked = [Resources(gpus=1, accelerator="l40s"), Resources(gpus=2, accelerator="h100"), Resources(cpus=2)]
    for number, each in enumerate(asked):
        submit(executor, job(tmp_path, f"job{number}", resources=each))
        assert end(executor).error is None
    executor.close()
    assert "--gres=gpu:L40S:1" in options(standin, 1)
    assert "--gres=gpu:h100:2" in options(standin, 2)
    assert not any(each.startswith("--gres") for each in options(standin, 3)), "what needs no GPU goes anywhere"


def test_a_job_does_not_see_the_tokens_and_the_batch_job_that_it_is(
    executor: ClusterExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_private")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("OURS", "kept")
    build = submit(executor, job(tmp_path, "build", command=("sh", "-c", "env > out/environment")))
    assert end(executor).error is None
    seen = (Path(build.out) / "environment").read_text()
    assert "hf_private" not in seen
    assert "SLURM_JOB_ID" not in seen
    assert "OURS=kept" in seen
    assert "TOKENIZERS_PARALLELISM=false" in seen


@pytest.mark.seam
def test_stopping_a_job_that_runs(executor: ClusterExecutor, tmp_path: Path) -> None:
    long = submit(executor, job(tmp_path, "long", command=("sleep", "600")))
    time.sleep(0.5)
    executor.stop(long.id, 0.0)
    error = end(executor).error
    assert error is not None


@pytest.mark.parametrize(
    ("state", "failure", "message"),
    [
        ("TIMEOUT", FailureClass.TIMEOUT, "long: Slurm ended it at its time limit"),
        ("OUT_OF_MEMORY", FailureClass.OUT_OF_MEMORY, "long: Slurm ended it at its memory limit"),
        ("FAILED JobLaunchFailure", FailureClass.LOST, "long: lost with its node: Slurm reports JobLaunchFailure"),
    ],
)
def test_what_slurm_says_of_a_job_without_an_answer(
    executor: ClusterExecutor, standin: Path, tmp_path: Path, state: str, failure: FailureClass, message: str
) -> None:
    submit(executor, job(tmp_path, "long", command=("sleep", "600")))
    (standin / "state.1").write_text(state)
    error = end(executor).error
    assert error is not None
    assert (error.failure, error.message) == (failure, message)


def test_a_controller_that_is_away_for_a_while_ends_nothing(
    executor: ClusterExecutor, standin: Path, tmp_path: Path
) -> None:
    script = "until [ -e goes ]; do sleep 0.02; done"
    build = submit(executor, job(tmp_path, "build", command=("sh", "-c", script)))
    (standin / "refuse").write_text("slurm_load_jobs error: Unable to contact slurm controller")
    assert executor.wait(0.5) == []
    submit(executor, job(tmp_path, "refused"))
    error = end(executor).error
    assert error is not None
    assert error.failure is FailureClass.TRANSIENT
    assert error.message == "refused: sbatch: slurm_load_jobs error: Unable to contact slurm controller"
    (standin / "refuse").unlink()
    (Path(build.attempt) / "goes").touch()
    assert end(executor).error is None


def test_what_a_killed_pipeline_left_in_the_queue_is_waited_for_and_not_started_again(
    cluster: SlurmCluster, executor: ClusterExecutor, standin: Path, tmp_path: Path
) -> None:
    build = job(tmp_path, "build", command=("sh", "-c", "sleep 1; echo once >> out/result"))
    submit(ClusterExecutor(cluster), build)  # which then forgets it
    attempt = Path(build.attempt)
    cluster._known.clear()
    assert executor.adopt(attempt)
    executor.submit(build, [])
    assert end(executor).error is None
    assert (attempt / "out" / "result").read_text() == "once\n"
    assert len(list((standin / "jobs").iterdir())) == 1


def test_what_ended_while_nobody_looked_is_taken(
    cluster: SlurmCluster, executor: ClusterExecutor, standin: Path, tmp_path: Path
) -> None:
    build = job(tmp_path, "build", command=("sh", "-c", "echo once >> out/result"))
    submit(ClusterExecutor(cluster), build)
    answers = Path(f"{build.attempt}.cluster/answers.json")
    assert eventually(lambda: answers.exists() and '"failed"' in answers.read_text())
    (standin / "state.1").write_text("COMPLETED")
    cluster._known.clear()
    assert executor.adopt(Path(build.attempt))
    executor.submit(build, [])
    assert end(executor).error is None
    assert len(list((standin / "jobs").iterdir())) == 1


def test_without_slurm_or_such_a_node(standin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="the cluster has no node with b200; it has h100"):
        SlurmCluster([], ["b200"])
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match="--executor slurm needs sinfo"):
        SlurmCluster([])
