"""The Grafana dashboard of kept servers: rows of panels, each a title, a unit and queries, and the JSON that they make."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

UID: Final = "trtllm-pipeline"
TITLE: Final = "TensorRT-LLM pipeline: running servers"
_SERVER: Final = 'server=~"$server",instance=~"$instance"'
_ANY_MODEL: Final = f'{_SERVER},model=~"$model"'
_MODEL: Final = f'{_ANY_MODEL},model!="unknown"'
"""What is not served is only asked for and rejected."""
_SCHEMA_VERSION: Final = 39
"""Of the dashboard's JSON, as Grafana 11.0 writes it. Older JSON is brought up to date by Grafana when it loads it."""
_COLUMNS: Final = 24
_QUANTILES: Final = (50, 90, 99)


class Query(NamedTuple):
    """PromQL, and what its lines are called; `{{model}}` there is the value of a label."""

    expression: str
    legend: str


class Panel(NamedTuple):
    """What one panel shows. `unit` is an id of Grafana."""

    title: str
    about: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    width: int = 8
    height: int = 8


def _rate(metric: str, by: str, which: str = _MODEL) -> str:
    """Growth per second of a counter of the gateway."""
    return f"sum by ({by}) (rate(pipeline_gateway_{metric}{{{which}}}[$__rate_interval]))"


def _rare(metric: str, label: str, which: str = _MODEL) -> Query:
    """As `_rate` for what may never have happened: 0 for each model of which there is nothing."""
    rate = _rate(metric, f"model, {label}", which)
    return Query(f"{rate} or ({_ALL} * 0 unless on (model) {rate})", f"{{{{model}}}} {{{{{label}}}}}")


def _gauge(metric: str) -> Query:
    return Query(f"sum by (model) (pipeline_gateway_{metric}{{{_MODEL}}})", "{{model}}")


def _quantile(percent: int, metric: str, labels: str = _MODEL, by: str = "model, le") -> str:
    rates = f"sum by ({by}) (rate({metric}_bucket{{{labels}}}[$__rate_interval]))"
    return f"histogram_quantile({percent / 100:g}, {rates})"


def _latency(title: str, about: str, metric: str, width: int = 6) -> Panel:
    queries = (Query(_quantile(each, f"pipeline_gateway_{metric}"), f"{{{{model}}}} p{each}") for each in _QUANTILES)
    return Panel(title, about, "s", tuple(queries), width=width)


def _mean(metric: str) -> str:
    """Mean of a time in a Triton model, in microseconds for each request."""
    of = f"[$__rate_interval])) / sum by (model) (rate(nv_inference_request_success{{{_SERVER}}}[$__rate_interval]))"
    return f"sum by (model) (rate({metric}{{{_SERVER}}}{of}"


def _per_gpu(metric: str) -> str:
    """Several servers of one machine report the same GPUs."""
    return f"max by (gpu_uuid) ({metric}{{{_SERVER}}})"


def _of_trt_llm(metric: str, label: str, value: str) -> str:
    return f'nv_trt_llm_{metric}{{{_SERVER},{label}="{value}"}}'


_ERRORS: Final = _rate("requests_total", "model", _MODEL + ',status=~"5.."')
_ALL: Final = _rate("requests_total", "model")
_ERROR_RATIO: Final = f"({_ERRORS} or {_ALL} * 0) / {_ALL}"
"""0 where there were requests and no errors, nothing where there were no requests."""
_KV_USED: Final = (
    f"sum by (server, instance) ({_of_trt_llm('kv_cache_block_metrics', 'kv_cache_block_type', 'used')})"
    f" / sum by (server, instance) ({_of_trt_llm('kv_cache_block_metrics', 'kv_cache_block_type', 'max')})"
)
_GPU: Final = "{{gpu_uuid}}"

