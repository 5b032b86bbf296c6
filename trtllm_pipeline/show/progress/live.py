"""The live view: a grid of cells x stages that is redrawn during a run.

If not all cells fit on the screen, it shows a bar per stage, and the running and failed cells.
"""

from __future__ import annotations

import contextlib
import signal
import textwrap
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Final

from rich.console import Group
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.text import Text

from trtllm_pipeline.base import (
    Cell,
    CellId,
    Json,
    StageError,
    StageRunId,
    StageStatus,
    count,
    duration,
    in_flow_order,
    shared_parts,
    shorten,
    terminal,
)
from trtllm_pipeline.orchestrate import StageRun
from trtllm_pipeline.show.phrases import groups, without
from trtllm_pipeline.show.progress import views
from trtllm_pipeline.show.progress.lines import QuietObserver
from trtllm_pipeline.show.progress.tracker import NOTHING_TO_DO, Tracker

_S = StageStatus
_REDRAW_S: Final = 0.15
_MAX_ACTIVE: Final = 8
_LEAST_NAME: Final = 8
"""Minimum width of a cell name beside its activity. Without that space the activity gets up to `_MAX_WHY` lines of its own."""
_MAX_WHY: Final = 2
_WIDE: Final = 70
"""Minimum terminal width for full progress."""


