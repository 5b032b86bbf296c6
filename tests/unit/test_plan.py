from __future__ import annotations

from dataclasses import replace

from tests.unit.conftest import make_cell, make_toolchain
from trtllm_pipeline.domain import Cell
from trtllm_pipeline.plan import Plan, make_plan, to_run, wanted


def plan_of(*cells: Cell, version: str = "1", until: str | None = None, content: str = "c") -> Plan:
    toolchains = {"toy": make_toolchain(version)}
    return make_plan(cells, toolchains, digest=lambda name, _cell: (f"/data/{name}", content), until=until)


def stages(plan: Plan, ids: set | None = None) -> list[str]:
    return sorted(run.stage.name for run in plan.stage_runs.values() if ids is None or run.id in ids)


def fingerprints(plan: Plan) -> dict[str, str]:
    return {run.stage.name: run.fingerprint for run in plan.stage_runs.values()}


def test_equal_work_is_planned_once() -> None:
    plan = plan_of(make_cell("fp16", 4), make_cell("fp16", 8), make_cell("fp8", 4))
    assert stages(plan) == ["get", "look", "look", "look", "make", "make", "make", "serve", "serve", "serve"]
    assert [len(run.cells) for run in plan.stage_runs.values() if run.stage.name == "get"] == [3]


def test_stage_runs_stand_after_what_they_need() -> None:
    plan = plan_of(make_cell("fp16"), make_cell("fp8"))
    seen: set[str] = set()
    for run in plan.stage_runs.values():
        assert set(run.needs) <= seen
        seen.add(run.id)


def test_a_change_reaches_what_reads_it_and_nothing_else() -> None:
    before = fingerprints(plan_of(make_cell()))
    batch = fingerprints(plan_of(make_cell(batch=8)))
    assert [name for name in before if before[name] != batch[name]] == ["make", "serve", "look"]
    tool = fingerprints(plan_of(make_cell(), version="2"))
    assert [name for name in before if before[name] != tool[name]] == ["make", "serve", "look"]
    data = fingerprints(plan_of(make_cell(), content="d"))
    assert [name for name in before if before[name] != data[name]] == ["look"]


def test_paths_time_limits_and_retries_are_not_in_fingerprints() -> None:
    cell = make_cell()
    settings = {name: {**values, "timeout_s": 5.0, "retries": 9} for name, values in cell.settings.items()}
    moved = replace(cell, settings=settings, base_dir="/elsewhere")
    toolchains = {"toy": make_toolchain()}
    other = make_plan([moved], toolchains, digest=lambda name, _cell: (f"/other/{name}", "c"))
    assert fingerprints(other) == fingerprints(plan_of(cell))


def test_infeasible_cells_stay_without_work() -> None:
    plan = plan_of(make_cell("fp16"), make_cell("fp8", reason="no"))
    assert len(plan.cells) == 2
    assert len(plan.feasible) == 1
    assert plan.by_cell[make_cell("fp8").id] == ()


def test_until_keeps_what_the_stage_needs() -> None:
    assert stages(plan_of(make_cell(), until="make")) == ["get", "make"]
    assert stages(plan_of(make_cell(), until="look")) == ["get", "look", "make", "serve"]


def test_wanted_are_results_nobody_reads() -> None:
    assert stages(plan_of(make_cell()), wanted(plan_of(make_cell()))) == ["look"]
    assert stages(plan_of(make_cell(), until="make"), wanted(plan_of(make_cell(), until="make"))) == ["make"]


def test_intermediates_that_are_gone_are_made_only_when_needed() -> None:
    plan = plan_of(make_cell())
    assert stages(plan, to_run(plan, lambda run: run.stage.name != "get")) == []
    assert stages(plan, to_run(plan, lambda run: run.stage.name == "make")) == ["look", "serve"]
    assert stages(plan, to_run(plan, lambda run: run.stage.name == "look")) == []
    assert stages(plan, to_run(plan, lambda _run: False)) == ["get", "look", "make", "serve"]
