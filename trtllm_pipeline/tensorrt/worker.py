"""`python -m trtllm_pipeline.tensorrt.worker JOB.json [MODULE:FUNCTION]`: runs a stage's program on one attempt.

Every stage's own program is started this way. So are helpers that run before it, by name. The process only imports what
the program needs, not the command line. A failure is recorded in `failure.json` next to the log.
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


def named(path: str) -> Any:
    """The object that "module:name" refers to."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def run_program(program: str, stage: str, context: StageContext[Any]) -> None:
    """Run `program`, a "module:function", in this process. Raises PipelineError, also for a full disk or memory."""
    try:
        named(program)(context)
    except PipelineError:
        raise
    except MemoryError as error:
        raise StageError(f"{stage}: ran out of memory", failure=FailureClass.OUT_OF_MEMORY) from error
    except OSError as error:
        reason = disk.no_room(error, context.out)
        if reason is None:
            raise
        raise StageError(f"{stage}: {reason}", failure=FailureClass.USER, hint=disk.hint(error)) from error


def write_job(stage: str, program: str | None, context: StageContext[Any]) -> Path:
    """Write the part of a job file that `main` reads. Returns its path."""
    job: dict[str, Json] = {"stage": stage, "program": program, "params_class": params.class_name(context.params)}
    job["params"] = params.to_json(context.params)
    for name, paths in (("inputs", context.inputs), ("files", context.files)):
        job[name] = {each: str(path) for each, path in paths.items()}
    path = context.attempt / JOB
    write_json(path, {**job, "out": str(context.out), "attempt": str(context.attempt)})
    return path


def context_of(job: Mapping[str, Any]) -> StageContext[Any]:
    """The context that a job file describes."""
    return StageContext(
        params=params.load(named(job["params_class"]), job["params"]),
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
        # Any error other than a deliberate StageError is about the user's files: prompts, calibration rows.
        user = FailureClass.USER
        failed = error if isinstance(error, StageError) else StageError(error.message, failure=user, hint=error.hint)
        failure.write(context.attempt, failed)
        print(f"error: {error.message}", file=sys.stderr)  # noqa: T201 - the stage's log
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    terminal.start()
    sys.exit(main(sys.argv[1:]))
