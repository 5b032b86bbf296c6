"""Options of commands that ask a server by its URL, and how the values of such commands are written."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from trtllm_pipeline.cli import options
from trtllm_pipeline.errors import UsageError
from trtllm_pipeline.files.user_files import decode

N = TypeVar("N", int, float)
PANEL: Final = "The server"
_option: Final = partial(options.option, rich_help_panel=PANEL)

Protocol = Annotated[
    Literal["grpc", "http", "openai"],
    _option("-i --protocol", "NAME", "Protocol: grpc or http of Triton, or openai for any OpenAI-compatible server."),
]
EndpointType = Annotated[
    Literal["chat", "completions"],
    _option("--endpoint-type", "NAME", "Endpoint of OpenAI: chat or completions."),
]
RequestTimeout = Annotated[float, _option("--request-timeout-s", "S", "Time limit of one request, in seconds.")]


def positive(option: str, value: float) -> float:
    """`value`, if it is a positive number. Raises UsageError."""
    if not 0 < value < math.inf:
        raise UsageError(f"{option}: expected a positive number, got {value:g}")
    return value


def numbers(option: str, text: str | None, kind: Callable[[str], N]) -> tuple[N, ...]:
    """`1,4` as positive numbers, empty for None. Raises UsageError."""
    found: list[N] = []
    for part in [] if text is None else text.split(","):
        try:
            value = kind(part)
        except ValueError:
            value = kind("0")
        if not 0 < value < math.inf:
            what = "a positive whole number" if value == 0 and isinstance(value, int) else "a positive number"
            raise UsageError(
                f"{option}: expected {what}, got {part.strip()!r}",
                hint=f"levels are separated by commas: {option} 1,4",
            )
        if value in found:
            raise UsageError(f"{option} {text}: has a value twice", hint="--repeats measures every level again")
        found.append(value)
    return tuple(found)


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
