"""Computes metrics from the events of a load run: latencies, rates over windows, and the verdict of the validity gates.

`analyze` is a pure function of an event file (`measure/load/load.py`) and a tokenizer, so anyone can reproduce its
results later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from trtllm_pipeline.measure.load import compat_metrics, counters, validity, windows
from trtllm_pipeline.measure.load.conditions import Conditions
from trtllm_pipeline.measure.load.events import ClientRecord
from trtllm_pipeline.measure.load.metric_names import LEVEL_METRICS, RATES
from trtllm_pipeline.measure.load.objectives import LEAST_SEARCHED, NONE, Objectives
from trtllm_pipeline.measure.load.requests import LevelRun, LoadRun, TimedRequest, read_run
from trtllm_pipeline.measure.load.result import (
    COMPATIBLE,
    DEFINITIONS,
    RANKING,
    Goodput,
    HighestConcurrency,
    HighestRate,
    LevelDetails,
    LevelResult,
    LoadDetails,
    LoadResult,
    MeasurementFinding,
    ObjectiveResult,
    RepeatResult,
    Schedule,
)
from trtllm_pipeline.measure.load.stats import (
    LEAST_BATCHES,
    Interval,
    Summary,
    batch_interval,
    percentile_interval,
    relative_half_width,
    summary,
)
from trtllm_pipeline.measure.load.stopping import ConcurrencySearch, LoadProgress, Probe, RateSearch
from trtllm_pipeline.measure.load.windows import Window

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def analyze(events: Path, tokenizer: Tokenizer | None, objectives: Objectives = NONE) -> LoadResult:
    """All metrics of an event file."""
    run = read_run(events, tokenizer)
    header, conditions = run.records.header, run.records.conditions
    findings = tuple(validity.findings(run))
    refused = sorted({each.check for each in findings if each.severity == "invalid"})
    token_count = _token_count(run)
    anchor = header.get("anchor")
    levels = tuple(_level(run, level, objectives, refused) for level in run.levels)
    return LoadResult(
        valid=not refused,
        levels=levels,
        findings=(*findings, *_wide(levels, header["settings"].get("stop_when"))),
        conditions=Conditions(
            None if anchor is None else round(anchor["unix_ns"] / 1e9, 3),
            None if conditions is None else conditions["system"],
            None if conditions is None else conditions["workload"],
        ),
        tokens_counted_by=token_count["source"],
        highest_rate=_highest_rate(run, objectives),
        highest_concurrency=_highest_concurrency(run, objectives),
        details=LoadDetails(
            protocol=header["protocol"],
            model=header["model"],
            settings=header["settings"],
            token_count=token_count,
            clients=[_client(record) for record in run.records.clients],
            definitions={**DEFINITIONS, "as": COMPATIBLE},
        ),
    )


def _wide(levels: Iterable[LevelResult], stop_when: object) -> Iterator[MeasurementFinding]:
    """Findings for intervals that are still too wide when the limit of repeats or seconds is reached."""
    for level in levels:
        for name, wanted in stop_when.items() if isinstance(stop_when, dict) else ():
            values = [value for repeat in level.repeats if (value := repeat.value(name)) is not None]
            width = relative_half_width(values)
            if values and isinstance(wanted, float) and (width is None or width > wanted):
                known = "has no interval" if width is None else f"is known to {width:.1%}"
                yield MeasurementFinding(
                    "warning",
                    f"stop_when: {name} {known} after {len(values)} repeats, not to {wanted:.1%}: raise max_repeats or budget_s",
                    level.concurrency,
                    level.request_rate,
                    check="stop_when",
                )


class SoFar:
    """Incremental reader of a growing event file, for the choice of the next levels. It reads each record once."""

    def __init__(self, events: Path, tokenizer: Tokenizer | None, objectives: Objectives) -> None:
        self._events, self._tokenizer, self._objectives = events, tokenizer, objectives
        self._head = b""
        """The header and the prompts, which every part of the file needs."""
        self._end = 0
        self._repeats: dict[tuple[int | None, float | None], list[RepeatResult]] = {}
        self._probes: dict[float, Probe] = {}
        self._closed: dict[float, Probe] = {}

    def look(self) -> LoadProgress:
        """Read the new records and return the progress. Levels must be complete."""
        with self._events.open("rb") as file:
            file.seek(self._end)
            text = file.read()
        self._end += len(text)
        if not self._head:
            first = text.find(b'\n{"type": "request"')
            self._head, text = text[: first + 1], text[first + 1 :]
        run = read_run(self._events, self._tokenizer, self._head + text)
        self._head += b"".join(line for line in text.splitlines(True) if line.startswith(b'{"type": "prompt"'))
        for level in run.levels:
            of_level = self._repeats.setdefault((level.concurrency, level.request_rate), [])
            of_level += [_repeat(run, level, repeat) for repeat in level.repeats]
        for known, new in (
            (self._probes, _probes(run, self._objectives)),
            (self._closed, _closed(run, self._objectives)),
        ):
            for probe in new:
                before = known.get(probe.rate, Probe(probe.rate, ()))
                known[probe.rate] = Probe(probe.rate, before.rounds + probe.rounds, before.rates_rps + probe.rates_rps)
        metrics = {key: _at_headline(repeats) for key, repeats in self._repeats.items()}
        rates = (median(each.requests_per_s or 0.0 for each in metrics[key]) for key in metrics if key[0] is not None)
        return LoadProgress(
            [
                [{name: repeat.value(name) for name in LEVEL_METRICS} for repeat in repeats]
                for repeats in metrics.values()
            ],
            [*self._probes.values()],
            [*self._closed.values()],
            max(rates, default=None) or None,
        )


def _at_headline(repeats: Sequence[RepeatResult]) -> tuple[RepeatResult, ...]:
    """The repeats of a level, with the rates in its headline window."""
    name, _ = windows.headline([repeat.windows for repeat in repeats])
    return tuple(replace(repeat, **_rates(repeat.windows[name])) for repeat in repeats)


def _probes(run: LoadRun, objectives: Objectives) -> list[Probe]:
    """Results of the rates that a search tried."""
    rounds_of_level = ((level, _probe_rounds(level, objectives)) for level in run.probes)
    return [Probe(level.request_rate, rounds) for level, rounds in rounds_of_level if rounds and level.request_rate]


def _closed(run: LoadRun, objectives: Objectives) -> Iterator[Probe]:
    """Results of closed loops for a search: requested levels, and those that it tried."""
    for level in (*run.levels, *run.probes) if objectives.per_request else ():
        if level.concurrency is not None and (rounds := _probe_rounds(level, objectives)):
            yield Probe(level.concurrency, rounds, tuple(_completed_rps(level)))


def _completed_rps(level: LevelRun) -> Iterator[float]:
    """Requests per second that completed in each repeat, in its steady window if there is one."""
    for repeat, requests in level.repeats.items():
        span = level.window(repeat)
        if span is not None and span.duration_ns > 0:
            yield span.rate((request.times_ns[-1], 1) for request in span.answered(requests))


def _probe_rounds(level: LevelRun, objectives: Objectives) -> tuple[tuple[bool, ...], ...]:
    """For each round: whether each request met the objectives. Unsent requests, which were due last, did not."""
    *before, last = (
        tuple(request.met(objectives.per_request) for request in repeat if request.measured)
        for repeat in level.repeats.values()
    )
    return tuple(filter(None, (*before, last + (False,) * level.unsent)))


def _highest_rate(run: LoadRun, objectives: Objectives) -> HighestRate | None:
    wanted = run.records.header["settings"].get("find_rate")
    probes = _probes(run, objectives) if objectives.per_request else []
    if not isinstance(wanted, (int, float)) or not probes:
        return None
    tried = {
        f"{probe.rate:g}": {"requests": len(probe.met), "share": round(probe.share, 4), "kept": probe.kept(wanted)}
        for probe in sorted(probes, key=lambda probe: probe.rate)
    }
    share_and_limits = (float(wanted), dict(objectives.per_request))
    enough = [
        Probe(probe.rate, rounds)
        for probe in probes
        if (rounds := tuple(one for one in probe.rounds if len(one) >= LEAST_SEARCHED))
    ]
    if not enough:
        most = max(len(one) for probe in probes for one in probe.rounds)
        return HighestRate(
            *share_and_limits, None, None, None, tried, f"{most} requests at a rate, {LEAST_SEARCHED} are needed"
        )
    search = RateSearch(wanted=wanted)
    return HighestRate(*share_and_limits, search.bounds(enough)[0], *search.interval(enough), tried)


def _highest_concurrency(run: LoadRun, objectives: Objectives) -> HighestConcurrency | None:
    wanted = run.records.header["settings"].get("find_concurrency")
    probes = sorted(_closed(run, objectives), key=lambda probe: probe.rate)
    if not isinstance(wanted, (int, float)) or not probes:
        return None
    search = ConcurrencySearch(wanted=wanted)
    low, high = search.bounds(probes)
    tried = {
        f"{probe.rate:g}": {
            "requests": len(probe.met),
            "share": round(probe.share, 4),
            "kept": probe.kept(wanted),
            "requests_per_s": probe.completed_rps,
        }
        for probe in probes
    }
    return HighestConcurrency(float(wanted), dict(objectives.per_request), low, high, search.saturated(probes), tried)


def _token_count(run: LoadRun) -> dict[str, Any]:
    """Source of the output token counts, and the other counts."""
    answers = [request for level in run.levels for request in level.ok]
    server = sum(request.output_tokens for request in answers) if run.counted_by_server else None
    blind = run.special_tokens is None
    mismatch = sum(abs(request.output_tokens - request.encoded_again) for request in answers)
    return {
        "source": "server" if run.counted_by_server else "events" if blind else "encoded_again",
        "server": server,
        "encoded_again": None if blind else sum(request.encoded_again for request in answers),
        "events": sum(len(request.tokens) for request in answers),
        "mismatch": None if blind or not server else round(mismatch / server, 6),
    }


def _level(run: LoadRun, level: LevelRun, objectives: Objectives, refused: Sequence[str]) -> LevelResult:
    """The metrics of a level. A `refused` run keeps its observations but not its headline rates."""
    measured, good = level.measured, level.answered
    repeats = [_repeat(run, level, repeat) for repeat in level.repeats]
    name, reason = windows.headline([repeat.windows for repeat in repeats])
    chosen = [repeat.windows[name] for repeat in repeats]
    cached = [tokens for request in good if (tokens := request.record.get("cached_tokens")) is not None]
    thoughtful = [ttfa for request in good if (ttfa := request.ttfa_ms) is not None]
    rates: dict[str, Any] = {each: None if refused else _over(median, chosen, each) for each in RATES.values()}
    result = LevelResult(
        concurrency=level.concurrency,
        request_rate=level.request_rate,
        requests=len(measured),
        failures=sum(not request.ok for request in measured),
        window=None if refused else name,
        duration_s=_over(sum, chosen, "duration_s"),
        **rates,
        latencies=_latencies(good),
        lengths={
            "input_tokens_per_request": summary(count for each in good if (count := each.input_tokens) is not None),
            "output_tokens_per_request": summary(request.output_tokens for request in good),
        },
        goodput=_goodput(level, None if refused else name, objectives.per_request) if objectives.per_request else None,
        saturated_rps=level.saturated_rps,
        schedule=None if level.request_rate is None else _schedule(level),
        acceptance=_acceptance(level),
        tokens_per_joule=_over(median, repeats, "tokens_per_joule"),
        gpu_use=counters.gpu_use(level.gpus, [_energy_j(level, repeat) for repeat in level.repeats]),
        triton_use=counters.triton_use(
            level.triton, level.gauges, [_in_flight(level, repeat) for repeat in level.repeats]
        ),
        repeats=_at_headline(repeats),
        intervals={} if refused else _intervals(level, name),
    )
    not_judged = f"not judged, since the measurement is not valid: {', '.join(refused)}" if refused else None
    details = LevelDetails(
        window_reason=f"not valid: {', '.join(refused)}" if refused else reason,
        input_tokens=_over(sum, chosen, "input_tokens"),
        output_tokens=_over(sum, chosen, "output_tokens"),
        summaries={
            "stall_ms": summary(max(gaps) for request in good if (gaps := request.gaps_ms())),
            "user_tokens_per_s": summary(1e3 / tpot for request in good if (tpot := request.tpot_ms)),
            "connect_ms": summary(ms for request in measured if (ms := request.connect_ms) is not None),
            **({"ttfa_ms": summary(thoughtful)} if thoughtful else {}),
            **_of_turns(good),
        },
        answers_at_limit=sum(request.output_tokens >= request.record["max_tokens"] for request in good),
        finish_reasons=dict(Counter(end for each in good if (end := each.record.get("finish_reason")))),
        tokens_per_event=_per_event(good, slice(None)),
        tokens_in_first_event=_per_event(good, slice(1)),
        other_tools=compat_metrics.columns(good, special_tokens=run.special_tokens),
        cached_input_tokens=sum(cached) if cached else None,
        objectives=tuple(
            ObjectiveResult(each.metric, each.limit, result.bound(each.metric), not_judged or result.missed(each))
            for each in objectives.of_level
        ),
        triton=[{"repeat": each["repeat"], "of": counters.per_request(each["models"])} for each in level.triton],
        gpu=[{"repeat": each["repeat"], "of": [*map(counters.gpu_summary, each["devices"])]} for each in level.gpus],
        gauges=[
            {
                "repeat": each["repeat"],
                "ours": _in_flight(level, each["repeat"]),
                "of": counters.gauges_summary(each["samples"]),
            }
            for each in level.gauges
        ],
    )
    return replace(result, details=details)


def _of_turns(good: Sequence[TimedRequest]) -> dict[str, Summary]:
    """TTFT by turn, if there are conversations."""
    turns: dict[int, list[float]] = {}
    for request in good:
        turns.setdefault(request.record.get("turn", 1), []).append(request.ttft_ms)
    return {f"ttft_ms turn {turn}": summary(turns[turn]) for turn in sorted(turns)} if len(turns) > 1 else {}


def _in_flight(level: LevelRun, repeat: int) -> float | None:
    """Mean requests in flight, from the first send to the last end: the sum of their durations by that time."""
    spans = [(request.sent_ns, request.record["end_ns"]) for request in level.repeats.get(repeat, ())]
    if not spans:
        return None
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    return round(sum(end - start for start, end in spans) / whole, 3) if whole else None


def _acceptance(level: LevelRun) -> float | None:
    of_server = [(each["drafted_tokens"], each["accepted_tokens"]) for each in level.speculation]
    records = [request.record for request in level.answered]
    counts = of_server or [(each.get("drafted_tokens") or 0, each.get("accepted_tokens") or 0) for each in records]
    drafted, accepted = (sum(pair[place] for pair in counts) for place in (0, 1))
    return accepted / drafted if drafted else None


def _energy_j(level: LevelRun, repeat: int) -> float | None:
    """GPU energy in the whole window of a repeat."""
    whole = level.spans[repeat]["whole"]
    records = [each for each in level.gpus if each["repeat"] == repeat]
    if whole is None or whole.duration_ns <= 0 or not records:
        return None
    return counters.energy_j(records, whole.start_ns, whole.end_ns)


def _repeat(run: LoadRun, level: LevelRun, repeat: int) -> RepeatResult:
    requests, joules = level.repeats[repeat], _energy_j(level, repeat)
    measured = [request for request in requests if request.measured]
    good = [request for request in measured if request.answered]
    anchor = run.records.header.get("anchor")
    sent_ns = min((request.sent_ns for request in measured), default=0)
    started_s = None
    if anchor is not None and measured:
        started_s = round((anchor["unix_ns"] + sent_ns - anchor["monotonic_ns"]) / 1e9, 3)
    windows_by_name = {
        name: None if span is None else span.window(requests) for name, span in level.spans[repeat].items()
    }
    whole = windows_by_name["whole"]
    return RepeatResult(
        repeat=repeat,
        started_s=started_s,
        tokens_per_joule=round(whole.output_tokens / joules, 4) if joules and whole else None,
        windows=windows_by_name,
        latencies=_latencies(good),
    )


def _latencies(good: Sequence[TimedRequest]) -> dict[str, Summary]:
    return {
        "ttft_ms": summary(request.ttft_ms for request in good),
        "tpot_ms": summary(tpot for request in good if (tpot := request.tpot_ms) is not None),
        "itl_ms": summary((value for request in good for value in request.itl_ms()), requests=len(good)),
        "icl_ms": summary((value for request in good for value in request.gaps_ms()), requests=len(good)),
        "e2e_ms": summary(request.e2e_ms for request in good),
    }


def _rates(window: Window | None) -> dict[str, Any]:
    return {name: getattr(window, name, None) for name in ("duration_s", *RATES.values())}


def _over(
    how: Callable[[Iterable[float]], float], windows: Sequence[Window | RepeatResult | None], name: str
) -> float | None:
    """`how` applied to one field of all windows or repeats. None if one of them lacks it."""
    values = [getattr(window, name) for window in windows]
    return None if None in values else round(how(values), 3)


def _per_event(good: Sequence[TimedRequest], which: slice) -> float:
    """Tokens per content event. `which` selects the events of each request."""
    tokens = [count for request in good for count in request.tokens[which]]
    return round(sum(tokens) / max(1, len(tokens)), 3)


def _goodput(level: LevelRun, window: str | None, limits_ms: Mapping[str, float]) -> Goodput:
    rates, token_rates = [], []
    for repeat, requests in level.repeats.items():
        span = None if window is None else level.spans[repeat][window]
        if span is None or not span.duration_ns:
            continue
        good = [request for request in span.answered(requests) if request.met(limits_ms)]
        rates.append(span.rate((request.times_ns[-1], 1) for request in good))
        token_rates.append(span.rate(each for request in good for each in windows.written(request)))
    met = sum(request.met(limits_ms) for request in level.measured)
    scheduled = len(level.measured) + level.unsent
    share = round(met / scheduled, 6) if scheduled else None
    per_s = (round(median(each), 3) if each else None for each in (rates, token_rates))
    return Goodput(dict(limits_ms), share, *per_s)


def _intervals(level: LevelRun, window: str) -> dict[str, Interval]:
    """Intervals from the requests: see `intervals` in DEFINITIONS."""
    tokens: list[float] = []
    ends: list[float] = []
    for repeat, requests in level.repeats.items():
        span = level.spans[repeat][window]
        if span is None or span.duration_ns <= 0:
            return {}
        good = span.answered(requests)
        parts = span.parts(len(good), level.concurrency)
        tokens += span.batches((each for request in good for each in windows.written(request)), parts)
        ends += span.batches(((request.times_ns[-1], 1) for request in good), parts)
    samples = {
        "ttft": [request.ttft_ms for request in level.answered],
        "tpot": [tpot for request in level.answered if (tpot := request.tpot_ms) is not None],
        "e2e": [request.e2e_ms for request in level.answered],
    }
    found: dict[str, Interval | None] = {}
    if len(tokens) >= LEAST_BATCHES:
        found = {"output_tps": batch_interval(tokens), "rps": batch_interval(ends)}
    for name, values in samples.items():
        found |= {f"{name}_p{share}": percentile_interval(values, share / 100) for share in (50, 99)}
    if (tpot_ms := found["tpot_p50"]) is not None and tpot_ms[0]:
        found["user_tps"] = (1e3 / tpot_ms[1], 1e3 / tpot_ms[0])
    return {name: (round(of[0], 3), round(of[1], 3)) for name in RANKING if (of := found.get(name)) is not None}


def _schedule(level: LevelRun) -> Schedule:
    rates: list[float] = []
    most = 0
    for repeat in level.repeats.values():
        requests = [request for request in repeat if request.measured]
        sent = sorted(request.sent_ns for request in requests)
        if len(sent) > 1 and sent[-1] > sent[0]:
            rates.append((len(sent) - 1) * 1e9 / (sent[-1] - sent[0]))
        ends = [(request.record["end_ns"], -1) for request in requests]
        changes = sorted([*((at_ns, 1) for at_ns in sent), *ends])
        most = max(most, *accumulate((change for _, change in changes), initial=0))
    return Schedule(
        achieved_rate=round(median(rates), 3) if rates else None,
        lag_ms=summary(request.lag_ms for request in level.measured),
        ttft_from_schedule_ms=summary(request.ttft_ms + request.lag_ms for request in level.answered),
        response_ms=summary(request.e2e_ms + request.lag_ms for request in level.answered),
        most_in_flight=most,
        unsent=level.unsent,
    )


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
