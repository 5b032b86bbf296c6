"""Accuracy metrics: functions that score an answer to a question from 0 to 1.

To add a metric, write a function, add a line to `_SCORING`, and its definition to `data/score_metrics.json`.
"""

from __future__ import annotations

import importlib
import json
import re
import string
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final

from trtllm_pipeline import PACKAGE
from trtllm_pipeline.base import FailureClass, StageError
from trtllm_pipeline.measure.load.prompts import Prompt

_TEXTS: Final = json.loads((PACKAGE / "data" / "score_metrics.json").read_text(encoding="utf-8"))
DRIFT: Final[dict[str, str]] = _TEXTS["drift"]
"""Metrics of `drift`."""
NORMALISATION: Final[str] = _TEXTS["normalisation"]
LETTERS: Final = string.ascii_uppercase
"""Names of the choices of a question, in order."""

# Signs and decimal points of numbers are not punctuation: -1 is not 1 and 2.5 is not 25.
_NOISE: Final = re.compile(r"(?:(?<!\d)[.,]|[.,](?!\d)|-(?!\d)|[^\w\s.,-]|_)")
# Digits in a word (H2O) are not numbers, a hyphen between two numbers is not a sign, and a comma only separates
# thousands.
_NUMBER: Final = re.compile(
    r"(?<![\w.])[-+\u2212]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
)


@dataclass(frozen=True, slots=True)
class NumericTolerance:
    """Allowed distance of a number from the reference, absolute or as a share of it."""

    value: Decimal = Decimal(0)
    relative: bool = False

    def allows(self, number: Decimal, reference: Decimal) -> bool:
        try:
            return abs(number - reference) <= self.value * (abs(reference) if self.relative else 1)
        except ArithmeticError:  # beyond the range of decimal numbers
            return False


@dataclass(frozen=True, slots=True)
class Question:
    """One line of a prompt file, with the metrics of its answer."""

    prompt: Prompt
    metrics: tuple[str, ...]
    choices: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None
    tolerance: NumericTolerance = NumericTolerance()
    row: Mapping[str, Any] = field(default_factory=dict)
    """The unmodified line."""

    @property
    def references(self) -> tuple[str, ...]:
        """Right answers."""
        return self.prompt.references


@dataclass(frozen=True, slots=True)
class Metric:
    """One way to score an answer."""

    definition: str
    score: Callable[[str, Question], float]
    lacks: Callable[[Question], tuple[str, str] | None]
    """(key, fault) if a question cannot be scored by it, else None. Raises StageError if no question can be."""


def normalise(text: str) -> str:
    """`text` normalized as in NORMALISATION. Numbers keep sign and point."""
    return " ".join(_NOISE.sub(" ", unicodedata.normalize("NFKC", text).casefold()).split())


def exact(answer: str, question: Question) -> float:
    """1 if the normalized answer equals one of the normalized references, else 0."""
    return float(normalise(answer) in map(normalise, question.references))


def contains(answer: str, question: Question) -> float:
    """1 if the normalized answer contains one of the normalized references as whole words, else 0."""
    normalized = f" {normalise(answer)} "
    return float(any(f" {normalise(reference)} " in normalized for reference in question.references))


def _matched(answer: str, question: Question) -> str | None:
    """The pattern's match in the answer: its first group, or the whole match without groups."""
    assert question.pattern is not None
    match = question.pattern.search(answer)
    return None if match is None else match[1] or "" if question.pattern.groups else match[0]


def regex(answer: str, question: Question) -> float:
    """1 if the pattern matches. If it has a group and there are references, the group must equal one of them."""
    assert question.pattern is not None
    matched = _matched(answer, question)
    if matched is None:
        return 0.0
    return exact(matched, question) if question.pattern.groups and question.references else 1.0


def last_number(text: str) -> Decimal | None:
    """The last number in `text`. Commas may separate thousands."""
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "").replace("\u2212", "-")) if numbers else None


def numeric(answer: str, question: Question) -> float:
    """1 if the last number of the answer, or of the pattern's match, is within the tolerance of a reference's."""
    text = answer if question.pattern is None else _matched(answer, question)
    number = None if text is None else last_number(text)
    if number is None:
        return 0.0
    references = [value for reference in question.references if (value := last_number(reference)) is not None]
    return float(any(question.tolerance.allows(number, reference) for reference in references))


