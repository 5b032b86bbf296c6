"""The gateway's Prometheus metrics: `GatewayMetrics`. The docs define each name."""

from __future__ import annotations

import platform
from time import perf_counter
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder

from trtllm_pipeline import __version__

PREFIX: Final = "pipeline_gateway"
UNKNOWN: Final = "unknown"
"""Label for a model that is not served: clients choose names, and must not create series."""
TTFT_S: Final = (
    *(0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
INTER_TOKEN_S: Final = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0),
)
DURATION_S: Final = (
    *(0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5),
    *(10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 240.0, 480.0),
)
QUEUE_S: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
"""Bounds grow by factors of 1.3 to 2, so a quantile between two of them is off by at most a third in the relevant
range.
"""


class GatewayMetrics:
    """Counters, gauges and histograms of one gateway, on a separate registry; used from one thread.

    A model is exported once it is added.
    """

    def __init__(self) -> None:
        # Omit the second series of each counter, which Prometheus ignores.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        build = Info(f"{PREFIX}_build", "Version of the gateway and of its Python.", registry=registry)
        build.info({"version": __version__, "python": platform.python_version()})

        def counter(name: str, help_: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}_{name}", help_, ("model", *labels), registry=registry)

        def gauge(name: str, help_: str) -> Gauge:
            return Gauge(f"{PREFIX}_{name}", help_, ("model",), registry=registry)

        def histogram(name: str, help_: str, bounds: tuple[float, ...]) -> Histogram:
            return Histogram(f"{PREFIX}_{name}_seconds", help_, ("model",), buckets=bounds, registry=registry)

        self.requests = counter("requests", "Requests answered, by HTTP status.", "endpoint", "status")
        self.rejected = counter("requests_rejected", "Requests refused before they reached a server.", "reason")
        self.upstream_errors = counter("upstream_errors", "Failures of the server behind the gateway.", "kind")
        self.tool_calls = counter("tool_calls", "Tool calls that models requested.")
        self.input_tokens = counter("input_tokens", "Prompt tokens of answered requests.")
        self.output_tokens = counter("output_tokens", "Tokens that models generated.")
        self.drafted_tokens = counter(
            "drafted_tokens", "Tokens drafted by speculative decoding, if the server reports them."
        )
        self.accepted_tokens = counter("accepted_tokens", "Drafted tokens that models accepted.")
        self.in_flight = gauge("requests_in_flight", "Requests that a server works on.")
        self.queued = gauge("requests_queued", "Requests that wait for a server to have room.")
        self.in_flight_limit = gauge("requests_in_flight_limit", "How many a server may work on at once.")
        self.queued_limit = gauge("requests_queued_limit", "How many may wait before others are rejected.")
        self.ttft = histogram("time_to_first_token", "From the request's arrival to its first output.", TTFT_S)
        self.inter_token = histogram("inter_token_latency", "Between two pieces of an output.", INTER_TOKEN_S)
        self.duration = histogram("request_duration", "From a request's arrival to its end.", DURATION_S)
        self.queue = histogram("queue_time", "From a request's arrival in the queue to its place.", QUEUE_S)
        self._models: dict[str, ModelMetrics] = {}

    def add(self, model: str, places_of: str | None = None) -> None:
        """Export 0 for a model before its first request, so that the first one shows as a rate.

        An adapter shares its model's places: requests in flight and queued count there.
        """
        self._models.setdefault(model, ModelMetrics(self, model, places_of or model))

    def limits(self, model: str, *, in_flight: int, queued: int) -> None:
        self.in_flight_limit.labels(model).set(in_flight)
        self.queued_limit.labels(model).set(queued)

    def request(self, model: str, endpoint: str) -> RequestMetrics:
        """Start timing a request. `endpoint` is the path of a route, never client input.

        A model that was not added counts as `unknown`.
        """
        if model not in self._models:
            model = UNKNOWN
            self.add(model)
        return RequestMetrics(self._models[model], endpoint)

    def page(self, accept: str = "") -> tuple[bytes, str]:
        """The metrics as text, and the content type, as negotiated by an Accept header."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type


class ModelMetrics:
    """The series of one model, looked up once: a lookup by labels costs as much as counting."""

    def __init__(self, metrics: GatewayMetrics, model: str, places_of: str) -> None:
        self.model = model
        self.requests = metrics.requests
        self.rejected = metrics.rejected
        self.upstream_errors = metrics.upstream_errors
        self.tool_calls = metrics.tool_calls.labels(model)
        self.input_tokens = metrics.input_tokens.labels(model)
        self.output_tokens = metrics.output_tokens.labels(model)
        self.drafted_tokens = metrics.drafted_tokens.labels(model)
        self.accepted_tokens = metrics.accepted_tokens.labels(model)
        self.in_flight = metrics.in_flight.labels(places_of)
        self.queued = metrics.queued.labels(places_of)
        self.ttft = metrics.ttft.labels(model)
        self.inter_token = metrics.inter_token.labels(model)
        self.duration = metrics.duration.labels(model)
        self.queue = metrics.queue.labels(model)


class RequestMetrics:
    """Metrics of one request: `queued`, `started`, `output` and `tokens` by response, `usage`, always `finish`."""

    def __init__(self, model: ModelMetrics, endpoint: str) -> None:
        self._model = model
        self._endpoint = endpoint
        self._began_s = perf_counter()
        self._queued_s: float | None = None
        self._running = False
        self._last_s: dict[int, float] = {}
        self._counted = 0

    def queued(self) -> None:
        self._queued_s = perf_counter()
        self._model.queued.inc()

    def started(self) -> None:
        waited_s = self._leave_queue()
        self._model.queue.observe(waited_s)
        self._running = True
        self._model.in_flight.inc()

    def output(self, choice: int = 0) -> None:
        """One of its choices has received text, reasoning or a tool call."""
        now_s = perf_counter()
        model, last_s = self._model, self._last_s
        if choice in last_s:
            model.inter_token.observe(now_s - last_s[choice])
        elif not last_s:
            model.ttft.observe(now_s - self._began_s)
        last_s[choice] = now_s

    def tokens(self, number: int) -> None:
        """The model has generated tokens, with or without text."""
        if number:
            self._counted += number
            self._model.output_tokens.inc(number)

    def usage(self, input_tokens: int, output_tokens: int) -> None:
        """Token counts of the whole request; called once. Adds output that `tokens` has not counted."""
        self._model.input_tokens.inc(input_tokens)
        self._model.output_tokens.inc(max(0, output_tokens - self._counted))

    def drafts(self, drafted: int, accepted: int) -> None:
        self._model.drafted_tokens.inc(drafted)
        self._model.accepted_tokens.inc(accepted)

    def tool_calls(self, number: int) -> None:
        self._model.tool_calls.inc(number)

    def rejected(self, reason: str) -> None:
        """It was refused before reaching its server. `reason` is one of a few words, such as `queue_full`."""
        self._model.rejected.labels(self._model.model, reason).inc()

    def upstream_error(self, kind: str) -> None:
        """Its server failed. `kind` is one of a few words, such as `timeout`."""
        self._model.upstream_errors.labels(self._model.model, kind).inc()

    def finish(self, status: int) -> None:
        """It has ended with this HTTP status; 499 if the client disconnected. Called once."""
        model = self._model
        self._leave_queue()
        if self._running:
            model.in_flight.dec()
            model.duration.observe(perf_counter() - self._began_s)
        model.requests.labels(model.model, self._endpoint, str(status)).inc()

    def _leave_queue(self) -> float:
        """Returns the seconds that it waited."""
        if self._queued_s is None:
            return 0.0
        waited_s = perf_counter() - self._queued_s
        self._queued_s = None
        self._model.queued.dec()
        return waited_s
