"""`pipeline doctor`: checks of this machine, with fixes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from trtllm_pipeline.base import UsageError
from trtllm_pipeline.show.cli import options
from trtllm_pipeline.show.cli.output import emit_as, emit_blocks, note
from trtllm_pipeline.show.doctor_findings import Examination


def doctor(
    assume: options.Assume = None,
    toolchain: Annotated[str | None, options.toolchain("Check for this toolchain instead of the default one.")] = None,
    deep: Annotated[
        bool,
        options.switch(
            "--deep", "Run tiny models through every stage, and compare the installed packages with the expected ones."
        ),
    ] = False,
    family: Annotated[
        str | None,
        options.option(
            "--family",
            "NAME,...",
            "With --deep: architectures (model_type), separated by commas, e.g. llama,mixtral,gemma2 (default: llama).",
        ),
    ] = None,
    precision: Annotated[
        str | None,
        options.option(
            "--precision",
            "NAME,...",
            "With --deep: precisions, separated by commas, or all (default: as many as fit in about ten minutes).",
        ),
    ] = None,
    workspace: options.Workspace = options.WORKSPACE,
    format: options.TextOrJson = "text",
) -> None:
    """Check this machine: problems and their fixes, and the toolchains it can use.

    Checks GPUs, TensorRT-LLM, Triton, disk space, limits and tokens. The exit code is 3 if no toolchain can be used.
    With --deep, a tiny model with random weights is converted, quantized, built, served and queried in every precision
    that the machine supports, for about ten minutes. Nothing is downloaded. Completed cases are not repeated. The next
    call continues with the remaining ones.

    examples:
      pipeline doctor
      pipeline doctor --format json | jq '.checks[] | select(.status != "ok")'
      pipeline doctor --assume 8xH100,tensorrt_llm==0.12
      pipeline doctor --deep --family llama,qwen3 --precision fp16,fp8
    """
    if deep:
        raise typer.Exit(_deep(Path(workspace), assume, toolchain, family, precision, format))
    if family is not None or precision is not None:
        raise UsageError("--family and --precision require --deep", hint="pipeline doctor --deep")
    from trtllm_pipeline.show import doctor_findings

    examination = doctor_findings.run(Path(workspace), assumed=assume, toolchain=toolchain)
    emit_as(format, examination, json=Examination.to_json, text=_colored if sys.stdout.isatty() else _plain)
    raise typer.Exit(examination.exit_code)


def _deep(
    workspace: Path, assume: str | None, toolchain: str | None, family: str | None, precision: str | None, form: str
) -> int:
    from trtllm_pipeline.show.progress import observer
    from trtllm_pipeline.show.proof import examination

    if assume is not None:
        raise UsageError("--deep runs on this machine and cannot be combined with --assume", hint="omit --assume")
    selected = {"families": family, "precisions": precision}
    deep = examination.examine(
        workspace,
        observer(sys.stderr),
        note,
        toolchain=toolchain,
        **{
            name: tuple(part.strip() for part in text.split(",")) for name, text in selected.items() if text is not None
        },
    )
    emit_blocks(form, deep)
    note(f"written to {workspace / examination.FOLDER / examination.RESULT}")
    if deep.interrupted:
        note("interrupted; run the same command to continue")
    return deep.exit_code


def _plain(examination: Examination) -> str:
    return examination.text(sys.stdout.encoding)


def _colored(examination: Examination) -> Any:
    from rich.text import Text

    ascii_only = "utf" not in (sys.stdout.encoding or "").lower()
    texts = [
        Text.assemble(line.mark(ascii_only=ascii_only), (line.text, "dim" if line.gray else ""))
        if line.status
        else Text(line.text, "" if number else "bold")
        for number, line in enumerate(examination.lines())
    ]
    return Text("\n").join(texts)
