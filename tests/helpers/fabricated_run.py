"""Runs of any size that never ran, for reports: rows and their record, with failures, cache hits and hostile names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from tests.helpers.fabricated_conditions import CONDITIONS
from trtllm_pipeline.base.domain import CellId, Fingerprint, Json, Scope, StageRunId
from trtllm_pipeline.measure.load.result import LevelResult, RepeatResult
from trtllm_pipeline.measure.score.drift import Drift, ScoreDrift
from trtllm_pipeline.orchestrate.results.report_file import CellResult, CellStatus
from trtllm_pipeline.orchestrate.store.index import RunRow
from trtllm_pipeline.show.report.comparison import Comparison
from trtllm_pipeline.show.report.html import page
from trtllm_pipeline.show.report.record import Ending, Record, StageAttempt, StageRecord
from trtllm_pipeline.show.report.report_formats import Report

HOSTILE = "<script>window.hacked=1</script><img src=x onerror=window.hacked=2>"
PRECISIONS = ("fp16", "fp8", "int8_sq", "int4_awq")
STAGES = ("download", "convert", "build", "repository", "launch", "smoke", "perf", "accuracy")
START_S = 1_790_000_000.0


def _axes(number: int) -> dict[str, Json]:
    """Precision changes fastest, then parallelism, batch size and lengths, then the model."""
    digits = []
    for base in (4, 3, 4, 3):
        number, digit = divmod(number, base)
        digits.append(digit)
    return {
        "model": f"model-{number}",
        "toolchain": "tensorrt_llm",
        "precision": PRECISIONS[digits[0]],
        "tp": 2 ** digits[1],
        "pp": 1,
        "max_batch_size": 8 * 2 ** digits[2],
        "isl": 512 * 2 ** digits[3],
        "osl": 256,
    }


def _id(axes: dict[str, Json]) -> CellId:
    return CellId(
        f"{axes['model']}/{axes['precision']}/tp{axes['tp']}pp1/bs{axes['max_batch_size']}/isl{axes['isl']}-osl256"
    )


def _levels(axes: dict[str, Json]) -> Iterator[LevelResult]:
    """Throughput that saturates, latency that grows with it; faster with fewer bits and more GPUs."""
    tp, batch, isl = int(str(axes["tp"])), int(str(axes["max_batch_size"])), int(str(axes["isl"]))
    bits = {"fp16": 16, "fp8": 8, "int8_sq": 8.5, "int4_awq": 5}[str(axes["precision"])]
    for concurrency in (1, 2, 4, 8, 16):
        tpot_ms = bits / tp**0.8 * (1 + concurrency / batch) * 0.8
        ttft_ms = isl / 25 / tp**0.7 * (1 + concurrency / batch) + 4
        rate = concurrency * 1000 / (tpot_ms + ttft_ms / 256) * min(1.0, batch / concurrency)
        latencies = {
            name: {
                "n": 200,
                "mean": p50 * 1.05,
                "p50": round(p50, 3),
                "p90": round(p50 * 1.3, 3),
                "p95": round(p50 * 1.5, 3),
                "p99": round(p50 * 2, 3),
            }
            for name, p50 in (("ttft_ms", ttft_ms), ("tpot_ms", tpot_ms), ("e2e_ms", ttft_ms + 255 * tpot_ms))
        }
        repeats = tuple(RepeatResult(output_tokens_per_s=round(rate * share, 3)) for share in (0.99, 1, 1.02))
        lengths = {
            "input_tokens_per_request": {"n": 200, "mean": isl * 0.8, "p99": isl, "max": isl},
            "output_tokens_per_request": {"n": 200, "mean": 250.5, "p99": 256, "max": 256},
        }
        yield LevelResult(
            concurrency=concurrency,
            requests=200,
            failures=0,
            duration_s=60.0,
            input_tokens_per_s=round(rate * isl / 256, 3),
            output_tokens_per_s=round(rate, 3),
            requests_per_s=2.0,
            window="steady",
            latencies=latencies,
            repeats=repeats,
            lengths=lengths,
        )


def drift(reference: str, before: float, after: float) -> Drift:
    """Nine of ten answers are the same; the score `exact` went from `before` to `after`."""
    change = after - before
    exact = ScoreDrift(500, before, after, change, (change - 0.02, change + 0.02), 5, 9)
    return Drift(500, 0, 0.9, (0.87, 0.92), {"n": 50, "p50": 12}, None, {"exact": exact}, reference)


def row(number: int) -> CellResult:
    """Cell `number`. Every 11th failed, every 13th can never work; the first has all it can have."""
    axes = _axes(number)
    id_ = _id(axes)
    if number % 13 == 12:
        return CellResult(id_, axes, CellStatus.INFEASIBLE, reason="32 heads cannot be split over tp 3")
    if number % 11 == 10:
        reason = f"build: CUDA out of memory while building {HOSTILE}"
        return CellResult(
            id_, axes, CellStatus.FAILED, "build", "out_of_memory", reason, "lower max_batch_size", "work/x/log"
        )
    score = {"fp16": 0.82, "fp8": 0.815, "int8_sq": 0.79, "int4_awq": 0.70}[str(axes["precision"])]
    return CellResult(
        id_,
        axes,
        CellStatus.DONE if number % 3 else CellStatus.UP_TO_DATE,
        seconds={"build": 60.0 + number % 50, "perf": 80.0},
        engine_size_bytes=13_000_000_000 // (1 + number % 4),
        levels=tuple(_levels(axes)),
        accuracy={"exact": score, "rouge_l": score - 0.1},
        accuracy_total=500,
        accuracy_intervals={"exact": (score - 0.03, score + 0.03)},
        accuracy_drift=None if axes["precision"] == "fp16" else drift(_id({**axes, "precision": "fp16"}), 0.82, score),
        conditions=CONDITIONS,
        findings=(f"warning: the client was late by {number % 7 + 5}.0 ms {HOSTILE}",) if number % 5 == 0 else (),
    )


def hostile_row() -> CellResult:
    """A cell whose every text is an attack."""
    axes: dict[str, Json] = {**_axes(0), "model": HOSTILE, "precision": HOSTILE}
    level = LevelResult(
        concurrency=1,
        requests=10,
        failures=0,
        duration_s=1.0,
        input_tokens_per_s=1.0,
        output_tokens_per_s=1.0,
        requests_per_s=1.0,
        window=HOSTILE,
        latencies={"ttft_ms": {"p50": 1.0, "n": 10}},
    )
    return CellResult(
        CellId(f"{HOSTILE}/a'b\"c&d"),
        axes,
        CellStatus.DONE,
        reason=HOSTILE,
        hint=HOSTILE,
        levels=(level,),
        accuracy={HOSTILE: 0.5},
        accuracy_total=3,
        findings=(HOSTILE,),
    )


def stage(name: str, number: int, cells: tuple[CellId, ...], start_s: float, seconds: float, gpus: int) -> StageRecord:
    """One stage run of this run, or a cache hit when `seconds` is 0."""
    service = name == "launch"
    ending = Ending.UP_TO_DATE if seconds == 0 else Ending.SERVED if service else Ending.MADE
    outcome = "stopped" if service else "succeeded"
    return StageRecord(
        id=StageRunId(f"{name}-{number:012x}"),
        stage=name,
        name=str(cells[0]),
        fingerprint=Fingerprint(f"{number:032x}"),
        scope=Scope.SERVICE if service else Scope.IN_SERVICE if name in STAGES[5:] else Scope.ARTIFACT,
        inputs=(),
        after=(),
        cells=cells,
        ending=ending,
        attempts=() if seconds == 0 else (StageAttempt(START_S + start_s, START_S + start_s + seconds, outcome),),
        made_s=12.5,
        planned="not made yet",
        failure=None,
        message=None,
        hint=None,
        commands=(
            ("python3", "-m", "trtllm_pipeline", name, "--engine", f"/data/my engines/{number:032x}/out", "--max-batch-size", "8"),
        ),
        folder=None,
        log=f"{name} {number} began\n{HOSTILE}\n\x1b[31mred\x1b[0m\n" + "step done\n" * (number % 9),
        server_log="",
        server_command="",
        resources={"cpus": 2, "gpus": gpus if service else 0, "downloads": 0},
        exclusive="machine" if service else "none",
        gpus=("GPU-00000000-1111",) if service else (),
        provenance={"run": "run-1", "attempt": 1, "duration_s": 12.5, "cpu_s": 20.0, "max_rss_bytes": 2_000_000_000, "peak_bytes": 2_000_000_000},
        key={"params": {"n": number}, "identity": {"triton": "2.61", "gpu": "H100 80GB"}},
        files=3,
        size_bytes=1_000_000,
    )  # fmt: skip


def run(cells: int, *, hostile: bool = False) -> tuple[tuple[CellResult, ...], Record]:
    """Rows and record of a run of so many cells."""
    rows = tuple(row(number) for number in range(cells))
    if hostile:
        rows = (*rows, hostile_row())
    stages: list[StageRecord] = []
    clock = 0.0
    for number, one in enumerate(rows):
        if one.status is CellStatus.INFEASIBLE:
            continue
        for place, name in enumerate(STAGES):
            if name == "download":
                if number == 0:
                    stages.append(stage(name, 0, tuple(other.id for other in rows), 0.0, 30.0, 0))
                continue
            seconds = 0.0 if one.status is CellStatus.UP_TO_DATE else 5.0 + math.sin(number) * 4
            record = stage(name, number * 8 + place, (one.id,), clock, seconds, int(str(one.axes["tp"])))
            if one.status is CellStatus.FAILED and name == "build":
                record = _failed(record, one)
                stages.append(record)
                break
            stages.append(record)
            clock += seconds / 3
    about = RunRow(
        "run-1", "matrix.yaml", ("pipeline", "run", "-m", "my matrix.yaml"), START_S, START_S + clock + 20, 1
    )
    return rows, Record("run-1", about, {"matrix": "/data/matrix.yaml", "sets": []}, tuple(stages))


def _failed(record: StageRecord, one: CellResult) -> StageRecord:
    import dataclasses

    attempts = tuple(dataclasses.replace(attempt, outcome="failed") for attempt in record.attempts)
    return dataclasses.replace(
        record, ending=Ending.FAILED, attempts=attempts, failure=one.failure, message=one.reason, hint=one.hint
    )


def to_html(
    rows: Sequence[CellResult],
    record: Record,
    matrix: str = "",
    *,
    plots: bool = True,
    comparison: Comparison | None = None,
    **more: Any,
) -> str:
    """The HTML page of these results."""
    report = Report(rows=rows, matrix=matrix, record=lambda: record, previous=lambda: comparison, **more)
    return page.to_html(report, plots=plots)
