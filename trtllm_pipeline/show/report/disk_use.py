"""Disk use of a workspace: `pipeline store du`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
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
_DOWNLOAD: Final = "download"


@dataclass(frozen=True, slots=True)
class UsedSpace:
    """Artifacts with a common stage, model or precision."""

    artifacts: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Sizes of artifacts in groups, and of the workspace's other directories."""

    total: UsedSpace
    by: Mapping[str, Mapping[str, UsedSpace]]
    """`stage`, `model`, `precision` -> name -> its share, the largest first."""
    others: Mapping[str, int]
    """Directory -> bytes."""

    def to_json(self) -> dict[str, Json]:
        """JSON, see `docs/reference/formats.md`."""
        by: dict[str, Json] = {
            kind: {name: asdict(each) for name, each in shares.items()} for kind, shares in self.by.items()
        }
        return {"schema": 1, **asdict(self.total), "by": by, "beside": dict(self.others)}

    def blocks(self) -> Iterator[text_blocks.Block]:
        for kind, shares in self.by.items():
            yield text_blocks.Grid((kind, "artifacts", "size"), [_row(name, share) for name, share in shares.items()])
        others = [(folder, "", size(taken), _OTHERS[folder]) for folder, taken in self.others.items() if taken]
        yield text_blocks.Grid(
            ("folder", "artifacts", "size", ""), [(*_row("store", self.total), "total"), *others], left=(0, 3)
        )


def _row(name: str, share: UsedSpace) -> tuple[str, str, str]:
    return name, str(share.artifacts), size(share.size_bytes)


def disk_use(store: Store) -> DiskUse:
    """Disk use of `store`. Artifacts are counted by their manifests, without logs and manifests."""
    artifacts = store.index.all_artifacts()
    folders = {name: store.workspace / name for name in _OTHERS}
    return DiskUse(
        _shares((artifact, "") for artifact in artifacts).get("", UsedSpace(0, 0)),
        {
            kind: _shares((artifact, _parts(artifact)[kind]) for artifact in artifacts)
            for kind in ("stage", "model", "precision")
        },
        {name: disk.folder_bytes(folder) for name, folder in folders.items()},
    )


def _parts(artifact: Artifact) -> dict[str, str]:
    stage, _, rest = artifact.label.partition("/")
    model, _, precision = rest.partition("/")[2].rpartition("/")
    # The label of an artifact shared by several precisions has the precision of the first cell.
    return {"stage": stage, "model": model, "precision": "as downloaded" if stage == _DOWNLOAD else precision}


def _shares(named: Iterator[tuple[Artifact, str]]) -> dict[str, UsedSpace]:
    sizes_by_name: dict[str, list[int]] = {}
    for artifact, name in named:
        sizes_by_name.setdefault(name, []).append(artifact.size_bytes)
    shares = {name: UsedSpace(len(sizes), sum(sizes)) for name, sizes in sizes_by_name.items()}
    return dict(sorted(shares.items(), key=lambda item: -item[1].size_bytes))
