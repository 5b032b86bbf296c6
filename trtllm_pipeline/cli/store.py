"""`pipeline store`: verify, repair and clean a workspace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer

from trtllm_pipeline.cli import options
from trtllm_pipeline.cli.output import emit_as, note
from trtllm_pipeline.domain import Json
from trtllm_pipeline.errors import UsageError
from trtllm_pipeline.store.manifest import Discrepancy, Kind


def list_(workspace: options.Workspace = options.WORKSPACE, format: options.TextOrJson = "text") -> None:
    """List the artifacts of a workspace: stage, fingerprint, size, seconds it took, label.

    examples:
      pipeline store list
    """
    store = options.known_store(workspace)
    rows = store.index.all_artifacts()
    shown = ("stage", "fingerprint", "label", "size_bytes", "duration_s")
    found = [
        {name: getattr(row, name) for name in shown} | {"folder": str(store.folder(row.stage, row.fingerprint))}
        for row in rows
    ]
    lines = (
        f"{row.stage:<11} {row.fingerprint} {row.size_bytes / 1e6:>10.1f} MB {row.duration_s:>8.1f} s  {row.label}"
        for row in rows
    )
    emit_as(format, {"schema": 1, "artifacts": found}, text=lambda _: "\n".join(lines))


def verify(
    workspace: options.Workspace = options.WORKSPACE,
    require_signed: options.RequireSigned = False,
    trusted_keys: options.TrustedKeys = None,
    format: options.TextOrJson = "text",
) -> None:
    """Read every file again and compare it with the manifests, and with signed statements where there are any.

    Damaged artifacts are moved to WORKSPACE/damaged, and made again by the next run. The exit code is 1 if anything is wrong.

    examples:
      pipeline store verify --workspace .pipeline
      pipeline store verify --require-signed --trusted-keys trusted/
    """
    from trtllm_pipeline import provenance

    policy = provenance.policy(trusted_keys, required=require_signed)
    judge = partial(provenance.check, policy=policy, contents=False)  # they have just been read
    checked = damaged = 0
    findings: list[Json] = []
    for of_one in options.known_store(workspace).verify(judge):
        checked += 1
        damaged += any(each.kind is Kind.DAMAGED for each, _ in of_one)
        findings += _told(of_one)
    _show({"checked": checked, "damaged": damaged}, findings, format)
    raise typer.Exit(1 if findings else 0)


def repair(workspace: options.Workspace = options.WORKSPACE, format: options.TextOrJson = "text") -> None:
    """Rebuild the index from the manifests and the history.

    It also removes what servers compiled, sets aside what no manifest lists, and restores file modes.

    examples:
      pipeline store repair
    """
    count, lost, done = options.known_store(workspace).repair()
    note(f"the index was rebuilt from the manifests and the history, {lost}")
    _show({"artifacts": count}, [*_told(done)], format)


def gc(
    unused_days: Annotated[
        float | None,
        options.option(
            "--unused-days", "DAYS", "Also remove the artifacts that no run of so many days asked for.", min=0
        ),
    ] = None,
    dry_run: Annotated[bool, options.switch("--dry-run", "Only list the artifacts that would be removed.")] = False,
    workspace: options.Workspace = options.WORKSPACE,
    format: options.TextOrJson = "text",
) -> None:
    """Remove what killed runs left behind, and with --unused-days what nobody needs any more.

    What the latest run asked for stays, and what a kept server serves. Reports of runs stay too. What was removed is made
    again when a run asks for it.

    examples:
      pipeline store gc
      pipeline store gc --unused-days 30
    """
    from trtllm_pipeline.planning.names import count, size
    from trtllm_pipeline.planning.unused import unused

    if dry_run and unused_days is None:
        raise UsageError("--dry-run lists what --unused-days would remove", hint="add --unused-days DAYS")
    store = options.known_store(workspace)
    found = [] if unused_days is None else unused(store, unused_days)
    swept, found = (0, found) if dry_run else (store.sweep(), store.remove(found) if found else [])
    freed = sum(each.size_bytes for each in found)
    artifacts: list[Json] = [
        {"stage": each.stage, "fingerprint": each.fingerprint, "size_bytes": each.size_bytes} for each in found
    ]
    data = {"schema": 1, "removed_attempts": swept, "artifacts": artifacts, "freed_bytes": freed}
    listed = [f"{each.stage:<11} {each.fingerprint} {each.size_bytes / 1e6:>10.1f} MB  {each.label}" for each in found]
    told = f"{count(swept, 'attempt')} removed"
    if unused_days is not None:
        unneeded = f"{count(len(found), 'unused artifact')} with {size(freed)}"
        told = f"{unneeded} would be removed" if dry_run else f"{unneeded} and {told}"
    emit_as(format, data, text=lambda _: "\n".join([*listed, told]))


def _told(findings: Sequence[tuple[Discrepancy, str]]) -> Iterator[Json]:
    """The findings as JSON; each is a line on stderr as well."""
    for each, done in findings:
        note(f"{each}; {done}")
        yield {**asdict(each), "done": done}


def _show(counts: dict[str, Json], findings: list[Json] | None, format: str) -> None:
    told = {**counts, "findings": len(findings)} if findings else counts
    data = {"schema": 1, **counts, **({} if findings is None else {"findings": findings})}
    emit_as(format, data, text=lambda _: ", ".join(f"{count} {name}" for name, count in told.items()))
