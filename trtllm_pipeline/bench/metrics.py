"""From the events of a load run to metrics: latencies, rates over windows, and the verdict of the validity gates.

`analyze` is a pure function of an event file (`bench/load.py`) and a tokenizer: anything it reports can be computed
again later, or by somebody else.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any, Final

from trtllm_pipeline.bench import compat_metrics, counters, validity
from trtllm_pipeline.bench.events import ClientRecord, Header, level_of
from trtllm_pipeline.bench.prompts import Tokenizer
from trtllm_pipeline.bench.requests import LoadRun, TimedRequest, read_run
from trtllm_pipeline.bench.result import DEFINITIONS, RATES
from trtllm_pipeline.bench.stats import Summary, summary

HANDOVER_NS: Final = 5_000_000
STEADY_SHARE: Final = 0.95
HEADLINE_S: Final = 30.0


def analyze(events: Path, tokenizer: Tokenizer | None, objectives: Mapping[str, float] | None = None) -> dict[str, Any]:
    """All metrics of an event file: the content of perf.json. `objectives` are milliseconds by "ttft", "tpot", "e2e"."""
    run = read_run(events, tokenizer)
    header = run.records.header
    findings = validity.findings(run)
    levels = [_level(run, load, repeats, objectives or {}) for load, repeats in run.levels().items()]
    refused = sorted({finding["check"] for finding in findings if finding["severity"] == "invalid"})
    if refused:
        levels = [_without_headline(level, f"not valid: {', '.join(refused)}") for level in levels]
    return {
        "schema": 1,
        "valid": not refused,
        "protocol": header["protocol"],
        "model": header["model"],
        "settings": header["settings"],
        **_conditions(run),
        "levels": levels,
        "findings": [_placed(finding) for finding in findings],
        "token_count": _token_count(run),
        "client": {
            "transport": "asyncio; times of arrival from the kernel (SO_TIMESTAMPNS), over TLS of the read",
            "self_test": header.get("self_test"),
            "levels": [_client(record) for record in run.records.clients],
        },
        "definitions": {**DEFINITIONS, "as": compat_metrics.DEFINITIONS},
    }


def _conditions(run: LoadRun) -> dict[str, Any]:
    """When, on what and under which load it was measured; null for what the event file does not say."""
    found = run.records.conditions
    anchor = run.records.header.get("anchor")
    measured_s = None if anchor is None else round(float(anchor["unix_ns"]) / 1e9, 3)
    return {
        "measured_s": measured_s,
        **(
            {"system": None, "workload": None}
            if found is None
            else {name: found[name] for name in ("system", "workload")}
        ),
    }


def _token_count(run: LoadRun) -> dict[str, Any]:
    """Who counted the output tokens of the measured answers, and what the other count says."""
    answers = [request for request in run.requests if request.measured and request.ok]
    server = sum(request.output_tokens for request in answers) if run.counted_by_server else None
    blind = run.special_tokens is None
    return {
        "source": "server" if run.counted_by_server else "events" if blind else "encoded_again",
        "server": server,
        "encoded_again": None if blind else sum(request.encoded_again for request in answers),
        "events": sum(len(request.tokens) for request in answers),
        "mismatch": None if blind or not server else round(_mismatch(answers) / server, 6),
    }


def _mismatch(requests: Iterable[TimedRequest]) -> int:
    return sum(abs(request.output_tokens - request.encoded_again) for request in requests)


def _without_headline(level: Mapping[str, Any], reason: str) -> dict[str, Any]:
    """A level of a run that did not pass the gate: what was observed stays, the figures people quote do not."""
    return {**level, "headline": {"window": None, "reason": reason}, **dict.fromkeys(RATES.values())}


def _placed(finding: dict[str, Any]) -> dict[str, Any]:
    """A finding with its level told as an open or a closed loop's."""
    if not isinstance(finding["concurrency"], float):
        return finding
    return {**finding, "concurrency": None, "request_rate": finding["concurrency"]}


