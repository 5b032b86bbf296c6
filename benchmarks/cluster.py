"""What a stage run costs on a Ray cluster beyond bare Ray: the same command as stage runs, and as tasks that only call it.

    ray start --head --port=6379
    python benchmarks/cluster.py --address 127.0.0.1:6379 [--jobs 40] [--seconds 0] [--format json]

Both fill the cluster's CPUs. A stage run is an attempt's folder with its job, orders and answers, a process of its own for the
agent, and the guardian around the command; bare Ray has none of these. Artifacts are not published here.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path

import ray

from trtllm_pipeline.domain import Scope, StageRunId
from trtllm_pipeline.execution.cluster import ClusterExecutor
from trtllm_pipeline.execution.executor import Ended, Job
from trtllm_pipeline.execution.ray_cluster import RayCluster
from trtllm_pipeline.stages.base import JOB, OUT


def bare(command: tuple[str, ...], number: int) -> float:
    """Seconds that `number` tasks take that only run the command."""
    task = ray.remote(num_cpus=1)(subprocess.call)
    began = time.monotonic()
    codes = ray.get([task.remote(command) for _ in range(number)])
    took = time.monotonic() - began
    assert not any(codes)
    return took


def stage_runs(cluster: RayCluster, command: tuple[str, ...], number: int, folder: Path) -> float:
    """The same, as stage runs."""
    executor = ClusterExecutor(cluster)
    jobs = []
    for index in range(number):
        attempt = folder / f"{index}.1"
        (attempt / OUT).mkdir(parents=True)
        node = cluster.nodes[index % len(cluster.nodes)].node
        job = Job(
            id=StageRunId(f"{index}"),
            stage="toy",
            toolchain="toy",
            fingerprint=f"{index}",
            scope=Scope.ARTIFACT,
            commands=(command,),
            environment={},
            program=None,
            params={},
            inputs={},
            files={},
            timeout_s=600.0,
            node=node,
            out=str(attempt / OUT),
            attempt=str(attempt),
            params_class="",
            section="toy",
        )
        job.write(attempt / JOB)
        jobs.append(job)
    began = time.monotonic()
    for job in jobs:
        executor.submit(job, [])
    ended: list[Ended] = []
    while len(ended) < number:
        ended += [event for event in executor.wait(1.0) if isinstance(event, Ended)]
    took = time.monotonic() - began
    assert not [event.error for event in ended if event.error is not None]
    executor.close()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--address", required=True)
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=0.0, help="that the command sleeps")
    parser.add_argument("--format", choices=["text", "json"], default="text")
    given = parser.parse_args()
    command = ("sleep", str(given.seconds))
    cluster = RayCluster(given.address)
    with tempfile.TemporaryDirectory() as folder:
        bare(command, 2 * sum(node.cpus for node in cluster.nodes))  # Ray has started its workers
        rows = [bare(command, given.jobs), stage_runs(cluster, command, given.jobs, Path(folder))]
    cluster.close()
    row = {"jobs": given.jobs, "cpus": sum(node.cpus for node in cluster.nodes), "seconds": given.seconds}
    row |= {"bare_ms": 1000 * rows[0] / given.jobs, "stage_run_ms": 1000 * rows[1] / given.jobs}
    row["ratio"] = rows[1] / rows[0]
    print(
        json.dumps(row) if given.format == "json" else "  ".join(f"{name} {value:,.4g}" for name, value in row.items())
    )


if __name__ == "__main__":
    main()
