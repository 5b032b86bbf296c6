"""Questions: prompt files whose rows have reference answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from trtllm_pipeline.base import Fault, StageError, user_files
from trtllm_pipeline.measure.load import prompts
from trtllm_pipeline.measure.load.prompts import Prompt, Render
from trtllm_pipeline.measure.score.scores import LETTERS, SCORE_METRICS, Metric, NumericTolerance, Question, normalise


def read_questions(
    path: Path, metrics: Mapping[str, Metric], default: Sequence[str], render: Render | None = None
) -> tuple[Question, ...]:
    """The questions in `path`, at least one. In addition to the fields of `prompts.read_prompts`, a line may have

    `metric` (a name, or a list of them) instead of `default`, `choices` (texts, named A, B, ...), `pattern` (a regular
    expression) and `tolerance` (a number, or "1%" of the reference). `metrics` are those that may be named.
    Raises MatrixError with every faulty line.
    """
    return prompts.read_rows(path, lambda prompt, row: _question(prompt, row, metrics, default), render)


def check_first_question(path: Path, default: Sequence[str], *, scored: bool) -> None:
    """Raise MatrixError if the first rows of `path` are invalid questions for any model. With `scored`, also if metrics
    lack required data. The user's metrics are only known by name here.
    """
    own = {name: Metric("", lambda _answer, _question: 0.0, lambda _question: None) for name in default if ":" in name}
    metrics = {**SCORE_METRICS, **own}

    def make(prompt: Prompt, row: dict[str, Any]) -> None:
        question = _question(prompt, row, metrics, default)
        for name in question.metrics if scored else ():
            with suppress(StageError):  # a package missing here may be installed on the machine of the run
                if (fault := metrics[name].lacks(question)) is not None:
                    raise user_files.RowError(*fault)

    prompts.check_first_prompt(path, make)


def scorable(questions: Sequence[Question], metrics: Mapping[str, Metric]) -> tuple[list[Question], list[Fault]]:
    """Questions with all data that their metrics need, and a fault for each of the others."""
    good, faults = [], []
    for question in questions:
        wrong = [fault for name in question.metrics if (fault := metrics[name].lacks(question)) is not None]
        faults += [Fault(f"row {question.prompt.id!r}", None, *fault) for fault in wrong[:1]]
        good += [] if wrong else [question]
    return good, faults


def _question(prompt: Prompt, row: dict[str, Any], metrics: Mapping[str, Metric], default: Sequence[str]) -> Question:
    named = row.get("metric", list(default))
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise user_files.RowError("metric", "expected the name of a metric, or a list of names")
    for name in names:
        if name not in metrics:
            known = ", ".join(metrics)
            more = "; name it in settings.accuracy.metrics too, so that changing it counts" if ":" in name else ""
            raise user_files.RowError("metric", f"unknown metric {name!r}; known: {known}{more}")
    return Question(prompt, tuple(dict.fromkeys(names)), _choices(row), _pattern(row), _tolerance(row), row)


def _choices(row: Mapping[str, Any]) -> tuple[str, ...]:
    choices = row.get("choices", [])
    if not isinstance(choices, list) or not all(isinstance(each, str) and normalise(each) for each in choices):
        raise user_files.RowError("choices", "expected a list of texts")
    if len(choices) > len(LETTERS) or len(set(map(normalise, choices))) < len(choices):
        raise user_files.RowError("choices", f"expected at most {len(LETTERS)} texts, all different")
    return tuple(choices)


def _pattern(row: Mapping[str, Any]) -> re.Pattern[str] | None:
    pattern = row.get("pattern")
    if pattern is None:
        return None
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise user_files.RowError("pattern", f"not a regular expression: {error}") from error


def _tolerance(row: Mapping[str, Any]) -> NumericTolerance:
    value = row.get("tolerance", 0)
    text = str(value).strip()
    relative = text.endswith("%")
    try:
        number = Decimal(text.removesuffix("%").strip()) / (100 if relative else 1)
        if not isinstance(value, bool) and number.is_finite() and number >= 0:
            return NumericTolerance(number, relative)
    except InvalidOperation:
        pass
    raise user_files.RowError("tolerance", f'expected a number from 0, or a share as "1%", got {value!r}')
