"""The figures of one load run (what `analyze` returns, and perf.json holds) as text and as CSV."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from trtllm_pipeline.bench import self_test
from trtllm_pipeline.bench.conditions import Conditions, system_words, workload_words
from trtllm_pipeline.bench.result import RATES, load_key, load_words
from trtllm_pipeline.bench.stats import STATISTICS
from trtllm_pipeline.report.tables import cell, csv_table, plain_table

_STATISTICS: Final = ("n", *STATISTICS)
_SUMMARIES: Final = (
    "ttft_ms", "ttfa_ms", "tpot_ms", "itl_ms", "icl_ms", "stall_ms", "e2e_ms", "connect_ms", "user_tokens_per_s",
    "input_tokens_per_request", "output_tokens_per_request",
)  # fmt: skip
_SCHEDULED: Final = ("lag_ms", "ttft_from_schedule_ms", "response_ms")

Result = Mapping[str, Any]


def to_csv(result: Result) -> str:
    """One line for each figure of each level, also as other tools define them."""
    rows = []
    for level in result["levels"]:
        others = ((f"{name} as {tool}", value) for tool, of in level["as"].items() for name, value in of.items())
        for name, value in (*_figures(level), *others):
            summary = value if isinstance(value, dict) else {}
            single = None if isinstance(value, dict) else value
            statistics = {each: summary.get(each) for each in _STATISTICS}
            rows.append({"load": _load(level), "metric": name, "value": single, **statistics})
    return csv_table(rows)


def to_text(result: Result) -> str:
    """What people read: conditions, an overview, every level in full, findings."""
    return "\n".join(_lines(result))


def overview(result: Result) -> str:
    """One line for each level."""
    return plain_table([_overview(level) for level in result["levels"]])


def self_test_text(result: Result) -> str:
    """The result of a self-test: errors of the client's times, and what it recognised."""
    names = ("ttft_error_ms", "event_error_ms", "gap_error_ms", "read_late_ms", "server_late_ms")
    return "\n".join(
        [
            self_test.line(result),
            plain_table([_statistics(name, result[name]) for name in names], digits=4),
            *(f"{'seen  ' if seen else 'MISSED'}  {name}" for name, seen in result["checks"].items()),
            *(f"{name}: {definition}" for name, definition in self_test.DEFINITIONS.items()),
        ]
    )


def _lines(result: Result) -> Iterator[str]:
    made_up = ", synthetic prompts" if result["settings"].get("prompts") == "synthetic" else ""
    counted = result["token_count"]["source"]
    yield f"{result['model']} over {result['protocol']}{made_up}; output tokens counted by {counted}"
    under = Conditions.read(result)
    yield f"system: {system_words(under)}"
    yield f"load: {workload_words(under)}"
    yield overview(result)
    for level in result["levels"]:
        yield from _level(level)
    yield ""
    for finding in result["findings"]:
        place = f" ({_load(finding)})" if finding["concurrency"] or finding.get("request_rate") else ""
        yield f"{finding['severity']}: {finding['message']}{place}"
    if result["client"]["self_test"] is not None:
        yield self_test.line(result["client"]["self_test"])
    yield "formulas: --format json, `definitions`"


def _level(level: Result) -> Iterator[str]:
    figures = _figures(level)
    yield f"\n{_load(level)}"
    yield plain_table([_statistics(name, value) for name, value in figures if isinstance(value, dict)])
    yield "; ".join(f"{name} {cell(value)}" for name, value in figures if not isinstance(value, dict))
    if level["as"]:
        yield "the same events as other tools report them:"
        yield plain_table([_by_tool(tool, of) for tool, of in level["as"].items()])
    for repeat in level["repeats"]:
        windows = ", ".join(
            f"{name} {window['duration_s']:.2f} s {window['output_tokens_per_s']:.1f} tokens/s"
            for name in ("whole", "active", "steady")
            if (window := repeat.get(name))
        )
        yield f"output in the windows of repeat {repeat['repeat']}: {windows}"
    if level["headline"]["reason"]:
        yield f"rates are of the window {level['headline']['window']}: {level['headline']['reason']}"
    for record in level.get("triton", ()):
        for model, times in record["of"].items():
            yield f"Triton's own times, repeat {record['repeat']}, {model}: {_words(times)}"
    for record in level.get("gpu", ()):
        for device in record["of"]:
            yield f"GPU, repeat {record['repeat']}: {_words(device)}"


def _load(level: Result) -> str:
    return load_words(load_key(level["concurrency"], level.get("request_rate")))


def _figures(level: Result) -> list[tuple[str, Any]]:
    """Every figure of a level by name: a number, or a summary."""
    rows: list[tuple[str, Any]] = [(name, level[name]) for name in ("requests", "failures", *sorted(RATES.values()))]
    rows += [(name, level[name]) for name in _SUMMARIES if (level.get(name) or {}).get("n")]
    schedule, goodput = level.get("schedule"), level.get("goodput")
    if schedule:
        rows += [(name, schedule[name]) for name in ("achieved_rate", "most_in_flight", *_SCHEDULED)]
    if goodput is not None:
        rows += [(f"goodput_{name}", goodput[name]) for name in ("share", "requests_per_s")]
    return rows


def _overview(level: Result) -> dict[str, object]:
    return {
        "load": _load(level),
        "requests": level["requests"],
        "failed": level["failures"],
        "TTFT p50 ms": level["ttft_ms"]["p50"],
        "p99": level["ttft_ms"]["p99"],
        "TPOT p50 ms": level["tpot_ms"]["p50"],
        "ITL p99 ms": level["itl_ms"]["p99"],
        "e2e p50 ms": level["e2e_ms"]["p50"],
        "in tokens/s": level["input_tokens_per_s"],
        "out tokens/s": level["output_tokens_per_s"],
        "requests/s": level["requests_per_s"],
        **({"goodput": level["goodput"]["share"]} if "goodput" in level else {}),
    }


def _by_tool(tool: str, figures: Result) -> dict[str, object]:
    summaries = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
    return {
        "": tool,
        **{
            f"{name} {statistic}": figures[name][statistic] if name in figures else None
            for name in summaries
            for statistic in ("mean", "p99")
        },
        **{name: figures.get(name) for name in ("output_tokens_per_s", "requests_per_s")},
    }


def _statistics(name: str, values: Result) -> dict[str, object]:
    return {"": name, **{each: values.get(each) for each in _STATISTICS}}


def _words(values: Result) -> str:
    return ", ".join(f"{name} {cell(value)}" for name, value in values.items() if value is not None)
