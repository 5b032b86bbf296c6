"""`pipeline repository`: look for what is wrong with a Triton model repository; else the stage of that name.

pipeline repository lint DIR                     what is wrong with any repository
pipeline repository --matrix FILE | --engine ... the stage
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trtllm_pipeline.cli import options, stage
from trtllm_pipeline.cli.output import emit, emit_json, note
from trtllm_pipeline.domain import Json
from trtllm_pipeline.errors import UsageError

if TYPE_CHECKING:
    from trtllm_pipeline.triton_repository.lint import Engine, Finding

_GITHUB: Final = {"error": "error", "warning": "warning", "note": "notice"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the form that the words on the command line choose."""
    words: Sequence[str] = parser.get_default("words") or ()
    if words[:1] == ["lint"]:
        _configure_lint(parser)
        return
    stage.configure(parser)
    parser.set_defaults(form=stage.run)
    parser.epilog = (
        f"{parser.epilog}\n\nanother form, with its own --help:\n"
        "  pipeline repository lint DIR    what is wrong with any repository"
    )


def run(args: argparse.Namespace) -> int:
    """Do what the chosen form does."""
    code: int = args.form(args)
    return code


def _configure_lint(parser: argparse.ArgumentParser) -> None:
    parser.prog += " lint"
    parser.description = (
        "Look for what is wrong with a Triton model repository: of this project, filled by hand, or any other.\n"
        "Nothing is started and nothing is changed. Exit code 1 if there are errors."
    )
    parser.epilog = (
        "examples:\n"
        "  pipeline repository lint triton_model_repo\n"
        "  pipeline repository lint triton_model_repo --engine engines/tp4 --release 0.16.0 --ignore TRT504"
    )
    parser.add_argument("verb", metavar="lint", help=argparse.SUPPRESS)
    parser.add_argument("repository", metavar="DIR", help="the repository")
    parser.add_argument(
        "--engine", metavar="DIR", help="engine folder to compare with (default: where the repository leads to)"
    )
    parser.add_argument("--release", metavar="R", help="TensorRT-LLM release that will serve it, such as 0.16.0")
    for name, what in (("select", "only these rules"), ("ignore", "not these rules")):
        parser.add_argument(
            f"--{name}",
            metavar="RULES",
            type=_words,
            action="extend",
            default=[],
            help=f"{what}: ids, beginnings of ids or names, with commas between them",
        )
    options.add_format(parser, "text", "json", "github")
    parser.set_defaults(form=_lint)


def _lint(args: argparse.Namespace) -> int:
    from trtllm_pipeline.triton_repository import lint

    engine = _engine(args.engine)
    rules = lint.select(args.select, args.ignore)
    findings = lint.lint(Path(args.repository), engine=engine, release=args.release, rules=rules)
    errors = sum(finding.severity == "error" for finding in findings)
    if args.format == "json":
        emit_json({"schema": 1, "errors": errors, "findings": [_row(finding) for finding in findings]})
    elif args.format == "github":
        for finding in findings:
            emit(_annotation(finding))
    else:
        _print(findings, errors)
    return 1 if errors else 0


def _words(text: str) -> Sequence[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _engine(folder: str | None) -> Engine | None:
    if folder is None:
        return None
    from trtllm_pipeline.triton_repository import lint

    try:
        return lint.Engine.of_trtllm_build(Path(folder).absolute())
    except lint.EngineError as error:
        raise UsageError(f"--engine: {error.message}", hint=error.hint) from error


def _print(findings: Sequence[Finding], errors: int) -> None:
    hinted: set[str] = set()
    for finding in findings:
        emit(str(finding))
        if finding.hint not in hinted:
            emit(f"    {finding.hint}")
        hinted.add(finding.hint)
    note(f"errors: {errors}, warnings and notes: {len(findings) - errors}" if findings else "nothing wrong was found")


def _row(finding: Finding) -> dict[str, Json]:
    return {
        "rule": finding.rule,
        "name": finding.name,
        "severity": finding.severity,
        "file": str(finding.file),
        "line": finding.line,
        "message": finding.message,
        "hint": finding.hint,
    }


def _annotation(finding: Finding) -> str:
    """A workflow command of GitHub Actions, which shows the finding at its line."""
    where = f"file={_property(str(finding.file))}" + ("" if finding.line is None else f",line={finding.line}")
    title = _property(f"{finding.rule} {finding.name}")
    return f"::{_GITHUB[finding.severity]} {where},title={title}::{_data(f'{finding.message}. {finding.hint}')}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
