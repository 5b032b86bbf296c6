"""Plans of the embedded toolchain's own stages and stores filled by hand, without running anything."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from tests.unit.conftest import MACHINE
from trtllm_pipeline.base.domain import Cell, CellId, Json, StageRunId
from trtllm_pipeline.base.errors import StageError
from trtllm_pipeline.orchestrate.matrix.models import Settings
from trtllm_pipeline.orchestrate.plan.plan import Plan, StageRun, make_plan
from trtllm_pipeline.orchestrate.run.forecast import Durations
from trtllm_pipeline.orchestrate.store.index import Artifact, AttemptRow
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.tensorrt.embedded.toolchain import TOOLCHAIN

_TOOLCHAIN = dataclasses.replace(
    TOOLCHAIN, identity=lambda _machine: {"gguf": "1", "xllamacpp": "1", "triton": "1", "cpu": "test x 2"}
)


@lru_cache(maxsize=1)
def _settings() -> Mapping[str, Mapping[str, Json]]:
    return Settings().model_dump(mode="json")


def cell(precision: str = "fp16", batch: int = 4, *, model: str = "smollm2", reason: str | None = None) -> Cell:
    return Cell(
        id=CellId(f"{model}/{precision}/tp1pp1/bs{batch}/isl128-osl64"),
        model=model,
        toolchain="embedded",
        precision=precision,
        tp=1,
        pp=1,
        max_batch_size=batch,
        isl=128,
        osl=64,
        recipe={"source": {"hugging_face": model, "revision": "1"}},
        settings=_settings(),
        reason=reason,
    )


def plan(*cells: Cell, until: str | None = None) -> Plan:
    return make_plan(cells, {"embedded": _TOOLCHAIN}, MACHINE, digest=lambda path, _cell: (path, "digest"), until=until)


def stage_run(plan: Plan, cell: Cell, stage: str) -> StageRun:
    return next(plan.stage_runs[run] for run in plan.by_cell[cell.id] if plan.stage_runs[run].stage.name == stage)


def expected(plan: Plan, learnt: Mapping[str, float]) -> dict[StageRunId, float]:
    """What each stage run of `plan` is expected to take, after `learnt`."""
    durations = Durations(learnt, plan.machine)
    return {run.id: durations.expected(run) for run in plan.stage_runs.values()}


def begin(store: Store, run: StageRun, *, log: str = "hello\n") -> AttemptRow:
    attempt = store.begin("run-1", run.stage.name, run.fingerprint)
    attempt.log.write_text(log, encoding="utf-8")
    return attempt


def recorded(store: Store, attempt: AttemptRow, key: str, label: str, provenance: Mapping[str, Json]) -> Artifact:
    """What comes of an attempt: published and recorded."""
    return store.publish(attempt, store.seal(attempt, key, label, provenance))


def publish(store: Store, run: StageRun, files: Mapping[str, Any], *, seconds: float = 1.5) -> Artifact:
    """Publish an artifact; a file's content is bytes, or anything else as JSON."""
    attempt = begin(store, run)
    for name, content in files.items():
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (attempt.out / name).write_bytes(data)
    return recorded(store, attempt, run.key, run.label, {"duration_s": seconds})


def fail(store: Store, run: StageRun, error: StageError) -> Path:
    """Record a failed attempt; returns its log."""
    attempt = begin(store, run, log="loading\nno such tensor\n")
    error.log = attempt.log
    store.fail(attempt, "failed", error)
    return attempt.log


def level(concurrency: int, *, ttft_ms: float, output_tokens_per_s: float) -> dict[str, Any]:
    """One level of perf.json, with a few of its statistics."""
    return {
        "concurrency": concurrency,
        "requests": 40,
        "failures": 0,
        "headline": {"window": "whole", "reason": "short"},
        "duration_s": 12.5,
        "input_tokens_per_s": 1000.0,
        "output_tokens_per_s": output_tokens_per_s,
        "requests_per_s": 2.0,
        "ttft_ms": {"n": 40, "mean": ttft_ms + 1, "p50": ttft_ms, "p99": None},
        "tpot_ms": {"n": 0, "mean": None, "p50": None, "p99": None},
    }


PERF = {
    "schema": 1,
    "levels": [level(4, ttft_ms=90.0, output_tokens_per_s=250.0), level(1, ttft_ms=30.0, output_tokens_per_s=80.0)],
    "findings": [
        {"severity": "warning", "check": "client_cpu", "concurrency": 4, "message": "the client was busy"},
        {"severity": "info", "check": "repeated_prompts", "concurrency": None, "message": "prompts repeat"},
    ],
}
ACCURACY = {"schema": 1, "total": 50, "scores": {"exact": 0.5, "contains": 0.75}}


def publish_all(store: Store, plan: Plan, cell: Cell) -> None:
    """Publish whatever is missing of a cell, with plausible results."""
    for run_id in plan.by_cell[cell.id]:
        run = plan.stage_runs[StageRunId(run_id)]
        if run.stage.name == "launch" or store.get(run.stage.name, run.fingerprint):
            continue
        files = {"perf": {"perf.json": PERF}, "accuracy": {"accuracy.json": ACCURACY}}
        publish(store, run, files.get(run.stage.name, {"weights": b"x" * 1000}))
