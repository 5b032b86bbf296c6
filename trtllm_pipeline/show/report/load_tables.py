"""The result of one load run as text and as CSV."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from trtllm_pipeline.base import text_blocks, text_tables
from trtllm_pipeline.measure import LevelResult, LoadResult, conditions, engine_report, metric_names, result, stats
from trtllm_pipeline.show.phrases import wrapped

_STATISTICS: Final = ("n", *stats.STATISTICS)
_ORDER: Final = ("ttft_ms", "ttfa_ms", "tpot_ms", "itl_ms", "icl_ms", "stall_ms", "e2e_ms", "connect_ms")
"""Summaries to list first, in this order."""
_Summary = Mapping[str, Any]
_SPARE: Final = (
    *("p75", "min", "in tokens/s", "ITL p99 ms", "requests/s", "e2e p50 ms", "requests", "TTFT p99 ms"),
    *("itl_ms mean", "itl_ms p99", "requests_per_s", "ttft_ms p99", "tpot_ms p99", "e2e_ms p99"),
)
"""Columns that a narrow terminal drops, the least important first."""
_MAX_WAIT: Final = 1.05
"""Mean TTFT from the schedule / from sending, above which the overview also gives the times from the schedule."""
_Table = list[dict[str, Any]]
_OPTIONAL: Final = ("goodput", "tok/J", "accepted drafts", "level SLOs")
"""Columns of the overview that are shown only if a level has a value."""


def to_csv(measured: LoadResult) -> str:
    """One line per metric and level, including other tools' definitions."""
    rows = []
    for level in measured.levels:
        details = _details(level)
        others = (
            (f"{name} as {tool}", value) for tool, of in details.other_tools.items() for name, value in of.items()
        )
        for name, value in (*_values(level), *_summaries(level), *others):
            summary, single = (value, None) if isinstance(value, dict) else ({}, value)
            statistics = {each: summary.get(each) for each in _STATISTICS}
            rows.append({"load": result.load_words(level.key), "metric": name, "value": single, **statistics})
    return text_tables.csv_table(rows)


def to_text(measured: LoadResult, width: int | None = None) -> str:
    """Text output: conditions, an overview, all levels in full, findings. `width` is that of a terminal, None without one."""
    return "\n".join(
        wrapped(each, width) if isinstance(each, str) else _fitted(each, width) for each in _lines(measured)
    )


def _fitted(rows: _Table, width: int | None) -> str:
    """A table, on a terminal without the spare columns for which there is no room."""
    dropped: list[str] = []
    spare = [name for name in _SPARE if rows and name in rows[0]]
    while True:
        kept = [{name: value for name, value in row.items() if name not in dropped} for row in rows]
        text = text_tables.plain_table(kept)
        if width is None or len(dropped) == len(spare) or max(map(len, text.splitlines()), default=0) <= width:
            break
        dropped.append(spare[len(dropped)])
    return f"{text}\n{wrapped(text_blocks.also_shown(dropped), width)}" if dropped else text


def beside_engine(bench: engine_report.BenchComparison | None) -> Iterator[str]:
    """A trtllm-bench report compared with these results. Empty without a report."""
    if bench is not None:
        yield f"\n{bench.title()}"
        yield text_tables.plain_table(bench.rows())


def overview(levels: Iterable[LevelResult]) -> str:
    return text_tables.plain_table(_overviews(levels))


def _overviews(levels: Iterable[LevelResult]) -> _Table:
    rows = [_overview(level) for level in levels]
    shown = [name for name in rows[0] if name not in _OPTIONAL or any(row[name] is not None for row in rows)]
    return [{name: row[name] for name in shown} for row in rows]


def _lines(measured: LoadResult) -> Iterator[str | _Table]:
    details = measured.details
    assert details is not None
    yield f"{details.model} over {details.protocol}; output tokens counted by {measured.tokens_counted_by}"
    yield f"system: {conditions.system_words(measured.conditions)}"
    yield f"load: {conditions.workload_words(measured.conditions)}{_arrivals(details.settings)}"
    if measured.levels:
        yield _overviews(measured.levels)
        yield from filter(None, map(_waited, measured.levels))
    if measured.highest_rate is not None:
        yield f"highest rate: {measured.highest_rate}"
    if measured.highest_concurrency is not None:
        yield f"highest concurrency: {measured.highest_concurrency}"
    for level in measured.levels:
        yield from _level(level)
    yield ""
    yield from map(str, measured.findings)
    yield "formulas: --format json, `definitions`"


