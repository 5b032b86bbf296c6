"""Invocations that wait for one another, real processes: each gets its turn, whatever the others would begin meanwhile."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import pytest
from typing_extensions import Self

from tests.helpers.waiting import eventually
from trtllm_pipeline.base.domain import Exclusive
from trtllm_pipeline.orchestrate.store import claims

ROOT = Path(__file__).resolve().parents[2]

MANY = "400"
"""Stage runs of 0.2 s each, two at a time: more than the turn of whoever waits takes, even on a busy machine."""
TURN_S = 60.0
"""In which whoever waits has had its turn. It takes some seconds."""


class Invocation:
    """One on a workspace of its own; what it says that it waits for is in a file."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.said = folder / f"{words[0]}.said"
        with self.said.open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.helpers.invocation", str(folder / words[0]), *words[1:]],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )

    def begins(self) -> Self:
        """Return when it starts the next: to build or to measure."""
        assert self.process.stdout is not None
        stage, when = self.process.stdout.readline().split()
        assert stage in {"make", "look"}
        self.begun_s = float(when)
        return self

    @property
    def works(self) -> bool:
        """Whether it still has something to do."""
        return self.process.poll() is None

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


Invoke: TypeAlias = Callable[..., Invocation]


@pytest.fixture
def leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return claims.machine_leases()


@pytest.fixture
def invoke(leases: Path) -> Iterator[Invoke]:
    """Start an invocation: name, what it does how many times, GPUs. All share the machine, and end with the test."""
    with ExitStack() as ending:

        def start(*words: str, seconds: float = 0.2) -> Invocation:
            one = Invocation(leases.parent, *words[:3], str(seconds), *words[3:])
            ending.callback(one.end)
            return one

        yield start


def test_who_measures_alone_comes_to_it_although_others_always_have_something_that_works(
    invoke: Invoke,
) -> None:
    building = [invoke(name, "builds", MANY).begins() for name in "ab"]
    measuring = invoke("c", "measures", "3")
    assert measuring.process.wait(TURN_S) == 0
    assert [each.works for each in building] == [True, True], "long before the others had nothing more to do"
    why = [line for line in building[0].said.read_text().splitlines() if "which is also waiting and came first" in line]
    assert any(f"process {measuring.process.pid} " in line for line in why), "who is held back is told for whom"
    for each in building:
        each.begins()


@pytest.mark.seam
def test_first_come_first_served(invoke: Invoke, leases: Path) -> None:
    for built in [invoke(name, "builds", "1") for name in "abc"]:
        assert built.process.wait(TURN_S) == 0
    held, _ = claims.lease_machine((), exclusive=Exclusive.MACHINE) or ([], ())
    every = list[Invocation]()
    for words in ("a", "measures", "1"), ("b", "builds", "2"), ("c", "measures", "1"):
        every.append(invoke(*words))
        assert eventually(
            lambda: (leases / "waiting").exists() and len(list((leases / "waiting").iterdir())) == len(every)
        )
    for claim in held:
        claim.release()
    begun = [each.begins().begun_s for each in every]
    assert begun == sorted(begun)


def test_who_waits_for_gpus_is_in_nobodys_way_who_needs_others_or_none(invoke: Invoke) -> None:
    held, _ = claims.lease_machine(("GPU-a",)) or ([], ())
    waits = invoke("a", "pairs", "1", "GPU-a", "GPU-b")
    assert eventually(lambda: "in use" in waits.said.read_text())
    assert invoke("b", "builds", "2").process.wait(TURN_S) == 0
    assert invoke("c", "builds", "2", "GPU-c").process.wait(TURN_S) == 0
    behind = invoke("d", "builds", "1", "GPU-b")
    assert eventually(lambda: "came first" in behind.said.read_text())
    for claim in held:
        claim.release()
    assert waits.process.wait(TURN_S) == 0
    assert behind.process.wait(TURN_S) == 0


def test_nobody_waits_for_who_waited_and_was_killed(invoke: Invoke, leases: Path) -> None:
    held, _ = claims.lease_machine(()) or ([], ())
    waits = invoke("a", "measures", "1")
    assert eventually((leases / "waiting").exists)
    behind = invoke("b", "builds", "1")
    assert eventually(lambda: f"process {waits.process.pid} " in behind.said.read_text())
    waits.end()
    assert behind.process.wait(TURN_S) == 0
    assert not (leases / "waiting").exists()
    for claim in held:
        claim.release()


def test_nobody_waits_for_who_waits_for_a_server_that_stands_by_itself(invoke: Invoke, leases: Path) -> None:
    server, _ = claims.lease_machine(("GPU-a",), enter=claims.enter_standing) or ([], ())
    alone = invoke("a", "measures", "1")
    pair = invoke("b", "pairs", "1", "GPU-a", "GPU-b")
    assert eventually(lambda: all("in use" in each.said.read_text() for each in (alone, pair)))
    assert invoke("c", "builds", "4", "GPU-b").process.wait(TURN_S) == 0
    assert not (leases / "waiting").exists()
    for claim in server:
        claim.release()
    assert [each.process.wait(TURN_S) for each in (alone, pair)] == [0, 0]


def test_many_that_wait_for_one_another_all_come_to_it(invoke: Invoke, leases: Path) -> None:
    """Of every kind, more than there is room for: none holds up another for ever."""
    gpus = ("GPU-a", "GPU-b")
    kinds = {"a": "measures", "b": "builds", "c": "pairs", "d": "measures", "e": "pairs"}
    every = [invoke(name, kind, "8", *gpus, seconds=0.05) for name, kind in kinds.items()]
    assert [each.process.wait(3 * TURN_S) for each in every] == [0] * len(every)
    assert not (leases / "waiting").exists()
    assert claims.lease_machine(gpus, exclusive=Exclusive.MACHINE) is not None
