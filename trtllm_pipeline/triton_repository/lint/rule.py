"""What a rule is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trtllm_pipeline.triton_repository.lint.repository import ModelRepository

Severity = Literal["error", "warning", "note"]
"""error: it will not load, or not answer as the file says. warning: it loads, and something in it has no effect or
fails later. note: worth knowing."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One place that a rule objects to."""

    path: Path
    message: str
    line: int | None = None
    hint: str | None = None
    """What to do about this one, where the rule's own hint is too general."""


@dataclass(frozen=True, slots=True)
class LintRule:
    """One rule of the linter."""

    id: str
    name: str
    severity: Severity
    what: str
    """What it finds, in half a sentence."""
    hint: str
    """What to do about it."""
    check: Callable[[ModelRepository], Iterator[Violation]]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing wrong with a repository."""

    rule: str
    name: str
    severity: Severity
    file: Path
    line: int | None
    message: str
    hint: str

    def __str__(self) -> str:
        """`file:line: severity RULE name: message`."""
        where = f"{self.file}" if self.line is None else f"{self.file}:{self.line}"
        return f"{where}: {self.severity} {self.rule} {self.name}: {self.message}"


def rule(
    number: str, name: str, severity: Severity, what: str, hint: str
) -> Callable[[Callable[[ModelRepository], Iterator[Violation]]], LintRule]:
    """Make a rule of a function that yields what it finds."""
    return lambda check: LintRule(number, name, severity, what, hint, check)
