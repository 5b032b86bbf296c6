"""Strict reader of YAML and JSON files. Returns plain data and the line of every value, or reports all faults at once.

The schema is YAML 1.2's core schema, so `no`, `on`, `1:30` and dates are text and `1e-3` is a number. Constructs that are
often misread or that may do harm are errors: repeated keys, numbers with leading zeros, tags, merge keys, several
documents, infinities, and files beyond the limits below. A file may come from a stranger, and a few aliases of aliases can
expand to billions of values. JSON is read by the same rules.
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
"""Path of a value: keys and list positions from the top."""

MAX_BYTES: Final = 4 * 1024 * 1024
SUFFIXES: Final = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a value: a file and a line, or a command-line argument without a line."""

    path: str
    line: int | None


@dataclass(slots=True)
class Document:
    """Plain data with the origin of each part."""

    name: str
    data: Json
    origins: dict[KeyPath, Origin] = field(default_factory=dict)

    def fault(self, at: KeyPath, message: str, *, key: KeyPath | None = None) -> Fault:
        """A fault at `at`, or at the nearest enclosing value with an origin."""
        for end in range(len(at), -1, -1):
            origin = self.origins.get(at[:end])
            if origin is not None:
                return Fault(origin.path, origin.line, key_text(at if key is None else key), message)
        return Fault(self.name, None, key_text(at if key is None else key), message)

    def get(self, at: KeyPath) -> Json:
        """The value at `at`, or None."""
        value = self.data
        try:
            for step in at:
                value = child(value, step)
        except KeyError:
            return None
        return value


def child(value: Json, step: str | int) -> Json:
    """The item of `value` under a key or at a position. Raises KeyError if there is none."""
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
    """`; did you mean 'X'?` for the most similar of `known`, or the list of known names, or an empty text if there are many.

    A prefix of several names, such as `qwen` of `qwen2` and `qwen3`, may mean any of them.
    """
    names = sorted({*known} - {name})  # a refused name is not a suggestion
    longer = [each for each in names if name and each.startswith(name) and not each[len(name)].isalpha()]
    if len(longer) > 1:
        shown = longer[:_MOST_SHOWN]
        return f"; did you mean one of {', '.join(shown)}{', ...' if shown != longer else ''}?"
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are {', '.join(names)}" if 0 < len(names) <= 20 else ""


def read(path: Path) -> Document:
    """The data of a YAML or JSON file. Raises MatrixError with all faults."""
    name = os.fspath(path)
    text = user_files.read_text(path, limit=MAX_BYTES)
    return parse(text, name, json=path.suffix == ".json")


def parse(text: str, name: str, *, lines: bool = True, json: bool = False) -> Document:
    """The data of YAML or JSON text. Faults use `name`. Raises MatrixError with all faults."""
    from trtllm_pipeline.orchestrate.matrix.yaml_reader import parsed  # it imports this module

    return parsed(text, name, lines=lines, json=json)
