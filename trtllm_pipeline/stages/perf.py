"""Measure a running server: latencies and throughput over a list of concurrencies and request rates, on the user's prompts.

Leaves `events.jsonl` (everything that was observed) and `perf.json` (everything that follows from it). A measurement that
fails the validity gates fails the stage; both files stay in the attempt's folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from trtllm_pipeline.bench.load import Load
from trtllm_pipeline.bench.metrics import analyze
from trtllm_pipeline.bench.objectives import Objectives
from trtllm_pipeline.bench.prompts import chat_renderer, read
from trtllm_pipeline.bench.result import NAME, LoadResult, MeasurementFinding
from trtllm_pipeline.bench.run import record
from trtllm_pipeline.bench.server_checks import ExpectedServer
from trtllm_pipeline.bench.target import Target
from trtllm_pipeline.client.service import Service
from trtllm_pipeline.client.triton import failure_class
from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.files.tokenizer import read_tokenizer
from trtllm_pipeline.files.writing import write_json
from trtllm_pipeline.stages.asking import (
    adapter_options,
    chosen_adapters,
    draft_options,
    each_with_an_image,
    model_folder,
    protocol_for,
)
from trtllm_pipeline.stages.base import StageContext
from trtllm_pipeline.stages.params import PerfParams, to_json
from trtllm_pipeline.triton_repository.engine import Engine

EVENTS: Final = "events.jsonl"


def run(context: StageContext[PerfParams]) -> None:
    """Measure; raises StageError when the measurement is not valid."""
    folder, model = context.inputs["engine"], model_folder(context.inputs)
    tokenizer = read_tokenizer(model)
    with chat_renderer(model) as render:
        prompts = read(context.files["input_data"], render)
    asked, service = context.params, Service.read(context.inputs["service"])
    prompts = each_with_an_image(prompts, asked.images, service)
    engine = Engine.read(folder, max_seq_len=asked.declared.get("max_seq_len"))
    max_tokens = asked.max_tokens or _output_length(engine)
    engine.check_lengths(
        (prompt.id, len(tokenizer.encode(prompt.text).ids), prompt.max_tokens or max_tokens) for prompt in prompts
    )
    adapters = asyncio.run(adapter_options(service, context.inputs, asked.request_timeout_s, asked.lora_names))
    target = Target(
        protocol_for(service, asked.protocol, images=any(prompt.images for prompt in prompts)),
        service,
        service.model,
        asked.request_timeout_s,
        max_tokens,
        asked.temperature,
        draft_options(service.model, context.inputs["engine"]),
        in_turn=chosen_adapters(adapters, asked.lora),
    )
    load = Load(
        concurrency=asked.concurrency,
        request_rate=asked.request_rate,
        requests=asked.requests,
        warmup_requests=asked.warmup_requests,
        repeats=asked.repeats,
        distribution=asked.request_distribution,
    )
    record(
        target,
        load.levels(prompts),
        prompts,
        context.out / EVENTS,
        settings=to_json(replace(asked, max_tokens=max_tokens)),
        claim=ExpectedServer(asked.declared, folder, context.inputs.get("repository")),
        progress=lambda done, total: context.progress(done, total, "requests"),
        tokenizer=tokenizer,
    )
    result = measured(context)
    write_json(context.out / NAME, result.to_json())
    for finding in result.findings:
        print(f"{finding.check}: {finding}")  # noqa: T201 - the stage's log
    if result.invalid:
        raise StageError(
            "the measurement is not valid: " + "; ".join(finding.message for finding in result.invalid),
            failure=failure_of(result.invalid),
            hint=f"everything observed is in {EVENTS} beside the log of this attempt",
        )


def measured(context: StageContext[PerfParams]) -> LoadResult:
    """What follows from the events of a stage that has run."""
    limits = {name.removesuffix("_ms"): limit for name, limit in (context.params.slo or {}).items()}
    return analyze(context.out / EVENTS, read_tokenizer(model_folder(context.inputs)), Objectives(limits))


def _output_length(engine: Engine) -> int:
    """The output length that an engine was built for. Raises StageError where it does not say."""
    if not engine.max_seq_len or not engine.max_input_len or engine.max_seq_len <= engine.max_input_len:
        raise StageError(
            f"{engine.folder} does not say for which output length it was built",
            failure=FailureClass.USER,
            hint="give --max-tokens N",
        )
    return engine.max_seq_len - engine.max_input_len


def failure_of(invalid: Sequence[MeasurementFinding]) -> FailureClass:
    """TRANSIENT where the machine was too busy to measure, or the server was started again while it was measured."""
    if all(finding.check in {"client_cpu", "client_lag", "schedule", "server"} for finding in invalid):
        return FailureClass.TRANSIENT
    causes = "; ".join(finding.message for finding in invalid if finding.check == "failures")
    return failure_class(causes) if causes else FailureClass.CHECK
