"""`pipeline store push` and `pipeline store pull`: transfer artifacts to and from a remote store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtllm_pipeline.base import Json, Scope, UsageError, count, probe, size
from trtllm_pipeline.orchestrate import Request, Store
from trtllm_pipeline.show.cli import completion, options
from trtllm_pipeline.show.cli.output import emit_as, note

if TYPE_CHECKING:
    from trtllm_pipeline.orchestrate import Outline, remote_store

Url = Annotated[
    str,
    options.argument(
        "URL",
        "Remote store: s3://BUCKET/DIR, gs://BUCKET/DIR, az://CONTAINER/DIR, https://HOST/DIR (pull only), or a directory.",
    ),
]
Names = Annotated[
    list[str] | None,
    options.argument(
        "[ARTIFACT|STAGE|CELL]...",
        "Artifact ids, fingerprint prefixes, stages or cells (default: all artifacts).",
        complete=completion.cells,
    ),
]
Jobs = Annotated[int, options.option("--jobs", "N", "Number of concurrent file transfers.", min=1, max=128)]
DryRun = Annotated[bool, options.switch("--dry-run", "Only list artifacts and sizes, without transferring.")]


@dataclass(frozen=True, kw_only=True)
class ArtifactSelection:
    """Options that select artifacts."""

    names: Names = None
    run: options.Run = None
    matrix: options.OptionalMatrix = None
    cells: options.Cells = None
    sets: options.Sets = None
    until: options.Until = None
    toolchain: options.Toolchain = None

    def request(self) -> Request | None:
        """The plan that selects them, or None without one. Raises UsageError."""
        if self.matrix is not None:
            if self.run is not None:
                raise UsageError("--run and --matrix cannot be combined", hint="give only one")
            return options.request(self.matrix, self.cells, self.sets, self.until, self.toolchain)
        if self.cells or self.sets or self.until:
            raise UsageError("--cells, --set and --until require --matrix", hint="add --matrix FILE, or name the CELL")
        return None


@options.grouped
def push(
    url: Url,
    selection: ArtifactSelection,
    verify: Annotated[
        bool, options.switch("--verify", "Also verify artifacts that are already there, and resend damaged ones.")
    ] = False,
    jobs: Jobs = 8,
    dry_run: DryRun = False,
    workspace: options.Workspace = options.WORKSPACE,
    format: options.TextOrJson = "text",
) -> None:
    """Send artifacts to a remote store, so that other machines can pull instead of creating them.

    Artifacts that are already there are skipped. So are model repositories, because they contain absolute paths. The
    exit code is 1 if an artifact cannot be sent.

    examples:
      pipeline store push s3://engines/nightly
      pipeline store push s3://engines/nightly build --run latest
      pipeline store push /mnt/engines --matrix my.yaml --cells 'qwen*' --until build --dry-run
    """
    from trtllm_pipeline.orchestrate import remote_store

    store = options.known_store(workspace)
    with closing(remote_store.Remote(url, jobs=jobs, thorough=verify)) as target:
        target.check_writable()
        known = [
            remote_store.ArtifactKey(each.stage, each.fingerprint)
            for each in store.index.all_artifacts()
            if each.folder.is_dir()
        ]
        chosen = _chosen(store, known, selection, selection.request())
        comparison = remote_store.compare_to_push(store, target, chosen)
        pending = _begin(comparison, f"push to {target.url}")
        done = {} if dry_run else _each(remote_store.push(store, target, pending, _progress(pending)))
        _end(target.url, [done.get(each.fingerprint, each) for each in comparison], format, "pushed")


@options.grouped
def pull(
    url: Url,
    selection: ArtifactSelection,
    allow_other_gpu: options.AllowOtherGpu = False,
    require_signed: options.RequireSigned = False,
    trusted_keys: options.TrustedKeys = None,
    jobs: Jobs = 8,
    dry_run: DryRun = False,
    workspace: options.Workspace = options.WORKSPACE,
    format: options.TextOrJson = "text",
) -> None:
    """Fetch artifacts from a remote store into the workspace, so that a run need not create them.

    With --matrix, fetches the artifacts that its cells need on this machine's release and compute capability. An engine
    built on a different GPU model is refused. Digests of all files and signed statements are verified. Refused
    artifacts are listed, and the exit code is then 1. After an interrupt, the next pull restarts incomplete artifacts.

    examples:
      pipeline store pull s3://engines/nightly --matrix my.yaml
      pipeline store pull s3://engines/nightly build --require-signed --trusted-keys trusted/
      pipeline store pull https://engines.example/nightly build-4a46c422fbf3
    """
    from trtllm_pipeline.orchestrate import provenance, remote_store

    policy = provenance.policy(trusted_keys, required=require_signed)
    request = selection.request()
    with closing(remote_store.Remote(url, jobs=jobs)) as source:
        known = None if request is not None or selection.run is not None else source.places()
        store = Store(Path(workspace))
        store.check_writable()
        chosen = _chosen(store, known, selection, request)
        gpus = () if allow_other_gpu else {gpu.name for gpu in probe.this_machine().gpus}
        comparison = remote_store.compare_to_pull(store, source, chosen, gpus)
        pending = _begin(comparison, f"pull from {source.url}", absent=len(chosen) - len(comparison))
        done: dict[str, remote_store.ArtifactTransfer] = {}
        if not dry_run:
            remote_store.check_room(store, pending)
            judge = partial(provenance.check, policy=policy, contents=False)  # every file has just been verified
            done = _each(remote_store.pull(store, source, pending, judge, _progress(pending)))
        _end(source.url, [done.get(each.fingerprint, each) for each in comparison], format, "pulled")


def _chosen(
    store: Store,
    known: Sequence[remote_store.ArtifactKey] | None,
    selection: ArtifactSelection,
    request: Request | None,
) -> list[remote_store.ArtifactKey]:
    """The selected artifacts out of `known`. None means those of the run or the matrix."""
    from trtllm_pipeline.orchestrate import plan_file, remote_store
    from trtllm_pipeline.orchestrate import runs as run_folders

    planned: Outline | None = None
    if request is not None:
        from trtllm_pipeline.orchestrate import plan_of

        planned = plan_file.outline(plan_of(request, store))
    elif selection.run is not None:
        planned = run_folders.read_run(run_folders.find_run(store, selection.run))
    if planned is not None:
        selected = [
            remote_store.ArtifactKey(each.stage, each.fingerprint)
            for each in planned.stage_runs.values()
            if each.scope is not Scope.SERVICE
        ]
        names = set(selected if known is None else known)
        known = [place for place in selected if place in names]
    assert known is not None
    matches = [place for name in selection.names or (None,) for place in run_folders.find_named(store, known, name)]
    if selection.names and remote_store.BOUND.intersection(selection.names):
        raise UsageError(
            "model repositories contain absolute paths of their workspace", hint="a run generates them within a second"
        )
    return [place for place in dict.fromkeys(matches) if place.stage not in remote_store.BOUND]


def _begin(
    artifacts: Sequence[remote_store.ArtifactTransfer], what: str, absent: int = 0
) -> list[remote_store.ArtifactTransfer]:
    """Print the work to do, and return it."""
    pending = [each for each in artifacts if each.state == "pending"]
    present = sum(each.state == "present" for each in artifacts)
    parts = [f"{count(len(pending), 'artifact')} to {what}, {size(sum(each.transfer_bytes for each in pending))}"]
    parts += [f"{present} already there"] if present else []
    parts += [f"{absent} missing"] if absent else []
    note("; ".join(parts))
    return pending


def _progress(pending: Sequence[remote_store.ArtifactTransfer]) -> remote_store.Progress:
    from trtllm_pipeline.orchestrate import paced, remote_store

    return remote_store.Progress(paced(sum(each.transfer_bytes for each in pending), note))


def _each(transfers: Iterable[remote_store.ArtifactTransfer]) -> dict[str, remote_store.ArtifactTransfer]:
    """Print the outcome of each artifact. Returns them by fingerprint."""
    results: dict[str, remote_store.ArtifactTransfer] = {}
    for each in transfers:
        results[each.fingerprint] = each
        if each.state == "busy":
            note(f"{each.id}: skipped, another process is working on it")
    return results


def _end(url: str, results: Sequence[remote_store.ArtifactTransfer], format: str, done: str) -> None:
    words = {"done": done, "pending": f"to be {done}", "present": "already there"}
    artifacts: list[Json] = []
    lines = []
    for each in results:
        if each.state == "refused":
            note(f"{each.stage} {each.fingerprint}: refused: {each.message}")
        label = "" if each.sealed is None else each.sealed.label
        lines.append(
            f"{each.stage:<11} {each.fingerprint} {each.size_bytes / 1e6:>10.1f} MB  "
            f"{words.get(each.state, each.state):<14} {label}"
        )
        details = {name: getattr(each, name) for name in ("size_bytes", "transfer_bytes", "state", "message")}
        artifacts.append({"stage": each.stage, "fingerprint": each.fingerprint, "label": label, **details})
    emit_as(format, {"schema": 1, "url": url, "artifacts": artifacts}, text=lambda _: "\n".join(lines))
    raise typer.Exit(1 if any(each.state == "refused" for each in results) else 0)
