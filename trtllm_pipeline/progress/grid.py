"""Cells x stages as a grid: one symbol for each stage of each cell. Shared by the live view and `pipeline status`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TextIO

from trtllm_pipeline.domain import StageStatus
from trtllm_pipeline.planning.names import shorten
from trtllm_pipeline.terminal import clean, console

if TYPE_CHECKING:
    from rich.text import Text

_S = StageStatus


class Look(NamedTuple):
    """How a status is shown. The symbols alone tell all: colour only helps."""

    symbol: str
    ascii: str
    style: str
    word: str


LOOKS: Final = {
    _S.PENDING: Look("·", ".", "dim", "to do"),
    _S.RUNNING: Look("▶", ">", "bold cyan", "running"),
    _S.ELSEWHERE: Look("~", "~", "cyan", "running in another process"),
    _S.SUCCEEDED: Look("✓", "+", "green", "done"),
    _S.UP_TO_DATE: Look("=", "=", "green", "up to date"),
    _S.SKIPPED: Look("-", "-", "dim", "not needed"),
    _S.FAILED: Look("✗", "X", "bold red", "failed"),
    _S.BLOCKED: Look("#", "#", "red", "blocked"),
    _S.CANCELLED: Look("!", "!", "yellow", "interrupted"),
}
_MIN_NAME: Final = 12
_HEAD_WIDTHS: Final = (10, 5, 4, 3, 2)
"""Widths to cut stage names to, the widest that fits; below the last, one symbol each and no heads."""


def symbol(status: StageStatus, *, ascii_only: bool) -> str:
    """The symbol of a status."""
    return LOOKS[status].ascii if ascii_only else LOOKS[status].symbol


def grid(
    lines: Sequence[tuple[str, Mapping[str, StageStatus]]],
    stages: Sequence[str],
    *,
    width: int,
    ascii_only: bool,
) -> list[Text]:
    """Lines of text no wider than `width`: heads, then one line for each (name, stage -> status)."""
    from rich.text import Text

    longest = max((len(name) for name, _ in lines), default=0)
    cut = next((cut for cut in _HEAD_WIDTHS if width - _columns(stages, cut) >= min(longest, 40)), None)
    if cut is None:
        cut = next((cut for cut in _HEAD_WIDTHS if width - _columns(stages, cut) >= _MIN_NAME), 0)
    heads = [stage[:cut] for stage in stages]
    name_width = max(1, min(longest, width - _columns(stages, cut)))
    drawn = []
    if cut:
        drawn.append(Text(" " * name_width + "".join(f" {head}" for head in heads), "dim"))
    styles = {status: (symbol(status, ascii_only=ascii_only), look.style) for status, look in LOOKS.items()}
    for name, statuses in lines:
        text = Text(f"{shorten(name, name_width):<{name_width}}")
        for stage, head in zip(stages, heads, strict=True):
            status = statuses.get(stage)
            mark, style = (" ", "") if status is None else styles[status]
            left = (len(head) - 1) // 2
            text.append(f" {' ' * left}{mark}{' ' * (len(head) - 1 - left)}", style)
        text.rstrip()
        text.truncate(width)
        drawn.append(text)
    return drawn


def _columns(stages: Sequence[str], cut: int) -> int:
    return sum(1 + max(1, len(stage[:cut])) for stage in stages)


def legend(statuses: Iterable[StageStatus], *, width: int, ascii_only: bool) -> list[Text]:
    """What the symbols of `statuses` mean, in the order of the table."""
    from rich.text import Text

    used = set(statuses)
    looks = [(symbol(status, ascii_only=ascii_only), LOOKS[status]) for status in LOOKS if status in used]
    parts = [Text.assemble((mark, look.style), (f" {look.word}", "dim")) for mark, look in looks]
    return flow(parts, width, gap="   ")


def flow(parts: Iterable[Text], width: int, *, gap: str) -> list[Text]:
    """Parts one after another, in as many lines as it takes."""
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + len(gap) + part.cell_len <= width:
            lines[-1].append(gap).append_text(part)
        else:
            lines.append(part.copy())
    return lines


def styled(lines: Iterable[Text], stream: TextIO) -> list[str]:
    """Lines as they are to be written to `stream`: in colour on a terminal that has any, plain elsewhere."""
    from io import StringIO

    if console(stream).color_system is None:
        return [clean(line.plain) for line in lines]
    canvas = console(StringIO(), force_terminal=True, width=10_000)
    drawn = []
    for line in lines:
        with canvas.capture() as capture:
            canvas.print(line, end="")
        drawn.append(capture.get())
    return drawn
