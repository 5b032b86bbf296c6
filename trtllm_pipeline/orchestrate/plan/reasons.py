"""Reasons why stage runs must run, derived from the keys behind their fingerprints."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Final

from trtllm_pipeline.base import Change, Fingerprint, Scope, StageRunId, StateError, changes
from trtllm_pipeline.models import files_of
from trtllm_pipeline.orchestrate.plan.plan import Plan, StageRun
from trtllm_pipeline.orchestrate.store import manifest
from trtllm_pipeline.orchestrate.store.store import Store

NEVER = "not made yet"
RERUN: Final = "measured again (--rerun)"
_INPUTS: Final = "inputs."
_CONTENT: Final = "params.content."
"""Prefix of a model file's path in the key of its download."""
_DIGEST: Final = re.compile(r'"([0-9a-f]{12})[0-9a-f]{28,}"')


def reasons(plan: Plan, to_run: Collection[StageRunId], store: Store | None) -> dict[StageRunId, str]:
    """A short reason for each of `to_run`: not built yet, files gone, failed before, or the change since the cell's last result."""
    latest = store.index.latest(cell.id for cell in plan.cells) if store is not None and to_run else {}
    tried = store.index.attempts(plan.stage_runs[run].fingerprint for run in to_run) if store is not None else {}
    texts: dict[StageRunId, str] = {}
    changed: dict[StageRunId, tuple[Change, ...]] = {}
    latest_of: dict[StageRunId, Fingerprint] = {}
    for run_id in to_run:
        run = plan.stage_runs[run_id]
        of_cells = (latest.get((cell, run.stage.name)) for cell in run.cells) if latest else ()
        before = next(filter(None, of_cells), None)
        if run.stage.scope is Scope.SERVICE:
            changed[run_id] = () if before is None else changes(before[1], run.key)
            texts[run_id] = "needed by stages that use the server"
            continue
        attempt = tried.get(run.fingerprint)
        if attempt is not None and attempt.outcome == "failed":
            texts[run_id] = f"failed before: {textwrap.shorten(attempt.message or '', 120)}"
        elif attempt is not None and attempt.outcome in {None, "stopped", "interrupted"}:
            now = attempt.outcome is None and store is not None and store.is_claimed(run.fingerprint)
            texts[run_id] = "another process works on it now" if now else "was interrupted"
        elif before is None:
            texts[run_id] = NEVER
        elif before[0] == run.fingerprint:
            texts[run_id] = "its files are gone"
        else:
            changed[run_id], latest_of[run_id] = changes(before[1], run.key), before[0]
    if store is not None:
        of_inputs = {run_id: _old_inputs(of_run, latest_of.get(run_id), store) for run_id, of_run in changed.items()}
        before_keys = store.index.keys({each for found_inputs in of_inputs.values() for each in found_inputs.values()})
        for run_id, of_run in changed.items():
            if of_run:
                before_of = {name: before_keys[old] for name, old in of_inputs[run_id].items() if old in before_keys}
                texts[run_id] = in_words(plan, plan.stage_runs[run_id], of_run, before_of)
    return texts


def in_words(plan: Plan, run: StageRun, changed: Collection[Change], before: Mapping[str, str]) -> str:
    """Changes of a key as one line. A changed input is reported by its stage, whose own reason has the details.

    `before` has the keys of earlier inputs by name, so that changed model files are named wherever the model is read.
    """
    own = [change for change in changed if not _is_input(change)]
    if own:
        return f"changed: {_some([_change_text(change) for change in own], '; ')}"
    stages: dict[str, str] = {}
    for name in dict.fromkeys(map(_input_of, changed)):
        if name not in run.inputs:  # a removed input has no stage
            stages[name] = ""
            continue
        upstream = plan.stage_runs[run.inputs[name]]
        parts = changes(before[name], upstream.key) if name in before else ()
        read = run.stage.parts(run.first_cell).get(name) if run.stage.parts and name in run.reads else None
        files = [part.path.removeprefix(_CONTENT) for part in parts if part.path.startswith(_CONTENT)]
        files = [file for file in files if read is None or files_of((file,), read)]
        stages[upstream.stage.name] = f" ({_some(files, ', ')})" if files else ""
        old = [each.old for each in changed if _is_input(each) and _input_of(each) == name]
        if not any(old):
            stages[upstream.stage.name] = " (not read before)"
        elif read is not None and not files and any(each.path == f"{_INPUTS}{name}" for each in changed):
            stages[upstream.stage.name] = " (its key had all files, now those that it reads)"
    return f"{' and '.join(f'{name}{files}' for name, files in sorted(stages.items()))} changed"


def _is_input(change: Change) -> bool:
    return change.path.startswith(_INPUTS)


def _input_of(change: Change) -> str:
    """The name of a changed input."""
    return change.path.split(".")[1]


def _old_inputs(changed: Collection[Change], before: Fingerprint | None, store: Store) -> dict[str, Fingerprint]:
    """Earlier fingerprints of changed inputs by name, as far as known."""
    inputs = [change for change in changed if _is_input(change) and change.old is not None]
    old = {_input_of(each): Fingerprint(json.loads(each.old or "")) for each in inputs if each.path.count(".") == 1}
    if before is not None and len(old) < len(inputs):
        with suppress(StateError):  # only its manifest has its inputs
            (artifact,) = store.index.artifacts((before,)).values()
            old = {**manifest.inputs(manifest.read(artifact.folder)), **old}
    return old


def _change_text(change: Change) -> str:
    old, new = (_DIGEST.sub(r"\1", value or "absent") for value in (change.old, change.new))
    return f"{change.path.removeprefix(_CONTENT)} {old} -> {new}"


def _some(parts: list[str], between: str) -> str:
    return between.join(parts[:3]) + (f"{between}and {len(parts) - 3} more" if len(parts) > 3 else "")
