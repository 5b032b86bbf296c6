"""Measure a running server: latencies and throughput over a list of concurrencies and request rates, on the user's prompts.

Leaves `events.jsonl` (everything that was observed) and `perf.json` (everything that follows from it). Numbers that
fail the validity gate fail the stage; both files stay in the attempt's folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtllm_pipeline.bench.metrics import analyze
from trtllm_pipeline.bench.prompts import chat_renderer, read
from trtllm_pipeline.bench.run import Load, record
from trtllm_pipeline.bench.server_checks import ExpectedServer
from trtllm_pipeline.bench.target import Target
from trtllm_pipeline.client.service import Service
from trtllm_pipeline.client.triton import failure_class
from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.files.model_files import read_tokenizer
from trtllm_pipeline.files.writing import write_json
from trtllm_pipeline.stages.asking import protocol_for
from trtllm_pipeline.stages.base import StageContext
from trtllm_pipeline.stages.params import Perf, to_json
from trtllm_pipeline.triton_repository.engine import Engine


def run(context: StageContext[Perf]) -> None:
    """Measure; raises StageError when the numbers may not be believed."""
    engine = context.inputs["engine"]
    tokenizer = read_tokenizer(engine)
    with chat_renderer(engine) as render:
        prompts = read(context.files["input_data"], render)
    asked, service = context.params, Service.read(context.inputs["service"])
    Engine.read(engine, max_seq_len=asked.declared.get("max_seq_len")).check_lengths(
        (prompt.id, len(tokenizer.encode(prompt.text).ids), prompt.max_tokens or asked.max_tokens) for prompt in prompts
    )
    target = Target(
        protocol_for(service, asked.protocol),
        service,
        service.model,
        asked.request_timeout_s,
        asked.max_tokens,
        asked.temperature,
    )
    load = Load(
        concurrency=asked.concurrency,
        request_rate=asked.request_rate,
        requests=asked.requests,
        warmup_requests=asked.warmup_requests,
        repeats=asked.repeats,
        distribution=asked.request_distribution,
    )
    events = context.out / "events.jsonl"
    record(
        target,
        load.levels(prompts),
        prompts,
        events,
        settings=to_json(asked),
        claim=ExpectedServer(asked.declared, engine, context.inputs.get("repository")),
        progress=lambda done, total: context.progress(done, total, "requests"),
        tokenizer=tokenizer,
    )
    result = analyze(events, tokenizer, {name.removesuffix("_ms"): limit for name, limit in (asked.slo or {}).items()})
    write_json(context.out / "perf.json", result)
    for finding in result["findings"]:
        rate, concurrency = finding.get("request_rate"), finding["concurrency"]
        level = "" if concurrency is None else f" at concurrency {concurrency}"
        level = level if rate is None else f" at {rate:g} requests/s"
        print(f"{finding['severity']}: {finding['check']}{level}: {finding['message']}")  # noqa: T201 - the stage's log
    invalid = [finding for finding in result["findings"] if finding["severity"] == "invalid"]
    if invalid:
        raise StageError(
            "the measurement is not valid: " + "; ".join(finding["message"] for finding in invalid),
            failure=_failure_class(invalid),
            hint=f"everything observed is in {events.name} beside the log of this attempt",
        )


def _failure_class(invalid: Sequence[Mapping[str, Any]]) -> FailureClass:
    """TRANSIENT where the machine was too busy to measure, or requests failed while the server was being repaired."""
    if all(finding["check"] in {"client_cpu", "client_lag", "schedule"} for finding in invalid):
        return FailureClass.TRANSIENT
    causes = "; ".join(finding["message"] for finding in invalid if finding["check"] == "failures")
    return failure_class(causes) if causes else FailureClass.CHECK
