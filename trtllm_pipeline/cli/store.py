"""`pipeline store`: verify, repair and clean a workspace."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from trtllm_pipeline.cli import options
from trtllm_pipeline.cli.output import emit, emit_json, note
from trtllm_pipeline.domain import Json
from trtllm_pipeline.errors import UsageError
from trtllm_pipeline.store.inspection import Discrepancy, Kind
from trtllm_pipeline.store.store import Store


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `store`."""
    parser.description = "Look after a workspace's store."
    parser.epilog = (
        "  list      the artifacts: stage, fingerprint, size, seconds it took, label\n"
        "  verify    read every file again and compare it with the manifests; damaged artifacts are set aside\n"
        "            (WORKSPACE/damaged) and made again by `run`\n"
        "  repair    rebuild the index from the manifests and the history; remove what servers compiled, set aside\n"
        "            what no manifest lists, restore modes\n"
        "  sweep     remove what killed runs left behind\n\n"
        "example:\n  pipeline store verify --workspace .pipeline"
    )
    parser.add_argument(
        "action", metavar="ACTION", choices=("list", "verify", "repair", "sweep"), help="list, verify, repair or sweep"
    )
    options.add_workspace(parser)
    options.add_format(parser, "text", "json")


def run(args: argparse.Namespace) -> int:
    """Do it and say what was found."""
    if not Path(args.workspace).is_dir():
        raise UsageError(f"{args.workspace}: there is no such workspace", hint="--workspace DIR names one")
    store = Store(Path(args.workspace))
    found: dict[str, Json]
    findings: list[Json] = []
    if args.action == "list":
        return _list(store, as_json=args.format == "json")
    if args.action == "verify":
        checked = damaged = 0
        for of_one in store.verify():
            checked += 1
            damaged += any(each.kind is Kind.DAMAGED for each, _ in of_one)
            findings += _told(of_one)
        found = {"checked": checked, "damaged": damaged}
    elif args.action == "repair":
        count, lost, done = store.repair()
        note(f"the index is made anew from the manifests and the history, {lost}")
        findings += _told(done)
        found = {"artifacts": count}
    else:
        found = {"removed": store.sweep()}
    if args.format == "json":
        emit_json({"schema": 1, **found, **({} if args.action == "sweep" else {"findings": findings})})
    else:
        counts = {**found, "findings": len(findings)} if findings else found
        emit(", ".join(f"{count} {name}" for name, count in counts.items()))
    return 1 if args.action == "verify" and findings else 0


def _told(findings: Sequence[tuple[Discrepancy, str]]) -> Iterator[Json]:
    """The findings as JSON; each is a line on stderr as well."""
    for each, done in findings:
        note(f"{each}; {done}")
        yield {**each.to_json(), "done": done}


def _list(store: Store, *, as_json: bool) -> int:
    rows = store.index.all_artifacts()
    if as_json:
        emit_json(
            {
                "schema": 1,
                "artifacts": [
                    {
                        "stage": row.stage,
                        "fingerprint": row.fingerprint,
                        "label": row.label,
                        "size_bytes": row.size_bytes,
                        "duration_s": row.duration_s,
                        "folder": str(store.folder(row.stage, row.fingerprint)),
                    }
                    for row in rows
                ],
            }
        )
        return 0
    for row in rows:
        emit(
            f"{row.stage:<11} {row.fingerprint} {row.size_bytes / 1e6:>10.1f} MB {row.duration_s:>8.1f} s  {row.label}"
        )
    return 0
