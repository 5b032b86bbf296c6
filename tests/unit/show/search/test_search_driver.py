"""The loop of a search: what it runs, what counts against its budget, when it stops."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.show.search.test_next_cell import failed, measured, option
from trtllm_pipeline.base.domain import CellId
from trtllm_pipeline.base.text_blocks import as_markdown
from trtllm_pipeline.orchestrate.plan.planner import Request
from trtllm_pipeline.orchestrate.results.report_file import CellStatus
from trtllm_pipeline.orchestrate.run.loop import Observer
from trtllm_pipeline.show.report.measured import Measured
from trtllm_pipeline.show.report.recommendation import Goals
from trtllm_pipeline.show.search import driver
from trtllm_pipeline.show.search.driver import Search, SearchState, WorkloadState
from trtllm_pipeline.show.search.next_cell import Option, decide

OPTIONS = [option(precision, batch) for precision in ("fp16", "fp8") for batch in (1, 2, 4, 8)]


class World:
    """A workspace in memory: what running a cell comes to, and which cells were run."""

    def __init__(self, folder: Path, comes_to: Callable[[Option], Measured], groups: int = 1) -> None:
        self.runs_dir = folder
        self.comes_to = comes_to
        self.groups = [OPTIONS[start::groups] for start in range(groups)]
        self.known: dict[CellId, Measured] = {}
        self.ran: list[CellId] = []

    def look(self, request: Request, store: Any, goals: Goals) -> SearchState:
        tried = {cell: row for cell, row in self.known.items() if driver._was_tried(row.status, row.failure)}
        groups = tuple(
            WorkloadState(tuple(group), sum(each.id in tried for each in group), decide(group, tried, goals))
            for group in self.groups
        )
        return SearchState("my", len(OPTIONS), tried, groups)

    def run(self, request: Request, store: Any, observer: Observer, *, command: Any, name: str) -> Any:
        (cell,) = request.cells
        row = self.comes_to(next(each for each in OPTIONS if each.id == cell))
        self.ran.append(CellId(cell))
        self.known[row.id] = row
        (self.runs_dir / name).mkdir()
        interrupted = row.status is CellStatus.INTERRUPTED
        return SimpleNamespace(run_id=name, rows=(row,), outcome=SimpleNamespace(interrupted=interrupted))

    def search(self, budget: int, told: Callable[[str], None] = lambda _: None) -> Search:
        found: Search = driver.search(
            Request(Path("my.yaml")),
            self,
            Observer(),
            Goals("throughput"),
            budget,
            announce=told,  # type: ignore[arg-type]
        )
        return found


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    def make(comes_to: Callable[[Option], Measured], **more: Any) -> World:
        made = World(tmp_path, comes_to, **more)
        monkeypatch.setattr(driver, "look", made.look)
        monkeypatch.setattr(driver.flow, "run", made.run)
        return made

    return make


def test_it_stops_at_its_budget_and_goes_on_with_a_larger_one(world: Callable[..., World]) -> None:
    said: list[str] = []
    here = world(lambda each: measured(each, tps=100.0 + int(str(each.axes["max_batch_size"]))))
    first = here.search(3, said.append)
    assert (len(here.ran), first.stopped, first.exit_code) == (3, "budget of 3 cells spent", 0)
    assert [line.split(":")[0] for line in said] == ["search 1/3", "search 2/3", "search 3/3"]
    assert here.search(3).state.tried == first.state.tried
    assert len(here.ran) == 3, "nothing is run again"
    whole = here.search(100)
    assert len(set(here.ran)) == len(here.ran) <= len(OPTIONS)
    assert whole.advice.candidates[0].cell in {"fp16/bs8", "fp8/bs8"}
    assert set(whole.why) == set(here.ran), "each choice is kept with its run"
    data = json.loads(json.dumps(whole.to_json()))
    assert data["spent"] == len(here.ran)
    assert all(each["why"] for each in data["tried"])
    text = as_markdown(whole.blocks())
    assert f"{len(here.ran)} of 8 cells measured" in text
    assert "**Reasons for these choices**" in text


def test_workloads_take_turns(world: Callable[..., World]) -> None:
    here = world(measured, groups=2)
    here.search(4)
    assert sorted(cell in {each.id for each in here.groups[0]} for cell in here.ran) == [False, False, True, True]


def test_an_interrupt_ends_it(world: Callable[..., World]) -> None:
    here = world(lambda each: dataclasses.replace(measured(each), status=CellStatus.INTERRUPTED, levels=()))
    found = here.search(5)
    assert (found.exit_code, found.stopped, len(here.ran)) == (130, "interrupted", 1)
    assert found.state.tried == {}


@pytest.mark.parametrize("failure", ["user", "transient", "lost"])
def test_a_failure_that_says_nothing_of_the_cell_ends_it(world: Callable[..., World], failure: str) -> None:
    here = world(lambda each: failed(each, failure))
    found = here.search(5)
    assert (found.exit_code, found.stopped) == (1, "fp16/bs2: build failed: it broke")
    assert found.state.spent == 0
    assert found.state.next is not None, "the same command tries again"


def test_failures_that_cells_share_count_once(world: Callable[..., World]) -> None:
    def broken(each: Option) -> Measured:
        row = failed(each, "bug")
        return dataclasses.replace(
            row, log="work/convert/log" if each.axes["precision"] == "fp8" else f"work/{each.id}/log"
        )

    here = world(broken)
    found = here.search(100)
    assert len(here.ran) == 8
    assert found.state.spent == 5, "four of fp16, one that fp8 shares"
    assert found.exit_code == 3
    assert "8 failed" in as_markdown(found.blocks())
