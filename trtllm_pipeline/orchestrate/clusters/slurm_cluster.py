"""Agents as Slurm jobs (`--executor slurm`), using sbatch, squeue and scancel; sinfo and srun describe the nodes.

A job requests the CPUs and GPUs of its stage run, and Slurm chooses the node. It outlives the pipeline. Its comment names
the attempt, so that the next invocation finds it.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from trtllm_pipeline.base import FailureClass, Machine, StageError, UsageError, model, reading
from trtllm_pipeline.orchestrate.clusters import agent
from trtllm_pipeline.orchestrate.clusters.cluster import ClusterNode, KnownNodes, chosen, machine_of
from trtllm_pipeline.orchestrate.run.executor import Job

_POLL_S: Final = 2.0
"""Interval between requests to Slurm's controller, which all users share."""
_LIST_S: Final = 60.0
"""Interval between node listings."""
_COMMAND_S: Final = 60.0
_OUTPUT: Final = "slurm.log"
"""Output of the batch script, in the directory of an attempt's orders."""
_USABLE: Final = ("idle", "mixed", "allocated", "completing", "reserved", "planned")
_GPUS: Final = re.compile(r"\bgpu:(?:([^:,(]+):)?(\d+)")
_PRIVATE: Final = re.compile("TOKEN(?!IZER)|SECRET|PASSWORD|CREDENTIAL|_KEY$")
"""Names of secret variables: Slurm stores the environment of jobs in files."""
_PARTITION: Final = re.compile(r"(?:--partition|-p)[= ]?(.+)")
_SAME_ENVIRONMENT: Final = "every node needs this workspace and this Python environment at the same path"


class _Entry(NamedTuple):
    """A line of the queue."""

    ticket: str
    state: str
    reason: str
    comment: str


class SlurmCluster:
    """The nodes of a partition, or those with the given accelerator types."""

    def __init__(self, options: Sequence[str], accelerators: Sequence[str] = ()) -> None:
        """Inspect the cluster. `options` are for sbatch. Raises UsageError if Slurm or such a node is missing."""
        self._options = tuple(options)
        partitions = [named[1] for option in options if (named := _PARTITION.fullmatch(option))]
        listing = [
            "sinfo",
            "--Node",
            "--noheader",
            "--format=%N|%c|%G|%T",
            *(f"--partition={name}" for name in partitions),
        ]

        def listed() -> Iterable[ClusterNode]:
            return dict.fromkeys(_listed(_run_slurm(listing)))  # a node in two partitions is listed twice

        nodes = chosen(listed(), accelerators)
        self.changes = KnownNodes(nodes, listed, _LIST_S).changes
        self._spelt = {node.type: node.accelerator for node in nodes}
        """GPU type in lower case -> Slurm's spelling. None -> the default type."""
        self._spelt[None] = nodes[0].accelerator
        self.machine = machine_of(nodes, accelerators, self._machine)
        self.nodes = [node.capacity for node in nodes]
        self._known: dict[str, str] = {}
        """Ticket -> output directory, for all jobs that have not ended."""
        self._asked_s = self._left_s = -math.inf
        self._left: list[_Entry] = []

    def _machine(self, node: ClusterNode) -> Machine:
        """Return the description of a node of this type. Waits for a small job to be scheduled."""
        gres = _gres(min(1, node.gpus), node.accelerator)
        command = ["srun", "--quiet", "--ntasks=1", "--job-name=look", *gres, *self._options, *_AGENT]
        try:
            return model.from_json(json.loads(_run_slurm(command, limit_s=None)))
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(f"a node of the cluster cannot be used: {error}", hint=_SAME_ENVIRONMENT) from error

    def start(self, job: Job, command: Sequence[str]) -> str:
        need, folder = job.resources, agent.folder_of(Path(job.attempt))
        script = folder / "job.sh"
        script.write_text(_SCRIPT, encoding="utf-8")
        submitted = [
            "sbatch",
            "--parsable",
            "--no-requeue",
            "--ntasks=1",
            f"--cpus-per-task={max(1, need.cpus)}",
            f"--job-name={job.stage}",
            f"--comment={job.attempt}",
            f"--output={folder / _OUTPUT}",
            f"--chdir={job.attempt}",
            *_gres(need.gpus, self._spelt[need.accelerator]),
            *(["--exclusive"] if need.exclusive.alone else []),
            *self._options,
            str(script),
            *command,
        ]
        ticket = _run_slurm(submitted).strip().split(";")[0]
        self._known[ticket] = str(folder)
        return ticket

    def over(self, timeout_s: float) -> Mapping[str, StageError | None]:
        """See `Cluster`. Queries Slurm at most every two seconds, for all jobs at once."""
        now = time.monotonic()
        if not self._known or now - self._asked_s < _POLL_S:
            time.sleep(timeout_s)
            return {}
        self._asked_s = now
        try:
            entries = {entry.ticket: entry for entry in _queue()}
        except UsageError:  # the controller is down or restarting: its jobs continue
            return {}
        return {
            ticket: _why(entry, Path(self._known.pop(ticket)))
            for ticket in list(self._known)
            if (entry := entries.get(ticket, _FORGOTTEN)).state not in _GOING_ON
        }

    def left(self, attempt: Path) -> str | None:
        if time.monotonic() - self._left_s > _POLL_S:
            self._left, self._left_s = _queue(), time.monotonic()
        for entry in self._left:
            if entry.comment == str(attempt) and entry.state in _GOING_ON:
                self._known[entry.ticket] = str(agent.folder_of(attempt))
                return entry.ticket
        return None

    def cancel(self, tickets: Sequence[str]) -> None:
        if tickets:
            with suppress(UsageError):  # they may have ended, which `over` reports
                _run_slurm(["scancel", *tickets])

    def close(self) -> None:
        """See `Cluster`."""


