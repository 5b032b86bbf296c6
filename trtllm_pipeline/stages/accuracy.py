"""Score a running server's greedy answers against references.

Leaves `answers.jsonl` (every prompt, answer and score, in the order of the input) and `accuracy.json` (the means).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from statistics import fmean

from trtllm_pipeline.domain import Json
from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.perf.prompts import Prompt, chat_renderer, read
from trtllm_pipeline.perf.scores import NORMALISATION, SCORES
from trtllm_pipeline.serving.client import Answer, Client, Service, failure_class
from trtllm_pipeline.stages.asking import generation, number
from trtllm_pipeline.stages.base import Work, write_json


def run(work: Work) -> None:
    """Ask, score, write. Raises StageError for rows without references, failed requests and too low a score."""
    metrics = _metrics(work.params.get("metrics", ["exact", "contains"]))
    path = work.files["input_data"]
    prompts = read(path, chat_renderer(work.inputs["engine"]))
    bare = [prompt.id for prompt in prompts if not prompt.references]
    if bare:
        raise StageError(
            f"{path}: {len(bare)} rows have no `output` to compare with, the first is {bare[0]!r}",
            failure=FailureClass.USER,
        )
    answers = asyncio.run(_ask(work, prompts))
    failed = [(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True) if answer.error is not None]
    if failed:
        prompt, answer = failed[0]
        raise StageError(
            f"{len(failed)} of {len(prompts)} requests failed, so there is no score; the first, {prompt.id!r}, "
            f"with: {answer.error}",
            failure=failure_class(str(answer.error)),
        )
    rows = [
        {
            "id": prompt.id,
            "input": prompt.text,
            "output": list(prompt.references),
            "answer": answer.text,
            "scores": {metric: SCORES[metric](answer.text, prompt.references) for metric in metrics},
        }
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    with (work.out / "answers.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    asked = [[prompt.id, prompt.text, prompt.references, prompt.max_tokens, prompt.stop_words] for prompt in prompts]
    scores = {
        metric: round(
            fmean(
                SCORES[metric](answer.text, prompt.references) for prompt, answer in zip(prompts, answers, strict=True)
            ),
            6,
        )
        for metric in metrics
    }
    result = {
        "schema": 1,
        "total": len(rows),
        "scores": scores,
        "rows_digest": "sha256:" + hashlib.sha256(json.dumps(asked).encode()).hexdigest(),
        "normalisation": NORMALISATION,
        "settings": dict(work.params),
    }
    write_json(work.out / "accuracy.json", result)
    print(", ".join(f"{metric} {score:.3f}" for metric, score in scores.items()), f"on {len(rows)} rows")  # noqa: T201 - the stage's log
    least = work.params.get("min_score")
    if least is not None and scores[metrics[0]] < number(work, "min_score"):
        raise StageError(f"{metrics[0]} is {scores[metrics[0]]:.3f} on {len(rows)} rows, expected at least {least}")


async def _ask(work: Work, prompts: Sequence[Prompt]) -> list[Answer]:
    """Greedy answers in the order of `prompts`, some of them in flight together."""
    service = Service.read(work.inputs["service"])
    max_tokens = int(number(work, "max_tokens"))
    timeout_s = number(work, "request_timeout_s", 300.0)
    answers: dict[str, Answer] = {}
    async with Client(service, service.model, "grpc", timeout_s=timeout_s) as client:
        waiting = iter(prompts)

        async def slot() -> None:
            lane = client.lane()
            for prompt in waiting:
                request = generation(prompt, max_tokens=max_tokens, temperature=0.0, seed=0)
                answers[prompt.id] = await lane.generate(request)
                work.progress(len(answers), len(prompts), "requests")

        await asyncio.gather(*(slot() for _ in range(int(number(work, "concurrency", 4)))))
    return [answers[prompt.id] for prompt in prompts]


def _metrics(value: Json) -> list[str]:
    if isinstance(value, list) and value and all(metric in SCORES for metric in value):
        return [str(metric) for metric in value]
    raise StageError(
        f"metrics: expected a list of {', '.join(SCORES)}, got {json.dumps(value)}", failure=FailureClass.USER
    )
