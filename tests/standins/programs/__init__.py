"""The programs themselves. Standard library only, and little of it: a program starts in well under 0.1 s."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.standins import faults

FACTS: Final = "standin.json"
INVOCATIONS: Final = "invocations.jsonl"
_MODULES: Final = {
    "trtllm-build": "build",
    "trtllm-serve": "serve",
    "trtllm-bench": "bench",
    "quantize.py": "quantize",
    "convert_checkpoint.py": "convert",
    "run.py": "run",
    "build_visual_engine.py": "visual",
    "model_optimizer": "model_optimizer",
}


class ProgramError(Exception):
    """Ends a program with exit code 1 and these words, after a traceback's first line where a Python one would be."""

    def __init__(self, words: str, *, traceback: bool = True) -> None:
        super().__init__(words)
        self.traceback = traceback


def refusal(words: str) -> ProgramError:
    """A failure for which no words were recorded: these are ours."""
    return ProgramError(f"stand-in: {words}")


@dataclass(slots=True)
class Work:
    """One start of a program: where it is installed, and what is known of its release."""

    tool: str
    """Its name, with the family for converters: `convert_checkpoint.py:llama`."""
    folder: Path
    facts: Mapping[str, Any]
    """`standin.json`: release, options by program, GPUs, and the release's ways."""

    @property
    def release(self) -> str:
        return str(self.facts["release"])

    @property
    def sm(self) -> int:
        """Compute capability of the weakest GPU; 0 without GPUs."""
        return min((int(gpu["sm"]) for gpu in self.facts["gpus"]), default=0)

    @property
    def rank(self) -> int:
        """MPI rank; 0 where there is no MPI."""
        return int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))

    @property
    def ranks(self) -> int:
        """Size of the MPI world; 1 where there is no MPI."""
        return int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))

    @property
    def gpus(self) -> list[int]:
        """Indices of the GPUs that CUDA would show: CUDA_VISIBLE_DEVICES counts up to its first name of no device."""
        known = {name: gpu["index"] for gpu in self.facts["gpus"] for name in (str(gpu["index"]), gpu["uuid"])}
        wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
        if wanted is None:
            return [int(gpu["index"]) for gpu in self.facts["gpus"]]
        visible: list[int] = []
        for name in wanted.split(","):
            if name.strip() not in known:
                break
            visible.append(known[name.strip()])
        return visible

    def begin(self) -> None:
        """Call when the arguments and the input are right. Does what this start was told to do wrong."""
        names = (self.tool, self.tool.partition(":")[0])
        taken = (faults.take(self.folder, name, sys.argv) for name in names)
        fault = next((each for each in taken if each is not None), None)
        if fault is None:
            return
        if fault.kind in faults.WORDS:
            raise ProgramError(faults.WORDS[fault.kind])
        print("working", flush=True)
        time.sleep(600)  # not for ever: nothing may outlive a broken test by much
        raise refusal("told to hang, and nobody came for 600 s")

    def write(self, files: Sequence[tuple[Path, bytes]]) -> None:
        """Write `files`."""
        for path, content in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def main(tool: str, folder: str, arguments: Sequence[str]) -> int:
    """Run `tool` of the installation in `folder`; its exit code. The start and the end are noted in `invocations.jsonl`."""
    home = Path(folder)
    work = Work(tool, home, json.loads((home / FACTS).read_text(encoding="utf-8")))
    name = f"{os.getpid()}-{time.time_ns()}"
    start = {
        "id": name,
        "tool": tool,
        "argv": list(arguments),
        "cwd": str(Path.cwd()),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "no_usage_stats": os.environ.get("TRTLLM_NO_USAGE_STATS"),
        "release": work.release,
        "rank": work.rank,
        "started": time.time(),
    }
    _note(home, start)
    code = 1
    try:
        run: Callable[[Work, Sequence[str]], int] = importlib.import_module(
            f"{__name__}.{_MODULES[tool.partition(':')[0]]}"
        ).run
        code = run(work, arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    except KeyboardInterrupt:
        code = 130
    except ProgramError as failure:
        if failure.traceback:
            print("Traceback (most recent call last):", file=sys.stderr)
        print(failure, file=sys.stderr, flush=True)
    finally:
        _note(home, {"id": name, "ended": time.time(), "exit": code})
    return code


def _note(home: Path, record: Mapping[str, Any]) -> None:
    """Append a line; one write to a file opened for appending stays whole among other processes'."""
    descriptor = os.open(home / INVOCATIONS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, (json.dumps(record) + "\n").encode())
    finally:
        os.close(descriptor)
