"""Metrics of the same events as defined by other tools (`result.COMPATIBLE`), to compare values across tools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from trtllm_pipeline.measure.load.requests import TimedRequest
from trtllm_pipeline.measure.load.stats import Summary, summary


def columns(requests: Sequence[TimedRequest], *, special_tokens: int | None) -> dict[str, Any]:
    """Tool -> its metrics for `requests`, the successful requests of one level. Latencies are summaries in ms.

    `special_tokens` is the number that the tokenizer adds to a text. None without a tokenizer; tools that encode are
    then left out.
    """
    if not requests:
        return {}
    start_ns = min(request.sent_ns for request in requests)
    last_ns = max(request.times_ns[-1] for request in requests)
    end_ns = max(int(request.record["end_ns"]) for request in requests)

    def first_ms(request: TimedRequest) -> float:
        return ((request.record.get("first_event_ns") or request.times_ns[0]) - request.sent_ns) / 1e6

    def end_ms(request: TimedRequest) -> float:
        return (int(request.record["end_ns"]) - request.sent_ns) / 1e6

    def messages_ms(request: TimedRequest) -> Iterable[float]:
        first = request.record.get("first_event_ns")
        times = request.times_ns if first in {None, request.times_ns[0]} else [first, *request.times_ns]
        return ((later - earlier) / 1e6 for earlier, later in pairwise(times))

    def rates(tokens: int, until_ns: int) -> dict[str, float]:
        seconds = (until_ns - start_ns) / 1e9
        if seconds <= 0:
            return {}
        names = ("output_tokens_per_s", "requests_per_s")
        return {name: round(n / seconds, 3) for name, n in zip(names, (tokens, len(requests)), strict=True)}

    streamed = any(request.streamed for request in requests)

    def quotient(rows: Iterable[tuple[float, float, int]]) -> Summary:
        """Empty if no response was streamed: the time between tokens is then unknown, not 0."""
        return summary((whole - first) / (n - 1) for whole, first, n in rows if streamed and n > 1)

    tools: dict[str, Any] = {
        "vllm": {
            "ttft_ms": summary(map(first_ms, requests)),
            "tpot_ms": quotient((r.e2e_ms, first_ms(r), r.output_tokens) for r in requests),
            "itl_ms": summary((gap for request in requests for gap in messages_ms(request)), requests=len(requests)),
            "e2e_ms": summary(request.e2e_ms for request in requests),
            **rates(sum(request.output_tokens for request in requests), end_ns),
        }
    }
    if special_tokens is not None:
        encoded = sum(request.encoded_again for request in requests)
        tools["genai_perf"] = {
            "ttft_ms": summary(request.ttft_ms for request in requests),
            "itl_ms": quotient((r.e2e_ms, r.ttft_ms, r.encoded_again) for r in requests),
            "e2e_ms": summary(request.e2e_ms for request in requests),
            **rates(encoded, last_ns),
        }
        tools["llm_perf"] = {
            "ttft_ms": summary(map(first_ms, requests)),
            "itl_ms": quotient((end_ms(r), first_ms(r), r.encoded_again + special_tokens) for r in requests),
            "e2e_ms": summary(map(end_ms, requests)),
            **rates(encoded + special_tokens * len(requests), end_ns),
        }
    return tools
