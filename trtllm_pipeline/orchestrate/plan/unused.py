"""Finds unused artifacts, which can be removed to limit the size of a workspace, and the reasons why others stay."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import Fingerprint, StateError, UsageError, count, reading, user_files, write_json
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
    """Artifacts to keep in addition to those of the latest run, kept artifacts and managed servers."""

    unused_days: float | None = None
    """Artifacts used by runs of the last N days, and artifacts built in this time."""
    runs: int = 0
    """Keep artifacts used by the last N runs."""
    named: tuple[str, ...] = ()
    """Keep artifacts used by these runs."""
    matrices: Mapping[str, Collection[Fingerprint]] = field(default_factory=dict)
    """Name of a matrix -> artifacts of its current plan."""

    @property
    def any(self) -> bool:
        """True if any criterion is set. Otherwise everything is needed."""
        return bool(self.unused_days is not None or self.runs or self.named or self.matrices)


@dataclass(frozen=True, slots=True)
class Sorted:
    """The artifacts of a workspace, sorted."""

    unused: tuple[Artifact, ...]
    needed: tuple[tuple[Artifact, str], ...]
    """Artifacts that stay, each with its first reason."""


def sort_out(store: Store, roots: Roots) -> Sorted:
    """The artifacts that `roots` do not need, and the reasons why the others stay.

    Raises StateError for an unreadable plan or list of kept artifacts, UsageError for an unknown run.
    """
    artifacts = store.index.all_artifacts()
    stages = {artifact.fingerprint: artifact.stage for artifact in artifacts}
    why: dict[Fingerprint, str] = {}
    for reason, fingerprints in _reasons(store, roots, stages):
        for each in fingerprints:
            why.setdefault(each, reason)
        if stages.keys() <= why.keys():  # reading the plan of a large matrix takes half a second
            break
    unused: list[Artifact] = []
    needed: list[tuple[Artifact, str]] = []
    oldest_s = None if roots.unused_days is None else time.time() - roots.unused_days * _DAY_S
    for artifact in artifacts:
        cause = why.get(artifact.fingerprint)
        if cause is None and not roots.any:
            cause = "no option selects unused artifacts"
        elif cause is None and oldest_s is not None and _made_s(artifact) >= oldest_s:
            cause = f"built in the last {roots.unused_days:g} days"
        if cause is None:
            unused.append(artifact)
        else:
            needed.append((artifact, cause))
    return Sorted(tuple(unused), tuple(needed))


def _reasons(
    store: Store, roots: Roots, stages: Mapping[Fingerprint, str]
) -> Iterator[tuple[str, Iterable[Fingerprint]]]:
    """Needed artifacts with the reason, the strongest first."""

    @cache
    def used(folder: Path) -> set[Fingerprint]:
        return {run.fingerprint for run in read_plan(folder / NAME).stage_runs.values()}

    # First, to report an unknown run even if everything is needed.
    named = [find_run(store, name) for name in roots.named]
    yield from protected(store, stages)
    try:
        runs: Sequence[Path] = run_folders(store)
    except UsageError:  # no runs yet
        runs = ()
    for folder in runs[:1]:
        yield f"the latest run, {folder.name}", used(folder)
    for folder in named:
        yield f"run {folder.name}", used(folder)
    for matrix, fingerprints in roots.matrices.items():
        yield f"matrix {matrix}", fingerprints
    for folder in runs[: roots.runs]:
        yield f"one of the latest {count(roots.runs, 'run')}", used(folder)
    if roots.unused_days is not None:
        oldest_s = time.time() - roots.unused_days * _DAY_S
        for folder in runs:
            if (folder / NAME).stat().st_mtime >= oldest_s:
                yield f"a run of the last {roots.unused_days:g} days", used(folder)


def protected(store: Store, stages: Mapping[Fingerprint, str]) -> Iterator[tuple[str, Iterable[Fingerprint]]]:
    """Artifacts that no command removes, with the reason. Raises StateError if the list of kept artifacts cannot be read."""
    yield f"kept (pipeline store keep, {KEPT})", _with_inputs(store, stages, kept(store))
    yield "a managed server serves it", _with_inputs(store, stages, _served(store))


def _made_s(artifact: Artifact) -> float:
    with suppress(FileNotFoundError):
        return (artifact.folder / manifest.NAME).stat().st_mtime
    return time.time()  # another process has removed it


def _served(store: Store) -> set[Fingerprint]:
    """Artifacts of managed servers, from their files."""
    files = store.workspace.glob("serve/*/*.json")
    return {
        Fingerprint(each) for file in files for each in _FINGERPRINT.findall(reading.read_text(file, errors="replace"))
    }


def _with_inputs(store: Store, stages: Mapping[Fingerprint, str], wanted: Iterable[Fingerprint]) -> set[Fingerprint]:
    """`wanted` and their direct and indirect inputs. `stages` has the stage of every artifact."""
    reachable: set[Fingerprint] = set()
    pending = list(wanted)
    while pending:
        each = pending.pop()
        if each not in reachable and each in stages:
            reachable.add(each)
            with suppress(StateError):
                made = manifest.read(store.folder(stages[each], each))
                pending += manifest.inputs(made).values()
    return reachable


# Kept artifacts.


def kept(store: Store) -> dict[Fingerprint, str]:
    """Artifacts that are protected from removal, each with its stage. Raises StateError if the list cannot be read."""
    path = store.workspace / KEPT
    try:
        data = user_files.decode_mapping(reading.read_bytes(path))
        return {Fingerprint(each["fingerprint"]): str(each["stage"]) for each in data["artifacts"]}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"{path}: cannot be read: {error}", hint="remove it, then keep artifacts again: pipeline store keep NAME"
        ) from error


def keep(store: Store, artifacts: Mapping[Fingerprint, str]) -> None:
    """Replace the list of kept artifacts. Raises StateError in a read-only workspace."""
    store.check_writable()
    listed = [
        {"stage": stage, "fingerprint": each} for each, stage in sorted(artifacts.items(), key=lambda row: row[::-1])
    ]
    write_json(store.workspace / KEPT, {"schema": 1, "artifacts": listed})
