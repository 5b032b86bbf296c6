"""CPU time of commands: the help of each, some that need no workspace, and a plan of 2,000 cells.

    python benchmarks/startup.py               least of 5 runs
    python benchmarks/startup.py --check       exit code 1 if a limit is broken; needs an idle machine

CPU time is that of the user and the system. It depends less on other work on the machine than wall time does. Byte code is kept in
its own directory, and the first run of each command, which writes it, is not counted.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from trtllm_pipeline.show.cli.app import COMMANDS

ROOT: Final = Path(__file__).parents[1]
HELP_S: Final = 0.3
COMMAND_S: Final = 0.5
PLAN_S: Final = 3.0
"""Limits of CPU time."""
MANY: Final = """\
name: many
axes:
  model: [qwen2-7b, llama-3.1-8b-instruct, qwen2.5-7b-instruct, mistral-7b-instruct-v0.3]
  precision: [fp16, bf16, fp8, int8_wo, int4_wo]
  parallel: [tp1, tp2, tp4, tp8]
  max_batch_size: [1, 2, 4, 8, 16]
  lengths: ["128,128", "512,128", "1024,256", "2048,512", "2048,1024"]
  toolchain: [tensorrt_llm]
"""
ASSUMED: Final = "8xH100,tensorrt_llm==0.16"


def commands(folder: Path) -> dict[tuple[str, ...], float]:
    """Words of a command -> its limit."""
    many, workspace = folder / "many.yaml", ("--workspace", str(folder / "none"))
    many.write_text(MANY, encoding="utf-8")
    tiny = str(ROOT / "matrices" / "tiny.yaml")
    return {
        ("--help",): HELP_S,
        **{(*command.path.split(), "--help"): HELP_S for command in COMMANDS},
        ("--version",): COMMAND_S,
        ("matrix", "list"): COMMAND_S,
        ("models", "list"): COMMAND_S,
        ("doctor", "--assume", ASSUMED): COMMAND_S,
        ("plan", tiny, "--toolchain", "embedded", *workspace): COMMAND_S,
        ("plan", str(many), "--assume", ASSUMED, *workspace): PLAN_S,
    }


def cpu_s(words: Sequence[str], environment: dict[str, str]) -> float:
    """CPU seconds of one command. Raises CalledProcessError if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "trtllm_pipeline", *words]
    subprocess.run(command, check=True, capture_output=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each command (default 5)")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a limit is broken")
    args = parser.parse_args()
    broken = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": f"{folder}/code", "PYTHONDONTWRITEBYTECODE": ""}
        environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}  # no hub is waited for
        for words, limit_s in commands(folder).items():
            cpu_s(words, environment)
            least_s = min(cpu_s(words, environment) for _ in range(args.rounds))
            shown = " ".join(Path(word).name if word.startswith("/") else word for word in words)
            print(f"{least_s:6.2f} s{' over the limit' if least_s > limit_s else ''}  pipeline {shown}", flush=True)
            broken += least_s > limit_s
    return 1 if args.check and broken else 0


if __name__ == "__main__":
    sys.exit(main())
