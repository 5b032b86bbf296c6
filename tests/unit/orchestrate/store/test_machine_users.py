"""Who holds the machine and its GPUs, as the kernel tells it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trtllm_pipeline.base.domain import Exclusive
from trtllm_pipeline.orchestrate.store import claims

HOLD = """
import fcntl, sys
files = [open(path, "w") for path in sys.argv[2:]]
for file in files: fcntl.flock(file, {"shared": fcntl.LOCK_SH, "alone": fcntl.LOCK_EX}[sys.argv[1]])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return claims.machine_leases()


@pytest.fixture
def holder(leases: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that shares the machine and has the GPU a."""
    command = [sys.executable, "-c", HOLD, "shared", str(leases / "machine"), str(leases / "gpu-a")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_who_is_waited_for_is_told(holder: subprocess.Popen[str]) -> None:
    assert claims.lease_machine(("a",)) is None
    (said,) = claims.machine_users(("a",))
    assert said.startswith(f"process {holder.pid} (")
    assert claims.lease_machine((), exclusive=Exclusive.MACHINE) is None
    assert claims.machine_users((), exclusive=Exclusive.MACHINE) == (said,)


@pytest.mark.parametrize(
    ("lock", "words"),
    [
        ("work/abc.lock", "process {pid} in workspace {here} ("),
        (
            "serve/chat/lock",
            "the managed server chat in workspace {here} (process {pid}; pipeline serve stop chat -w {here} ends it)",
        ),
    ],
)
def test_a_claim_in_a_workspace_tells_which_it_is(leases: Path, tmp_path: Path, lock: str, words: str) -> None:
    claim = tmp_path / "here" / lock
    claim.parent.mkdir(parents=True)
    command = [sys.executable, "-c", HOLD, "alone", str(leases / "machine"), str(claim)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        (said,) = claims.machine_users(())
        assert claims.users(claim) == (said,)
        process.kill()
    assert said.startswith(words.format(pid=process.pid, here=tmp_path / "here"))


RULES = tuple(Exclusive)
BESIDE = {(Exclusive.NONE, Exclusive.NONE), (Exclusive.GPU, Exclusive.GPU)}


@pytest.mark.parametrize("first", RULES)
@pytest.mark.parametrize("second", RULES)
def test_only_work_runs_beside_work_and_measurements_beside_measurements(
    leases: Path, first: Exclusive, second: Exclusive
) -> None:
    held = claims.lease_machine(("a",), exclusive=first)
    assert held is not None
    beside = claims.lease_machine(("b",), exclusive=second)
    assert (beside is not None) == ((first, second) in BESIDE)
    for lease, _ in filter(None, (held, beside)):
        for claim in lease:
            claim.release()
    assert claims.lease_machine((), exclusive=Exclusive.MACHINE) is not None, "a refused lease holds nothing"


@pytest.mark.parametrize("kind", RULES)
def test_what_is_held_together_is_free_when_the_last_has_left_and_nobody_takes_it_up_again(
    leases: Path, kind: Exclusive
) -> None:
    enter = claims.SharedEntry()
    one, two = (claims.lease_machine((), exclusive=kind, enter=enter) for _ in range(2))
    assert one is not None
    assert two is not None
    (first, _), (second, _) = one, two
    assert [each.fd for each in first] == [each.fd for each in second], (
        "the same files, which processes of both inherit"
    )
    for claim in (*first, *first, *second[1:]):
        claim.release()
    enter.let_go()
    assert claims.lease_machine((), exclusive=Exclusive.MACHINE) is None
    second[0].release()
    assert claims.lease_machine((), exclusive=Exclusive.MACHINE) is None
    enter.let_go()
    alone = claims.lease_machine((), exclusive=Exclusive.MACHINE)
    assert claims.lease_machine((), exclusive=kind, enter=enter) is None
    for claim in alone[0]:
        claim.release()
    assert claims.lease_machine((), exclusive=kind, enter=enter) is not None, "and can be entered again"


def test_what_asks_a_standing_server_does_not_wait_for_its_end(leases: Path) -> None:
    command = [
        *(sys.executable, "-c", HOLD, "shared"),
        *(str(leases / name) for name in ("machine", "standing")),
    ]
    enter = claims.SharedEntry()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as standing:
        assert standing.stdout.readline() == "held\n"
        for kind in (Exclusive.MACHINE, Exclusive.GPU):
            assert claims.lease_machine((), exclusive=kind, enter=enter) is None
            one, two = (claims.lease_machine((), exclusive=kind, enter=enter, beside_standing=True) for _ in range(2))
            assert claims.lease_machine(()) is None, "what starts now would disturb it"
            for claim in (*one[0], *two[0]):
                claim.release()
            enter.let_go()
        assert claims.lease_machine(()) is not None
        standing.kill()


def test_what_asks_a_server_waits_for_what_works(holder: subprocess.Popen[str]) -> None:
    enter = claims.SharedEntry()
    assert claims.lease_machine((), exclusive=Exclusive.MACHINE, enter=enter, beside_standing=True) is None
    (said,) = claims.machine_users((), exclusive=Exclusive.MACHINE, beside_standing=True)
    assert said.startswith(f"process {holder.pid} (")


def test_who_must_be_alone_is_not_beside_what_is_held_together(leases: Path) -> None:
    enter = claims.SharedEntry()
    held = claims.lease_machine((), enter=enter)
    assert claims.lease_machine((), exclusive=Exclusive.MACHINE, enter=enter) is None
    assert claims.lease_machine((), exclusive=Exclusive.GPU, enter=enter) is None
    for claim in held[0]:
        claim.release()
    assert claims.lease_machine((), exclusive=Exclusive.MACHINE, enter=enter) is not None


def test_who_is_in_nobodys_way_is_not_told(holder: subprocess.Popen[str]) -> None:
    assert claims.machine_users(("b",)) == ()
    held, names = claims.lease_machine(("a",), others=("b",)) or ([], ())
    assert names == ("b",)
    assert claims.machine_users(("b",)) == ()  # that is this process
    for claim in held:
        claim.release()
    assert holder.poll() is None
