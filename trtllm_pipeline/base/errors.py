"""All errors that this project raises on purpose.

    PipelineError            one line states what failed, on what, and what was expected; `hint`: what to type next
    ├── UsageError           the command line cannot be followed                            (exit code 2)
    ├── MatrixError          a matrix, recipe or data file has faults; carries all of them  (exit code 2)
    ├── PlanError            cells that cannot be planned: no toolchain, nothing selected   (exit code 3 or 2)
    ├── StageError           a stage run failed; carries its failure class        (exit code 1; 2 for class USER)
    │   ├── DownloadError    a model could not be fetched or did not verify
    │   └── ServerError      a server did not start, died, or answered wrongly
    ├── RemoteError          a remote store could not be used, or has damaged content       (exit code 1)
    ├── ComparisonError      measurements that must not be compared                         (exit code 4)
    └── StateError           the workspace is not usable: wrong version, no space, not writable  (exit code 2)

Only `show/cli/app.py` turns them into messages. Any other exception is a bug and shows its traceback.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

NOT_COMPARABLE: Final = 4
"""Exit code for measurements that must not be compared."""


class FailureClass(str, Enum):
    """Why a stage run failed, as far as it matters for a retry."""

    INFEASIBLE = "infeasible"
    """Cannot work with these inputs. Recorded and never retried."""
    OUT_OF_MEMORY = "out_of_memory"
    """Host or GPU memory ran out."""
    TRANSIENT = "transient"
    """Likely to work later: a dropped connection, a busy port. Retried with backoff."""
    LOST = "lost"
    """The node that it ran on was lost. Retried on another one."""
    TIMEOUT = "timeout"
    """Took longer than its limit."""
    USER = "user"
    """The user must act first: a token, a license acceptance, disk space."""
    CHECK = "check_failed"
    """A check of the pipeline failed: a wrong answer, a score below its minimum, an invalid measurement."""
    BUG = "bug"
    """Everything else."""

    @property
    def words(self) -> str:
        """The class in words."""
        return {
            FailureClass.INFEASIBLE: "can never work",
            FailureClass.TRANSIENT: "transient, retries used up",
            FailureClass.LOST: "lost with its node, again and again",
            FailureClass.TIMEOUT: "timed out",
            FailureClass.USER: "action required",
        }.get(self, self.value.replace("_", " "))


def in_brackets(failure: str | None) -> str:
    """A failure class as a suffix: " (out of memory)". Empty if it adds nothing to "failed"."""
    return (
        ""
        if failure in {None, FailureClass.BUG.value, FailureClass.CHECK.value}
        else f" ({FailureClass(failure).words})"
    )


class PipelineError(Exception):
    """Base of all expected errors. `hint` is the user's next step, as a sentence or a command."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(PipelineError):
    """The command line is invalid."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault in a user's file: location and problem."""

    path: str
    line: int | None
    key: str
    message: str

    def __str__(self) -> str:
        """`file:line: key: message`, a form that editors can jump to."""
        where = self.path if self.line is None else f"{self.path}:{self.line}"
        return f"{where}: {self.key}: {self.message}" if self.key else f"{where}: {self.message}"


ROWS_SHOWN: Final = 5
"""Faulty rows of a file in one message. The same fault is often in every row."""


class MatrixError(PipelineError):
    """All faults in a user's files."""

    exit_code = 2

    def __init__(self, faults: tuple[Fault, ...], *, hint: str | None = None, most: int | None = None) -> None:
        """`most`: how many faults the message has. None: all."""
        left = [] if most is None or len(faults) <= most else [f"and {len(faults) - most} more"]
        super().__init__("\n".join([*map(str, faults[:most]), *left]), hint=hint)
        self.faults = faults


class PlanError(PipelineError):
    """The request cannot be planned."""

    exit_code = 3


class StageError(PipelineError):
    """A stage run failed. `failure` decides whether it is retried. `log` is the file to read, and `line` its line with
    the cause. `setting` is the setting to change, as `--set` takes it. `telling` has log lines, each "FILE:LINE: TEXT",
    if the cause is unknown.
    """

    usual_failure = FailureClass.BUG

    def __init__(
        self,
        message: str,
        *,
        failure: FailureClass | None = None,
        hint: str | None = None,
        log: Path | None = None,
        line: int | None = None,
        setting: str | None = None,
        telling: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message, hint=hint)
        self.failure = self.usual_failure if failure is None else failure
        self.log = log
        self.line = line
        self.setting = setting
        self.telling = telling


class DownloadError(StageError):
    """A model could not be fetched or verified, usually for a reason that only the user can change."""

    usual_failure = FailureClass.USER


class ServerError(StageError):
    """A server did not become ready, died, or answered wrongly."""


class RemoteError(PipelineError):
    """A remote store could not be used, or its content is wrong."""


class ComparisonError(PipelineError):
    """Measurements made under different conditions must not be compared."""

    exit_code = NOT_COMPARABLE


class StateError(PipelineError):
    """The workspace cannot be used as it is."""
