"""Artifacts that nobody has asked for lately, so that a workspace that is kept does not grow for ever."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from trtllm_pipeline.domain import Fingerprint
from trtllm_pipeline.errors import StateError
from trtllm_pipeline.planning.plan_file import NAME, read_plan
from trtllm_pipeline.store import manifest
from trtllm_pipeline.store.index import Artifact
from trtllm_pipeline.store.store import Store

_DAY_S: Final = 86400
_FINGERPRINT: Final = re.compile(r"\b[0-9a-f]{32}\b")


def unused(store: Store, days: float) -> list[Artifact]:
    """The artifacts that no run of the last `days` asked for, and that are older themselves.

    What the latest run asked for is always used, however long ago that was, and what kept servers serve. Raises StateError
    for a plan that cannot be read: what it asked for is not known.
    """
    oldest_s = time.time() - days * _DAY_S
    plans = sorted(store.runs_dir.glob(f"*/{NAME}"), key=lambda path: path.stat().st_mtime, reverse=True)
    recent = [plan for place, plan in enumerate(plans) if place == 0 or plan.stat().st_mtime >= oldest_s]
    used = {run.fingerprint for plan in recent for run in read_plan(plan).stage_runs.values()}
    used |= _with_inputs(store, _served(store))
    return [
        artifact
        for artifact in store.index.all_artifacts()
        if artifact.fingerprint not in used and _made_s(artifact) < oldest_s
    ]


def _made_s(artifact: Artifact) -> float:
    with suppress(FileNotFoundError):
        return (artifact.folder / manifest.NAME).stat().st_mtime
    return time.time()  # somebody else has removed it


def _served(store: Store) -> set[Fingerprint]:
    """The artifacts that the files of kept servers name."""
    files = store.workspace.glob("serve/*/*.json")
    return {Fingerprint(each) for file in files for each in _FINGERPRINT.findall(file.read_text(errors="replace"))}


def _with_inputs(store: Store, wanted: Iterable[Fingerprint]) -> set[Fingerprint]:
    """`wanted`, and all that these were made from."""
    stages = {artifact.fingerprint: artifact.stage for artifact in store.index.all_artifacts()}
    found: set[Fingerprint] = set()
    pending = list(wanted)
    while pending:
        each = pending.pop()
        if each not in found and each in stages:
            found.add(each)
            with suppress(StateError):
                made = manifest.read(store.folder(stages[each], each))
                pending += manifest.inputs(made).values()
    return found
