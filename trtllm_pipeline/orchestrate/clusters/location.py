"""The nodes and the executor of a request: this machine, or a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_pipeline.base import UsageError
from trtllm_pipeline.orchestrate.plan.planner import machine_of
from trtllm_pipeline.orchestrate.plan.request import LOCAL, RAY, SLURM, Request
from trtllm_pipeline.orchestrate.run.order import capacities
from trtllm_pipeline.orchestrate.run.scheduler import Capacity

if TYPE_CHECKING:
    from trtllm_pipeline.base import Machine
    from trtllm_pipeline.orchestrate.clusters.cluster import Cluster
    from trtllm_pipeline.orchestrate.matrix.validate import LoadedMatrix
    from trtllm_pipeline.orchestrate.run.executor import Executor


@dataclass(frozen=True, slots=True)
class Placement:
    """Machine, nodes and executor for stage runs."""

    machine: Machine
    """The machine that plans are made for: this one, or a node of a cluster."""
    nodes: Sequence[Capacity]
    """Capacities of the nodes. The first is this machine."""
    executor: Callable[[], Executor]
    """Creates an executor for one run of a plan."""


@contextmanager
def place_of(request: Request, loaded: LoadedMatrix) -> Iterator[Placement]:
    """Yield the placement of the request's stage runs. Raises UsageError if there is no such cluster."""
    if request.ray_address is not None and request.executor != RAY:
        raise UsageError("--ray-address needs --executor ray")
    if request.executor in (None, LOCAL):
        machine = machine_of(request)
        yield Placement(machine, capacities(machine), _executor_here)
        return
    if request.assume is not None:
        raise UsageError(
            "--assume describes a machine, --executor uses those of a cluster", hint="leave one of them out"
        )
    from trtllm_pipeline.orchestrate.clusters.cluster import ClusterExecutor
    from trtllm_pipeline.orchestrate.clusters.exchange import Exchange

    exchange = _exchange(request, loaded)
    cluster = _cluster(request, loaded)
    try:
        yield Placement(
            cluster.machine,
            [Capacity(0), *cluster.nodes],
            lambda: ClusterExecutor(cluster, None if exchange is None else Exchange(exchange)),
        )
    finally:
        cluster.close()


def _executor_here() -> Executor:
    from trtllm_pipeline.orchestrate.run.executor import Executor  # not needed by a plan

    return Executor()


def _exchange(request: Request, loaded: LoadedMatrix) -> str | None:
    """Return the URL for files of nodes that do not share the workspace. None if they share it."""
    url: str | None = loaded.of_cluster("exchange")
    if url is not None and request.executor == SLURM:
        raise UsageError(
            "settings.cluster.exchange is for --executor ray", hint="Slurm nodes need the workspace at the same path"
        )
    return url if url is None or "://" in url else str((loaded.path.parent / Path(url).expanduser()).absolute())


def _cluster(request: Request, loaded: LoadedMatrix) -> Cluster:
    accelerators = loaded.gpu_types
    if accelerator := loaded.of_cluster("accelerator"):
        if accelerators:
            raise UsageError(
                "the matrix has an axis of GPU types, but settings.cluster.accelerator sets one type for all cells",
                hint="leave one of them out",
            )
        accelerators = (accelerator,)
    if request.executor == SLURM:
        from trtllm_pipeline.orchestrate.clusters.slurm_cluster import SlurmCluster

        return SlurmCluster(loaded.of_cluster("sbatch"), accelerators)
    try:
        from trtllm_pipeline.orchestrate.clusters.ray_cluster import RayCluster
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--executor ray needs the package {error.name}", hint="pip install 'trtllm-pipeline[ray]'"
        ) from error
    return RayCluster(request.ray_address, accelerators)
