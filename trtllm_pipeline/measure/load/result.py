"""The result of a load run: levels with their metrics, findings, conditions. The only writer and reader of perf.json.

`measure/load/metrics.py` computes the records, reports store them, see docs/reference/formats.md. Values of a wrong
type in a file count as missing (None or empty), so that a damaged file does not break a report. `details` are not read
back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any, Final, TypeVar

from trtllm_pipeline import PACKAGE
from trtllm_pipeline.base import Json
from trtllm_pipeline.measure.load.conditions import Conditions
from trtllm_pipeline.measure.load.metric_names import LATENCIES, LATENCY_NAMES, RATES
from trtllm_pipeline.measure.load.objectives import Objective
from trtllm_pipeline.measure.load.stats import (
    LEAST_P99,
    LEAST_REPEATS,
    PERCENTILE_METHOD,
    Interval,
    Summary,
    repeats_interval,
)
from trtllm_pipeline.measure.load.windows import WAVES, Window

_TABLES: Final = json.loads((PACKAGE / "data" / "load_metrics.json").read_text(encoding="utf-8"))
_CONSTANTS: Final = {
    "waves": WAVES,
    "least_repeats": LEAST_REPEATS,
    "percentile_method": PERCENTILE_METHOD,
    "least_p99": LEAST_P99,
}
DEFINITIONS: Final[dict[str, str]] = {name: text.format(**_CONSTANTS) for name, text in _TABLES["formulas"].items()}
"""Formula of each metric that `analyze` computes. Times are CLOCK_MONOTONIC, of the arrival of the bytes."""
COMPATIBLE: Final[dict[str, str]] = _TABLES["as"]
"""Other tool -> its formulas, in its version of late 2026, and where it uses another timestamp."""

PERF_FILE: Final = "perf.json"
RANKING: Final = ("output_tps", "rps", "ttft_p50", "tpot_p50", "e2e_p50", "user_tps", "ttft_p99", "tpot_p99", "e2e_p99")
"""Metrics of a level that have intervals."""
LENGTHS: Final = ("input_tokens_per_request", "output_tokens_per_request")


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """A measured quantity, its unit and its formula."""

    name: str
    unit: str
    formula: str


LOAD_METRICS: Final = (
    *(MetricDefinition(name, "ms", f"{words}: {DEFINITIONS[name]}") for name, words in LATENCY_NAMES.items()),
    *(MetricDefinition(name, unit, DEFINITIONS[name]) for name, unit in _TABLES["units"].items()),
)
"""Metrics of a level, and the terms that their formulas use."""

R = TypeVar("R")
_Summaries = Mapping[str, Mapping[str, float | None]]
"""Name -> statistic ("mean", "p50", ..., "n") -> value."""


def load_key(concurrency: int | None, request_rate: float | None) -> str:
    """Key of a level: `4` requests in flight, or `2.5/s`."""
    return str(concurrency) if request_rate is None else f"{request_rate:g}/s"


def load_words(key: str) -> str:
    """A level's key in words: "concurrency 4", "2.5 requests/s"."""
    return f"{key.removesuffix('/s')} requests/s" if key.endswith("/s") else f"concurrency {key}"


def latency_of(name: str) -> tuple[str, str]:
    """`ttft_p99` -> ("ttft_ms", "p99")."""
    stem, _, statistic = name.rpartition("_")
    return f"{stem}_ms", statistic


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadMetrics:
    """Rates over a window, and latencies in ms of successful measured requests."""

    duration_s: float | None = None
    input_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    requests_per_s: float | None = None
    tokens_per_joule: float | None = None
    """Only if GPU power was sampled."""
    latencies: _Summaries = field(default_factory=dict)
    """LATENCIES -> statistic -> milliseconds."""

    def latency(self, name: str, statistic: str) -> float | None:
        """One statistic of one latency, in milliseconds."""
        return self.latencies.get(name, {}).get(statistic)

    def value(self, name: str) -> float | None:
        """The value of one of LEVEL_METRICS, latencies in ms."""
        if name in RATES:
            rate: float | None = getattr(self, RATES[name])
            return rate
        if name == "tokens_per_joule":
            return self.tokens_per_joule
        if name == "user_tps":
            tpot = self.latency("tpot_ms", "p50")
            return 1e3 / tpot if tpot else None
        return self.latency(*latency_of(name))

    def rates(self) -> dict[str, Any]:
        """Seconds of the window and its rates, by field."""
        efficiency = {} if self.tokens_per_joule is None else {"tokens_per_joule": self.tokens_per_joule}
        return {**{name: getattr(self, name) for name in _RATES}, **efficiency}


