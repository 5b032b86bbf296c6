"""The worker as a program of its own, under whichever Python has Model Optimizer.

That is often not the pipeline's: TensorRT-LLM's environment holds versions of packages that the pipeline cannot use, and
the other way round. So the worker is started by the path of its file (`__main__.py` says how its modules are found), and
all that it imports beyond the standard library are packages that Model Optimizer needs itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from trtllm_pipeline.errors import PipelineError
from trtllm_pipeline.stages.base import Work, write_failure

_PROGRAM: Final = Path(__file__).resolve().with_name("__main__.py")


def command(work: Work, python: str) -> list[str]:
    """The command line that does a stage's work under the interpreter `python`."""
    job = {
        "params": dict(work.params),
        "inputs": {name: str(path) for name, path in work.inputs.items()},
        "files": {name: str(path) for name, path in work.files.items()},
        "out": str(work.out),
        "attempt": str(work.attempt),
    }
    return [python, str(_PROGRAM), "--job", json.dumps(job, sort_keys=True)]


def main(argv: Sequence[str] | None = None) -> int:
    """The program. What went wrong goes into the attempt's folder as well, as for every stage."""
    parser = argparse.ArgumentParser(prog="model_optimizer", description="Quantize a model with Model Optimizer.")
    parser.add_argument("--job", required=True, help="JSON: params, inputs, files, out, attempt")
    work = _parse(parser.parse_args(argv).job)
    try:
        from trtllm_pipeline.toolchains.model_optimizer import worker

        worker.run(work)
    except PipelineError as error:
        write_failure(work.attempt, error)
        print(f"error: {error.message}", file=sys.stderr)  # noqa: T201 - the stage's log
        return 1
    return 0


def _parse(text: str) -> Work:
    job = json.loads(text)
    return Work(
        params=job["params"],
        inputs={name: Path(path) for name, path in job["inputs"].items()},
        files={name: Path(path) for name, path in job["files"].items()},
        out=Path(job["out"]),
        attempt=Path(job["attempt"]),
    )
