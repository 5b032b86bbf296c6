"""Rules and their findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from trtllm_pipeline.base import Json
from trtllm_pipeline.models.triton_repository.lint.model_repository import ModelRepository, Violation

Severity = Literal["error", "warning", "note"]
"""error: the model does not load, or does not behave as the file specifies. warning: it loads, but a setting has no
effect or fails later. note: information.
"""


@dataclass(frozen=True, slots=True)
class LintRule:
    """One rule of the linter."""

    id: str
    name: str
    severity: Severity
    what: str
    """The fault that it finds, as a phrase."""
    hint: str
    """The remedy."""
    check: Callable[[ModelRepository], Iterator[Violation]]


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault of a repository."""

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

    def to_json(self) -> dict[str, Json]:
        """One entry of `pipeline models lint --format json`."""
        return {**asdict(self), "file": str(self.file)}

    def github(self) -> str:
        """A workflow command for GitHub Actions, which shows the finding at its line."""
        where = f"file={_property(str(self.file))}" + ("" if self.line is None else f",line={self.line}")
        title, text = _property(f"{self.rule} {self.name}"), _escaped(f"{self.message}. {self.hint}")
        return f"::{'notice' if self.severity == 'note' else self.severity} {where},title={title}::{text}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")


Check = Callable[..., Iterator[Violation]]
DEFINED: Final[list[LintRule]] = []
"""All rules of the imported modules."""


def rule(
    number: str,
    hint: str,
    *,
    severity: Severity = "error",
    each: Callable[[ModelRepository], Iterable[tuple[Any, ...]]] = lambda repository: [(repository,)],
) -> Callable[[Check], Check]:
    """Define a rule by a function that yields violations. Its name becomes the rule's name, its docstring the
    description.

    It is called with each item from `each`: the repository, or the models that the rule checks.
    """

    def define(find: Check) -> Check:
        def check(repository: ModelRepository) -> Iterator[Violation]:
            return (violation for subject in each(repository) for violation in find(*subject))

        what = " ".join((find.__doc__ or "").split()).rstrip(".")
        DEFINED.append(LintRule(number, find.__name__.replace("_", "-"), severity, what, hint, check))
        return find

    return define
