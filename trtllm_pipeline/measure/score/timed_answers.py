"""Answers that a load run has already timed, from its event file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_pipeline.base import FailureClass, StageError
from trtllm_pipeline.measure.load.events import level_of, read_records
from trtllm_pipeline.measure.score.accuracy_result import AnsweredQuestion, Place
from trtllm_pipeline.measure.score.scores import Question


@dataclass(frozen=True, slots=True)
class TimedAnswers:
    """A load run's measured answers to questions."""

    answers: tuple[AnsweredQuestion, ...]
    failed: int
    """Failed measured requests of these questions, which are not scored."""
    not_asked: tuple[str, ...]
    """Ids of questions without a measured request, because there were fewer requests than prompts."""
    settings: Mapping[str, Any]
    protocol: str


def timed_answers(
    events: Path, questions: Mapping[str, Question], encode: Callable[[str], tuple[int, ...]] | None, prefix: str = ""
) -> TimedAnswers:
    """An event file's measured answers to `questions`, by id.

    A prompt may have been sent with `prefix`, the special tokens that the server did not add itself. Raises StageError
    for an invalid event file, and for questions that differ from the recorded ones.
    """
    records = read_records(events)
    answers: list[AnsweredQuestion] = []
    times: Counter[tuple[Any, ...]] = Counter()
    failed = 0
    for id_, prompt in records.prompts.items():
        text = prompt["text"]
        if id_ in questions and text.removeprefix(prefix) != questions[id_].prompt.text:
            raise StageError(
                f"row {id_!r}: the load run sent {text[:60]!r}, the row has {questions[id_].prompt.text[:60]!r}",
                failure=FailureClass.USER,
                hint="score with the prompt file of the load run",
            )
    for record in records.requests:
        if record["phase"] != "measured" or record["prompt"] not in questions:
            continue
        level = (*level_of(record), record["repeat"])
        key = (record["prompt"], *level)
        if record["error"] is None:
            answer = "".join(event.text for event in record["events"] if not event.reasoning)
            tokens = None if encode is None else encode(answer)
            answers.append(AnsweredQuestion(questions[record["prompt"]], answer, tokens, Place(*level, times[key])))
        else:
            failed += 1
        times[key] += 1
    sent_ids = {id_ for id_, *_ in times}
    not_asked = tuple(id_ for id_ in questions if id_ not in sent_ids)
    return TimedAnswers(tuple(answers), failed, not_asked, records.header["settings"], records.header["protocol"])
