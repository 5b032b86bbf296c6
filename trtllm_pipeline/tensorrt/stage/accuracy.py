"""Send prompts to a running server and score its greedy answers.

Writes `answers.jsonl` (every prompt, answer and score, in the order of the input) and `accuracy.json` (the means with
their intervals). Answers are written before they are scored, and remain if scoring fails.
"""

from __future__ import annotations

from dataclasses import replace

from trtllm_pipeline.measure import Service, chat_renderer, metrics_of, questions_of, score_server
from trtllm_pipeline.tensorrt.stage.asking import (
    adapters_asked,
    chosen_adapters,
    draft_options,
    each_with_an_image,
    protocol_for,
    special_tokens_asked,
)
from trtllm_pipeline.tensorrt.stage.base import StageContext
from trtllm_pipeline.tensorrt.stage.model_inputs import encoder, model_folder
from trtllm_pipeline.tensorrt.stage.params import AccuracyParams, to_json


def run(context: StageContext[AccuracyParams]) -> None:
    """Send, score, write. Raises StageError for rows without references, failed requests and a score below the minimum."""
    model = model_folder(context.inputs)
    asked = context.params
    metrics = metrics_of(asked.metrics, context.files.get("metric_module"))
    service = Service.read(context.inputs["service"])
    special = special_tokens_asked(service, protocol_for(service), asked.request_timeout_s)
    with chat_renderer(model, special) as render:
        questions = questions_of(context.files["input_data"], metrics, asked.metrics, render)
    prompts = each_with_an_image([question.prompt for question in questions], asked.images, service)
    questions = [replace(question, prompt=prompt) for question, prompt in zip(questions, prompts, strict=True)]
    images = any(question.prompt.images for question in questions)
    adapters = adapters_asked(service, context.inputs, asked.request_timeout_s, asked.lora_names)
    from trtllm_pipeline.measure import Target  # imports the HTTP clients

    found = score_server(
        Target(
            protocol_for(service, images=images),
            service,
            service.model,
            asked.request_timeout_s,
            asked.max_tokens,
            options=draft_options(service.model, context.inputs["engine"]),
            in_turn=chosen_adapters(adapters, asked.lora),
        ),
        questions,
        metrics,
        concurrency=asked.concurrency,
        encode=encoder(model),  # before any request: without it the answers are useless
        folder=context.out,
        progress=context.progress,
        source="own",
        settings=to_json(asked),
    )
    print(found)  # noqa: T201 - the stage's log
    found.check_least(asked.metrics[0], asked.min_score)
