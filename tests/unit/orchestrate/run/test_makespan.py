"""How long random plans take, by `benchmarks/makespan.py`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from trtllm_pipeline.base.domain import Exclusive


@pytest.fixture(scope="module")
def makespan() -> ModuleType:
    path = Path(__file__).parents[4] / "benchmarks" / "makespan.py"
    spec = importlib.util.spec_from_file_location("makespan", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("gpus", [2, pytest.param(8, marks=pytest.mark.thorough)])
def test_nine_of_ten_plans_take_at_most_a_twentieth_more_than_the_best_schedule_found(
    makespan: ModuleType, gpus: int
) -> None:
    found = makespan.measure(12, 7, gpus, tries=6)
    assert found["within_5_percent_of_best_found"] >= 0.95
    assert found["one_after_another_median"] > (1.1 if gpus == 2 else 1.7)


@pytest.mark.thorough
@pytest.mark.parametrize("gpus", [2, 8])
def test_nine_of_ten_plans_that_measure_alone_take_at_most_a_twentieth_more_than_any_schedule_must(
    makespan: ModuleType, gpus: int
) -> None:
    found = makespan.measure(30, 7, gpus)
    assert found["within_5_percent_exclusive"] >= 0.95
    assert found["within_5_percent"] >= 0.9


@pytest.mark.thorough
@pytest.mark.parametrize("gpus", [2, 8])
def test_wrong_guesses_cost_little_beside_first_come_first_served(makespan: ModuleType, gpus: int) -> None:
    found = makespan.measure(24, 7, gpus, cold="stage")
    assert found["over_first_come_p95"] <= 1.01
    assert found["over_first_come_worst"] <= 1.05
    assert found["over_told_total"] <= 1.005, "by how much each stage is off matters little, so nothing is learnt of it"


@pytest.mark.parametrize("rule", Exclusive)
def test_no_schedule_is_shorter_than_the_bound(makespan: ModuleType, rule: Exclusive) -> None:
    assert makespan.measure(12, 8, 4, rule=rule)["over_bound_least"] >= 1 - 1e-9


@pytest.mark.thorough
def test_measuring_side_by_side_saves_time_the_more_gpus_there_are(makespan: ModuleType) -> None:
    two, eight = (makespan.measure(24, 1, gpus, rule=Exclusive.GPU) for gpus in (2, 8))
    assert eight["over_machine_total"] < two["over_machine_total"] - 0.1 < 0.8
    assert max(two["over_machine_worst"], eight["over_machine_worst"]) <= 1.02


@pytest.mark.thorough
def test_loading_servers_beside_the_one_before_saves_time_where_there_is_a_gpu_for_the_next(
    makespan: ModuleType,
) -> None:
    one, eight = (makespan.preloading(24, 1, gpus, 120.0) for gpus in (1, 8))
    assert one["over_one_after_another_least"] == one["over_one_after_another_worst"] == 1.0
    assert eight["over_one_after_another_total"] < 0.93
    assert eight["over_one_after_another_worst"] <= 1.02


@pytest.mark.thorough
def test_an_order_that_is_looked_for_takes_no_longer_and_most_plans_come_near_the_bound(makespan: ModuleType) -> None:
    plain, searched = (makespan.measure(4, 3, 8, rule=Exclusive.GPU, search=search) for search in (False, True))
    assert searched["over_bound_median"] <= plain["over_bound_median"]
    assert searched["over_bound_p95"] <= plain["over_bound_p95"]
    assert searched["within_5_percent"] >= 0.75
