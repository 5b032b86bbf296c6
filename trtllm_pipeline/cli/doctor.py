"""`pipeline doctor`: what this machine has, what it lacks, and what to do about it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

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


def doctor(
    assume: options.Assume = None,
    toolchain: Annotated[
        str | None,
        typer.Option(
            "--toolchain",
            metavar="NAME",
            help="judge by this toolchain, not by the one a run would take",
            autocompletion=options.completion.toolchains,
        ),
    ] = None,
    workspace: options.Workspace = options.WORKSPACE,
    format: options.TextOrJson = "text",
) -> None:
    """Say what this machine has and lacks, what to do about it, and which toolchains it can use.

    GPUs, TensorRT-LLM, Triton, disk space, limits, tokens. The exit code is 3 if no toolchain can be used.

    examples:
      pipeline doctor
      pipeline doctor --format json | jq '.checks[] | select(.status != "ok")'
      pipeline doctor --assume tensorrt_llm==0.12.0,sm=90,gpus=8
    """
    from trtllm_pipeline import doctor
    from trtllm_pipeline.machine import assume as assumed
    from trtllm_pipeline.machine import probe
    from trtllm_pipeline.toolchains import base as toolchains

    if assume is not None:
        machine = assumed.parse(assume)
        checks = doctor.examine_assumed(machine)
    else:
        seen = probe.survey()
        machine = seen.machine
        checks = doctor.examine(seen, Path(workspace))
    verdicts = doctor.judge(machine)
    if toolchain is not None:
        toolchains.load(toolchain)
    line = assumed.describe(machine)
    if format == "json":
        emit_json(doctor.document(machine, checks, verdicts, line))
    else:
        _show([*doctor.lines(checks, verdicts, toolchain)])
        emit(f"\nto plan for this machine elsewhere:\n  --assume '{line}'")
    asked = [verdict for verdict in verdicts if toolchain in {None, verdict.name}]
    raise typer.Exit(0 if any(verdict.missing is None for verdict in asked) else 3)


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
