"""Options of commands that ask a server by its URL, and how the values of such commands are written."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from trtllm_pipeline.cli import options
from trtllm_pipeline.errors import UsageError
from trtllm_pipeline.files.user_files import decode

PANEL: Final = "The server"

Protocol = Annotated[
    Literal["grpc", "http", "openai"],
    typer.Option(
        "-i",
        "--protocol",
        metavar="NAME",
        help="grpc or http of Triton, or openai for any OpenAI-compatible server",
        rich_help_panel=PANEL,
    ),
]
EndpointType = Annotated[
    Literal["chat", "completions"],
    typer.Option(
        "--endpoint-type", metavar="NAME", help="endpoint of OpenAI: chat or completions", rich_help_panel=PANEL
    ),
]
RequestTimeout = Annotated[
    float,
    typer.Option(
        "--request-timeout-s",
        metavar="S",
        help="time limit of one request, in seconds",
        rich_help_panel=PANEL,
    ),
]


def positive(option: str, value: float) -> float:
    """`value`, if it is a positive number. Raises UsageError."""
    if not 0 < value < math.inf:
        raise UsageError(f"{option}: expected a positive number, got {value:g}")
    return value


def whole_numbers(option: str, text: str | None) -> tuple[int, ...]:
    """`1,4` as numbers, empty for None. Raises UsageError."""
    return tuple(int(number) for number in _numbers(option, text, "a positive whole number", str.isdecimal))


def numbers(option: str, text: str | None) -> tuple[float, ...]:
    """`2.5,10` as numbers, empty for None. Raises UsageError."""
    return tuple(_numbers(option, text, "a positive number", _is_number))


def _numbers(option: str, text: str | None, what: str, accepted: Callable[[str], bool]) -> list[float]:
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    for part in parts:
        if not accepted(part) or not 0 < float(part) < math.inf:
            raise UsageError(
                f"{option}: expected {what}, got {part!r}", hint=f"levels are separated by commas: {option} 1,4"
            )
    values = [float(part) for part in parts]
    if len({*values}) < len(values):
        raise UsageError(f"{option} {text}: has a value twice", hint="--repeats measures every level again")
    return values


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def pairs(option: str, texts: Sequence[str] | None, sign: str) -> dict[str, Any]:
    """NAME and VALUE of an option that is given several times, a value as JSON where it is any. Raises UsageError."""
    found = {}
    for text in texts or ():
        name, value = options.pair(option, text, sign)
        try:
            found[name] = decode(value)
        except ValueError:
            found[name] = value
    return found


def folder(option: str, path: Path | None) -> Path | None:
    """`path`, if it is a folder or None. Raises UsageError."""
    if path is not None and not path.is_dir():
        raise UsageError(f"{option} {path}: there is no such folder")
    return path


def new_folder(option: str, path: Path | None) -> Path | None:
    """`path`, if it is an empty folder, none yet, or None. Raises UsageError."""
    if path is not None and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"{option} {path}: is not an empty folder", hint="name a new one; nothing is overwritten")
    return path
