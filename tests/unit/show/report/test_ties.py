"""Recommendations under noise: equal cells are a tie, a true winner is found, and cells that do the same work are one."""

from __future__ import annotations

import csv
import io
import math
import random
import re
from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.fabricated_conditions import CONDITIONS
from trtllm_pipeline.base import text_blocks
from trtllm_pipeline.base.domain import CellId
from trtllm_pipeline.base.errors import UsageError
from trtllm_pipeline.base.terminal import console
from trtllm_pipeline.measure.load.result import LevelResult, RepeatResult, levels_of
from trtllm_pipeline.orchestrate.results.report_file import CellStatus
from trtllm_pipeline.show.report.measured import Measured, Side
from trtllm_pipeline.show.report.prices import parse_prices, with_price
from trtllm_pipeline.show.report.recommendation import (
    Goal,
    Goals,
    Recommended,
    advise,
    pareto_front,
    parse_least,
    parse_slo,
    recommend,
)
from trtllm_pipeline.show.report.writers import to_csv

DRAWS = 100


def level(
    draw: random.Random, tps: float, concurrency: int = 8, *, noise: float = 0.01, repeats: int = 3
) -> LevelResult:
    """A level whose repeats have log-normal noise."""

    def once() -> RepeatResult:
        rate, e2e = (value * math.exp(draw.gauss(0, noise)) for value in (tps, 1e3 * concurrency / tps))
        latencies: Any = {"e2e_ms": {"n": 100, "p50": e2e, "max": 2 * e2e}, "tpot_ms": {"n": 100, "p50": e2e / 10}}
        return RepeatResult(output_tokens_per_s=rate, requests_per_s=rate / 10, latencies=latencies)

    every = tuple(once() for _ in range(repeats))
    middle = sorted(every, key=lambda each: each.output_tokens_per_s or 0)[repeats // 2]
    return LevelResult(
        concurrency=concurrency, requests=100 * repeats, repeats=every, **middle.rates(), latencies=middle.latencies
    )


def cell(name: str, *levels: LevelResult, tp: int = 1, batch: int = 8, size: int = 1000, **more: Any) -> Measured:
    axes = {"model": "m", "precision": name.split("/")[0], "tp": tp, "pp": 1, "max_batch_size": batch}
    return Measured(CellId(name), axes, CellStatus.DONE, levels=levels, engine_size_bytes=size, **more)


def choice(*cells: Measured, goal: Goal = "throughput", slo: str = "", least: str | None = None) -> Recommended:
    slos = parse_slo(slo) if slo else ()
    return Recommended.of(recommend(Side("r", cells), slos, None if least is None else parse_least(least), goal))


@pytest.mark.parametrize("goal", ["throughput", "latency"])
def test_two_equal_cells_are_a_tie_in_95_of_100_draws(goal: Goal) -> None:
    ties = 0
    for seed in range(DRAWS):
        draw = random.Random(f"equal {seed}")
        found = choice(cell("fp8", level(draw, 100), size=500), cell("bf16", level(draw, 100)), goal=goal)
        ties += bool(found.tied)
        assert found.best is not None
        if found.tied:
            assert (found.best.cell, found.why) == ("fp8", "smaller engine")
    assert ties >= 95


@pytest.mark.parametrize(("noise", "repeats", "found"), [(0.01, 3, 85), (0.01, 5, 99), (0.02, 8, 95)])
def test_a_true_winner_by_5_percent_is_found(noise: float, repeats: int, found: int) -> None:
    wins = 0
    for seed in range(DRAWS):
        draw = random.Random(f"winner {seed}")
        cells = [
            cell(name, level(draw, tps, noise=noise, repeats=repeats)) for name, tps in (("fp8", 105), ("bf16", 100))
        ]
        picked = choice(*cells)
        wins += picked.best is not None and picked.best.cell == "fp8" and not picked.tied
        assert picked.best is not None
    assert wins >= found


def test_the_cheaper_of_the_tied_is_named() -> None:
    draw = random.Random(0)
    fewer = [cell("a", level(draw, 200), tp=2, size=1), cell("b", level(draw, 100), tp=1, size=9)]
    assert (choice(*fewer).why, choice(*fewer).best and choice(*fewer).best.cell) == ("fewer GPUs", "b")  # type: ignore[union-attr]
    built = [cell("a", level(draw, 100), seconds={"build": 60.0}), cell("b", level(draw, 100))]
    assert (choice(*built).why, [each.cell for each in choice(*built).tied]) == ("less to build", ["a"])
    alike = [cell("a", level(draw, 100)), cell("b", level(draw, 100))]
    assert choice(*alike).why is None


def test_without_an_interval_the_number_of_requests_is_given() -> None:
    draw = random.Random(1)
    once = [cell(name, level(draw, tps, repeats=1)) for name, tps in (("a", 100), ("b", 90))]
    found = choice(*once)
    assert (found.best and found.best.interval, found.tied) == (None, ())
    text = shown(*once)
    assert "measurements of 100 requests have no interval, so this may be noise" in text
    assert "may be noise" not in shown(once[0]), "nothing to choose from"
    by_requests = [
        replace(each, levels=(replace(each.levels[0], intervals={"output_tps": (80.0, 110.0)}),)) for each in once
    ]
    assert [each.cell for each in choice(*by_requests).tied] == ["b"]


def shown(*cells: Measured, slo: str = "", least: str | None = None, width: int = 160) -> str:
    advice = advise(Side("r", cells), (), Goals.parse("throughput", slo or None, least, None), ())
    stream = io.StringIO()
    console(stream, width=width).print(text_blocks.on_terminal(advice.blocks()))
    return stream.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_narrow_terminal_drops_the_last_columns_and_never_the_cells(width: int) -> None:
    draw = random.Random(3)
    cells = [
        cell(f"{name}/tp1pp1", level(draw, tps), size=10**9, accuracy={"exact": 0.9}, gpu_hour=2.5)
        for name, tps in (("int8_wo", 100), ("bf16", 130))
    ]
    lines = shown(*cells, width=width).splitlines()
    head = next(place for place, line in enumerate(lines) if "tok/s" in line and "level" in line)
    assert [line.split()[0] for line in lines[head : head + 3]] == ["cell", "bf16", "int8_wo"]
    assert max(map(len, lines)) <= width
    assert ("accuracy" in lines[head]) is not any(line.startswith("A wider terminal also shows") for line in lines)


def test_reasons_are_next_to_the_figures_or_below_them_if_the_terminal_is_narrow() -> None:
    draw = random.Random(1)
    cells = [cell(name, level(draw, tps, repeats=1)) for name, tps in (("a", 100), ("b", 90))]
    wide, narrow = (shown(*cells, slo="ttft_p50=1ms", width=width).splitlines() for width in (160, 70))
    (row,) = (line for line in wide if line.startswith("a "))
    reason = row[row.index("ttft") :]
    assert f"  a @8: {reason}" in narrow
    assert [line.split() for line in narrow if line.startswith("a ")] == [row[: row.index("ttft")].split()]


def test_batches_of_4_and_8_are_one_with_one_request_in_flight() -> None:
    draw = random.Random(2)
    small = cell("m/bs4", level(draw, 103, 1), batch=4)
    large = cell("m/bs8", level(draw, 97, 1), batch=8, size=1001)
    found = recommend(Side("r", (large, small)), (), None, "throughput")
    assert [(each.cell, each.same_work_as, each.tied) for each in found] == [
        ("m/bs4", None, False),
        ("m/bs8", "m/bs4", False),
    ]
    assert found[0].output_tps_per_device == found[1].output_tps_per_device == pytest.approx(100, rel=0.01)
    assert found[0].requests == 600
    assert "best of 1 that meet the objectives" in shown(large, small)
    assert "the same work as bs4, figures from both" in shown(large, small)
    queued = [replace(each, levels=(level(draw, tps, 8),)) for each, tps in ((small, 100), (large, 150))]
    assert [each.same_work_as for each in recommend(Side("r", tuple(queued)), (), None, "throughput")] == [None, None]


def test_the_nearest_is_named_with_all_that_it_misses() -> None:
    draw = random.Random(3)
    scored = {"accuracy_intervals": {"exact": (0.4, 0.5)}}
    near = cell("fp8", level(draw, 100, 8), accuracy={"exact": 0.5}, **scored)
    far = cell("bf16", level(draw, 20, 8), accuracy={"exact": 0.5}, **scored)
    missed = choice(near, far, slo="output_tps=200,e2e_p50=10ms")
    assert missed.best is None
    assert missed.nearest.cell == "fp8"
    words = str(missed.nearest.reason)
    assert "output_tps" in words
    assert "e2e_p50" in words
    assert missed.to_json()["nearest"] == {"cell": "fp8", "level": "8", "misses": words}
    assert "nearest: fp8 misses output_tps" in shown(near, far, slo="output_tps=200")
    inexact = choice(near, far, least="0.9")
    assert inexact.nearest.reason == "exact 0.500 < 0.9"


def test_a_p99_of_few_requests_is_held_against_a_limit_by_the_maximum() -> None:
    draw = random.Random(4)
    few = replace(level(draw, 100, repeats=1), requests=40)
    met, missed = (choice(cell("a", few), slo=f"e2e_p99={limit}ms") for limit in (400, 100))
    assert met.best is not None
    assert "the maximum: 40 requests, a p99 needs 100" in str(missed.nearest.reason)


def test_the_front_of_throughput_against_speed() -> None:
    def at(concurrency: int, tps: float, tpot_ms: float) -> LevelResult:
        latencies: Any = {"tpot_ms": {"n": 100, "p50": tpot_ms}}
        return LevelResult(concurrency=concurrency, output_tokens_per_s=tps, latencies=latencies)

    cells = [
        cell("a", at(1, 100, 10), at(8, 400, 20)),
        cell("b", at(1, 90, 11), at(8, 500, 16)),
        cell("two", at(8, 900, 16), tp=2),
        cell("failed", at(1, 9999, 1), failed_stage="accuracy"),
    ]
    failed = replace(cells[3], status=CellStatus.FAILED)
    assert pareto_front([*cells[:3], failed]) == [("b", "8"), ("a", "1")]


def test_prices_of_a_host_of_all_gpus_and_of_types() -> None:
    draw = random.Random(5)
    h100 = replace(CONDITIONS, system={**(CONDITIONS.system or {}), "gpus": ["NVIDIA H100 80GB HBM3"]})
    two = cell("m", level(draw, 1000, noise=0.0), tp=2, conditions=h100)
    by_type = parse_prices("L40S=1.10, h100=2.50")
    assert [with_price(two, each).gpu_hour for each in (parse_prices("3"), by_type, {"A100": 1.0})] == [3.0, 2.5, None]
    priced = with_price(two, by_type)
    assert priced.cost(two.levels[0]) == pytest.approx(2 * 2.5 / 3600 / 1000 * 1e6)
    assert with_price(priced, None).gpu_hour == 2.5
    assert re.search(r"\$/M tok.*\n.* 1\.39 ", shown(priced))
    assert priced.to_json()["perf"][0]["dollars_per_million"] == pytest.approx(1.3889, rel=1e-3)  # type: ignore[index,call-overload]
    for wrong in ("", "free", "-1", "H100=", "=2", "2,H100=3", "inf"):
        with pytest.raises(UsageError, match="--gpu-hour"):
            parse_prices(wrong)


def test_p99_of_few_requests_is_nowhere_in_a_report() -> None:
    few, many = (
        {"concurrency": 4, "requests": n, "ttft_ms": {"n": n, "p50": 5.0, "p99": p99}}
        for n, p99 in ((40, None), (100, 9.0))
    )
    old, kept = (levels_of([each])[0] for each in (few, many))
    assert (old.latency("ttft_ms", "p99"), kept.latency("ttft_ms", "p99")) == (None, 9.0)
    written = old.to_json()
    assert (written["ttft_ms"], written["no_p99"]) == (
        {"n": 40, "p50": 5.0, "p99": None},
        "40 requests, a p99 needs 100",
    )
    (line,) = csv.DictReader(io.StringIO(to_csv((cell("a", old),))))
    assert (line["ttft_p50_ms"], line["ttft_p99_ms"]) == ("5.0", ""), "the column stays"