def _gres(gpus: int, accelerator: str | None) -> list[str]:
    return [f"--gres=gpu:{accelerator}:{gpus}" if accelerator else f"--gres=gpu:{gpus}"] if gpus else []


_AGENT: Final = (sys.executable, "-m", agent.__name__)
_SCRIPT: Final = '#!/bin/sh\nexec "$@"\n'
_GOING_ON: Final = frozenset((
    "PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING",
    "REQUEUED",
))  # fmt: skip
_LOST: Final = frozenset(["NODE_FAIL", "BOOT_FAIL", "PREEMPTED"])
_NOT_LAUNCHED: Final = "JobLaunchFailure"
"""Reason of a failed job whose node did not start it, or lost its daemon meanwhile."""
_FORGOTTEN: Final = _Entry("", "COMPLETED", "None", "")
"""A job that ended so long ago that the queue does not list it."""


def _run_slurm(command: Sequence[str], limit_s: float | None = _COMMAND_S) -> str:
    """Return the output of a Slurm command. Raises UsageError."""
    environment = {name: value for name, value in os.environ.items() if not _PRIVATE.search(name)}
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError as error:
        raise UsageError(
            f"--executor slurm needs {command[0]}", hint="run it on a machine that submits jobs"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"{command[0]} did not respond within {limit_s:g} s") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it ended with exit code {done.returncode}"]
        raise UsageError(
            f"{command[0]}: {lines[-1].removeprefix(f'{command[0]}: ')}",
            hint="settings.cluster.sbatch has the job options; `sinfo` shows partitions and nodes",
        )
    return done.stdout


def _queue() -> list[_Entry]:
    """Return this user's jobs, including those that ended in the last minutes. Raises UsageError."""
    lines = _run_slurm(["squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%r|%k"]).splitlines()
    return [_Entry(*line.split("|", 3)) for line in lines if line.count("|") >= 3]


def _listed(text: str) -> Iterator[ClusterNode]:
    """Yield the usable nodes in sinfo's output. The first of a node's GPU types counts."""
    for line in text.splitlines():
        name, cpus, resources, state = line.split("|")
        if state.rstrip("*~#!%$@^-+").lower() in _USABLE:
            gpus = _GPUS.search(resources)
            yield ClusterNode(name, int(cpus), int(gpus[2]) if gpus else 0, gpus[1] if gpus else None)


def _why(entry: _Entry, folder: Path) -> StageError | None:
    """Return why a job that has ended has no answer from its agent. None if it ended normally."""
    state = entry.state
    if state == "COMPLETED":
        return None
    if state in _LOST or entry.reason == _NOT_LAUNCHED:
        reported = state if state in _LOST else entry.reason
        return StageError(f"lost with its node: Slurm reports {reported}", failure=FailureClass.LOST)
    if state == "TIMEOUT":
        hint = "raise --time in settings.cluster.sbatch"
        return StageError("Slurm ended it at its time limit", failure=FailureClass.TIMEOUT, hint=hint)
    if state == "OUT_OF_MEMORY":
        hint = "raise --mem in settings.cluster.sbatch"
        return StageError("Slurm ended it at its memory limit", failure=FailureClass.OUT_OF_MEMORY, hint=hint)
    try:
        lines = reading.read_text(folder / _OUTPUT, errors="replace").strip().splitlines()[-1:]
    except OSError:
        lines = []
    why = f"Slurm reports {state}" + "".join(f"; its agent printed: {line}" for line in lines)
    return StageError(why, failure=FailureClass.USER, hint=None if state == "CANCELLED" else _SAME_ENVIRONMENT)
