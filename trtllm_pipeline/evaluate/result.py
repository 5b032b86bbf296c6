"""From answers to scores: `answers.jsonl` (each answer with its scores) and `accuracy.json` (means with intervals)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from trtllm_pipeline.bench.stats import CONFIDENCE, MEAN_INTERVAL, mean_interval
from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.evaluate import functions
from trtllm_pipeline.evaluate.scores import METRICS, NORMALISATION, Metric, Question
from trtllm_pipeline.files.writing import write_json

ANSWERS: Final = "answers.jsonl"
RESULT: Final = "accuracy.json"


@dataclass(frozen=True, slots=True)
class Place:
    """Which of a load run's answers to one question."""

    concurrency: int | None
    request_rate: float | None
    repeat: int
    time: int
    """From 0, among the answers at this level and repeat."""


@dataclass(frozen=True, slots=True)
class AnsweredQuestion:
    """One answer to one question. The same question may have been asked again, at other levels of a load run."""

    question: Question
    answer: str
    tokens: tuple[int, ...] | None = None
    """The answer encoded again, without special tokens; None without a tokenizer."""
    place: Place | None = None
    """Where in a load run; None for an answer that was asked for alone."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Samples with the score each metric gives them."""

    samples: tuple[AnsweredQuestion, ...]
    scores: tuple[Mapping[str, float], ...]

    def rows(self) -> Iterable[dict[str, Any]]:
        """Lines of answers.jsonl."""
        for sample, scores in zip(self.samples, self.scores, strict=True):
            yield {
                "id": sample.question.prompt.id,
                "input": sample.question.prompt.text,
                "output": list(sample.question.references),
                "answer": sample.answer,
                "tokens": None if sample.tokens is None else list(sample.tokens),
                **({} if sample.place is None else asdict(sample.place)),
                "scores": dict(scores),
            }


def metrics_of(names: Sequence[str], module: Path | None = None) -> dict[str, Metric]:
    """All metrics that rows may name: the built-in ones, and the user's functions among `names`, from `module`.

    Raises StageError for names that mean nothing.
    """
    if not names:
        raise StageError("metrics: none is named", failure=FailureClass.USER, hint=_known())
    found = dict(METRICS)
    for name in names:
        if ":" in name:
            found[name] = functions.load(name, module)
        elif name not in METRICS:
            raise StageError(f"metrics: there is no metric {name!r}", failure=FailureClass.USER, hint=_known())
    return found


def _known() -> str:
    return f"there are {', '.join(METRICS)}, and your own functions as module:name"


def score(samples: Sequence[AnsweredQuestion], metrics: Mapping[str, Metric], progress: Any = None) -> Scored:
    """The scores of `samples`. Raises StageError where a user's function fails."""
    scores = []
    for sample in samples:
        scores.append({name: metrics[name].score(sample.answer, sample.question) for name in sample.question.metrics})
        if progress is not None:
            progress(len(scores), len(samples), "answers")
    return Scored(tuple(samples), tuple(scores))


def summary(scored: Scored, metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """Means with intervals: every question counts once, with the mean of its answers' scores."""
    means = _means(zip(scored.samples, scored.scores, strict=True))
    levels: dict[tuple[int | None, float | None], list[tuple[AnsweredQuestion, Mapping[str, float]]]] = {}
    for sample, scores in zip(scored.samples, scored.scores, strict=True):
        if sample.place is not None:
            key = (sample.place.concurrency, sample.place.request_rate)
            levels.setdefault(key, []).append((sample, scores))
    return {
        "schema": 1,
        "total": len({sample.question.prompt.id for sample in scored.samples}),
        "answers": len(scored.samples),
        "scores": _rounded(means),
        "intervals": {name: mean_interval(values, low=0, high=1) for name, values in means.items()},
        "questions": {name: len(values) for name, values in means.items()},
        "levels": [
            {"concurrency": concurrency, "request_rate": rate, "scores": _rounded(_means(samples))}
            for (concurrency, rate), samples in levels.items()
        ],
        "confidence": CONFIDENCE,
        "interval_method": MEAN_INTERVAL,
        "rows_digest": _digest(scored.samples),
        "normalisation": NORMALISATION,
        "definitions": {name: metrics[name].definition for name in means},
    }


def _means(samples: Iterable[tuple[AnsweredQuestion, Mapping[str, float]]]) -> dict[str, list[float]]:
    """Metric -> mean score of each question's answers."""
    found: dict[str, dict[str, list[float]]] = {}
    for sample, scores in samples:
        for name, value in scores.items():
            found.setdefault(name, {}).setdefault(sample.question.prompt.id, []).append(value)
    return {name: [fmean(values) for values in questions.values()] for name, questions in found.items()}


def _rounded(means: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: round(fmean(values), 6) for name, values in means.items()}


def _digest(samples: Iterable[AnsweredQuestion]) -> str:
    """Of what was asked and what was right: equal for scores that may be compared."""
    questions = {sample.question.prompt.id: sample.question for sample in samples}
    asked = [
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
    return "sha256:" + hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def keep(folder: Path, samples: Sequence[AnsweredQuestion]) -> None:
    """Write answers.jsonl without scores: scoring may fail, and the answers took their time."""
    _write_answers(folder, Scored(tuple(samples), tuple({} for _ in samples)))


def write(folder: Path, scored: Scored, metrics: Mapping[str, Metric], **more: Any) -> dict[str, Any]:
    """Write both files into `folder`, with `more` in accuracy.json; returns what is in that."""
    _write_answers(folder, scored)
    result = {**summary(scored, metrics), **more}
    write_json(folder / RESULT, result)
    return result


def _write_answers(folder: Path, scored: Scored) -> None:
    with (folder / ANSWERS).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in scored.rows())


def line(result: Mapping[str, Any]) -> str:
    """The scores in one line: "exact 0.893 [0.750, 1.000], contains ... on 28 questions"."""
    parts = [
        f"{name} {mean:.3f} [{result['intervals'][name][0]:.3f}, {result['intervals'][name][1]:.3f}]"
        for name, mean in result["scores"].items()
    ]
    return f"{', '.join(parts)} on {result['total']} questions"


def check_least(result: Mapping[str, Any], first: str, least: float | None) -> None:
    """Raise StageError when the mean of metric `first` is below `least`, or there is none; None asks for nothing."""
    if least is None:
        return
    score = result["scores"].get(first)
    if score is None:
        raise StageError(f"min_score is for {first}, by which no row is scored", failure=FailureClass.USER)
    if score < least:
        raise StageError(
            f"{first} is {score:.3f} on {result['questions'][first]} questions, expected at least {least}",
            failure=FailureClass.CHECK,
            hint=f"out/{ANSWERS} beside the log has every answer; settings.accuracy.min_score sets the limit",
        )
