"""The loop between scheduler, store and executor, with an executor that only pretends."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import fabricated
from tests.helpers.fabricated import recorded
from tests.helpers.waiting import eventually
from tests.unit.conftest import MACHINE, make_cell, make_toolchain
from trtllm_pipeline.base.domain import Exclusive, Fingerprint, Needs, Resources, Scope, StageRunId, StageStatus
from trtllm_pipeline.base.errors import FailureClass, StageError, UsageError
from trtllm_pipeline.base.machine import model as machines
from trtllm_pipeline.base.machine import probe
from trtllm_pipeline.base.machine.gpus import Device, Graphics
from trtllm_pipeline.base.machine.probe import Survey
from trtllm_pipeline.orchestrate.plan.plan import Plan, StageRun, make_plan
from trtllm_pipeline.orchestrate.plan.stage_status import RERUN
from trtllm_pipeline.orchestrate.run import loop, order
from trtllm_pipeline.orchestrate.run.executor import Ended, ExecutorEvent, Job, Ready, Usage
from trtllm_pipeline.orchestrate.run.loop import Execution, Observer, Outcome
from trtllm_pipeline.orchestrate.run.order import simulate
from trtllm_pipeline.orchestrate.run.scheduler import Capacity, Scheduler
from trtllm_pipeline.orchestrate.run.work import Work, present_of, rerun_of
from trtllm_pipeline.orchestrate.store import claims, manifest
from trtllm_pipeline.orchestrate.store.index import AttemptRow
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.tensorrt.stage.base import StageContext

USAGE = Usage(0.1, 0.1, 1000)


class PretendExecutor:
    """Does every job at once; `failures` gives the errors a stage has, one an attempt."""

    def __init__(self, failures: Mapping[str, Sequence[StageError | None]] | None = None) -> None:
        self.failures = {stage: list(errors) for stage, errors in (failures or {}).items()}
        self.jobs: list[Job] = []
        self.events: list[ExecutorEvent] = []
        self.open: set[StageRunId] = set()
        self.alone = True
        self.on_submit: Callable[[Job], None] = lambda _job: None

    def submit(self, job: Job, claims: Sequence[int]) -> None:
        assert all(os.fstat(fd) for fd in claims)
        self.jobs.append(job)
        assert json.loads((Path(job.attempt) / "job.json").read_text())["id"] == job.id
        errors = self.failures.get(job.stage, [])
        error = errors.pop(0) if errors else None
        if job.scope is Scope.SERVICE:
            assert not self.open or not self.alone, "a measured service is alone"
            if error is not None:
                self.events.append(Ended(job.id, error, USAGE))
                return
            self.open.add(job.id)
            (Path(job.attempt) / "service.json").write_text("{}")
            self.events.append(Ready(job.id))
        else:
            if job.scope is Scope.IN_SERVICE:
                assert Path(job.inputs["service"]).exists()
            (Path(job.attempt) / "out" / "result").write_text(job.id)
            self.events.append(Ended(job.id, error, USAGE))
        self.on_submit(job)

    def stop(self, job: StageRunId, grace_s: float) -> None:
        error = None if job in self.open else StageError("died of SIGINT")
        self.open.discard(job)
        self.events.append(Ended(job, error, USAGE))

    def wait(self, timeout_s: float) -> list[ExecutorEvent]:
        events, self.events = self.events, []
        return events

    def close(self) -> None:
        assert not self.open, "services are stopped before the end"

    def stages(self) -> list[str]:
        return [job.stage for job in self.jobs]


def interrupted_at(stage: str) -> PretendExecutor:
    """An executor in whose run somebody types Ctrl-C while this stage is at work."""
    executor = PretendExecutor()

    def interrupt(job: Job) -> None:
        if job.stage == stage:
            executor.events.clear()
            os.kill(os.getpid(), signal.SIGINT)

    executor.on_submit = interrupt
    return executor


def when_polled(executor: PretendExecutor, times: int, do: Callable[[], None]) -> None:
    """Let something happen when the run has waited for events so many times."""
    wait, polls = executor.wait, iter(range(1, 1_000_000))

    def polled(timeout_s: float) -> list[ExecutorEvent]:
        if next(polls) == times:
            do()
        return wait(timeout_s)

    executor.wait = polled  # type: ignore[method-assign]


class Silent(Observer):
    def __init__(self) -> None:
        self.waits: list[str] = []
        self.errors: list[StageError] = []

    def changed(self, run: StageRun, status: StageStatus, error: StageError | None, seconds: float | None) -> None:
        if error is not None:
            self.errors.append(error)

    def waiting(self, run: StageRun, why: str) -> None:
        self.waits.append(why)


@pytest.fixture(autouse=True)
def own_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("trtllm_pipeline.orchestrate.run.scheduler.BACKOFF_S", 0.01)


def plan_of(
    *precisions: str, until: str | None = None, machine: machines.Machine = MACHINE, **changes: dict[str, Any]
) -> Plan:
    """Of stages that are changed by name, such as `make={"resources": ...}`."""
    cells = [make_cell(precision) for precision in precisions or ("fp16",)]
    toolchain = make_toolchain()
    stages = tuple(replace(stage, **changes.get(stage.name, {})) for stage in toolchain.stages)
    toys = {"toy": replace(toolchain, stages=stages)}
    return make_plan(cells, toys, machine, digest=lambda name, _cell: (f"/{name}", "d"), until=until)


def needing(**resources: Any) -> dict[str, Any]:
    return {"resources": lambda _cell, _machine: Resources(**resources)}


GPUS = tuple(machines.Gpu(index, name, "GPU", 1 << 30, 90) for index, name in enumerate(("GPU-a", "GPU-b")))


ON = Capacity(cpus=4, downloads=2)


def run(
    plan: Plan, store: Store, executor: PretendExecutor, observer: Silent | None = None, on: Capacity = ON, **more: Any
) -> Outcome:
    present = store.present({each.fingerprint: each.stage.name for each in plan.stage_runs.values()})
    made = Execution(plan, store, executor, observer or Silent(), run_id="r", nodes=[on], present=present, **more)
    return made.run()


def test_nothing_is_said_to_be_done_before_it_is_on_the_disk_and_recorded(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk: set[str] = set()
    told: list[str] = []
    seal, other = store.seal, Store(store.workspace)

    def noted(attempt: AttemptRow, *rest: Any) -> manifest.Manifest:
        sealed = seal(attempt, *rest)
        on_disk.add(attempt.fingerprint)
        return sealed

    class Listening(Silent):
        def changed(self, run: StageRun, status: StageStatus, error: StageError | None, seconds: float | None) -> None:
            if status is StageStatus.SUCCEEDED and run.stage.scope is not Scope.SERVICE:
                assert run.fingerprint in on_disk
                assert other.index.artifacts([run.fingerprint])
                assert not store.is_claimed(run.fingerprint)
                told.append(run.id)

    monkeypatch.setattr(store, "seal", noted)
    executor = PretendExecutor()
    assert run(plan_of("fp16", "fp8", "int8_wo"), store, executor, Listening()).exit_code == 0
    assert sorted(told) == sorted(job.id for job in executor.jobs if job.scope is not Scope.SERVICE)


def test_a_result_that_a_full_disk_cannot_hold_is_a_failure_and_is_made_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    outcome = run(plan_of(until="make"), store, PretendExecutor())
    assert [error.failure for error in outcome.errors.values()] == [FailureClass.USER]
    assert "cannot be published: no space is left" in str(next(iter(outcome.errors.values())))
    assert store.index.all_artifacts() == []
    assert not store.claimed(), "whoever continues in this process needs not wait for it"
    monkeypatch.undo()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(store.workspace))
    again = PretendExecutor()
    assert run(plan_of(until="make"), store, again).exit_code == 0
    assert again.stages() == ["get", "make"]


def test_what_was_published_is_recorded_although_what_ran_beside_it_cannot_be(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(job: Job) -> None:
        if job.stage == "make":
            raise RuntimeError("the executor is gone")

    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    executor = PretendExecutor()
    executor.on_submit = break_off
    monkeypatch.setattr(store, "fail", full)
    with pytest.raises(OSError, match="No space left"):
        run(plan_of(until="make"), store, executor)
    assert [each.stage for each in store.index.all_artifacts()] == ["get"]
    assert not store.claimed()


def test_everything_once_and_the_second_time_nothing(store: Store) -> None:
    executor = PretendExecutor()
    outcome = run(plan_of("fp16", "fp8"), store, executor)
    assert outcome.exit_code == 0
    assert sorted(executor.stages()) == ["get", "look", "look", "make", "make", "serve", "serve"]
    again = PretendExecutor()
    outcome = run(plan_of("fp16", "fp8"), store, again)
    assert again.jobs == []
    assert outcome.exit_code == 0
    assert set(outcome.statuses.values()) == {StageStatus.UP_TO_DATE, StageStatus.SKIPPED}


def test_a_measurement_is_repeated_on_request_and_replaces_the_old_one(store: Store) -> None:
    plan = plan_of("fp16", "fp8")
    run(plan, store, PretendExecutor())
    executor = PretendExecutor()
    work = Work(plan, store, present_of(plan, store), None, [ON], lambda: executor, rerun_of(plan, ["look"]))
    assert set(work.forecast().reasons.values()) == {RERUN, "needed by stages that use the server"}
    assert work.run(Silent(), run_id="again").exit_code == 0
    assert sorted(executor.stages()) == ["look", "look", "serve", "serve"]
    of_run = {each.stage: manifest.read(each.folder).provenance["run"] for each in store.index.all_artifacts()}
    assert of_run == {"get": "r", "make": "r", "look": "again"}
    with pytest.raises(UsageError, match="'make' does not measure anything"):
        rerun_of(plan, ["make"])


def test_what_no_forecast_expected_runs_as_well(store: Store) -> None:
    """Such as what an engine is made of that could not be pulled."""
    plan = plan_of()
    expected = {run: 1.0 for run, each in plan.stage_runs.items() if each.stage.name != "get"}
    executor = PretendExecutor()
    assert run(plan, store, executor, expected_s=expected).exit_code == 0
    assert "get" in executor.stages()


def test_a_failure_blocks_what_needs_it_and_nothing_else(store: Store) -> None:
    executor = PretendExecutor({"make": [StageError("boom"), None]})
    outcome = run(plan_of("fp16", "fp8"), store, executor)
    assert outcome.exit_code == 1
    assert sorted(executor.stages()) == ["get", "look", "make", "make", "serve"]
    (failed,) = [run for run, status in outcome.statuses.items() if status is StageStatus.FAILED]
    assert outcome.errors[failed].message == "boom"
    blocked = [run for run, status in outcome.statuses.items() if status is StageStatus.BLOCKED]
    assert {outcome.blocked_by[run] for run in blocked} == {failed}
    mended = PretendExecutor()
    assert run(plan_of("fp16", "fp8"), store, mended).exit_code == 0
    assert mended.stages() == ["make", "serve", "look"]


def test_transient_failures_are_tried_again(store: Store) -> None:
    executor = PretendExecutor({"get": [StageError("cut", failure=FailureClass.TRANSIENT)] * 2})
    observer = Silent()
    assert run(plan_of(), store, executor, observer).exit_code == 0
    assert executor.stages().count("get") == 3
    assert "attempt 2" in observer.waits[0]


def test_infeasible_is_remembered(store: Store) -> None:
    executor = PretendExecutor({"make": [StageError("never", failure=FailureClass.INFEASIBLE)]})
    assert run(plan_of(), store, executor).exit_code == 1
    again = PretendExecutor()
    outcome = run(plan_of(), store, again)
    assert again.stages() == [], "not even what it reads is fetched again"
    [error] = outcome.errors.values()
    assert error.message == "never (recorded in an earlier attempt)"
    assert "--retry-infeasible" in str(error.hint)
    run(plan_of(), store, again)
    assert list(store.index.infeasible().values()) == ["never"], "what is remembered does not grow"
    store.index.forget_infeasible()
    assert run(plan_of(), store, PretendExecutor()).exit_code == 0


def test_a_service_that_dies_is_the_cause_of_what_failed_in_it(store: Store) -> None:
    executor = PretendExecutor({"look": [StageError("connection refused")]})

    def die(job: Job) -> None:
        if job.stage == "look":
            service = next(iter(executor.open))
            executor.open.clear()
            executor.events.append(Ended(service, StageError("server died: out of shared memory"), USAGE))

    executor.on_submit = die
    observer = Silent()
    assert run(plan_of(), store, executor, observer).exit_code == 1
    assert any("out of shared memory" in error.message for error in observer.errors)
    assert not any("connection refused" in error.message for error in observer.errors)


def test_work_of_another_invocation_is_waited_for_not_repeated(store: Store) -> None:
    plan = plan_of(until="make")
    get = next(run for run in plan.stage_runs.values() if run.stage.name == "get")
    claim = store.claim(get.fingerprint)
    assert claim is not None
    other = Store(store.workspace)
    executor = PretendExecutor()
    observer = Silent()

    def other_finishes() -> None:
        attempt = other.begin("other", "get", get.fingerprint)
        (attempt.out / "result").write_text("theirs")
        recorded(other, attempt, get.key, get.label, {})
        claim.release()

    when_polled(executor, 3, other_finishes)
    outcome = run(plan, store, executor, observer)
    assert outcome.exit_code == 0
    assert executor.stages() == ["make"]
    assert observer.waits == ["another invocation works on it"], "this process itself is none"
    assert not outcome.comparable, "what it took is no error of its forecast"
    assert run(plan_of("p1", until="make"), store, PretendExecutor()).comparable


HOLD = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); input()"


def test_whose_work_is_waited_for_is_told(store: Store) -> None:
    plan = plan_of(until="make")
    get = next(run for run in plan.stage_runs.values() if run.stage.name == "get")
    lock = store.work_dir / f"{get.fingerprint}.lock"
    command = [sys.executable, "-c", HOLD, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline()
        executor, observer = PretendExecutor(), Silent()
        when_polled(executor, 3, other.kill)
        assert run(plan, store, executor, observer).exit_code == 0
    assert executor.stages() == ["get", "make"]
    (why,) = observer.waits
    assert why.startswith(f"process {other.pid} in workspace {store.workspace} ({sys.executable} -c")
    assert why.endswith(") works on it")


def test_the_machine_is_waited_for_while_another_invocation_measures(store: Store) -> None:
    lease = claims.lease_machine((), exclusive=Exclusive.MACHINE)
    assert lease is not None
    executor, observer = PretendExecutor(), Silent()

    def let_go() -> None:
        assert not executor.jobs
        for claim in lease[0]:
            claim.release()

    when_polled(executor, 20, let_go)
    assert run(plan_of(until="make"), store, executor, observer).exit_code == 0
    assert len(observer.waits) == 1, "why is said once"


def test_of_those_that_wait_for_the_same_lease_one_asks_for_all(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    precisions = [f"p{each}" for each in range(30)]
    assert run(plan_of("p0", until="get"), store, PretendExecutor()).exit_code == 0
    lease = claims.lease_machine((), exclusive=Exclusive.MACHINE)
    assert lease is not None
    asked: list[bool] = []
    polls: list[int] = []
    ask = claims.lease_machine

    def counted(*gpus: Any, **options: Any) -> Any:
        leased = ask(*gpus, **options)
        asked.append(leased is not None)
        return leased

    monkeypatch.setattr(loop, "lease_machine", counted)
    executor, observer = PretendExecutor(), Silent()
    wait = executor.wait

    def polled(timeout_s: float) -> list[ExecutorEvent]:
        polls.append(len(asked))
        if len(polls) == 10:
            assert len(observer.waits) == 30, "each is said to wait"
            assert len(asked) == 10
            for claim in lease[0]:
                claim.release()
        return wait(timeout_s)

    monkeypatch.setattr(executor, "wait", polled)
    assert run(plan_of(*precisions, until="make"), store, executor, observer).exit_code == 0
    assert asked == [False] * 10 + [True] * 30
    assert polls.index(40) < 20, "and when it is let in, all are"


ROOM_FOR_TWO = replace(ON, memory=(4 << 20, 1))


def plan_of_servers(*precisions: str) -> Plan:
    """Servers of known memory; in each, `look` measures, and `count` does not and comes after it."""
    toolchain = make_toolchain()
    get, make, serve, look = toolchain.stages
    serve = replace(serve, needs=lambda _cell, _machine: Needs(host=1 << 20))
    look = replace(look, resources=lambda _cell, _machine: Resources(exclusive=Exclusive.MACHINE))
    count = replace(look, name="count", section="look", after=("look",), resources=lambda _cell, _machine: Resources())
    cells = [replace(cell, recipe={**cell.recipe, "num_hidden_layers": 1}) for cell in map(make_cell, precisions)]
    toys = {"toy": replace(toolchain, stages=(get, make, serve, look, count))}
    return make_plan(cells, toys, MACHINE, digest=lambda name, _cell: (f"/{name}", "d"))


class Serving(PretendExecutor):
    """Looks at how many servers are there when something is begun, and whether others could use the machine."""

    def __init__(self, failures: Mapping[str, Sequence[StageError | None]] | None = None) -> None:
        super().__init__(failures)
        self.alone = False
        self.seen: list[tuple[str, int]] = []

    def submit(self, job: Job, claims: Sequence[int]) -> None:
        super().submit(job, claims)
        self.look(job.stage)

    def stop(self, job: StageRunId, grace_s: float) -> None:
        self.look("stop")
        super().stop(job, grace_s)

    def look(self, what: str) -> None:
        if self.open:
            assert claims.lease_machine(()) is None, "nobody else comes in as long as a server is there"
        self.seen.append((what, len(self.open)))


def test_the_next_server_is_under_the_claim_of_the_one_before(store: Store) -> None:
    executor = Serving()
    assert run(plan_of_servers("fp16", "fp8"), store, executor, on=ROOM_FOR_TWO).exit_code == 0
    first = executor.seen.index(("serve", 1))
    assert executor.seen[first : first + 5] == [("serve", 1), ("look", 1), ("count", 1), ("serve", 2), ("stop", 2)]
    assert executor.seen[first + 5 :] == [("look", 1), ("count", 1), ("stop", 1)]
    assert claims.lease_machine((), exclusive=Exclusive.MACHINE) is not None


def test_the_claim_is_kept_when_the_next_server_dies_before_the_one_it_got_it_from(store: Store) -> None:
    executor = Serving({"serve": [None, StageError("no such file")]})
    assert run(plan_of_servers("fp16", "fp8"), store, executor, on=ROOM_FOR_TWO).exit_code == 1
    assert executor.seen[-3:] == [("count", 1), ("serve", 1), ("stop", 1)]
    assert claims.lease_machine((), exclusive=Exclusive.MACHINE) is not None


def test_an_interrupt_ends_the_run_and_keeps_what_is_done(store: Store) -> None:
    outcome = run(plan_of(), store, interrupted_at("make"))
    assert outcome.exit_code == 130
    assert StageStatus.CANCELLED in outcome.statuses.values()
    executor = PretendExecutor()
    assert run(plan_of(), store, executor).exit_code == 0
    assert executor.stages() == ["make", "serve", "look"]


def test_a_service_that_is_stopped_before_it_was_ready_measured_nothing(store: Store) -> None:
    assert run(plan_of(), store, interrupted_at("serve")).exit_code == 130
    assert {peak.label.partition("/")[0] for peak in store.index.peaks()} == {"get", "make"}
    run(plan_of(), store, PretendExecutor())
    assert {peak.label.partition("/")[0] for peak in store.index.peaks()} >= {"get", "make", "serve"}


def test_a_signal_that_is_ignored_stays_ignored(store: Store) -> None:
    executor = PretendExecutor()
    executor.on_submit = lambda _job: os.kill(os.getpid(), signal.SIGHUP)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert run(plan_of(), store, executor).exit_code == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_durations_are_those_of_the_most_similar_that_ever_ran() -> None:
    plan = plan_of("fp16", "fp8", until="make")
    takes = fabricated.expected(plan, {"make": 9.0, "make/toy/m/fp8": 4.0})
    by_label = {plan.stage_runs[run].label: seconds for run, seconds in takes.items()}
    assert by_label == {"get/toy/m/fp16": 30.0, "make/toy/m/fp16": 9.0, "make/toy/m/fp8": 4.0}


def test_the_forecast_uses_the_same_scheduler() -> None:
    plan = plan_of("fp16", "fp8")
    takes = fabricated.expected(plan, {"get": 10.0, "make": 4.0, "serve": 1.0, "look": 2.0})
    # One download, both builds side by side, then two services one after the other.
    assert simulate(plan, takes, [ON], plan.stage_runs) == pytest.approx(10 + 4 + 2 * (1 + 2))
    assert simulate(plan, takes, [ON], set()) == 0.0


def least_s(plan: Plan, takes: Mapping[StageRunId, float], on: Sequence[Capacity]) -> float:
    return Scheduler(order.tasks(plan, plan.stage_runs, lambda run: takes[run.id], None, on), *on).least_s


def test_the_forecast_of_very_many_is_what_no_schedule_undercuts(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(*map(str, range(64)))
    takes = fabricated.expected(plan, {"get": 10.0, "make": 4.0, "serve": 1.0, "look": 2.0})
    on = [ON]
    # Four builds at a time, and measurements alone; the one download takes no CPU.
    assert least_s(plan, takes, on) == pytest.approx(64 * 4 / 4 + 64 * (1 + 2))
    played = simulate(plan, takes, on, plan.stage_runs)
    assert 0.95 * played < least_s(plan, takes, on) < played
    one = plan_of("fp16")
    takes_one = fabricated.expected(one, {"get": 10.0, "make": 4.0, "serve": 1.0, "look": 2.0})
    assert least_s(one, takes_one, [*on, replace(on[0], node="other")]) == pytest.approx(10 + 4 + 1 + 2), (
        "the longest path"
    )
    many = plan_of_servers(*map(str, range(64)))
    room = [ROOM_FOR_TWO]
    takes = fabricated.expected(many, {"get": 10.0, "make": 4.0, "serve": 5.0, "look": 20.0, "count": 5.0})
    both = least_s(many, takes, room)
    assert both == pytest.approx(64 * 4 / 4 + 64 * (20 + (5 + 5) / 2)), "one is loaded while in another is counted"
    assert both < simulate(many, takes, room, many.stage_runs) < 1.02 * both
    monkeypatch.setattr(order, "_MOST_SIMULATED", 100)
    assert simulate(many, takes, room, many.stage_runs) == pytest.approx(both)


def test_other_programs_get_their_own_command_lines(store: Store) -> None:
    def commands(work: StageContext[Any], machine: machines.Machine) -> list[list[str]]:
        assert machine is MACHINE
        return [["build", "--checkpoint", str(work.inputs["model"]), "--out", str(work.out)], ["check", str(work.out)]]

    executor = PretendExecutor()
    assert run(plan_of(until="make", make={"commands": commands}), store, executor).exit_code == 0
    get, make = executor.jobs
    out = f"{make.attempt}/out"
    checkpoint = str(store.folder("get", Fingerprint(get.fingerprint)) / "out")
    assert make.commands[:2] == (("build", "--checkpoint", checkpoint, "--out", out), ("check", out))
    ours = ("-m", "trtllm_pipeline.tensorrt.worker", f"{make.attempt}/job.json")
    assert make.commands[2][1:] == ours, "ours looks at what they left"
    assert (make.program, make.params, make.out) == ("x:run", {"precision": "fp16", "batch": 4}, out)
    assert len(make.commands) == 3


def test_more_than_the_machine_has_fails_at_once_with_words(store: Store) -> None:
    outcome = run(plan_of(make=needing(gpus=8)), store, PretendExecutor())
    assert outcome.exit_code == 1
    assert "needs 8 GPUs" in next(iter(outcome.errors.values())).message


def test_a_gpu_that_another_invocation_has_is_replaced_by_a_free_one(store: Store) -> None:
    plan = plan_of(machine=replace(MACHINE, gpus=GPUS), serve=needing(gpus=1))
    taken = claims.lease_machine(("GPU-a",))
    executor = PretendExecutor()
    assert taken is not None
    assert run(plan, store, executor, on=Capacity(cpus=2, gpus=("GPU-a", "GPU-b"))).exit_code == 0
    seen = {job.stage: job.environment.get("CUDA_VISIBLE_DEVICES") for job in executor.jobs}
    assert seen["serve"] == seen["look"] == "GPU-b", "and what runs inside a server sees the server's own"


def test_the_next_stage_run_has_the_gpu_while_what_the_one_before_left_is_digested(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of("fp16", "fp8", until="make", machine=replace(MACHINE, gpus=GPUS[:1]), make=needing(gpus=1))
    executor, seal = PretendExecutor(), store.seal
    made_when_sealed: list[int] = []

    def slowly(attempt: AttemptRow, *rest: Any) -> manifest.Manifest:
        if attempt.stage == "make":
            assert eventually(lambda: len(executor.stages()) >= 3)
            made_when_sealed.append(executor.stages().count("make"))
        return seal(attempt, *rest)

    monkeypatch.setattr(store, "seal", slowly)
    assert run(plan, store, executor, on=Capacity(cpus=1, gpus=("GPU-a",))).exit_code == 0
    assert made_when_sealed == [2, 2]
    assert [job.gpus for job in executor.jobs if job.stage == "make"] == [("GPU-a",), ("GPU-a",)]


@pytest.mark.parametrize("rule", Exclusive)
def test_what_is_measured_side_by_side_has_cpus_of_its_own(
    store: Store, monkeypatch: pytest.MonkeyPatch, rule: Exclusive
) -> None:
    graphics = Graphics(everything=tuple(Device(gpu, gpu.uuid) for gpu in GPUS))
    seen = Survey(replace(MACHINE, gpus=GPUS), graphics, {})
    monkeypatch.setattr(probe, "survey", lambda: seen)
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(8)))
    plan = plan_of("fp16", "fp8", machine=seen.machine, serve=needing(gpus=1, exclusive=rule))
    executor = PretendExecutor()
    executor.alone = rule.alone
    assert run(plan, store, executor, on=Capacity(cpus=8, gpus=("GPU-a", "GPU-b"))).exit_code == 0
    cpus = {(job.stage, *job.gpus): job.cpus for job in executor.jobs}
    if rule.pinned:
        assert cpus["serve", "GPU-a"] == cpus["look", "GPU-a"] == (0, 1, 2, 3)
    if rule is Exclusive.GPU:
        assert cpus["serve", "GPU-b"] == cpus["look", "GPU-b"] == (4, 5, 6, 7)
        assert executor.stages()[-4:-2] == ["serve", "serve"], "side by side"
    assert not any(used for (stage, *_), used in cpus.items() if not rule.pinned or stage in {"get", "make"})


def made(store: Store, plan: Plan) -> dict[str, manifest.Manifest]:
    """Manifests by stage, of a plan with one cell."""
    present = store.present({run.fingerprint: run.stage.name for run in plan.stage_runs.values()})
    return {each.stage: manifest.read(each.folder) for each in present.values()}


def test_artifacts_record_the_bytes_that_they_were_made_from(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_MADE_BY", "nightly")
    plan = plan_of()
    run(plan, store, PretendExecutor())
    first = made(store, plan)
    readers = 0
    for stage_run in plan.stage_runs.values():
        if stage_run.stage.scope is Scope.SERVICE:
            continue
        about = first[stage_run.stage.name].provenance
        assert about["made_by"] == {"user": "nightly"}
        upstream = {name: plan.stage_runs[each].stage for name, each in stage_run.inputs.items()}
        expected = {name: first[stage.name].tree for name, stage in upstream.items() if stage.scope is Scope.ARTIFACT}
        assert about["inputs"] == expected
        readers += len(expected)
    assert readers == 2, "make read get, and look read make; a service leaves nothing to read"
    # Of what was made in an earlier run, the manifest tells.
    look = next(each for each in plan.stage_runs.values() if each.stage.name == "look")
    shutil.rmtree(store.folder("look", look.fingerprint))
    monkeypatch.setenv("PIPELINE_MADE_BY", "")
    run(plan, store, PretendExecutor())
    again = made(store, plan)["look"].provenance
    assert again["inputs"] == first["look"].provenance["inputs"] != {}
    assert "made_by" not in again


def test_user_and_host_are_recorded_where_nobody_says_who(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPELINE_MADE_BY", raising=False)
    monkeypatch.setenv("LOGNAME", "ann\udcff")
    plan = plan_of(until="get")
    run(plan, store, PretendExecutor())
    assert made(store, plan)["get"].provenance["made_by"] == {"user": "ann?", "host": os.uname().nodename}


def test_a_better_order_is_looked_for_where_durations_are_known(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(loop, "favourable", lambda tasks, _on: looked.append(len(tasks)) or {})
    run(plan_of("fp16"), store, PretendExecutor())
    assert not looked, "by guesses it gains nothing"
    run(plan_of("fp16", "fp8"), store, PretendExecutor())
    assert len(looked) == 1, "services leave nothing to learn from"
