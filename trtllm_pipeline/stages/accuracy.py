"""Ask a running server and score its greedy answers.

Leaves `answers.jsonl` (every prompt, answer and score, in the order of the input) and `accuracy.json` (the means with
their intervals). Answers are there before their scores, and stay when scoring fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from trtllm_pipeline.bench.prompts import chat_renderer
from trtllm_pipeline.bench.target import Target
from trtllm_pipeline.client.service import Answer, Service, failure_class
from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.evaluate import result
from trtllm_pipeline.evaluate.questions import read, scorable
from trtllm_pipeline.evaluate.scores import Question
from trtllm_pipeline.stages.asking import Encode, encoder, number, protocol_for
from trtllm_pipeline.stages.base import Work


def run(work: Work) -> None:
    """Ask, score, write. Raises StageError for rows without references, failed requests and too low a score."""
    engine = work.inputs["engine"]
    names = work.params["metrics"]
    metrics = result.metrics_of(names, work.files.get("metric_module"))
    assert isinstance(names, list)
    path = work.files["input_data"]
    with chat_renderer(engine) as render:
        questions, faults = scorable(read(path, metrics, list(map(str, names)), render), metrics)
    if faults:
        raise StageError(
            f"{path}: {len(faults)} rows cannot be scored; the first: {faults[0]}", failure=FailureClass.USER
        )
    service = Service.read(work.inputs["service"])
    timeout_s, max_tokens = number(work, "request_timeout_s", 300.0), int(number(work, "max_tokens"))
    target = Target(protocol_for(service), service, service.model, timeout_s, max_tokens)
    concurrency = int(number(work, "concurrency", 4))
    encode = encoder(engine)  # before anything is asked: without it there is no use for answers
    answers = asyncio.run(ask(target, questions, concurrency=concurrency, progress=work.progress))
    samples = answered(questions, answers, encode)
    result.keep(work.out, samples)
    check_all(questions, answers)
    scored = result.score(samples, metrics)
    found = result.write(work.out, scored, metrics, source="own", settings=dict(work.params))
    print(result.line(found))  # noqa: T201 - the stage's log
    result.check_least(found, str(names[0]), work.params.get("min_score"))


async def ask(
    target: Target, questions: Sequence[Question], *, concurrency: int, progress: Callable[[int, int, str], None]
) -> list[Answer]:
    """Answers of `target` in the order of `questions`, `concurrency` of them in flight together."""
    answers: dict[str, Answer] = {}
    async with target.client() as client:
        waiting = iter(questions)

        async def slot() -> None:
            session = client.session()
            for question in waiting:
                answers[question.prompt.id] = await session.generate(target.generation(question.prompt, 0))
                progress(len(answers), len(questions), "requests")

        await asyncio.gather(*(slot() for _ in range(min(concurrency, len(questions)))))
    return [answers[question.prompt.id] for question in questions]


def answered(
    questions: Sequence[Question], answers: Sequence[Answer], encode: Encode | None
) -> list[result.AnsweredQuestion]:
    """Questions with their answers, as far as there is one."""
    return [
        result.AnsweredQuestion(question, answer.text, None if encode is None else encode(answer.text))
        for question, answer in zip(questions, answers, strict=True)
        if answer.error is None
    ]


def check_all(questions: Sequence[Question], answers: Sequence[Answer]) -> None:
    """Raise StageError when requests failed: what is missing is no wrong answer."""
    failed = [(each, answer) for each, answer in zip(questions, answers, strict=True) if answer.error is not None]
    if failed:
        question, answer = failed[0]
        raise StageError(
            f"{len(failed)} of {len(questions)} requests failed, so there is no score; the first, "
            f"{question.prompt.id!r}, with: {answer.error}",
            failure=failure_class(str(answer.error)),
        )
