"""`pipeline status --watch`: repeated status from any terminal until no stage is running."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Final, TextIO

from trtllm_pipeline.base import Json, StageStatus, count, terminal
from trtllm_pipeline.orchestrate import OutlineRun, StageState
from trtllm_pipeline.show.progress import json_events
from trtllm_pipeline.show.progress.cell_status import DONE, MatrixStatus, to_text
from trtllm_pipeline.show.progress.views import LOOKS, REMIND_EVERY_S, time_left

if TYPE_CHECKING:
    from rich.text import Text

    from trtllm_pipeline.orchestrate import ForecastCheck

_EVERY_S: Final = 1.0
_SHARE: Final = 5
"""Minimum interval between looks, as a multiple of the duration of one look."""
_QUIET_S: Final = 3.0
"""Required idle time before the end, because there are short gaps between stage runs."""
Look = Callable[[], MatrixStatus]
Change = tuple[OutlineRun, StageState]


def watch(look: Look, stream: TextIO, *, as_json: bool = False) -> None:
    """Show the result of `look` until no stage is running, or until Ctrl-C.

    On a terminal, shows a display that fits it and the whole status at the end. Elsewhere, prints a line for each stage
    run whose status changed, or an event as in docs/reference/formats.md.
    """
    drawn = stream.isatty() and not as_json
    with suppress(KeyboardInterrupt):
        if drawn:
            _draw(look, stream)
        else:
            _tell(look, stream, _Json() if as_json else _Text())
    if drawn:
        stream.write(to_text(look()))


def _looks(look: Look) -> Iterator[MatrixStatus]:
    """Yield statuses until no stage is running and no run is waiting."""
    ran_s = time.monotonic()
    while True:
        begin_s = time.monotonic()
        status = look()
        now_s = time.monotonic()
        if status.goes_on or any(state.status is StageStatus.RUNNING for state in status.states.values()):
            ran_s = now_s
        yield status
        if now_s - ran_s >= _QUIET_S:
            return
        time.sleep(max(_EVERY_S, _SHARE * (now_s - begin_s)))


def _draw(look: Look, stream: TextIO) -> None:
    with terminal.screen(stream) as screen:
        for status in _looks(look):
            screen.update(_picture(status, os.get_terminal_size(stream.fileno()).lines), refresh=True)


def _picture(status: MatrixStatus, height: int) -> Text:
    from rich.text import Text

    text = Text.from_ansi(to_text(status, height=height - 1).rstrip("\n"), no_wrap=True, overflow="crop", end="")
    completed = sum(state.status in DONE for state in status.states.values())
    done = f"{completed} of {count(len(status.states), 'stage run')} done"
    left = f", {text_left}," if status.left and (text_left := time_left(*status.left)) else ""
    return text.append(f"\n{done}{left} at {datetime.now().astimezone():%H:%M:%S} (stop with Ctrl-C)", "dim")


def _tell(look: Look, stream: TextIO, lines: _Text | _Json) -> None:
    def say(*said: str) -> None:
        stream.writelines(f"{line}\n" for line in said)
        stream.flush()

    before, said_s = None, time.monotonic()
    for status in _looks(look):
        if before is None:
            say(lines.begin(status))
        say(*(lines.changed(run, state) for run, state in changes(before, status)))
        if status.left is not None and time.monotonic() - said_s >= REMIND_EVERY_S:
            said_s = time.monotonic()
            say(*lines.left(*status.left))
        before = status
    if before is not None and before.took is not None:
        say(lines.took(before.took))


def changes(before: MatrixStatus | None, now: MatrixStatus) -> Iterator[Change]:
    """The stage runs with a changed status. At the first look, the running ones."""
    for run_id, state in now.states.items():
        if before is None:
            changed = state.status is StageStatus.RUNNING
        else:
            old = before.states.get(run_id)
            changed = old is None or state.status is not old.status
        if changed:
            yield now.outline.stage_runs[run_id], state


class _Text:
    """Text lines."""

    def begin(self, status: MatrixStatus) -> str:
        counts = (f"{number} {LOOKS[StageStatus(status)].word}" for status, number in _counts(status).items())
        return f"{status.title}: {', '.join(counts)}"

    def changed(self, run: OutlineRun, state: StageState) -> str:
        many = f" (for {len(run.cells)} cells)" if len(run.cells) > 1 else ""
        why = "" if state.message is None else f": {state.message}"
        return terminal.clean(f"{LOOKS[state.status].word}: {run.stage}, {run.cells[0]}{many}{why}")

    def left(self, seconds: float, complete: bool) -> list[str]:
        return [text] if (text := time_left(seconds, complete)) else []

    def took(self, took: ForecastCheck) -> str:
        return took.line()


class _Json:
    """JSON lines."""

    def __init__(self) -> None:
        self._stage_runs = json_events.StageRuns()

    def begin(self, status: MatrixStatus) -> str:
        return json_events.event("begin", schema=json_events.SCHEMA, stage_runs=_counts(status))

    def changed(self, run: OutlineRun, state: StageState) -> str:
        why = {
            name: getattr(state, name) for name in ("failure", "message", "hint") if getattr(state, name) is not None
        }
        named = self._stage_runs.named(run.id, run.stage, run.cells)
        return json_events.event("changed", **named, status=state.status.value, **why)

    def left(self, seconds: float, complete: bool) -> list[str]:
        return [json_events.event("left", **json_events.left(seconds, complete))]

    def took(self, took: ForecastCheck) -> str:
        return json_events.event("forecast", **took.to_json())


def _counts(status: MatrixStatus) -> dict[str, Json]:
    counts = Counter(state.status for state in status.states.values())
    return {each.value: counts[each] for each in LOOKS if counts[each]}
