"""An invocation as a process of its own, whose stage runs only take time: real loop, scheduler, store and leases.

    python -m tests.helpers.invocation WORKSPACE KIND NUMBER SECONDS [GPU ...]

KIND is what it has to do, NUMBER times: `builds`, `measures` (servers alone on the machine), `pairs` (builds on two GPUs).
With GPUs, `builds` takes one. Each begin is a line: `make`, or `look`, which measures in a server, and when.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.unit.conftest import MACHINE, make_cell, make_toolchain
from trtllm_pipeline.base.domain import Resources, Scope, StageRunId
from trtllm_pipeline.base.errors import StageError
from trtllm_pipeline.base.machine.model import Gpu
from trtllm_pipeline.orchestrate.plan.plan import StageRun, make_plan
from trtllm_pipeline.orchestrate.run.executor import Ended, ExecutorEvent, Job, Ready, Usage
from trtllm_pipeline.orchestrate.run.loop import Execution, Observer
from trtllm_pipeline.orchestrate.run.scheduler import Capacity
from trtllm_pipeline.orchestrate.store.store import Store


class TimedExecutor:
    """Every job ends well after a while, a server when it is stopped."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.due: list[tuple[float, ExecutorEvent]] = []

    def submit(self, job: Job, claims: Sequence[int]) -> None:
        if job.stage in {"make", "look"}:
            print(job.stage, time.monotonic(), flush=True)
        if job.scope is Scope.SERVICE:
            (Path(job.attempt) / "service.json").write_text("{}")
            self.due.append((0.0, Ready(job.id)))
        else:
            (Path(job.attempt) / "out" / "result").write_text(job.id)
            took = 0.0 if job.stage == "get" else self.seconds
            self.due.append((time.monotonic() + took, Ended(job.id, None, Usage(took, took, 1000))))

    def stop(self, job: StageRunId, grace_s: float) -> None:
        self.due.append((0.0, Ended(job, StageError("stopped"), Usage(0.1, 0.1, 1000))))

    def wait(self, timeout_s: float) -> list[ExecutorEvent]:
        first = min((when for when, _ in self.due), default=float("inf"))
        time.sleep(max(0.0, min(timeout_s, first - time.monotonic())))
        now = time.monotonic()
        over = [event for when, event in self.due if when <= now]
        self.due = [(when, event) for when, event in self.due if when > now]
        return over

    def close(self) -> None:
        pass


class Waiting(Observer):
    """Says for whom it waits, on stderr."""

    def waiting(self, run: StageRun, why: str) -> None:
        print(f"{run.stage.name}: {why}", file=sys.stderr, flush=True)


def main(workspace: str, kind: str, number: str, seconds: str, *gpus: str) -> int:
    """Do it; 0 when all of it was done."""
    toolchain = make_toolchain()
    get, make, serve, look = toolchain.stages
    make = replace(make, resources=lambda _cell, _machine: Resources(gpus=2 if kind == "pairs" else min(1, len(gpus))))
    cells = [make_cell(f"p{each}", model=Path(workspace).name) for each in range(int(number))]
    plan = make_plan(
        cells,
        {"toy": replace(toolchain, stages=(get, make, serve, look))},
        replace(MACHINE, gpus=tuple(Gpu(index, name, "GPU", 1 << 30, 90) for index, name in enumerate(gpus))),
        digest=lambda name, _cell: (f"/{name}", "d"),
        until=None if kind == "measures" else "make",
    )
    on = Capacity(cpus=2, downloads=2, gpus=gpus)
    executor = TimedExecutor(float(seconds))
    store = Store(Path(workspace))
    return Execution(plan, store, executor, Waiting(), run_id="r", nodes=[on], present={}).run().exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
