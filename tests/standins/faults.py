"""What can go wrong in a stand-in on demand, how often, and in which words.

`faults.json` in the installation's folder lists faults by program, in order; every start of a program uses up one of
the first that is left. Programs and tests change it under one lock, so "fail once, then work" holds for any number of
processes.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

FILE: Final = "faults.json"

WORDS: Final = {
    "build_oom": "[TensorRT-LLM][ERROR] Requested amount of GPU memory (42949672960 bytes) could not be allocated. "
    "There may not be enough free memory for allocation to succeed.\n"
    "[TRT] [E] [virtualMemoryBuffer.cpp::resizePhysical] Error Code 2: OutOfMemory (Requested size was 42949672960 "
    "bytes.)",
    "version_mismatch": "[TensorRT-LLM][ERROR] The engine plan file is not compatible with this version of TensorRT, "
    "expecting library version 10.3.0.26 got 9.2.0.5, please rebuild.",
}
"""What a program says before it ends with exit code 1, by kind of fault."""
HANG: Final = "hang"
"""The kind that is done, not said: never end."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to fail. `times` None means always; `above`: only a start with more `--max_num_tokens` than that."""

    kind: str
    times: int | None = 1
    above: int = 0

    def __post_init__(self) -> None:
        if self.kind not in (*WORDS, HANG):
            raise ValueError(f"no fault {self.kind!r}; there are {', '.join((*WORDS, HANG))}")


def add(folder: Path, tool: str, *faults: Fault) -> None:
    """Let `tool` fail in these ways, after those that are there already."""
    with _changing(folder) as planned:
        planned.setdefault(tool, []).extend(asdict(fault) for fault in faults)


def clear(folder: Path) -> None:
    """Let everything work."""
    with _changing(folder) as planned:
        planned.clear()


def take(folder: Path, tool: str, arguments: Sequence[str] = ()) -> Fault | None:
    """What this start of `tool` must do wrong, if anything."""
    tokens = [int(value) for name, value in pairwise(arguments) if name == "--max_num_tokens"]
    with _changing(folder) as planned:
        for fault in planned.get(tool, ()):
            if fault["above"] and max(tokens, default=0) <= fault["above"]:
                continue
            if fault["times"] is None:
                return Fault(**fault)
            if fault["times"] > 0:
                fault["times"] -= 1
                return Fault(**fault)
    return None


def left(folder: Path, tool: str, kind: str) -> int:
    """How often `tool` will fail in this way yet."""
    with _changing(folder) as planned:
        return sum(fault["times"] or 0 for fault in planned.get(tool, ()) if fault["kind"] == kind)


@contextmanager
def _changing(folder: Path) -> Iterator[dict[str, list[dict[str, Any]]]]:
    with (folder / "faults.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = folder / FILE
        text = file.read_text(encoding="utf-8") if file.exists() else "{}"
        planned = json.loads(text)
        yield planned
        changed = json.dumps(planned)
        if changed != text:
            new = file.with_suffix(".new")
            new.write_text(changed, encoding="utf-8")
            new.replace(file)
