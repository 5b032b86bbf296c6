"""Stages that do what they should not, as real processes: nothing half is published, nothing is left, the reason is named."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.waiting import eventually
from tests.unit.conftest import MACHINE, STAGES, make_cell, make_toolchain
from trtllm_pipeline.base.errors import FailureClass, StageError
from trtllm_pipeline.orchestrate.plan.plan import Plan, make_plan
from trtllm_pipeline.orchestrate.run import executor as executing
from trtllm_pipeline.orchestrate.run.executor import Executor
from trtllm_pipeline.orchestrate.run.loop import Execution, Observer, Outcome
from trtllm_pipeline.orchestrate.run.scheduler import Capacity
from trtllm_pipeline.orchestrate.store.index import Artifact
from trtllm_pipeline.orchestrate.store.store import Store


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(executing, "_TIMEOUT_GRACE_S", 0.3)
    return Store(tmp_path / "w")


def plan_of(*scripts: str, timeout_s: float = 60.0) -> Plan:
    """One stage run that runs `scripts`."""
    commands = tuple(("sh", "-c", script) for script in scripts)
    stage = replace(STAGES[0], program=None, commands=lambda _context, _machine: commands, timeout_s=timeout_s)
    toolchain = replace(make_toolchain(), stages=(stage,))
    return make_plan([make_cell()], {"toy": toolchain}, MACHINE, digest=lambda name, _cell: (name, "d"))


def run(plan: Plan, store: Store) -> Outcome:
    on = Capacity(cpus=2, downloads=1)
    return Execution(plan, store, Executor(), Observer(), run_id="r", nodes=[on], present={}).run()


def failed(store: Store, *scripts: str, timeout_s: float = 60.0) -> StageError:
    outcome = run(plan_of(*scripts, timeout_s=timeout_s), store)
    assert outcome.exit_code == 1
    assert store.index.all_artifacts() == []
    assert not any(store.artifacts_dir.glob("*/*"))
    (error,) = outcome.errors.values()
    return error


def made(store: Store, *scripts: str) -> Artifact:
    outcome = run(plan_of(*scripts), store)
    assert outcome.exit_code == 0, outcome.errors
    (artifact,) = store.index.all_artifacts()
    assert [*store.verify()] == [[]]
    return artifact


@contextmanager
def at_most_more(size_bytes: int) -> Iterator[None]:
    """A limit of the memory that this process may take in addition. What it maps of files does not count."""
    status = Path("/proc/self/status").read_text().splitlines()
    taken_kib = next(int(line.split()[1]) for line in status if line.startswith("VmData:"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (taken_kib * 1024 + size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def ends(pid: int) -> bool:
    """Whether a process is gone, within a moment."""
    return eventually(lambda: not Path(f"/proc/{pid}").exists())


@pytest.mark.seam
def test_one_that_writes_nothing_has_failed(store: Store) -> None:
    assert "left no files" in failed(store, "echo done").message


@pytest.mark.seam
def test_one_that_ends_in_the_middle_of_writing_publishes_nothing(store: Store) -> None:
    assert "exit code 7" in failed(store, "echo x > out/engine; exit 7").message
    assert "SIGKILL" in failed(store, "echo x > out/engine; kill -9 $$").message


@pytest.mark.seam
def test_what_is_too_little_is_found_by_the_command_that_looks(store: Store) -> None:
    look = "test $(stat -c %s out/engine) -ge 10 || { echo 'ValueError: out/engine has 2 of 10 bytes' >&2; exit 1; }"
    assert "2 of 10 bytes" in failed(store, "echo x > out/engine", look).message


@pytest.mark.parametrize("ignored", ["", "INT TERM HUP"])
def test_one_that_hangs_ends_at_its_limit_whatever_it_ignores(store: Store, ignored: str) -> None:
    script = f"trap '' {ignored or 'USR1'}; echo $$ > out/pid; while :; do sleep 0.1; done"
    error = failed(store, script, timeout_s=3.0)
    assert error.failure is FailureClass.TIMEOUT
    pid = next(store.work_dir.glob("*/out/pid")).read_text()
    assert ends(int(pid))


@pytest.mark.seam
def test_what_one_leaves_behind_ends_with_it_and_adds_nothing(store: Store) -> None:
    leave = "setsid sh -c 'echo $$ > left; sleep 60; echo late > out/late' & while [ ! -s left ]; do sleep 0.01; done"
    artifact = made(store, f"{leave}; echo x > out/engine")
    assert ends(int((artifact.folder / "left").read_text()))
    assert os.listdir(artifact.out) == ["engine"]


def test_a_log_of_any_size_costs_no_memory(store: Store) -> None:
    size_bytes = 400_000_000
    say = f"yes 'iteration 17: loss 0.1' | head -c {size_bytes}"
    with at_most_more(300_000_000):
        error = failed(store, f"{say}; echo; echo 'RuntimeError: no such layer' >&2; exit 1")
        assert "no such layer" in error.message
        artifact = made(store, f"{say}; echo x > out/engine")
    assert (artifact.folder / "log").stat().st_size == size_bytes


@pytest.mark.seam
def test_a_log_that_is_no_text_is_quoted_as_far_as_it_is(store: Store) -> None:
    say = r"printf '\377\376 caf\351 \000\033[31m\n' >&2"
    error = failed(store, f"{say}; echo 'RuntimeError: no such layer' >&2; exit 1")
    assert "no such layer" in error.message
    assert (
        "RuntimeError" in failed(store, r"printf 'RuntimeError: caf\351 \377\n' >&2; exit 1").message.encode().decode()
    )
    assert b"\xff\xfe caf\xe9" in (made(store, f"{say}; echo x > out/engine").folder / "log").read_bytes()
