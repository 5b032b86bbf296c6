"""Searching on surfaces that are known whole, and what is ruled out and why."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.surfaces import SURFACES, Surface
from trtllm_pipeline.base.domain import CellId
from trtllm_pipeline.measure.load.result import LevelResult
from trtllm_pipeline.orchestrate.results.report_file import CellStatus
from trtllm_pipeline.show.report.measured import Measured
from trtllm_pipeline.show.report.recommendation import Goals, at_best, cost, parse_least, parse_slo
from trtllm_pipeline.show.search.next_cell import Decision, Option, decide


def option(precision: str, batch: int, *, takes_s: float = 60.0, **axes: Any) -> Option:
    found = {"model": "m", "precision": precision, "tp": 1, "pp": 1, "max_batch_size": batch, **axes}
    return Option(
        CellId(f"{precision}/bs{batch}" + "".join(f"/{value}" for value in axes.values())), found, takes_s, False
    )


def measured(of: Option, tpot: float = 10.0, tps: float = 100.0, **more: Any) -> Measured:
    """One that was measured with 1 and with 8 requests in flight."""
    levels = tuple(
        LevelResult(
            concurrency=concurrency,
            requests=100,
            output_tokens_per_s=tps * concurrency,
            latencies={"tpot_ms": {"p50": tpot}, "ttft_ms": {"p50": 5 * tpot}, "e2e_ms": {"p50": 50 * tpot}},
        )
        for concurrency in (1, 8)
    )
    return Measured(of.id, of.axes, **{"status": CellStatus.DONE, "levels": levels, **more})


def failed(of: Option, failure: str) -> Measured:
    return Measured(of.id, of.axes, CellStatus.FAILED, failed_stage="build", failure=failure, reason="it broke")


def searched(surface: Surface, seed: int, budget: int) -> tuple[float, float]:
    """What the best cell of a search costs, and the best of the grid."""
    rows = {cell: Measured.of(row) for cell, row in surface.draw(seed).items()}
    goals = Goals(surface.objective, parse_slo(surface.slo) if surface.slo else ())  # type: ignore[arg-type]
    options = [Option(cell, row.axes, 60.0, built=False) for cell, row in rows.items()]
    tried: dict[CellId, Measured] = {}
    while len(tried) < budget:
        chosen = decide(options, tried, goals)
        if chosen.cell is None:
            break
        assert chosen.cell not in tried
        assert chosen.cell not in chosen.ruled_out
        tried[chosen.cell] = rows[chosen.cell]

    def best(of: Mapping[CellId, Measured]) -> float:
        found = [at_best(cell, (), goals.slos, goals.objective, None) for cell in of.values()]
        return min((cost(each, goals.objective) for each in found if each.reason is None), default=0.0)

    return best(tried), best(rows)


@pytest.mark.thorough
@pytest.mark.parametrize("surface", SURFACES, ids=lambda surface: surface.name)
def test_a_search_finds_a_good_cell_of_200_with_30(surface: Surface) -> None:
    found, best = searched(surface, seed=3, budget=30)
    assert abs(found / best - 1) <= 0.05


def test_a_surface_is_drawn_the_same_for_a_seed() -> None:
    assert all(len(surface.cells()) == 200 for surface in SURFACES)
    assert SURFACES[0].draw(1) == SURFACES[0].draw(1) != SURFACES[0].draw(2)


def test_it_starts_with_what_takes_least_time() -> None:
    options = [option("fp16", batch, takes_s=1.0 if batch == 16 else 1000.0) for batch in (1, 2, 4, 8, 16)]
    first = decide(options, {}, Goals("throughput"))
    assert first.cell == "fp16/bs16"
    assert first.why == "initial cell: center of the matrix; about 1 s"


def test_one_cell_is_measured_and_then_nothing_is_left() -> None:
    (only,) = [option("fp16", 1)]
    assert decide([only], {}, Goals("throughput")).cell == only.id
    assert decide([only], {only.id: measured(only)}, Goals("throughput")) == Decision(
        None, "every cell is measured or ruled out", {}
    )


def ruled_out(known: Measured, slo: str, batches: tuple[int, ...] = (2, 4, 8, 16)) -> dict[str, str]:
    options = [option("fp16", batch) for batch in batches] + [option("fp8", 2)]
    return dict(decide(options, {known.id: known}, Goals("throughput", parse_slo(slo))).ruled_out)


def test_a_batch_that_misses_an_objective_at_every_load_rules_out_larger_ones() -> None:
    four = option("fp16", 4)
    assert ruled_out(measured(four, tpot=20.0), "tpot_p50=15ms") == {
        f"fp16/bs{batch}": "fp16/bs4 misses tpot_p50 already with a smaller batch" for batch in (8, 16)
    }
    assert ruled_out(measured(four, tpot=15.5), "tpot_p50=15ms") == {}, "within noise of its limit"
    assert ruled_out(measured(four, tpot=14.0), "tpot_p50=15ms") == {}


def test_a_first_token_that_waited_for_a_free_slot_says_nothing_of_larger_batches() -> None:
    assert ruled_out(measured(option("fp16", 4), tpot=20.0), "ttft_p50=50ms") == {}
    assert set(ruled_out(measured(option("fp16", 8), tpot=20.0), "ttft_p50=50ms")) == {"fp16/bs16"}


def test_a_rate_that_is_not_reached_rules_out_smaller_batches() -> None:
    assert set(ruled_out(measured(option("fp16", 8), tps=10.0), "output_tps=1000")) == {"fp16/bs2", "fp16/bs4"}


def test_want_of_memory_rules_out_larger_batches_and_other_failures_nothing() -> None:
    assert set(ruled_out(failed(option("fp16", 8), "out_of_memory"), "tpot_p50=15ms")) == {"fp16/bs16"}
    assert ruled_out(failed(option("fp16", 8), "bug"), "tpot_p50=15ms") == {}


def scored(of: Option, score: float, **more: Any) -> Measured:
    return measured(
        of,
        accuracy={"exact": score},
        accuracy_total=1000,
        accuracy_intervals={"exact": (score - 0.02, score + 0.02)},
        **more,
    )


def test_the_best_cell_of_a_precision_is_compared_with_its_reference_once() -> None:
    options = [option(precision, batch) for precision in ("fp16", "int4") for batch in (1, 4, 8)]
    by_id = {each.id: each for each in options}
    best = scored(by_id[CellId("int4/bs4")], 0.5, tps=300.0)
    first = decide(options, {best.id: best}, Goals("throughput"))
    assert (first.cell, first.why) == ("fp16/bs4", "accuracy reference for int4/bs4, the best cell so far")
    reference = scored(by_id[CellId("fp16/bs4")], 0.51)
    equal = decide(options, {each.id: each for each in (best, reference)}, Goals("throughput"))
    assert equal.ruled_out == {}
    assert equal.why.startswith("initial cell")
    better = scored(by_id[CellId("fp16/bs4")], 0.9)
    worse = decide(options, {each.id: each for each in (best, better)}, Goals("throughput"))
    assert set(worse.ruled_out) == {"int4/bs1", "int4/bs8"}
    assert "significantly" in worse.ruled_out[CellId("int4/bs1")]


def test_a_least_accuracy_that_is_a_score_needs_no_reference() -> None:
    options = [option(precision, batch) for precision in ("fp16", "int4") for batch in (1, 4)]
    low = scored(options[2], 0.5)
    found = decide(options, {low.id: low}, Goals("throughput", (), parse_least("0.6")))
    assert set(found.ruled_out) == {"int4/bs4"}
    assert found.why.startswith("initial cell")


def test_it_says_what_it_expects() -> None:
    surface = SURFACES[0]
    rows = list(surface.draw(0).values())
    options = [Option(row.id, row.axes, 600.0, built=True) for row in rows]
    tried = {row.id: Measured.of(row) for row in rows[::9]}
    chosen = decide(options, tried, Goals("throughput", parse_slo(surface.slo)))
    words = r"expected \d+ to \d+ tok/s per GPU or host at concurrency \d+; best so far \d+; \d+% likely to meet the objectives"
    assert chosen.cell not in tried
    assert re.match(words, chosen.why), chosen.why
    assert chosen.why.endswith("; about 10 min, engine exists")


def test_a_metric_that_nothing_measured_stops_nothing() -> None:
    options = [option("fp16", batch) for batch in (1, 2, 4, 8, 16, 32)]
    tried = {each.id: measured(each) for each in options[:5]}
    assert decide(options, tried, Goals("throughput", parse_slo("itl_p99=5ms"))).cell == "fp16/bs32"


def test_what_counts_is_not_known_of_servers_without_engines() -> None:
    options = [option("bf16", batch, tp=tp) for batch in (1, 4, 16, 64, 256) for tp in (1, 2)]
    tried = {each.id: measured(each) for each in options[:5]}
    chosen = decide(options, tried, Goals("size"))
    assert (chosen.cell, chosen.why) == (None, "no measured cell has the goal metric: size")
    sized = {**tried, options[5].id: measured(options[5], engine_size_bytes=10**9)}
    assert "; best so far 1000;" in decide(options, sized, Goals("size")).why