def chosen(answer: str, choices: Sequence[str]) -> int | None:
    """Index of the choice that an answer picks: by the letter it names or starts with, else the first text in it."""
    letters = LETTERS[: len(choices)]
    # A bare "A" before a word is an article: a letter must be alone, in brackets, or before a punctuation mark.
    named = re.search(rf"\b(?i:answer|choice|option)\b\W*(?:(?i:is)\b\W*)?([{letters}])(?![\w'])", answer)
    named = named or re.match(rf"\W*([{letters}])(?=\s*(?:[).:,;*\]]|\n|$))", answer)
    if named is not None:
        return letters.index(named[1])
    normalized = f" {normalise(answer)} "
    places = [(normalized.find(f" {normalise(choice)} "), -len(choice), place) for place, choice in enumerate(choices)]
    return min((picks for picks in places if picks[0] >= 0), default=(0, 0, None))[2]


def named_choice(reference: str, choices: Sequence[str]) -> int | None:
    """The one of `choices` that a reference means, by its letter or its text."""
    if len(reference) == 1 and reference in LETTERS[: len(choices)]:
        return LETTERS.index(reference)
    texts = [normalise(choice) for choice in choices]
    return texts.index(normalise(reference)) if normalise(reference) in texts else None


def choice(answer: str, question: Question) -> float:
    """1 if the answer picks a choice that a reference names, else 0."""
    picked = chosen(answer, question.choices)
    return float(
        picked is not None and picked in {named_choice(each, question.choices) for each in question.references}
    )


class _Words:
    """Words for ROUGE: like rouge-score's own tokenizer for English, but including words in other scripts."""

    def tokenize(self, text: str) -> list[str]:
        return re.findall(r"[^\W_]+", text.lower())


def _library(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise StageError(
            f"this metric needs the package {module.partition('.')[0].replace('_', '-')}, which is not installed",
            failure=FailureClass.USER,
            hint="pip install 'trtllm-pipeline[accuracy]'",
        ) from error


@lru_cache(maxsize=1)
def _rouge() -> Any:
    return _library("rouge_score.rouge_scorer").RougeScorer(["rougeL"], tokenizer=_Words())


@lru_cache(maxsize=1)
def _chrf() -> Any:
    return _library("sacrebleu.metrics").CHRF()


def rouge_l(answer: str, question: Question) -> float:
    """ROUGE-L F1 by rouge-score: the longest common subsequence of words. The best reference counts."""
    return float(_rouge().score_multi(list(question.references), answer)["rougeL"].fmeasure)


def chrf(answer: str, question: Question) -> float:
    """chrF2 by sacrebleu for this answer alone: F-score of character 1- to 6-grams. The best reference counts."""
    return float(_chrf().sentence_score(answer, list(question.references)).score) / 100


def _no_reference(question: Question) -> tuple[str, str] | None:
    return None if question.references else ("output", "the row has no reference answer")


def _library_first(load: Callable[[], Any]) -> Callable[[Question], tuple[str, str] | None]:
    """`_no_reference`, after loading the metric's library, so that a missing one is reported before the first request."""

    def lacks(question: Question) -> tuple[str, str] | None:
        load()
        return _no_reference(question)

    return lacks


def _no_pattern(question: Question) -> tuple[str, str] | None:
    return None if question.pattern is not None else ("pattern", "the metric regex needs a regular expression")


def _no_number(question: Question) -> tuple[str, str] | None:
    without = [reference for reference in question.references if last_number(reference) is None]
    return ("output", f"no number in {without[0]!r}") if without else _no_reference(question)


def _no_choice(question: Question) -> tuple[str, str] | None:
    if len(question.choices) < 2:
        return "choices", "the metric choice needs a list of two or more texts"
    wrong = [reference for reference in question.references if named_choice(reference, question.choices) is None]
    return ("output", f"{wrong[0]!r} is neither a choice nor its letter") if wrong else _no_reference(question)


_SCORING: Final = {
    "exact": (exact, _no_reference),
    "contains": (contains, _no_reference),
    "regex": (regex, _no_pattern),
    "numeric": (numeric, _no_number),
    "choice": (choice, _no_choice),
    "rouge_l": (rouge_l, _library_first(_rouge)),
    "chrf": (chrf, _library_first(_chrf)),
}
SCORE_METRICS: Final = {name: Metric(_TEXTS["scores"][name], *functions) for name, functions in _SCORING.items()}
"""Name -> metric. A name with a colon is a user's function, see `functions.py`."""
