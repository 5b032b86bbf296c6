"""Words in logs and their meaning: whether a retry helps, what to do, and the setting to change.

The table is `data/signatures.yaml`, which explains its keys. `tensorrt/diagnosis/causes.py` chooses among the signatures that match.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline import PACKAGE
from trtllm_pipeline.base import FailureClass

KILLED: Final = "killed"
"""Key of the signature for a process that was killed. The log does not name the killer. `out_of_memory.verdict` finds it."""
ANY_STAGE: Final = "any"
NOTHING: Final = r"(?!)"
"""Matches nothing."""
GROUP: Final = r"\{(\w+)\}"
"""A group of the patterns in a hint."""
_PATH: Final = PACKAGE / "data" / "signatures.yaml"


class Weight(IntEnum):
    """How specific words are to their cause. The lowest weight that matches wins."""

    CAUSE = 0
    """Only this cause has these words."""
    GENERAL = 1
    """The cause, unless more specific words are present."""
    CLASS = 2
    """A kind of problem with many causes: used only for the line that the form of the logs marks as first."""
    SYMPTOM = 3
    """Follows from a cause. Never reported as one."""
    WORDS = 4
    """As for a class, by words that any program may use: only if nothing else knows the line."""


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Words in a log, and their meaning."""

    key: str
    category: str
    failure: FailureClass
    patterns: tuple[str, ...]
    """Regular expressions, any of which matches. ^ and $ match at every line. None if all words are only `likely`."""
    hint: str
    """The hint. `{name}` is a named group of the patterns. Of `<a|b>`, the first part whose groups are not empty counts."""
    met: tuple[str, ...]
    """The words as users reported them."""
    source: tuple[str, ...]
    """The source of the words."""
    likely: tuple[str, ...] = ()
    """Patterns of words that other causes have as well: they give the hint, and are never certain."""
    weight: Weight = Weight.CAUSE
    settings: Mapping[str, str] = field(default_factory=dict)
    """Stage or ANY_STAGE -> "settings.SECTION.KEY=VALUE": the setting to change if this stage failed."""

    @cached_property
    def pattern(self) -> str:
        return "|".join((*self.likely, *self.patterns)) or NOTHING

    @cached_property
    def exact(self) -> Signature:
        """The same without the words that other causes have as well."""
        return replace(self, likely=())


def chosen(text: str, groups: Mapping[str, str]) -> str:
    """Return a hint with one part of each `<a|b>`: the first whose groups are given, or nothing."""

    def part(found: re.Match[str]) -> str:
        parts = found[1].split("|")
        return next((each for each in parts if all(map(groups.get, re.findall(GROUP, each)))), "")

    return re.sub(r"<([^<>]*)>", part, text)


@cache
def signatures() -> tuple[Signature, ...]:
    """Return the shipped signatures. The file is read at the first call: most commands diagnose nothing."""
    return read_signatures(_PATH)


def read_yaml(path: Path) -> Any:
    """Return the content of a shipped YAML file, read by the faster parser in C if PyYAML has it."""
    import yaml

    return yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506


def read_signatures(path: Path) -> tuple[Signature, ...]:
    """Return the signatures of a file in its order. Raises ValueError with the signature and the fault."""
    data = read_yaml(path)
    by_key: dict[str, Signature] = {}
    for row in data["signatures"]:
        key = row.get("key")
        if key in by_key:
            raise ValueError(f"{path.name}: {key}: the key is not unique")
        try:
            by_key[key] = _signature(row, data["phrases"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path.name}: {key}: {error}") from error
    return tuple(by_key.values())


def _signature(row: Mapping[str, Any], phrases: Mapping[str, str]) -> Signature:
    """Return one row as a signature. Signature itself refuses missing and unknown keys."""
    hint = row["hint"]
    for name, phrase in phrases.items():
        hint = hint.replace(f"{{{name}}}", phrase)
    return Signature(
        **{
            **row,
            "failure": FailureClass(row["failure"]),
            "patterns": tuple(row.get("patterns", "").splitlines()),
            "hint": hint,
            "met": tuple(row["met"].splitlines()),
            "source": tuple(row["source"]),
            "likely": tuple(row.get("likely", "").splitlines()),
            "weight": Weight[row.get("weight", "cause").upper()],
        }
    )
