"""A stage's command line, typed by hand: it follows the stage's own table of inputs, files and options.

pipeline convert --toolchain embedded --model DIR --output-dir DIR --precision int8_wo
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path

from trtllm_pipeline.domain import Json
from trtllm_pipeline.errors import MatrixError, UsageError
from trtllm_pipeline.files.user_files import JsonError, check, decode
from trtllm_pipeline.stages.base import Option, Stage, Work


def flag(name: str) -> str:
    """The command-line flag of an input, file or option."""
    return "--" + name.replace("_", "-")


def configure(parser: argparse.ArgumentParser, stage: Stage) -> None:
    """Give `parser` the stage's inputs, files and options. None is required here; `to_work` says what is missing."""
    paths = parser.add_argument_group("work by hand, on explicit files")
    for name in stage.inputs:
        upstream = " or ".join(stage.upstream(name))
        left = (
            f"folder that {upstream} left"
            if name != "service"
            else f"file with what `pipeline {upstream} --format json` says"
        )
        paths.add_argument(flag(name), dest=f"in_{name}", metavar="PATH", help=f"{left} (required)")
    for name in stage.file_names:
        paths.add_argument(
            flag(name),
            dest=f"file_{name}",
            metavar="FILE",
            help="a file of yours, or builtin:NAME (default: as in a matrix)",
        )
    paths.add_argument("--output-dir", metavar="DIR", help="an empty or new folder for the results")
    for option in stage.options:
        default = "required" if option.required else f"default {json.dumps(option.default)}"
        choices = f"{', '.join(option.choices)}; " if option.choices else ""
        paths.add_argument(
            flag(option.name),
            dest=f"opt_{option.name}",
            metavar=option.type.upper(),
            help=f"{option.help} ({choices}{default})".replace("%", "%%"),
        )


def to_work(stage: Stage, args: argparse.Namespace, attempt: Path) -> Work:
    """What the parsed words mean, for an attempt in the folder `attempt`.

    Raises UsageError for all that is missing or of the wrong form.
    """
    wrong: list[str] = []
    values: Mapping[str, str | None] = vars(args)
    inputs = {name: values[f"in_{name}"] for name in stage.inputs}
    files = {name: values[f"file_{name}"] for name in stage.file_names}
    wrong += [f"{flag(name)} is missing" for name, path in inputs.items() if path is None]
    for name, path in (*inputs.items(), *files.items()):
        if path and name in inputs and name != "service":
            there = os.path.exists(path)  # noqa: PTH110  (Path.exists raises for a name that is too long)
            wrong += [] if there else [f"{flag(name)}: {path} does not exist"]
        elif path:
            try:
                check(Path(path))
            except MatrixError as error:
                wrong.append(f"{flag(name)}: {error.message}")
    params: dict[str, Json] = {}
    for option in stage.options:
        text = values[f"opt_{option.name}"]
        if text is None:
            if option.required:
                wrong.append(f"{flag(option.name)} is missing: {option.help}")
            params[option.name] = option.default
            continue
        try:
            params[option.name] = _read(option, text)
        except ValueError as error:
            wrong.append(f"{flag(option.name)}: {error}")
    if args.output_dir is None:
        wrong.append("--output-dir is missing")
    if wrong:
        raise UsageError(
            f"pipeline {stage.name}: " + "\n  ".join(wrong),
            hint=f"give a matrix (pipeline {stage.name} --matrix FILE --cells ID) or see pipeline {stage.name} --help",
        )
    out = empty_folder(args.output_dir)
    return Work(
        params=params,
        inputs={name: Path(path).absolute() for name, path in inputs.items() if path},
        files={name: Path(path).absolute() for name, path in files.items() if path},
        out=out,
        attempt=attempt.absolute(),
    )


def empty_folder(given: str) -> Path:
    """The folder that `--output-dir` names, made where it is missing. Raises UsageError when it cannot be filled."""
    folder = Path(given).absolute()
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(
                f"--output-dir {folder}: is not an empty folder", hint="name a new one; nothing is overwritten"
            )
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--output-dir {folder}: cannot be made: {error.strerror}", hint="name a folder that you may write"
        ) from error
    return folder


def _read(option: Option, text: str) -> Json:
    value: Json
    if option.type == "json":
        try:
            value = decode(text)
        except JsonError as error:
            raise ValueError(f"{text[:80]!r} is {error}") from None
        return value
    if option.type == "bool":
        if text not in {"true", "false"}:
            raise ValueError(f"{text!r} is neither true nor false")
        return text == "true"
    try:
        value = {"int": int, "float": float, "str": str}[option.type](text)
    except ValueError:
        raise ValueError(f"{text!r} is not {'a whole number' if option.type == 'int' else 'a number'}") from None
    if option.choices and value not in option.choices:
        raise ValueError(f"{text!r} is not one of {', '.join(option.choices)}")
    return value
