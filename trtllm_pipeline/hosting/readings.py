"""What metrics pages say of served models, in one form for gateway, Triton and trtllm-serve; and rates over a window."""

from __future__ import annotations

import math
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import field, fields, replace
from typing import Final

from trtllm_pipeline.bench.counters import samples
from trtllm_pipeline.gateway.names import PREFIX, UNKNOWN
from trtllm_pipeline.records import dataclass

_LABEL: Final = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
Found = Mapping[str, list[tuple[Mapping[str, str], float]]]
"""Name of a metric -> labels and value of each sample."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What is known of one model at one time; None where its server does not say."""

    requests: float | None = None
    """Answered so far, as all counts since the server started."""
    errors: float | None = None
    """Of them those that the server is to blame for."""
    input_tokens: float | None = None
    output_tokens: float | None = None
    in_flight: float | None = None
    queued: float | None = None
    kv_cache_use: float | None = None
    """From 0 to 1."""
    ttft: Mapping[float, float] = field(default_factory=dict)
    """Requests with a time to first token of at most so many seconds, so far."""

    def completed(self, other: Reading) -> Reading:
        """With what `other` knows where this one does not."""
        return replace(
            self,
            **{each.name: getattr(other, each.name) for each in fields(self) if getattr(self, each.name) in (None, {})},
        )


@dataclass(frozen=True, slots=True)
class GpuReading:
    """How busy a GPU is; None for what is not known."""

    name: str
    utilization: float | None
    """From 0 to 1."""
    memory_used_bytes: float | None
    memory_total_bytes: float | None
    power_w: float | None


def read(page: str) -> dict[str, Reading]:
    """Readings by model. Of a Triton or trtllm-serve there is one, with the model ""; none for any other page."""
    found: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
    for name, labels, value in samples(page):
        found[name].append((dict(_LABEL.findall(labels)), value))
    if f"{PREFIX}_requests_in_flight" in found:
        models = {labels.get("model", "") for labels, _ in found[f"{PREFIX}_requests_in_flight"]} - {UNKNOWN, ""}
        return {model: _of_gateway(found, model) for model in sorted(models)}
    if "nv_inference_request_success" in found:
        return {"": _of_triton(found)}
    return {"": _of_trtllm_serve(found)} if any(name.startswith("trtllm_") for name in found) else {}


