"""Strict reading of YAML and JSON files: plain data, the line of every value, and every fault at once.

The schema is YAML 1.2's core schema, so `no`, `on`, `1:30` and dates are text and `1e-3` is a number. Refused, because
they would be read differently from what was meant, or could do harm: repeated keys, numbers with leading zeros, tags,
merge keys, several documents, infinities, and files beyond the limits below (a file may come from a stranger, and a
few aliases of aliases can stand for billions of values). JSON is read by the same rules.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import Fault, Json, user_files

KeyPath = tuple[str | int, ...]
"""Where a value is: keys and list positions from the top."""

MAX_BYTES: Final = 4 * 1024 * 1024
SUFFIXES: Final = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was written: a file and a line, or an argument of the command line and no line."""

    path: str
    line: int | None


@dataclass(slots=True)
class Document:
    """Plain data and where each part of it was written."""

    name: str
    data: Json
    origins: dict[KeyPath, Origin] = field(default_factory=dict)

    def fault(self, at: KeyPath, message: str, *, key: KeyPath | None = None) -> Fault:
        """A fault at `at`, or at the nearest enclosing value that was written down."""
        for end in range(len(at), -1, -1):
            origin = self.origins.get(at[:end])
            if origin is not None:
                return Fault(origin.path, origin.line, key_text(at if key is None else key), message)
        return Fault(self.name, None, key_text(at if key is None else key), message)

    def get(self, at: KeyPath) -> Json:
        """The value at `at`, or None when there is none."""
        value = self.data
        try:
            for step in at:
                value = child(value, step)
        except KeyError:
            return None
        return value


def child(value: Json, step: str | int) -> Json:
    """What `value` holds under a key or at a position. Raises KeyError when there is nothing."""
    if isinstance(value, dict) and isinstance(step, str):
        return value[step]
    if isinstance(value, list) and isinstance(step, int) and 0 <= step < len(value):
        return value[step]
    raise KeyError(step)


def key_text(at: KeyPath) -> str:
    """`override[0].where.model` for ("override", 0, "where", "model")."""
    text = ""
    for step in at:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


_MOST_SHOWN: Final = 8


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'X'?` for the most similar of `known`, or the known names, or nothing when there are many.

    A name that is the first word of several, as `qwen` of `qwen2` and `qwen3`, may mean any of them.
    """
    names = sorted({*known} - {name})  # what is refused under this very name is no advice
    longer = [each for each in names if name and each.startswith(name) and not each[len(name)].isalpha()]
    if len(longer) > 1:
        shown = longer[:_MOST_SHOWN]
        return f"; did you mean one of {', '.join(shown)}{', ...' if shown != longer else ''}?"
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are {', '.join(names)}" if 0 < len(names) <= 20 else ""


def read(path: Path) -> Document:
    """The data of a YAML or JSON file. Raises MatrixError with everything wrong with it."""
    name = os.fspath(path)
    text = user_files.read_text(path, limit=MAX_BYTES)
    return parse(text, name, json=path.suffix == ".json")


def parse(text: str, name: str, *, lines: bool = True, json: bool = False) -> Document:
    """The data of YAML text, or of JSON; `name` is what faults call it. Raises MatrixError with everything wrong with it."""
    from trtllm_pipeline.orchestrate.matrix.yaml_reader import parsed  # it imports this module

    return parsed(text, name, lines=lines, json=json)
