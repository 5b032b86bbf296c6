"""The result of a load run as its readers see it: levels with their figures, findings, conditions.

The one reader of perf.json. Reports keep the same records, see docs/formats.md. What is not what it should be counts as
missing (None or empty): a damaged file must not take a report with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from trtllm_pipeline.bench.conditions import Conditions
from trtllm_pipeline.bench.stats import PERCENTILE_METHOD
from trtllm_pipeline.domain import Json

DEFINITIONS: Final = {
    "ttft_ms": "first content - sent",
    "tpot_ms": "(last content - first content) / tokens of the content events after the first, one value per request; "
    "undefined when all tokens arrive in one event",
    "itl_ms": "gap between content events / tokens in the later one, weighted by those tokens, pooled",
    "icl_ms": "gap between content events, pooled",
    "e2e_ms": "last content - sent",
    "ttfa_ms": "first content that is not reasoning - sent, of the answers that reason",
    "stall_ms": "longest gap between content events of a request",
    "user_tokens_per_s": "1 / TPOT, one value per request",
    "connect_ms": "time to connect, of the requests that opened a connection; part of no other time",
    "ttft_from_schedule_ms": "open loop: first content - scheduled",
    "response_ms": "open loop: last content - scheduled",
    "lag_ms": "open loop: sent - scheduled",
    "achieved_rate": "open loop: (requests sent - 1) / seconds from the first to the last sending",
    "goodput": "requests that met every objective / requests scheduled, failed ones included; in an open loop times "
    "count from the schedule",
    "n": "output tokens of a request, counted by token_count.source. server: by the server's num_output_tokens; tokens "
    "without text belong to the next content event, and those after the last one count in n alone; or by its usage, "
    "shared out over the events as encoding again would, without a tokenizer by characters. encoded_again: the "
    "whole text encoded again without special tokens; a token belongs to the event that brought its last character. "
    "events: no tokenizer, and the server does not count, so each content event is taken as one token",
    "token_count": "mismatch = sum over the answers of |server - encoded again| / tokens the server counts",
    "input_tokens": "prompt encoded with the special tokens the tokenizer adds; without a tokenizer as the server counts",
    "whole": "first send -> last content of the measured requests; tokens of the successful ones",
    "active": "time with at least one measured request in flight; tokens of the successful ones",
    "steady": "longest time with at least 95 % of the wanted requests in flight; tokens by their own time of arrival, "
    "input tokens when the first content arrives; a slot between two requests counts as in flight for up to 5 ms. "
    "Open loop: first to last measured sending",
    "headline": "steady when it is at least 30 s and half of the whole window, else whole",
    "output_tokens_per_s": "output tokens / seconds of the headline window; median of the repeats",
    "input_tokens_per_s": "input tokens / seconds of the headline window; median of the repeats",
    "requests_per_s": "successful requests / seconds of the headline window; median of the repeats",
    "percentiles": PERCENTILE_METHOD,
}
"""Formula of each figure `analyze` returns. Times are CLOCK_MONOTONIC, of the arrival of the bytes."""

NAME: Final = "perf.json"
CLIENT_ERROR: Final = "info: error of the load client by its self-test"
LENGTHS: Final = ("input_tokens_per_request", "output_tokens_per_request")
RATES: Final = {"output_tps": "output_tokens_per_s", "input_tps": "input_tokens_per_s", "rps": "requests_per_s"}
"""Name of a rate in comparisons and objectives -> its field here."""


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """A measured quantity, its unit and its formula."""

    name: str
    unit: str
    formula: str


_LATENCY_NAMES: Final = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "itl_ms": "inter-token latency",
    "icl_ms": "inter-chunk latency",
    "e2e_ms": "end-to-end latency",
}
LATENCIES: Final = tuple(_LATENCY_NAMES)
METRICS: Final = (
    *(MetricDefinition(name, "ms", f"{words}: {DEFINITIONS[name]}") for name, words in _LATENCY_NAMES.items()),
    MetricDefinition("output_tokens_per_s", "tokens/s", DEFINITIONS["output_tokens_per_s"]),
    MetricDefinition("input_tokens_per_s", "tokens/s", DEFINITIONS["input_tokens_per_s"]),
    MetricDefinition("requests_per_s", "requests/s", DEFINITIONS["requests_per_s"]),
    MetricDefinition("goodput", "0 to 1", DEFINITIONS["goodput"]),
    *(
        MetricDefinition(name, "", DEFINITIONS[name])
        for name in ("n", "input_tokens", "headline", "steady", "whole", "percentiles")
    ),
)
"""Metrics of a level, and the terms that their formulas use."""

_Summaries = Mapping[str, Mapping[str, float]]
"""Name -> statistic ("mean", "p50", ..., "n") -> value."""


def load_key(concurrency: int | None, request_rate: float | None) -> str:
    """What a level is called: `4` requests in flight, or `2.5/s`."""
    return str(concurrency) if request_rate is None else f"{request_rate:g}/s"


def load_words(key: str) -> str:
    """A level's key in words: "concurrency 4", "2.5 requests/s"."""
    return f"{key.removesuffix('/s')} requests/s" if key.endswith("/s") else f"concurrency {key}"


