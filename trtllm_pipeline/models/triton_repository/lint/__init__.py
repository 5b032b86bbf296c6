"""The linter of Triton model repositories: finds faults in a directory before a server reads it.

`lint` accepts any repository. For those of TensorRT-LLM, it also checks the engine, the five models' parameters, and
`model.yaml`. Every rule has a stable id (`TRT304`), a name, a severity and a hint. The rules are in `rules/`, one
module for each hundred.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from trtllm_pipeline.base import UsageError
from trtllm_pipeline.models.triton_repository.engine_config import Engine
from trtllm_pipeline.models.triton_repository.lint import model_repository
from trtllm_pipeline.models.triton_repository.lint.rule import Finding, LintRule, Severity
from trtllm_pipeline.models.triton_repository.lint.rules import RULES

__all__ = ["RULES", "Finding", "LintRule", "Severity", "lint", "select"]


def select(chosen: Collection[str] = (), ignored: Collection[str] = ()) -> tuple[LintRule, ...]:
    """The rules in `chosen` (all if it is empty) without those in `ignored`, given by id, prefix of ids, or name.

    Raises UsageError for an unknown rule.
    """

    def named(words: Collection[str]) -> set[str]:
        ids: set[str] = set()
        for word in words:
            matching = {rule.id for rule in RULES if rule.id.startswith(word.upper()) or rule.name == word}
            if not matching or not word:
                raise UsageError(
                    f"unknown rule {word!r}",
                    hint="give a rule's id or name, or a prefix of ids: TRT304, dims-differ, TRT3; "
                    "see docs/reference/repository-lint.md for all rules",
                )
            ids |= matching
        return ids

    kept = (named(chosen) if chosen else {rule.id for rule in RULES}) - named(ignored)
    return tuple(rule for rule in RULES if rule.id in kept)


def lint(
    folder: Path,
    *,
    engine: Engine | None = None,
    release: str | None = None,
    unlike_release: Callable[[Mapping[str, Any]], Sequence[str]] | None = None,
    rules: Sequence[LintRule] = RULES,
) -> list[Finding]:
    """Findings of `rules` in the repository `folder`, by file and line.

    `engine` is the engine that its tensorrt_llm model will run; by default the one that the model's own path refers to.
    `release` is the TensorRT-LLM that will serve it, `unlike_release` says what it does not have. Raises UsageError if the directory does not exist or cannot be read.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such directory", hint="name a Triton model repository")
    try:
        subject = model_repository.read(folder, engine=engine, release=release, unlike_release=unlike_release)
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}") from error
    findings = [
        Finding(rule.id, rule.name, rule.severity, violation.path, violation.line, violation.message, rule.hint)
        for rule in rules
        for violation in rule.check(subject)
    ]
    return sorted(findings, key=lambda finding: (str(finding.file), finding.line or 0, finding.rule))
