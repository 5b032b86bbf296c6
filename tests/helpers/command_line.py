"""`pipeline` without a process of its own: its start and imports take longer than most commands."""

from __future__ import annotations

import gc
import io
import os
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from trtllm_pipeline.show.cli.app import main


class Done(NamedTuple):
    """What a command printed, and its exit code."""

    stdout: str
    stderr: str
    returncode: int


def pipeline(*words: object, cwd: Path | None = None, code: int | None = 0, **variables: str) -> Done:
    """Run a command in a directory, with variables added to the environment. With a `code`, no other one is accepted."""
    out, err, before = io.StringIO(), io.StringIO(), Path.cwd()
    with mock.patch.dict(os.environ, variables), redirect_stdout(out), redirect_stderr(err):
        os.chdir(cwd or before)
        try:
            done = main([str(word) for word in words])
        finally:
            os.chdir(before)
            gc.collect()  # closes the index, as the end of a process does
    found = Done(out.getvalue(), err.getvalue(), done)
    assert code in {None, done}, f"{words}: exit code {done}, expected {code}\n{found.stdout}\n{found.stderr}"
    return found
