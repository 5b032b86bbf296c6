"""`pipeline stage replay job.json`: rerun the commands of one attempt."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from trtllm_pipeline.orchestrate import by_hand, provenance, read_job
from trtllm_pipeline.show.cli import options
from trtllm_pipeline.show.cli.output import emit_as, note


def execute(
    job: Annotated[str, options.argument("JOB.json", "The job.json of an attempt or artifact.")],
    output_dir: Annotated[
        str, options.option("--output-dir", "DIR", "New or empty directory for the result.")
    ] = "replay",
    inputs: Annotated[
        list[str] | None,
        options.option(
            "--input", "NAME=PATH", "Replace the job's input NAME, e.g. service=FILE to use your own server."
        ),
    ] = None,
    format: options.TextOrJson = "text",
) -> None:
    """Rerun the commands of a job file in another directory. The store is only read.

    Every attempt and every artifact has a job.json in its directory. pipeline logs prints the path.

    examples:
      pipeline stage replay .pipeline/store/build/FINGERPRINT/job.json --output-dir replay
    """
    given = {name: Path(path) for name, path in options.pairs("--input NAME=PATH", inputs).items()}
    read = read_job(Path(job))  # create no directory for a file that is not a job
    policy = provenance.policy()
    if policy.required:
        read_from = {**{name: Path(path) for name, path in read.inputs.items()}, **given}
        provenance.require_folders(read_from.values(), policy)
    out = by_hand.replay(
        read, options.empty_folder(output_dir), given, lambda command: note(f"+ {shlex.join(command)}")
    )
    emit_as(format, {"schema": 1, "output_dir": str(out)}, text=lambda _: str(out))
