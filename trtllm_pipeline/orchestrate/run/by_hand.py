"""Runs one stage, or a job file's commands again, in the foreground: no store, no retries.

GPUs are leased as in a run, so other invocations do not use them, and no task starts alongside a measurement.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, Final

from trtllm_pipeline.base import Exclusive, FailureClass, Scope, StageError, UsageError, probe, reading, without_secrets
from trtllm_pipeline.base import gpus as gpu_devices
from trtllm_pipeline.orchestrate.run.executor import Job, failure_of
from trtllm_pipeline.orchestrate.store.claims import WaitingPlace, enter_standing, lease_machine, machine_users
from trtllm_pipeline.tensorrt import JOB, OUT, SERVICE_FILE, Stage, StageContext, out_of_memory, run_program, write_job

_POLL_S: Final = 0.1
_STDERR: Final = 2
"""The commands print to stderr, since their output is not data."""


def run(stage: Stage, context: StageContext[Any], show: Callable[[Sequence[str]], None]) -> None:
    """Run a stage's external programs, each passed to `show` first, with output to stderr; then its own. Raises StageError."""
    rule = getattr(context.params, "exclusive", Exclusive.NONE) or Exclusive.MACHINE
    with _leased(stage.gpus(context), stage.name, stage.scope, Exclusive(rule), {}) as (environment, held):
        if stage.commands is not None:
            write_job(stage.name, stage.program, context)  # read by our own programs among them
            for command in stage.commands(context, probe.this_machine()):
                show(command)
                if code := _call(stage.name, command, environment, held):
                    raise StageError(f"{stage.name}: {command[0]} ended with exit code {code}; see its output above")
        if stage.program is not None:
            before = os.environ.copy()
            os.environ.update(environment)  # read by CUDA at its first use, and by child processes
            try:
                run_program(stage.program, stage.name, context)
            finally:
                os.environ.clear()
                os.environ.update(before)


def replay(job: Job, attempt: Path, inputs: Mapping[str, Path], show: Callable[[tuple[str, ...]], None]) -> Path:
    """Run a job's commands in the empty directory `attempt` with some inputs replaced. `show` gets each command.

    Returns the output directory. The store is only read. Raises UsageError, and StageError for the first
    command that fails.
    """
    if unknown := [name for name in inputs if name not in job.inputs]:
        raise UsageError(f"--input {unknown[0]}: the job has no such input", hint=f"one of {', '.join(job.inputs)}")
    _check_program(job)
    replaced = {job.inputs[name]: folder for name, folder in job.viewed.items()}
    replaced |= {job.inputs[name]: str(given.absolute()) for name, given in inputs.items()}
    replaced |= {job.out: str(attempt / OUT), job.attempt: str(attempt)}

    def moved(word: str) -> str:
        for old, new in replaced.items():
            word = new + word[len(old) :] if word == old or word.startswith(f"{old}/") else word
        return word

    (attempt / OUT).mkdir()
    job = replace(
        job,
        commands=tuple(tuple(map(moved, command)) for command in job.commands),
        inputs={name: moved(given) for name, given in job.inputs.items()},
        cpus=(),  # from another machine, or used by others by now
        viewed={},
        out=moved(job.out),
        attempt=str(attempt),
    )
    job.write(attempt / JOB)
    rule = job.resources.exclusive
    with _leased(len(job.gpus), job.stage, job.scope, rule, job.environment) as (environment, held):
        for command in job.commands:
            show(command)
            before = out_of_memory.counts()
            if code := _call(job.stage, command, environment, held):
                failure = failure_of(job, code, timed_out=False, before=before)
                failure.log = None  # its output went to stderr
                raise failure
    return Path(job.out)


def _check_program(job: Job) -> None:
    """Raise UsageError for a job of another release, whose program is not in this one."""
    if job.program is None:
        return
    module = job.program.partition(":")[0]
    try:
        known = find_spec(module) is not None
    except ModuleNotFoundError:  # its package
        known = False
    if not known:
        raise UsageError(
            f"{job.id}: this release has no program {job.program}, so another release wrote the job",
            hint="run the stage again: pipeline stage replay works with jobs of the same release",
        )


@contextmanager
def _leased(
    gpus: int | None, stage: str, scope: Scope, rule: Exclusive, environment: Mapping[str, str]
) -> Iterator[tuple[Mapping[str, str], Sequence[int]]]:
    """Lease this machine and this many of its GPUs (None: all), waiting for them if necessary.

    A measurement gets the machine as `rule` specifies, except for managed servers. A service counts as one of these.
    Yields `environment` with these GPUs, and the file descriptors that the stage's processes inherit.
    """
    known = [] if gpus == 0 else [gpu.uuid for gpu in probe.this_machine().gpus]
    wanted = tuple(known[:gpus])
    announced, service = False, scope is Scope.SERVICE
    rule, enter = (Exclusive.NONE, enter_standing) if service else (rule, None)
    place = WaitingPlace()
    try:
        while (
            leased := lease_machine(
                wanted, exclusive=rule, others=known, enter=enter, beside_standing=not service, place=place
            )
        ) is None:
            if not announced:
                users = machine_users(known, exclusive=rule, beside_standing=True, place=place)
                who = " and ".join(users) or "another invocation or a managed server"
                print(f"{stage} waits: {who} is using {'these GPUs' if known else 'this machine'}", file=sys.stderr)  # noqa: T201
                announced = True
            time.sleep(_POLL_S)
    finally:
        place.leave()
    claims, names = leased
    try:
        shown = {gpu_devices.MASK_VARIABLE: ",".join(names)} if names else {}
        yield {**environment, **shown}, [claim.fd for claim in claims]
    finally:
        for claim in claims:
            claim.release()


def _call(stage: str, command: Sequence[str], environment: Mapping[str, str], held: Sequence[int]) -> int:
    try:
        return subprocess.call(
            command, stdout=_STDERR, env={**without_secrets(os.environ), **environment}, pass_fds=held
        )
    except OSError as error:
        why = f"{stage}: {command[0]} cannot be started: {error.strerror}"
        raise StageError(why, failure=FailureClass.USER) from error


@contextmanager
def scratch(name: str) -> Iterator[Path]:
    """A temporary directory. It is kept if an error names a log in it."""
    folder = Path(tempfile.mkdtemp(prefix=f"pipeline-{name}-"))
    kept = False
    try:
        yield folder
    except StageError as error:
        kept = error.log is not None and error.log.is_relative_to(folder)
        raise
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def when_ready(context: StageContext[Any], show: Callable[[Mapping[str, str]], None]) -> Iterator[None]:
    """Pass the endpoints of a service to `show` as soon as it has written them."""
    path = context.attempt / SERVICE_FILE

    def look(_signal: int, _frame: FrameType | None) -> None:
        if path.exists():
            show(json.loads(reading.read_bytes(path)))
        else:
            signal.setitimer(signal.ITIMER_REAL, _POLL_S)

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _POLL_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # before the handler is removed: an unhandled alarm kills
        signal.signal(signal.SIGALRM, before)
