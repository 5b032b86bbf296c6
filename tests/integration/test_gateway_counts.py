"""What a real gateway counts of real requests, also one in front of another: its page beside what its clients saw."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.chat_models import Running, gateway, said, spoken
from tests.helpers.gateways import listening
from tests.helpers.scripted_server import Script
from tests.helpers.waiting import eventually
from trtllm_pipeline.serve.gateway.gateway_config import GatewayConfig, OfferedModel

CALL = f"<tool_call>\n{json.dumps({'name': 'now', 'arguments': {}})}\n</tool_call>"
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


def respond(_model: str, values: Mapping[str, Any]) -> Script:
    match said(str(values["text_input"]))[-1][1]:
        case "call":
            return spoken(CALL)
        case "long":
            return spoken("word " * 200, gap_s=0.02)
        case "fail":
            return Script(((0.0, "Now"),), error="the engine died")
    return spoken("abcdefghi", gap_s=0.05)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with gateway(tmp_path, respond, max_concurrency=1, max_queue=1) as found:
        yield found


def ask(base: str, text: str, **more: Any) -> httpx.Response:
    body = {"model": "scripted", "messages": [{"role": "user", "content": text}], **more}
    return httpx.post(f"{base}/chat/completions", json=body, timeout=60)


def counted(base: str, name: str, **labels: str) -> float:
    """Sum of the samples with these labels."""
    page = httpx.get(f"{base.removesuffix('/v1')}/metrics", timeout=60).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == f"pipeline_gateway_{name}" and labels.items() <= sample.labels.items()
    )


@pytest.mark.seam
def test_tokens_times_and_tool_calls_are_those_that_clients_see(running: Running) -> None:
    whole = ask(running.url, "hello").json()["usage"]
    streamed = ask(running.url, "hello", stream=True, stream_options={"include_usage": True})
    usage = [
        json.loads(line[6:])["usage"] for line in streamed.text.splitlines() if '"usage":{' in line.replace(": ", ":")
    ][-1]
    called = ask(running.url, "call", tools=[TOOL])
    assert len(called.json()["choices"][0]["message"]["tool_calls"]) == 1
    seen = [whole, usage, called.json()["usage"]]
    assert counted(running.url, "output_tokens_total", model="scripted") == sum(
        each["completion_tokens"] for each in seen
    )
    assert counted(running.url, "input_tokens_total", model="scripted") == sum(each["prompt_tokens"] for each in seen)
    assert counted(running.url, "tool_calls_total", model="scripted") == 1
    assert counted(running.url, "requests_total", status="200", endpoint="/v1/chat/completions") == 3
    assert counted(running.url, "time_to_first_token_seconds_count") == 3
    assert counted(running.url, "inter_token_latency_seconds_sum") > 0
    assert counted(running.url, "request_duration_seconds_count") == 3
    assert counted(running.url, "requests_in_flight") == 0


def test_an_openai_server_behind_the_gateway_is_timed_and_counted_as_far_as_it_tells(
    running: Running, tmp_path: Path
) -> None:
    served = OfferedModel(name="front", url=running.url, server_model="scripted")
    (folder := tmp_path / "front").mkdir()
    with listening(folder, GatewayConfig(models=(served,))) as front:
        whole = ask(front, "hello", model="front").json()
        assert whole["model"] == "front"
        assert counted(front, "output_tokens_total", model="front") == whole["usage"]["completion_tokens"] == 3
        assert counted(front, "input_tokens_total", model="front") == whole["usage"]["prompt_tokens"]
        assert counted(front, "time_to_first_token_seconds_count", model="front") == 0
        ask(front, "hello", model="front", stream=True, stream_options={"include_usage": True})
        assert counted(front, "output_tokens_total", model="front") == 6
        assert counted(front, "time_to_first_token_seconds_count", model="front") == 1
        assert counted(front, "inter_token_latency_seconds_sum", model="front") > 0
        ask(front, "hello", model="front", stream=True)
        assert counted(front, "output_tokens_total", model="front") == 6
        assert counted(front, "requests_total", model="front", status="200") == 3


def test_what_fails_is_counted_where_it_failed(running: Running) -> None:
    assert ask(running.url, "fail").status_code >= 500
    assert ask(running.url, "x", model="nobody").status_code == 404
    assert ask(running.url, "x", temperature="hot").status_code == 400
    assert counted(running.url, "upstream_errors_total", model="scripted") == 1
    assert counted(running.url, "requests_total", status="404", model="unknown") == 1
    assert counted(running.url, "requests_rejected_total", model="scripted") == 1
    assert counted(running.url, "requests_total", status="400", model="scripted") == 1


def test_queue_rejections_and_clients_that_leave(running: Running) -> None:
    with ThreadPoolExecutor(3) as pool, httpx.Client(timeout=60) as client:
        body = {"model": "scripted", "messages": [{"role": "user", "content": "long"}], "stream": True}
        with client.stream("POST", f"{running.url}/chat/completions", json=body) as first:
            lines = first.iter_lines()
            next(lines)
            waits = pool.submit(ask, running.url, "hello")
            assert eventually(lambda: counted(running.url, "requests_queued", model="scripted") == 1)
            assert counted(running.url, "requests_in_flight", model="scripted") == 1
            assert counted(running.url, "requests_queued_limit", model="scripted") == 1
            assert ask(running.url, "hello").status_code == 429
        assert waits.result().status_code == 200
    assert counted(running.url, "requests_rejected_total", model="scripted", reason="queue_full") == 1
    assert counted(running.url, "requests_total", status="499", model="scripted") == 1
    assert counted(running.url, "queue_time_seconds_sum", model="scripted") > 0.02
    assert counted(running.url, "requests_queued") == counted(running.url, "requests_in_flight") == 0
