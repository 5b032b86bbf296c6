from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from trtllm_pipeline.serve.gateway import prometheus_metrics as gateway_metrics
from trtllm_pipeline.serve.gateway.feed import PassedFeed
from trtllm_pipeline.serve.gateway.prometheus_metrics import GatewayMetrics

CHAT = "/v1/chat/completions"
DOCUMENT = Path(__file__).parents[4] / "docs" / "reference" / "metrics.md"


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(gateway_metrics, "perf_counter", clock)
    return clock


@pytest.fixture
def metrics() -> GatewayMetrics:
    found = GatewayMetrics()
    found.add("qwen")
    return found


def values(metrics: GatewayMetrics) -> dict[str, float]:
    """`name{label=value,...}` -> value, without the prefix that all have."""
    found = {}
    for family in text_string_to_metric_families(metrics.page()[0].decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name.removeprefix('pipeline_gateway_')}{{{labels}}}"] = sample.value
    return found


def test_a_streamed_request_is_timed_from_its_arrival(metrics: GatewayMetrics, clock: Clock) -> None:
    request = metrics.request("qwen", CHAT)
    clock.now_s += 0.01
    request.queued()
    assert values(metrics)["requests_queued{model=qwen}"] == 1
    clock.now_s += 0.2
    request.started()
    seen = values(metrics)
    assert (seen["requests_queued{model=qwen}"], seen["requests_in_flight{model=qwen}"]) == (0, 1)
    for gap_s in (0.3, 0.02, 0.04):
        clock.now_s += gap_s
        request.output()
    request.usage(input_tokens=7, output_tokens=4)
    request.tool_calls(2)
    request.finish(200)
    seen = values(metrics)
    assert seen["queue_time_seconds_sum{model=qwen}"] == pytest.approx(0.2)
    assert seen["time_to_first_token_seconds_sum{model=qwen}"] == pytest.approx(0.51)
    assert seen["inter_token_latency_seconds_sum{model=qwen}"] == pytest.approx(0.06)
    assert seen["inter_token_latency_seconds_count{model=qwen}"] == 2
    assert seen["request_duration_seconds_sum{model=qwen}"] == pytest.approx(0.57)
    assert seen["input_tokens_total{model=qwen}"] == 7
    assert seen["output_tokens_total{model=qwen}"] == 4
    assert seen["tool_calls_total{model=qwen}"] == 2
    assert seen["requests_in_flight{model=qwen}"] == 0
    assert seen[f"requests_total{{endpoint={CHAT},model=qwen,status=200}}"] == 1


def test_choices_of_a_request_are_timed_apart(metrics: GatewayMetrics, clock: Clock) -> None:
    request = metrics.request("qwen", CHAT)
    request.started()
    for choice in (0, 1, 0, 1):
        clock.now_s += 0.1
        request.output(choice)
    seen = values(metrics)
    assert seen["time_to_first_token_seconds_count{model=qwen}"] == 1
    assert seen["inter_token_latency_seconds_sum{model=qwen}"] == pytest.approx(0.4)


def test_tokens_are_counted_once_whether_chunks_tell_them_or_the_end(metrics: GatewayMetrics) -> None:
    for told in (0, 1, 3):
        request = metrics.request("qwen", CHAT)
        request.tokens(told)
        request.usage(input_tokens=1, output_tokens=2)
    assert values(metrics)["output_tokens_total{model=qwen}"] == 2 + 2 + 3


def passed(metrics: GatewayMetrics, outputs: list[bool], usage: dict[str, Any], *, stream: bool) -> PassedFeed:
    """An answer of an OpenAI-compatible server, passed on in parts with output and without."""
    feed = PassedFeed(metrics.request("qwen", CHAT), stream=stream)
    for output in outputs:
        feed.waiting += b"data: {}\n\n"
        feed.arrived(output=output)
        feed.take()
    feed.counts = usage
    feed.end()
    feed.take()
    return feed


