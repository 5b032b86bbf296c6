from __future__ import annotations

import math

import pytest

pytest.importorskip("prometheus_client")

from tests.helpers import metrics_pages
from trtllm_pipeline.hosting.readings import RateWindow, Reading, gpus, quantile, read

INF = math.inf


def test_the_page_of_a_gateway_is_read_by_model() -> None:
    gateway = metrics_pages.Gateway("qwen")
    gateway.metrics.add("llama")
    gateway.metrics.request("made-up", "/v1/completions").finish(404)
    gateway.step()
    readings = read(gateway.page())
    assert sorted(readings) == ["llama", "qwen"]
    qwen = readings["qwen"]
    assert (qwen.requests, qwen.errors, qwen.input_tokens, qwen.output_tokens) == (6, 1, 400, 800)
    assert (qwen.in_flight, qwen.queued, qwen.kv_cache_use) == (1, 1, None)
    assert qwen.ttft[INF] == 4
    assert readings["llama"].requests == 0


def test_adapters_count_with_their_model() -> None:
    gateway = metrics_pages.Gateway("qwen")
    gateway.metrics.add("qwen:sql", "qwen")
    gateway.step()
    gateway.metrics.request("qwen:sql", "/v1/completions").finish(200)
    readings = read(gateway.page())
    assert {name: reading.requests for name, reading in readings.items()} == {"qwen": 7}


def test_a_request_to_an_ensemble_counts_once() -> None:
    (reading,) = read(metrics_pages.triton(3)).values()
    assert reading.requests == 12
    assert (reading.input_tokens, reading.output_tokens) == (1200, 2400)
    assert (reading.in_flight, reading.queued, reading.kv_cache_use) == (6, 2, 0.25)


def test_a_triton_without_tensorrt_llm_says_what_waits() -> None:
    page = "\n".join(line for line in metrics_pages.triton(3).splitlines() if "trt_llm" not in line)
    (reading,) = read(page).values()
    assert (reading.queued, reading.in_flight, reading.kv_cache_use) == (2, None, None)


def test_the_page_of_trtllm_serve() -> None:
    (reading,) = read(metrics_pages.trtllm_serve(2)).values()
    assert (reading.requests, reading.in_flight, reading.queued, reading.kv_cache_use) == (8, 3, 1, 0.5)
    assert reading.output_tokens is None
    assert quantile(reading.ttft, 0.5) == pytest.approx(0.175)


@pytest.mark.parametrize("page", ["", "<html>", '[{"iter": 1}]', "up 1\n", 'nv_gpu_utilization{gpu_uuid="a"} 1'])
def test_a_page_of_something_else_says_nothing(page: str) -> None:
    assert read(page) == {}


def test_a_page_with_wrong_labels_is_read_as_far_as_it_makes_sense() -> None:
    page = """
pipeline_gateway_requests_in_flight{nothing="x"} 1
pipeline_gateway_requests_in_flight{model="qwen"} 2
pipeline_gateway_time_to_first_token_seconds_bucket{model="qwen",le="soon"} 1
pipeline_gateway_time_to_first_token_seconds_bucket{model="qwen",le="nan"} 1
pipeline_gateway_time_to_first_token_seconds_bucket{model="qwen"} 1
pipeline_gateway_time_to_first_token_seconds_bucket{model="qwen",le="0.5"} 7
"""
    assert read(page) == {"qwen": Reading(requests=0, errors=0, in_flight=2, ttft={0.5: 7})}


def test_gpus_as_triton_sees_them() -> None:
    assert list(gpus(metrics_pages.triton(1))) == [metrics_pages.GPU]
    assert gpus(metrics_pages.triton(1))[metrics_pages.GPU].power_w == 412.5


def test_what_one_page_does_not_say_another_may() -> None:
    gateway, server = Reading(requests=5.0, ttft={INF: 5.0}), Reading(requests=9.0, kv_cache_use=0.5, ttft={INF: 9.0})
    assert gateway.completed(server) == Reading(requests=5.0, kv_cache_use=0.5, ttft={INF: 5.0})


def test_rates_are_of_the_window() -> None:
    window = RateWindow(10.0)
    assert window.add(0.0, Reading(requests=100.0)).requests_per_s is None
    for now_s in range(1, 31):
        rates = window.add(now_s, Reading(requests=100.0 + (0 if now_s <= 20 else 3 * (now_s - 20))))
    assert (rates.seconds, rates.requests_per_s) == (10, 3)
    assert (rates.output_tokens_per_s, rates.ttft_p50_s) == (None, None)


def test_a_restarted_server_begins_a_window_of_its_own() -> None:
    window = RateWindow(10.0)
    window.add(0.0, Reading(requests=100.0, output_tokens=5.0))
    assert window.add(1.0, Reading(requests=2.0, output_tokens=1.0)).requests_per_s is None
    assert window.add(2.0, Reading(requests=4.0, output_tokens=1.0)).requests_per_s == 2


def test_percentiles_are_of_the_window_not_of_all_time() -> None:
    window = RateWindow(10.0)
    window.add(0.0, Reading(ttft={0.1: 1000.0, 1.0: 1000.0, INF: 1000.0}))
    rates = window.add(5.0, Reading(ttft={0.1: 1000.0, 1.0: 1010.0, INF: 1010.0}))
    assert rates.ttft_requests == 10
    assert rates.ttft_p50_s == pytest.approx(0.55)


@pytest.mark.parametrize(
    ("buckets", "share", "value"),
    [
        ({}, 0.5, None),
        ({0.1: 0.0, INF: 0.0}, 0.5, None),
        ({0.1: 10.0, INF: 10.0}, 0.5, 0.05),
        ({0.1: 0.0, 0.2: 10.0, INF: 10.0}, 0.99, 0.199),
        ({0.1: 0.0, 0.2: 5.0, INF: 10.0}, 0.99, 0.2),
        ({INF: 3.0}, 0.5, 0.0),
    ],
)
def test_quantiles_as_prometheus_gives_them(buckets: dict[float, float], share: float, value: float | None) -> None:
    assert quantile(buckets, share) == (None if value is None else pytest.approx(value))
