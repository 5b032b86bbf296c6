"""What is run by hand takes leases as a run does: GPUs of its own, and nothing beside a measurement."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.helpers.jobs import job
from tests.helpers.waiting import eventually
from tests.unit.conftest import MACHINE, Make, make_toolchain
from trtllm_pipeline.base.domain import Exclusive, Resources, Scope
from trtllm_pipeline.base.errors import UsageError
from trtllm_pipeline.base.machine import model as machines
from trtllm_pipeline.base.machine import probe
from trtllm_pipeline.orchestrate.run import by_hand
from trtllm_pipeline.orchestrate.run.executor import read_job
from trtllm_pipeline.orchestrate.store import claims
from trtllm_pipeline.tensorrt.stage.base import StageContext

GPUS = tuple(machines.Gpu(index, f"GPU-{name}", "GPU", 1 << 30, 90) for index, name in enumerate("ab"))
SEES = "import os, sys; open(sys.argv[1], 'w').write(os.environ.get('CUDA_VISIBLE_DEVICES', 'all'))"


@pytest.fixture(autouse=True)
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    monkeypatch.setattr(probe, "this_machine", lambda: replace(MACHINE, gpus=GPUS))


def job_file(tmp_path: Path, command: Sequence[str], gpus: tuple[str, ...] = ()) -> Path:
    """A job file of a run elsewhere, on GPUs that this machine does not have."""
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    path = tmp_path / "job.json"
    job(tmp_path, "build", command=tuple(command), environment=environment, gpus=gpus).write(path)
    return path


def replayed(tmp_path: Path, gpus: tuple[str, ...]) -> str:
    seen = tmp_path / "seen"
    attempt = tmp_path / f"attempt-{time.monotonic_ns()}"
    attempt.mkdir()
    by_hand.replay(
        read_job(job_file(tmp_path, [sys.executable, "-c", SEES, str(seen)], gpus)), attempt, {}, lambda _command: None
    )
    return seen.read_text()


def release(held: Iterable[claims.Claim]) -> None:
    for claim in held:
        claim.release()


def test_a_job_sees_as_many_free_gpus_as_it_had(tmp_path: Path) -> None:
    assert replayed(tmp_path, ("GPU-elsewhere",)) == "GPU-a"
    assert replayed(tmp_path, ("GPU-x", "GPU-y")) == "GPU-a,GPU-b"
    assert replayed(tmp_path, ()) == "GPU-a,GPU-b", "one without GPUs is left what was set"
    held, _ = claims.lease_machine(("GPU-a",)) or ([], ())
    assert replayed(tmp_path, ("GPU-elsewhere",)) == "GPU-b"
    release(held)


@pytest.mark.parametrize("gpus", [("GPU-x", "GPU-y"), ()])
def test_a_job_waits_and_says_for_whom(
    tmp_path: Path, gpus: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = Exclusive.NONE if gpus else Exclusive.MACHINE
    held, _ = claims.lease_machine(("GPU-b",), exclusive=rule) or ([], ())
    looks = iter([lambda: None, lambda: release(held)])
    monkeypatch.setattr(by_hand.time, "sleep", lambda seconds: next(looks)() if seconds == by_hand._POLL_S else None)
    assert replayed(tmp_path, gpus) == "GPU-a,GPU-b"
    assert not list(looks), "it looked again"
    what = "these GPUs" if gpus else "this machine"
    assert capsys.readouterr().err.count(f"build waits: another invocation or a managed server is using {what}") == 1


def test_a_stage_by_hand_has_gpus_of_its_own(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    stage = replace(
        make_toolchain().stage("make"),
        program=None,
        gpus=lambda _context: 1,
        commands=lambda _context, _machine: [[sys.executable, "-c", SEES, str(seen)]],
    )
    held, _ = claims.lease_machine(("GPU-a",)) or ([], ())
    given = StageContext(Make(precision="fp16", batch=1), {}, {}, tmp_path / "out", tmp_path)
    by_hand.run(stage, given, lambda _command: None)
    assert seen.read_text() == "GPU-b"
    release(held)
    assert claims.lease_machine(("GPU-a", "GPU-b"), exclusive=Exclusive.MACHINE) is not None


BUILDS = """
from trtllm_pipeline.orchestrate.store import claims
held = claims.lease_machine(())
print("in" if held else "out", flush=True)
input()
"""


@contextmanager
def another_invocation() -> Iterator[tuple[bool, int]]:
    """Another process that builds, for as long as the block runs; whether it was let in, and its process id."""
    words = [sys.executable, "-c", BUILDS]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process.stdout.readline() == "in\n", process.pid
        process.communicate("\n")


@dataclass(frozen=True)
class Measures:
    exclusive: str | None = None


def measure(tmp_path: Path, during: Callable[[], None], monkeypatch: pytest.MonkeyPatch, rule: str | None) -> None:
    """A stage by hand that measures, on a server that was launched by hand and takes leases itself."""
    toolchain = make_toolchain()
    server = replace(toolchain.stage("make"), name="launch", scope=Scope.SERVICE)
    perf = replace(toolchain.stage("make"), name="perf", scope=Scope.IN_SERVICE)
    given = StageContext(Measures(rule), {}, {}, tmp_path / "out", tmp_path)

    def program(_program: str, name: str, _context: object) -> None:
        if name == "launch":
            by_hand.run(perf, given, lambda _command: None)
        else:
            during()

    monkeypatch.setattr(by_hand, "run_program", program)
    by_hand.run(server, given, lambda _command: None)


@pytest.mark.parametrize("rule", [None, "gpu", "none"])
def test_nothing_begins_beside_what_is_measured_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str | None
) -> None:
    let_in = []

    def others() -> None:
        with another_invocation() as (builds, _):
            let_in.append(builds)
        if measures := claims.lease_machine((), exclusive=Exclusive.GPU):
            release(measures[0])
        let_in.append(measures is not None)

    measure(tmp_path, others, monkeypatch, rule)
    assert let_in == [rule == "none", False], "a run measures beside no server that stands by itself"
    with another_invocation() as (builds, _):
        assert builds


def test_what_is_measured_by_hand_waits_for_work_but_for_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with another_invocation() as (builds, other):
        assert builds
        measured = threading.Event()
        monkeypatch.setattr(by_hand, "_POLL_S", 0.01)
        thread = threading.Thread(target=measure, args=(tmp_path, measured.set, monkeypatch, None))
        thread.start()
        parts = list[str]()
        assert eventually(lambda: parts.append(capsys.readouterr().err) or any(parts))
        assert not measured.is_set()
    thread.join(60)
    assert measured.is_set()
    said = "".join((*parts, capsys.readouterr().err))
    assert said.startswith(f"perf waits: process {other} (")
    assert said.count("process") == 1


def test_a_job_that_measured_measures_alone(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    looks = BUILDS.replace("input()", "import sys; open(sys.argv[1], 'w').write(str(held))")
    command = (sys.executable, "-c", looks, str(tmp_path / "seen"))
    job(tmp_path, "perf", command=command, resources=Resources(exclusive=Exclusive.MACHINE)).write(path)
    (tmp_path / "attempt").mkdir()
    by_hand.replay(read_job(path), tmp_path / "attempt", {}, lambda _command: None)
    assert (tmp_path / "seen").read_text() == "None"


def test_a_program_of_ours_has_them_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = replace(make_toolchain().stage("make"), gpus=lambda _context: 1)
    seen = []
    monkeypatch.setattr(by_hand, "run_program", lambda *_: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]))
    by_hand.run(stage, StageContext(Make(precision="fp16"), {}, {}, tmp_path / "out", tmp_path), lambda _command: None)
    assert seen == ["GPU-a"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b", "as it was"


HELD = """
from trtllm_pipeline.base.domain import Exclusive, Scope
from trtllm_pipeline.orchestrate.run import by_hand
from trtllm_pipeline.base.machine import model, probe
gpu = model.Gpu(0, "GPU-a", "GPU", 1 << 30, 90)
probe.this_machine = lambda: model.Machine(1, "", (gpu,))
with by_hand._leased(None, "build", Scope.ARTIFACT, Exclusive.NONE, {}) as (_, held):
    by_hand._call("build", ["sh", "-c", "echo up >&2; exec sleep 30"], {}, held)
