"""`pipeline store`: verify, repair and clean a workspace."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from trtllm_pipeline.base import Json, UsageError, count, disk, size
from trtllm_pipeline.orchestrate import Artifact, Store, manifest
from trtllm_pipeline.show.cli import completion, options
from trtllm_pipeline.show.cli.output import emit_as, emit_blocks, note

if TYPE_CHECKING:
    from trtllm_pipeline.orchestrate import unused


Names = Annotated[
    list[str] | None,
    options.argument(
        "[ARTIFACT|STAGE|CELL]...", "Artifact ids, fingerprint prefixes, stages or cells.", complete=completion.cells
    ),
]
DryRun = Annotated[
    bool, options.switch("--dry-run", "Only list the artifacts to remove, and the artifacts to keep with reasons.")
]
_DAY_S = 86400


@dataclass(frozen=True, kw_only=True)
class Needed:
    """Options that select needed artifacts. All others are unused."""

    unused_for: Annotated[
        float | None,
        options.duration("--unused-for", "Remove artifacts that no run created or used for this long, e.g. 30d."),
    ] = None
    keep_latest: Annotated[
        int, options.option("--keep-latest", "N", "Keep artifacts used by the last N runs.", min=0)
    ] = 0
    keep_run: Annotated[
        list[str] | None,
        options.option(
            "--keep-run", "RUN", "Keep artifacts used by this run (name or id). Repeatable.", complete=completion.runs
        ),
    ] = None
    keep_matrix: Annotated[
        list[str] | None,
        options.option(
            "--keep-matrix",
            "FILE",
            "Keep artifacts that this matrix needs on this machine. Repeatable.",
            complete=completion.matrices,
        ),
    ] = None

    def roots(self, store: Store) -> unused.Roots:
        """The retention rules of these options, with the matrices planned. Raises UsageError, MatrixError."""
        from trtllm_pipeline.orchestrate import unused

        matrices = {}
        for matrix in self.keep_matrix or ():
            from trtllm_pipeline.orchestrate import plan_of

            plan = plan_of(options.request(matrix), store, guess=True)
            matrices[matrix] = frozenset(run.fingerprint for run in plan.stage_runs.values())
        days = None if self.unused_for is None else self.unused_for / _DAY_S
        return unused.Roots(days, self.keep_latest, tuple(self.keep_run or ()), matrices)


def list_(workspace: options.Workspace = options.WORKSPACE, format: options.TextOrJson = "text") -> None:
    """List the artifacts of a workspace: stage, fingerprint, size, duration, label.

    examples:
      pipeline store list
    """
    store = options.known_store(workspace)
    rows = store.index.all_artifacts()
    shown = ("stage", "fingerprint", "label", "size_bytes", "duration_s")
    records = [
        {name: getattr(row, name) for name in shown} | {"folder": str(store.folder(row.stage, row.fingerprint))}
        for row in rows
    ]
    lines = (
        f"{row.stage:<11} {row.fingerprint} {row.size_bytes / 1e6:>10.1f} MB {row.duration_s:>8.1f} s  {row.label}"
        for row in rows
    )
    emit_as(format, {"schema": 1, "artifacts": records}, text=lambda _: "\n".join(lines))


def verify(
    workspace: options.Workspace = options.WORKSPACE,
    require_signed: options.RequireSigned = False,
    trusted_keys: options.TrustedKeys = None,
    format: options.TextOrJson = "text",
) -> None:
    """Read every file again and compare it with the manifests and any signed statements.

    Damaged artifacts are moved to WORKSPACE/damaged. The next run recreates them. The exit code is 1 if anything is wrong.

    examples:
      pipeline store verify --workspace .pipeline
      pipeline store verify --require-signed --trusted-keys trusted/
    """
    from trtllm_pipeline.orchestrate import provenance

    policy = provenance.policy(trusted_keys, required=require_signed)
    judge = partial(provenance.check, policy=policy, contents=False)  # they have just been verified
    checked = damaged = 0
    findings: list[Json] = []
    for of_one in options.known_store(workspace).verify(judge):
        checked += 1
        damaged += any(each.kind is manifest.Kind.DAMAGED for each, _ in of_one)
        findings += _report(of_one)
    _show({"checked": checked, "damaged": damaged}, findings, format)
    raise typer.Exit(1 if findings else 0)


def repair(workspace: options.Workspace = options.WORKSPACE, format: options.TextOrJson = "text") -> None:
    """Rebuild the index from the manifests and the history.

    Also removes caches compiled by servers, sets aside files that no manifest lists, and restores file modes.

    examples:
      pipeline store repair
    """
    count, lost, done = options.known_store(workspace).repair()
    note(f"the index was rebuilt from the manifests and the history, {lost}")
    _show({"artifacts": count}, [*_report(done)], format)


@options.grouped
def prune(
    needed: Needed,
    dry_run: DryRun = False,
    workspace: options.Workspace = options.WORKSPACE,
    format: options.TextOrJson = "text",
) -> None:
    """Remove leftovers of killed runs. With options that select needed artifacts, also remove unused artifacts.

    The artifacts of the latest run, of managed servers and of store keep always stay, with all of their inputs. So do the
    reports of runs. A run recreates a removed artifact when it needs it.

    examples:
      pipeline store prune --dry-run
      pipeline store prune --unused-for 30d
      pipeline store prune --keep-latest 5 --keep-run release-1.0 --keep-matrix nightly --dry-run
    """
    from trtllm_pipeline.orchestrate import unused

    store = options.known_store(workspace)
    roots = needed.roots(store)
    sorted_out = unused.sort_out(store, roots)
    attempts, stale = list(store.left()), store.stale()
    takes = {folder: disk.folder_bytes(folder) for folder in (*attempts, *stale)}
    removed: Sequence[Artifact] = sorted_out.unused
    if not dry_run:
        attempts = store.sweep()
        store.remove_stale(stale)
        removed = store.remove(lambda: unused.sort_out(store, roots).unused) if removed else []
    left_bytes = sum(takes.get(folder, 0) for folder in (*attempts, *stale))
    freed = sum(each.size_bytes for each in removed)
    kept: dict[str, list[int]] = {}
    for each, why in sorted_out.needed:
        kept.setdefault(why, []).append(each.size_bytes)
    data = {
        "schema": 1,
        "removed_attempts": len(attempts),
        "removed_partial": len(stale),
        "left_bytes": left_bytes,
        "artifacts": [_entry(each) for each in removed],
        "freed_bytes": freed,
        "kept": [{**_entry(each), "why": why} for each, why in sorted_out.needed],
    }
    lines = [*map(_line, removed)]
    parts = [f"{count(len(removed), 'unused artifact')} with {size(freed)}"] if roots.any else []
    parts += [f"{count(len(attempts), 'attempt')} of killed runs"]
    parts += [f"{count(len(stale), 'partial transfer')}"] if stale else []
    parts[-1] += f" with {size(left_bytes)}" if left_bytes else ""
    lines += [f"{'would be removed' if dry_run else 'removed'}: {', '.join(parts)}"]
    if dry_run:
        lines += [f"kept: {count(len(of), 'artifact')} with {size(sum(of))}: {why}" for why, of in kept.items()]
    emit_as(format, data, text=lambda _: "\n".join(lines))


def _entry(each: Artifact) -> dict[str, Json]:
    return {"stage": each.stage, "fingerprint": each.fingerprint, "size_bytes": each.size_bytes}


def rm(
    names: Names = None,
    run: options.Run = None,
    dry_run: DryRun = False,
    yes: Annotated[bool, options.switch("--yes", "Skip the confirmation prompt.")] = False,
    workspace: options.Workspace = options.WORKSPACE,
    format: options.TextOrJson = "text",
) -> None:
    """Remove the artifacts of cells, of stages or of a run. The next run that needs one creates it again.

    A run does not need an artifact if all stages that read it are finished. Then run with --until and its stage.

    Artifacts shared with other cells stay, unless they are named by id or stage. So do artifacts protected by store keep
    or used by a managed server, with all of their inputs. With --run alone, artifacts of other runs stay, and the run
    itself is removed. A name together with --run selects from the artifacts of that run.

    examples:
      pipeline store rm 'qwen2*/fp8/*' --dry-run
      pipeline store rm build-4a46c422fbf3 --yes
      pipeline store rm --run nightly-12 --yes
    """
    from trtllm_pipeline.orchestrate import removal

    if not names and run is None:
        raise UsageError(
            "pipeline store rm: nothing selected", hint="name cells, stages or artifacts, or give --run RUN"
        )
    store = options.known_store(workspace)
    selection = removal.choose(store, names or (), run)
    total = (
        f"{count(len(selection.removed), 'artifact')} with {size(sum(each.size_bytes for each in selection.removed))}"
    )
    what = total if selection.run is None else f"{total} and run {selection.run.name}"
    removed: Sequence[Artifact] = selection.removed
    if not dry_run and (removed or selection.run is not None):
        if not yes:
            _confirm(f"remove {what}?")
        removed = removal.remove(store, names or (), run)
    data = {
        "schema": 1,
        "artifacts": [_entry(each) for each in removed],
        "freed_bytes": sum(each.size_bytes for each in removed),
        "run": None if selection.run is None else selection.run.name,
        "kept": [{**_entry(each), "why": why} for each, why in selection.kept],
    }
    lines = [*map(_line, removed), f"{'would be removed' if dry_run else 'removed'}: {what}"]
    lines += [f"kept: {each.stage} {each.fingerprint}: {why}" for each, why in selection.kept]
    emit_as(format, data, text=lambda _: "\n".join(lines))


def _confirm(question: str) -> None:
    """Prompt for confirmation on a terminal. Raises UsageError without a terminal, Abort on "no"."""
    if not sys.stdin.isatty():
        raise UsageError(question, hint="skip the prompt with --yes, or list the artifacts with --dry-run")
    typer.confirm(question, abort=True, err=True)


def _line(each: Artifact) -> str:
    return f"{each.stage:<11} {each.fingerprint} {each.size_bytes / 1e6:>10.1f} MB  {each.label}"


def keep(
    names: Names = None,
    run: options.Run = None,
    forget: Annotated[bool, options.switch("--forget", "Stop protecting them.")] = False,
    workspace: options.Workspace = options.WORKSPACE,
    format: options.TextOrJson = "text",
) -> None:
    """Protect artifacts and their inputs from store prune and store rm. Without names, list protected artifacts.

    examples:
      pipeline store keep build-4a46c422fbf3
      pipeline store keep --run release-1.0
      pipeline store keep --forget build
    """
    from trtllm_pipeline.orchestrate import runs, unused

    store = options.known_store(workspace)
    kept = unused.kept(store)
    of_run = (
        None
        if run is None
        else {each.fingerprint for each in runs.read_run(runs.find_run(store, run)).stage_runs.values()}
    )
    if names or run is not None:
        meant = {each.fingerprint: each.stage for name in names or (None,) for each in runs.find_artifacts(store, name)}
        meant = {each: stage for each, stage in meant.items() if of_run is None or each in of_run}
        kept = {each: stage for each, stage in kept.items() if each not in meant} if forget else {**kept, **meant}
        unused.keep(store, kept)
    elif forget:
        raise UsageError("--forget: nothing selected", hint="name artifacts, a stage or a cell, or give --run RUN")
    artifacts = store.index.artifacts(kept)
    lines = [
        _line(artifacts[each]) if each in artifacts else f"{stage:<11} {each}  missing" for each, stage in kept.items()
    ]
    data = {"schema": 1, "artifacts": [{"stage": stage, "fingerprint": each} for each, stage in kept.items()]}
    emit_as(format, data, text=lambda _: "\n".join(lines) or "no artifacts are protected")


def du(workspace: options.Workspace = options.WORKSPACE, format: options.TextOrJson = "text") -> None:
    """Show the disk usage of a workspace: artifacts by stage, model and precision, and other files.

    examples:
      pipeline store du
    """
    from trtllm_pipeline.show.report.disk_use import disk_use

    emit_blocks(format, disk_use(options.known_store(workspace)))


def _report(findings: Sequence[tuple[manifest.Discrepancy, str]]) -> Iterator[Json]:
    """Print the findings as JSON, and each one as a line on stderr."""
    for each, done in findings:
        note(f"{each}; {done}")
        yield {**asdict(each), "done": done}


def _show(counts: dict[str, Json], findings: list[Json], format: str) -> None:
    totals = {**counts, "findings": len(findings)} if findings else counts
    data = {"schema": 1, **counts, "findings": findings}
    emit_as(format, data, text=lambda _: ", ".join(f"{count} {name}" for name, count in totals.items()))