def gpus(page: str) -> dict[str, GpuReading]:
    """GPUs by UUID, as Triton sees them."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for name, labels, value in samples(page):
        if name.startswith("nv_gpu_") and (gpu := dict(_LABEL.findall(labels)).get("gpu_uuid")):
            found[gpu][name.removeprefix("nv_gpu_")] = value
    return {
        gpu: GpuReading(
            gpu,
            values.get("utilization"),
            values.get("memory_used_bytes"),
            values.get("memory_total_bytes"),
            values.get("power_usage"),
        )
        for gpu, values in sorted(found.items())
    }


def _sum(found: Found, name: str, fits: Callable[[Mapping[str, str]], bool] = lambda _: True) -> float | None:
    values = [value for labels, value in found.get(name, ()) if fits(labels)]
    return sum(values) if values else None


def _buckets(found: Found, name: str, fits: Callable[[Mapping[str, str]], bool] = lambda _: True) -> dict[float, float]:
    buckets: dict[float, float] = defaultdict(float)
    for labels, value in found.get(f"{name}_bucket", ()):
        with suppress(ValueError):
            bound = float(labels.get("le", "")) if fits(labels) else math.nan
            if not math.isnan(bound):
                buckets[bound] += value
    return dict(buckets)


def _of_gateway(found: Found, model: str) -> Reading:
    def ours(labels: Mapping[str, str]) -> bool:
        own = labels.get("model", "")  # its adapters count with it
        return own == model or own.startswith(f"{model}:")

    def failed(labels: Mapping[str, str]) -> bool:
        return ours(labels) and labels.get("status", "").startswith("5")

    requests = _sum(found, f"{PREFIX}_requests_total", ours)
    return Reading(
        requests=requests or 0.0,
        errors=_sum(found, f"{PREFIX}_requests_total", failed) or 0.0,
        input_tokens=_sum(found, f"{PREFIX}_input_tokens_total", ours),
        output_tokens=_sum(found, f"{PREFIX}_output_tokens_total", ours),
        in_flight=_sum(found, f"{PREFIX}_requests_in_flight", ours),
        queued=_sum(found, f"{PREFIX}_requests_queued", ours),
        ttft=_buckets(found, f"{PREFIX}_time_to_first_token_seconds", ours),
    )


def _of_triton(found: Found) -> Reading:
    def engine(name: str, label: str, value: str) -> float | None:
        return _sum(found, f"nv_trt_llm_{name}", lambda labels: labels.get(label) == value)

    def busiest(name: str) -> float | None:
        """Of the models: a request to an ensemble counts for each model in it."""
        by_model: dict[str, float] = defaultdict(float)
        for labels, value in found.get(name, ()):
            by_model[labels.get("model", "")] += value
        return max(by_model.values(), default=None)

    used, most = (engine("kv_cache_block_metrics", "kv_cache_block_type", each) for each in ("used", "max"))
    waiting = engine("request_metrics", "request_type", "waiting")
    return Reading(
        requests=busiest("nv_inference_request_success"),
        errors=busiest("nv_inference_request_failure"),
        input_tokens=_sum(found, "nv_llm_input_token_len_sum"),
        output_tokens=_sum(found, "nv_llm_output_token_len_sum"),
        in_flight=engine("request_metrics", "request_type", "active"),
        queued=busiest("nv_inference_pending_request_count") if waiting is None else waiting,
        kv_cache_use=used / most if used is not None and most else None,
    )


def _of_trtllm_serve(found: Found) -> Reading:
    return Reading(
        requests=_sum(found, "trtllm_request_success_total"),
        in_flight=_sum(found, "trtllm_num_requests_running"),
        queued=_sum(found, "trtllm_num_requests_waiting"),
        kv_cache_use=max((value for _, value in found.get("trtllm_kv_cache_utilization", ())), default=None),
        ttft=_buckets(found, "trtllm_time_to_first_token_seconds"),
    )


@dataclass(frozen=True, slots=True)
class Rates:
    """What happened in a window; None where it is not known, or the window has no length yet."""

    seconds: float = 0.0
    requests_per_s: float | None = None
    errors_per_s: float | None = None
    input_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    ttft_requests: int = 0
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None


class RateWindow:
    """The readings of one model over the last seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._readings: deque[tuple[float, Reading]] = deque()

    def add(self, now_s: float, reading: Reading) -> Rates:
        """Take a reading, and say what happened since the first of the window."""
        readings = self._readings
        if readings and _restarted(readings[-1][1], reading):
            readings.clear()
        readings.append((now_s, reading))
        while len(readings) > 2 and readings[1][0] <= now_s - self._seconds:
            readings.popleft()
        began_s, before = readings[0]
        seconds = now_s - began_s

        def rate(name: str) -> float | None:
            one, other = getattr(before, name), getattr(reading, name)
            return None if one is None or other is None or not seconds else (other - one) / seconds

        grown = {bound: count - before.ttft.get(bound, 0.0) for bound, count in reading.ttft.items()} if seconds else {}
        return Rates(
            seconds,
            rate("requests"),
            rate("errors"),
            rate("input_tokens"),
            rate("output_tokens"),
            round(max(grown.values(), default=0)),
            quantile(grown, 0.5),
            quantile(grown, 0.99),
        )


def _restarted(before: Reading, after: Reading) -> bool:
    return any(
        one is not None and other is not None and other < one
        for one, other in (
            (before.requests, after.requests),
            (before.output_tokens, after.output_tokens),
            (max(before.ttft.values(), default=None), max(after.ttft.values(), default=None)),
        )
    )


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """The quantile of a histogram of cumulative counts, linear in its bucket; the last finite bound for what is beyond.

    None without observations. Watched: Prometheus, `histogram_quantile`.
    """
    bounds: Iterable[tuple[float, float]] = sorted(buckets.items())
    total = max(buckets.values(), default=0.0)
    if total <= 0:
        return None
    below, counted = 0.0, 0.0
    for bound, count in bounds:
        if count >= share * total and count > counted:
            if bound == float("inf"):
                return below
            return below + (bound - below) * (share * total - counted) / (count - counted)
        below, counted = bound, count
    return below
