"""Why stage runs have to run, from the same keys that their fingerprints are hashes of."""

from __future__ import annotations

import textwrap
from collections.abc import Collection

from trtllm_pipeline.domain import Scope, StageRunId
from trtllm_pipeline.fingerprint import Change, changes
from trtllm_pipeline.planning.plan import Plan, StageRun
from trtllm_pipeline.store.store import Store

NEVER = "not made yet"


def reasons(plan: Plan, to_run: Collection[StageRunId], store: Store | None) -> dict[StageRunId, str]:
    """A short reason for each of `to_run`: never made, gone, failed before, or what changed since the cell's last result."""
    latest = store.index.latest(cell.id for cell in plan.cells) if store is not None and to_run else {}
    tried = store.index.attempts(plan.stage_runs[run].fingerprint for run in to_run) if store is not None else {}
    found: dict[StageRunId, str] = {}
    for run_id in to_run:
        run = plan.stage_runs[run_id]
        of_cells = (latest.get((cell, run.stage.name)) for cell in run.cells)
        before = next(filter(None, of_cells), None)
        if run.stage.scope is Scope.SERVICE:
            changed = () if before is None else changes(before[1], run.key)
            found[run_id] = in_words(run, changed) if changed else "needed by what runs inside it"
            continue
        attempt = tried.get(run.fingerprint)
        if attempt is not None and attempt.outcome == "failed":
            found[run_id] = f"failed before: {textwrap.shorten(attempt.message or '', 120)}"
        elif attempt is not None and attempt.outcome in {None, "stopped", "interrupted"}:
            found[run_id] = "was interrupted"
        elif before is None:
            found[run_id] = NEVER
        elif before[0] == run.fingerprint:
            found[run_id] = "its files are gone"
        else:
            found[run_id] = in_words(run, changes(before[1], run.key))
    return found


def in_words(run: StageRun, changed: Collection[Change]) -> str:
    """Changes of a key as one line. A changed input is named by its stage: that stage's own reason says more."""
    own = [change for change in changed if not change.path.startswith("inputs.")]
    if own:
        told = "; ".join(f"{change.path} {change.old or 'absent'} -> {change.new or 'absent'}" for change in own[:3])
        return f"changed: {told}" + (f"; and {len(own) - 3} more" if len(own) > 3 else "")
    inputs = (change.path.removeprefix("inputs.") for change in changed)
    # An input that the stage has no longer has no stage to be named by.
    stages = {run.inputs[name].rpartition("-")[0] if name in run.inputs else name for name in inputs}
    return f"{' and '.join(sorted(stages))} changed"
