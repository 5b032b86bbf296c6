"""Many processes on one workspace's index at the same instant, from its first moment on."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from trtllm_pipeline.base.errors import StateError
from trtllm_pipeline.orchestrate.store.store import Store

FORK = multiprocessing.get_context("fork")
# The other threads of a pytest worker wait for its controller and hold no lock.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def at_once(number: int, does: Callable[[int], None]) -> list[int | None]:
    """The exit codes of `number` processes that do something at the same instant."""
    barrier = FORK.Barrier(number)

    def wait_and_do(barrier: Barrier, which: int) -> None:
        barrier.wait(60)
        does(which)

    processes = [FORK.Process(target=wait_and_do, args=(barrier, which)) for which in range(number)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes]


def work_on(workspace: Path, which: int) -> None:
    store = Store(workspace)
    for again in range(5):
        store.index.begin_run(f"{which}-{again}", "m.yaml", ())
    store.close()


def runs(workspace: Path) -> list[str]:
    store = Store(workspace)
    found = sorted(run.id for run in store.index.runs())
    store.close()
    return found


def expected(number: int) -> list[str]:
    return sorted(f"{which}-{again}" for which in range(number) for again in range(5))


@pytest.mark.parametrize("number", [2, 20])
def test_first_starts_at_once(tmp_path: Path, number: int) -> None:
    for again in range(2):
        workspace = tmp_path / str(again)
        assert at_once(number, lambda which, workspace=workspace: work_on(workspace, which)) == [0] * number
        assert runs(workspace) == expected(number)
        history = (workspace / "history.jsonl").read_text().split()
        assert len(history) == 2 * 5 * number  # a checksum and what it is of, for each


def test_starts_on_a_lost_index_at_once(tmp_path: Path) -> None:
    for again in range(3):
        workspace = tmp_path / str(again)
        Store(workspace).close()
        (workspace / "state.db").unlink()
        assert at_once(5, lambda which, workspace=workspace: work_on(workspace, which)) == [0] * 5
        assert runs(workspace) == expected(5)


def test_repairs_beside_work_lose_nothing(tmp_path: Path) -> None:
    def do(which: int) -> None:
        if which < 4:
            work_on(tmp_path, which)
            return
        for _ in range(5):
            store = Store(tmp_path)
            with suppress(StateError):  # while others use it
                store.repair()
            store.close()

    assert at_once(6, do) == [0] * 6
    assert runs(tmp_path) == expected(4)


@pytest.mark.seam
def test_killed_while_it_makes_the_index_the_next_makes_it(tmp_path: Path) -> None:
    Store(tmp_path).index.begin_run("first", "m.yaml", ())

    def repair_for_ever(_which: int) -> None:
        while True:
            store = Store(tmp_path)
            store.repair()
            store.close()

    for milliseconds in range(2, 40, 4):
        process = FORK.Process(target=repair_for_ever, args=(0,))
        process.start()
        process.join(0.02 + milliseconds / 1000)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert runs(tmp_path) == ["first"]