def latency_of(name: str) -> tuple[str, str]:
    """`ttft_p99` -> ("ttft_ms", "p99")."""
    stem, _, statistic = name.rpartition("_")
    return f"{stem}_ms", statistic


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Rates over the level's window, and latencies in ms of the measured requests that were answered."""

    duration_s: float | None = None
    input_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    requests_per_s: float | None = None
    latencies: _Summaries = field(default_factory=dict)
    """LATENCIES -> statistic -> milliseconds."""

    def latency(self, name: str, statistic: str) -> float | None:
        """One statistic of one latency, in milliseconds."""
        return self.latencies.get(name, {}).get(statistic)

    def value(self, name: str) -> float | None:
        """The figure called `ttft_p99`, `tpot_p50`, ... in ms, or one of RATES."""
        if name in RATES:
            rate: float | None = getattr(self, RATES[name])
            return rate
        return self.latency(*latency_of(name))

    def rates(self) -> dict[str, float | None]:
        """Seconds of the window, and its rates, by field."""
        return {name: getattr(self, name) for name in _RATES}


_RATES: Final = ("duration_s", "input_tokens_per_s", "output_tokens_per_s", "requests_per_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatResult(Figures):
    """One repeat of a level, over the same kind of window."""

    started_s: float | None = None
    """Unix time of its first measured request."""

    def to_json(self) -> dict[str, Json]:
        """As in report.json."""
        latencies: dict[str, Json] = {name: dict(values) for name, values in self.latencies.items()}
        return {"started_s": self.started_s, **self.rates(), **latencies}


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met every objective."""

    objectives_ms: Mapping[str, float] = field(default_factory=dict)
    """ "ttft", "tpot", "e2e" -> milliseconds."""
    share: float | None = None
    """Of the requests scheduled, 0 to 1."""
    requests_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelResult(Figures):
    """What was measured at one concurrency, or in an open loop at one request rate: the other is None."""

    concurrency: int | None = None
    request_rate: float | None = None
    """Requests per second on average, however many are in flight."""
    requests: int | None = None
    """Measured requests, all repeats together."""
    failures: int | None = None
    window: str | None = None
    """What the rates are over: "steady", or "whole" where there was no steady window long enough."""
    repeats: tuple[RepeatResult, ...] = ()
    goodput: Goodput | None = None
    """None without objectives."""
    lengths: _Summaries = field(default_factory=dict)
    """LENGTHS -> statistic -> tokens, of the measured requests that were answered."""

    @property
    def key(self) -> str:
        """What it is called in comparisons: `4` requests in flight, or `2.5/s`."""
        return load_key(self.concurrency, self.request_rate)

    def to_json(self) -> dict[str, Json]:
        """As in report.json."""
        return {
            "concurrency": self.concurrency,
            "request_rate": self.request_rate,
            "requests": self.requests,
            "failures": self.failures,
            **self.rates(),
            "headline": {"window": self.window},
            **{name: dict(values) for name, values in (*self.latencies.items(), *self.lengths.items())},
            "goodput": None if self.goodput is None else asdict(self.goodput),
            "repeats": [repeat.to_json() for repeat in self.repeats],
        }


@dataclass(frozen=True, slots=True)
class MeasurementFinding:
    """A finding of a validity gate, see `bench/validity.py`."""

    severity: str
    """ "invalid", "warning" or "info"."""
    message: str
    concurrency: int | None = None
    request_rate: float | None = None

    def __str__(self) -> str:
        """`warning: 1 of 40 requests failed, ... (concurrency 4)`."""
        everywhere = self.concurrency is None and self.request_rate is None
        place = "" if everywhere else f" ({load_words(load_key(self.concurrency, self.request_rate))})"
        return f"{self.severity}: {self.message}{place}"


@dataclass(frozen=True, slots=True)
class LoadResult:
    """A perf.json, as far as reports and comparisons read it."""

    valid: bool
    levels: tuple[LevelResult, ...]
    """By rising concurrency, then by rising request rate; also of a measurement that is not valid."""
    findings: tuple[MeasurementFinding, ...]
    conditions: Conditions
    tokens_counted_by: str | None = None
    """Who counted output tokens: "server", "encoded_again" or "events"."""
    client_error_ms: tuple[float, float] | None = None
    """p50 and p99 of the load client's own error of TTFT, by its self-test."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Findings, and the client's own error, as lines of text."""
        error = self.client_error_ms
        tested = [] if error is None else [f"{CLIENT_ERROR}: TTFT p50 {error[0]:.3f} ms, p99 {error[1]:.3f} ms"]
        return (*map(str, self.findings), *tested)

    @staticmethod
    def read(data: Mapping[str, Any]) -> LoadResult:
        """What is in a perf.json, by the content of the file."""
        tested = _object(_object(_object(data.get("client")).get("self_test")).get("ttft_error_ms"))
        p50, p99 = (_number(tested.get(name)) for name in ("p50", "p99"))
        source = _object(data.get("token_count")).get("source")
        return LoadResult(
            valid=data.get("valid") is not False,
            levels=levels_of(data.get("levels")),
            findings=tuple(_finding(each) for each in _objects(data.get("findings")) if "message" in each),
            conditions=Conditions.read(data),
            tokens_counted_by=source if isinstance(source, str) else None,
            client_error_ms=None if p50 is None or p99 is None else (p50, p99),
        )


def levels_of(data: object) -> tuple[LevelResult, ...]:
    """The levels in a perf.json, or of a cell in a report.json; what is not one is left out."""
    levels = [level for entry in _objects(data) if (level := _level(entry)) is not None]
    return tuple(
        sorted(levels, key=lambda level: (level.request_rate is not None, level.request_rate or level.concurrency))
    )


def _level(entry: Mapping[str, Any]) -> LevelResult | None:
    concurrency, rate = count_of(entry.get("concurrency")), _number(entry.get("request_rate"))
    if concurrency is None and rate is None:
        return None
    window = _object(entry.get("headline")).get("window")
    window = window if isinstance(window, str) else None
    goodput = entry.get("goodput")
    return LevelResult(
        concurrency=concurrency,
        request_rate=rate,
        requests=count_of(entry.get("requests")),
        failures=count_of(entry.get("failures")),
        window=window,
        repeats=tuple(_repeat(each, window) for each in _objects(entry.get("repeats"))),
        goodput=_goodput(goodput) if isinstance(goodput, dict) else None,
        lengths=_summaries(entry, LENGTHS),
        latencies=_summaries(entry, LATENCIES),
        **{name: _number(entry.get(name)) for name in _RATES},
    )


def _repeat(entry: Mapping[str, Any], window: str | None) -> RepeatResult:
    """A repeat as perf.json has it, with rates for each window, or as a report has it."""
    rates = _object(entry.get(window)) if window is not None else {}
    rates = rates or entry
    return RepeatResult(
        started_s=_number(entry.get("started_s")),
        latencies=_summaries(entry, LATENCIES),
        **{name: _number(rates.get(name)) for name in _RATES},
    )


def _goodput(entry: Mapping[str, Any]) -> Goodput:
    share, rate = (_number(entry.get(name)) for name in ("share", "requests_per_s"))
    return Goodput(numbers_of(entry.get("objectives_ms")), share, rate)


def _finding(entry: Mapping[str, Any]) -> MeasurementFinding:
    severity, message = str(entry.get("severity", "warning")), str(entry["message"])
    return MeasurementFinding(severity, message, count_of(entry.get("concurrency")), _number(entry.get("request_rate")))


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _objects(value: object) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _summaries(entry: Mapping[str, Any], names: tuple[str, ...]) -> _Summaries:
    return {name: numbers_of(entry.get(name)) for name in names if entry.get(name)}


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def count_of(value: object) -> int | None:
    """`value`, if it is an integer."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def numbers_of(data: object) -> dict[str, float]:
    """The entries of an object that are finite numbers."""
    entries = data.items() if isinstance(data, dict) else ()
    return {str(name): number for name, value in entries if (number := _number(value)) is not None}
