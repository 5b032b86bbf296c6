"""Where answers come from: a running server that is asked, or the event file of a load run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_pipeline.bench.events import level_of, read_records
from trtllm_pipeline.bench.prompts import Render, chat_renderer, tokenizer_folder, unrendered
from trtllm_pipeline.bench.target import Target
from trtllm_pipeline.client.session import Answer
from trtllm_pipeline.client.triton import failure_class
from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.evaluate import result
from trtllm_pipeline.evaluate.functions import metrics_of
from trtllm_pipeline.evaluate.questions import read, scorable
from trtllm_pipeline.evaluate.result import AccuracyResult, AnsweredQuestion, Place
from trtllm_pipeline.evaluate.scores import Metric, Question
from trtllm_pipeline.files.tokenizer import tokenizer_at

Encode = Callable[[str], tuple[int, ...]]
"""Text to tokens, without special ones."""


def questions_of(
    path: Path, metrics: Mapping[str, Metric], names: Sequence[str], render: Render | None
) -> list[Question]:
    """The questions in `path`, all of which can be scored. Raises StageError or MatrixError for rows that cannot."""
    questions, faults = scorable(read(path, metrics, names, render), metrics)
    if faults:
        many = "1 row cannot be scored" if len(faults) == 1 else f"{len(faults)} rows cannot be scored; the first"
        raise StageError(f"{path}: {many}: {faults[0]}", failure=FailureClass.USER)
    return questions


def score_url(
    target: Target,
    path: Path,
    names: Sequence[str],
    *,
    concurrency: int,
    tokenizer: Path | None,
    folder: Path | None,
    url: str,
) -> AccuracyResult:
    """Score a server that somebody else started on the questions in `path`: see `score_server`.

    `names` are the metrics of rows that name none. `tokenizer` is a tokenizer.json or a model's folder.
    """
    metrics = metrics_of(names)
    # Before anything is asked: a wrong folder must not cost the answers.
    tokens = None if tokenizer is None else tokenizer_at(tokenizer)
    chats = target.protocol.startswith("openai_chat")  # the server has the template
    with nullcontext(unrendered) if chats else chat_renderer(tokenizer_folder(tokenizer)) as render:
        questions = questions_of(path, metrics, names, render)
    return score_server(
        target,
        questions,
        metrics,
        concurrency=concurrency,
        encode=None if tokens is None else lambda text: tuple(tokens.encode(text, add_special_tokens=False).ids),
        folder=folder,
        source="url",
        settings={"url": url, "model": target.model, "protocol": target.protocol},
    )


def score_server(
    target: Target,
    questions: Sequence[Question],
    metrics: Mapping[str, Metric],
    *,
    concurrency: int,
    encode: Encode | None,
    folder: Path | None,
    source: str,
    settings: Mapping[str, Any],
    progress: Callable[[int, int, str], None] | None = None,
) -> AccuracyResult:
    """Ask, score, and leave answers.jsonl and accuracy.json in `folder`.

    Answers are in the folder before they are scored, and stay there when scoring fails. Raises StageError for requests
    that failed: what is missing is no wrong answer.
    """
    pairs = list(zip(questions, asyncio.run(_ask(target, questions, concurrency, progress)), strict=True))
    answers = [
        AnsweredQuestion(question, answer.text, None if encode is None else encode(answer.text))
        for question, answer in pairs
        if answer.error is None
    ]
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        result.write_answers(folder, answers)
    failed = [(question, answer) for question, answer in pairs if answer.error is not None]
    if failed:
        question, answer = failed[0]
        raise StageError(
            f"{len(failed)} of {len(questions)} requests failed, so there is no score; the first, "
            f"{question.prompt.id!r}, with: {answer.error}",
            failure=failure_class(str(answer.error)),
        )
    scored = result.score(answers, metrics)
    found = result.summary(scored, metrics, settings, source=source)
    if folder is not None:
        result.write(folder, scored, found)
    return found


async def _ask(
    target: Target,
    questions: Sequence[Question],
    concurrency: int,
    progress: Callable[[int, int, str], None] | None,
) -> list[Answer]:
    """Answers in the order of `questions`, `concurrency` of them in flight together."""
    answers: dict[str, Answer] = {}
    async with target.client() as client:
        waiting = iter(questions)

        async def slot() -> None:
            session = client.session()
            for question in waiting:
                answers[question.prompt.id] = await session.generate(target.generation(question.prompt, 0))
                if progress is not None:
                    progress(len(answers), len(questions), "requests")

        await asyncio.gather(*(slot() for _ in range(min(concurrency, len(questions)))))
    return [answers[question.prompt.id] for question in questions]


@dataclass(frozen=True, slots=True)
class TimedAnswers:
    """The measured answers of a load run to some questions."""

    answers: tuple[AnsweredQuestion, ...]
    failed: int
    """Measured requests of these questions that have no answer; they are not scored."""
    not_asked: tuple[str, ...]
    """Ids of questions that no measured request asked: there were fewer requests than prompts."""
    settings: Mapping[str, Any]
    """Of the load run."""


def timed_answers(events: Path, questions: Mapping[str, Question], encode: Encode | None) -> TimedAnswers:
    """The measured answers in an event file to `questions`, by id.

    Raises StageError for what is no event file, and for questions that are not those that were asked.
    """
    told = read_records(events)
    answers: list[AnsweredQuestion] = []
    times: Counter[tuple[Any, ...]] = Counter()
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
        level = (*level_of(record), record["repeat"])
        key = (record["prompt"], *level)
        if record["error"] is None:
            answer = "".join(event.text for event in record["events"] if not event.reasoning)
            tokens = None if encode is None else encode(answer)
            answers.append(AnsweredQuestion(questions[record["prompt"]], answer, tokens, Place(*level, times[key])))
        else:
            failed += 1
        times[key] += 1
    asked = {id_ for id_, *_ in times}
    not_asked = tuple(id_ for id_ in questions if id_ not in asked)
    return TimedAnswers(tuple(answers), failed, not_asked, told.header["settings"])