class LiveObserver(QuietObserver):
    """Draws the grid. Failures are printed above it and stay in the terminal's history."""

    _live: Live | None = None
    _quiet_s = 0.0
    _tells_all = True
    _catches = _to_suspend = False
    """True if Ctrl-Z is handled, and was pressed."""

    def _begun(self) -> None:
        self._console = terminal.console(self._stream, soft_wrap=False)
        self._picture = Picture(self._tracker, ascii_only=self._console.options.ascii_only)
        self._frame: list[Text] = []
        self._size = (0, 0)
        self._drawn_s = float("-inf")
        self._above(views.infeasible(self._tracker.plan.cells, self.reported))
        self._above(self._doubts())
        if not self._tracker.to_do:
            return self._above([NOTHING_TO_DO])
        self._start()
        if threading.current_thread() is threading.main_thread() and terminal.heeds_suspend():
            self._catches = True
            signal.signal(signal.SIGTSTP, self._typed)
        return self.tick({})

    def _start(self) -> None:
        # stdout may be a pipe for reports. Leave it alone.
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, vertical_overflow="crop")
        self._live.start()
        self._frame = []

    def _typed(self, _signal: int, _frame: FrameType | None) -> None:
        self._to_suspend = True

    def _suspend(self) -> None:
        """Suspend on Ctrl-Z with a restored terminal. Later continue below the shell's output."""
        self._to_suspend = False
        self._stop()
        terminal.suspend()
        self._start()

    def _stop(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(OSError):
                live.stop()

    def changed(self, run: StageRun, status: StageStatus, error: StageError | None, seconds: float | None) -> None:
        self._tracker.changed(run, status, seconds)
        if status is _S.FAILED:
            first, *rest = views.failure(run, error, seconds, self.reported)
            self._above(
                [f"{views.symbol(status, ascii_only=self._picture.ascii_only)} {first}", *rest],
                views.LOOKS[status].style,
            )

    def node(self, name: str, *, gone: bool) -> None:
        self._above([views.node_change(name, gone=gone)])

    def retrying(self, cells: Sequence[Cell]) -> None:
        self._above(views.retries(cells))

    def waiting(self, run: StageRun, why: str) -> None:
        self._tracker.waits(run, " ".join(terminal.clean(why).split()))

    def tick(self, progress: Mapping[StageRunId, Mapping[str, Json]]) -> None:
        super().tick(progress)
        if self._to_suspend and self._live is not None:
            self._suspend()
        self._picture.progress = progress
        if self._clock() - self._drawn_s >= _REDRAW_S:
            self._draw()

    def end(self) -> None:
        self._draw(final=True)
        drawn = self._live is not None
        self._stop()
        if drawn and not self._console.is_terminal:
            with contextlib.suppress(OSError):
                self._console.line()  # rich writes this after the last frame only on a terminal
        if self._catches:
            self._catches = False
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)

    def _above(self, lines: Sequence[str], style: str = "") -> None:
        with contextlib.suppress(OSError):
            for number, line in enumerate(lines):
                self._console.print(Text(line, style if number == 0 else "dim"))

    def _draw(self, *, final: bool = False) -> None:
        if self._live is None:
            return
        size = (self._console.width, self._console.height)
        # One column stays free, so that narrowing the terminal by one does not wrap every line.
        frame = self._picture.draw(max(20, size[0] - 1), max(6, size[1] - 1), final=final)
        self._drawn_s = self._clock()
        if frame == self._frame and size == self._size:
            return
        try:
            if size[0] < self._size[0]:
                self._climb(size[0])
            self._live.update(Group(*frame), refresh=True)
        except OSError:
            self._live = None  # the terminal is closed, but the run continues
        self._frame, self._size = frame, size

    def _climb(self, width: int) -> None:
        """After the terminal was narrowed, clear the rows added by wrapping the last frame."""
        added = sum((max(1, line.cell_len) - 1) // width for line in self._frame)
        step = [(ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)]
        self._console.control(Control(*(step * added)))


class Picture:
    """Renders a run as lines of text that fit a given size."""

    def __init__(self, tracker: Tracker, *, ascii_only: bool = False) -> None:
        self.ascii_only = ascii_only
        self.tracker = tracker
        self.progress: Mapping[StageRunId, Mapping[str, Json]] = {}
        self._shared = shared_parts([cell.id for cell in tracker.plan.feasible])
        self._totals = Counter(run.stage.name for run in tracker.plan.stage_runs.values())
        runs = tracker.plan.stage_runs
        self._stages = in_flow_order(
            ((run.stage.name, run.cells[0]) for run in runs.values()),
            lambda cell: [runs[run].stage.name for run in tracker.plan.by_cell[cell]],
        )
        self._known_groups: dict[int, Counter[str]] = {}
        """Groups by maximum number, from the last call."""
        self._screen, self._most_groups = (0, 0), 0
        self._names: dict[StageRunId, str] = {}

    def draw(self, width: int, height: int, *, final: bool = False) -> list[Text]:
        """The frame, in at most `height` lines of at most `width` characters."""
        cells = self.tracker.plan.feasible
        most = max(1, min(_MAX_ACTIVE, height // 4))
        statuses = (status for status, number in self.tracker.counts.items() if number)
        last = [*self._summary(width, final=final), *views.legend(statuses, width=width, ascii_only=self.ascii_only)]
        below = last if final else [*self._active(width, most), *last]
        head = [Text("all cells: " + " ".join(self._shared), "dim")] if self._shared else []
        room = height - len(head) - len(below)
        if len(cells) + 1 <= room:
            middle = self._grid([cell.id for cell in cells], width)
        else:
            middle = [self._stage(stage, width) for stage in self._stages][: max(0, room)]
            room -= len(middle)
            # The minimum number that ever fitted on this screen, so that the groups do not change constantly.
            if self._screen != (width, height):
                self._screen, self._most_groups = (width, height), height
            self._most_groups = min(self._most_groups, height - len(head) - len(self._stages) - most - len(last) - 1)
            if groups := self._grouped(self._most_groups):
                middle += self._groups(groups, width)
            elif room >= 2 and (eventful := list(self._eventful())):
                middle += self._grid(eventful[: room - 1], width)
        lines = [*head, *middle, *below][-height:]
        for line in lines:
            line.truncate(width, overflow="crop")
            if self.ascii_only:  # escapes for unencodable characters are longer and would wrap
                line.plain = line.plain.replace("…", "~").encode("ascii", "replace").decode()
        return lines

    def _grid(self, cells: Sequence[CellId], width: int) -> list[Text]:
        tracker = self.tracker
        lines = []
        for cell in cells:
            runs = (tracker.plan.stage_runs[run] for run in tracker.plan.by_cell[cell])
            lines.append((without(cell, self._shared), {run.stage.name: tracker.statuses[run.id] for run in runs}))
        return views.grid(lines, self._stages, width=width, ascii_only=self.ascii_only)

    def _grouped(self, most: int) -> dict[str, int]:
        """Up to `most` groups of cells with their sizes, or none if cells cannot be grouped."""
        if most not in self._known_groups:
            plan = self.tracker.plan
            cells = [cell.id for cell in plan.feasible]
            named = groups([without(cell, self._shared) for cell in cells], most) or []
            one = {group: (group,) for group in named}
            of_runs: dict[StageRunId, tuple[str, ...]] = {}
            for cell, group in zip(cells, named, strict=False):
                for run in plan.by_cell[cell]:
                    known = of_runs.get(run, ())
                    if group not in known:
                        of_runs[run] = (*known, group) if known else one[group]
            self._known_groups = {most: Counter(named)}
            self.tracker.group(of_runs)
        return self._known_groups[most]

    def _groups(self, groups: Mapping[str, int], width: int) -> list[Text]:
        counts = self.tracker.by_group
        lines = [views.group_line(group, number, self._stages, counts) for group, number in groups.items()]
        return views.grid(lines, self._stages, width=width, ascii_only=self.ascii_only, title=views.GROUPS)

    def _eventful(self) -> Iterator[CellId]:
        """Cells with running stages, then failed cells, latest first. One per stage run."""
        tracker = self.tracker
        running = [run.first_cell.id for run, _ in tracker.running()]
        failed = [tracker.plan.stage_runs[run].first_cell.id for run in reversed(tracker.failed)]
        yield from dict.fromkeys((*running, *failed))

    def _stage(self, stage: str, width: int) -> Text:
        return views.stage_line(
            stage,
            {status: self.tracker.by_stage[stage, status] for status in StageStatus},
            name_width=max(map(len, self._stages)),
            most=max(self._totals.values()),
            width=width,
            ascii_only=self.ascii_only,
        )

    def _active(self, width: int, most: int) -> Iterator[Text]:
        """Running stage runs with their progress, then waiting ones."""
        tracker = self.tracker
        lines = [(run, _S.RUNNING, self._doing(run, seconds, width)) for run, seconds in tracker.running()]
        lines += [(tracker.plan.stage_runs[run], _S.ELSEWHERE, why) for run, why in tracker.waiting.items()]
        more = len(lines) - most + 1 if len(lines) > most else 0
        lines = lines[: most - 1] if more else lines
        stage_width = max(map(len, self._stages), default=0)
        names = [self._named(run) for run, _, _ in lines]
        longest = max(map(len, names), default=0)
        for (run, status, doing), name in zip(lines, names, strict=True):
            text = Text(f"{views.symbol(status, ascii_only=self.ascii_only)} ", views.LOOKS[status].style)
            text.append(f"{run.stage.name:<{stage_width}}  ", "bold")
            own_line = len(text) + _LEAST_NAME + 2 + len(doing) > width
            name_width = max(_LEAST_NAME, width - len(text) - (0 if own_line else len(doing) + 2))
            text.append(shorten(name, name_width))
            if own_line:
                yield text
                wrapped = textwrap.wrap(doing, width - 4, max_lines=_MAX_WHY, placeholder=" …")
                yield from (Text(f"    {line}", "cyan") for line in wrapped)
            else:
                text.append(" " * (min(longest, name_width) - min(len(name), name_width)))
                yield text.append(f"  {doing}", "cyan")
        if more:
            yield Text(f"  and {more} more", "dim")

    def _named(self, run: StageRun) -> str:
        """The common parts of the cells of a stage run, and their number."""
        if run.id not in self._names:
            number = len(run.cells)
            common = shared_parts(run.cells) if number > 1 else run.first_cell.id.split("/")
            own = "/".join(each for each in common if each not in self._shared)
            if number == len(self.tracker.plan.feasible) > 1:
                self._names[run.id] = f"all {number} cells"
            else:
                own = own or without(run.first_cell.id, self._shared)
                self._names[run.id] = f"{own} ({count(number, 'cell')})" if number > 1 else own
        return self._names[run.id]

    def _doing(self, run: StageRun, seconds: float, width: int) -> str:
        progress = self.progress.get(run.id)
        part = views.share(progress)
        if part is not None and width < _WIDE:
            return f"{part:.0%}, {views.growing(seconds)}"
        drawn = "" if part is None else views.bar(part, 10, ascii_only=self.ascii_only).plain + " "
        own = views.progress_text(progress)
        return f"{drawn}{own + ', ' if own else ''}{views.growing(seconds)}"

    def _summary(self, width: int, *, final: bool) -> list[Text]:
        elapsed = self.tracker.elapsed_s
        parts = [*self.tracker.summary(), duration(elapsed) if final else views.growing(elapsed)]
        parts += [left] if not final and (left := self.tracker.left_text()) else []
        return views.flow([Text(part, "bold") for part in parts], width, gap="  ")
