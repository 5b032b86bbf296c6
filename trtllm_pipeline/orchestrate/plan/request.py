"""What a command line asks for: the first step of the flow, and what a run leaves for `resume`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import Json, UsageError, decode_mapping, reading

REQUEST_FILE: Final = "request.json"
LOCAL: Final = "local"
"""The executor that is this machine."""
RAY: Final = "ray"
SLURM: Final = "slurm"
DEFAULT_WORKSPACE: Final = ".pipeline"


@dataclass(frozen=True, slots=True)
class Request:
    """What a command line asks for."""

    matrix: Path
    sets: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()
    until: str | None = None
    toolchain: str | None = None
    assume: str | None = None
    """The machine to plan for, as `--assume` describes it; None is this one."""
    remote: str | None = None
    """Where artifacts are pulled from instead of being made; None is what the matrix says."""
    allow_other_gpu: bool = False
    """Whether engines that were made on GPUs of another name are pulled too."""
    require_signed: bool = False
    trusted_keys: str | None = None
    """With `require_signed`, the policy for what is pulled."""
    executor: str | None = None
    """Where stage runs go, local, ray or slurm; None is local."""
    ray_address: str | None = None

    @property
    def whole(self) -> bool:
        """Whether it is for all cells of the matrix, to the end."""
        return not self.cells and self.until is None

    def changed(self, other: Request) -> Request:
        """This request with what `other` says beside the matrix: its `--set` go after these, the rest in their place."""
        return replace(
            self,
            sets=(*self.sets, *other.sets),
            cells=other.cells or self.cells,
            until=other.until or self.until,
            toolchain=other.toolchain or self.toolchain,
            assume=other.assume or self.assume,
            executor=other.executor or self.executor,
            ray_address=other.ray_address or self.ray_address,
        )

    def to_json(self) -> dict[str, Json]:
        """What `resume` reads back, with the matrix's absolute path."""
        return {**asdict(self), "matrix": str(self.matrix.absolute())}


def read_request(path: Path) -> Request:
    """The request of an earlier run. Raises UsageError when the file is not one."""
    try:
        data = decode_mapping(reading.read_bytes(path))
        lists = {name: tuple(data[name]) for name in ("sets", "cells")}
        return Request(**{**data, **lists, "matrix": Path(data["matrix"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path}: cannot be read: {error}", hint="pipeline run --matrix REQUEST_FILE starts over"
        ) from error