"""


def test_a_lease_is_held_until_the_last_process_that_uses_the_gpu_is_gone(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HELD], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.readline() == "up\n"
        (child,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert claims.lease_machine(("GPU-a",)) is None, "its program still runs"
        os.kill(child, signal.SIGKILL)
        assert eventually(lambda: claims.lease_machine(("GPU-a",)) is not None)


def test_ranks_are_read_from_what_a_stage_is_given(tmp_path: Path) -> None:
    from trtllm_pipeline.tensorrt.trtllm.backends import ranks_of

    for name, config in {
        "checkpoint": {"mapping": {"world_size": 4}},
        "engine": {"pretrained_config": {"mapping": {"world_size": 2}}},
        "weights": {"model_type": "qwen2"},
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    found = [ranks_of(tmp_path / name) for name in ("checkpoint", "engine", "weights", "none")]
    assert [*found, ranks_of(None)] == [4, 2, None, None, None]


@pytest.mark.parametrize("program", ["trtllm_pipeline.stages.convert:run", "trtllm_pipeline.tensorrt.no_such:run"])
def test_a_job_of_another_release_is_refused(tmp_path: Path, program: str) -> None:
    written = replace(job(tmp_path, "convert"), program=program)
    with pytest.raises(UsageError, match="another release wrote the job"):
        by_hand.replay(written, tmp_path / "attempt", {}, lambda _command: None)
