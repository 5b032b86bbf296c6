"""One stage in this process, for a person who waits: no store, no claims, no retries."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

from trtllm_pipeline.errors import StageError
from trtllm_pipeline.machine import probe
from trtllm_pipeline.stages.base import SERVICE_FILE, Stage, StageContext
from trtllm_pipeline.worker import run_program, write_job

_POLL_S: Final = 0.1


def run(stage: Stage, context: StageContext[Any], show: Callable[[Sequence[str]], None]) -> None:
    """Run other programs of a stage, each told to `show`, their output to stderr; then its own. Raises StageError."""
    if stage.commands is not None:
        write_job(stage.name, stage.program, context)  # which programs of ours among them read
        for command in stage.commands(context, probe.machine()):
            show(command)
            code = subprocess.run(command, check=False, stdout=sys.stderr).returncode
            if code:
                raise StageError(f"{stage.name}: {command[0]} ended with exit code {code}; what it said is above")
    if stage.program is not None:
        run_program(stage.program, stage.name, context)


@contextmanager
def scratch(name: str) -> Iterator[Path]:
    """A folder for the time being. It stays where an error names a log in it."""
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
    """Tell `show` the endpoints of a service as soon as it has written them."""
    path = context.attempt / SERVICE_FILE

    def look(_signal: int, _frame: FrameType | None) -> None:
        if path.exists():
            show(json.loads(path.read_text(encoding="utf-8")))
        else:
            signal.setitimer(signal.ITIMER_REAL, _POLL_S)

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _POLL_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # before the handler goes: an alarm that nobody handles kills
        signal.signal(signal.SIGALRM, before)
