"""Orders that are looked for before a run."""

from __future__ import annotations

from trtllm_pipeline.base.domain import Exclusive, Resources, StageRunId
from trtllm_pipeline.orchestrate.run.order import favourable, play
from trtllm_pipeline.orchestrate.run.scheduler import Capacity, Scheduler, Task

EIGHT = Capacity(64, tuple("ABCDEFGH"))


def task(name: str, gpus: int, s: float, *needs: str, exclusive: Exclusive = Exclusive.NONE) -> Task:
    resources = Resources(cpus=1, gpus=gpus, exclusive=exclusive)
    return Task(StageRunId(name), tuple(map(StageRunId, needs)), resources=resources, expected_s=s)


# The longest first leaves 2 GPUs idle: 900 | 600 600 -> 300 300. The 4 and 4 first, or last, leave none.
PACKED = [
    task(f"{number}", *what) for number, what in enumerate([(4, 300.0), (2, 600.0), (2, 600.0), (4, 300.0), (2, 900.0)])
]


def test_a_shorter_order_is_found_where_the_longest_path_first_is_not_the_best() -> None:
    assert play(PACKED, Scheduler(PACKED, EIGHT)) == 1200.0
    favour = favourable(PACKED, [EIGHT])
    assert play(PACKED, Scheduler(PACKED, EIGHT, favour=favour)) == 900.0
    assert favourable(PACKED, [EIGHT]) == favour, "the same every time"


def test_nothing_is_looked_for_where_it_cannot_matter() -> None:
    assert favourable([], [EIGHT]) == {}
    assert favourable(PACKED, [Capacity(64, ("A",))]) == {}, "one GPU"
    short = [task("a", 5, 10.0), task("b", 4, 9.0), task("c", 4, 9.0)]
    assert favourable(short, [EIGHT]) == {}, "it would take longer than it saves"
    equal = [task(f"{number}", 1, 1000.0) for number in range(8)]
    assert favourable(equal, [EIGHT]) == {}, "nothing can be shorter"
    assert favourable([task(f"{number}", 1, 10.0) for number in range(3000)], [EIGHT]) == {}, "too many"


def test_what_is_played_takes_what_it_really_takes() -> None:
    tasks = [task("a", 8, 10.0), task("b", 8, 20.0, "a")]
    assert play(tasks, Scheduler(tasks, EIGHT)) == 30.0
    assert play(tasks, Scheduler(tasks, EIGHT), {StageRunId("a"): 1.0, StageRunId("b"): 2.0}) == 3.0
