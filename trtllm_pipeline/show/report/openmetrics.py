"""Results as OpenMetrics text: gauges for a push gateway or for node_exporter's textfile collector.

Specification: https://prometheus.io/docs/specs/om/open_metrics_spec/. The text is also valid in Prometheus' own format,
which push gateways accept: lines specific to OpenMetrics are comments there. It has no timestamps, which gateways reject.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from trtllm_pipeline.measure import LevelResult, metric_names, result
from trtllm_pipeline.orchestrate import CellResult, report_file
from trtllm_pipeline.show.report.report_formats import Report

_PREFIX: Final = "pipeline_cell"
_FORMULAS: Final = {**result.DEFINITIONS, **{metric.name: metric.formula for metric in report_file.METRICS}}
_OF_LEVEL: Final = {
    "output_tokens_per_s": "output_tokens_per_second",
    "input_tokens_per_s": "input_tokens_per_second",
    "requests_per_s": "requests_per_second",
    "saturated_rps": "saturated_requests_per_second",
    "tokens_per_joule": "tokens_per_joule",
    "acceptance": "acceptance_ratio",
}
"""Field of a level -> name of its gauge."""
_OF_TRITON: Final = {
    "in_flight": "triton_requests_in_flight",
    "waiting": "triton_requests_waiting",
    "kv_cache_use": "triton_kv_cache_use_ratio",
}
"""Triton gauge -> our gauge name."""
_Labels = Mapping[str, object]
_Sample = tuple[_Labels, float | None]


def write(report: Report) -> None:
    report.stream.write(to_openmetrics(report.rows, report.run_id))


def to_openmetrics(rows: Sequence[CellResult], run: str = "") -> str:
    """The gauges of all cells. Latencies are in seconds, shares are 0 to 1. Missing measurements have no line."""
    lines = []
    for name, help_, samples in _families(rows, run):
        known = [(labels, value) for labels, value in samples if value is not None]
        if known:
            lines += [f"# TYPE {_PREFIX}_{name} gauge", f"# HELP {_PREFIX}_{name} {_escaped(help_)}"]
            lines += [f"{_PREFIX}_{name}{_shown(labels)} {float(value)!r}" for labels, value in known]
    return "\n".join([*lines, "# EOF", ""])


def _families(rows: Sequence[CellResult], run: str) -> Iterator[tuple[str, str, list[_Sample]]]:
    """Name, help and samples of each gauge."""
    of_cell = [({"cell": row.id, **{_label(name): value for name, value in row.axes.items()}}, row) for row in rows]
    of_level = [({**cell, **_load(level)}, level) for cell, row in of_cell for level in row.levels]
    statuses: list[_Sample] = [({**cell, "status": row.status.value, "run": run}, 1.0) for cell, row in of_cell]
    yield "status", "always 1; the label is the status of the cell", statuses
    for latency in metric_names.LATENCIES:
        samples: list[_Sample] = [
            ({**labels, "statistic": key}, None if value is None else value / 1000)
            for labels, level in of_level
            for key, value in level.latencies.get(latency, {}).items()
            if key != "n"
        ]
        yield f"{latency.removesuffix('_ms')}_seconds", _FORMULAS[latency], samples
    for field, name in _OF_LEVEL.items():
        yield name, _FORMULAS[field], [(labels, getattr(level, field)) for labels, level in of_level]
    goodputs: list[_Sample] = [(labels, level.goodput.share) for labels, level in of_level if level.goodput is not None]
    yield "goodput_ratio", _FORMULAS["goodput"], goodputs
    yield from _of_triton([(labels, level.triton_use) for labels, level in of_level if level.triton_use is not None])
    rates: list[_Sample] = [(cell, row.highest_rate.rate) for cell, row in of_cell if row.highest_rate is not None]
    yield "highest_rate_requests_per_second", _FORMULAS["highest_rate"], rates
    most: list[_Sample] = [
        (cell, row.highest_concurrency.concurrency) for cell, row in of_cell if row.highest_concurrency is not None
    ]
    yield "highest_concurrency_requests", _FORMULAS["highest_concurrency"], most
    benched: list[_Sample] = [(cell, row.trtllm_bench_tps) for cell, row in of_cell]
    yield "trtllm_bench_output_tokens_per_second", _FORMULAS["trtllm_bench"], benched
    scores: list[_Sample] = [
        ({**cell, "metric": name}, score) for cell, row in of_cell for name, score in row.accuracy.items()
    ]
    yield "accuracy_ratio", "mean score", scores
    yield "engine_bytes", "sum of the engine's files", [(cell, row.engine_size_bytes) for cell, row in of_cell]
    times: list[_Sample] = [
        ({**cell, "stage": stage}, seconds) for cell, row in of_cell for stage, seconds in row.seconds.items()
    ]
    yield "stage_seconds", "wall-clock time of the stage that created the artifact", times


def _of_triton(used: Sequence[tuple[_Labels, result.TritonUse]]) -> Iterator[tuple[str, str, list[_Sample]]]:
    samples = [({**labels, "model": model}, of_model) for labels, use in used for model, of_model in use.models.items()]
    requests: list[_Sample] = [(labels, of_model.get("requests")) for labels, of_model in samples]
    yield "triton_requests", _FORMULAS["triton_use"], requests
    parts: list[_Sample] = [
        ({**labels, "part": part.removesuffix("_ms")}, value / 1000)
        for labels, of_model in samples
        for part, value in of_model.items()
        if part.endswith("_ms")
    ]
    yield "triton_request_seconds", _FORMULAS["triton_use"], parts
    for field, name in _OF_TRITON.items():
        gauges: list[_Sample] = [
            ({**labels, "statistic": statistic}, getattr(use, each))
            for labels, use in used
            for statistic, each in (("mean", field), ("max", f"{field}_max"))
        ]
        yield name, _FORMULAS["triton_use"], gauges


def _load(level: LevelResult) -> _Labels:
    if level.request_rate is not None:
        return {"request_rate": level.request_rate}
    return {"concurrency": level.concurrency}


def _label(name: str) -> str:
    """A valid label name. Axes over settings contain dots."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _shown(labels: _Labels) -> str:
    return "{" + ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
