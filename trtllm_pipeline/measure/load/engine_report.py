"""Compares a report of `trtllm-bench throughput --report_json` with a measurement through a server.

trtllm-bench runs the engine in its own process: its numbers do not include the overhead of the server, its protocol and
its models around the engine. Source: `bench/dataclasses/reporting.py` of TensorRT-LLM, and its guide to trtllm-bench
for the data set.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import Json, StageError, user_files
from trtllm_pipeline.measure.load.result import LevelResult, LoadResult, load_words

ENGINE_REPORT_FILE: Final = "report.json"
LAYER: Final = "the engine in the process of trtllm-bench"
_SAME: Final = 0.05
"""Maximum difference of lengths in the same load, as a share."""
_AT_ONCE: Final = 0.2
"""The same for requests in flight."""
_REPORTED: Final = {
    "requests": ("request_info", "num_requests"),
    "in_flight": ("request_info", "avg_num_concurrent_requests"),
    "input_tokens": ("request_info", "avg_input_length"),
    "output_tokens": ("request_info", "avg_output_length"),
    "output_tokens_per_s": ("performance", "system_output_throughput_tok_s"),
    "requests_per_s": ("performance", "request_throughput_req_s"),
    "e2e_ms": ("performance", "avg_request_latency_ms"),
    "ttft_ms": ("streaming_metrics", "avg_ttft_ms"),
    "tpot_ms": ("streaming_metrics", "avg_tpot_ms"),
}
"""Our name -> section and name in the report. Latencies are means. The last two need --streaming."""
_MOST: Final = 1e18
"""Larger numbers are not measurements."""
_OPTIONAL: Final = frozenset({"ttft_ms", "tpot_ms"})


@dataclass(frozen=True, slots=True)
class EngineReport:
    """One report."""

    release: str | None
    values: Mapping[str, float]
    """By _REPORTED."""

    @staticmethod
    def read(path: Path) -> EngineReport:
        """Read a report file. Raises MatrixError for an invalid one."""
        data = user_files.read_mapping(path)
        values: dict[str, float] = {}
        for name, (section, key) in _REPORTED.items():
            value = data[section].get(key) if isinstance(data.get(section), dict) else None
            if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= _MOST:
                values[name] = float(value)
            elif name not in _OPTIONAL:
                user_files.fail(
                    str(path), None, f"no report of trtllm-bench throughput: it has no number {section}.{key}"
                )
        engine = data.get("engine")
        release = engine.get("version") if isinstance(engine, dict) else None
        return EngineReport(release if isinstance(release, str) else None, values)


@dataclass(frozen=True, slots=True)
class BenchComparison:
    """A level, and a report of the same or the most similar load."""

    level: LevelResult
    report: EngineReport

    @staticmethod
    def of(result: LoadResult, report: EngineReport) -> BenchComparison:
        """The closed loop with the concurrency nearest to the report's. Raises StageError if there is none."""
        closed = [level for level in result.levels if level.concurrency is not None]
        if not closed:
            raise StageError("trtllm-bench keeps a number of requests in flight, and no such level was measured")
        wanted = report.values["in_flight"]
        return BenchComparison(min(closed, key=lambda level: abs((level.concurrency or 0) - wanted)), report)

    def ours(self, name: str) -> float | None:
        """The value measured through the server."""
        level = self.level
        if name.endswith("_ms"):
            return level.latency(name, "mean")
        if name in {"input_tokens", "output_tokens"}:
            return level.lengths.get(f"{name}_per_request", {}).get("mean")
        if name == "in_flight":
            return level.concurrency
        value: float | None = getattr(level, name)
        return value

    def differences(self) -> Iterator[str]:
        """Differences between the two loads, in words."""
        for name, least in (("in_flight", _AT_ONCE), ("input_tokens", _SAME), ("output_tokens", _SAME)):
            ours, theirs = self.ours(name), self.report.values[name]
            if ours is not None and abs(ours - theirs) > least * max(ours, theirs):
                yield f"{name.replace('_', ' ')} {ours:g} here, {theirs:g} there"

    def rows(self) -> list[dict[str, object]]:
        """For each figure: ours, theirs, and how much higher ours is."""
        names = ("output_tokens_per_s", "requests_per_s", "ttft_ms", "tpot_ms", "e2e_ms")
        known = [(name, self.ours(name), self.report.values[name]) for name in names if name in self.report.values]
        return [
            {
                "": name if name in {"output_tokens_per_s", "requests_per_s"} else f"{name} mean",
                "through the server": ours,
                "trtllm-bench": round(theirs, 3),
                "server's part": f"{ours / theirs - 1:+.1%}" if ours is not None and theirs else None,
            }
            for name, ours, theirs in known
        ]

    def to_json(self) -> dict[str, Json]:
        """As `trtllm_bench` in the JSON of a load."""
        return {
            "layer": LAYER,
            "release": self.report.release,
            "level": self.level.key,
            "not_the_same": list(self.differences()),
            **self.report.values,
            "ours": {name: self.ours(name) for name in _REPORTED},
        }

    def title(self) -> str:
        release = f" of TensorRT-LLM {self.report.release}" if self.report.release else ""
        other = list(self.differences())
        load = f"; different load: {', '.join(other)}" if other else ""
        return f"{load_words(self.level.key)}, and {LAYER}{release}{load}"


def write_dataset(events: Path, output: Path) -> int:
    """Write measured requests from an event file as a dataset for trtllm-bench, and return their number: those in the
    first repeat of the level with the highest concurrency, in sending order.

    Raises StageError for an invalid event file, or one without a closed loop.
    """
    # Late: every table looks for such reports, few write one.
    from trtllm_pipeline.measure.load.events import read_records

    records = read_records(events)
    closed = [each for each in records.requests if each["concurrency"] and each["phase"] == "measured"]
    most = max((each["concurrency"] or 0 for each in closed), default=0)
    requests = [each for each in closed if each["concurrency"] == most and each["repeat"] == 0]
    if not requests:
        raise StageError(f"{events}: no closed-loop level, which trtllm-bench needs")
    rows: list[Mapping[str, Any]] = [
        {"task_id": number, "prompt": records.text(each), "output_tokens": each["max_tokens"]}
        for number, each in enumerate(sorted(requests, key=lambda each: each["sent_ns"]))
    ]
    with output.open("x", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return len(rows)
