"""One level distributed over several processes, for more requests in flight than one event loop can handle."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trtllm_pipeline.base import ServerError
from trtllm_pipeline.measure.load.load import EventFile, Level, Share, run_level
from trtllm_pipeline.measure.load.target import Target

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized
    from multiprocessing.synchronize import Barrier

SLOTS_PER_WORKER: Final = 128
REQUESTS_PER_S_PER_WORKER: Final = 200.0
_CONNECT_S: Final = 60.0
_LOOK_S: Final = 0.1


def wanted(level: Level, requested: int | None = None) -> int:
    """Number of processes for a level: the requested number, or as many as leave the server at least half of the cores.

    Never more than the requests in flight: each process needs at least one.
    """
    if requested is None:
        if level.request_rate is not None:
            full = level.request_rate / REQUESTS_PER_S_PER_WORKER
        else:
            full = (level.concurrency or 1) / SLOTS_PER_WORKER
        requested = max(1, min(-int(-full // 1), (os.cpu_count() or 2) // 2))
    return min(requested, level.max_in_flight or requested)


async def run(target: Target, level: Level, events: Path, done: Callable[[], None], *, workers: int) -> None:
    """Run `level` in `workers` processes that append to `events`, `done` at each request. Raises ServerError."""
    import multiprocessing

    # A process forked from one with threads and open connections would inherit their locks, so these start fresh.
    context = multiprocessing.get_context("spawn")
    number, warm, ended, start_ns = (context.Value("q", 0) for _ in range(4))
    barrier = context.Barrier(workers)
    processes = [
        context.Process(
            target=_work,
            args=(target, level, events, Share(worker, workers, number, warm), ended, start_ns, barrier),
            name=f"perf worker {worker}",
            daemon=True,
        )
        for worker in range(workers)
    ]
    reported = 0
    try:
        for process in processes:
            process.start()
        while any(process.exitcode is None for process in processes):
            await asyncio.sleep(_LOOK_S)
            reported = _tell(ended.value, reported, done)
            if any(process.exitcode for process in processes):
                barrier.abort()
        _tell(ended.value, reported, done)
    finally:
        for process in processes:
            if process.pid is not None and process.exitcode is None:
                process.terminate()
                process.join(5)
    failed = [process.exitcode for process in processes if process.exitcode]
    if failed:
        raise ServerError(f"{len(failed)} of {workers} load processes failed (exit code {failed[0]}), see above")


def _tell(ended: int, reported: int, done: Callable[[], None]) -> int:
    for _ in range(ended - reported):
        done()
    return ended


def _work(
    target: Target,
    level: Level,
    events: Path,
    share: Share,
    ended: Synchronized[int],
    start_ns: Synchronized[int],
    barrier: Barrier,
) -> None:
    # The parent handles Ctrl-C and ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def done() -> None:
        with ended.get_lock():
            ended.value += 1

    def begin() -> int:
        if barrier.wait(_CONNECT_S) == 0:
            start_ns.value = time.monotonic_ns()
        barrier.wait(_CONNECT_S)
        return start_ns.value

    async def part() -> None:
        async with target.client() as client:
            with EventFile(events) as file:
                await run_level(client, level, target.generation, file, done, share=share, begin=begin)

    asyncio.run(part())
