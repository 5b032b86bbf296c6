"""Shared by all views of a run: texts about stage runs, and a grid of cells x stages with one symbol per stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple, TextIO

from trtllm_pipeline.base import (
    Cell,
    Json,
    StageError,
    StageStatus,
    amount,
    duration,
    in_brackets,
    in_words,
    shorten,
    terminal,
)
from trtllm_pipeline.orchestrate import OutlineCell, StageRun, StageState
from trtllm_pipeline.show.phrases import never_works

if TYPE_CHECKING:
    from rich.text import Text

_S = StageStatus
GOOD: Final = frozenset({_S.SUCCEEDED, _S.UP_TO_DATE, _S.SKIPPED})
_BAR: Final = 20
_LEAST_BAR: Final = 5


class Look(NamedTuple):
    """Display of a status. Symbols are unique without color."""

    symbol: str
    ascii: str
    style: str
    word: str


LOOKS: Final = {
    _S.PENDING: Look("·", ".", "dim", "to do"),
    _S.RUNNING: Look("▶", ">", "bold cyan", "running"),
    _S.ELSEWHERE: Look("~", "~", "cyan", "waits for another process"),
    _S.SUCCEEDED: Look("✓", "+", "green", "done"),
    _S.UP_TO_DATE: Look("=", "=", "green", "up to date"),
    _S.SKIPPED: Look("-", "-", "dim", "not needed"),
    _S.FAILED: Look("✗", "X", "bold red", "failed"),
    _S.BLOCKED: Look("#", "#", "red", "blocked"),
    _S.CANCELLED: Look("!", "!", "yellow", "interrupted"),
}
REMIND_EVERY_S: Final = 60.0
"""Interval of reminders in line mode. The live view shows the same content permanently."""
_PRECEDENCE: Final = (_S.FAILED, _S.RUNNING, _S.ELSEWHERE, _S.CANCELLED, _S.PENDING, _S.BLOCKED)
"""Statuses that take precedence over any number of others, in this order."""
_MIN_NAME: Final = 12
_HEAD_WIDTHS: Final = (10, 8, 7, 6, 5, 4, 3, 2)
"""Widths for shortened stage names. The widest that fits is used. Below the last: one symbol each, without headers."""


def symbol(status: StageStatus, *, ascii_only: bool) -> str:
    return LOOKS[status].ascii if ascii_only else LOOKS[status].symbol


class Part(NamedTuple):
    """Combined status of several stage runs of a stage."""

    status: StageStatus
    """The most important status."""
    percent: int | None
    """Number of completed stage runs, if statuses differ."""

    def mark(self, width: int, *, ascii_only: bool) -> str:
        """The symbol, with the completed number if it fits."""
        sign = symbol(self.status, ascii_only=ascii_only)
        whole = sign if self.percent is None else f"{sign}{self.percent:>2}%"
        return whole if len(whole) <= width else sign


GROUPS: Final = "group (cells)"
"""Title of the names from `group_line`."""


def group_line(
    group: str, cells: int, stages: Iterable[str], counts: Mapping[tuple[str, str, StageStatus], int]
) -> tuple[str, dict[str, Part]]:
    """A group of cells for `grid`, from its counts by stage and status."""
    parts = ((stage, _part({each: counts.get((group, stage, each), 0) for each in LOOKS})) for stage in stages)
    return f"{group} ({cells})", {stage: part for stage, part in parts if part is not None}


def _part(counts: Mapping[StageStatus, int]) -> Part | None:
    """The combined status of stage runs by status, or None without stage runs."""
    status = next((each for each in (*_PRECEDENCE, *LOOKS) if counts.get(each)), None)
    if status is None:
        return None
    total, done = sum(counts.values()), sum(counts.get(each, 0) for each in GOOD)
    return Part(status, None if done == total or counts[status] == total else 100 * done // total)


def grid(
    lines: Sequence[tuple[str, Mapping[str, StageStatus] | Mapping[str, Part]]],
    stages: Sequence[str],
    *,
    width: int,
    ascii_only: bool,
    title: str = "",
) -> list[Text]:
    """Lines of at most `width` characters: headers with `title` above the names, then one line per (name, stage -> status)."""
    from rich.text import Text

    longest = max(map(len, (title, *(name for name, _ in lines))))
    cut = next((cut for cut in _HEAD_WIDTHS if width - _columns(stages, cut) >= min(longest, 40)), None)
    if cut is None:
        cut = next((cut for cut in _HEAD_WIDTHS if width - _columns(stages, cut) >= _MIN_NAME), 0)
    heads = [stage if len(stage) <= cut else f"{stage[: cut - 1]}…" if cut > 4 else stage[:cut] for stage in stages]
    name_width = max(1, min(longest, width - _columns(stages, cut)))
    drawn = []
    if cut:
        drawn.append(Text(f"{title[:name_width]:<{name_width}}" + "".join(f" {head}" for head in heads), "dim"))
    styles = {status: (symbol(status, ascii_only=ascii_only), look.style) for status, look in LOOKS.items()}
    for name, statuses in lines:
        text = Text(f"{shorten(name, name_width):<{name_width}}")
        for stage, head in zip(stages, heads, strict=True):
            status = statuses.get(stage)
            if isinstance(status, Part):
                mark, style = status.mark(len(head), ascii_only=ascii_only), LOOKS[status.status].style
            else:
                mark, style = (" ", "") if status is None else styles[status]
            left = min((len(head) - 1) // 2, len(head) - len(mark))
            text.append(f" {' ' * left}{mark}{' ' * (len(head) - len(mark) - left)}", style)
        text.rstrip()
        text.truncate(width)
        drawn.append(text)
    return drawn


def _columns(stages: Sequence[str], cut: int) -> int:
    return sum(1 + max(1, len(stage[:cut])) for stage in stages)


def stage_line(
    stage: str, counts: Mapping[StageStatus, int], *, name_width: int, most: int, width: int, ascii_only: bool
) -> Text:
    """One stage: a bar, the number of completed stage runs out of `most`, and counts of exceptional statuses."""
    from rich.text import Text

    total, done = sum(counts.values()), sum(counts.get(status, 0) for status in GOOD)
    digits = len(str(most))
    text = Text(f"{stage:<{name_width}} ")
    length = min(_BAR, width - name_width - 2 * digits - 20)
    if length >= _LEAST_BAR:
        text.append_text(bar(done / (total or 1), length, ascii_only=ascii_only)).append(" ")
    text.append(f"{done:>{digits}}/{total:<{digits}}")
    for status in (_S.RUNNING, _S.ELSEWHERE, _S.FAILED, _S.BLOCKED, _S.CANCELLED):
        if counts.get(status):
            text.append(f"  {symbol(status, ascii_only=ascii_only)}{counts[status]}", LOOKS[status].style)
    return text


def bar(part: float, width: int, *, ascii_only: bool) -> Text:
    """A bar of which the fraction `part` is full."""
    from rich.text import Text

    full = int(part * width)
    on, off = ("#", ".") if ascii_only else ("━", "─")
    return Text.assemble((on * full, "green"), (off * (width - full), "dim"))


def legend(statuses: Iterable[StageStatus], *, width: int, ascii_only: bool) -> list[Text]:
    """Legend of the symbols of `statuses`, in table order."""
    from rich.text import Text

    used = set(statuses)
    looks = [(symbol(status, ascii_only=ascii_only), LOOKS[status]) for status in LOOKS if status in used]
    parts = [Text.assemble((mark, look.style), (f" {look.word}", "dim")) for mark, look in looks]
    return flow(parts, width, gap="   ")


def flow(parts: Iterable[Text], width: int, *, gap: str) -> list[Text]:
    """Parts joined into as many lines as needed."""
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + len(gap) + part.cell_len <= width:
            lines[-1].append(gap).append_text(part)
        else:
            lines.append(part.copy())
    return lines


def styled(lines: Iterable[Text], stream: TextIO) -> list[str]:
    """Lines formatted for `stream`: colored on terminals with color, otherwise plain."""
    from io import StringIO

    if terminal.console(stream).color_system is None:
        return [terminal.clean(line.plain) for line in lines]
    canvas = terminal.console(StringIO(), force_terminal=True, width=10_000)
    drawn = []
    for line in lines:
        with canvas.capture() as capture:
            canvas.print(line, end="")
        drawn.append(capture.get())
    return drawn


# Texts about stage runs


def who(run: StageRun) -> str:
    return run.first_cell.id if len(run.cells) < 2 else f"{run.first_cell.id} (for {len(run.cells)} cells)"


def infeasible(every: Iterable[Cell | OutlineCell], reported: set[str], *, whole: bool = False) -> list[str]:
    """Lines about infeasible cells, see `never_works`. Adds the printed reasons to `reported`."""
    refused = [(cell.id, str(cell.reason)) for cell in every if cell.reason is not None]
    lines = never_works(refused, None if whole else "pipeline status")
    text = "\n".join(lines)
    reported |= {reason for reason in {reason for _, reason in refused} if f": {reason}" in text}
    return lines


def retries(cells: Iterable[Cell | OutlineCell]) -> list[str]:
    return [f"{cell.id}: {line}" for cell in cells for line in in_words(cell.changes)]


def node_change(name: str, *, gone: bool) -> str:
    return f"lost node {name}: no stages will start on it" if gone else f"new node {name}"


def failure(run: StageRun, error: StageError | None, seconds: float | None, reported: set[str]) -> list[str]:
    """Lines about a failure: cause, location, fix, log lines. Omits reasons in `reported`, and adds new ones."""
    kind = "" if error is None else in_brackets(error.failure.value)
    after = "" if seconds is None else f" after {duration(seconds)}"
    why = "" if error is None else f": {'for the same reason' if error.message in reported else error.message}"
    lines = [f"{run.id}  {who(run)}  failed{after}{kind}{why}"]
    if error is not None:
        known = error.message in reported
        state = StageState(_S.FAILED).failed(error)
        state = replace(
            state, hint=None if error.hint in reported else error.hint, telling=() if known else error.telling
        )
        lines += [f"  {line}" for line in state.details]
        reported |= {error.message, *filter(None, (error.hint,))}
    return lines


def time_left(seconds: float, complete: bool) -> str:
    """The time left of a run in words, with its reliability. Empty for less than a second."""
    return f"{'about' if complete else 'perhaps'} {growing(seconds)} left" if seconds >= 1.0 else ""


def growing(seconds: float) -> str:
    """A changing duration without tenths, which would flicker."""
    return duration(seconds) if seconds >= 10 else f"{int(seconds)} s"


def progress_text(progress: Mapping[str, Json] | None) -> str | None:
    """A stage's own progress as text, "12.3/270.1 MB (5%)", or None if it reported nothing that can be shown."""
    done, total = _numbers(progress)
    if progress is None or done is None:
        return None
    text, part = amount(done, total, str(progress.get("unit", ""))), share(progress)
    return text if part is None else f"{text} ({part:.0%})"


def share(progress: Mapping[str, Json] | None) -> float | None:
    """Completed share of a stage's work, 0 to 1."""
    done, total = _numbers(progress)
    return None if done is None or not total or total < 0 else min(1.0, max(0.0, done / total))


def _numbers(progress: Mapping[str, Json] | None) -> tuple[float | None, float | None]:
    values = [(progress or {}).get(name) for name in ("done", "total")]
    done, total = (value if isinstance(value, (int, float)) else None for value in values)
    return done, total