ROWS: Final[tuple[tuple[str, tuple[Panel, ...]], ...]] = (
    (
        "Overview",
        tuple(
            Panel(title, about, unit, (Query(expression, ""),), "stat", 4, 4)
            for title, about, unit, expression in (
                (
                    "Servers down",
                    "Scrape targets that do not answer.",
                    "short",
                    f"count(up{{{_SERVER}}}) - sum(up{{{_SERVER}}})",
                ),
                ("Requests", "Answered requests.", "reqps", f"sum({_ALL})"),
                ("Output", "Generated tokens.", "tokens/s", f"sum({_rate('output_tokens_total', 'model')})"),
                (
                    "Time to first token, p99",
                    "The slowest model's.",
                    "s",
                    f"max({_quantile(99, 'pipeline_gateway_time_to_first_token_seconds')})",
                ),
                ("Queued", "Waiting requests.", "short", f"sum(pipeline_gateway_requests_queued{{{_MODEL}}})"),
                ("Errors", "Share of requests with a 5xx status, worst model.", "percentunit", f"max({_ERROR_RATIO})"),
            )
        ),
    ),
    (
        "Requests",
        (
            Panel(
                "Requests by status",
                "499: the client went away.",
                "reqps",
                (Query(_rate("requests_total", "model, status", _ANY_MODEL), "{{model}} {{status}}"),),
            ),
            Panel(
                "Requests by endpoint",
                "Path of the route.",
                "reqps",
                (Query(_rate("requests_total", "endpoint"), "{{endpoint}}"),),
            ),
            Panel(
                "In flight",
                "Requests at the server, and the most that the gateway lets through.",
                "short",
                (
                    _gauge("requests_in_flight"),
                    Query(f"sum by (model) (pipeline_gateway_requests_in_flight_limit{{{_MODEL}}})", "{{model}} limit"),
                ),
            ),
        ),
    ),
    (
        "Latency",
        (
            _latency(
                "Time to first token", "From the request's arrival, queue included.", "time_to_first_token_seconds"
            ),
            _latency("Inter-token latency", "Between two pieces of output.", "inter_token_latency_seconds"),
            _latency("Request duration", "From arrival to end.", "request_duration_seconds"),
            _latency(
                "Queue time", "From arrival in the gateway's queue to a place at the server.", "queue_time_seconds"
            ),
        ),
    ),
    (
        "Tokens",
        (
            Panel(
                "Output tokens",
                "Generated, counted as they come.",
                "tokens/s",
                (Query(_rate("output_tokens_total", "model"), "{{model}}"),),
            ),
            Panel(
                "Input tokens",
                "Of prompts, counted when their request ends.",
                "tokens/s",
                (Query(_rate("input_tokens_total", "model"), "{{model}}"),),
            ),
            Panel(
                "Tool calls",
                "That models asked for.",
                "short",
                (Query(_rate("tool_calls_total", "model"), "{{model}} per second"),),
            ),
        ),
    ),
    (
        "Queue",
        (
            Panel(
                "Queued in the gateway",
                "Waiting requests, and how many may wait.",
                "short",
                (
                    _gauge("requests_queued"),
                    Query(f"sum by (model) (pipeline_gateway_requests_queued_limit{{{_MODEL}}})", "{{model}} limit"),
                ),
            ),
            Panel(
                "Waiting in Triton",
                "Requests that no instance of the model has taken.",
                "short",
                (Query(f"sum by (model) (nv_inference_pending_request_count{{{_SERVER}}})", "{{model}}"),),
            ),
            Panel(
                "Requests of the engine",
                "TensorRT-LLM: in the engine, in this step's batch, waiting.",
                "short",
                (
                    Query(
                        f'sum by (request_type) (nv_trt_llm_request_metrics{{{_SERVER},request_type=~"active|scheduled|waiting"}})',
                        "{{request_type}}",
                    ),
                    Query(f"sum(trtllm_num_requests_running{{{_SERVER}}})", "active"),
                    Query(f"sum(trtllm_num_requests_waiting{{{_SERVER}}})", "waiting"),
                ),
            ),
        ),
    ),
    (
        "KV cache",
        (
            Panel(
                "KV cache in use",
                "Used share of the engine's KV cache blocks.",
                "percentunit",
                (
                    Query(_KV_USED, "{{server}}"),
                    Query(f"max by (server, instance) (trtllm_kv_cache_utilization{{{_SERVER}}})", "{{server}}"),
                ),
                width=12,
            ),
            Panel(
                "KV cache blocks",
                "Of the engine, by what they are.",
                "short",
                (
                    Query(
                        f'sum by (kv_cache_block_type) (nv_trt_llm_kv_cache_block_metrics{{{_SERVER},kv_cache_block_type=~"used|free|max|reused"}})',
                        "{{kv_cache_block_type}}",
                    ),
                ),
                width=12,
            ),
        ),
    ),
    (
        "GPU",
        (
            Panel(
                "Utilization", "Share of time with work.", "percentunit", (Query(_per_gpu("nv_gpu_utilization"), _GPU),)
            ),
            Panel(
                "Memory",
                "In use, and in all.",
                "bytes",
                (
                    Query(_per_gpu("nv_gpu_memory_used_bytes"), _GPU),
                    Query(_per_gpu("nv_gpu_memory_total_bytes"), f"{_GPU} total"),
                ),
            ),
            Panel("Power", "", "watt", (Query(_per_gpu("nv_gpu_power_usage"), _GPU),)),
        ),
    ),
    (
        "Errors",
        (
            Panel(
                "Error ratio",
                "Share of requests with a 5xx status.",
                "percentunit",
                (Query(_ERROR_RATIO, "{{model}}"),),
                width=6,
            ),
            Panel(
                "Rejected",
                "Refused before a server was asked.",
                "reqps",
                (_rare("requests_rejected_total", "reason", _ANY_MODEL),),
                width=6,
            ),
            Panel(
                "Failures of servers",
                "As the gateway saw them.",
                "reqps",
                (_rare("upstream_errors_total", "kind"),),
                width=6,
            ),
            Panel(
                "Failures in Triton",
                "By model and reason.",
                "reqps",
                (
                    Query(
                        f"sum by (model, reason) (rate(nv_inference_request_failure{{{_SERVER}}}[$__rate_interval]))",
                        "{{model}} {{reason}}",
                    ),
                ),
                width=6,
            ),
        ),
    ),
    (
        "Triton models",
        (
            Panel(
                "Compute time",
                "Mean of a request.",
                "µs",
                (Query(_mean("nv_inference_compute_infer_duration_us"), "{{model}}"),),
            ),
            Panel(
                "Queue time", "Mean of a request.", "µs", (Query(_mean("nv_inference_queue_duration_us"), "{{model}}"),)
            ),
            Panel(
                "Batch size",
                "Mean: inferences in one execution.",
                "short",
                (
                    Query(
                        f"sum by (model) (rate(nv_inference_count{{{_SERVER}}}[$__rate_interval]))"
                        f" / sum by (model) (rate(nv_inference_exec_count{{{_SERVER}}}[$__rate_interval]))",
                        "{{model}}",
                    ),
                ),
            ),
        ),
    ),
    (
        "Process of the gateway",
        (
            Panel(
                "CPU",
                "",
                "percentunit",
                (Query(f"rate(process_cpu_seconds_total{{{_SERVER}}}[$__rate_interval])", "{{server}}"),),
            ),
            Panel(
                "Memory", "Resident.", "bytes", (Query(f"process_resident_memory_bytes{{{_SERVER}}}", "{{server}}"),)
            ),
            Panel(
                "Open files",
                "Connections are among them.",
                "short",
                (Query(f"process_open_fds{{{_SERVER}}}", "{{server}}"),),
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana imports it: by a data source, servers, instances and models to choose from."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS:
        where = {"x": 0, "y": top, "w": _COLUMNS, "h": 1}
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": where, "panels": []}
        )
        top, left = top + 1, 0
        for panel in row:
            where = {"x": left, "y": top, "w": panel.width, "h": panel.height}
            panels.append(_panel(len(panels) + 1, panel, where))
            left += panel.width
        top += max(panel.height for panel in row)
    return {
        "uid": UID,
        "title": TITLE,
        "description": "Gateway, Triton and TensorRT-LLM. Made by: pipeline serve monitoring",
        "tags": ["tensorrt-llm", "triton"],
        "schemaVersion": _SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "annotations": {"list": []},
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                    "refresh": 1,
                },
                _variable("server", "Server", "label_values(up, server)"),
                _variable("instance", "Instance", 'label_values(up{server=~"$server"}, instance)'),
                _variable(
                    "model", "Model", 'label_values(pipeline_gateway_requests_in_flight{server=~"$server"}, model)'
                ),
            ]
        },
        "panels": panels,
    }


_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


def _panel(number: int, panel: Panel, where: dict[str, int]) -> dict[str, Any]:
    stat = panel.kind == "stat"
    legend = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
    custom = {} if stat else {"custom": {"lineWidth": 1, "fillOpacity": 8, "showPoints": "never"}}
    options: dict[str, Any] = (
        {
            "reduceOptions": {"values": False, "calcs": ["lastNotNull"], "fields": ""},
            "colorMode": "value",
            "graphMode": "area",
        }
        if stat
        else {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    )
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "gridPos": where,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, **custom}, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + each),
                "datasource": _SOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
            }
            for each, query in enumerate(panel.queries)
        ],
    }


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    """A variable with the values of a label. All of them is `.*`, which also fits series without that label."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }
