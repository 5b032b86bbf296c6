"""The commands of a job file again, in another folder: `pipeline exec`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from trtllm_pipeline.errors import FailureClass, StageError, UsageError
from trtllm_pipeline.execution.executor import failure_of, read_job
from trtllm_pipeline.processes import out_of_memory
from trtllm_pipeline.stages.base import JOB, OUT

_STDERR: Final = 2
"""What the commands print is no data: stdout has the folder alone."""


def replay(path: Path, attempt: Path, inputs: Mapping[str, Path], show: Callable[[tuple[str, ...]], None]) -> Path:
    """Run a job's commands in the empty folder `attempt`, some of its inputs replaced; `show` is told each.

    Returns the folder with what they made. The store is only read. Raises UsageError, and StageError for the first
    command that fails.
    """
    job = read_job(path)
    if unknown := [name for name in inputs if name not in job.inputs]:
        raise UsageError(f"--input {unknown[0]}: the job has no such input", hint=f"one of {', '.join(job.inputs)}")
    replaced = {job.inputs[name]: str(given.absolute()) for name, given in inputs.items()}
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
        out=moved(job.out),
        attempt=str(attempt),
    )
    job.write(attempt / JOB)
    for command in job.commands:
        show(command)
        before = out_of_memory.counts()
        try:
            code = subprocess.call(command, stdout=_STDERR, env={**os.environ, **job.environment})
        except OSError as error:
            raise StageError(
                f"{job.stage}: {command[0]} cannot be started: {error.strerror}", failure=FailureClass.USER
            ) from error
        if code:
            failure = failure_of(job, code, timed_out=False, before=before)
            failure.log = None  # what it said went to stderr
            raise failure
    return Path(job.out)
