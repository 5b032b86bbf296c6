"""What a cell that ran out of memory is planned with next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import trtllm_cells
from tests.helpers.trtllm_cells import cell, infeasible, plan
from trtllm_pipeline.base.domain import Cell, Fingerprint, in_words
from trtllm_pipeline.base.errors import MatrixError
from trtllm_pipeline.base.files.writing import write_lines
from trtllm_pipeline.orchestrate.matrix.expand import expand
from trtllm_pipeline.orchestrate.matrix.models import OutOfMemory
from trtllm_pipeline.orchestrate.matrix.validate import load_matrix
from trtllm_pipeline.orchestrate.plan.plan import Plan, part
from trtllm_pipeline.orchestrate.plan.plan_file import plan_lines, read_plan
from trtllm_pipeline.orchestrate.plan.planner import SECTIONS, followed, newly_planned
from trtllm_pipeline.orchestrate.store.index import AttemptRow

HALVE = {"retry.oom": {"max_num_tokens": "halve"}}
BATCH = 64
TOKENS = 8192


def attempt(
    fingerprint: Fingerprint, failure: str | None = "out_of_memory", outcome: str | None = "failed"
) -> AttemptRow:
    return AttemptRow(1, "run", "build", fingerprint, 1, 0.0, Path(), 1.0, outcome, failure, "no memory", None)


class Machine:
    """Remembers what failed, as the index does."""

    def __init__(self) -> None:
        self.attempts: dict[Fingerprint, AttemptRow] = {}
        self.plans = 0

    def fails(self, planned: Plan, stage: str, asked: Cell, **other: Any) -> None:
        for run in (planned.stage_runs[each] for each in planned.by_cell[asked.id]):
            if run.stage.name == stage:
                self.attempts[run.fingerprint] = attempt(run.fingerprint, **other)

    def known(self, wanted: Iterable[Fingerprint]) -> Mapping[Fingerprint, AttemptRow]:
        return {each: self.attempts[each] for each in wanted if each in self.attempts}

    def plan(self, *cells: Cell) -> Plan:
        def make(these: Iterable[Cell]) -> Plan:
            self.plans += 1
            return plan(*these)

        return followed(make(cells), make, self.known, infeasible)


def tokens(planned: Plan, asked: Cell) -> int:
    (run,) = (
        planned.stage_runs[each] for each in planned.by_cell[asked.id] if planned.stage_runs[each].stage.name == "build"
    )
    found: int = run.params.max_num_tokens
    return found


def changed(planned: Plan) -> list[str]:
    return [line for each in planned.cells for line in in_words(each.changes)]


def test_without_leave_nothing_is_changed() -> None:
    machine, asked = Machine(), cell(batch=BATCH)
    machine.fails(machine.plan(asked), "build", asked)
    assert machine.plan(asked).cells == (asked,)
    assert machine.plans == 2


def test_what_fails_is_halved_until_it_works_or_the_times_are_used_up() -> None:
    machine, asked = Machine(), cell(batch=BATCH, settings=HALVE)
    seen = []
    for _ in range(6):
        planned = machine.plan(asked)
        seen.append(tokens(planned, asked))
        machine.fails(planned, "build", asked)
    assert seen == [TOKENS, 4096, 2048, 1024, 1024, 1024]
    assert changed(planned) == ["settings.build.max_num_tokens 8192 -> 4096 -> 2048 -> 1024: build ran out of memory"]
    assert [change.why for change in planned.cells[0].changes] == ["no memory"] * 3


def test_what_hangs_on_it_has_new_keys_and_what_it_is_made_of_has_not() -> None:
    machine, asked = Machine(), cell(batch=BATCH, settings=HALVE)
    before = machine.plan(asked)
    machine.fails(before, "build", asked)
    after = machine.plan(asked)
    kept = [before.stage_runs[run].stage.name for run in before.by_cell[asked.id] if run in after.stage_runs]
    assert kept == ["download", "convert"]
    assert newly_planned(before, after) == [after.cells[0]]
    assert newly_planned(after, after) == []


@pytest.mark.parametrize(
    "other",
    [{"failure": "bug"}, {"outcome": "succeeded", "failure": None}, {"outcome": None, "failure": None}],
    ids=["another failure", "worked later", "killed in the middle"],
)
def test_only_want_of_memory_changes_anything(other: Mapping[str, Any]) -> None:
    machine, asked = Machine(), cell(batch=BATCH, settings=HALVE)
    machine.fails(machine.plan(asked), "build", asked, **other)
    assert changed(machine.plan(asked)) == []


def test_a_change_that_cannot_matter_to_what_failed_is_not_made() -> None:
    machine = Machine()
    asked = cell(
        "fp8", batch=BATCH, settings={"retry.oom": {"max_num_tokens": "halve", "kv_cache_free_gpu_mem_fraction": [0.5]}}
    )
    machine.fails(machine.plan(asked), "quantize", asked)
    assert changed(machine.plan(asked)) == []
    machine.attempts.clear()
    machine.fails(machine.plan(asked), "build", asked)
    assert changed(machine.plan(asked)) == ["settings.build.max_num_tokens 8192 -> 4096: build ran out of memory"]
    machine.fails(machine.plan(asked), "launch", asked)
    assert changed(machine.plan(asked)) == [
        "settings.build.max_num_tokens 8192 -> 4096 -> 2048: build and launch ran out of memory",
        "settings.repository.kv_cache_free_gpu_mem_fraction 0.9 -> 0.5: launch ran out of memory",
    ]


@pytest.mark.parametrize(
    ("stage", "setting", "values", "said"),
    [
        ("launch", "kv_cache_free_gpu_mem_fraction", [0.8, 0.6], "0.9 -> 0.8 -> 0.6"),
        ("launch", "max_tokens_in_paged_kv_cache", [4096], "not set -> 4096"),
        (
            "build",
            "max_num_tokens",
            [TOKENS, 4096, 2048],
            "8192 -> 4096 -> 2048",
        ),  # what changes nothing is passed over
    ],
)
def test_values_are_tried_in_their_order_and_then_it_is_over(
    stage: str, setting: str, values: list[float], said: str
) -> None:
    machine, asked = Machine(), cell(batch=BATCH, settings={"retry.oom": {setting: values}})
    for _ in range(4):
        planned = machine.plan(asked)
        machine.fails(planned, stage, asked)
    section = "build" if stage == "build" else "repository"
    assert changed(planned) == [f"settings.{section}.{setting} {said}: {stage} ran out of memory"]


LESS = (
    "100 was not tried: settings.build.max_num_tokens 100 is less than a prompt of 128 tokens, which "
    "settings.repository.enable_chunked_context: true would split"
)


def test_a_change_that_the_release_refuses_is_not_made_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A pass must hold a prompt of 128 tokens."""
    machine, asked = Machine(), cell(batch=BATCH, settings={**HALVE, "build.max_num_tokens": 200})
    machine.fails(machine.plan(asked), "build", asked)
    assert changed(machine.plan(asked)) == []
    assert f"{asked.id}: settings.retry.oom.max_num_tokens {LESS}" in caplog.text


