"""The request of a command line: the first step of the flow, stored by a run for `resume`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import Json, UsageError, reading, user_files

REQUEST_FILE: Final = "request.json"
LOCAL: Final = "local"
"""The executor on this machine."""
RAY: Final = "ray"
SLURM: Final = "slurm"
DEFAULT_WORKSPACE: Final = ".pipeline"


@dataclass(frozen=True, slots=True)
class Request:
    """The request of a command line."""

    matrix: Path
    sets: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()
    until: str | None = None
    toolchain: str | None = None
    assume: str | None = None
    """Machine to plan for, as in `--assume`. Default: this machine."""
    remote: str | None = None
    """Remote store to pull artifacts from. Default: the matrix's."""
    allow_other_gpu: bool = False
    """Also pull engines that were built on another type of GPU."""
    require_signed: bool = False
    trusted_keys: str | None = None
    """(with `require_signed`) Policy for pulled artifacts."""
    rerun: tuple[str, ...] = ()
    """Measuring stages to run again although their results are up to date. `resume` does not repeat them."""
    executor: str | None = None
    """Executor of stage runs: local, ray or slurm. Default: local."""
    ray_address: str | None = None

    @property
    def whole(self) -> bool:
        """True if it is for all cells and stages of the matrix."""
        return not self.cells and self.until is None

    def changed(self, other: Request) -> Request:
        """This request updated by `other`. `--set` changes of `other` are appended, its other values replace these."""
        return replace(
            self,
            sets=(*self.sets, *other.sets),
            cells=other.cells or self.cells,
            until=other.until or self.until,
            toolchain=other.toolchain or self.toolchain,
            assume=other.assume or self.assume,
            rerun=other.rerun,
            executor=other.executor or self.executor,
            ray_address=other.ray_address or self.ray_address,
        )

    def to_json(self) -> dict[str, Json]:
        """The JSON that `resume` reads, with the matrix's absolute path."""
        known = {name: value for name, value in asdict(self).items() if name != "rerun"}
        return {**known, "matrix": str(self.matrix.absolute())}


def read_request(path: Path) -> Request:
    """The request of an earlier run. Raises UsageError if the file is not a request."""
    try:
        data = user_files.decode_mapping(reading.read_bytes(path))
        lists = {name: tuple(data[name]) for name in ("sets", "cells")}
        return Request(**{**data, **lists, "matrix": Path(data["matrix"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path}: cannot be read: {error}", hint="pipeline run --matrix REQUEST_FILE starts over"
        ) from error
