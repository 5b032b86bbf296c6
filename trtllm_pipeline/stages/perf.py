"""Measure a running server: latencies and throughput over a list of concurrencies, on the user's prompts.

Leaves `events.jsonl` (everything that was observed) and `perf.json` (everything that follows from it). Numbers that
fail the validity gate fail the stage; both files stay in the attempt's folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from trtllm_pipeline.domain import Json
from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.perf import evidence, self_test
from trtllm_pipeline.perf.load import EventFile, levels
from trtllm_pipeline.perf.measure import run_levels
from trtllm_pipeline.perf.metrics import Tokenizer, analyze
from trtllm_pipeline.perf.prompts import Prompt, chat_renderer, read
from trtllm_pipeline.perf.target import Target
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
    tested = self_test.recent(str(work.params.get("protocol") or "grpc"))
    asyncio.run(_measure(work, prompts, tokenizer, tested))
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


async def _measure(work: Work, prompts: Sequence[Prompt], tokenizer: Tokenizer, tested: dict[str, Any] | None) -> None:
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

    def ask(text: str, length: int) -> Generation:
        return generation(Prompt("probe", text), max_tokens=length, temperature=0.0, seed=0)

    declared = work.params.get("declared") or {}
    if not isinstance(declared, dict):
        raise StageError(f"declared: expected an object, got {declared!r}", failure=FailureClass.USER)
    timeout_s = number(work, "request_timeout_s", 300.0)
    target = Target(protocol, service, model, timeout_s, max_tokens, temperature)
    async with Client(service, model, protocol, timeout_s=timeout_s) as client:
        with EventFile(work.out / "events.jsonl") as events:
            events.header(protocol=protocol, model=model, settings=dict(work.params), self_test=tested)
            for prompt in prompts:
                events.write("prompt", id=prompt.id, text=prompt.text)
            await _look(work, client, declared, events, "start")
            await run_levels(client, target, plan, events, count)
            if declared.get("enable_kv_cache_reuse") is False:
                longest = EngineLimits.read(work.inputs["engine"]).longest_prompt(evidence.PROBE_ANSWER_TOKENS)
                texts = evidence.probes([prompt.text for prompt in prompts], tokenizer, longest=longest)
                async for record in evidence.probe(client.lane(), texts, ask):
                    events.write("probe", **record)
            await _look(work, client, declared, events, "end")


async def _look(work: Work, client: Client, declared: Mapping[str, Json], events: EventFile, at: str) -> None:
    """Write down what the validity gate needs to know of the server before and after the load."""
    engine, tp = work.inputs["engine"], declared.get("tp")
    server = await _server(client, at)
    events.write("server", **server)
    if not server["ready"]:
        return
    found = await evidence.settings(client, declared, engine=engine, repository=work.inputs.get("repository"))
    events.write("settings", at=at, **found)
    if declared.get("enable_kv_cache_reuse") is False:
        events.write("reused_blocks", at=at, blocks=await evidence.reused_blocks(client))
    events.write("roofline", at=at, **await evidence.memory(engine, tp if isinstance(tp, int) else 1))


async def _server(client: Client, at: str) -> dict[str, Any]:
    pid = client.service.pid
    ready = all((await client.ready()).values())
    return {"at": at, "pid": pid, "since": None if pid is None else running_since(pid), "ready": ready}
