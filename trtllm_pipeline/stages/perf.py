"""Measure a running server: latencies and throughput over a list of concurrencies, on the user's prompts.

Leaves `events.jsonl` (everything that was observed) and `perf.json` (everything that follows from it). Numbers that
fail the validity gate fail the stage; both files stay in the attempt's folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.perf.load import EventFile, closed_loop, levels
from trtllm_pipeline.perf.metrics import analyze
from trtllm_pipeline.perf.prompts import Prompt, chat_renderer, read
from trtllm_pipeline.serving.client import Client, Generation, Service, failure_class, running_since
from trtllm_pipeline.serving.limits import EngineLimits
from trtllm_pipeline.stages.asking import generation, number, read_tokenizer
from trtllm_pipeline.stages.base import Work, write_json


def run(work: Work) -> None:
    """Measure; raises StageError when the numbers may not be believed."""
    engine = work.inputs["engine"]
    tokenizer = read_tokenizer(engine)
    prompts = read(work.files["input_data"], chat_renderer(engine))
    default_max_tokens = int(number(work, "max_tokens"))
    EngineLimits.read(engine).check(
        (prompt.id, len(tokenizer.encode(prompt.text).ids), prompt.max_tokens or default_max_tokens)
        for prompt in prompts
    )
    events = work.out / "events.jsonl"
    asyncio.run(_measure(work, prompts))
    result = analyze(events, tokenizer)
    write_json(work.out / "perf.json", result)
    for finding in result["findings"]:
        level = "" if finding["concurrency"] is None else f" at concurrency {finding['concurrency']}"
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
    if all(finding["check"].startswith("client") for finding in invalid):
        return FailureClass.TRANSIENT
    causes = "; ".join(finding["message"] for finding in invalid if finding["check"] == "failures")
    return failure_class(causes)


async def _measure(work: Work, prompts: Sequence[Prompt]) -> None:
    service = Service.read(work.inputs["service"])
    concurrency = work.params["concurrency"]
    concurrencies = [c for c in concurrency if isinstance(c, int) and c > 0] if isinstance(concurrency, list) else []
    if not concurrencies or concurrencies != concurrency:
        raise StageError(
            f"concurrency: expected a list of positive integers, got {concurrency!r}", failure=FailureClass.USER
        )
    temperature = number(work, "temperature", 0.0)
    max_tokens = int(number(work, "max_tokens"))
    protocol, model = str(work.params.get("protocol") or "grpc"), str(work.params.get("model") or service.model)
    plan = levels(
        prompts,
        concurrencies,
        requests=int(number(work, "requests")),
        warmup_requests=int(number(work, "warmup_requests", 2)),
        repeats=int(number(work, "repeats", 1)),
    )
    total = sum(len(level.warmup) + len(level.measured) for level in plan)
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        work.progress(done, total, "requests")

    def request(prompt: Prompt, running_number: int) -> Generation:
        return generation(prompt, max_tokens=max_tokens, temperature=temperature, seed=running_number)

    async with Client(service, model, protocol, timeout_s=number(work, "request_timeout_s", 300.0)) as client:
        with (work.out / "events.jsonl").open("w", encoding="utf-8") as file:
            events = EventFile(file)
            events.header(protocol=protocol, model=model, settings=dict(work.params))
            for prompt in prompts:
                events.write("prompt", id=prompt.id, text=prompt.text)
            events.write("server", **await _server(client, "start"))
            for level in plan:
                await closed_loop(client, level, request, events, count)
            events.write("server", **await _server(client, "end"))


async def _server(client: Client, at: str) -> dict[str, Any]:
    pid = client.service.pid
    ready = all((await client.ready()).values())
    return {"at": at, "pid": pid, "since": None if pid is None else running_since(pid), "ready": ready}
