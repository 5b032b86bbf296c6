"""Processes below a server that a signal has ended, and that it does not collect."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from trtllm_pipeline.base.processes import guardian
from trtllm_pipeline.tensorrt.diagnosis import killed, out_of_memory

CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.argv[1], *sys.argv[2:]], executable="sleep")
print(child.pid, flush=True)
sys.stdin.read()
"""


@contextmanager
def server(*command: str) -> Iterator[tuple[int, int]]:
    """Process ids of a program that never looks after its child, and of the child; `command` is what that is called."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as one:
        assert one.stdout is not None
        try:
            child = int(one.stdout.readline())
            yield one.pid, child
        finally:
            one.kill()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(killed.time, "monotonic", lambda: now[0])
    return now


def end(child: int, signo: int) -> None:
    os.kill(child, signo)
    while (seen := guardian.look_up(child)) is not None and not seen.zombie:
        pass


def test_a_killed_model_process_is_named_once_it_stays_uncollected(clock: list[float]) -> None:
    with server(f"/backends/{killed.STUB}", "60") as (root, child):
        watch = killed.Watch(root, out_of_memory.counts())
        end(child, signal.SIGKILL)
        clock[0] += 1
        assert watch.look() is None, "its parent may be about to collect it"
        clock[0] += 0.5
        assert watch.look() is None, "it was never seen alive, so nobody knows what it was"
    with server(f"/backends/{killed.STUB}", "60") as (root, child):
        watch = killed.Watch(root, out_of_memory.counts())
        watch._models[child] = "tensorrt_llm"
        end(child, signal.SIGTERM)
        assert watch.look() is None
        clock[0] += 0.5
        assert watch.look() == ("the process of model tensorrt_llm", signal.SIGTERM)


def test_any_other_process_counts_where_the_kernel_ran_out_of_memory(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    with server("sleep", "60") as (root, child):
        watch = killed.Watch(root, out_of_memory.Counts(group={"events": 0}))
        monkeypatch.setattr(out_of_memory, "counts", lambda: out_of_memory.Counts(group={"events": 0}))
        end(child, signal.SIGKILL)
        assert watch.look() is None
        clock[0] += 0.5
        assert watch.look() is None, "the server may have ended it itself"
        monkeypatch.setattr(out_of_memory, "counts", lambda: out_of_memory.Counts(group={"events": 1}))
        clock[0] += 0.5
        assert watch.look() == (f"its process {child} (sleep)", signal.SIGKILL)


def test_what_ended_by_itself_is_nobody_s_kill(clock: list[float]) -> None:
    with server("sleep", "0") as (root, child):
        watch = killed.Watch(root, out_of_memory.counts())
        while (seen := guardian.look_up(child)) is not None and not seen.zombie:
            pass
        for _ in range(8):
            clock[0] += 0.25
            assert watch.look() is None


def test_a_stub_is_called_by_its_model() -> None:
    words = [b"/b/python/triton_python_backend_stub", b"/r/tensorrt_llm/1/model.py", b"shm"]
    assert killed.model_of(words) == "tensorrt_llm"
    assert killed.model_of([b"/usr/bin/python3", b"/r/m/1/model.py"]) is None
    assert killed.model_of([b""]) is None
