r"""The one way of text to a terminal. What it says comes from models, servers, files and names, and none of that may
command the terminal: escape sequences are taken out, what is left of control characters and what turns the direction
of writing is shown as `\u001b`. Only colours and cursor movements of our own get through, by `console` and `raw`.

`\u001b` is how JSON writes it, too: JSON that goes the same way stays the same JSON.
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
    r"|[ -/]*[0-Z\\-~])"  # all others, as ECMA-48 and ECMA-35 form them
)
_UNSAFE: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_ENCODING: Final = "pipeline_stdio"
"""Option `-X` with the encoding of stdout and stderr, from before Python was started again in UTF-8 mode."""


def clean(text: str) -> str:
    """`text` as it can be shown anywhere. A carriage return ends a line, as log files use it."""
    if _UNSAFE.search(text) is None:
        return text
    text = _SEQUENCE.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return _UNSAFE.sub(lambda match: _escape(match[0]), text)


def _escape(text: str) -> str:
    """As JSON escapes it: characters beyond 16 bits are two."""
    units = text.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def same_place(one: TextIO, other: TextIO) -> bool:
    """True if two streams end in the same terminal, pipe or file, so that a reader of one reads both."""
    try:
        first, second = (os.fstat(stream.fileno()) for stream in (one, other))
    except (OSError, ValueError):  # closed, or none of the system's
        return False
    return (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)


def heeds_suspend() -> bool:
    """Whether Ctrl-Z stops this process: not where who started it ignores that."""
    return signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL


def suspend() -> None:
    """Stop this process as an uncaught Ctrl-Z does. Returns when it is continued."""
    caught = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, caught)


@contextmanager
def screen(stream: TextIO) -> Iterator[Live]:
    """A picture on the whole terminal, drawn by `update(..., refresh=True)`. Ctrl-Z gives the shell its screen back."""
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
    """A stream that may go away or be full: the error cannot be reported, and the work continues."""

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
        """Go on."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Stdout(_Stderr):
    """A stream for data, of which nothing may be lost in silence."""

    def _failed(self, error: OSError) -> None:
        # Python would try again to write what is left, when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        if isinstance(error, BrokenPipeError):
            raise error
        from trtllm_pipeline.base.errors import PipelineError

        raise PipelineError(
            f"stdout cannot be written: {error.strerror}", hint="check its redirection, then try again"
        ) from error


class _Cleaned:
    """A stream whose text is cleaned; everything else is the stream's own."""

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
    """`stream` without cleaning, for text that was cleaned when it was colored."""
    return stream.raw if isinstance(stream, _Cleaned) else stream


def clean_streams() -> None:
    """Let everything that is printed from here on be cleaned."""
    if not isinstance(sys.stdout, _Cleaned):
        sys.stdout = cast("TextIO", _Cleaned(cast("TextIO", _Stdout(sys.stdout))))
    if not isinstance(sys.stderr, _Cleaned):
        sys.stderr = cast("TextIO", _Cleaned(cast("TextIO", _Stderr(sys.stderr))))


def start() -> None:
    """Put right what a program may be started with: closed streams, and a locale that is not UTF-8.

    Paths are text in our files, and of other programs that know UTF-8 alone. So in another locale Python is started
    again, in UTF-8 mode, as are all of its children; stdout and stderr keep the encoding of the locale.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free; or the next file would be in its place
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
    """A console of rich on `stream`: its own colors and movements get through, of the text only what is clean."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class Clean(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else clean(text), style, control)

    return Clean(file=raw(stream), highlight=False, markup=False, emoji=False, **options)
