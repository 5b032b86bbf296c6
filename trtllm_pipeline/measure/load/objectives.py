"""Service level objectives as users type them: `ttft=300ms,ttft_p99=500ms,output_tps=100`.

All commands share one grammar. An objective without a statistic (`ttft=300ms`) applies to each request: goodput is the
share of requests that meet all of these. Other objectives apply to a metric of a level.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from trtllm_pipeline.base import UsageError
from trtllm_pipeline.measure.load.metric_names import HIGHER_IS_BETTER, LEVEL_METRICS, RATES

PER_REQUEST: Final = ("ttft", "tpot", "e2e")
"""Latencies of every request."""
LEAST_SEARCHED: Final = 300
"""Minimum requests per rate in a search for the highest rate. With fewer, a level ends before its queue builds up: for
a simulated queue (M/M/1), the result was off by up to 31% in nine of ten searches with 64 requests, by up to 15% with
300.
"""
_FORM: Final = re.compile(r"\s*([a-z0-9_]+)\s*=\s*(\d+(?:\.\d+)?)\s*(ms|s|)\s*")


@dataclass(frozen=True, slots=True)
class Objective:
    """A latency in ms that must not be exceeded, or a rate that must be reached."""

    metric: str
    limit: float

    def share(self, value: float | None) -> float:
        """1 at the limit, more beyond it."""
        if not value:
            return float("inf") if value is None or self.metric in HIGHER_IS_BETTER else 0.0
        return self.limit / value if self.metric in HIGHER_IS_BETTER else value / self.limit

    def missed_by(self, value: float | None) -> str | None:
        """`ttft_p99 412 ms > 300 ms`; None if the objective is met."""
        if value is None:
            return f"{self.metric} was not measured"
        sign, of = (
            ("<", "/s" if self.metric.endswith("_tps") or self.metric in RATES else "")
            if self.metric in HIGHER_IS_BETTER
            else (">", " ms")
        )
        return f"{self.metric} {value:.4g}{of} {sign} {self.limit:g}{of}" if self.share(value) > 1 else None


@dataclass(frozen=True, slots=True)
class Objectives:
    """The objectives (SLO) of a load run."""

    per_request: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds by PER_REQUEST."""
    of_level: tuple[Objective, ...] = ()


NONE: Final = Objectives()


def parse(text: str, metrics: Collection[str], *, example: str) -> tuple[Objective, ...]:
    """The objectives in `text` about some of `metrics`, with times in ms or s. Raises UsageError."""
    objectives = []
    for part in text.split(","):
        match = _FORM.fullmatch(part)
        name, number, unit = match.groups() if match else ("", "0", "")
        if name not in metrics or (unit and name in HIGHER_IS_BETTER) or not float(number):
            raise UsageError(f"--slo: {part.strip()!r} is not an objective", hint=f"METRIC=NUMBER, such as {example}")
        objectives.append(Objective(name, float(number) * (1000 if unit == "s" else 1)))
    return tuple(objectives)


def of_load(text: str | None) -> Objectives:
    """Parse the objectives of a load run, of both kinds. None gives no objectives. Raises UsageError."""
    if text is None:
        return NONE
    parsed = parse(text, (*PER_REQUEST, *LEVEL_METRICS), example="ttft=300ms,ttft_p99=500ms,output_tps=100")
    limits = {each.metric: each.limit for each in parsed if each.metric in PER_REQUEST}
    return Objectives(limits, tuple(each for each in parsed if each.metric not in PER_REQUEST))


def per_request(text: str) -> dict[str, float]:
    """Limits in ms by latency of a request: `ttft=300ms,tpot=40ms,e2e=5s`. Raises UsageError."""
    stem, _, statistic = text.partition("=")[0].strip().partition("_")
    if stem in PER_REQUEST and statistic:
        raise UsageError(
            f"--slo: goodput counts the requests that meet each objective, not {stem}_{statistic}",
            hint=f"write {text.replace(f'_{statistic}', '')}; bench load, report and recommend accept {stem}_{statistic}",
        )
    return {each.metric: each.limit for each in parse(text, PER_REQUEST, example="ttft=300ms,tpot=40ms,e2e=5s")}
