"""Output of the command line: data on stdout; progress, warnings and errors on stderr."""

from __future__ import annotations

import codecs
import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from trtllm_pipeline.base import (
    FailureClass,
    Json,
    PipelineError,
    StageError,
    StateError,
    UsageError,
    disk,
    reading,
    terminal,
    writing,
)

if TYPE_CHECKING:
    from trtllm_pipeline.base import text_blocks

T = TypeVar("T")
_POLL_S: Final = 0.2


def emit(text: str) -> None:
    print(text)  # noqa: T201


def emit_rendered(text: str) -> None:
    """Print output of `rendered` to stdout, with its colors."""
    print(text, end="", file=terminal.raw(sys.stdout))


def emit_json(value: Any) -> None:
    emit(json.dumps(value, indent=2, ensure_ascii=False))


def emit_as(format: str, data: T, **writers: Callable[[T], Any]) -> None:
    """Print `data` in the format of --format, by its writer, which returns text or rich content. JSON needs none."""
    shown = writers[format](data) if format in writers else data
    if format == "json":
        emit_json(shown)
    elif isinstance(shown, str):
        print(shown, end="\n" if shown else "")  # noqa: T201
    else:
        emit_rendered(rendered(shown))


class Shown(Protocol):
    """Results with a machine-readable form and a text form."""

    def to_json(self) -> dict[str, Json]:
        """The machine-readable form."""

    def blocks(self) -> Iterable[text_blocks.Block]:
        """The text."""


def emit_blocks(format: str, shown: Shown) -> None:
    """Print `shown` in the format of --format: json, text or markdown."""
    from trtllm_pipeline.base import text_blocks

    if format == "json":
        emit_json(shown.to_json())
    elif format == "markdown":
        emit(text_blocks.as_markdown(shown.blocks()))
    else:
        emit_rendered(rendered(text_blocks.on_terminal(shown.blocks())))


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def follow(path: Path, goes_on: Callable[[], bool]) -> Iterator[str]:
    """The text of a file, and further text while `goes_on()` is true.

    Meanwhile the file may be moved or recreated. It need not exist at first.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    file: FileIO | None = None
    try:
        while True:
            # Checked before reading, so that everything written before the end is read.
            going = goes_on()
            data = b"" if file is None else file.read()
            with suppress(FileNotFoundError):
                status = path.stat()
                if file is None or status.st_ino != os.fstat(file.fileno()).st_ino:
                    before, file = file, FileIO(reading.open_fd(path))
                    if before is not None:
                        before.close()
                elif status.st_size < file.tell():
                    file.seek(0)
                data += file.read()
            if text := decoder.decode(data):
                yield text
            if not going:
                return
            time.sleep(_POLL_S)
    finally:
        if file is not None:
            file.close()


def print_log(path: Path, lines: int | None, goes_on: Callable[[], bool]) -> None:
    """Print a log, or its last `lines`, to stdout, and follow it while `goes_on()` is true."""
    text = ""
    for text in map(terminal.clean, follow(path, goes_on)):
        if lines is not None:
            text, lines = "".join(text.splitlines(keepends=True)[-lines:]), None
        sys.stdout.write(text)
        sys.stdout.flush()
    if text and not text.endswith("\n"):
        emit("")


def write_output(path: str, text: str) -> None:
    """Replace the file of `--output` atomically. Raises UsageError."""
    target = Path(path)
    try:
        # Pipes, devices and links are written in place.
        if target.is_symlink() or (target.exists() and not target.is_file()):
            target.write_text(text, encoding="utf-8", newline="")
        else:
            writing.write_text(target, text)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"--output {path}: cannot be written: {why}", hint="write elsewhere with --output FILE"
        ) from error
    note(f"written to {path}")


def terminal_width() -> int | None:
    """Columns of the terminal on stdout, None if it is not one."""
    import shutil

    return shutil.get_terminal_size((120, 0)).columns if sys.stdout.isatty() else None


def rendered(content: Any) -> str:
    """Rich content as text without trailing spaces, colored if stdout is a terminal."""
    width = terminal_width()
    console = terminal.console(sys.stdout, width=width or 160, force_terminal=width is not None)
    with console.capture() as capture:
        console.print(content, crop=False)
    return "".join(f"{line.rstrip(' ')}\n" for line in capture.get().splitlines())


def explain_error(error: Exception) -> int | None:
    """Print an error message and return the exit code, or None for a bug in this program, which needs a traceback.

    The code is 2 if the user has to change the request or the workspace first, because a plain retry cannot help.
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
    """Like `explain_error`, for errors of the operating system."""
    try:
        where = str(Path(str(error.filename or ".")).absolute())
    except FileNotFoundError:
        note("error: the current directory was removed")
        note("  try: cd to an existing directory")
        return 2
    full_disk = disk.no_room(error, Path(where))
    if full_disk is not None:
        note(f"error: {full_disk}, while {error.filename or 'a file'} was written")
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
"""Errors that the system reports about a name, a disk or a machine, and that are never bugs of this program."""