_RATES: Final = ("duration_s", *sorted(RATES.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatResult(LoadMetrics):
    """One repeat of a level, over the same kind of window."""

    repeat: int = 0
    started_s: float | None = None
    """Unix time of its first measured request."""
    windows: Mapping[str, Window | None] = field(default_factory=dict)
    """ "whole", "active", "steady". Not read back."""

    def to_json(self) -> dict[str, Json]:
        """As in report.json."""
        return {"started_s": self.started_s, **self.rates(), **_plain(self.latencies)}

    def perf_json(self) -> dict[str, Json]:
        """As in perf.json: with all windows instead of one window's rates."""
        windows: dict[str, Json] = {
            name: None if window is None else window.to_json() for name, window in self.windows.items()
        }
        efficiency = {} if self.tokens_per_joule is None else {"tokens_per_joule": self.tokens_per_joule}
        return {"repeat": self.repeat, "started_s": self.started_s, **windows, **efficiency, **_plain(self.latencies)}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """Use of all GPUs of a server during a level. None for values that they do not report."""

    devices: int
    power_w: float | None = None
    """On average, warmup included."""
    energy_j: float | None = None
    """In the whole windows of all repeats."""
    memory_bytes: int | None = None
    """Maximum."""
    sm_clock_mhz: float | None = None
    sm_clock_mhz_min: float | None = None
    busy_percent: float | None = None
    temperature_c: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonUse:
    """Triton's own metrics of a level, over all repeats. None for values that it does not report."""

    models: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Model -> `requests`, and mean milliseconds of each by `queue_ms`, `compute_input_ms` and so on, `request_ms`."""
    in_flight: float | None = None
    """Mean, as are the next two."""
    waiting: float | None = None
    kv_cache_use: float | None = None
    """Share of the blocks."""
    in_flight_max: float | None = None
    waiting_max: float | None = None
    kv_cache_use_max: float | None = None
    in_flight_by_client: float | None = None
    """The mean according to the client's own times."""


TRITON_GAUGES: Final = tuple(name for name in TritonUse.__dataclass_fields__ if name != "models")


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met every objective."""

    objectives_ms: Mapping[str, float] = field(default_factory=dict)
    """ "ttft", "tpot", "e2e" -> milliseconds."""
    share: float | None = None
    """Share of the scheduled requests, 0 to 1."""
    requests_per_s: float | None = None
    output_tokens_per_s: float | None = None
    """Output tokens of these requests."""


@dataclass(frozen=True, slots=True)
class ObjectiveResult:
    """An objective of a level, and its result."""

    metric: str
    """One of LEVEL_METRICS."""
    limit: float
    value: float | None
    missed: str | None
    """The miss in words. None if the objective was met."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Open loop: the achieved rate, and latencies from the schedule."""

    achieved_rate: float | None
    lag_ms: Summary
    ttft_from_schedule_ms: Summary
    response_ms: Summary
    most_in_flight: int
    unsent: int = 0
    """Due requests that were never sent because the server had fallen behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelDetails:
    """Details of a level that only perf.json has."""

    window_reason: str
    """Reason for the choice of window, or for missing rates."""
    input_tokens: float | None
    output_tokens: float | None
    summaries: Mapping[str, Summary]
    """`stall_ms`, `user_tokens_per_s`, `connect_ms`, and `ttfa_ms` if responses have reasoning."""
    answers_at_limit: int
    finish_reasons: Mapping[str, int]
    tokens_per_event: float
    tokens_in_first_event: float
    other_tools: Mapping[str, Mapping[str, Any]]
    """Tool -> its metrics, see `measure/load/compat_metrics.py`."""
    cached_input_tokens: int | None
    """None if the server does not report it."""
    objectives: tuple[ObjectiveResult, ...]
    triton: list[dict[str, Any]]
    """For each repeat, `of` each model: requests and milliseconds from Triton's own counters."""
    gpu: list[dict[str, Any]]
    gauges: list[dict[str, Any]] = field(default_factory=list)
    """For each repeat, `of` Triton's gauges: mean and maximum; and `ours`, the client's mean in flight."""

    def to_json(self) -> dict[str, Json]:
        """As in perf.json, without the window's reason. Fields that do not apply are left out."""
        whole = {"as": self.other_tools, **asdict(self), **_plain(self.summaries)}
        for name in ("window_reason", "summaries", "other_tools"):
            del whole[name]
        optional = ("cached_input_tokens", "objectives", "triton", "gpu", "gauges")
        return {name: value for name, value in whole.items() if name not in optional or value not in (None, [], ())}


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelResult(LoadMetrics):
    """Measurements at one concurrency (closed loop) or request rate (open loop). The other one is None."""

    concurrency: int | None = None
    request_rate: float | None = None
    """Mean requests per second, regardless of the number in flight."""
    requests: int | None = None
    """Measured requests, all repeats together."""
    failures: int | None = None
    window: str | None = None
    """Window of the rates: "steady", or "whole" if no steady window was long enough."""
    repeats: tuple[RepeatResult, ...] = ()
    goodput: Goodput | None = None
    """None without objectives."""
    saturated_rps: float | None = None
    """Completed requests per second of an open loop with max_in_flight whose server fell behind."""
    schedule: Schedule | None = None
    """Open loop only."""
    acceptance: float | None = None
    """Share of drafted tokens that the model accepted. None without drafting, or if the server does not report it."""
    gpu_use: GpuUse | None = None
    """None without GPUs."""
    triton_use: TritonUse | None = None
    """None without Triton's metrics."""
    lengths: _Summaries = field(default_factory=dict)
    """LENGTHS -> statistic -> tokens, over successful measured requests."""
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    """Metric -> its 95% interval from the requests. `interval` prefers the one from the repeats."""
    details: LevelDetails | None = None

    @property
    def key(self) -> str:
        """Key in comparisons: `4` requests in flight, or `2.5/s`."""
        return load_key(self.concurrency, self.request_rate)

    def interval(self, name: str) -> Interval | None:
        """The 95% interval of a metric, see `intervals` in DEFINITIONS. None if it is unknown."""
        values = [repeat.value(name) for repeat in self.repeats]
        known = [value for value in values if value is not None]
        return (repeats_interval(known) if len(known) == len(values) else None) or self.intervals.get(name)

    @property
    def from_schedule(self) -> _Summaries:
        """TTFT and e2e of an open loop from the schedule, which objectives judge. Empty for a closed loop."""
        if self.schedule is None:
            return {}
        return {"ttft_ms": self.schedule.ttft_from_schedule_ms, "e2e_ms": self.schedule.response_ms}

    def bound(self, name: str) -> float | None:
        """The value to compare with an objective: the metric, or the maximum without enough requests for its p99."""
        known = replace(self, latencies={**self.latencies, **self.from_schedule})
        value = known.value(name)
        return known.value(name.replace("_p99", "_max")) if value is None and name.endswith("_p99") else value

    def missed(self, objective: Objective) -> str | None:
        """A missed objective in words. None if it is met. For a p99 of few requests, their maximum counts."""
        why = objective.missed_by(self.bound(objective.metric))
        if why is not None and latency_of(objective.metric)[0] in self.from_schedule:
            why = f"{why} from the schedule"
        by_maximum = (
            why is not None and self.value(objective.metric) is None and self.bound(objective.metric) is not None
        )
        return f"{why} (the maximum: {self.no_p99})" if by_maximum else why

    @property
    def no_p99(self) -> str | None:
        """The reason why there is no p99."""
        answered = (self.requests or 0) - (self.failures or 0)
        return f"{answered} requests, a p99 needs {LEAST_P99}" if answered < LEAST_P99 else None

    def to_json(self) -> dict[str, Json]:
        """As in report.json."""
        intervals = {name: ends for name in RANKING if (ends := self.interval(name)) is not None}
        return {
            "concurrency": self.concurrency,
            "request_rate": self.request_rate,
            "requests": self.requests,
            "failures": self.failures,
            **self.rates(),
            "headline": {"window": self.window},
            "user_tps": self.value("user_tps"),
            "intervals": {name: [*ends] for name, ends in intervals.items()},
            **_plain(self.latencies),
            "no_p99": self.no_p99,
            **_plain(self.lengths),
            "goodput": None if self.goodput is None else asdict(self.goodput),
            **({} if self.saturated_rps is None else {"saturated_rps": self.saturated_rps}),
            **({} if self.schedule is None else {"schedule": asdict(self.schedule)}),
            **({} if self.acceptance is None else {"acceptance": self.acceptance}),
            **({} if self.gpu_use is None else {"gpu_use": asdict(self.gpu_use)}),
            **({} if self.triton_use is None else {"triton_use": asdict(self.triton_use)}),
            "repeats": [repeat.to_json() for repeat in self.repeats],
        }

    def perf_json(self) -> dict[str, Json]:
        """As in perf.json."""
        assert self.details is not None
        whole = {**self.to_json(), **self.details.to_json()}
        whole["headline"] = {"window": self.window, "reason": self.details.window_reason}
        whole["repeats"] = [repeat.perf_json() for repeat in self.repeats]
        if self.goodput is None:
            del whole["goodput"]
        return whole


@dataclass(frozen=True, slots=True)
class HighestRate:
    """Result of a search for the highest rate that meets the objectives."""

    wanted_share: float
    objectives_ms: Mapping[str, float]
    rate: float | None
    """Requests per second. None if the lowest rate tried was too high, or for the `reason`."""
    low: float | None
    """With `high`, the 95% interval of the rate."""
    high: float | None
    """None if even the highest rate tried met them."""
    tried: Mapping[str, Mapping[str, Any]]
    """Rate -> `requests`, the `share` that met all objectives, and whether that is enough."""
    reason: str | None = None
    """Reason for a missing rate, unless all rates were too high."""

    def __str__(self) -> str:
        """`7.2 requests/s meet ttft 300 ms for 95% of requests (95% interval 7 to 7.6)`."""
        of, share = _wanted(self.objectives_ms, self.wanted_share)
        if self.reason is not None:
            return f"unknown rate at which {share} meet {of}: {self.reason}"
        if self.rate is None and self.high is None:
            return (
                f"unknown rate at which {share} meet {of}: the search was cut short at {min(self.tried, key=float)}/s"
            )
        if self.rate is None:
            return f"no rate tried meets {of} for {share}; the lowest was {min(self.tried, key=float)}/s"
        interval = "no higher rate was tried"
        if self.low is not None and self.high is not None:
            interval = f"95% interval {self.low:.4g} to {self.high:.4g}"
        return f"{self.rate:g} requests/s meet {of} for {share} ({interval})"


@dataclass(frozen=True, slots=True)
class HighestConcurrency:
    """Result of a search for the most requests in flight that meet the objectives."""

    wanted_share: float
    objectives_ms: Mapping[str, float]
    concurrency: int | None
    """None if even the lowest concurrency tried was too high."""
    missed_at: int | None
    """The lowest concurrency that missed them. None if all that were tried met them."""
    saturated_at: int | None
    """The lowest concurrency at which the server was saturated."""
    tried: Mapping[str, Mapping[str, Any]]
    """Concurrency -> `requests`, the `share` that met all objectives, whether that is enough, and `requests_per_s`."""

    def __str__(self) -> str:
        """`48 requests in flight meet ttft 300 ms for 95% of requests (52 do not); saturated at 32`."""
        of, share = _wanted(self.objectives_ms, self.wanted_share)
        if self.concurrency is None and self.missed_at is None:
            return f"unknown concurrency at which {share} meet {of}: the search was cut short at {min(self.tried, key=float)}"
        if self.concurrency is None:
            return f"no concurrency tried meets {of} for {share}; the lowest was {self.missed_at}"
        more = "no higher concurrency was tried" if self.missed_at is None else f"{self.missed_at} do not"
        saturated = "" if self.saturated_at is None else f"; the server is saturated at {self.saturated_at}"
        return f"{self.concurrency} requests in flight meet {of} for {share} ({more}){saturated}"


def _wanted(objectives_ms: Mapping[str, float], share: float) -> tuple[str, str]:
    """The objectives of a search, and the share of requests that must meet them, in words."""
    of = ", ".join(f"{name} {limit:g} ms" for name, limit in objectives_ms.items())
    return of, f"{share * 100:g}% of requests"


@dataclass(frozen=True, slots=True)
class MeasurementFinding:
    """A finding of a validity gate, see `measure/load/validity.py`."""

    severity: str
    """ "invalid", "warning" or "info"."""
    message: str
    concurrency: int | None = None
    request_rate: float | None = None
    check: str = ""
    """Id of the gate."""

    def __str__(self) -> str:
        """`warning: 1 of 40 requests failed, ... (concurrency 4)`."""
        everywhere = self.concurrency is None and self.request_rate is None
        place = "" if everywhere else f" ({load_words(load_key(self.concurrency, self.request_rate))})"
        return f"{self.severity}: {self.message}{place}"

    def to_json(self) -> dict[str, Json]:
        """As in perf.json."""
        rate = {} if self.request_rate is None else {"request_rate": self.request_rate}
        own = {"severity": self.severity, "check": self.check, "concurrency": self.concurrency, "message": self.message}
        return {**own, **rate}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadDetails:
    """Details of a load run that only perf.json has."""

    protocol: str
    model: str
    settings: Mapping[str, Any]
    token_count: Mapping[str, Any]
    """Source of the output token counts, and the other counts."""
    clients: list[dict[str, Any]]
    """Processor time and event-loop lag of each load process at each level."""
    definitions: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Everything measured in a load run."""

    valid: bool
    levels: tuple[LevelResult, ...]
    """Levels in measuring order; from a file, by concurrency, then request rate. Invalid measurements have them too."""
    findings: tuple[MeasurementFinding, ...]
    conditions: Conditions
    tokens_counted_by: str | None = None
    """Source of output token counts: "server", "encoded_again" or "events"."""
    highest_rate: HighestRate | None = None
    """None without a search."""
    highest_concurrency: HighestConcurrency | None = None
    """None without a search."""
    details: LoadDetails | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(map(str, self.findings))

    @property
    def invalid(self) -> list[MeasurementFinding]:
        return [each for each in self.findings if each.severity == "invalid"]

    def to_json(self) -> dict[str, Json]:
        """The content of perf.json."""
        details, under = self.details, self.conditions.to_json()
        assert details is not None
        return {
            "schema": 1,
            "valid": self.valid,
            "protocol": details.protocol,
            "model": details.model,
            "settings": dict(details.settings),
            **{name: under[name] for name in ("measured_s", "system", "workload")},
            "levels": [level.perf_json() for level in self.levels],
            **({} if self.highest_rate is None else {"highest_rate": asdict(self.highest_rate)}),
            **({} if self.highest_concurrency is None else {"highest_concurrency": asdict(self.highest_concurrency)}),
            "findings": [each.to_json() for each in self.findings],
            "token_count": dict(details.token_count),
            "client": {
                "transport": "asyncio; arrival times from the kernel (SO_TIMESTAMPNS), over TLS from the read",
                "levels": list(details.clients),
            },
            "definitions": dict(details.definitions),
        }

    @staticmethod
    def read(data: Mapping[str, Any]) -> LoadResult:
        source = _object(data.get("token_count")).get("source")
        return LoadResult(
            valid=data.get("valid") is not False,
            levels=levels_of(data.get("levels")),
            findings=tuple(
                filter(None, (read_record(MeasurementFinding, each) for each in _objects(data.get("findings"))))
            ),
            conditions=Conditions.read(data),
            tokens_counted_by=source if isinstance(source, str) else None,
            highest_rate=read_record(HighestRate, data.get("highest_rate")),
            highest_concurrency=read_record(HighestConcurrency, data.get("highest_concurrency")),
        )


def levels_of(data: object) -> tuple[LevelResult, ...]:
    """The levels of a perf.json, or of a cell in a report.json. Invalid ones are left out."""
    if not data:
        return ()
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
    return LevelResult(
        concurrency=concurrency,
        request_rate=rate,
        requests=count_of(entry.get("requests")),
        failures=count_of(entry.get("failures")),
        window=window,
        repeats=tuple(_repeat(each, window) for each in _objects(entry.get("repeats"))),
        goodput=read_record(Goodput, entry.get("goodput")),
        saturated_rps=_number(entry.get("saturated_rps")),
        schedule=read_record(Schedule, entry.get("schedule")),
        acceptance=_number(entry.get("acceptance")),
        gpu_use=read_record(GpuUse, entry.get("gpu_use")),
        triton_use=read_record(TritonUse, entry.get("triton_use")),
        lengths=_summaries(entry, LENGTHS),
        latencies=_summaries(entry, LATENCIES),
        intervals={name: ends for name in RANKING if (ends := _interval(_object(entry.get("intervals")).get(name)))},
        **_rates(entry),
    )


def _repeat(entry: Mapping[str, Any], window: str | None) -> RepeatResult:
    """A repeat from perf.json, with rates for each window, or from a report."""
    rates = _object(entry.get(window)) if window is not None else {}
    return RepeatResult(
        started_s=_number(entry.get("started_s")),
        latencies=_summaries(entry, LATENCIES),
        **{**_rates(rates or entry), "tokens_per_joule": _number(entry.get("tokens_per_joule"))},
    )


def _rates(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _number(entry.get(name)) for name in (*_RATES, "tokens_per_joule")}


def _interval(value: object) -> Interval | None:
    ends = [_number(each) for each in value] if isinstance(value, (list, tuple)) else []
    match ends:
        case [float() | int() as low, float() | int() as high]:
            return low, high
    return None


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _objects(value: object) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _summaries(entry: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, dict[str, float | None]]:
    known = {name: _object(entry.get(name)) for name in names}
    return {name: _summary(of) for name, of in known.items() if of}


def _summary(data: object) -> Summary:
    return {str(name): _number(value) for name, value in _object(data).items()}


def _plain(summaries: _Summaries) -> dict[str, Json]:
    return {name: dict(values) for name, values in summaries.items()}


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def count_of(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def numbers_of(data: object) -> dict[str, float]:
    """The entries of an object that are finite numbers."""
    entries = data.items() if isinstance(data, dict) else ()
    return {str(name): number for name, value in entries if (number := _number(value)) is not None}


def read_record(cls: Callable[..., R], data: object) -> R | None:
    """The record of a class of this module that `asdict` wrote. A value of another type counts as missing, and without a
    required one the whole record does.
    """
    if not isinstance(data, dict):
        return None
    values: dict[str, Any] = {}
    shape: Any = cls
    for each in fields(shape):
        kind = each.type.removesuffix(" | None")
        value = _READERS[kind](data.get(each.name))
        if value is not None or kind != each.type:
            values[each.name] = value
        elif each.default is MISSING:
            return None
    return cls(**values)


_READERS: Final[Mapping[str, Callable[[object], Any]]] = {
    "float": _number,
    "int": count_of,
    "str": lambda value: value if isinstance(value, str) else None,
    "Mapping[str, float]": numbers_of,
    "Summary": _summary,
    "Mapping[str, Mapping[str, float]]": lambda value: {name: numbers_of(of) for name, of in _object(value).items()},
    "Mapping[str, Mapping[str, Any]]": lambda value: {
        name: of for name, of in _object(value).items() if isinstance(of, dict)
    },
}
"""Annotation of a field, but for `| None` -> how its value is read."""
