"""Answers that were timed in a load run, from its event file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_pipeline.bench.events import read_records
from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.evaluate.result import AnsweredQuestion, Place
from trtllm_pipeline.evaluate.scores import Question


@dataclass(frozen=True, slots=True)
class Timed:
    """The answers of a load run to some questions."""

    samples: tuple[AnsweredQuestion, ...]
    failed: int
    """Measured requests of these questions that have no answer; they are not scored."""
    not_asked: tuple[str, ...]
    """Ids of questions that no measured request asked: there were fewer requests than prompts."""
    settings: Mapping[str, Any]
    """Of the load run."""


def read(events: Path, questions: Mapping[str, Question], tokens: Callable[[str], tuple[int, ...]] | None) -> Timed:
    """The measured answers to `questions` (by id). `tokens` encodes an answer again.

    Raises StageError for what is no event file, and for questions that are not those that were asked.
    """
    told = read_records(events)
    samples: list[AnsweredQuestion] = []
    seen: Counter[tuple[Any, ...]] = Counter()
    asked: set[str] = set()
    failed = 0
    for id_, text in told.prompts.items():
        if id_ in questions and text != questions[id_].prompt.text:
            raise StageError(
                f"row {id_!r}: the load run asked {text[:60]!r}, the row says {questions[id_].prompt.text[:60]!r}",
                failure=FailureClass.USER,
                hint="score with the file that was asked",
            )
    for record in told.requests:
        if record["phase"] != "measured" or record["prompt"] not in questions:
            continue
        asked.add(record["prompt"])
        level = (record["concurrency"], record.get("request_rate"), record["repeat"])
        key = (*level, record["prompt"])
        if record["error"] is None:
            answer = "".join(event.text for event in record["events"] if not event.reasoning)
            encoded = None if tokens is None else tokens(answer)
            samples.append(AnsweredQuestion(questions[record["prompt"]], answer, encoded, Place(*level, seen[key])))
        else:
            failed += 1
        seen[key] += 1
    not_asked = tuple(id_ for id_ in questions if id_ not in asked)
    return Timed(tuple(samples), failed, not_asked, told.header["settings"])
