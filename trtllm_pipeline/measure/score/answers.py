"""Answers of a running server to questions, and their scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_pipeline.base import FailureClass, StageError
from trtllm_pipeline.measure.load.prompts import Render, chat_renderer, tokenizer_folder, unrendered
from trtllm_pipeline.measure.score import accuracy_result
from trtllm_pipeline.measure.score.accuracy_result import AccuracyResult, AnsweredQuestion
from trtllm_pipeline.measure.score.functions import metrics_of
from trtllm_pipeline.measure.score.questions import read_questions, scorable
from trtllm_pipeline.measure.score.scores import Metric, Question
from trtllm_pipeline.models import tokenizer_at

if TYPE_CHECKING:
    from trtllm_pipeline.measure.client.session import Answer
    from trtllm_pipeline.measure.load.target import Target

Encode = Callable[[str], tuple[int, ...]]
"""Text to tokens, without special ones."""


def questions_of(
    path: Path, metrics: Mapping[str, Metric], names: Sequence[str], render: Render | None
) -> list[Question]:
    """The questions in `path`, all of which can be scored. Raises StageError or MatrixError for rows that cannot."""
    questions, faults = scorable(read_questions(path, metrics, names, render), metrics)
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
    """Score an external server on the questions in `path`: see `score_server`.

    `names` are the metrics of rows without a metric. `tokenizer` is a tokenizer.json or a model's directory.
    """
    metrics = metrics_of(names)
    # Before the first request: an invalid directory must not waste the answers.
    tokens = None if tokenizer is None else tokenizer_at(tokenizer)
    chats = target.protocol.startswith("openai_chat")  # the server applies its own template
    from trtllm_pipeline.measure.load.target import adds_special_tokens

    special = partial(adds_special_tokens, target.service, target.protocol, target.timeout_s)
    with nullcontext(unrendered) if chats else chat_renderer(tokenizer_folder(tokenizer), special) as render:
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
    """Send the questions, score the answers, and write answers.jsonl and accuracy.json to `folder`.

    Answers are written before they are scored, and stay there if scoring fails. Raises StageError if requests
    failed: a missing answer is not a wrong answer.
    """
    import asyncio

    from trtllm_pipeline.measure.client.triton import failure_class

    pairs = list(zip(questions, asyncio.run(_ask(target, questions, concurrency, progress)), strict=True))
    answers = [
        AnsweredQuestion(question, answer.text, None if encode is None else encode(answer.text))
        for question, answer in pairs
        if answer.error is None
    ]
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        accuracy_result.write_answers(folder, answers)
    failed = [(question, answer) for question, answer in pairs if answer.error is not None]
    if failed:
        question, answer = failed[0]
        raise StageError(
            f"{len(failed)} of {len(questions)} requests failed, so there is no score; the first, "
            f"{question.prompt.id!r}, with: {answer.error}",
            failure=failure_class(str(answer.error)),
        )
    scored = accuracy_result.score(answers, metrics)
    result = accuracy_result.summary(
        scored, metrics, settings, asked=question_endpoint(target.protocol, questions), source=source
    )
    if folder is not None:
        accuracy_result.write(folder, scored, result)
    return result


def question_endpoint(protocol: str, questions: Sequence[Question]) -> str:
    """The endpoint for the questions, and the source of the chat template: both affect the scores."""
    from trtllm_pipeline.measure.load.target import OPENAI

    endpoint, _ = OPENAI.get(protocol, (None, False))
    if endpoint == "chat":
        return "/v1/chat/completions, with the server's chat template"
    where = f"Triton over {protocol.removesuffix('_unary')}" if endpoint is None else "/v1/completions"
    rendered = sum(bool(question.prompt.messages) for question in questions)
    if not rendered:
        return f"{where}, without a chat template"
    return f"{where}, with the model's chat template for {rendered} of {len(questions)} questions"


async def _ask(
    target: Target, questions: Sequence[Question], concurrency: int, progress: Callable[[int, int, str], None] | None
) -> list[Answer]:
    """Answers in the order of `questions`, with `concurrency` of them in flight."""
    import asyncio

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
