"""Ask a running server and score its greedy answers.

Leaves `answers.jsonl` (every prompt, answer and score, in the order of the input) and `accuracy.json` (the means with
their intervals). Answers are there before their scores, and stay when scoring fails.
"""

from __future__ import annotations

from trtllm_pipeline.bench.prompts import chat_renderer
from trtllm_pipeline.bench.target import Target
from trtllm_pipeline.client.service import Service
from trtllm_pipeline.evaluate import result
from trtllm_pipeline.evaluate.ask import questions_of, score_server
from trtllm_pipeline.stages.asking import encoder, number, protocol_for
from trtllm_pipeline.stages.base import Work


def run(work: Work) -> None:
    """Ask, score, write. Raises StageError for rows without references, failed requests and too low a score."""
    engine = work.inputs["engine"]
    names = work.params["metrics"]
    metrics = result.metrics_of(names, work.files.get("metric_module"))
    assert isinstance(names, list)
    with chat_renderer(engine) as render:
        questions = questions_of(work.files["input_data"], metrics, list(map(str, names)), render)
    service = Service.read(work.inputs["service"])
    timeout_s, max_tokens = number(work, "request_timeout_s", 300.0), int(number(work, "max_tokens"))
    found = score_server(
        Target(protocol_for(service), service, service.model, timeout_s, max_tokens),
        questions,
        metrics,
        concurrency=int(number(work, "concurrency", 4)),
        encode=encoder(engine),  # before anything is asked: without it there is no use for answers
        folder=work.out,
        progress=work.progress,
        source="own",
        settings=dict(work.params),
    )
    print(result.line(found))  # noqa: T201 - the stage's log
    result.check_least(found, str(names[0]), work.params.get("min_score"))
