"""A whole load run: every level after the other, with what the server and the GPU said of themselves meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trtllm_pipeline.perf import counters, workers
from trtllm_pipeline.perf.load import EventFile, Level, run_level
from trtllm_pipeline.perf.target import AnyClient, Target
from trtllm_pipeline.serving.client import running_since


async def run_levels(
    client: AnyClient,
    target: Target,
    plan: Sequence[Level],
    events: EventFile,
    done: Callable[[], None],
    *,
    processes: int | None = None,
) -> None:
    """Measure every level of `plan`; `done` is called for each request. `processes` None: as many as a level takes."""
    for level in plan:
        count = workers.wanted(level) if processes is None else processes
        before = await counters.triton(target.service.metrics)
        with counters.gpus() as gpus:
            if count == 1:
                await run_level(client, level, target.generation, events, done)
            else:
                await workers.run(target, level, events.path, done, workers=count)
        after = await counters.triton(target.service.metrics)
        if before is not None and after is not None:
            events.write("triton", **level.key, models=counters.growth(before, after))
        if gpus:
            events.write("gpu", **level.key, devices=gpus)


async def server(client: AnyClient, target: Target, at: str) -> dict[str, Any]:
    """The server record for `at`, the start or the end of a run."""
    pid = target.service.pid
    ready = all((await client.ready()).values())
    return {"at": at, "pid": pid, "since": None if pid is None else running_since(pid), "ready": ready}