def _level(
    run: LoadRun, load: float, repeats: Mapping[int, Sequence[TimedRequest]], objectives: Mapping[str, float]
) -> dict[str, Any]:
    closed = isinstance(load, int)
    windows: list[dict[str, Any]] = []
    for repeat, requests in repeats.items():
        whole, steady = _whole(requests), _steady(requests, load) if closed else _while_sending(requests)
        latencies = _latencies([request for request in requests if request.measured and request.answered])
        started_s = _started_s(requests, run.records.header)
        active = _active(requests)
        windows.append(
            {"repeat": repeat, "started_s": started_s, "whole": whole, "active": active, "steady": steady, **latencies}
        )
    name, reason = _headline(windows)
    chosen = [window[name] for window in windows]
    measured = [request for requests in repeats.values() for request in requests if request.measured]
    good = [request for request in measured if request.answered]
    at_limit = sum(request.output_tokens >= request.record["max_tokens"] for request in good)
    here = {"concurrency": load if closed else None, "request_rate": None if closed else load}
    result: dict[str, Any] = {
        **here,
        "requests": len(measured),
        "failures": sum(not request.ok for request in measured),
        "headline": {"window": name, "reason": reason},
        **{key: _whole_or_none(sum, chosen, key) for key in ("duration_s", "input_tokens", "output_tokens")},
        **{key: _whole_or_none(median, chosen, key) for key in RATES.values()},
        **_latencies(good),
        "stall_ms": summary(max(gaps) for request in good if (gaps := request.gaps_ms())),
        "user_tokens_per_s": summary(1e3 / tpot for request in good if (tpot := request.tpot_ms)),
        "connect_ms": summary(_connect_ms(request) for request in measured if request.record.get("connected_ns")),
        "input_tokens_per_request": summary(count for request in good if (count := request.input_tokens) is not None),
        "output_tokens_per_request": summary(request.output_tokens for request in good),
        "answers_at_limit": at_limit,
        "finish_reasons": dict(Counter(end for request in good if (end := request.record.get("finish_reason")))),
        "tokens_per_event": _per_event(good, slice(None)),
        "tokens_in_first_event": _per_event(good, slice(1)),
        "repeats": windows,
        "as": compat_metrics.columns(good, special_tokens=run.special_tokens),
    }
    thoughtful = [ttfa for request in good if (ttfa := request.ttfa_ms) is not None]
    if thoughtful:
        result["ttfa_ms"] = summary(thoughtful)
    cached = [tokens for request in good if (tokens := request.record.get("cached_tokens")) is not None]
    if cached:
        result["cached_input_tokens"] = sum(cached)
    if not closed:
        result["schedule"] = _schedule(repeats, good)
    if objectives:
        met = sum(request.met(objectives) for request in measured)
        seconds = sum(window["whole"]["duration_s"] for window in windows)
        result["goodput"] = {
            "objectives_ms": dict(objectives),
            "share": round(met / len(measured), 6) if measured else None,
            "requests_per_s": round(met / seconds, 3) if seconds > 0 else None,
        }
    for each in run.records.triton:
        if level_of(each) == load:
            result.setdefault("triton", []).append({"repeat": each["repeat"], "of": counters.triton_summary(each)})
    for record in run.records.gpus:
        if level_of(record) == load:
            result.setdefault("gpu", []).append({"repeat": record["repeat"], "of": counters.gpu_summary(record)})
    return result


def _whole_or_none(how: Callable[[Iterable[float]], float], windows: Sequence[Any], key: str) -> float | None:
    """`how` of one figure of all windows; None when one of them lacks it."""
    values = [window[key] for window in windows]
    return None if None in values else round(how(values), 3)


def _connect_ms(request: TimedRequest) -> float:
    return ((request.record.get("connected_ns") or 0) - request.record["scheduled_ns"]) / 1e6


def _per_event(good: Sequence[TimedRequest], which: slice) -> float:
    """Tokens per content event, of the events `which` of each request."""
    tokens = [count for request in good for count in request.tokens[which]]
    return round(sum(tokens) / max(1, len(tokens)), 3)


