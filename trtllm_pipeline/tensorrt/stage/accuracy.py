"""Send prompts to a running server and score its greedy answers.

Writes `answers.jsonl` (every prompt, answer and score, in the order of the input) and `accuracy.json` (the means with
their intervals). Answers are written before they are scored, and remain if scoring fails.
"""

from __future__ import annotations

from dataclasses import replace

from trtllm_pipeline.measure import Service, answers, metrics_of, prompts
from trtllm_pipeline.tensorrt.stage.base import StageContext
from trtllm_pipeline.tensorrt.stage.model_inputs import encoder, model_folder
from trtllm_pipeline.tensorrt.stage.params import AccuracyParams, to_json
from trtllm_pipeline.tensorrt.stage.server_requests import (
    adapter_options_now,
    chosen_adapters,
    draft_options,
    protocol_for,
    special_tokens_check,
)


def run(context: StageContext[AccuracyParams]) -> None:
    """Send, score, write. Raises StageError for rows without references, failed requests and a score below the minimum."""
    model = model_folder(context.inputs)
    params = context.params
    metrics = metrics_of(params.metrics, context.files.get("metric_module"))
    service = Service.read(context.inputs["service"])
    special = special_tokens_check(service, protocol_for(service), params.request_timeout_s)
    with prompts.chat_renderer(model, special) as render:
        questions = answers.questions_of(context.files["input_data"], metrics, params.metrics, render)
    sent = prompts.each_with_an_image([question.prompt for question in questions], params.images, service)
    questions = [replace(question, prompt=prompt) for question, prompt in zip(questions, sent, strict=True)]
    images = any(question.prompt.images for question in questions)
    adapters = adapter_options_now(service, context.inputs, params.request_timeout_s, params.lora_names)
    from trtllm_pipeline.measure import Target  # imports the HTTP clients

    scored = answers.score_server(
        Target(
            protocol_for(service, images=images),
            service,
            service.model,
            params.request_timeout_s,
            params.max_tokens,
            options=draft_options(service.model, context.inputs["engine"]),
            in_turn=chosen_adapters(adapters, params.lora),
        ),
        questions,
        metrics,
        concurrency=params.concurrency,
        encode=encoder(model),  # before any request: without it the answers are useless
        folder=context.out,
        progress=context.progress,
        source="own",
        settings=to_json(params),
    )
    print(scored)  # noqa: T201 - the stage's log
    scored.check_least(params.metrics[0], params.min_score)
