"""`python -m trtllm_pipeline.tensorrt.worker JOB.json [MODULE:FUNCTION]`: one program of ours, on one attempt at a stage run.

Every stage's own program is started this way, and so are helpers that run before it, which are named. It imports what
the program needs and nothing of the command line. Why it failed is left in `failure.json` beside the log.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trtllm_pipeline.base import FailureClass, Json, PipelineError, StageError, disk, terminal, write_json
from trtllm_pipeline.tensorrt.stage import failure, params
from trtllm_pipeline.tensorrt.stage.base import JOB, StageContext


def _named(path: str) -> Any:
    """What "module:name" means."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def run_program(program: str, stage: str, context: StageContext[Any]) -> None:
    """Run `program`, a "module:function", in this process. Raises PipelineError, also for a full disk or memory."""
    try:
        _named(program)(context)
    except PipelineError:
        raise
    except MemoryError as error:
        raise StageError(f"{stage}: ran out of memory", failure=FailureClass.OUT_OF_MEMORY) from error
    except OSError as error:
        told = disk.no_room(error, context.out)
        if told is None:
            raise
        raise StageError(f"{stage}: {told}", failure=FailureClass.USER, hint=disk.hint(error)) from error


def write_job(stage: str, program: str | None, context: StageContext[Any]) -> Path:
    """Write the part of a job file that `main` reads; returns its path."""
    job: dict[str, Json] = {"stage": stage, "program": program, "params_class": params.class_name(context.params)}
    job["params"] = params.to_json(context.params)
    for name, paths in (("inputs", context.inputs), ("files", context.files)):
        job[name] = {each: str(path) for each, path in paths.items()}
    path = context.attempt / JOB
    write_json(path, {**job, "out": str(context.out), "attempt": str(context.attempt)})
    return path


def context_of(job: Mapping[str, Any]) -> StageContext[Any]:
    """What a job file gives the stage's program."""
    return StageContext(
        params=params.load(_named(job["params_class"]), job["params"]),
        inputs={name: Path(path) for name, path in job["inputs"].items()},
        files={name: Path(path) for name, path in job["files"].items()},
        out=Path(job["out"]),
        attempt=Path(job["attempt"]),
    )


def main(argv: Sequence[str]) -> int:
    """Run a job's program, or another on the same job. Returns the exit code."""
    terminal.clean_streams()
    path, *other = argv
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    context = context_of(job)
    if cpus := job.get("cpus"):
        os.sched_setaffinity(0, cpus)
    try:
        run_program(other[0] if other else job["program"], job["stage"], context)
    except PipelineError as error:
        # Anything but a StageError that is said on purpose is about the user's files: prompts, calibration rows.
        user = FailureClass.USER
        told = error if isinstance(error, StageError) else StageError(error.message, failure=user, hint=error.hint)
        failure.write(context.attempt, told)
        print(f"error: {error.message}", file=sys.stderr)  # noqa: T201 - the stage's log
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    terminal.start()
    sys.exit(main(sys.argv[1:]))