def _schedule(repeats: Mapping[int, Sequence[TimedRequest]], good: Sequence[TimedRequest]) -> dict[str, Any]:
    """How an open loop went: was it kept, and what users waited who came when they were due."""
    measured = [[request for request in requests if request.measured] for requests in repeats.values()]
    rates: list[float] = []
    most = 0
    for requests in measured:
        sent = sorted(request.sent_ns for request in requests)
        if len(sent) > 1 and sent[-1] > sent[0]:
            rates.append((len(sent) - 1) * 1e9 / (sent[-1] - sent[0]))
        ends = [(request.record["end_ns"], -1) for request in requests]
        changes = sorted([*((at_ns, 1) for at_ns in sent), *ends])
        most = max(most, *accumulate((change for _, change in changes), initial=0))
    return {
        "achieved_rate": round(median(rates), 3) if rates else None,
        "lag_ms": summary(request.lag_ms for requests in measured for request in requests),
        "ttft_from_schedule_ms": summary(request.ttft_ms + request.lag_ms for request in good),
        "response_ms": summary(request.e2e_ms + request.lag_ms for request in good),
        "most_in_flight": most,
    }


def _latencies(good: Sequence[TimedRequest]) -> dict[str, Summary]:
    return {
        "ttft_ms": summary(request.ttft_ms for request in good),
        "tpot_ms": summary(tpot for request in good if (tpot := request.tpot_ms) is not None),
        "itl_ms": summary(value for request in good for value in request.itl_ms()),
        "icl_ms": summary(value for request in good for value in request.gaps_ms()),
        "e2e_ms": summary(request.e2e_ms for request in good),
    }


def _started_s(requests: Sequence[TimedRequest], header: Header) -> float | None:
    """Unix time of the first measured request: tells which of two measurements came first."""
    anchor = header.get("anchor")
    sent_ns = min((request.sent_ns for request in requests if request.measured), default=None)
    if anchor is None or sent_ns is None:
        return None
    return round(float(anchor["unix_ns"] + sent_ns - anchor["monotonic_ns"]) / 1e9, 3)


def _window(duration_ns: int, *, input_tokens: int | None, output_tokens: int, requests: int) -> dict[str, Any]:
    duration_s = duration_ns / 1e9
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    return {
        "duration_s": round(duration_s, 6),
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "requests": requests,
        "input_tokens_per_s": None if input_tokens is None else round(input_tokens * per_s, 3),
        "output_tokens_per_s": round(output_tokens * per_s, 3),
        "requests_per_s": round(requests * per_s, 3),
    }


def _input_tokens(requests: Iterable[TimedRequest]) -> int | None:
    """Of all `requests`; None when those of one are not known."""
    counts = [request.input_tokens for request in requests]
    return None if None in counts else sum(count for count in counts if count is not None)


def _whole(requests: Sequence[TimedRequest]) -> dict[str, Any]:
    """First send to last content of the measured requests."""
    measured = [request for request in requests if request.measured]
    good = [request for request in measured if request.answered]
    start_ns = min((request.sent_ns for request in measured), default=0)
    return _window(
        max((request.times_ns[-1] for request in good), default=start_ns) - start_ns,
        input_tokens=_input_tokens(good),
        output_tokens=sum(request.output_tokens for request in good),
        requests=len(good),
    )


def _active(requests: Sequence[TimedRequest]) -> dict[str, Any]:
    """The time in which at least one measured request was in flight."""
    measured = [request for request in requests if request.measured]
    good = [request for request in measured if request.answered]
    busy_ns = until_ns = 0
    for sent_ns, end_ns in sorted((request.sent_ns, int(request.record["end_ns"])) for request in measured):
        busy_ns += max(0, end_ns - max(sent_ns, until_ns))
        until_ns = max(until_ns, end_ns)
    return _window(
        busy_ns,
        input_tokens=_input_tokens(good),
        output_tokens=sum(request.output_tokens for request in good),
        requests=len(good),
    )