def _level(level: LevelResult) -> Iterator[str | _Table]:
    details = _details(level)
    yield f"\n{result.load_words(level.key)}"
    yield [{"": name, **{each: values.get(each) for each in _STATISTICS}} for name, values in _summaries(level)]
    yield "; ".join(f"{name} {text_tables.cell(value)}" for name, value in _values(level))
    for objective in details.objectives:
        yield f"objective missed: {objective.missed}" if objective.missed else f"objective met: {objective.metric}"
    if details.other_tools:
        yield "the same events by the definitions of other tools:"
        yield [_by_tool(tool, metrics) for tool, metrics in details.other_tools.items()]
    for repeat in level.repeats:
        windows = ", ".join(
            f"{name} {window.duration_s:.2f} s {window.output_tokens_per_s:.1f} tokens/s"
            for name, window in repeat.windows.items()
            if window is not None
        )
        yield f"output in the windows of repeat {repeat.repeat}: {windows}"
    if level.window is None:
        yield f"no rates ({details.window_reason})"
    else:
        yield f"rates use the window {level.window}: {details.window_reason}"
    for record in details.triton:
        for model, times in record["of"].items():
            yield f"Triton's own times, repeat {record['repeat']}, {model}: {_words(times)}"
    for record in details.gauges:
        yield f"Triton's gauges, repeat {record['repeat']}: {_words(record['of'])}; in flight by the client {text_tables.cell(record['ours'])}"
    for record in details.gpu:
        for device in record["of"]:
            yield f"GPU, repeat {record['repeat']}: {_words(device)}"


def _arrivals(settings: Mapping[str, Any]) -> str:
    """The distribution of an open loop's arrivals. Empty for a closed loop."""
    if not settings.get("request_rate"):
        return ""
    shape = f", burstiness {settings['burstiness']:g}" if "burstiness" in settings else ""
    return f"; arrivals {settings.get('request_distribution', 'poisson')}{shape}"


def _details(level: LevelResult) -> result.LevelDetails:
    assert level.details is not None
    return level.details


def _summaries(level: LevelResult) -> list[tuple[str, _Summary]]:
    """Summaries of a level that have samples, by name."""
    details, schedule = _details(level), level.schedule
    by_name = {**level.latencies, **details.summaries}
    by_name = {name: by_name.get(name, {}) for name in _ORDER} | by_name | dict(level.lengths)
    if schedule is not None:
        by_name["lag_ms"] = schedule.lag_ms
        by_name |= {"ttft_from_schedule_ms": schedule.ttft_from_schedule_ms, "response_ms": schedule.response_ms}
    return [(name, dict(summary)) for name, summary in by_name.items() if summary.get("n")]


def _values(level: LevelResult) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = [
        (name, getattr(level, name)) for name in ("requests", "failures", *metric_names.RATES.values())
    ]
    if (schedule := level.schedule) is not None:
        rows += [("achieved_rate", schedule.achieved_rate), ("most_in_flight", schedule.most_in_flight)]
        rows += [("unsent", schedule.unsent)] if schedule.unsent else []
    if level.saturated_rps is not None:
        rows += [("saturated_rps", level.saturated_rps)]
    if level.goodput is not None:
        goodput = level.goodput
        rows += [("goodput_share", goodput.share), ("goodput_requests_per_s", goodput.requests_per_s)]
        rows += [("goodput_output_tokens_per_s", goodput.output_tokens_per_s)]
    others = {"tokens_per_joule": level.tokens_per_joule, "acceptance": level.acceptance}
    return [*rows, *((name, value) for name, value in others.items() if value is not None)]


def _waited(level: LevelResult) -> str | None:
    """Latencies from the schedule of an open loop whose requests waited to be sent. None if they hardly did."""
    sent, due = (of.get("ttft_ms", {}).get("mean") for of in (level.latencies, level.from_schedule))
    if not sent or not due or due <= _MAX_WAIT * sent:
        return None
    times = zip(("TTFT", "e2e"), level.from_schedule.values(), strict=True)
    words = ", ".join(f"{name} p50 {of['p50']:.2f} ms, p90 {of['p90']:.2f} ms" for name, of in times)
    return f"{result.load_words(level.key)} from the schedule, with the wait to be sent: {words}"


def _overview(level: LevelResult) -> dict[str, object]:
    objectives = () if level.details is None else level.details.objectives
    return {
        "load": result.load_words(level.key),
        "requests": level.requests,
        "failed": level.failures,
        "TTFT p50 ms": level.latency("ttft_ms", "p50"),
        "TTFT p99 ms": level.latency("ttft_ms", "p99"),
        "TPOT p50 ms": level.latency("tpot_ms", "p50"),
        "ITL p99 ms": level.latency("itl_ms", "p99"),
        "e2e p50 ms": level.latency("e2e_ms", "p50"),
        "in tokens/s": level.input_tokens_per_s,
        "out tokens/s": level.output_tokens_per_s,
        "requests/s": level.requests_per_s,
        "goodput": level.goodput and level.goodput.share,
        "tok/J": level.tokens_per_joule,
        "accepted drafts": level.acceptance,
        "level SLOs": ("missed" if any(each.missed for each in objectives) else "met") if objectives else None,
    }


def _by_tool(tool: str, metrics: _Summary) -> dict[str, object]:
    return {
        "": tool,
        **{
            f"{name} {statistic}": metrics.get(name, {}).get(statistic)
            for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
            for statistic in ("mean", "p99")
        },
        **{name: metrics.get(name) for name in ("output_tokens_per_s", "requests_per_s")},
    }


def _words(values: _Summary) -> str:
    return ", ".join(f"{name} {text_tables.cell(value)}" for name, value in values.items() if value is not None)
