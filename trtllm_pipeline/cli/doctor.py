"""`pipeline doctor`: what this machine has, what it lacks, and what to do about it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from trtllm_pipeline.cli import options
from trtllm_pipeline.cli.output import emit_as
from trtllm_pipeline.doctor import Examination


def doctor(
    assume: options.Assume = None,
    toolchain: Annotated[
        str | None,
        options.option(
            "--toolchain",
            "NAME",
            "Judge this toolchain instead of the one that a run would use.",
            complete=options.completion.toolchains,
        ),
    ] = None,
    workspace: options.Workspace = options.WORKSPACE,
    format: options.TextOrJson = "text",
) -> None:
    """Show what this machine has and lacks, what to do about it, and which toolchains it can use.

    GPUs, TensorRT-LLM, Triton, disk space, limits, tokens. The exit code is 3 if no toolchain can be used.

    examples:
      pipeline doctor
      pipeline doctor --format json | jq '.checks[] | select(.status != "ok")'
      pipeline doctor --assume tensorrt_llm==0.12.0,sm=90,gpus=8
    """
    from trtllm_pipeline import doctor

    found = doctor.run(Path(workspace), assumed=assume, toolchain=toolchain)
    emit_as(format, found, json=Examination.to_json, text=_coloured if sys.stdout.isatty() else _plain)
    raise typer.Exit(found.exit_code)


def _plain(found: Examination) -> str:
    return found.text(sys.stdout.encoding)


def _coloured(found: Examination) -> Any:
    from rich.text import Text

    ascii_only = "utf" not in (sys.stdout.encoding or "").lower()
    texts = [
        Text.assemble(line.mark(ascii_only=ascii_only), (line.text, "dim" if line.grey else ""))
        if line.status
        else Text(line.text, "" if number else "bold")
        for number, line in enumerate(found.lines())
    ]
    return Text("\n").join(texts)