def test_what_is_passed_over_because_it_is_refused_stands_beside_what_was_taken(tmp_path: Path) -> None:
    machine, asked = Machine(), cell(batch=BATCH, settings={"retry.oom": {"max_num_tokens": [100, 4096]}})
    machine.fails(machine.plan(asked), "build", asked)
    planned = machine.plan(asked)
    assert changed(planned) == [f"settings.build.max_num_tokens 8192 -> 4096: build ran out of memory; {LESS}"]
    lines = plan_lines(planned, present=(), to_run=(), reasons={}, times=lambda _run: None, commands=lambda _run: [])
    write_lines(tmp_path / "plan.json", lines)
    assert [cell.changes for cell in read_plan(tmp_path / "plan.json").cells] == [planned.cells[0].changes]


def test_cells_that_share_what_failed_go_their_own_ways() -> None:
    machine = Machine()
    allowed, other = cell(batch=BATCH, settings=HALVE), cell("bf16", batch=BATCH)
    first = machine.plan(allowed, other)
    machine.fails(first, "build", allowed)
    machine.fails(first, "build", other)
    second = machine.plan(allowed, other)
    assert (tokens(second, allowed), tokens(second, other)) == (4096, TOKENS)
    alone = part(second, newly_planned(first, second))
    assert list(alone.by_cell) == [allowed.id]
    assert set(alone.stage_runs) == set(second.by_cell[allowed.id])


def test_a_matrix_says_what_may_be_changed(tmp_path: Path) -> None:
    matrix = Path(__file__).parents[4] / "matrices" / "qwen2.yaml"
    load_matrix(matrix, ("settings.retry.oom.max_num_tokens=halve", "settings.retry.times=2"))
    load_matrix(matrix, ("settings.retry.oom={kv_cache_free_gpu_mem_fraction: [0.8, 0.6]}",))
    assert set(OutOfMemory.model_fields) == set(SECTIONS)
    settings = trtllm_cells.settings_of({})
    assert all(name in settings[section] for name, section in SECTIONS.items())
    for wrong in ("max_num_tokens=third", "max_num_tokens=[0]", "max_num_tokens=[]", "max_batch_size=halve"):
        with pytest.raises(MatrixError):
            load_matrix(matrix, (f"settings.retry.oom.{wrong}",))


def test_what_has_no_value_cannot_be_halved() -> None:
    matrix = Path(__file__).parents[4] / "matrices" / "qwen2.yaml"
    halve, name = "settings.retry.oom.max_tokens_in_paged_kv_cache=halve", "max_tokens_in_paged_kv_cache"
    unset = f"settings.repository.{name}=null"
    with pytest.raises(MatrixError, match="cannot be halved") as refused:
        expand(load_matrix(matrix, (halve, unset)), default_toolchain="tensorrt_llm")
    fault = refused.value.faults[0]
    assert (fault.path, fault.key) == ("--set", "settings.retry.oom.max_tokens_in_paged_kv_cache")
    assert expand(load_matrix(matrix, (halve,)), default_toolchain="tensorrt_llm")
    listed = "settings.retry.oom.max_tokens_in_paged_kv_cache=[4096]"
    assert expand(load_matrix(matrix, (listed, unset)), default_toolchain="tensorrt_llm")
