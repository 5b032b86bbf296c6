"""Agents as Ray tasks (`--executor ray`). Needs the extra [ray]. Imported only with that option.

Every task requests the CPUs, GPUs and accelerator type of its stage run. It prefers the node that the scheduler chose and
uses another if that one is gone, so a lost node costs only the tasks on it. Ray itself does not retry.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import ray
from ray._private import worker
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trtllm_pipeline.base import FailureClass, Machine, StageError, UsageError, gpus, probe
from trtllm_pipeline.orchestrate.clusters.cluster import ClusterNode, KnownNodes, chosen, machine_of
from trtllm_pipeline.orchestrate.run.executor import Job

_TYPE: Final = "accelerator_type:"
"""Prefix of the node resource that names its GPU type."""
_ON_THIS_MACHINE: Final = "auto"
"""Ray's address for the cluster of this machine."""
_CONNECT_S: Final = 10.0
_PROBE_S: Final = 120.0
_LIST_S: Final = 5.0
"""Interval between node listings."""
_SAME_ENVIRONMENT: Final = "every node needs this release of trtllm-pipeline, in an environment at the same path"


class RayCluster:
    """The nodes of a Ray cluster, or those with the given accelerator types."""

    def __init__(self, address: str | None, accelerators: Sequence[str] = ()) -> None:
        """Connect. Raises UsageError if there is no cluster, or no such node."""
        # Ray prints node messages to stdout, which is reserved for data.
        vars(worker)["print_to_stdstream"] = lambda *_args, **_more: None
        where = address or os.environ.get("RAY_ADDRESS") or _ON_THIS_MACHINE
        terminated = signal.getsignal(signal.SIGTERM)
        try:
            _check_listening(where)
            ray.init(where, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError) as error:
            raise UsageError(
                f"no Ray cluster at {where}: {str(error).splitlines()[0]}",
                hint="start one with `ray start --head`, and name it with --ray-address HOST:PORT",
            ) from error
        finally:
            signal.signal(signal.SIGTERM, terminated)  # Ray's own handler would end the pipeline at once
        try:
            self._known: dict[str, tuple[str, ClusterNode]] = {}
            """Node name -> Ray's id and the node."""
            nodes = chosen(self._look(), accelerators)
            self.changes = KnownNodes(nodes, self._look, _LIST_S).changes
            self.machine = machine_of(nodes, accelerators, self._machine)
        except BaseException:
            self.close()
            raise
        self.nodes = [node.capacity for node in nodes]
        self._tickets: dict[Any, str] = {}
        self._started = 0

    def _look(self) -> list[ClusterNode]:
        alive = [(str(node["NodeID"]), _node(node)) for node in ray.nodes() if node["Alive"]]
        self._known |= {node.name: (node_id, node) for node_id, node in alive}
        return [node for _, node in alive]

    def _machine(self, node: ClusterNode) -> Machine:
        try:
            machine: Machine = ray.get(
                _PROBE.options(scheduling_strategy=self._on(node.name)).remote(), timeout=_PROBE_S
            )
        except RayError as error:
            raise UsageError(
                f"a node of the Ray cluster cannot be used: {_summary(error)}", hint=_SAME_ENVIRONMENT
            ) from error
        return machine

    def _on(self, node: str) -> NodeAffinitySchedulingStrategy:
        return NodeAffinitySchedulingStrategy(self._known[node][0], soft=True)

    def start(self, job: Job, command: Sequence[str]) -> str:
        node, need = self._known[job.node][1], job.resources
        task = _AGENT.options(
            name=job.stage,
            num_cpus=node.cpus if need.exclusive.alone else need.cpus,
            num_gpus=need.gpus,
            accelerator_type=node.accelerator if need.gpus else None,
            scheduling_strategy=self._on(job.node),
        ).remote(command)
        self._started += 1
        self._tickets[task] = f"{self._started}"
        return self._tickets[task]

    def over(self, timeout_s: float) -> Mapping[str, StageError | None]:
        if not self._tickets:
            time.sleep(timeout_s)
            return {}
        known = list(self._tickets)
        ready, _ = ray.wait(known, num_returns=1, timeout=timeout_s)
        if ready:
            ready, _ = ray.wait(known, num_returns=len(known), timeout=0)
        return {self._tickets.pop(task): _lost(task) for task in ready}

    def left(self, attempt: Path) -> str | None:  # noqa: ARG002 - the signature of `Cluster`
        """See `Cluster`: Ray ends an invocation's tasks with it."""
        return None

    def cancel(self, tickets: Sequence[str]) -> None:
        """See `Cluster`. If an agent's process is gone, its guardian ends its processes."""
        for task in [task for task, ticket in self._tickets.items() if ticket in tickets]:
            ray.cancel(task, force=True)

    def close(self) -> None:
        ray.shutdown()


def _check_listening(address: str) -> None:
    """Raise OSError if no server listens, since Ray would retry for minutes, and ValueError for an invalid address."""
    if address == _ON_THIS_MACHINE or "://" in address:
        return
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 2**16):
        raise ValueError("expected HOST:PORT")
    socket.create_connection((host, int(port)), _CONNECT_S).close()


def _probe_node() -> Machine:
    os.environ.pop(gpus.MASK_VARIABLE, None)  # all GPUs of the node: the task has none
    return probe.this_machine()


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Return the exit code of an agent, and its last line of stderr."""
    # An extra process in between: Ray kills the children of a worker that ends, but a guardian must outlive its agent.
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    return done.returncode, next(reversed(done.stderr.strip().splitlines()), "")


_PROBE: Final = ray.remote(num_cpus=0)(_probe_node)
_AGENT: Final = ray.remote(max_retries=0)(_run)


def _node(node: Mapping[str, Any]) -> ClusterNode:
    has = node["Resources"]
    accelerator = next((name.removeprefix(_TYPE) for name in has if name.startswith(_TYPE)), None)
    name = f"{node['NodeManagerHostname']}-{node['NodeID'][:8]}"  # one host may run several nodes
    return ClusterNode(name, int(has.get("CPU", 0)), int(has.get("GPU", 0)), accelerator)


def _lost(task: Any) -> StageError | None:
    """Return why an agent was lost or failed. None if it ended normally."""
    try:
        code, message = ray.get(task)
    except RayTaskError as error:
        code, message = 1, _summary(error)
    except RayError as error:
        return StageError(f"lost with its node: {_summary(error)}", failure=FailureClass.LOST)
    if not code:
        return None
    if code == 1:  # from Python: the node has no such environment, or a different one
        return StageError(f"its agent failed: {message}", failure=FailureClass.USER, hint=_SAME_ENVIRONMENT)
    how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
    return StageError(f"its agent failed: {message or how}", failure=FailureClass.TRANSIENT)


def _summary(error: RayError) -> str:
    """Return the last line of a traceback, or the first sentence of another message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1] if isinstance(error, RayTaskError) else lines[0].split(". ")[0]
