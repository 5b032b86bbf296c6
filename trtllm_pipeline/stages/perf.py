"""Measure a running server: latencies and throughput over a list of concurrencies and request rates, on the user's prompts.

Leaves `events.jsonl` (everything that was observed) and `perf.json` (everything that follows from it). Numbers that
fail the validity gate fail the stage; both files stay in the attempt's folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from trtllm_pipeline.bench.load import Distribution
from trtllm_pipeline.bench.metrics import analyze
from trtllm_pipeline.bench.prompts import chat_renderer, read
from trtllm_pipeline.bench.run import Load, record
from trtllm_pipeline.bench.server_checks import ExpectedServer
from trtllm_pipeline.bench.target import Target
from trtllm_pipeline.client.service import Service, failure_class
from trtllm_pipeline.domain import Json
from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.files.model_files import read_tokenizer
from trtllm_pipeline.files.writing import write_json
from trtllm_pipeline.stages.asking import number, protocol_for
from trtllm_pipeline.stages.base import Work
from trtllm_pipeline.triton_repository.engine import Engine


def run(work: Work) -> None:
    """Measure; raises StageError when the numbers may not be believed."""
    engine = work.inputs["engine"]
    tokenizer = read_tokenizer(engine)
    with chat_renderer(engine) as render:
        prompts = read(work.files["input_data"], render)
    default_max_tokens = int(number(work, "max_tokens"))
    target, claim, load, objectives = _target(work), _claim(work), _load(work), _objectives(work)
    told = claim.declared.get("max_seq_len")
    Engine.read(engine, max_seq_len=told if isinstance(told, int) else None).check_lengths(
        (prompt.id, len(tokenizer.encode(prompt.text).ids), prompt.max_tokens or default_max_tokens)
        for prompt in prompts
    )
    events = work.out / "events.jsonl"
    record(
        target,
        load.levels(prompts),
        prompts,
        events,
        settings=work.params,
        claim=claim,
        progress=lambda done, total: work.progress(done, total, "requests"),
        tokenizer=tokenizer,
    )
    result = analyze(events, tokenizer, objectives)
    write_json(work.out / "perf.json", result)
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
    failure = failure_class(causes)
    return FailureClass.CHECK if failure is FailureClass.BUG else failure


def _target(work: Work) -> Target:
    service = Service.read(work.inputs["service"])
    protocol, model = (
        protocol_for(service, str(work.params.get("protocol") or "grpc")),
        str(work.params.get("model") or service.model),
    )
    timeout_s, max_tokens = number(work, "request_timeout_s", 300.0), int(number(work, "max_tokens"))
    return Target(protocol, service, model, timeout_s, max_tokens, number(work, "temperature", 0.0))


def _claim(work: Work) -> ExpectedServer:
    declared = work.params.get("declared") or {}
    if not isinstance(declared, dict):
        raise StageError(f"declared: expected an object, got {declared!r}", failure=FailureClass.USER)
    return ExpectedServer(declared, work.inputs["engine"], work.inputs.get("repository"))


def _load(work: Work) -> Load:
    concurrency = tuple(int(value) for value in _positive(work, "concurrency", whole=True))
    rates = tuple(_positive(work, "request_rate", whole=False))
    if not concurrency and not rates:
        raise StageError("neither concurrency nor request_rate has a level to measure", failure=FailureClass.USER)
    given = work.params.get("warmup_requests", 2)
    distribution: Distribution = "constant" if work.params.get("request_distribution") == "constant" else "poisson"
    return Load(
        concurrency=concurrency,
        request_rate=rates,
        requests=int(number(work, "requests")),
        warmup_requests=None if given is None else int(number(work, "warmup_requests", 2)),
        repeats=int(number(work, "repeats", 1)),
        distribution=distribution,
    )


def _positive(work: Work, name: str, *, whole: bool) -> list[float]:
    """Parameter `name`, a list of positive numbers, whole ones if so wanted. Raises StageError for anything else."""
    given = work.params.get(name) or []
    kinds = int if whole else (int, float)
    values = [value for value in given if _is_number(value) and value > 0] if isinstance(given, list) else []
    if not isinstance(given, list) or len(values) < len(given) or not all(isinstance(value, kinds) for value in values):
        what = "integers" if whole else "numbers"
        raise StageError(f"{name}: expected a list of positive {what}, got {given!r}", failure=FailureClass.USER)
    return values


def _is_number(value: Json) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _objectives(work: Work) -> dict[str, float]:
    """Parameter `slo`: milliseconds by "ttft_ms", "tpot_ms", "e2e_ms", as `analyze` takes them."""
    given = work.params.get("slo") or {}
    known = {"ttft_ms", "tpot_ms", "e2e_ms"}
    if not isinstance(given, dict) or given.keys() - known:
        raise StageError(f"slo: expected {', '.join(sorted(known))}, got {given!r}", failure=FailureClass.USER)
    values = {name.removesuffix("_ms"): value for name, value in given.items() if _is_number(value)}
    if len(values) < len(given):
        raise StageError(f"slo: expected milliseconds, got {given!r}", failure=FailureClass.USER)
    return values