def steady_window(
    slots: Iterable[Iterable[tuple[int, int]]], *, concurrency: float, not_before_ns: int
) -> tuple[int, int] | None:
    """Longest time in which at least 95 % of `concurrency` slots were busy, as (start, end) in ns; None without one.

    `slots` gives each slot's (sent, ended) times in order. The short time a slot needs to send its next request
    counts as busy, or every request would end the window.
    """
    changes: list[tuple[int, int]] = []
    for spans in slots:
        busy: list[list[int]] = []
        for start_ns, end_ns in spans:
            if busy and start_ns - busy[-1][1] <= HANDOVER_NS:
                busy[-1][1] = end_ns
            else:
                busy.append([start_ns, end_ns])
        for start_ns, end_ns in busy:
            changes += [(max(start_ns, not_before_ns), 1), (max(end_ns, not_before_ns), -1)]
    wanted = math.ceil(STEADY_SHARE * concurrency)
    best: tuple[int, int] | None = None
    level, since_ns = 0, 0
    for now_ns, change in sorted(changes):
        before, level = level, level + change
        if before < wanted <= level:
            since_ns = now_ns
        elif level < wanted <= before and (best is None or now_ns - since_ns > best[1] - best[0]):
            best = (since_ns, now_ns)
    return best if best is not None and best[1] > best[0] else None


def _steady(requests: Sequence[TimedRequest], concurrency: float) -> dict[str, Any] | None:
    slots: dict[int, list[tuple[int, int]]] = {}
    for request in requests:
        slots.setdefault(request.record["slot"], []).append((request.sent_ns, request.record["end_ns"]))
    start_ns = min((request.sent_ns for request in requests if request.measured), default=0)
    window = steady_window(slots.values(), concurrency=concurrency, not_before_ns=start_ns)
    return None if window is None else _between(requests, *window)


def _while_sending(requests: Sequence[TimedRequest]) -> dict[str, Any] | None:
    """First to last measured sending of an open loop: without what drains after it."""
    sent = [request.sent_ns for request in requests if request.measured]
    return _between(requests, min(sent), max(sent)) if len(sent) > 1 else None


def _between(requests: Sequence[TimedRequest], start_ns: int, end_ns: int) -> dict[str, Any]:
    """What happened from `start_ns` to `end_ns`, warm-up requests included: each token at its own time."""
    good = [request for request in requests if request.answered]
    return _window(
        end_ns - start_ns,
        input_tokens=_input_tokens(request for request in good if start_ns < request.times_ns[0] <= end_ns),
        output_tokens=sum(
            count
            for request in good
            for time_ns, count in zip(request.times_ns, request.tokens, strict=True)
            if start_ns < time_ns <= end_ns
        ),
        requests=sum(start_ns < request.times_ns[-1] <= end_ns for request in good),
    )


def _headline(windows: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Which window the level's figures are of, and why."""
    for window in windows:
        if window["steady"] is None:
            return "whole", "no steady window: the requests in flight never reached the wanted number"
        steady_s, whole_s = window["steady"]["duration_s"], window["whole"]["duration_s"]
        if steady_s < HEADLINE_S:
            return (
                "whole",
                f"the steady window is {steady_s:.1f} s, less than {HEADLINE_S:g} s: ramp-up and drain are included",
            )
        if steady_s < whole_s / 2:
            return "whole", f"the steady window is {steady_s:.1f} s, less than half of {whole_s:.1f} s"
    return "steady", "every repeat has a steady window that is long enough"


def _client(record: ClientRecord) -> dict[str, Any]:
    lag_ms = sorted(value / 1e6 for value in record["lag_ns"])
    return {
        "concurrency": record["concurrency"],
        "request_rate": record.get("request_rate"),
        "repeat": record["repeat"],
        "worker": record.get("worker", 0),
        "cpu_share": round(record["cpu_ns"] / max(1, record["wall_ns"]), 3),
        "loop_lag_ms": summary(lag_ms),
    }
