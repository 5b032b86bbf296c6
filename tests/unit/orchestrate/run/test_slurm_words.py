"""What the end of a job means, in the words of squeue."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from trtllm_pipeline.base.errors import FailureClass
from trtllm_pipeline.orchestrate.clusters import slurm_cluster
from trtllm_pipeline.orchestrate.clusters.slurm_cluster import SlurmCluster

LOST = "lost with its node: Slurm reports"


@pytest.mark.parametrize(
    ("line", "failure", "message"),
    [
        ("7|NODE_FAIL|NodeDown|/w/build.1", FailureClass.LOST, f"{LOST} NODE_FAIL"),
        ("7|FAILED|JobLaunchFailure|/w/build.1", FailureClass.LOST, f"{LOST} JobLaunchFailure"),
        ("7|FAILED|NonZeroExitCode|/w/build.1", FailureClass.USER, "Slurm reports FAILED"),
        ("7|COMPLETED|None|/w/build.1", None, None),
        ("8|FAILED|NonZeroExitCode|/w/other.1", None, None),
    ],
)
def test_a_job_that_its_node_lost_is_not_the_users_fault(
    line: str,
    failure: FailureClass | None,
    message: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slurm_cluster, "_run_slurm", lambda _command: f"{line}\n")
    cluster = object.__new__(SlurmCluster)
    cluster._known, cluster._asked_s = {"7": str(tmp_path)}, -math.inf
    error = cluster.over(0.0)["7"]
    assert (error and error.failure, error and error.message) == (failure, message)


def test_a_job_that_waits_or_runs_has_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for state in ("PENDING|Resources", "RUNNING|None", "COMPLETING|None"):
        monkeypatch.setattr(slurm_cluster, "_run_slurm", lambda _command, state=state: f"7|{state}|/w/build.1\n")
        cluster = object.__new__(SlurmCluster)
        cluster._known, cluster._asked_s = {"7": str(tmp_path)}, -math.inf
        assert cluster.over(0.0) == {}
