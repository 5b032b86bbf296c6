"""Disk use of a workspace: `pipeline store du`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Final

from trtllm_pipeline.base import Json, disk, size, text_blocks
from trtllm_pipeline.orchestrate import Artifact, Store

_OTHERS: Final = {
    "work": "attempts and partial transfers (store prune)",
    "damaged": "damaged artifacts, remove them at will",
    "runs": "plans and reports of runs",
    "serve": "managed servers",
}
"""Directory of a workspace -> description of its contents."""


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Sizes of artifacts in groups, and of the workspace's other directories, in bytes."""

    sizes: Sequence[int]
    by: Mapping[str, Mapping[str, Sequence[int]]]
    """`stage`, `model`, `precision` -> name -> sizes of its artifacts, the largest total first."""
    others: Mapping[str, int]

    def to_json(self) -> dict[str, Json]:
        """JSON, see `docs/reference/formats.md`."""
        by: dict[str, Json] = {
            kind: {name: _share(sizes) for name, sizes in groups.items()} for kind, groups in self.by.items()
        }
        return {"schema": 1, **_share(self.sizes), "by": by, "beside": dict(self.others)}

    def blocks(self) -> Iterator[text_blocks.Block]:
        for kind, groups in self.by.items():
            yield text_blocks.Grid((kind, "artifacts", "size"), list(starmap(_row, groups.items())))
        others = [(folder, "", size(taken), _OTHERS[folder]) for folder, taken in self.others.items() if taken]
        yield text_blocks.Grid(
            ("folder", "artifacts", "size", ""), [(*_row("store", self.sizes), "total"), *others], left=(0, 3)
        )


def _share(sizes: Sequence[int]) -> dict[str, Json]:
    return {"artifacts": len(sizes), "size_bytes": sum(sizes)}


def _row(name: str, sizes: Sequence[int]) -> tuple[str, str, str]:
    return name, str(len(sizes)), size(sum(sizes))


def disk_use(store: Store) -> DiskUse:
    """Disk use of `store`. Artifacts are counted by their manifests, without logs and manifests."""
    artifacts = store.index.all_artifacts()
    by: dict[str, dict[str, list[int]]] = {"stage": {}, "model": {}, "precision": {}}
    for artifact in artifacts:
        for kind, name in _parts(artifact).items():
            by[kind].setdefault(name, []).append(artifact.size_bytes)
    return DiskUse(
        [artifact.size_bytes for artifact in artifacts],
        {kind: dict(sorted(groups.items(), key=lambda item: -sum(item[1]))) for kind, groups in by.items()},
        {name: disk.folder_bytes(store.workspace / name) for name in _OTHERS},
    )


def _parts(artifact: Artifact) -> dict[str, str]:
    stage, _, rest = artifact.label.partition("/")
    model, _, precision = rest.partition("/")[2].rpartition("/")
    # The label of an artifact shared by several precisions has the precision of the first cell.
    return {"stage": stage, "model": model, "precision": "as downloaded" if stage == "download" else precision}
