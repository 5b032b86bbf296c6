"""`pipeline exec job.json`: run one attempt's commands again, by hand."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Final

from trtllm_pipeline.cli import options
from trtllm_pipeline.cli.output import emit, emit_json, note
from trtllm_pipeline.errors import UsageError
from trtllm_pipeline.execution.executor import failure_of, read_job
from trtllm_pipeline.processes import out_of_memory
from trtllm_pipeline.stages.base import JOB, OUT
from trtllm_pipeline.stages.verbs import empty_folder

_STDERR: Final = 2
"""What the commands print is no data: stdout has the folder alone."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `exec`."""
    parser.description = (
        "Run the commands of a job file again, in a folder of your own. The store is only read. Every attempt's folder "
        "and every artifact holds one; `pipeline logs` says where they are."
    )
    parser.epilog = "example:\n  pipeline exec .pipeline/store/build/FINGERPRINT/job.json --output-dir replay"
    parser.add_argument("job", metavar="JOB.json", help="the job.json of an attempt or artifact")
    parser.add_argument("--output-dir", metavar="DIR", default="replay", help="a new folder (default replay)")
    parser.add_argument(
        "--input",
        metavar="NAME=PATH",
        action="append",
        default=[],
        help="use this instead of the job's input NAME, e.g. service=FILE for a server of yours",
    )
    options.add_format(parser, "text", "json")


def run(args: argparse.Namespace) -> int:
    """Run the commands; returns the first exit code that is not 0."""
    job = read_job(Path(args.job))
    replaced = {}
    for given in args.input:
        name, _, path = given.partition("=")
        if name not in job.inputs or not path:
            raise UsageError(f"--input {given}: expected NAME=PATH with one of {', '.join(job.inputs)}")
        replaced[job.inputs[name]] = str(Path(path).absolute())
    attempt = empty_folder(args.output_dir)
    replaced[job.out], replaced[job.attempt] = str(attempt / OUT), str(attempt)

    def moved(word: str) -> str:
        for old, new in replaced.items():
            word = new + word[len(old) :] if word == old or word.startswith(f"{old}/") else word
        return word

    (attempt / OUT).mkdir()
    job = replace(
        job,
        commands=tuple(tuple(map(moved, command)) for command in job.commands),
        inputs={name: moved(path) for name, path in job.inputs.items()},
        out=moved(job.out),
        attempt=str(attempt),
    )
    job.write(attempt / JOB)
    for command in job.commands:
        note("+ " + shlex.join(command))
        before = out_of_memory.counts()
        code = subprocess.call(command, stdout=_STDERR, env={**os.environ, **job.environment})
        if code:
            note(f"error: {failure_of(job, code, timed_out=False, before=before).message}")
            return 1
    if args.format == "json":
        emit_json({"schema": 1, "output_dir": job.out})
    else:
        emit(job.out)
    return 0
