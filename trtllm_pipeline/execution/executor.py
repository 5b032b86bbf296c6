"""The job file, and what every executor does with it.

A job holds all that one attempt needs: commands, environment without secrets, inputs, limits. Whoever runs it, here,
on another node, or a person months later with `pipeline exec job.json`, runs the same commands.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final, Protocol, Union

from trtllm_pipeline.domain import Json, Scope, StageRunId
from trtllm_pipeline.errors import FailureClass, StageError, UsageError
from trtllm_pipeline.files.user_files import decode_mapping
from trtllm_pipeline.processes import out_of_memory
from trtllm_pipeline.processes.signatures import KILLED, classify, words
from trtllm_pipeline.stages.base import FAILURE_FILE

SCHEMA: Final = 2
_TELLING_LINES: Final = 200
"""Of a log's end, looked at for words that say why."""


@dataclass(frozen=True, slots=True)
class Job:
    """One attempt at a stage run, as written to job.json; `trtllm_pipeline.worker` reads its own part of it."""

    id: StageRunId
    stage: str
    toolchain: str
    fingerprint: str
    scope: Scope
    commands: tuple[tuple[str, ...], ...]
    """Run one after another; the first that fails ends the job."""
    environment: Mapping[str, str]
    """Set on top of the environment the pipeline itself was started with. Never secrets."""
    program: str | None
    """Our own "module:function", which the last command runs on this very file."""
    params_class: str
    """"module:class" of `params`."""
    params: Mapping[str, Json]
    inputs: Mapping[str, str]
    files: Mapping[str, str]
    out: str
    """Where the result is written."""
    attempt: str
    """The attempt's folder around it."""
    timeout_s: float
    section: str
    """Settings section where the limit can be changed."""
    gpus: tuple[str, ...] = ()
    schema: int = field(default=SCHEMA)

    def write(self, path: Path) -> None:
        """Write the job file."""
        data = {each.name: getattr(self, each.name) for each in fields(self)} | {"scope": self.scope.value}
        path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_job(path: Path) -> Job:
    """The job in a job file. Raises UsageError when it is not one."""
    try:
        data = decode_mapping(path.read_bytes())
        if data["schema"] != SCHEMA:
            raise UsageError(f"{path}: job schema {data['schema']}, this release reads {SCHEMA}")
        data["commands"] = tuple(tuple(command) for command in data["commands"])
        data["scope"] = Scope(data["scope"])
        data["gpus"] = tuple(data["gpus"])
        return Job(**data)
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read: {error.strerror}", hint="every attempt's folder and every artifact has a job.json"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path}: not a job file: {error}", hint="every attempt's folder and artifact has one"
        ) from error


@dataclass(frozen=True, slots=True)
class Usage:
    """What an attempt took."""

    wall_s: float
    cpu_s: float
    max_rss_bytes: int


@dataclass(frozen=True, slots=True)
class Ready:
    """A service is ready; its service.json is written."""

    id: StageRunId


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt is over and none of its processes is left. `error` is None when all commands succeeded."""

    id: StageRunId
    error: StageError | None
    usage: Usage


ExecutorEvent = Union[Ready, Ended]  # noqa: UP007 - evaluated at run time on Python 3.10


class Executor(Protocol):
    """Runs jobs somewhere."""

    def submit(self, job: Job, claims: Sequence[int]) -> None:
        """Start a job. Its processes inherit the file descriptors `claims` and so hold them while they live."""

    def stop(self, job: StageRunId, grace_s: float) -> None:
        """Ask a job to end; force it when it has not after `grace_s` seconds. `Ended` follows."""

    def wait(self, timeout_s: float) -> list[ExecutorEvent]:
        """What happened, after at most `timeout_s` seconds."""

    def close(self) -> None:
        """End everything that still runs, and wait for it."""


def failure_of(job: Job, returncode: int, *, timed_out: bool, before: out_of_memory.Counts | None = None) -> StageError:
    """Why a job's command ended with `returncode` (negative: the signal), in words, from what the job left behind.

    `before` is what the kernel had counted when the command was started.
    """
    attempt = Path(job.attempt)
    log = attempt / "log"
    if timed_out:
        return StageError(
            f"{job.stage}: took longer than its limit of {job.timeout_s:g} s",
            failure=FailureClass.TIMEOUT,
            hint=f"raise it with --set settings.{job.section}.timeout_s=SECONDS",
            log=log,
        )
    try:
        told = json.loads((attempt / FAILURE_FILE).read_text(encoding="utf-8"))
        return StageError(told["message"], failure=FailureClass(told["failure"]), hint=told["hint"], log=log)
    except (OSError, ValueError, KeyError):
        pass
    lines = tail(log, _TELLING_LINES)
    said = f"; its last line: {lines[-1]}" if lines else ""
    how = f"was ended by {signal.Signals(-returncode).name}" if returncode < 0 else f"ended with exit code {returncode}"
    text = "\n".join(lines)
    known = classify(text)
    if known is KILLED or (known is None and returncode == -signal.SIGKILL):
        failure, words_, hint = out_of_memory.verdict(before)
        log_says = f"; its log says: {words(known, text)}" if known else said
        return StageError(f"{job.stage}: {how}; {words_}{log_says}", failure=failure, hint=hint, log=log)
    if known is not None:
        message = f"{job.stage}: {how}; its log says: {words(known, text)}"
        return StageError(message, failure=known.failure, hint=known.hint, log=log)
    return StageError(f"{job.stage}: {how}{said}", failure=FailureClass.BUG, log=log, unexplained=True)


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a text file that are not blank, or nothing when it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 65536))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    kept = [line.rstrip() for line in text.splitlines() if line.strip()]
    return kept[-lines:]
