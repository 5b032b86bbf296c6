"""What the command line prints: stdout is data, stderr is progress, warnings and errors."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from trtllm_pipeline.base import (
    FailureClass,
    PipelineError,
    StageError,
    StateError,
    UsageError,
    disk,
    follow,
    terminal,
    write_text,
)

T = TypeVar("T")


def emit(text: str) -> None:
    """Data, to stdout."""
    print(text)  # noqa: T201


def emit_rendered(text: str) -> None:
    """What `rendered` made, to stdout, with its colors."""
    print(text, end="", file=terminal.raw(sys.stdout))


def emit_json(value: Any) -> None:
    """Data as JSON, to stdout."""
    emit(json.dumps(value, indent=2, ensure_ascii=False))


def emit_as(format: str, found: T, **writers: Callable[[T], Any]) -> None:
    """`found` in the format that --format names, by its writer: a text, or what rich draws. JSON without one is itself."""
    shown = writers[format](found) if format in writers else found
    if format == "json":
        emit_json(shown)
    elif isinstance(shown, str):
        print(shown, end="\n" if shown else "")  # noqa: T201
    else:
        emit_rendered(rendered(shown))


def note(text: str) -> None:
    """A line for people, to stderr."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def print_log(path: Path, lines: int | None, goes_on: Callable[[], bool]) -> None:
    """A log, or its last `lines`, to stdout; and what comes for as long as it `goes_on`."""
    text = ""
    for text in map(terminal.clean, follow(path, goes_on)):
        if lines is not None:
            text, lines = "".join(text.splitlines(keepends=True)[-lines:]), None
        sys.stdout.write(text)
        sys.stdout.flush()
    if text and not text.endswith("\n"):
        emit("")


def write_output(path: str, text: str) -> None:
    """The file that `--output` names: whoever reads it meanwhile sees the old one or the new one. Raises UsageError."""
    target = Path(path)
    try:
        # A pipe, a device and a link stay what they are.
        if target.is_symlink() or (target.exists() and not target.is_file()):
            target.write_text(text, encoding="utf-8", newline="")
        else:
            write_text(target, text)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"--output {path}: cannot be written: {why}", hint="--output FILE writes it elsewhere"
        ) from error
    note(f"written to {path}")


def rendered(content: Any) -> str:
    """Rich content as text, colored where stdout is a terminal, without spaces at the ends of lines."""
    import shutil

    tty = sys.stdout.isatty()
    width = shutil.get_terminal_size((120, 0)).columns if tty else 160
    console = terminal.console(sys.stdout, width=width, force_terminal=tty)
    with console.capture() as capture:
        console.print(content, crop=False)
    return "".join(f"{line.rstrip(' ')}\n" for line in capture.get().splitlines())


def explain_error(error: Exception) -> int | None:
    """Say what went wrong and return the exit code; None for what is a bug of ours and needs its traceback.

    What the user has to do first, about the request or about the workspace, is 2: trying again as it is cannot help.
    """
    if isinstance(error, PipelineError):
        note(f"error: {error.message}")
        if isinstance(error, StageError) and error.log is not None:
            note(f"  log: {error.log}")
        if error.hint:
            note(f"  try: {error.hint}")
        blocked = isinstance(error, StateError) or (
            isinstance(error, StageError) and error.failure is FailureClass.USER
        )
        return 2 if blocked else error.exit_code
    return _explain_system(error) if isinstance(error, OSError) else None


def _explain_system(error: OSError) -> int | None:
    """As `explain_error`, for what the system refuses."""
    try:
        where = str(Path(str(error.filename or ".")).absolute())
    except FileNotFoundError:
        note("error: the current directory was removed")
        note("  try: cd to a directory that is there")
        return 2
    told = disk.no_room(error, Path(where))
    if told is not None:
        note(f"error: {told}, while {error.filename or 'a file'} was written")
        note(f"  try: {disk.hint(error)}")
        return 1
    if isinstance(error, PermissionError):
        note(f"error: not allowed: {error.filename or error}")
        return 1
    if error.errno in _SURROUNDINGS:
        note(f"error: {error.filename or 'a file'}: {(error.strerror or '').lower()}")
        return 2
    return None


_SURROUNDINGS: Final = frozenset(
    {
        *(errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS, errno.EIO, errno.ESTALE),
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
    }
)
"""What the system says of a name, a disk or a machine, and never of a mistake of ours."""
