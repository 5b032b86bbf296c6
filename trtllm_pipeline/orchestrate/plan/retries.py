"""Changes to a cell that ran out of memory, as far as its matrix allows them: `settings.retry`.

The only state is the failed attempts. If the newest attempt at a stage run of a cell ran out of memory, the cell is planned
with the next allowed change, and so on until a stage run that succeeded or was not tried yet. So all commands plan the same, a
killed run continues, and artifacts have the key of the settings that they were built with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Final, TypeAlias

from trtllm_pipeline.base import (
    USUAL_KV_SHARE,
    USUAL_NUM_TOKENS,
    Cell,
    CellId,
    FailureClass,
    Fingerprint,
    Json,
    SettingChange,
)
from trtllm_pipeline.orchestrate.plan.plan import Plan, StageRun
from trtllm_pipeline.orchestrate.store.index import AttemptRow

logger = logging.getLogger(__name__)

SECTIONS: Final[Mapping[str, str]] = {
    "max_num_tokens": "build",
    "kv_cache_free_gpu_mem_fraction": "repository",
    "max_tokens_in_paged_kv_cache": "repository",
}
"""Settings that a retry may change, and their sections. They affect memory, not the results of a cell."""
_UNSET: Final[Mapping[str, int | float]] = {
    "max_num_tokens": USUAL_NUM_TOKENS,
    "kv_cache_free_gpu_mem_fraction": USUAL_KV_SHARE,
}
"""Value of an unset setting, unless a stage run has one."""
Attempts: TypeAlias = Callable[[Iterable[Fingerprint]], Mapping[Fingerprint, AttemptRow]]


def followed(
    plan: Plan, make: Callable[[Sequence[Cell]], Plan], attempts: Attempts, reason: Callable[[Cell], str | None]
) -> Plan:
    """`plan` with the changes that its cells allow, after the attempts so far.

    `make` plans cells. `reason` returns why a cell cannot work, and such a change is not applied.
    """

    def matters(failed: StageRun, cell: Cell) -> bool:
        """True if a cell no longer has the failed stage run."""
        return failed.id not in make([cell]).by_cell[cell.id]

    final: set[CellId] = set()
    while True:
        retried = [cell for cell in plan.feasible if _steps(cell) and cell.id not in final]
        runs = {run for cell in retried for run in plan.by_cell[cell.id]}
        last = attempts(plan.stage_runs[run].fingerprint for run in runs)
        changed: dict[CellId, Cell] = {}
        for cell in retried:
            failed = _out_of_memory(plan, cell, last)
            next_cell = None if failed is None else _changed(plan, cell, failed, last, partial(matters, failed), reason)
            if next_cell is None or reason(next_cell) is not None:
                final.add(cell.id)
            else:
                changed[cell.id] = next_cell
        if not changed:
            return plan
        plan = make([changed.get(cell.id, cell) for cell in plan.cells])


def newly_planned(old: Plan, new: Plan) -> list[Cell]:
    """The cells of `new` with other stage runs than in `old`."""
    return [cell for cell in new.feasible if new.by_cell[cell.id] != old.by_cell.get(cell.id)]


def _steps(cell: Cell) -> dict[str, Json]:
    """Name of a setting -> allowed changes."""
    allowed = cell.settings.get("retry", {}).get("oom")
    return {name: how for name, how in allowed.items() if how is not None} if isinstance(allowed, dict) else {}


def _out_of_memory(plan: Plan, cell: Cell, last: Mapping[Fingerprint, AttemptRow]) -> StageRun | None:
    """The first stage run of a cell whose newest attempt ran out of memory."""
    for run in (plan.stage_runs[each] for each in plan.by_cell[cell.id]):
        attempt = last.get(run.fingerprint)
        if attempt is not None and (attempt.outcome, attempt.failure) == ("failed", FailureClass.OUT_OF_MEMORY.value):
            return run
    return None


def _changed(
    plan: Plan,
    cell: Cell,
    failed: StageRun,
    last: Mapping[Fingerprint, AttemptRow],
    matters: Callable[[Cell], bool],
    reason: Callable[[Cell], str | None],
) -> Cell | None:
    """The cell with the next change of each setting that `matters` and is not refused. None if there is none left."""
    times = cell.settings["retry"]["times"]
    assert isinstance(times, int)
    if len({change.stage_run for change in cell.changes}) >= times:
        return None
    why = last[failed.fingerprint].message or "out of memory"
    next_cell = cell
    for name, how in _steps(cell).items():
        old, values = _next(plan, cell, name, how)
        refused: list[str] = []
        for new in values:
            change = SettingChange(f"settings.{SECTIONS[name]}.{name}", old, new, failed.id, why, tuple(refused))
            changed = _with(cell, name, new, change)
            if (refusal := reason(changed)) is not None:
                refused.append(f"{new} was not tried: {refusal}")
                _warn_once(cell.id, f"settings.retry.oom.{name} {refused[-1]}")
            elif matters(changed):
                next_cell = _with(next_cell, name, new, change)
                break
    return None if next_cell is cell else next_cell


@lru_cache(maxsize=256)
def _warn_once(cell: CellId, words: str) -> None:
    """Log once, since a run plans repeatedly."""
    logger.warning("%s: %s", cell, words)


def _with(cell: Cell, name: str, value: Json, change: SettingChange) -> Cell:
    section = SECTIONS[name]
    settings = {**cell.settings, section: {**cell.settings[section], name: value}}
    return replace(cell, settings=settings, changes=(*cell.changes, change))


def _next(plan: Plan, cell: Cell, name: str, how: Json) -> tuple[Json, Sequence[Json]]:
    """The current value of a setting, and the next values, starting with the first that matters."""
    params = (plan.stage_runs[run].params for run in plan.by_cell[cell.id])  # the value that a stage uses
    taken = (value for each in params if (value := getattr(each, name, None)) is not None)
    now = next(taken, cell.settings[SECTIONS[name]][name]) or _UNSET.get(name)
    if isinstance(how, (list, tuple)):
        done = [how.index(change.new) + 1 for change in cell.changes if change.setting.endswith(f".{name}")]
        return now, how[max(done, default=0) :]
    if isinstance(now, int) and now > 1:
        return now, (now // 2,)
    return now, (now / 2,) if isinstance(now, float) else ()
