"""GPUs by the names that people use, for `--assume 2xH100`."""

from __future__ import annotations

import difflib
import json
import re
from typing import Any, Final, NamedTuple

from trtllm_pipeline import PACKAGE


class GpuType(NamedTuple):
    """A type of GPU, with the driver's name for it."""

    name: str
    sm: int
    """Compute capability as one number: 90 is 9.0."""
    memory_mib: int
    """As in nvidia-smi. With GDDR error correction, a sixteenth less than in the data sheet."""

    @property
    def memory_gib(self) -> float:
        """Its memory in GiB, rounded to a tenth."""
        return round(self.memory_mib * 10 / 1024) / 10


TABLES: Final[dict[str, Any]] = json.loads((PACKAGE / "data" / "gpus.json").read_text(encoding="utf-8"))
GPU_TYPES: Final = {short: GpuType(*fields) for short, fields in TABLES["types"].items()}
"""Short name -> type. The first one of a compute capability is the usual one."""
_SOLD: Final = 0.1
"""Difference between the size that a GPU is sold with, as in A100-80GB, and its memory in GiB, as a share."""
_SIZE: Final = re.compile(r"[\s_-](\d+)\s*GB\s*$", re.IGNORECASE)
_COUNTED: Final = re.compile(r"(?:(\d+)\s*[xX]\s*)?(\D.*)", re.DOTALL)


def counted(text: str) -> tuple[str | None, GpuType | None]:
    """The count, as typed, and the type of "2xH100", "H100" or "2 x NVIDIA H100 80GB HBM3". None for a part that is missing."""
    match = _COUNTED.fullmatch(text.strip())
    if match is None:
        return None, None
    wanted, size = _plain(match[2]), _SIZE.search(match[2])
    named = (kind for short, kind in GPU_TYPES.items() if wanted in {_plain(short), _plain(kind.name)})
    if size is not None:
        shorter = GPU_TYPES.get(_plain(match[2][: size.start()]))
        if shorter is not None and abs(int(size[1]) / shorter.memory_gib - 1) < _SOLD:
            return match[1], shorter
    return match[1], next(named, None)


def short(name: str) -> str:
    """The table's name for a GPU with this name of the driver. `name` itself if it has none."""
    return next((short for short, kind in GPU_TYPES.items() if kind.name == name), name)


def near(text: str) -> str | None:
    """The table's name that is closest to the GPU in `text`."""
    match = _COUNTED.fullmatch(text.strip())
    names = {_plain(name): name for name in GPU_TYPES}
    close = difflib.get_close_matches(_plain(match[2]), names, n=1, cutoff=0.5) if match else []
    return names[close[0]] if close else None


def instead(text: str) -> str:
    """Words for a GPU that the table lacks: the closest name, and the keys for any other. Empty if `text` is not a GPU."""
    match, close = _COUNTED.fullmatch(text.strip()), near(text)
    if match is None or not (close or match[1]):
        return ""
    did = f"; did you mean {close}?" if close else ";"
    return f"{did} describe another GPU by gpus={match[1] or 1},sm=SM,gpu_memory_gib=GIB,gpu={match[2]}"


def usual(sm: int) -> GpuType | None:
    """A usual GPU with this compute capability."""
    return next((kind for kind in GPU_TYPES.values() if kind.sm == sm), None)


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).upper().removeprefix("NVIDIA")
