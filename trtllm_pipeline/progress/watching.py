"""`pipeline status --watch`: the status again and again, from whatever terminal, until nothing runs any more."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Final, TextIO

from trtllm_pipeline import terminal
from trtllm_pipeline.domain import Json, StageStatus
from trtllm_pipeline.planning.names import count
from trtllm_pipeline.planning.plan_file import OutlineRun
from trtllm_pipeline.planning.stage_status import StageState
from trtllm_pipeline.progress.status import DONE, MatrixStatus, to_text
from trtllm_pipeline.progress.views import LOOKS

if TYPE_CHECKING:
    from rich.text import Text

_EVERY_S: Final = 1.0
_SHARE: Final = 5
"""It looks again after this many times what looking took, where that is longer."""
_QUIET_S: Final = 3.0
"""How long nothing must run: between two stage runs there is a moment without any."""

Look = Callable[[], MatrixStatus]
Change = tuple[OutlineRun, StageState]


def watch(look: Look, stream: TextIO, *, as_json: bool = False) -> None:
    """Show what `look` finds until nothing runs any more, or Ctrl-C.

    On a terminal a picture that fits it, and the whole status at the end. Elsewhere a line for each stage run of which the
    status changed, as JSON:

    begin      stage_runs: {status: number of stage runs}
    changed    stage_run, stage, cells, status; of a failure also failure, message, hint
    """
    drawn = stream.isatty() and not as_json
    with suppress(KeyboardInterrupt):
        if drawn:
            _draw(look, stream)
        else:
            _tell(look, stream, _as_json if as_json else _as_text)
    if drawn:
        stream.write(to_text(look()))


def _looks(look: Look) -> Iterator[MatrixStatus]:
    """The status now, and again until nothing runs."""
    ran_s = time.monotonic()
    while True:
        begin_s = time.monotonic()
        status = look()
        now_s = time.monotonic()
        if any(state.status is StageStatus.RUNNING for state in status.states.values()):
            ran_s = now_s
        yield status
        if now_s - ran_s >= _QUIET_S:
            return
        time.sleep(max(_EVERY_S, _SHARE * (now_s - begin_s)))


def _draw(look: Look, stream: TextIO) -> None:
    from rich.live import Live

    console = terminal.console(stream)
    with Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        for status in _looks(look):
            live.update(_picture(status, os.get_terminal_size(stream.fileno()).lines), refresh=True)


def _picture(status: MatrixStatus, height: int) -> Text:
    from rich.text import Text

    text = Text.from_ansi(to_text(status, height=height - 1).rstrip("\n"), no_wrap=True, overflow="crop", end="")
    there = sum(state.status in DONE for state in status.states.values())
    done = f"{there} of {count(len(status.states), 'stage run')} done"
    return text.append(f"\n{done} at {datetime.now().astimezone():%H:%M:%S}; Ctrl-C ends", "dim")


def _tell(look: Look, stream: TextIO, lines: Callable[[MatrixStatus | None, MatrixStatus], Iterator[str]]) -> None:
    before = None
    for status in _looks(look):
        stream.writelines(f"{line}\n" for line in lines(before, status))
        stream.flush()
        before = status


def changes(before: MatrixStatus | None, now: MatrixStatus) -> Iterator[Change]:
    """The stage runs of which the status is another than before; at the first look, those that run."""
    for run_id, state in now.states.items():
        if before is None:
            changed = state.status is StageStatus.RUNNING
        else:
            old = before.states.get(run_id)
            changed = old is None or state.status is not old.status
        if changed:
            yield now.outline.stage_runs[run_id], state


def _as_text(before: MatrixStatus | None, now: MatrixStatus) -> Iterator[str]:
    counts = _counts(now)
    told = ", ".join(f"{number} {LOOKS[StageStatus(status)].word}" for status, number in counts.items())
    if before is None:
        yield f"{now.title}: {told}"
    for run, state in changes(before, now):
        many = f" (for {len(run.cells)} cells)" if len(run.cells) > 1 else ""
        why = "" if state.message is None else f": {state.message}"
        yield terminal.clean(f"{LOOKS[state.status].word}: {run.stage}, {run.cells[0]}{many}{why}")


def _as_json(before: MatrixStatus | None, now: MatrixStatus) -> Iterator[str]:
    if before is None:
        yield _event("begin", stage_runs=_counts(now))
    for run, state in changes(before, now):
        why = {
            name: getattr(state, name) for name in ("failure", "message", "hint") if getattr(state, name) is not None
        }
        yield _event(
            "changed", stage_run=run.id, stage=run.stage, cells=list(run.cells), status=state.status.value, **why
        )


def _counts(status: MatrixStatus) -> dict[str, Json]:
    counts = Counter(state.status for state in status.states.values())
    return {each.value: counts[each] for each in LOOKS if counts[each]}


def _event(event: str, **fields: Json) -> str:
    return json.dumps({"event": event, "time_s": round(time.time(), 3), **fields}, ensure_ascii=False)
