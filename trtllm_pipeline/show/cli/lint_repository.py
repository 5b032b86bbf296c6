"""`pipeline models lint`: find faults in a Triton model repository."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trtllm_pipeline.base import UsageError
from trtllm_pipeline.show.cli import options
from trtllm_pipeline.show.cli.output import emit, emit_json, note

if TYPE_CHECKING:
    from trtllm_pipeline.models import Engine


def lint(
    repository: Annotated[Path, options.argument("DIR", "The repository.")],
    engine: Annotated[
        Path | None,
        options.option("--engine", "DIR", "Engine to compare with (default: the one the repository names)."),
    ] = None,
    release: Annotated[
        str | None,
        options.option("--release", "RELEASE", "TensorRT-LLM release that will serve it, such as 0.16.0."),
    ] = None,
    select: Annotated[
        list[str] | None,
        options.option("--select", "RULES", "Only these rules: ids, prefixes of ids, or names, such as TRT1,TRT504."),
    ] = None,
    ignore: Annotated[
        list[str] | None, options.option("--ignore", "RULES", "All but these rules, written in the same way.")
    ] = None,
    format: Annotated[Literal["text", "json", "github"], options.option("--format", None, "Output format.")] = "text",
) -> None:
    """Find faults in a Triton model repository: made by this project, filled by hand, or any other.

    Nothing is started and nothing is changed. The exit code is 1 if there are errors.

    examples:
      pipeline models lint triton_model_repo
      pipeline models lint triton_model_repo --engine engines/tp4 --release 0.16.0 --ignore TRT504
    """
    from trtllm_pipeline.models import lint as library

    findings = library.lint(
        repository,
        engine=None if engine is None else _engine(engine),
        release=release,
        rules=library.select(_words(select), _words(ignore)),
    )
    errors = sum(finding.severity == "error" for finding in findings)
    if format == "json":
        emit_json({"schema": 1, "errors": errors, "findings": [finding.to_json() for finding in findings]})
    elif format == "github":
        for finding in findings:
            emit(finding.github())
    else:
        hinted: set[str] = set()
        for finding in findings:
            emit(f"{finding}" if finding.hint in hinted else f"{finding}\n    {finding.hint}")
            hinted.add(finding.hint)
        note(f"errors: {errors}, warnings and notes: {len(findings) - errors}" if findings else "no problems found")
    raise typer.Exit(1 if errors else 0)


def _engine(folder: Path) -> Engine:
    from trtllm_pipeline.models import Engine, EngineError

    try:
        return Engine.read(folder.absolute())
    except EngineError as error:
        raise UsageError(f"--engine: {error.message}", hint=error.hint) from error


def _words(texts: list[str] | None) -> list[str]:
    return [word.strip() for text in texts or () for word in text.split(",") if word.strip()]
