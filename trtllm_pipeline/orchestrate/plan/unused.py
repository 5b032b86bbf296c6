"""Artifacts that nobody needs any more, so that a workspace that is kept does not grow for ever: which, and why others stay."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import Fingerprint, StateError, UsageError, count, decode_mapping, reading, write_json
from trtllm_pipeline.orchestrate.plan.plan_file import NAME, read_plan
from trtllm_pipeline.orchestrate.plan.runs import find_run, run_folders
from trtllm_pipeline.orchestrate.store import manifest
from trtllm_pipeline.orchestrate.store.index import Artifact
from trtllm_pipeline.orchestrate.store.store import Store

KEPT: Final = "kept.json"
_DAY_S: Final = 86400
_FINGERPRINT: Final = re.compile(r"\b[0-9a-f]{32}\b")


@dataclass(frozen=True, slots=True)
class Roots:
    """What is needed beside the latest run, kept artifacts and managed servers, which always are."""

    unused_days: float | None = None
    """What runs of so many days asked for, and what was made in them."""
    runs: int = 0
    """What so many latest runs asked for."""
    named: tuple[str, ...] = ()
    """What these runs asked for."""
    matrices: Mapping[str, Collection[Fingerprint]] = field(default_factory=dict)
    """Name of a matrix -> what its plan needs now."""

    @property
    def any(self) -> bool:
        """Whether anything is said; else everything is needed."""
        return bool(self.unused_days is not None or self.runs or self.named or self.matrices)


@dataclass(frozen=True, slots=True)
class Sorted:
    """The artifacts of a workspace, sorted."""

    unused: tuple[Artifact, ...]
    needed: tuple[tuple[Artifact, str], ...]
    """Each with the first reason for which it stays."""


def sort_out(store: Store, roots: Roots) -> Sorted:
    """What `roots` do not need, and why the rest stays.

    Raises StateError for a plan, or a list of what is kept, that cannot be read: what it asked for is not known; UsageError for
    a run that there is not.
    """
    artifacts = store.index.all_artifacts()
    stages = {artifact.fingerprint: artifact.stage for artifact in artifacts}
    why: dict[Fingerprint, str] = {}
    for told, fingerprints in _reasons(store, roots, stages):
        for each in fingerprints:
            why.setdefault(each, told)
        if stages.keys() <= why.keys():  # plans of large matrices take half a second each to read
            break
    unused: list[Artifact] = []
    needed: list[tuple[Artifact, str]] = []
    oldest_s = None if roots.unused_days is None else time.time() - roots.unused_days * _DAY_S
    for artifact in artifacts:
        reason = why.get(artifact.fingerprint)
        if reason is None and not roots.any:
            reason = "nothing was said to be unused"
        elif reason is None and oldest_s is not None and _made_s(artifact) >= oldest_s:
            reason = f"made in the last {roots.unused_days:g} days"
        if reason is None:
            unused.append(artifact)
        else:
            needed.append((artifact, reason))
    return Sorted(tuple(unused), tuple(needed))


def _reasons(
    store: Store, roots: Roots, stages: Mapping[Fingerprint, str]
) -> Iterator[tuple[str, Iterable[Fingerprint]]]:
    """What is needed, with the reason, the strongest first."""

    @cache
    def asked(folder: Path) -> set[Fingerprint]:
        return {run.fingerprint for run in read_plan(folder / NAME).stage_runs.values()}

    named = [
        find_run(store, name) for name in roots.named
    ]  # first: one that is misspelt is told also where all is needed
    yield from protected(store, stages)
    try:
        runs: Sequence[Path] = run_folders(store)
    except UsageError:  # none yet
        runs = ()
    for folder in runs[:1]:
        yield f"the latest run, {folder.name}", asked(folder)
    for folder in named:
        yield f"run {folder.name}", asked(folder)
    for matrix, fingerprints in roots.matrices.items():
        yield f"matrix {matrix}", fingerprints
    for folder in runs[: roots.runs]:
        yield f"one of the latest {count(roots.runs, 'run')}", asked(folder)
    if roots.unused_days is not None:
        oldest_s = time.time() - roots.unused_days * _DAY_S
        for folder in runs:
            if (folder / NAME).stat().st_mtime >= oldest_s:
                yield f"a run of the last {roots.unused_days:g} days", asked(folder)


def protected(store: Store, stages: Mapping[Fingerprint, str]) -> Iterator[tuple[str, Iterable[Fingerprint]]]:
    """The artifacts that no command removes, with the reason. Raises StateError if the list of kept ones cannot be read."""
    yield f"kept (pipeline store keep, {KEPT})", _with_inputs(store, stages, kept(store))
    yield "a managed server serves it", _with_inputs(store, stages, _served(store))


def _made_s(artifact: Artifact) -> float:
    with suppress(FileNotFoundError):
        return (artifact.folder / manifest.NAME).stat().st_mtime
    return time.time()  # somebody else has removed it


def _served(store: Store) -> set[Fingerprint]:
    """The artifacts that the files of managed servers name."""
    files = store.workspace.glob("serve/*/*.json")
    return {
        Fingerprint(each) for file in files for each in _FINGERPRINT.findall(reading.read_text(file, errors="replace"))
    }


def _with_inputs(store: Store, stages: Mapping[Fingerprint, str], wanted: Iterable[Fingerprint]) -> set[Fingerprint]:
    """`wanted`, and all that these were made from. `stages` has the stage of every artifact."""
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


# What is kept for good.


def kept(store: Store) -> dict[Fingerprint, str]:
    """The artifacts that are kept whatever is unused, each with its stage. Raises StateError where the list cannot be read."""
    path = store.workspace / KEPT
    try:
        data = decode_mapping(reading.read_bytes(path))
        return {Fingerprint(each["fingerprint"]): str(each["stage"]) for each in data["artifacts"]}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"{path}: cannot be read: {error}",
            hint="remove it and say again what is kept: pipeline store keep NAME",
        ) from error


def keep(store: Store, artifacts: Mapping[Fingerprint, str]) -> None:
    """Replace the list of what is kept. Raises StateError in a read-only workspace."""
    store.check_writable()
    listed = [
        {"stage": stage, "fingerprint": each} for each, stage in sorted(artifacts.items(), key=lambda row: row[::-1])
    ]
    write_json(store.workspace / KEPT, {"schema": 1, "artifacts": listed})
