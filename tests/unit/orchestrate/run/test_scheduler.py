"""The scheduler alone: events in, instructions out; then random plans on a simulated machine."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trtllm_pipeline.base.domain import Exclusive, Resources, Scope, StageRunId, StageStatus
from trtllm_pipeline.base.errors import FailureClass, StageError
from trtllm_pipeline.orchestrate.run.order import play
from trtllm_pipeline.orchestrate.run.scheduler import (
    ENDED,
    LOST_RETRIES,
    NODE_PATIENCE_S,
    TRANSITIONS,
    Busy,
    Cancel,
    Capacity,
    Event,
    Finished,
    Freed,
    Instruction,
    Interrupt,
    NodeCame,
    NodeGone,
    RetryAt,
    Scheduler,
    ServiceEnded,
    ServiceReady,
    Start,
    Stop,
    Task,
    Vacated,
    backoff_s,
)

S = StageStatus
BUG = StageError("it broke", failure=FailureClass.BUG)
TRANSIENT = StageError("connection reset", failure=FailureClass.TRANSIENT)
OOM = StageError("no memory left", failure=FailureClass.OUT_OF_MEMORY)
SCHEDULES = int(os.environ.get("SCHEDULES", "300"))
"""Random schedules per property."""


def sid(name: str) -> StageRunId:
    return StageRunId(name)


def task(
    name: str, *needs: str, gpus: int = 0, cpus: int = 1, s: float = 1.0, exclusive: bool | Exclusive = False, **more
) -> Task:
    exclusive = Exclusive.MACHINE if exclusive is True else exclusive or Exclusive.NONE
    resources = Resources(cpus, gpus, more.pop("downloads", 0), exclusive, more.pop("accelerator", None))
    return Task(sid(name), tuple(map(sid, needs)), resources=resources, expected_s=s, **more)


def service(name: str, *needs: str, **more) -> Task:
    return task(name, *needs, scope=Scope.SERVICE, **more)


def inside(name: str, in_: str, *needs: str, **more) -> Task:
    return task(name, *needs, scope=Scope.IN_SERVICE, service=sid(in_), **more)


def names(instructions: Iterable[Instruction], kind: type = Start) -> list[str]:
    return [one.id for one in instructions if isinstance(one, kind)]


def statuses(scheduler: Scheduler, *ids: str) -> list[StageStatus]:
    return [scheduler.status(sid(one)) for one in ids]


SERVED = (
    task("repo"),
    service("serve", "repo", gpus=1, retries=1),
    inside("smoke", "serve"),
    inside("perf", "serve", "smoke"),
    inside("accuracy", "serve", "smoke"),
)


def served(*more: Task, **options) -> Scheduler:
    """A service that has just become ready, its smoke task running."""
    scheduler = Scheduler((*SERVED, *more), Capacity(8, ("A", "B")), **options)
    assert "repo" in names(scheduler.advance(0))
    assert scheduler.advance(1, Finished(sid("repo"))) == [Start(sid("serve"), ("A",), 1)]
    assert scheduler.advance(2, ServiceReady(sid("serve"))) == [Start(sid("smoke"), ("A",), 1)]
    return scheduler


def running(scheduler: Scheduler) -> set[StageRunId]:
    return {task for task in scheduler._nodes if scheduler.status(task) is S.RUNNING}


# Several nodes.

LOST = StageError("node one is gone", failure=FailureClass.LOST)

DRIVER = Capacity(0, downloads=2)
NODES = DRIVER, *(Capacity(8, ("A", "B", "C", "D"), downloads=0, node=name) for name in ("one", "two"))


def test_nothing_is_started_on_a_node_that_has_gone() -> None:
    nodes = Capacity(4, ("a",), node="one"), Capacity(4, ("b",), node="two")
    scheduler = Scheduler([task(name, gpus=1) for name in "tuvw"], *nodes)
    assert [(start.id, start.node) for start in scheduler.advance(0)] == [("t", "one"), ("u", "two")]
    assert scheduler.advance(1, NodeGone("one")) == []
    assert scheduler.nodes == [nodes[1]]
    started = scheduler.advance(2, Finished(sid("t"), LOST), Finished(sid("u")))
    assert [(one.id, one.node) for one in started if isinstance(one, Start)] == [("v", "two")]
    assert scheduler.advance(3, NodeGone("unheard of")) == []
    assert scheduler.advance(4, NodeCame(nodes[0])) == [Start(sid("w"), ("a",), 1, "one")]
    assert scheduler.nodes == [*nodes]


def test_a_new_node_is_used() -> None:
    scheduler = Scheduler([task(name, gpus=1) for name in "tu"], Capacity(4, ("a",), node="one"))
    scheduler.advance(0)
    assert scheduler.advance(1, NodeCame(Capacity(4, ("b",), node="two"))) == [Start(sid("u"), ("b",), 1, "two")]


def test_what_no_node_can_run_any_more_waits_for_one_and_then_has_failed() -> None:
    nodes = Capacity(4, ("a", "b"), node="one"), Capacity(4, ("c",), node="two")
    scheduler = Scheduler([task("gang", gpus=2), task("after", "gang"), task("small", gpus=1)], *nodes)
    assert names(scheduler.advance(0)) == ["gang", "small"]
    scheduler.advance(1, NodeGone("one"))
    scheduler.advance(2, Finished(sid("gang"), LOST), Finished(sid("small")))
    assert scheduler.advance(1 + NODE_PATIENCE_S / 2) == []
    assert scheduler.wake_at == 1 + NODE_PATIENCE_S
    scheduler.advance(scheduler.wake_at)
    failure = scheduler.failure(sid("gang"))
    assert failure.failure is FailureClass.LOST
    assert failure.message == "needs 2 GPUs, no node offers more than 1, since nodes have gone"
    assert statuses(scheduler, "gang", "after") == [S.FAILED, S.BLOCKED]
    assert scheduler.finished
    assert scheduler.wake_at is None


def test_a_node_that_comes_back_in_time_saves_what_waits_for_it() -> None:
    one = Capacity(4, ("a", "b"), node="one")
    scheduler = Scheduler([task("gang", gpus=2)], one, Capacity(4, node="two"))
    scheduler.advance(0)
    scheduler.advance(1, NodeGone("one"))
    scheduler.advance(2, Finished(sid("gang"), LOST))
    assert names(scheduler.advance(NODE_PATIENCE_S, NodeCame(one))) == ["gang"]
    assert scheduler.wake_at is None


def test_what_no_node_of_its_type_has_is_infeasible_and_waits_for_none_of_another() -> None:
    nodes = [Capacity(4, ("a", "b"), 0, "one", "h100"), Capacity(4, ("c",), 0, "two", "l40s")]
    gang, alone = task("gang", gpus=2, accelerator="l40s"), task("alone", gpus=1, accelerator="l40s", exclusive=True)
    scheduler = Scheduler([gang, alone], *nodes)
    assert str(scheduler.failure(sid("gang"))) == "needs 2 GPUs, no node with l40s offers more than 1"
    assert names(scheduler.advance(0)) == ["alone"]
    scheduler.advance(1, NodeGone("two"))
    scheduler.advance(2, Finished(sid("alone"), LOST))
    assert scheduler.wake_at is not None
    assert scheduler.advance(scheduler.wake_at) == []
    scheduler.advance(1 + NODE_PATIENCE_S)
    failure = scheduler.failure(sid("alone"))
    assert failure.message == (
        "needs 1 CPUs, no node with l40s offers more than 0; needs 1 GPUs, no node with l40s offers more than 0, since nodes have gone"
    )


def test_a_place_is_held_on_a_node_of_the_type() -> None:
    nodes = [Capacity(8, ("a", "b"), 0, name, name) for name in ("h100", "l40s")]
    running = [task("short", gpus=1, s=5, accelerator="h100"), task("long", gpus=1, s=50, accelerator="l40s")]
    gang = task("gang", gpus=2, s=100, accelerator="l40s")
    scheduler = Scheduler(
        [*running, gang, task("after", "gang", s=100), *(task(f"s{n}", gpus=1, s=9) for n in range(3))], *nodes
    )
    first = {one.id: one.node for one in scheduler.advance(0) if isinstance(one, Start)}
    assert first["gang"] == "l40s"
    assert "long" not in first


def test_a_task_runs_on_one_node_and_leaves_whole_nodes_free() -> None:
    scheduler = Scheduler([task(name, gpus=1) for name in "abcd"] + [task("gang", gpus=4)], *NODES)
    assert {(one.id, one.node) for one in scheduler.advance(0)} == {
        *((name, "one") for name in "abcd"),
        ("gang", "two"),
    }


def test_what_no_node_has_is_infeasible_even_if_all_together_have_it() -> None:
    scheduler = Scheduler([task("gang", gpus=8), task("both", cpus=4, gpus=4, downloads=1)], *NODES)
    assert str(scheduler.failure(sid("gang"))) == "needs 8 GPUs, no node offers more than 4"
    assert str(scheduler.failure(sid("both"))) == (
        "needs 4 CPUs, 4 GPUs, 1 downloads at a time; no node offers all of these"
    )


def test_a_place_held_on_one_node_is_in_nobodys_way_on_another() -> None:
    tasks = [task("gate", s=1), task("long", gpus=3, s=50), task("short", gpus=3, s=10)]
    tasks += [task("gang", "gate", gpus=4, s=100), *(task(name, "gate", gpus=1, s=40) for name in ("a", "b"))]
    scheduler = Scheduler(tasks, *NODES)
    assert {one.id: one.node for one in scheduler.advance(0)} == {"gate": "one", "long": "one", "short": "two"}
    # The gang will have node two when the short one has ended; one GPU is free on each.
    assert [(one.id, one.node) for one in scheduler.advance(1, Finished(sid("gate")))] == [("a", "one")]
    assert [(one.id, one.node) for one in scheduler.advance(10, Finished(sid("short")))] == [("gang", "two")]


def test_what_was_lost_with_its_node_is_tried_again_whatever_its_retries_but_not_for_ever() -> None:
    scheduler = Scheduler([task("a")], Capacity(4))
    now = 0.0
    for attempt in range(1, LOST_RETRIES + 2):
        assert scheduler.advance(now) == [Start(sid("a"), (), attempt)]
        scheduler.advance(now, Finished(sid("a"), LOST))
        now = scheduler.wake_at or now
    assert statuses(scheduler, "a") == [S.FAILED]


# Order and resources.


def test_the_longest_remaining_path_goes_first_then_cell_order() -> None:
    tasks = [
        task("short", s=3),
        task("second", order=2, s=5),
        task("first", order=1, s=5),
        task("head", s=1),
        task("tail", "head", s=9),
    ]
    scheduler = Scheduler(tasks, Capacity(1))
    order = names(scheduler.advance(0))
    while not scheduler.finished:
        order += names(scheduler.advance(0, Finished(sid(order[-1]))))
    assert order == ["head", "tail", "first", "second", "short"]


def test_what_runs_inside_a_service_counts_for_the_path_to_it() -> None:
    tasks = [task("quick"), service("serve", "quick", s=1), inside("perf", "serve", s=50), task("slow", s=20)]
    assert names(Scheduler(tasks, Capacity(1)).advance(0)) == ["quick"]


def test_more_than_the_machine_has_fails_at_once_with_the_reason() -> None:
    scheduler = Scheduler(
        [task("build", gpus=8, cpus=9), task("repo", "build"), task("other")], Capacity(4, ("A", "B"))
    )
    assert statuses(scheduler, "build", "repo", "other") == [S.FAILED, S.BLOCKED, S.PENDING]
    failure = scheduler.failure(sid("build"))
    assert failure
    assert failure.failure is FailureClass.INFEASIBLE
    assert failure.message == "needs 9 CPUs, this machine offers 4; needs 8 GPUs, this machine offers 2"
    assert scheduler.blocked_by(sid("repo")) == "build"
    assert scheduler.blocked_by(sid("build")) is None


def test_small_work_fills_the_gap_before_a_reserved_gang_but_does_not_delay_it() -> None:
    tasks = [
        task("running", gpus=2, s=100),
        task("after_running", "running", s=500),
        task("gang", gpus=4, s=90),
        task("after_gang", "gang", s=200),
        task("too_long", gpus=1, s=80.5),
        task("fits", gpus=1, s=60),
        task("fits_too", gpus=1, s=50),
        task("cpu_only", s=40),
    ]
    scheduler = Scheduler(tasks, Capacity(64, ("A", "B", "C", "D")))
    assert names(scheduler.advance(0)) == ["running", "too_long", "fits", "cpu_only"]
    assert names(scheduler.advance(45)) == []
    # 40 s are left before the gang's turn: nothing of 50 s may start any more.
    assert names(scheduler.advance(60, Finished(sid("fits")), Finished(sid("cpu_only")))) == []
    assert names(scheduler.advance(80, Finished(sid("too_long")))) == []
    assert names(scheduler.advance(100, Finished(sid("running")))) == ["after_running", "gang"]


def test_work_that_outlasts_the_reservation_starts_if_it_fits_beside_it() -> None:
    tasks = [
        task("running", gpus=2, s=100),
        task("after_running", "running", s=500),
        task("gang", gpus=3, s=10),
        task("after_gang", "gang", s=200),
        task("beside", gpus=1, s=150),
        task("no_room", gpus=1, s=140),
    ]
    scheduler = Scheduler(tasks, Capacity(64, ("A", "B", "C", "D")))
    assert names(scheduler.advance(0)) == ["running", "beside"]
    assert names(scheduler.advance(100, Finished(sid("running")))) == ["after_running", "gang"]


def test_an_exclusive_task_runs_alone_and_does_not_starve() -> None:
    tasks = [task("long", s=50), task("alone", exclusive=True, s=40)]
    tasks += [task(f"small{i}", cpus=0, s=20) for i in range(20)]
    scheduler = Scheduler(tasks, Capacity(2))
    first = names(scheduler.advance(0))
    assert first[0] == "long"
    assert "alone" not in first
    assert len(first) == 21  # they end before "long" does
    assert scheduler.advance(20, *(Finished(sid(name)) for name in first[1:])) == []
    assert names(scheduler.advance(60, Finished(sid("long")))) == ["alone"]


def test_nothing_new_starts_before_a_head_that_the_end_of_the_run_waits_for() -> None:
    tasks = [task("first", s=5), task("alone", "first", exclusive=True, s=90), task("after_alone", "alone", s=60)]
    tasks += [task("late", s=50), task("gate", s=6), task("small", "gate", s=10)]
    scheduler = Scheduler(tasks, Capacity(4))
    assert names(scheduler.advance(0)) == ["first", "late", "gate"]
    assert names(scheduler.advance(5, Finished(sid("first")))) == []
    assert names(scheduler.advance(45, Finished(sid("gate")))) == []
    assert names(scheduler.advance(50, Finished(sid("late")))) == ["alone"]
    assert names(scheduler.advance(140, Finished(sid("alone")))) == ["after_alone", "small"]


EIGHT = Capacity(128, tuple("ABCDEFGH"))
AFTER_GANG = task("after_gang", "gang", cpus=128, s=3000)
"""For which the run waits for the gang: nothing can run beside it."""


def gang_and_builds(*after: Task) -> list[Task]:
    """A gang of all GPUs and builds of one, which come up while one GPU is taken for 300 s."""
    tasks = [task("quantize", gpus=1, s=300), task("event"), task("gate"), task("gang", "gate", gpus=8, s=360), *after]
    return tasks + [task(f"build{number}", "gate", gpus=1, s=360, order=1) for number in range(60)]


def test_gpus_do_not_wait_for_a_gang_that_the_run_does_not_wait_for() -> None:
    scheduler = Scheduler(gang_and_builds(), EIGHT)
    assert names(scheduler.advance(0)) == ["gate", "quantize", "event"]
    assert names(scheduler.advance(1, Finished(sid("gate")))) == [f"build{number}" for number in range(7)]


def test_gpus_do_not_wait_for_what_is_overdue() -> None:
    """The run waits for the gang, so builds do not start before it; but the quantize takes 12 times as long as expected."""
    tasks = gang_and_builds(AFTER_GANG)
    scheduler = Scheduler(tasks, EIGHT)
    assert names(scheduler.advance(0)) == ["gate", "quantize", "event"]
    assert names(scheduler.advance(1, Finished(sid("gate")))) == []
    assert names(scheduler.advance(310, Finished(sid("event")))) == []  # it has run longer, but not by much
    assert 375 <= scheduler.wake_at < 380
    assert len(names(scheduler.advance(scheduler.wake_at))) == 7
    takes = {one.id: one.expected_s for one in tasks} | {sid("quantize"): 3600.0}
    first_come_s = 3600 + 360 + 3000  # the builds are done meanwhile
    assert play(tasks, Scheduler(tasks, EIGHT), takes) <= 1.01 * first_come_s


def test_what_is_a_little_late_does_not_cost_what_waits_for_it_its_place() -> None:
    tasks = gang_and_builds(AFTER_GANG, task("as_long", "gate", gpus=1, cpus=2, s=300))
    scheduler = Scheduler(tasks, EIGHT)
    scheduler.advance(0)
    assert names(scheduler.advance(1, Finished(sid("gate")))) == []
    assert scheduler.advance(350, Finished(sid("event"))) == []
    assert names(scheduler.advance(360, Finished(sid("quantize")))) == ["gang"]


def test_an_overdue_task_is_expected_to_run_as_long_again_as_it_has() -> None:
    tasks = gang_and_builds(AFTER_GANG, *(task(f"b{s}", "gate", gpus=1, cpus=s // 100, s=s) for s in (400, 500)))
    scheduler = Scheduler(tasks, EIGHT)
    scheduler.advance(0)
    assert names(scheduler.advance(1, Finished(sid("gate")))) == []
    started = names(scheduler.advance(450, Finished(sid("event"))))
    assert "b400" in started
    assert "b500" not in started


def test_a_service_without_anything_to_do_is_skipped() -> None:
    scheduler = Scheduler([service("serve", gpus=1)], Capacity(4, ("A",)))
    assert scheduler.finished
    assert statuses(scheduler, "serve") == [S.SKIPPED]


def test_circular_needs_are_refused() -> None:
    with pytest.raises(ValueError, match="circular needs among a, b"):
        Scheduler([task("a", "b"), task("b", "a"), task("c", "a")], Capacity(1))
    # The service waits for x, x for a task inside the service.
    tasks = [service("s"), inside("i", "s"), task("x", "i"), inside("j", "s", "x")]
    with pytest.raises(ValueError, match="circular needs among i, j, s, x"):
        Scheduler(tasks, Capacity(1))


# Services.


def test_a_service_runs_its_tasks_one_after_another_and_is_stopped() -> None:
    scheduler = served(task("later", "repo", gpus=2, s=0.1))
    assert scheduler.advance(3, Finished(sid("smoke"))) == [Start(sid("perf"), ("A",), 1)]
    assert running(scheduler) == {"serve", "perf"}
    assert scheduler.advance(4, Finished(sid("perf"))) == [Start(sid("accuracy"), ("A",), 1)]
    assert scheduler.advance(5, Finished(sid("accuracy"))) == [Stop(sid("serve"))]
    assert not scheduler.finished
    assert scheduler.advance(6, ServiceEnded(sid("serve"))) == [Start(sid("later"), ("A", "B"), 1)]
    assert statuses(scheduler, "serve", "accuracy") == [S.SUCCEEDED, S.SUCCEEDED]


@pytest.mark.parametrize(("ready", "message"), [(False, "ended before it was ready"), (True, "before it was stopped")])
def test_a_service_that_ends_well_but_too_early_has_failed(ready: bool, message: str) -> None:
    scheduler = Scheduler([service("serve"), inside("perf", "serve")], Capacity(8))
    scheduler.advance(0)
    if ready:
        scheduler.advance(1, ServiceReady(sid("serve")))
        scheduler.advance(1, Busy(sid("perf")))
    scheduler.advance(2, ServiceEnded(sid("serve")))
    failure = scheduler.failure(sid("serve"))
    assert failure
    assert failure.failure is FailureClass.BUG
    assert message in failure.message


def test_a_dead_service_takes_the_task_inside_it_along_and_holds_its_gpus_until_that_is_gone() -> None:
    scheduler = served(task("other", "repo", gpus=2, s=0.1))
    assert scheduler.advance(3, ServiceEnded(sid("serve"), BUG)) == [Cancel(sid("smoke"))]
    assert names(scheduler.advance(4, Finished(sid("smoke"), TRANSIENT))) == ["other"]
    failure = scheduler.failure(sid("smoke"))
    assert failure
    assert (failure.message, failure.failure) == ("serve failed while this ran", FailureClass.BUG)
    assert statuses(scheduler, "serve", "smoke", "perf") == [S.FAILED, S.FAILED, S.BLOCKED]


def test_a_service_that_died_of_something_passing_is_started_again() -> None:
    scheduler = served()
    scheduler.advance(3, Finished(sid("smoke")))
    assert scheduler.advance(4, ServiceEnded(sid("serve"), TRANSIENT)) == [Cancel(sid("perf"))]
    (retry,) = scheduler.advance(5, Finished(sid("perf"), BUG))
    assert isinstance(retry, RetryAt)
    assert retry.id == "serve"
    assert statuses(scheduler, "serve", "perf", "accuracy") == [S.PENDING, S.FAILED, S.PENDING]
    assert scheduler.wake_at == retry.when
    assert scheduler.advance(retry.when) == [Start(sid("serve"), ("A",), 2)]
    assert names(scheduler.advance(20, ServiceReady(sid("serve")))) == ["accuracy"]
    scheduler.advance(21, ServiceEnded(sid("serve"), TRANSIENT))
    scheduler.advance(22, Finished(sid("accuracy")))  # it had just finished: that counts
    assert statuses(scheduler, "serve", "accuracy") == [S.FAILED, S.SUCCEEDED]
    assert scheduler.finished


# Failures and retries.


def test_a_long_chain_is_blocked_without_recursion() -> None:
    tasks = [task("0")] + [task(str(i), str(i - 1)) for i in range(1, 5000)]
    scheduler = Scheduler(tasks, Capacity(1))
    scheduler.advance(0)
    scheduler.advance(1, Finished(sid("0"), BUG))
    assert scheduler._counts[S.BLOCKED] == 4999


def test_transient_failures_are_tried_again_after_growing_waits() -> None:
    scheduler = Scheduler([task("a", retries=2)], Capacity(1))
    now = 100.0
    scheduler.advance(now)
    for failures in (1, 2):
        wait = backoff_s("a", failures)
        assert scheduler.advance(now, Finished(sid("a"), TRANSIENT)) == [
            RetryAt(sid("a"), now + wait, failures + 1, TRANSIENT)
        ]
        assert scheduler.advance(now + 0.99 * wait) == []
        now += wait
        assert scheduler.advance(now) == [Start(sid("a"), (), failures + 1)]
    scheduler.advance(now, Finished(sid("a"), TRANSIENT))
    assert statuses(scheduler, "a") == [S.FAILED]
    assert scheduler.wake_at is None


def test_backoff_grows_to_a_limit_and_differs_between_tasks() -> None:
    assert backoff_s("a", 1) != backoff_s("b", 1)
    for failures in range(1, 200):
        mean = min(2.0 * 2.0 ** (failures - 1), 120.0)
        assert 0.5 * mean <= backoff_s("a", failures) <= 1.5 * mean


@pytest.mark.parametrize(
    "kind",
    [FailureClass.INFEASIBLE, FailureClass.TIMEOUT, FailureClass.USER, FailureClass.BUG, FailureClass.OUT_OF_MEMORY],
)
def test_what_would_fail_again_is_not_tried_again(kind: FailureClass) -> None:
    scheduler = Scheduler([task("a", retries=5)], Capacity(1))
    scheduler.advance(0)
    assert scheduler.advance(1, Finished(sid("a"), StageError("no", failure=kind))) == []
    assert statuses(scheduler, "a") == [S.FAILED]


def test_out_of_memory_beside_others_is_tried_once_more_alone() -> None:
    scheduler = Scheduler([task("big", retries=5), task("beside")], Capacity(4))
    scheduler.advance(0)
    (retry,) = scheduler.advance(1, Finished(sid("big"), OOM))
    assert isinstance(retry, RetryAt)
    assert scheduler.advance(retry.when) == []
    assert names(scheduler.advance(9, Finished(sid("beside")))) == ["big"]
    assert scheduler.advance(10, Finished(sid("big"), OOM)) == []
    assert statuses(scheduler, "big") == [S.FAILED]


def test_without_keep_going_the_first_failure_cancels_what_has_not_begun() -> None:
    scheduler = served(task("other"), task("after", "other"), task("next", "smoke"), keep_going=False)
    assert scheduler.advance(3, Finished(sid("smoke"), BUG)) == [Stop(sid("serve"))]
    assert statuses(scheduler, "smoke", "perf", "next", "other") == [S.FAILED, S.BLOCKED, S.BLOCKED, S.RUNNING]
    assert statuses(scheduler, "after") == [S.CANCELLED]
    assert scheduler.advance(4, Finished(sid("other"), TRANSIENT), ServiceEnded(sid("serve"))) == []
    assert statuses(scheduler, "other", "serve") == [S.FAILED, S.SUCCEEDED]
    assert scheduler.finished


def test_an_interrupt_cancels_what_runs_and_ends_services_after_it() -> None:
    scheduler = served(task("other"), task("after", "other"))
    assert set(scheduler.advance(3, Interrupt())) == {Cancel(sid("smoke")), Cancel(sid("other"))}
    assert statuses(scheduler, "perf", "after", "smoke") == [S.CANCELLED, S.CANCELLED, S.RUNNING]
    assert scheduler.advance(4, Interrupt()) == []
    assert scheduler.advance(5, Finished(sid("other"))) == []  # it was quicker: done is done
    assert scheduler.advance(5, Finished(sid("smoke"), BUG)) == [Stop(sid("serve"))]
    scheduler.advance(6, ServiceEnded(sid("serve"), BUG))
    assert statuses(scheduler, "other", "smoke", "serve") == [S.SUCCEEDED, S.CANCELLED, S.CANCELLED]
    assert scheduler.finished


# The table of transitions.


def test_every_status_is_in_the_table_and_only_ended_ones_lead_nowhere() -> None:
    assert set(TRANSITIONS) == set(S)
    assert {S.SUCCEEDED, S.UP_TO_DATE, S.SKIPPED, S.FAILED, S.BLOCKED, S.CANCELLED} == ENDED
    reached = {S.PENDING}
    while more := {after for one in reached for after in TRANSITIONS[one]} - reached:
        reached |= more
    assert reached == set(S)


def test_observers_see_every_change_once() -> None:
    seen: list[tuple[str, StageStatus, StageStatus]] = []
    scheduler = Scheduler(
        [task("a"), task("b", "a"), service("c")],
        Capacity(1),
        observe=lambda *change: seen.append(change),
    )
    scheduler.advance(0)
    scheduler.advance(1, Finished(sid("a"), BUG))
    assert seen == [
        ("c", S.PENDING, S.SKIPPED),
        ("a", S.PENDING, S.RUNNING),
        ("a", S.RUNNING, S.FAILED),
        ("b", S.PENDING, S.BLOCKED),
    ]


# Measuring side by side.

BESIDE = Exclusive.GPU


def started(scheduler: Scheduler, now: float, *events: Event) -> list[str]:
    return [one.id for one in scheduler.advance(now, *events) if isinstance(one, Start)]


def test_measurements_run_beside_each_other_and_beside_nothing_else() -> None:
    scheduler = Scheduler(
        [
            task("build", gpus=1, s=50),
            task("m1", gpus=1, s=30, exclusive=BESIDE),
            task("m2", gpus=1, s=30, exclusive=BESIDE),
            task("m3", gpus=1, s=30, exclusive=BESIDE),
            task("copy", cpus=0, s=1),
        ],
        Capacity(8, ("A", "B")),
    )
    assert started(scheduler, 0) == ["build", "copy"]
    assert started(scheduler, 1, Finished(sid("copy"))) == [], "a GPU is free, but beside a build nothing is measured"
    assert started(scheduler, 50, Finished(sid("build"))) == ["m1", "m2"]
    assert started(scheduler, 80, Finished(sid("m1"))) == ["m3"]


def measured_beside(name: str, **more) -> list[Task]:
    """A service on a GPU of its own that is measured while others may be: its perf alone is a measurement."""
    return [
        service(name, gpus=1, s=10, exclusive=BESIDE),
        inside(f"{name}.perf", name, s=20, exclusive=BESIDE, **more),
        inside(f"{name}.accuracy", name, f"{name}.perf", s=30),
    ]


def test_no_server_loads_while_another_is_measured() -> None:
    scheduler = Scheduler(
        [*measured_beside("a"), *measured_beside("b"), *measured_beside("c")], Capacity(8, ("A", "B"))
    )
    scheduler.advance(0)
    scheduler.advance(10, ServiceReady(sid("a")))
    scheduler.advance(11, ServiceReady(sid("b")))
    assert started(scheduler, 31, Finished(sid("a.perf"))) == ["a.accuracy"]
    scheduler.advance(61, Finished(sid("a.accuracy")))
    assert started(scheduler, 62, ServiceEnded(sid("a"))) == [], "a GPU is free, and b is measured"
    assert started(scheduler, 63, Finished(sid("b.perf"))) == ["b.accuracy", "c"], "accuracy is not timed"
    assert started(scheduler, 73, ServiceReady(sid("c"))) == ["c.perf"]


def test_servers_load_and_are_measured_independently_on_different_nodes() -> None:
    nodes = Capacity(8, ("A",), node="one"), Capacity(8, ("B",), node="two")
    scheduler = Scheduler([*measured_beside("a"), *measured_beside("b")], *nodes)
    scheduler.advance(0)
    assert started(scheduler, 10, ServiceReady(sid("a"))) == ["a.perf"]


def test_a_measurement_that_ran_out_of_memory_beside_another_is_tried_again_alone() -> None:
    scheduler = Scheduler(
        [task(name, gpus=1, s=s, retries=1, exclusive=BESIDE) for name, s in (("m1", 30.0), ("m2", 90.0))],
        Capacity(8, ("A", "B")),
    )
    assert started(scheduler, 0) == ["m2", "m1"]
    (again,) = scheduler.advance(10, Finished(sid("m1"), OOM))
    assert isinstance(again, RetryAt)
    assert started(scheduler, again.when) == []
    assert started(scheduler, 90, Finished(sid("m2"))) == ["m1"]


# Servers one after another.

ALONE = Exclusive.MACHINE


def measured(name: str, *needs: str, gpus: int = 1, memory: tuple[int, ...] | None = (3, 1), **more) -> list[Task]:
    """A service that is alone, and what runs inside it: perf alone is a measurement."""
    return [
        service(name, *needs, gpus=gpus, cpus=8, s=10, exclusive=ALONE, memory=memory, **more),
        inside(f"{name}.smoke", name, s=2),
        inside(f"{name}.perf", name, f"{name}.smoke", s=20, exclusive=ALONE, retries=1),
        inside(f"{name}.accuracy", name, f"{name}.smoke", s=30, retries=1),
    ]


def two_servers(*more: Task, capacity: Capacity | None = None, **options) -> Scheduler:
    """The first of two services measures what it measures. Its accuracy, which takes longer, waits for that."""
    tasks = [*measured("a", **options), *measured("b", **options), *more]
    scheduler = Scheduler(tasks, capacity or Capacity(8, ("A", "B"), memory=(6, 2)))
    assert "a" in started(scheduler, 0)
    assert started(scheduler, 10, ServiceReady(sid("a"))) == ["a.smoke"]
    assert started(scheduler, 12, Finished(sid("a.smoke"))) == ["a.perf"]
    return scheduler


def test_the_next_server_is_loaded_when_the_one_before_measures_no_more_and_measures_when_that_is_gone() -> None:
    scheduler = two_servers()
    assert scheduler.advance(32, Finished(sid("a.perf"))) == [
        Start(sid("a.accuracy"), ("A",), 1),
        Start(sid("b"), ("B",), 1),
    ]
    assert started(scheduler, 42, ServiceReady(sid("b"))) == ["b.smoke"]
    assert started(scheduler, 44, Finished(sid("b.smoke"))) == ["b.accuracy"], "perf waits, and not the server"
    assert scheduler.advance(62, Finished(sid("a.accuracy"))) == [Stop(sid("a"))]
    assert started(scheduler, 64, Finished(sid("b.accuracy"))) == [], "beside a server that is being stopped"
    assert started(scheduler, 65, ServiceEnded(sid("a"))) == ["b.perf"]
    assert scheduler.advance(85, Finished(sid("b.perf"))) == [Stop(sid("b"))]
    scheduler.advance(86, ServiceEnded(sid("b")))
    assert scheduler.finished


@pytest.mark.parametrize(
    ("capacity", "options"),
    [
        (Capacity(8, ("A", "B")), {}),
        (Capacity(8, ("A", "B"), memory=(5, 2)), {}),
        (Capacity(8, ("A", "B"), memory=(6, 1)), {}),
        (Capacity(8, ("A", "B"), memory=(6, 2)), {"memory": None}),
        (Capacity(8, ("A",), memory=(6, 2)), {}),
        (Capacity(8, ("A", "B"), memory=(6, 2)), {"gpus": 2}),
    ],
    ids=["of a node unknown", "too little", "too little of another kind", "not known", "one GPU", "all GPUs"],
)
def test_without_room_servers_follow_one_another(capacity: Capacity, options: dict[str, object]) -> None:
    scheduler = two_servers(capacity=capacity, **options)
    assert started(scheduler, 32, Finished(sid("a.perf"))) == ["a.accuracy"]
    assert started(scheduler, 62, Finished(sid("a.accuracy"))) == []
    assert started(scheduler, 63, ServiceEnded(sid("a"))) == ["b"]


def test_a_server_that_ran_out_of_memory_beside_another_is_started_again_when_that_is_gone() -> None:
    scheduler = two_servers(retries=1)
    scheduler.advance(32, Finished(sid("a.perf")))
    (again,) = scheduler.advance(35, ServiceEnded(sid("b"), OOM))
    assert isinstance(again, RetryAt)
    assert started(scheduler, again.when) == []
    scheduler.advance(62, Finished(sid("a.accuracy")))
    assert started(scheduler, 63, ServiceEnded(sid("a"))) == ["b"]


def test_what_ran_out_of_memory_beside_a_server_that_was_loaded_has_another_try() -> None:
    scheduler = two_servers()
    scheduler.advance(32, Finished(sid("a.perf")))
    (again,) = scheduler.advance(35, Finished(sid("a.accuracy"), OOM))
    assert isinstance(again, RetryAt)
    assert started(scheduler, again.when) == ["a.accuracy"]
    assert names(scheduler.advance(again.when + 1, Finished(sid("a.accuracy"), OOM)), Stop) == ["a"]
    assert statuses(scheduler, "a.accuracy") == [S.FAILED]


# Random plans on a simulated machine.


class Simulation:
    """Plays the runner: takes instructions, checks them, makes up what happens next."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        # Often nearly all are servers: one after another, or measured beside each other.
        self.serves, self.rules = rng.choices(
            [(False, (1, 2, 5, 1)), (True, (9, 1, 1, 1)), (True, (0, 1, 0, 0))], (5, 6, 3)
        )[0]
        self.nodes = {name: self.capacity(name) for name in rng.choice(["1", "1", "12", "123"])}
        self.tasks = {one.id: one for one in self.random_tasks()}
        ids = list(self.tasks)
        self.scheduler = Scheduler(
            rng.sample(list(self.tasks.values()), len(ids)),
            *self.nodes.values(),
            keep_going=rng.random() < 0.8,
            observe=self.observe,
            favour={one: rng.choice([1e-3, 0.5, 2.0, 1e6]) for one in ids if rng.random() < 0.3},
        )
        self.held: dict[StageRunId, tuple[str, ...]] = {}  # tasks that run, and their GPUs
        self.on: dict[StageRunId, str] = {}  # the node of the latest start
        self.phase: dict[StageRunId, str] = {}  # of services that run
        self.asked: set[StageRunId] = set()  # to stop or be cancelled
        self.elsewhere: set[StageRunId] = set()
        self.starts: dict[StageRunId, int] = {}
        self.attempt: dict[StageRunId, int] = {}
        self.vacated: set[StageRunId] = set()  # tasks of which only the result is still to be kept
        self.busy_left = 2 * len(ids)
        self.gone: set[str] = set()
        self.interrupted = False
        self.now = 0.0

    def observe(self, task_id: StageRunId, old: StageStatus, new: StageStatus) -> None:
        assert new in TRANSITIONS[old]

    def capacity(self, node: str) -> Capacity:
        gpus = tuple(f"GPU-{node}-{i}" for i in range(self.rng.choice([0, 1, 2, 4])))
        kind = self.rng.choice(["h100", "l40s"])
        memory = self.rng.choice([None, (4, 4), (8, 6)])
        return Capacity(self.rng.choice([1, 2, 4]), gpus, self.rng.choice([1, 2]), node, kind, memory)

    def random_tasks(self) -> list[Task]:
        rng = self.rng
        tasks: list[Task] = []
        artifacts: list[str] = []

        def some(names: list[str], most: int) -> list[str]:
            return rng.sample(names, min(len(names), rng.randint(0, most)))

        def resources() -> dict[str, object]:
            gpus = rng.choice([0, 0, 1, 1, 2, 4])
            gpus = gpus if rng.random() < 0.1 else min(gpus, *(len(node.gpus) for node in self.nodes.values()), 9)
            cpus = rng.randint(0, max(node.cpus for node in self.nodes.values()))
            return {
                "gpus": gpus,
                "cpus": cpus,
                "downloads": rng.choice([0, 0, 0, 1]),
                "exclusive": rng.choices(list(Exclusive), self.rules)[0],
                "accelerator": rng.choice([None, None, *(node.accelerator for node in self.nodes.values())]),
            }

        for number in range(rng.randint(1, 9)):
            more = {
                "s": rng.choice([0.0, 1.0, 5.0, 60.0]),
                "retries": rng.choice([0, 0, 1, 2]),
                "order": rng.randint(0, 3),
            }
            if rng.random() < (0.2 if self.serves else 0.65):
                tasks.append(task(f"a{number}", *some(artifacts, 3), **resources(), **more))
                artifacts.append(f"a{number}")
                continue
            name = f"s{number}"
            takes = resources()
            memory = rng.choice([None, (1, 1), (3, 2), (5, 3)])
            tasks.append(service(name, *some(artifacts, 2), **takes, **more, memory=memory))
            outside, members = list(artifacts), []
            for member in range(rng.randint(1, 4)):
                needs = some(outside, 1) + some(members, 2) + ([name] if rng.random() < 0.2 else [])
                rule = takes["exclusive"] if rng.random() < 0.5 else Exclusive.NONE
                tasks.append(inside(f"{name}.{member}", name, *needs, **more, exclusive=rule))
                members.append(f"{name}.{member}")
            artifacts += members
        return tasks

    def there(self, task_id: StageRunId) -> bool:
        return self.scheduler.status(task_id) in (S.SUCCEEDED, S.UP_TO_DATE)

    def obey(self, instructions: list[Instruction]) -> None:
        for one in instructions:
            about = self.tasks[one.id]
            if isinstance(one, RetryAt):
                assert one.when > self.now
                assert one.attempt <= max(about.retries, LOST_RETRIES) + 1
                continue
            if isinstance(one, Start):
                self.check_start(one, about)
            else:
                assert one.id in self.held
                assert one.id not in self.asked
                assert isinstance(one, Stop) == (about.scope is Scope.SERVICE)
                if isinstance(one, Stop):
                    assert not self.inside(one.id)
                self.asked.add(one.id)
        self.check_machine()

    def inside(self, service_id: StageRunId) -> list[StageRunId]:
        return [one for one in self.held if self.tasks[one].service == service_id]

    def check_start(self, start: Start, about: Task) -> None:
        assert not self.interrupted
        assert start.id not in self.held
        assert start.id not in self.elsewhere
        assert start.attempt == self.attempt.get(start.id, 1) <= max(about.retries, LOST_RETRIES) + 1
        assert all(self.there(need) for need in about.needs if need != about.service)
        if about.service is not None:
            assert self.phase[about.service] == "ready"
            assert about.service not in self.asked
            assert not self.inside(about.service)
            assert (start.gpus, start.node) == (self.held[about.service], self.on[about.service])
        if about.scope is Scope.SERVICE:
            self.phase[start.id] = "starting"
            members = [one for one in self.tasks.values() if one.service == start.id]
            waiting = [one for one in members if self.scheduler.status(one.id) in (S.PENDING, S.ELSEWHERE)]
            assert waiting
            for member in waiting:
                outside = (need for need in member.needs if self.tasks[need].service != start.id and need != start.id)
                assert all(self.there(need) for need in outside)
        if about.service is None:
            assert len(start.gpus) == about.resources.gpus
        assert about.service is not None or start.node not in self.gone
        self.held[start.id] = start.gpus
        self.on[start.id] = start.node

    def check_machine(self) -> None:
        for name, node in self.nodes.items():
            units = [self.tasks[one] for one in self.held if self.tasks[one].service is None and self.on[one] == name]
            gpus = [gpu for one in units for gpu in self.held[one.id]]
            taken = [one.resources for one in units if one.id not in self.vacated]
            assert len(gpus) == len(set(gpus))
            assert set(gpus) <= set(node.gpus)
            self.check_alone(units, node)
            self.check_measured_beside(units)
            assert sum(one.cpus for one in taken if not one.exclusive.alone) <= node.cpus
            assert sum(one.downloads for one in taken if not one.exclusive.alone) <= node.downloads
            assert {one.resources.accelerator for one in units} <= {None, node.accelerator}
            rules = {one.resources.exclusive for one in units}
            if Exclusive.GPU in rules:
                assert rules == {Exclusive.GPU}
        assert running(self.scheduler) == set(self.held)

    def check_alone(self, units: list[Task], node: Capacity) -> None:
        """That what is alone is, and beside what is measured nothing is, also no server that loads, waits or is stopped."""
        if not any(one.resources.exclusive.alone for one in units) or len(units) == 1:
            return
        assert all(one.resources.exclusive.alone for one in units)
        first, second = units  # as they were started
        assert first.scope is second.scope is Scope.SERVICE
        left = [one for one in self.tasks.values() if one.service == first.id and self.measures(one)]
        assert all(self.scheduler.status(one.id) in ENDED for one in left), "it measures no more"
        assert node.memory is not None
        assert first.memory is not None
        assert second.memory is not None
        assert all(a + b <= have for a, b, have in zip(first.memory, second.memory, node.memory, strict=True))
        assert not any(self.measures(self.tasks[one]) for unit in units for one in self.inside(unit.id))

    def check_measured_beside(self, units: list[Task]) -> None:
        """No server loads on a node where another is measured."""
        measured = {
            unit.id
            for unit in units
            for one in self.inside(unit.id)
            if self.tasks[one].resources.exclusive is Exclusive.GPU
        }
        loading = {unit.id for unit in units if self.phase.get(unit.id) == "starting"}
        assert not measured or not loading

    def measures(self, one: Task) -> bool:
        return one.service is not None and one.resources.exclusive.alone

    def failure(self) -> StageError:
        kind = self.rng.choice([FailureClass.TRANSIENT, FailureClass.TRANSIENT, *FailureClass])
        return StageError("it failed", failure=kind)

    def end(self, task_id: StageRunId) -> None:
        del self.held[task_id]
        self.phase.pop(task_id, None)
        self.asked.discard(task_id)
        self.vacated.discard(task_id)

    def happen(self) -> Event | None:
        """Something that could happen now, or None if nothing can."""
        rng = self.rng
        if not self.interrupted and rng.random() < 0.01:
            self.interrupted = True
            return Interrupt()
        if rng.random() < 0.03:
            name = rng.choice(list(self.nodes))
            self.gone ^= {name}
            return NodeGone(name) if name in self.gone else NodeCame(self.nodes[name])
        # A service that is gone stays in `held` until the task inside it is gone too.
        dead = {one for one, phase in self.phase.items() if phase == "dead"}
        choices = [one for one in self.held if one not in dead] + sorted(self.elsewhere)
        if not choices:
            return None
        task_id = rng.choice(choices)
        if task_id in self.elsewhere:
            self.elsewhere.remove(task_id)
            return Freed(task_id, done=rng.random() < 0.5)
        about = self.tasks[task_id]
        fresh = self.phase.get(task_id, "starting") == "starting" and task_id not in self.asked | self.vacated
        if fresh and about.scope is Scope.ARTIFACT and rng.random() < 0.3:
            self.vacated.add(task_id)
            self.held[task_id] = ()
            return Vacated(task_id)
        if fresh and self.busy_left and rng.random() < 0.15:
            self.busy_left -= 1
            self.leave(task_id)
            if about.scope is not Scope.SERVICE and rng.random() < 0.3:
                return Freed(task_id, done=True)
            self.elsewhere.add(task_id)
            return Busy(task_id)
        if about.scope is not Scope.SERVICE:
            self.leave(task_id)
            return Finished(task_id, self.failure() if rng.random() < 0.25 else None)
        if self.phase[task_id] == "starting" and rng.random() < 0.8:
            self.phase[task_id] = "ready"
            return ServiceReady(task_id)
        if task_id not in self.asked and rng.random() < 0.7:
            return None  # it continues serving
        failure = self.failure() if rng.random() < 0.5 else None
        if self.inside(task_id):
            self.phase[task_id] = "dead"
        else:
            self.end(task_id)
        return ServiceEnded(task_id, failure)

    def leave(self, task_id: StageRunId) -> None:
        self.end(task_id)
        of = self.tasks[task_id].service
        if of is not None and self.phase[of] == "dead":
            self.end(of)

    def run(self) -> None:
        self.obey(self.scheduler.advance(self.now))
        for _ in range(5000):
            if self.scheduler.finished:
                break
            events = [event for event in (self.happen() for _ in range(self.rng.choice([1, 1, 2]))) if event]
            self.now += self.rng.choice([0.0, 0.5, 3.0])
            if not (events or self.held or self.elsewhere):
                assert self.scheduler.wake_at is not None, "nothing runs and nothing is due: stuck"
                self.now = max(self.now, self.scheduler.wake_at)
            instructions = self.scheduler.advance(self.now, *events)
            for one in instructions:
                if isinstance(one, RetryAt):
                    self.attempt[one.id] = one.attempt
            self.obey(instructions)
        self.check_end()

    def check_end(self) -> None:
        scheduler = self.scheduler
        assert scheduler.finished
        assert not self.held
        assert sum(scheduler._counts.values()) == len(self.tasks)
        for about in self.tasks.values():
            status = scheduler.status(about.id)
            assert status in ENDED
            assert (scheduler.blocked_by(about.id) is not None) == (status is S.BLOCKED)
            if status is S.BLOCKED:
                assert scheduler.status(self.cause(about)) is S.FAILED
            if status is S.FAILED:
                assert scheduler.failure(about.id)

    def cause(self, about: Task) -> StageRunId:
        """The cause told for a blocked task; it must be reachable through blocked needs."""
        cause = scheduler_cause = self.scheduler.blocked_by(about.id)
        assert scheduler_cause
        seen, stack = set(), [about.id]
        while stack:
            one = self.tasks[stack.pop()]
            if one.id not in seen:
                seen.add(one.id)
                stack += [*one.needs, *([one.service] if one.service else [])]
        assert cause in seen
        return cause


@settings(max_examples=SCHEDULES, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**63))
def test_any_plan_in_any_order_of_events_ends_and_breaks_no_rule(seed: int) -> None:
    Simulation(random.Random(seed)).run()
