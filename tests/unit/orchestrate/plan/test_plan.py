import json
from dataclasses import dataclass, replace
from typing import Annotated, Any

import pytest

from tests.helpers import fabricated
from tests.unit.conftest import MACHINE, make_cell, make_toolchain
from trtllm_pipeline.base.domain import Cell, Json, Scope
from trtllm_pipeline.base.errors import UsageError
from trtllm_pipeline.base.fingerprints import canonical, fingerprint
from trtllm_pipeline.orchestrate.plan.plan import Plan, make_plan, to_run, wanted
from trtllm_pipeline.orchestrate.plan.planner import exposed
from trtllm_pipeline.tensorrt.stage.params import Param


@dataclass(frozen=True)
class Anything:
    value: Annotated[Any, Param("anything")]


def plan_of(*cells: Cell, version: str = "1", until: str | None = None, content: str = "c") -> Plan:
    toolchains = {"toy": make_toolchain(version)}
    return make_plan(cells, toolchains, MACHINE, digest=lambda name, _cell: (f"/data/{name}", content), until=until)


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


def test_keys_are_canonical_and_tell_apart_what_only_their_types_tell_apart() -> None:
    plans = [fabricated.plan(fabricated.cell("fp16")), plan_of(make_cell(), content="d")]
    for run in (run for plan in plans for run in plan.stage_runs.values()):
        assert run.key == canonical(json.loads(run.key))
        assert run.fingerprint == fingerprint(run.key)
    read = {"fp16": 1, "fp8": 1.0, "int8_wo": True, "int4_wo": 1}
    toolchain = make_toolchain()
    get = replace(toolchain.stages[0], params=Anything, read=lambda cell: Anything(read[cell.precision]), inputs={})
    alone = {"toy": replace(toolchain, stages=(get,))}
    plan = make_plan(list(map(make_cell, read)), alone, MACHINE, digest=lambda _path, _cell: ("", ""))
    assert [json.dumps(json.loads(run.key)["params"]["value"]) for run in plan.stage_runs.values()] == [
        "1",
        "1.0",
        "true",
    ]


def test_paths_time_limits_and_retries_are_not_in_fingerprints() -> None:
    cell = make_cell()
    settings = {name: {**values, "timeout_s": 5.0, "retries": 9} for name, values in cell.settings.items()}
    moved = replace(cell, settings=settings, base_dir="/elsewhere")
    toolchains = {"toy": make_toolchain()}
    other = make_plan([moved], toolchains, MACHINE, digest=lambda name, _cell: (f"/other/{name}", "c"))
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


def scoring(answers: str, metrics: list[Json] | None = None) -> Cell:
    """A cell whose answers are scored as told."""
    cell = fabricated.cell()
    changed = {**cell.settings["accuracy"], "answers": answers, "metrics": metrics or ["exact"]}
    return replace(cell, settings={**cell.settings, "accuracy": changed})


def test_answers_are_asked_for_or_are_those_of_perf() -> None:
    own, timed = fabricated.plan(scoring("own")), fabricated.plan(scoring("perf"))
    assert set(stages(own)) - set(stages(timed)) == {"accuracy"}
    assert set(stages(timed)) - set(stages(own)) == {"score"}
    score = fabricated.stage_run(timed, timed.cells[0], "score")
    perf = fabricated.stage_run(timed, timed.cells[0], "perf")
    assert score.inputs["perf"] == perf.id
    assert score.files == {"input_data": "builtin:prompts"}, "perf's questions"
    assert score.stage.scope is Scope.ARTIFACT


def test_another_metric_scores_again_and_measures_nothing_again() -> None:
    before = fingerprints(fabricated.plan(scoring("perf")))
    after = fingerprints(fabricated.plan(scoring("perf", ["chrf"])))
    assert [name for name in before if before[name] != after[name]] == ["score"]


def test_what_was_measured_is_wanted_though_it_is_read() -> None:
    plan = fabricated.plan(scoring("perf"))
    names = {plan.stage_runs[run].stage.name for run in wanted(plan)}
    assert names == {"smoke", "perf", "score"}
    scored = {run.id for run in plan.stage_runs.values() if run.stage.name == "score"}
    assert "perf" in stages(plan, to_run(plan, lambda run: run.id in scored))


@pytest.mark.parametrize("answers", ["own", "perf"])
def test_a_function_of_the_user_is_in_the_fingerprint(answers: str) -> None:
    cell = scoring(answers, ["exact", "my.metrics:f"])
    stage = "accuracy" if answers == "own" else "score"
    seen = [
        make_plan(
            (cell,),
            {"embedded": fabricated._TOOLCHAIN},
            MACHINE,
            digest=lambda path, _cell, v=version: (path, path + v),
        )
        for version in ("1", "2")
    ]
    runs = [fabricated.stage_run(plan, cell, stage) for plan in seen]
    assert runs[0].files["metric_module"] == "./my/metrics.py"
    assert runs[0].fingerprint != runs[1].fingerprint


def test_until_a_stage_that_no_cell_has() -> None:
    with pytest.raises(UsageError, match="none of these cells has the stage 'accuracy'"):
        fabricated.plan(scoring("perf"), until="accuracy")
    assert "perf" in stages(fabricated.plan(scoring("perf"), until="score"))
    assert "perf" not in stages(fabricated.plan(scoring("own"), until="accuracy"))


def test_an_address_that_others_reach_is_warned_of_where_a_server_is_started() -> None:
    quiet, loud = (fabricated.cell(precision) for precision in ("fp16", "int8_wo"))
    loud = replace(loud, settings={**loud.settings, "serve": {**loud.settings["serve"], "host": "0.0.0.0"}})
    assert exposed(fabricated.plan(quiet)) == []
    assert exposed(fabricated.plan(loud, until="build")) == []
    (warning,) = exposed(fabricated.plan(quiet, loud))
    assert "listens on 0.0.0.0: anyone who can reach it" in warning
