"""`pipeline` without a process of its own: its start and imports take longer than most commands."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from trtllm_pipeline.orchestrate.store.database import Database
from trtllm_pipeline.show.cli.app import main

MACHINE = tuple(f"trtllm_pipeline.{house}" for house in ("base.machine", "tensorrt.embedded", "tensorrt.others"))
"""Packages that remember what this machine has."""


class Done(NamedTuple):
    """What a command printed, and its exit code."""

    stdout: str
    stderr: str
    returncode: int


def pipeline(*words: object, cwd: Path | None = None, code: int | None = 0, **variables: str) -> Done:
    """Run a command in a directory, with variables added to the environment. With a `code`, no other one is accepted."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    before = Path.cwd()
    with mock.patch.dict(os.environ, variables), redirect_stdout(out), redirect_stderr(err), closed_at_the_end():
        forget_the_machine()
        os.chdir(cwd or before)
        try:
            done = main([str(word) for word in words])
        finally:
            os.chdir(before)
            forget_the_machine()
    found = Done(*(stream.buffer.getvalue().decode() for stream in (out, err)), done)
    assert code in {None, done}, f"{words}: exit code {done}, expected {code}\n{found.stdout}\n{found.stderr}"
    return found


def forget_the_machine() -> None:
    """Let nothing be known of this machine: with other variables it may be another one."""
    for name, module in sys.modules.items():
        if name.startswith(MACHINE):
            for found in vars(module).values():
                if callable(clear := getattr(found, "cache_clear", None)):
                    clear()


@contextmanager
def closed_at_the_end() -> Iterator[None]:
    """Closes every index that was opened, as the end of a process does."""
    opened: list[Database] = []
    make = Database.__init__

    def noted(self: Database, *args: Any, **options: Any) -> None:
        opened.append(self)
        make(self, *args, **options)

    with mock.patch.object(Database, "__init__", noted):
        yield
    for each in opened:
        each.close()
