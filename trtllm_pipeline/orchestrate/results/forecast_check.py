"""Compares the forecast of a run with its actual time and memory.

checked(plan, forecast, taken)   at the end of a run, from its forecast and the index
of_report(path)                later, from its report
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_pipeline.base import Fingerprint, Json, duration, first_parts, size
from trtllm_pipeline.orchestrate.memory.estimates import KINDS, TIME
from trtllm_pipeline.orchestrate.plan.memory_needs import of_run
from trtllm_pipeline.orchestrate.plan.plan import Plan

if TYPE_CHECKING:
    from trtllm_pipeline.orchestrate.run.forecast import Forecast


@dataclass(frozen=True, slots=True)
class StageForecast:
    """Expected and actual use of one resource by the stage runs of one stage.

    Time is the sum in milliseconds. Memory is the maximum of a stage run in bytes.
    """

    stage: str
    resource: str
    stage_runs: int
    expected: int
    taken: int

    def __str__(self) -> str:
        verb, of = ("took ", "") if self.resource == TIME else ("", f" of {self.resource}")
        return f"{verb}{self._in_words(self.taken)}{of} (estimate {self._in_words(self.expected)})"

    def _in_words(self, value: int) -> str:
        return duration(value / 1000) if self.resource == TIME else size(value)


@dataclass(frozen=True, slots=True)
class ForecastCheck:
    """Forecast and actual use of one run."""

    expected_s: float | None
    """Wall-clock seconds of the whole run. None if it was incomplete or waited for other pipelines."""
    took_s: float
    stages: tuple[StageForecast, ...]
    """Entries in the order of the plan, time first."""

    def to_json(self) -> dict[str, Json]:
        """The JSON in a report."""
        return {
            "expected_s": None if self.expected_s is None else round(self.expected_s, 3),
            "took_s": round(self.took_s, 3),
            "stages": [asdict(stage) for stage in self.stages],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> ForecastCheck:
        """Read the JSON. Raises KeyError, TypeError, ValueError for anything else."""
        stages = tuple(StageForecast(**stage) for stage in data["stages"])
        numbers = (number for stage in stages for number in (stage.stage_runs, stage.expected, stage.taken))
        if not all(type(number) is int and number > 0 for number in numbers):
            raise ValueError("a forecast without numbers")
        expected_s = data["expected_s"]
        return ForecastCheck(None if expected_s is None else float(expected_s), float(data["took_s"]), stages)

    def line(self) -> str:
        """The whole run in one line."""
        took = f"Took {duration(self.took_s)}"
        return took if self.expected_s is None else f"{took} (estimate {duration(self.expected_s)})"

    def lines(self) -> list[str]:
        """One line per stage."""
        by_stage: dict[str, list[str]] = {}
        for each in self.stages:
            by_stage.setdefault(each.stage, []).append(str(each))
        return [f"{stage}: {'; '.join(entries)}" for stage, entries in by_stage.items()]


def of_report(path: Path) -> ForecastCheck | None:
    """The forecast in the head of a run's report. Nothing else is read. None if there is none."""
    with suppress(KeyError, TypeError, ValueError):
        return ForecastCheck.from_json((first_parts(path, 2) or {})["run"]["forecast"])
    return None


def checked(
    plan: Plan, forecast: Forecast, taken: Mapping[Fingerprint, Mapping[str, int]], took_s: float, *, comparable: bool
) -> ForecastCheck | None:
    """Compare the `forecast` with the actual use `taken` by stage runs of a plan, in bytes and milliseconds by kind. None if none ran.

    `comparable` is that of the `Outcome`.
    """
    pairs_by_resource: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for run in plan.stage_runs.values():
        if run.fingerprint not in taken or run.id not in forecast.times:
            continue
        took = taken[run.fingerprint]
        expected = [(TIME, forecast.times[run.id].value)]
        expected += [(need.resource, need.estimate.value) for need in of_run(run, plan.machine, forecast.corrections)]
        for resource, value in expected:
            if value and took.get(KINDS[resource]):
                pairs_by_resource.setdefault((run.stage.name, resource), []).append((value, took[KINDS[resource]]))
    if not pairs_by_resource:
        return None
    stages = []
    for (stage, resource), pairs in pairs_by_resource.items():
        total = tuple(map(sum, zip(*pairs, strict=True))) if resource == TIME else max(pairs, key=lambda pair: pair[1])
        stages.append(StageForecast(stage, resource, len(pairs), *total))
    return ForecastCheck(forecast.total_s if comparable else None, took_s, tuple(stages))
