"""Converts answers to scores: `answers.jsonl` (each answer with its scores) and `accuracy.json` (means with intervals)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from trtllm_pipeline.base import FailureClass, Json, StageError, write_json
from trtllm_pipeline.measure.load.stats import CONFIDENCE, MEAN_INTERVAL, Interval, mean_interval
from trtllm_pipeline.measure.score.scores import NORMALISATION, Metric, Question

ANSWERS: Final = "answers.jsonl"
ACCURACY_FILE: Final = "accuracy.json"
_OF_STAGE: Final = f"see the answers in out/{ANSWERS} next to the log; settings.accuracy.min_score sets the limit"


@dataclass(frozen=True, slots=True)
class Place:
    """Position of an answer in a load run that repeats questions."""

    concurrency: int | None
    request_rate: float | None
    repeat: int
    time: int
    """Index among the answers to the question at this level and repeat."""


@dataclass(frozen=True, slots=True)
class AnsweredQuestion:
    """One answer to one question. A load run may send a question several times."""

    question: Question
    answer: str
    tokens: tuple[int, ...] | None = None
    """The answer encoded again, without special tokens. None without a tokenizer."""
    place: Place | None = None
    """Position in a load run. None for a separately requested answer."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Scores by metric. Empty before it is scored."""

    def to_json(self) -> dict[str, Json]:
        """A line of answers.jsonl."""
        return {
            "id": self.question.prompt.id,
            "input": self.question.prompt.text,
            "output": list(self.question.references),
            "answer": self.answer,
            "tokens": None if self.tokens is None else list(self.tokens),
            **({} if self.place is None else asdict(self.place)),
            "scores": dict(self.scores),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyResult:
    """Means over questions, by metric. The only writer and reader of accuracy.json."""

    scores: Mapping[str, float]
    intervals: Mapping[str, Interval | None]
    questions: Mapping[str, int | None] = field(default_factory=dict)
    """Number of questions in each mean."""
    total: int | None = None
    rows_digest: str | None = None
    """Digest of questions and references. Scores are only comparable if it is equal."""
    asked: str | None = None
    """The endpoint, and the source of the chat template."""
    interval_method: str = MEAN_INTERVAL
    definitions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Request options."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Other keys of the file, not read back."""

    def to_json(self) -> dict[str, Json]:
        own = {name: getattr(self, name) for name in AccuracyResult.__dataclass_fields__ if name != "more"}
        return {"schema": 1, **{name: value for name, value in own.items() if value is not None}, **self.more}

    @staticmethod
    def read(data: Mapping[str, Any]) -> AccuracyResult:
        """Read an accuracy.json. Values of a wrong type count as missing."""
        from trtllm_pipeline.measure.load.result import count_of, numbers_of

        ends, digest, settings, asked = (data.get(name) for name in ("intervals", "rows_digest", "settings", "asked"))
        intervals: dict[str, Interval | None] = {}
        for name, pair in ends.items() if isinstance(ends, dict) else ():
            numbers = list(numbers_of(dict(enumerate(pair))).values()) if isinstance(pair, list) else []
            if len(numbers) == 2:
                intervals[str(name)] = (numbers[0], numbers[1])
        return AccuracyResult(
            scores=numbers_of(data.get("scores")),
            intervals=intervals,
            total=count_of(data.get("total")),
            rows_digest=digest if isinstance(digest, str) else None,
            asked=asked if isinstance(asked, str) else None,
            settings=settings if isinstance(settings, dict) else {},
        )

    def __str__(self) -> str:
        """`exact 0.893 [0.750, 1.000], contains ... on 28 questions`."""
        parts = [f"{name} {mean:.3f} [{_ends(self.intervals.get(name))}]" for name, mean in self.scores.items()]
        return f"{', '.join(parts)} on {self.total} questions{f', via {self.asked}' if self.asked else ''}"

    def check_least(self, first: str, least: float | None, hint: str = _OF_STAGE) -> None:
        """Raise StageError, with `hint`, if the mean of metric `first` is missing or below `least`, if any."""
        if least is None:
            return
        score = self.scores.get(first)
        if score is None:
            raise StageError(f"min_score is for {first}, but no row is scored by it", failure=FailureClass.USER)
        if score < least:
            raise StageError(
                f"{first} is {score:.3f} on {self.questions[first]} questions, expected at least {least}",
                failure=FailureClass.CHECK,
                hint=hint,
            )


def _ends(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval[0]:.3f}, {interval[1]:.3f}"


def score(
    answers: Sequence[AnsweredQuestion],
    metrics: Mapping[str, Metric],
    progress: Callable[[int, int, str], None] | None = None,
) -> list[AnsweredQuestion]:
    """`answers` with their scores. Raises StageError if a user's function fails."""
    scored = []
    for each in answers:
        scores = {name: metrics[name].score(each.answer, each.question) for name in each.question.metrics}
        scored.append(replace(each, scores=scores))
        if progress is not None:
            progress(len(scored), len(answers), "answers")
    return scored


def summary(
    scored: Sequence[AnsweredQuestion],
    metrics: Mapping[str, Metric],
    settings: Mapping[str, Any],
    *,
    asked: str | None = None,
    **more: Any,
) -> AccuracyResult:
    """Means with intervals: each question counts once, by its answers' mean. `more` is added to the file."""
    means = _means(scored)
    levels: dict[tuple[int | None, float | None], list[AnsweredQuestion]] = {}
    for each in scored:
        if each.place is not None:
            levels.setdefault((each.place.concurrency, each.place.request_rate), []).append(each)
    return AccuracyResult(
        scores=_rounded(means),
        intervals={name: mean_interval(values, low=0, high=1) for name, values in means.items()},
        questions={name: len(values) for name, values in means.items()},
        total=len({each.question.prompt.id for each in scored}),
        rows_digest=_digest(scored),
        asked=asked,
        definitions={name: metrics[name].definition for name in means},
        settings=settings,
        more={
            "answers": len(scored),
            "levels": [
                {"concurrency": concurrency, "request_rate": rate, "scores": _rounded(_means(each))}
                for (concurrency, rate), each in levels.items()
            ],
            "confidence": CONFIDENCE,
            "normalisation": NORMALISATION,
            **more,
        },
    )


def _means(scored: Iterable[AnsweredQuestion]) -> dict[str, list[float]]:
    """Metric -> mean score of each question's answers."""
    scores: dict[str, dict[str, list[float]]] = {}
    for each in scored:
        for name, value in each.scores.items():
            scores.setdefault(name, {}).setdefault(each.question.prompt.id, []).append(value)
    return {name: [fmean(values) for values in questions.values()] for name, questions in scores.items()}


def _rounded(means: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: round(fmean(values), 6) for name, values in means.items()}


def _digest(scored: Iterable[AnsweredQuestion]) -> str:
    questions = {each.question.prompt.id: each.question for each in scored}
    rows = [
        [
            id_,
            question.prompt.text,
            question.references,
            question.prompt.max_tokens,
            question.prompt.stop_words,
            question.metrics,
            question.choices,
            question.pattern and question.pattern.pattern,
            [str(question.tolerance.value), question.tolerance.relative],
        ]
        for id_, question in sorted(questions.items())
    ]
    return "sha256:" + hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def write_answers(folder: Path, answers: Iterable[AnsweredQuestion]) -> None:
    """Write answers.jsonl, even without scores: answers are expensive, and scoring may fail."""
    with (folder / ANSWERS).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(each.to_json(), ensure_ascii=False) + "\n" for each in answers)


def write(folder: Path, scored: Iterable[AnsweredQuestion], result: AccuracyResult) -> None:
    """Write both files into `folder`."""
    write_answers(folder, scored)
    write_json(folder / ACCURACY_FILE, result.to_json())
