r"""The only path for text to a terminal. The text comes from models, servers, files and names, and must not control the
terminal. Escape sequences are removed; other control characters, and those that change the writing direction, are shown
as `\u001b`. Only our own colors and cursor movements get through, by `console` and `raw`.

JSON also writes `\u001b` like this, so JSON stays the same JSON.
"""

from __future__ import annotations

import codecs
import os
import re
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TextIO, cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType

    from rich.console import Console
    from rich.live import Live

_SEQUENCE: Final = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]"  # CSI: colors, cursor
    r"|[\]PX^_][^\x07\x1b\n]{0,4096}(?:\x07|\x1b\\)"  # OSC, DCS, SOS, PM, APC: titles, links, the clipboard
    r"|[ -/]*[0-Z\\-~])"  # all others, as defined by ECMA-48 and ECMA-35
)
_UNSAFE: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_ENCODING: Final = "pipeline_stdio"
"""`-X` option with the encoding of stdout and stderr from before Python was restarted in UTF-8 mode."""


def clean(text: str) -> str:
    """`text` that is safe to show anywhere. A carriage return ends a line, as in log files."""
    if _UNSAFE.search(text) is None:
        return text
    text = _SEQUENCE.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return _UNSAFE.sub(lambda match: _escape(match[0]), text)


def _escape(text: str) -> str:
    """Escaped as in JSON: characters beyond 16 bits become two."""
    units = text.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def same_place(one: TextIO, other: TextIO) -> bool:
    """True if two streams end in the same terminal, pipe or file, so that readers of one see both."""
    try:
        first, second = (os.fstat(stream.fileno()) for stream in (one, other))
    except (OSError, ValueError):  # closed, or not a system file
        return False
    return (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)


def heeds_suspend() -> bool:
    """True if Ctrl-Z stops this process, False if its parent ignores that."""
    return signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL


def suspend() -> None:
    """Stop this process as an uncaught Ctrl-Z does. Returns when it is resumed."""
    caught = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, caught)


@contextmanager
def screen(stream: TextIO) -> Iterator[Live]:
    """A full-screen display, drawn by `update(..., refresh=True)`. Ctrl-Z gives the shell its screen back."""
    from rich.live import Live

    def suspended(_signal: int, _frame: FrameType | None) -> None:
        live.stop()
        suspend()
        live.start(refresh=True)

    live = Live(console=console(stream), screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    with live:
        if not heeds_suspend():
            yield live
            return
        signal.signal(signal.SIGTSTP, suspended)
        try:
            yield live
        finally:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)


class _Stderr:
    """A stream that may be closed or full: the error cannot be reported, and the work continues."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._failed(error)
            return 0

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        """Continue."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Stdout(_Stderr):
    """A stream for data. Losing any of it is an error."""

    def _failed(self, error: OSError) -> None:
        # Python would try again to write the rest at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        if isinstance(error, BrokenPipeError):
            raise error
        from trtllm_pipeline.base.errors import PipelineError

        raise PipelineError(
            f"stdout cannot be written: {error.strerror}", hint="check its redirection, then try again"
        ) from error


class _Cleaned:
    """A stream whose text is cleaned. Everything else is passed through."""

    def __init__(self, stream: TextIO) -> None:
        self.raw = stream

    def write(self, text: str) -> int:
        self.raw.write(clean(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def raw(stream: TextIO) -> TextIO:
    """`stream` without cleaning, for text that was cleaned before it was colored."""
    return stream.raw if isinstance(stream, _Cleaned) else stream


def clean_streams() -> None:
    """Clean everything that is printed from now on."""
    if not isinstance(sys.stdout, _Cleaned):
        sys.stdout = cast("TextIO", _Cleaned(cast("TextIO", _Stdout(sys.stdout))))
    if not isinstance(sys.stderr, _Cleaned):
        sys.stderr = cast("TextIO", _Cleaned(cast("TextIO", _Stderr(sys.stderr))))


def start() -> None:
    """Fix the conditions that a program may start in: closed streams, and a locale that is not UTF-8.

    Our files contain paths as text, and so do other programs that only support UTF-8. So in another locale, Python is
    restarted in UTF-8 mode, as are all of its children. stdout and stderr keep the locale's encoding.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number; otherwise the next file would be in its place
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, "w" if fd else "r", encoding="utf-8", closefd=False))
    before = sys._xoptions.get(_ENCODING)  # noqa: SLF001  (documented)
    if before is None and codecs.lookup(sys.getfilesystemencoding()).name != "utf-8" and sys.executable:
        os.environ["PYTHONUTF8"] = "1"
        again = [sys.executable, "-X", f"{_ENCODING}={sys.stdout.encoding}", *sys.orig_argv[1:]]
        os.execv(sys.executable, again)  # noqa: S606
    codecs.register_error(__name__, _escaped)
    for stream in (sys.stdout, sys.stderr):
        encoding = before if isinstance(before, str) else None
        cast("Any", stream).reconfigure(encoding=encoding, errors=__name__)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return _escape(error.object[error.start : error.end]), error.end


def console(stream: TextIO, **options: Any) -> Console:
    """A rich console on `stream`: its own colors and movements get through, the text is cleaned."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class Clean(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else clean(text), style, control)

    return Clean(file=raw(stream), highlight=False, markup=False, emoji=False, **options)