def test_a_stream_that_is_passed_on_is_timed_by_its_output_and_counted_by_its_end(metrics: GatewayMetrics) -> None:
    usage = {"prompt_tokens": 31, "total_tokens": 36, "completion_tokens": 5}
    feed = passed(metrics, [False, True, True, False], usage, stream=True)
    assert (feed.usage().prompt, feed.usage().completion) == (31, 5)
    seen = values(metrics)
    assert seen["time_to_first_token_seconds_count{model=qwen}"] == 1
    assert seen["inter_token_latency_seconds_count{model=qwen}"] == 1


def test_an_answer_that_comes_whole_has_counts_and_no_first_token(metrics: GatewayMetrics) -> None:
    feed = passed(metrics, [], {"prompt_tokens": 31, "completion_tokens": 5}, stream=False)
    assert (feed.usage().prompt, feed.usage().completion) == (31, 5)
    assert values(metrics)["time_to_first_token_seconds_count{model=qwen}"] == 0


@pytest.mark.parametrize("usage", [{}, {"prompt_tokens": "x", "completion_tokens": -1}])
def test_a_server_that_does_not_count_leaves_it_unknown(metrics: GatewayMetrics, usage: dict[str, Any]) -> None:
    found = passed(metrics, [True], usage, stream=True).usage()
    assert (found.prompt, found.completion) == (None, None)


def test_a_rejected_request_was_never_in_flight(metrics: GatewayMetrics) -> None:
    request = metrics.request("qwen", CHAT)
    request.queued()
    request.rejected("queue_full")
    request.finish(429)
    seen = values(metrics)
    assert seen["requests_rejected_total{model=qwen,reason=queue_full}"] == 1
    assert seen["requests_queued{model=qwen}"] == seen["requests_in_flight{model=qwen}"] == 0
    assert seen["request_duration_seconds_count{model=qwen}"] == 0


def test_a_failure_of_the_server_is_counted(metrics: GatewayMetrics) -> None:
    request = metrics.request("qwen", CHAT)
    request.started()
    request.upstream_error("timeout")
    request.finish(504)
    seen = values(metrics)
    assert seen["requests_in_flight{model=qwen}"] == 0
    assert seen["upstream_errors_total{kind=timeout,model=qwen}"] == 1
    assert [name for name in seen if name.startswith("requests_total")] == [
        f"requests_total{{endpoint={CHAT},model=qwen,status=504}}"
    ]


def test_names_that_clients_make_up_make_no_series(metrics: GatewayMetrics) -> None:
    for number in range(50):
        metrics.request(f"model-{number}", CHAT).finish(404)
    models = {label for name in values(metrics) for label in name.split("{")[1].split(",") if "model=" in label}
    assert {each.rstrip("}") for each in models} == {"model=qwen", "model=unknown"}


def test_a_model_is_there_before_its_first_request(metrics: GatewayMetrics) -> None:
    metrics.limits("qwen", in_flight=8, queued=32)
    seen = values(metrics)
    assert seen["output_tokens_total{model=qwen}"] == 0
    assert (seen["requests_in_flight_limit{model=qwen}"], seen["requests_queued_limit{model=qwen}"]) == (8, 32)


def test_an_adapter_takes_the_places_of_its_model_and_counts_for_itself(metrics: GatewayMetrics) -> None:
    metrics.add("qwen:sql", "qwen")
    request = metrics.request("qwen:sql", CHAT)
    request.started()
    request.drafts(8, 3)
    seen = values(metrics)
    assert seen["requests_in_flight{model=qwen}"] == 1
    assert "requests_in_flight{model=qwen:sql}" not in seen
    assert (seen["drafted_tokens_total{model=qwen:sql}"], seen["accepted_tokens_total{model=qwen:sql}"]) == (8, 3)
    assert seen["drafted_tokens_total{model=qwen}"] == 0


def test_the_page_is_what_the_scraper_asks_for(metrics: GatewayMetrics) -> None:
    assert metrics.page()[1].startswith("text/plain")
    page, content_type = metrics.page("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert page.endswith(b"# EOF\n")


def test_every_metric_is_documented_and_its_name_follows_the_conventions(metrics: GatewayMetrics) -> None:
    document = DOCUMENT.read_text()
    for family in text_string_to_metric_families(metrics.page()[0].decode()):
        if not family.name.startswith("pipeline_gateway_"):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert f"`{name}`" in document, name
        if family.type == "histogram":
            assert name.endswith("_seconds")
