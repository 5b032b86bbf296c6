"""`pipeline doctor`: what this machine has, what it lacks, and what to do about it."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from trtllm_pipeline.cli import options
from trtllm_pipeline.cli.output import emit, emit_json, emit_rendered, rendered
from trtllm_pipeline.doctor import Check, Status, Verdict

_TITLES: Final = {
    "host": "this host",
    "gpu": "GPUs",
    "tensorrt_llm": "TensorRT-LLM",
    "triton": "Triton Inference Server",
    "quantize": "quantizing",
    "space": "space",
    "limits": "limits",
    "hub": "model hubs",
}
_LOOKS: Final = {
    Status.OK: ("✓", "+", "green"),
    Status.WARNING: ("!", "!", "yellow"),
    Status.MISSING: ("✗", "X", "red"),
}
"""Symbol, the same in ASCII, colour."""
_HINT_INDENT: Final = " " * 13 + "do: "


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
    options.add_workspace(parser)
    options.add_format(parser, "text", "json")


def run(args: argparse.Namespace) -> int:
    """Look and say; 0, or 3 when no toolchain can be used."""
    from trtllm_pipeline import doctor
    from trtllm_pipeline.machine import assume, probe

    if args.assume is not None:
        machine = assume.parse(args.assume)
        checks = doctor.examine_assumed(machine)
    else:
        seen = probe.survey()
        machine = seen.machine
        checks = doctor.examine(seen, Path(args.workspace))
    verdicts = doctor.judge(machine)
    line = assume.describe(machine)
    if args.format == "json":
        emit_json(doctor.document(machine, checks, verdicts, line))
    else:
        _show([*_checks(checks), *_toolchains(verdicts)])
        emit(f"\nto plan for this machine elsewhere:\n  --assume '{line}'")
    return 0 if any(verdict.missing is None for verdict in verdicts) else 3


_Line = tuple[Status | None, str]
"""Text, and the status whose symbol and word go before it."""


def _checks(checks: Sequence[Check]) -> Iterator[_Line]:
    width = max(len(check.id.partition(".")[2]) for check in checks)
    group = None
    for check in checks:
        if check.group != group:
            if group is not None:
                yield None, ""
            group = check.group
            yield None, _TITLES[group]
        name = check.id.partition(".")[2].replace("_", " ")
        yield check.status, f"{name:<{width}}  {check.detail}"
        if check.hint:
            yield None, f"{_HINT_INDENT}{check.hint}"


def _toolchains(verdicts: Sequence[Verdict]) -> Iterator[_Line]:
    width = max(len(verdict.name) for verdict in verdicts)
    yield None, ""
    yield None, "toolchains"
    for verdict in verdicts:
        status = Status.MISSING if verdict.missing else Status.OK
        yield status, f"{verdict.name:<{width}}  {verdict.missing or verdict.summary}"
        if verdict.hint:
            yield None, f"{_HINT_INDENT}{verdict.hint}"


def _show(lines: Sequence[_Line]) -> None:
    """Plain text; on a terminal with colours, unless rich is among what is missing."""
    column = 1 if "utf" not in (sys.stdout.encoding or "").lower() else 0
    marks = {status: f"  {look[column]} {status.value:<8} " for status, look in _LOOKS.items()}
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            from rich.text import Text

            texts = (Text.assemble((marks[s], _LOOKS[s][2]), text) if s else Text(text) for s, text in lines)
            return emit_rendered(rendered(Text("\n").join(texts)))
    for status, text in lines:
        emit(f"{marks[status]}{text}" if status else text)
    return None
