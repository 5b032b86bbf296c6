"""`pipeline doctor`: what this machine has, what it lacks, and what to do about it."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from trtllm_pipeline.cli import options
from trtllm_pipeline.cli.output import emit, emit_json, emit_rendered, rendered
from trtllm_pipeline.doctor import Line, Status

_LOOKS: Final = {
    (Status.OK, False): ("✓", "+", "green"),
    (Status.WARNING, False): ("!", "!", "yellow"),
    (Status.MISSING, False): ("✗", "X", "red"),
    (Status.MISSING, True): ("·", "-", "dim"),
}
"""Symbol, the same in ASCII, style; by status, and whether nobody needs what is missing."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `doctor`."""
    parser.description = (
        "Look at this machine: GPUs, TensorRT-LLM, Triton, space, limits, tokens. Says what is missing, what to do "
        "about it, and which toolchains can be used. The exit code is 3 if none can."
    )
    parser.epilog = (
        "examples:\n  pipeline doctor\n"
        "  pipeline doctor --format json | jq '.checks[] | select(.status != \"ok\")'\n"
        "  pipeline doctor --assume tensorrt_llm==0.12.0,sm=90,gpus=8"
    )
    options.add_assume(parser)
    parser.add_argument("--toolchain", metavar="NAME", help="judge by this toolchain, not by the one a run would take")
    options.add_workspace(parser)
    options.add_format(parser, "text", "json")


def run(args: argparse.Namespace) -> int:
    """Look and say; 0, or 3 when no toolchain can be used."""
    from trtllm_pipeline import doctor
    from trtllm_pipeline.machine import assume, probe
    from trtllm_pipeline.toolchains import base as toolchains

    if args.assume is not None:
        machine = assume.parse(args.assume)
        checks = doctor.examine_assumed(machine)
    else:
        seen = probe.survey()
        machine = seen.machine
        checks = doctor.examine(seen, Path(args.workspace))
    verdicts = doctor.judge(machine)
    if args.toolchain is not None:
        toolchains.load(args.toolchain)
    line = assume.describe(machine)
    if args.format == "json":
        emit_json(doctor.document(machine, checks, verdicts, line))
    else:
        _show([*doctor.lines(checks, verdicts, args.toolchain)])
        emit(f"\nto plan for this machine elsewhere:\n  --assume '{line}'")
    asked = [verdict for verdict in verdicts if args.toolchain in {None, verdict.name}]
    return 0 if any(verdict.missing is None for verdict in asked) else 3


def _show(lines: Sequence[Line]) -> None:
    """Plain text; on a terminal with colours, unless rich is among what is missing."""
    column = 1 if "utf" not in (sys.stdout.encoding or "").lower() else 0

    def mark(line: Line) -> str:
        return f"  {_LOOKS[line.status, line.grey][column]} {line.status.value:<8} " if line.status else ""

    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            from rich.text import Text

            texts = [
                Text.assemble((mark(line), _LOOKS[line.status, line.grey][2]), (line.text, "dim" if line.grey else ""))
                if line.status
                else Text(line.text, "" if number else "bold")
                for number, line in enumerate(lines)
            ]
            return emit_rendered(rendered(Text("\n").join(texts)))
    for line in lines:
        emit(f"{mark(line)}{line.text}")
    return None
