"""Service level objectives as people type them: `ttft_p99=300ms,tpot_p99=40ms,output_tps=100`.

One grammar for all commands. `bench load` counts the requests that meet each objective, so it takes latencies of one
request (`ttft=300ms`); `report` and `recommend` take figures of a level (`ttft_p99=300ms`).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from trtllm_pipeline.errors import UsageError

PER_REQUEST: Final = ("ttft", "tpot", "e2e")
"""Latencies that every request has."""
_FORM: Final = re.compile(r"\s*([a-z0-9_]+)\s*=\s*(\d+(?:\.\d+)?)\s*(ms|s|)\s*")


@dataclass(frozen=True, slots=True)
class Objective:
    """A latency in ms that may not be exceeded, or a rate that must be reached."""

    metric: str
    limit: float
    is_rate: bool = False

    def share(self, value: float) -> float:
        """1 at the limit, more beyond it."""
        if self.is_rate:
            return self.limit / value if value > 0 else float("inf")
        return value / self.limit

    def missed_by(self, value: float) -> str:
        """`ttft_p99 412 ms > 300 ms`."""
        sign, of = ("<", "/s") if self.is_rate else (">", " ms")
        return f"{self.metric} {value:.4g}{of} {sign} {self.limit:g}{of}"


def parse(text: str, latencies: Collection[str], rates: Collection[str], *, example: str) -> tuple[Objective, ...]:
    """The objectives in `text`, a time in ms unless it says s. Raises UsageError."""
    found = []
    for part in text.split(","):
        match = _FORM.fullmatch(part)
        name, number, unit = match.groups() if match else ("", "0", "")
        if name not in {*latencies, *rates} or (unit and name in rates) or not float(number):
            raise UsageError(f"--slo: {part.strip()!r} is not an objective", hint=f"METRIC=NUMBER, such as {example}")
        found.append(Objective(name, float(number) * (1000 if unit == "s" else 1), name in rates))
    return tuple(found)


def per_request(text: str) -> dict[str, float]:
    """Limits in ms by latency of a request: `ttft=300ms,tpot=40ms,e2e=5s`. Raises UsageError."""
    stem, _, statistic = text.partition("=")[0].strip().partition("_")
    if stem in PER_REQUEST and statistic:
        raise UsageError(
            f"--slo: goodput counts the requests that meet each objective, so there is no {stem}_{statistic}",
            hint=f"write {text.replace(f'_{statistic}', '')}; report and recommend take {stem}_{statistic}",
        )
    return {each.metric: each.limit for each in parse(text, PER_REQUEST, (), example="ttft=300ms,tpot=40ms,e2e=5s")}
