"""Names that servers read in a repository, from `data/repository_names.json`, and the nearest known name for an unknown
one.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from trtllm_pipeline import PACKAGE

LOOSE: Final = 0.8
"""Minimum similarity of a misspelled name to a name in a complete list."""
STRICT: Final = 0.9
"""The same for a list that lacks names of other releases, which must not be mistaken for misspellings."""


@dataclass(frozen=True, slots=True)
class KnownNames:
    """The content of the data file."""

    tensorrtllm: Collection[str]
    """Parameters of TensorRT-LLM's C++ backend, complete."""
    python: Collection[str]
    """Parameters of its Python models."""
    switches: Sequence[str]
    """The parameters of both that are true or false."""
    numbers: Sequence[str]
    """The parameters of both that are whole numbers."""
    llmapi: Mapping[str, Sequence[str]]
    """Keys of model.yaml by section. The section "" is the top level."""
    vllm: Mapping[str, Sequence[str]]
    """Keys of model.json by section."""
    instead: Mapping[str, Mapping[str, str]]
    """By server: a name that belongs elsewhere -> the name to use, or in parentheses an explanation."""


@cache
def known_names() -> KnownNames:
    """The shipped names, read once."""
    content = json.loads((PACKAGE / "data" / "repository_names.json").read_text(encoding="utf-8"))
    content.pop("about")
    return KnownNames(**content)


def nearest(name: str, known: Collection[str], instead: Mapping[str, str], cutoff: float = STRICT) -> str | None:
    """The known name that `name` was meant to be, by its meaning elsewhere, its spelling or that of an option. None without any."""
    lowered = {each.lower(): each for each in known}
    plain = name.lower().replace("-", "_")
    if name in instead or plain in lowered:
        return instead.get(name) or lowered[plain]
    close = difflib.get_close_matches(plain, lowered, n=1, cutoff=cutoff)
    return lowered[close[0]] if close else None


def advice(near: str | None) -> str:
    """The end of a message about a name whose nearest known one is `near`."""
    if near is None:
        return ""
    return f"; it is {near[1:-1]}" if near.startswith("(") else f"; did you mean {near}?"
