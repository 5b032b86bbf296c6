from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fabricated_conditions import CONDITIONS, QUESTIONS, other
from tests.helpers.fabricated_run import drift
from tests.unit.conftest import Pipeline
from tests.unit.measure.load.test_perf_metrics import Words, analyze, counted, request, write
from trtllm_pipeline.base.domain import CellId
from trtllm_pipeline.base.errors import UsageError
from trtllm_pipeline.measure.load.conditions import Conditions
from trtllm_pipeline.measure.load.result import LevelResult, RepeatResult
from trtllm_pipeline.orchestrate.results.report_file import CellResult, CellStatus, report_json
from trtllm_pipeline.show.report import compare_writers as writers
from trtllm_pipeline.show.report import gate, measured
from trtllm_pipeline.show.report.comparable_loads import Workload, shortened, words
from trtllm_pipeline.show.report.comparison import (
    ChangeVerdict,
    Comparison,
    Delta,
    Pair,
    accuracy_delta,
    compare,
    compare_by,
)
from trtllm_pipeline.show.report.gate import Criteria, Judgement, breaks, parse
from trtllm_pipeline.show.report.measured import Measured, Side, load_measured, together
from trtllm_pipeline.show.report.recommendation import parse_least, parse_slo, recommend


def test_a_metric_is_found_by_its_whole_name() -> None:
    names = ("accuracy.exact_match", "accuracy.exact", "ttft_p99")
    pair = Pair("c", "b", None, tuple(Delta(name, 1.0, 1.0, 0.0, None, None, ChangeVerdict.NOISE) for name in names))
    found = {name: each.metric for name in ("accuracy", "accuracy.exact", "ttft_p99") if (each := pair.delta(name))}
    assert found == {"accuracy": names[0], "accuracy.exact": names[1], "ttft_p99": names[2]}
    assert pair.delta("ttft") is None


def level(
    concurrency: int = 1, *, ttft: float = 100.0, tps: float = 50.0, repeats: int = 3, spread: float = 0.01
) -> LevelResult:
    """A level with figures around those given, each repeat off by multiples of `spread`."""

    def figures(factor: float) -> dict[str, Any]:
        latencies: Any = {
            name: {"n": 400, "p50": ttft * factor, "p99": 2 * ttft * factor} for name in ("ttft_ms", "e2e_ms")
        }
        rates = {"output_tokens_per_s": tps / factor, "input_tokens_per_s": tps, "requests_per_s": tps / factor / 10}
        latencies["tpot_ms"] = {"n": 400, "p50": 1e3 / tps * factor, "p99": 2e3 / tps * factor}
        return {**rates, "latencies": latencies}

    return LevelResult(
        concurrency=concurrency,
        requests=400,
        failures=0,
        duration_s=40.0,
        window="steady",
        repeats=tuple(RepeatResult(**figures(1 + spread * (index - repeats // 2))) for index in range(repeats)),
        **figures(1.0),
    )


def cell(precision: str, *levels: LevelResult, **changes: Any) -> Measured:
    axes = {"model": "m", "toolchain": "embedded", "precision": precision, "tp": 1, "pp": 1, "max_batch_size": 4}
    made = Measured(
        CellId(f"m/{precision}/bs4"),
        axes,
        CellStatus.DONE,
        levels=levels,
        accuracy={"exact": 0.5},
        accuracy_intervals={"exact": (0.45, 0.55)},
        seconds={"convert": 12.0, "build": 8.0},
        engine_size_bytes=1000,
        conditions=CONDITIONS,
    )
    return dataclasses.replace(made, **changes)


def run_of(*cells: Measured) -> Side:
    return Side("r", cells)


NIGHTS = (CONDITIONS, dataclasses.replace(other("system", kernel="Linux 6.8.1", commit="ba9876543210"), measured_s=2e9))
"""Two nights on one machine, with an update of the kernel and of the pipeline between them."""


def found(comparison: Comparison, metric: str, at: str | None = "1") -> Any:
    delta = next(pair.delta(metric) for pair in comparison.pairs if pair.level == at)
    assert delta is not None
    return delta


def test_differences_beyond_and_within_noise() -> None:
    base = Side("before", (cell("fp16", level()),))
    new = Side(
        "after",
        (
            cell(
                "fp16",
                level(ttft=110.0, tps=50.5),
                accuracy={"exact": 0.3},
                seconds={"build": 9.0},
                engine_size_bytes=900,
            ),
        ),
    )
    result = compare(new, base)
    ttft = found(result, "ttft_p50")
    assert (ttft.base, ttft.new, ttft.change) == (100.0, 110.0, pytest.approx(0.1))
    assert (ttft.verdict, ttft.method) == (ChangeVerdict.WORSE, "repeats")
    low, high = ttft.interval
    assert 0.05 < low < 0.1 < high < 0.15
    assert found(result, "output_tps").verdict is ChangeVerdict.NOISE
    assert found(result, "accuracy.exact", None).verdict is ChangeVerdict.WORSE
    assert found(result, "accuracy.exact", None).method == "questions"
    assert found(result, "build_s", None).verdict is ChangeVerdict.UNKNOWN
    size = found(result, "engine_bytes", None)
    assert (size.verdict, size.method) == (ChangeVerdict.BETTER, "exact")
    assert found(compare(base, new), "ttft_p50").verdict is ChangeVerdict.BETTER


def test_one_repeat_and_no_events_is_no_verdict() -> None:
    result = compare(
        Side("a", (cell("fp16", level(ttft=300.0, repeats=1)),)), Side("b", (cell("fp16", level(repeats=1)),))
    )
    assert found(result, "ttft_p50").verdict is ChangeVerdict.UNKNOWN
    assert found(result, "ttft_p50").change == pytest.approx(2.0)


def test_repeats_measured_in_turn_are_paired() -> None:
    def at(figures: LevelResult, times: list[float]) -> LevelResult:
        repeats = [
            dataclasses.replace(repeat, started_s=time) for repeat, time in zip(figures.repeats, times, strict=True)
        ]
        return dataclasses.replace(figures, repeats=tuple(repeats))

    base = Side("b", (cell("fp16", at(level(spread=0.2), [1, 3, 5])),))
    new = Side("a", (cell("fp16", at(level(ttft=105.0, spread=0.2), [2, 4, 6])),))
    assert found(compare(new, base), "ttft_p50").method == "paired_repeats"
    assert found(compare(new, base), "ttft_p50").verdict is ChangeVerdict.WORSE, "though each series varies by a fifth"
    later = Side("a", (cell("fp16", at(level(ttft=105.0, spread=0.2), [6, 7, 8])),))
    assert found(compare(later, base), "ttft_p50").verdict is ChangeVerdict.NOISE


def test_cells_are_matched_by_the_axes_both_have() -> None:
    base = Side("b", (cell("fp16", level()), cell("int8_wo", level()), cell("fp32", level())))
    wider = cell("fp16", level())
    wider = dataclasses.replace(wider, id=CellId("m/fp16/bs4/delay=5"), axes={**wider.axes, "delay": "5"})
    result = compare(Side("a", (wider, cell("int8_wo", level()), cell("int4_wo", level()))), base)
    assert {(pair.cell, pair.base) for pair in result.pairs} == {
        ("m/fp16/bs4/delay=5", "m/fp16/bs4"),
        ("m/int8_wo/bs4", "m/int8_wo/bs4"),
    }
    assert result.only_new == [("m/int4_wo/bs4", "the baseline has no cell with the same axes")]
    assert [name for name, _ in result.only_base] == ["m/fp32/bs4"]


def test_precisions_of_one_run_and_payback() -> None:
    run = run_of(cell("fp16", level(tps=50)), cell("int8_wo", level(tps=100)), cell("int4_wo", level(tps=40)))
    result = compare_by(run, "precision", "fp16")
    assert [(pair.cell, pair.base) for pair in result.pairs if pair.level] == [
        ("m/int8_wo/bs4", "m/fp16/bs4"),
        ("m/int4_wo/bs4", "m/fp16/bs4"),
    ]
    faster, slower = result.paybacks
    # 20 s, and a token takes 10 ms instead of 20 ms.
    assert (faster.tokens, faster.saved_s_per_token) == (pytest.approx(2000), pytest.approx(0.01))
    assert faster.load_s == pytest.approx(20)
    assert "pay off after 2,000 output tokens, 20 s at that load (10 ms saved per token)" in writers.to_markdown(
        Judgement(result, None)
    )
    assert (slower.tokens, slower.load_s) == (None, None)
    doubtful = dataclasses.replace(result, paybacks=[dataclasses.replace(slower, verdict=ChangeVerdict.NOISE)])
    assert "never pay off, because tokens take at least as long as with the baseline" in writers.to_markdown(
        Judgement(result, None)
    )
    assert "as with the baseline; the difference is within noise" in writers.to_markdown(Judgement(doubtful, None))
    assert compare(run, Side("earlier", (cell("fp16", level(tps=40)),))).paybacks == [], "the same configuration"
    with pytest.raises(UsageError, match="no cell has precision fp8"):
        compare_by(run, "precision", "fp8")
    with pytest.raises(UsageError, match="unknown axis 'speed'"):
        compare_by(run, "speed", None)


def test_the_default_base_is_the_first_toolchain_that_needs_no_build() -> None:
    def lane(toolchain: str, tps: float, *, build: bool, **changes: Any) -> Measured:
        made = cell("bf16", level(tps=tps), **changes)
        seconds = made.seconds if build else {}
        name = CellId(f"m/bf16/bs4/{toolchain}")
        return dataclasses.replace(made, id=name, axes={**made.axes, "toolchain": toolchain}, seconds=seconds)

    engine, vllm = lane("tensorrt_llm", 100, build=True), lane("vllm", 50, build=False)
    failed = dataclasses.replace(lane("sglang", 1, build=False), levels=())
    result = compare_by(run_of(engine, failed, vllm), "toolchain", None)
    assert result.base == "r, toolchain vllm"
    (payback,) = result.paybacks
    assert (payback.cell, payback.base, payback.tokens) == (engine.id, vllm.id, pytest.approx(2000))
    built = compare_by(run_of(engine, lane("embedded", 50, build=True)), "toolchain", None)
    assert built.base == "r, toolchain tensorrt_llm", "otherwise the first"
    unbuilt = compare_by(run_of(lane("sglang", 50, build=False), vllm), "toolchain", None)
    assert unbuilt.base == "r, toolchain sglang"


def test_cells_without_expert_parallelism_have_one_group_of_it() -> None:
    plain = cell("fp16", level())
    dealt = dataclasses.replace(plain, id=CellId("m/fp16/tp4pp1ep4/bs4"), axes={**plain.axes, "ep": 4})
    for first in (None, "1"):
        result = compare_by(run_of(plain, dealt), "ep", first)
        assert {(pair.cell, pair.base) for pair in result.pairs} == {(dealt.id, plain.id)}
    with pytest.raises(UsageError, match="no cell has ep 2") as raised:
        compare_by(run_of(plain, dealt), "ep", "2")
    assert raised.value.hint == "values: 1, 4"
    with pytest.raises(UsageError, match="unknown axis 'ep'"):
        compare_by(run_of(plain), "ep", None)


def test_a_load_run_against_any_server_is_the_base_of_all() -> None:
    other = dataclasses.replace(cell("?", level(tps=40)), axes={}, accuracy={})
    result = compare(Side("a", (cell("fp16", level()), cell("int8_wo", level()))), Side("vllm", (other,)))
    assert len([pair for pair in result.pairs if pair.level]) == 2
    assert found(result, "output_tps").verdict is ChangeVerdict.BETTER
    assert found(result, "accuracy.exact", None).verdict is ChangeVerdict.MISSING


def test_one_measurement_twice_is_said_to_be_the_same(tmp_path: Path) -> None:
    same = cell("fp16", level(), perf=tmp_path)
    assert found(compare(Side("a", (same,)), Side("b", (same,))), "ttft_p50").method == "same"


def test_a_report_that_was_kept_is_recognised_as_the_same_measurement() -> None:
    measured = cell("fp16", level())
    later = dataclasses.replace(CONDITIONS, measured_s=(CONDITIONS.measured_s or 0) + 86400)
    for other_cell, method in ((measured, "same"), (cell("fp16", level(), conditions=later), "repeats")):
        kept = Side("kept", (Measured.of(other_cell, why=""),))
        assert found(compare(Side("a", (measured,)), kept), "ttft_p50").method == method
    unknown = cell("fp16", level(), conditions=Conditions())
    assert compare(Side("a", (unknown,)), Side("b", (unknown,))).refused


# Under the same conditions


@pytest.mark.parametrize(
    ("conditions", "allow", "words"),
    [
        (other("system", cpu="Intel Xeon"), "system", "CPU: AMD EPYC 9654 in the baseline, Intel Xeon here"),
        (other("system", gpus=["A100, 80 GiB"]), "gpus", "GPUs: NVIDIA H200, 140 GiB in the baseline, A100, 80 GiB here"),
        (other("system", driver="580.1"), "system", "driver: 570.86.15 in the baseline, 580.1 here"),
        (other("system", memory_gib=64), "system", "memory: 128 GiB in the baseline, 64 GiB here"),
        (other("system", tensorrt_llm="1.1.0"), "tensorrt_llm", "TensorRT-LLM: 1.0.0 in the baseline, 1.1.0 here"),
        (other("system", server=None), "system", "server: triton 2.61.0 in the baseline, - here"),
        (other("workload", prompts_digest="sha256:ff00"), "workload", "prompts' digest: abababababab in the baseline, ff00 here"),
        (other("workload", max_tokens=[16, 128]), "max_tokens", "max_tokens: 64 in the baseline, 16 to 128 here"),
        (other("workload", protocol="http"), "protocol", "protocol: grpc in the baseline, http here"),
        (
            other("workload", sampling={"temperature": 0.7}),
            "workload",
            "sampling: temperature 0 in the baseline, temperature 0.7 here",
        ),
        (
            other("workload", levels=[{**CONDITIONS.level(1, None), "requests": 400}]),
            "requests",
            "requests at concurrency 1: 40 in the baseline, 400 here",
        ),
        (
            other("workload", levels=[{**CONDITIONS.level(1, None), "warmup_requests": 0}]),
            "workload",
            "warmup requests at concurrency 1: 2 in the baseline, 0 here",
        ),
        (
            dataclasses.replace(CONDITIONS, questions={**QUESTIONS, "max_tokens": 8}),
            "workload",
            "max_tokens of the questions: 32 in the baseline, 8 here",
        ),
        (dataclasses.replace(CONDITIONS, system=None), "system", "the system: recorded in the baseline, not recorded here"),
        (dataclasses.replace(CONDITIONS, questions=None), "questions", "the questions: recorded in the baseline, not "),
    ],
)  # fmt: skip
def test_what_was_measured_otherwise_is_refused_by_name(conditions: Conditions, allow: str, words: str) -> None:
    base, new = Side("b", (cell("fp16", level()),)), Side("a", (cell("fp16", level(tps=90), conditions=conditions),))
    result = compare(new, base)
    assert (result.pairs, result.paybacks) == ([], [])
    ((name, _, (why, *_)),) = result.refused
    assert name == "m/fp16/bs4"
    assert str(why).startswith(words)
    conditions_ = parse("output_tps:-5%,accuracy:-1%")
    assert breaks(result, conditions_) == (), "neither broken nor holding"
    data = Judgement(result, ()).to_json()
    assert (data["gate"]["holds"], len(data["refused"])) == (False, 1)
    assert words in " ".join(writers.to_markdown(Judgement(result, ())).split())
    allowed = compare(new, base, allow={allow})
    assert (allowed.refused, len(allowed.pairs)) == ([], 2)
    assert words in " ".join(writers.to_markdown(Judgement(allowed, None)).split()), "allowed, and said"


def test_two_nights_on_one_machine_are_compared_and_what_changed_is_told() -> None:
    new, base = (Side("n", (cell("fp16", level(), conditions=night),)) for night in reversed(NIGHTS))
    result = compare(new, base)
    assert (result.refused, len(result.pairs)) == ([], 2)
    assert [str(each) for _, each in result.caveats] == [
        "kernel: Linux 6.8.0 in the baseline, Linux 6.8.1 here",
        "commit: 0123456789ab in the baseline, ba9876543210 here",
    ]


@pytest.mark.parametrize(
    ("after", "words"),
    [(128.0, None), (122.0, None), (121.0, "128 in the baseline, 121 here"), (6.96, "128 in the baseline, 6.96 here")],
)
def test_shorter_outputs_are_not_faster_without_a_word(after: float, words: str | None) -> None:
    base, new = (
        Side("s", (cell("fp16", dataclasses.replace(level(), lengths={"output_tokens_per_request": {"mean": mean}})),))
        for mean in (128.0, after)
    )
    result = compare(new, base)
    assert (result.refused, len(result.pairs)) == ([], 2)
    shown = " ".join(writers.to_markdown(Judgement(result, None)).split())
    note = "shorter outputs have a lower e2e and more requests/s (m/fp16/bs4): mean output tokens at concurrency 1: "
    assert (f"{note}{words}" in shown) is (words is not None)
    assert ("shorter outputs" in shown) is (words is not None)
    (data,) = Judgement(result, None).to_json()["differences"] or [{"field": None}]
    assert data["field"] == (words and "output_tokens_per_request")


def test_what_a_comparison_is_about_may_differ() -> None:
    axes = cell("fp16").axes
    served = [
        cell("fp16", level(), axes={**axes, "toolchain": name}, conditions=other("system", server=f"server of {name}"))
        for name in ("tensorrt_llm", "tensorrt_llm_pytorch")
    ]
    assert len(compare_by(run_of(*served), "toolchain", None).pairs) == 2
    for name in ("perf.max_tokens", "osl"):
        long = [
            cell("fp16", level(), axes={**axes, name: str(n)}, conditions=other("workload", max_tokens=[n, n]))
            for n in (16, 64)
        ]
        assert len(compare_by(run_of(*long), name, "16").pairs) == 2
    moved = dataclasses.replace(cell("int8_wo", level()), conditions=other("system", cpu="Intel Xeon"))
    result = compare_by(run_of(cell("fp16", level()), moved), "precision", "fp16")
    assert (len(result.pairs), len(result.refused)) == (0, 1), "measured on another machine last week"


HERE = {"cpu": "AMD EPYC", "gpus": ["H100, 80 GiB"], "xllamacpp": "0.2.4"}


def made(on: dict[str, Any] | None, **changes: Any) -> Side:
    """A side that nobody measured under load, made on a machine."""
    systems = {} if on is None else {"preparation": on, "accuracy": on}
    conditions = Conditions(made_on=systems, questions=QUESTIONS)
    return Side(str(on), (cell("fp16", conditions=conditions, **changes),))


@pytest.mark.parametrize(
    ("new", "base", "why"),
    [
        (HERE | {"cpu": "Intel Xeon"}, HERE, ["CPU: AMD EPYC in the baseline, Intel Xeon here"]),
        (HERE | {"gpus": []}, HERE, ["GPUs: H100, 80 GiB in the baseline, none here"]),
        (None, HERE, ["the system: recorded in the baseline, not recorded here"]),
        (None, None, ["the system: not recorded on either side"]),
        (HERE | {"kernel": "6.8"}, HERE, []),
    ],
)
def test_builds_and_scores_of_different_machines_are_refused_without_a_load_run(
    new: dict[str, Any] | None, base: dict[str, Any] | None, why: list[str]
) -> None:
    sides = made(new, seconds={"build": 80.0}), made(base)
    result = compare(*sides, ["build_s", "accuracy"])
    assert [str(each) for _, _, whys in result.refused for each in whys] == why
    result = compare(*sides, ["build_s", "accuracy"], allow={"system"})
    assert (found(result, "build_s", None).new, result.refused) == (80, [])


def test_a_cell_with_a_load_run_and_one_without_are_of_one_system_if_both_say_so() -> None:
    loaded = Side("l", (cell("fp16", level()),))
    here = dict(CONDITIONS.system or {}) | {"server": None, "server_on": None}
    assert compare(made(here), loaded, ["build_s"]).refused == []
    ((_, _, (why,)),) = compare(made(here | {"cpu": "Intel Xeon"}), loaded, ["build_s"]).refused
    assert why.field.name == "cpu"


def test_of_a_server_elsewhere_nothing_is_known() -> None:
    far = other("system", server_on="another machine")
    at = (dataclasses.replace(far, measured_s=second) for second in (1e9, 2e9))
    sides = [Side(str(each.measured_s), (cell("fp16", level(), conditions=each),)) for each in at]
    ((_, _, (why,)),) = compare(*sides).refused
    assert "unknown system" in str(why)
    assert compare(*sides, allow={"server_on"}).refused == []


def test_one_measurement_is_compared_with_itself_whatever_was_recorded(tmp_path: Path) -> None:
    old = cell("fp16", level(), perf=tmp_path, answers=tmp_path, conditions=Conditions())
    assert compare(Side("a", (old,)), Side("b", (old,))).refused == []


# The gate

GATE = "ttft_p99:+10%,output_tps:-5%,accuracy:-1%"


def judged(new: Measured, base: Measured, text: str = GATE, *, beyond_noise: bool = False) -> Judgement:
    criteria = Criteria.parse(None, text)
    return gate.judge(Side("a", (new,)), Side("b", (base,)), criteria, beyond_noise=beyond_noise)


def judge(new: Measured, base: Measured, text: str = GATE, *, beyond_noise: bool = False) -> list[tuple[str, str]]:
    broken = judged(new, base, text, beyond_noise=beyond_noise).broken
    return [(each.condition.metric, each.reason) for each in broken or ()]


def test_the_gate_holds_up_to_its_limits() -> None:
    base = cell("fp16", level())
    assert judge(base, base) == []
    assert judge(cell("fp16", level(ttft=109, tps=48), accuracy={"exact": 0.496}), base) == []
    broken = judge(cell("fp16", level(ttft=112, tps=47), accuracy={"exact": 0.49}), base)
    assert [metric for metric, _ in broken] == ["ttft_p99", "output_tps", "accuracy"]
    assert broken[0][1] == "beyond the limit and beyond noise"
    assert broken[2][1] == "beyond the limit, but within noise: --beyond-noise accepts it"
    assert judge(cell("fp16", level(ttft=50, tps=90), accuracy={"exact": 0.9}), base) == [], "better is no break"


def test_noise_passes_only_when_asked_for() -> None:
    base, new = cell("fp16", level(spread=0.3)), cell("fp16", level(ttft=120, spread=0.3))
    assert [metric for metric, _ in judge(new, base, "ttft_p99:+10%")] == ["ttft_p99"]
    assert judge(new, base, "ttft_p99:+10%", beyond_noise=True) == []
    passed = judged(new, base, "ttft_p99:+10%", beyond_noise=True)
    assert passed.verdict == "gate: passed, with 1 change beyond the limit, but within noise (--beyond-noise)"
    assert (passed.exit_code, passed.to_json()["gate"]["excused"][0]["metric"]) == (0, "ttft_p99")  # type: ignore[index,call-overload]
    assert "+20.0%" in writers.to_markdown(passed)
    assert judged(base, base, "ttft_p99:+10%", beyond_noise=True).verdict == "gate: passed"
    once = [cell("fp16", level(ttft=ttft, repeats=1)) for ttft in (120, 100)]
    assert judge(once[0], once[1], "ttft_p99:+10%", beyond_noise=True), "what has no interval is no noise"


@pytest.mark.parametrize(
    ("new", "base", "reason"),
    [
        (cell("fp16", why="perf failed"), cell("fp16", level()), "only the baseline has this level (perf failed)"),
        (cell("fp16", level(4)), cell("fp16", level(1), level(4)), "only the baseline has this level"),
        (cell("int8_wo", level()), cell("fp16", level()), "the new side has no such cell"),
        (cell("fp16"), cell("fp16"), "neither side has this metric"),
        (
            cell("fp16", level()),
            cell("fp16", why="failed"),
            "missing: the baseline m/fp16/bs4: failed",
        ),
    ],
)
def test_what_is_missing_breaks_the_gate(new: Measured, base: Measured, reason: str) -> None:
    (broken,) = judge(new, base, "ttft_p99:+10%")
    assert reason in broken[1]


def test_what_can_never_work_and_what_is_new_do_not_break_the_gate() -> None:
    never = cell("fp8", status=CellStatus.INFEASIBLE, reason="precision fp8: not here")
    conditions = parse("ttft_p99:+10%,accuracy:-1%")
    new = Side("a", (cell("fp16", level()), never, cell("int8_wo", level())))
    result = compare(new, Side("b", (cell("fp16", level()), never)))
    assert breaks(result, conditions) == ()
    assert [name for name, _ in result.only_new] == ["m/int8_wo/bs4"]
    worked = compare(Side("a", (never,)), Side("b", (dataclasses.replace(cell("fp8", level())),)))
    assert [each.reason for each in breaks(worked, conditions[:1])] == ["missing: precision fp8: not here"]


def test_missing_accuracy_breaks_the_gate() -> None:
    base, without = cell("fp16", level()), cell("fp16", level(), accuracy={})
    assert judge(without, base, "accuracy:-1%") == [("accuracy", "missing: the new side has no value")]
    assert judge(base, without, "accuracy:-1%") == [("accuracy", "missing: the base has no value")]
    assert judge(without, without, "accuracy:-1%") == [("accuracy", "missing: neither side has this metric")]
    zero = cell("fp16", level(), accuracy={"exact": 0.0})
    assert judge(base, zero, "accuracy:-1%") == [("accuracy", "missing: base is 0, so there is no relative change")]


def test_limits_of_scores_in_points() -> None:
    base = cell("fp16", level(), accuracy={"exact": 0.5})
    assert judge(cell("fp16", level(), accuracy={"exact": 0.49}), base, "accuracy:-1pt") == []
    worse = judged(cell("fp16", level(), accuracy={"exact": 0.47}), base, "accuracy.exact:-1.5pts")
    assert (str(worse.broken[0].condition), worse.broken[0].to_json()["unit"]) == ("accuracy.exact:-1.5pt", "points")
    assert "| -3.0pt |" in writers.to_markdown(worse)
    from_nothing = cell("fp16", level(), accuracy={"exact": 0.0})
    assert judge(base, from_nothing, "accuracy:+1pt") == [("accuracy", "beyond the limit, noise unknown")]
    with pytest.raises(UsageError, match="output_tps is not a score, so its limit is in percent"):
        parse("output_tps:-1pt")
    run = run_of(base, cell("int8_wo", level(), accuracy={"exact": 0.485}))
    assert recommend(run, (), parse_least("-2pt"), "size")[1].reason is None
    assert recommend(run, (), parse_least("exact:-1pt"), "size")[1].reason == (
        "exact 0.485 is 1.5 points below the 0.500 of fp16, 1 allowed (within noise: use more questions)"
    )


NOTHING_MEANT = {
    parse: ("", "ttft_p99", "ttft_p99:10%", "ttft_p99:+10", "speed:+1%", "ttft_p98:+1%", "a,,b"),
    parse_slo: ("ttft_p99", "ttft_p99=x", "output_tps=3ms", "accuracy=1", "ttft_p99=0ms"),
    parse_least: ("-1", "1%", "x", "contains:"),
}


@pytest.mark.parametrize(("read", "text"), [(read, text) for read, texts in NOTHING_MEANT.items() for text in texts])
def test_conditions_objectives_and_accuracies_that_mean_nothing(read: Callable[[str], Any], text: str) -> None:
    with pytest.raises(UsageError):
        read(text)


# What is printed


def test_every_format_says_what_broke() -> None:
    conditions = parse(GATE)
    base = Side("b", (cell("fp16", level(1), level(4)), cell("int8_wo", level())))
    new = Side("a", (cell("fp16", level(1, ttft=130)), cell("int8_wo", level())))
    result = compare(new, base)
    broken = breaks(result, conditions)
    data = json.loads(json.dumps(Judgement(result, broken).to_json()))
    assert data["pairs"][1]["metrics"]["ttft_p50"]["verdict"] == "worse"
    assert data["lost"] == [{"cell": "m/fp16/bs4", "level": "4", "reason": "this level was not measured"}]
    assert not data["gate"]["holds"]
    assert {each["reason"].split(":")[0] for each in data["gate"]["broken"]} == {
        "beyond the limit and beyond noise",
        "missing",
    }
    markdown = writers.to_markdown(Judgement(result, broken))
    assert "**Gate: 3 conditions broken**" in markdown
    assert "| `fp16 @1` | +30.0% ✘ |" in markdown
    assert "TTFT p50: 100 → 130 ms, +30.0% (" in markdown
    assert "only in the baseline" in markdown
    lines = list(csv.DictReader(io.StringIO(writers.to_csv(Judgement(result, ())))))
    (line,) = [each for each in lines if (each["cell"], each["metric"]) == ("m/fp16/bs4", "ttft_p50")]
    assert (line["base"], line["new"], line["unit"], line["verdict"]) == ("100.0", "130.0", "ms", "worse")
    assert "**Gate: passed**" in writers.to_markdown(Judgement(result, ()))


# Recommending


def test_the_cheapest_that_holds() -> None:
    run = run_of(
        cell("fp16", level(1, tps=50, ttft=20), level(8, tps=200, ttft=400)),
        cell("int8_wo", level(1, tps=70, ttft=15), level(8, tps=300, ttft=90), accuracy={"exact": 0.498}),
        cell("int4_wo", level(8, tps=900, ttft=10), accuracy={"exact": 0.2}),
        cell("fp8", why="precision fp8: not here"),
        cell("bf16", level(1, tps=40, ttft=500)),
    )
    slos, least = parse_slo("ttft_p99=0.2s,output_tps=30"), parse_least("-1%")
    best, second, *others = recommend(run, slos, least, "throughput")
    assert (best.cell, best.level, best.reason) == ("m/int8_wo/bs4", "8", None)
    assert (second.cell, second.level) == ("m/fp16/bs4", "1"), "at concurrency 8 it is too slow"
    assert {each.cell.split("/")[1]: each.reason for each in others} == {
        "int4_wo": "exact 0.200 is 60.0% below the 0.500 of fp16, 1.0% allowed",
        "fp8": "precision fp8: not here",
        "bf16": "ttft_p99 1000 ms > 200 ms at concurrency 1",
    }
    assert recommend(run, slos, least, "latency")[0].level == "1"
    assert recommend(run, parse_slo("output_tps=5000"), None, "size")[0].reason == (
        "output_tps 200/s < 5000/s at concurrency 8, its best of 2 levels"
    )
    assert {each.reason for each in recommend(run, (), parse_least("0.6"), "size")} == {
        *("exact 0.500 < 0.6", "exact 0.498 < 0.6", "exact 0.200 < 0.6", "precision fp8: not here")
    }
    alone = recommend(run_of(run.cells[1]), (), least, "size")
    assert [each.reason for each in alone] == ["exact cannot be compared: no matching unquantized cell"]
    gpus = dataclasses.replace(cell("fp32", level(8, tps=500)), axes={**cell("fp32").axes, "tp": 4})
    shared = recommend(run_of(gpus, cell("fp16", level(8, tps=200))), (), None, "throughput")
    assert shared[0].cell == "m/fp16/bs4", "500 tokens/s of four GPUs are 125 for each"


def test_what_is_clearly_less_accurate_is_not_taken_unasked() -> None:
    run = run_of(
        cell("fp16", level(8, tps=200)),
        cell("int8_wo", level(8, tps=300), accuracy={"exact": 0.49}),
        cell("int4_wo", level(8, tps=900), accuracy={"exact": 0.2}, accuracy_intervals={"exact": (0.15, 0.25)}),
    )
    best, second, last = recommend(run, (), None, "throughput")
    assert [best.cell, second.cell] == ["m/int8_wo/bs4", "m/fp16/bs4"]
    assert last.reason == "exact 0.200 is significantly (95%) below the 0.500 of fp16; --min-accuracy -100% accepts it"
    unmeasured = run_of(*run.cells, cell("fp8", level(8, tps=1), accuracy={}))
    anything = recommend(unmeasured, (), parse_least("-100%"), "throughput")
    assert anything[0].cell == "m/int4_wo/bs4"
    assert all(each.reason is None for each in anything)


def test_a_paired_interval_that_the_report_noted_is_used() -> None:
    noticed = drift("m/fp16/bs4", 0.5, 0.46)
    base, other = cell("fp16", level(8)), cell("int8_wo", level(8), accuracy={"exact": 0.46})
    noted = dataclasses.replace(other, accuracy_drift=noticed)
    assert accuracy_delta("accuracy.exact", "exact", other, base).verdict is ChangeVerdict.NOISE, "by the two intervals"
    assert accuracy_delta("accuracy.exact", "exact", noted, base).verdict is ChangeVerdict.WORSE
    elsewhere = dataclasses.replace(noted, accuracy_drift=dataclasses.replace(noticed, reference="m/bf16/bs4"))
    assert accuracy_delta("accuracy.exact", "exact", elsewhere, base).verdict is ChangeVerdict.NOISE


def lengths(isl: int, osl: int, each: Measured) -> Measured:
    id_ = CellId(f"{each.id}/isl{isl}-osl{osl}")
    return dataclasses.replace(each, id=id_, axes={**each.axes, "isl": isl, "osl": osl})


def test_what_was_asked_otherwise_is_not_compared() -> None:
    """Short answers are made faster than long ones, and are no bargain for who needs long ones."""
    run = run_of(
        lengths(128, 16, cell("fp16", level(4, tps=900))),
        lengths(256, 32, cell("fp16", level(4, tps=100))),
        lengths(128, 16, cell("int8_wo", level(4, tps=950))),
        lengths(256, 32, cell("int8_wo", level(4, tps=90))),
    )
    found = [(dict(each.workload), each.cell.split("/")[1]) for each in recommend(run, (), None, "throughput")]
    short, long = {"isl": 128, "osl": 16}, {"isl": 256, "osl": 32}
    assert found == [(short, "int8_wo"), (short, "fp16"), (long, "fp16"), (long, "int8_wo")]


def test_what_was_measured_elsewhere_or_asked_otherwise_is_not_chosen_from() -> None:
    """The cell of last week is from a faster machine; another had fewer tokens to make: neither is the better one."""
    fast, short = other("system", cpu="Intel Xeon"), other("workload", max_tokens=[8, 8])
    run = run_of(
        cell("fp16", level(4, tps=100)),
        cell("int8_wo", level(4, tps=900), conditions=fast),
        cell("int4_wo", level(4, tps=800), conditions=short),
        cell("fp8", why="not run", conditions=Conditions()),
    )
    found = {each.cell.split("/")[1]: each for each in recommend(run, (), None, "throughput")}
    assert [dict(found[name].workload) for name in ("fp16", "int8_wo", "int4_wo")] == [
        {"cpu": "AMD EPYC 9654", "max_tokens": "64"},
        {"cpu": "Intel Xeon", "max_tokens": "64"},
        {"cpu": "AMD EPYC 9654", "max_tokens": "8"},
    ]
    assert found["fp8"].workload == found["fp16"].workload, "what was never measured is no group of its own"
    assert words(found["int8_wo"].workload) == "CPU Intel Xeon, max_tokens 64"
    allowed = recommend(run, (), None, "throughput", allow={"system"})
    assert [each.cell.split("/")[1] for each in allowed] == ["int8_wo", "fp16", "fp8", "int4_wo"]
    assert {each.workload for each in recommend(run, (), None, "size", allow={"system", "workload"})} == {()}


def test_names_of_workloads_have_no_digest_that_tells_nothing_more() -> None:
    short = (("isl", 128), ("osl", 16), ("prompts", "24"), ("prompts_digest", "3f23d9dd1dcf"), ("max_tokens", "16"))
    long = (("isl", 512), ("osl", 16), ("prompts", "24"), ("prompts_digest", "aa23d9dd1dcf"), ("max_tokens", "16"))
    assert list(map(words, shortened([short, long]))) == ["isl128 osl16, prompts 24", "isl512 osl16, prompts 24"]
    other = (*long[:3], ("prompts_digest", "bb23d9dd1dcf"), long[4])
    assert [words(each) for each in shortened([short, long, other])][1:] == [
        "isl512 osl16, prompts 24, prompts' digest aa23d9dd1dcf",
        "isl512 osl16, prompts 24, prompts' digest bb23d9dd1dcf",
    ]
    machines: list[Workload] = [(("cpu", "A"), ("max_tokens", "8")), (("cpu", "B"), ("max_tokens", "16"))]
    assert shortened(machines) == machines, "no axis says so"


def asked_at(**changes: Any) -> Conditions:
    """CONDITIONS with other requests at levels, such as c4=8."""
    levels = CONDITIONS.workload["levels"]
    assert isinstance(levels, list)
    wanted = [entry for entry in levels if isinstance(entry, dict) and f"c{entry['concurrency']}" in changes]
    return other("workload", levels=[{**each, "requests": changes[f"c{each['concurrency']}"]} for each in wanted])


def test_other_amounts_of_requests_are_not_chosen_from() -> None:
    run = run_of(
        cell("int4_wo", level(1), conditions=asked_at(c1=64)),
        cell("fp16", level(1), level(4), conditions=asked_at(c1=64, c4=64)),
        cell("int8_wo", level(1), level(4), conditions=asked_at(c1=64, c4=8)),
    )
    found = {each.cell.split("/")[1]: each for each in recommend(run, (), None, "throughput")}
    assert {name: dict(each.workload) for name, each in found.items()} == {
        "fp16": {"requests": "64"},
        "int4_wo": {"requests": "64"},
        "int8_wo": {"requests": "8"},
    }, "who lacks the level goes with the first that has it"
    assert words(found["int8_wo"].workload) == "requests 8"
    allowed = recommend(run, (), None, "throughput", allow={"requests"})
    assert {each.workload for each in allowed} == {()}
    more = dataclasses.replace(run.cells[2], conditions=asked_at(c1=8, c4=16))
    (*_, last) = recommend(run_of(*run.cells[:2], more), (), None, "throughput")
    assert dict(last.workload) == {"requests": "8 at concurrency 1, 16 at concurrency 4"}


@pytest.mark.parametrize(
    ("conditions", "words", "allow"),
    [
        (other("questions", digest="sha256:" + "ef" * 32), "questions' digest: cdcdcdcdcdcd in the", "workload"),
        (dataclasses.replace(CONDITIONS, questions=None), "the questions: recorded in the baseline", "questions"),
        (other("system", cpu="Intel Xeon"), "CPU: AMD EPYC 9654 in the baseline, Intel Xeon here", "system"),
    ],
)
@pytest.mark.parametrize("least", [None, parse_least("-1%")])
def test_scores_of_other_questions_or_systems_are_not_held_against_each_other(
    conditions: Conditions, words: str, allow: str, least: Any
) -> None:
    low = {"accuracy": {"exact": 0.2}, "accuracy_intervals": {"exact": (0.15, 0.25)}}
    run = run_of(cell("fp16", level()), cell("fp8", level(), conditions=conditions, **low))

    def reason(**how: Any) -> str:
        (found,) = [each for each in recommend(run, (), least, "size", **how) if "fp8" in each.cell]
        return str(found.reason)

    assert reason().startswith(f"exact cannot be compared with m/fp16/bs4: {words}")
    assert f"--allow {allow if allow != 'questions' else 'workload'}" in reason()
    assert "below the 0.500 of fp16" in reason(allow={allow})


def test_servers_that_an_axis_varies_are_chosen_from() -> None:
    axes = cell("fp16").axes
    run = run_of(
        *(
            cell("fp16", level(tps=tps), axes={**axes, "toolchain": name}, conditions=other("system", server=name))
            for name, tps in (("tensorrt_llm", 50), ("tensorrt_llm_pytorch", 60))
        )
    )
    assert {each.workload for each in recommend(run, (), None, "throughput")} == {()}


def test_request_rates_are_levels_too() -> None:
    rates = [
        dataclasses.replace(level(ttft=ttft), concurrency=None, request_rate=rate)
        for rate, ttft in ((2.5, 20), (20, 900))
    ]
    (found,) = recommend(run_of(cell("fp16", *rates)), parse_slo("ttft_p99=100ms"), None, "throughput")
    assert (found.level, found.reason) == ("2.5/s", None)
    (found,) = recommend(run_of(cell("fp16", *rates)), parse_slo("ttft_p99=10ms"), None, "throughput")
    assert found.reason == "ttft_p99 40 ms > 10 ms at 2.5 requests/s, its best of 2 levels"


# The commands


@pytest.fixture
def pipeline(pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    monkeypatch.chdir(tmp_path)
    return pipeline


def report(
    path: Path,
    *levels: LevelResult,
    precision: str = "fp16",
    lengths: tuple[tuple[int, int], ...] = ((64, 64),),
    conditions: Conditions = CONDITIONS,
) -> str:
    rows = [
        CellResult(
            CellId(f"m/{precision}" + f"/isl{isl}-osl{osl}" * (len(lengths) > 1)),
            {"model": "m", "precision": precision, "isl": isl, "osl": osl},
            CellStatus.DONE,
            levels=levels,
            conditions=conditions,
        )
        for isl, osl in lengths
    ]
    path.write_text("\n".join(report_json(rows, "run", "m.yaml")))
    return str(path)


def test_compare_reports_by_file(pipeline: Pipeline, tmp_path: Path) -> None:
    before, after = report(tmp_path / "b.json", level()), report(tmp_path / "a.json", level(ttft=130))
    code, out, _ = pipeline("compare", after, before)
    assert code == 0
    assert "+30.0% ✘" in out
    assert "Welch" in out
    code, out, _ = pipeline("compare", after, before, "--fail-on", "ttft_p99:+10%")
    assert code == 1
    assert "gate: 1 condition broken" in out
    assert pipeline("compare", after, before, "--fail-on", "ttft_p99:+40%")[0] == 0
    code, out, _ = pipeline("compare", after, before, "--format", "json", "--fail-on", "accuracy:-1%")
    assert code == 1
    assert json.loads(out)["gate"]["broken"][0]["reason"] == "missing: neither side has this metric"
    assert pipeline("compare", after, before, "--format", "csv", "-o", "x.csv")[:2] == (0, "")
    assert (tmp_path / "x.csv").read_text().startswith("cell,base_cell,level,metric")


def test_several_files_are_repeats(pipeline: Pipeline, tmp_path: Path) -> None:
    files = [report(tmp_path / f"{ttft}.json", level(ttft=ttft, repeats=0)) for ttft in (100, 101, 103, 130, 131, 134)]
    code, out, _ = pipeline("compare", ",".join(files[3:]), ",".join(files[:3]), "--format", "json")
    assert code == 0
    ttft = next(pair for pair in json.loads(out)["pairs"] if pair["level"])["metrics"]["ttft_p50"]
    assert (ttft["base"], ttft["new"], ttft["method"], ttft["verdict"]) == (101, 131, "repeats", "worse")


def test_repeats_of_what_can_never_work_do_not_break_the_gate() -> None:
    never = cell("fp8", status=CellStatus.INFEASIBLE, reason="precision fp8: not here")
    side = Side("a", (cell("fp16", level()), never))
    repeats = together("a,b", (side, side), {"system"})
    assert [each.unfit for each in repeats.cells] == [None, never.reason]
    result = compare(repeats, repeats)
    assert (breaks(result, parse("ttft_p99:+10%")), result.unfit) == ((), [])


def test_what_not_all_repeats_have_is_left_out_with_a_word(pipeline: Pipeline, tmp_path: Path) -> None:
    levels = CONDITIONS.workload["levels"]
    assert isinstance(levels, list)
    one = other("workload", levels=levels[:1])
    long = report(tmp_path / "a.json", level(1), level(4), lengths=((1, 1), (2, 2)))
    short = report(tmp_path / "b.json", level(1), conditions=one, lengths=((1, 1), (3, 3), (2, 2)))
    for repeats in (f"{long},{short}", f"{short},{long}"):
        code, out, err = pipeline("compare", repeats, long, "--format", "json")
        assert code == 0
        assert {pair["level"] for pair in json.loads(out)["pairs"]} == {"1"}
        assert "note: m/fp16/isl1-osl1 at concurrency 4: not in " in err
        assert "note: m/fp16/isl3-osl3: not in " in err


def test_repeats_without_a_load_run_still_have_their_accuracy(pipeline: Pipeline, tmp_path: Path) -> None:
    rows = {
        name: CellResult(
            CellId("m/fp16"),
            {"model": "m"},
            status,
            accuracy={"exact": 0.5},
            conditions=Conditions(questions=QUESTIONS, made_on={"accuracy": HERE}),
        )
        for name, status in (("a", CellStatus.DONE), ("b", CellStatus.DONE), ("failed", CellStatus.FAILED))
    }
    for name, row in rows.items():
        (tmp_path / f"{name}.json").write_text("\n".join(report_json([row], "run", "m.yaml")))
    data = json.loads(pipeline("compare", "a.json,b.json", "a.json", "--format", "json")[1])
    assert data["unfit"] == []
    assert data["pairs"][0]["metrics"]["accuracy.exact"]["new"] == 0.5
    assert json.loads(pipeline("compare", "a.json,failed.json", "a.json", "--format", "json")[1])["unfit"]


def test_not_comparable_has_an_exit_code_of_its_own(pipeline: Pipeline, tmp_path: Path) -> None:
    before, after = (
        report(tmp_path / f"{name}.json", level(ttft=ttft), conditions=conditions)
        for name, ttft, conditions in (("b", 100, CONDITIONS), ("a", 90, other("system", cpu="Intel Xeon")))
    )
    code, out, err = pipeline("compare", after, before, "--fail-on", "ttft_p99:+10%")
    assert code == 4
    assert "CPU: AMD EPYC 9654 in the baseline, Intel Xeon here" in out
    assert "gate: not evaluated" in out
    assert "--allow system" in err
    data = json.loads(pipeline("compare", after, before, "--format", "json", "--fail-on", "ttft_p99:+10%")[1])
    assert data["gate"] == {"holds": False, "judged": False, "broken": [], "excused": []}
    assert data["refused"][0]["differences"] == [
        {"about": "system", "field": "cpu", "label": "CPU", "level": None, "base": "AMD EPYC 9654", "new": "Intel Xeon"}
    ]
    for allow in ("system", "workload,system", "cpu"):
        code, out, _ = pipeline("compare", after, before, "--fail-on", "ttft_p99:+10%", "--allow", allow)
        assert code == 0
        assert (
            "measured under different conditions (m/fp16): CPU: AMD EPYC 9654 in the baseline, Intel Xeon here" in out
        )
    code, _, err = pipeline("compare", after, before, "--allow", "cup")
    assert (code, "--allow: unknown condition 'cup'" in err) == (2, True)
    code, _, err = pipeline("compare", f"{after},{before}", before)
    assert (code, "is not a repeat of" in err, "CPU: Intel Xeon" in err) == (4, True, True)
    assert pipeline("compare", f"{after},{before}", before, "--allow", "system")[0] == 0


def test_reports_of_an_earlier_release_are_compared_only_when_allowed(pipeline: Pipeline, tmp_path: Path) -> None:
    for name in "ab":
        data = json.loads(Path(report(tmp_path / f"{name}.json", level())).read_text())
        del data["cells"][0]["conditions"]
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    code, out, err = pipeline("compare", "a.json", "b.json")
    assert (code, "the system: not recorded on either side" in out) == (4, True)
    assert "--allow system,workload" in err
    assert pipeline("compare", "a.json", "b.json", "--allow", "system,workload")[0] == 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("compare",), "give a BASELINE, or --by AXIS"),
        (("compare", "a", "b", "--by", "precision"), "not both"),
        (("compare", "a", "b", "--base", "fp16"), "--base is only valid with --by"),
        (("compare", "a", "b"), "'a' is not a file, and there is no workspace with runs"),
        (("compare", "a", "b", "--metrics", "ttft_p98"), "unknown metric 'ttft_p98'"),
        (("compare", "a", "b", "--fail-on", "x"), "got 'x'"),
        (("recommend", "--slo", "x"), "--slo: 'x' is not"),
        (("recommend", "--min-accuracy", "-1%", "x"), "'x' is not a file, and"),
    ],
)
def test_commands_say_what_is_wrong(pipeline: Pipeline, argv: tuple[str, ...], words: str) -> None:
    code, out, err = pipeline(*argv)
    assert (code, out) == (2, "")
    assert words in err


def test_recommend(pipeline: Pipeline, tmp_path: Path) -> None:
    path = report(tmp_path / "r.json", level(1, ttft=20), level(4, ttft=500, tps=150))
    code, out, _ = pipeline("recommend", path, "--slo", "ttft_p99=300ms")
    assert code == 0
    assert "recommended: m/fp16, at concurrency 1" in out
    assert re.search(r"@1 +50 +48\.8 to 51\.3", out), "with its interval"
    assert " tok/s " in out, "of one device, or of none"
    wide = [CellResult(CellId("m/tp2"), {"model": "m", "tp": 2}, CellStatus.DONE, levels=(level(),))]
    (tmp_path / "wide.json").write_text("\n".join(report_json(wide, "run", "m.yaml")))
    assert "tok/s/GPU" in pipeline("recommend", str(tmp_path / "wide.json"))[1]
    two = report(tmp_path / "two.json", level(1), level(4), lengths=((128, 16), (256, 32)))
    code, out, _ = pipeline("recommend", two)
    assert code == 0
    assert re.findall(r"^(?:for |recommended:).*", out, re.MULTILINE) == [
        "for isl128 osl16",
        "recommended: m/fp16/isl128-osl16, at concurrency 1",
        "for isl256 osl32",
        "recommended: m/fp16/isl256-osl32, at concurrency 1",
    ]
    code, out, _ = pipeline("recommend", path, "--slo", "ttft_p99=1ms", "--format", "json")
    assert code == 3
    data = json.loads(out)
    nearest = {"cell": "m/fp16", "level": "1", "misses": "ttft_p99 40 ms > 1 ms at concurrency 1, its best of 2 levels"}
    assert data["recommended"] == [{"workload": {}, "cell": None, "tied": [], "why": None, "nearest": nearest}]
    assert data["candidates"][0]["reason"] == "ttft_p99 40 ms > 1 ms at concurrency 1, its best of 2 levels"


def test_what_accuracy_is_held_against_need_not_be_chosen_from(pipeline: Pipeline, tmp_path: Path) -> None:
    rows = [
        CellResult(
            CellId(f"m/{precision}"),
            {"model": "m", "precision": precision},
            CellStatus.DONE,
            levels=(level(),),
            conditions=CONDITIONS,
            **scores,
        )
        for precision, scores in {"fp16": {"accuracy": {"exact": 0.9}}, "int4_wo": {"accuracy": {"exact": 0.4}}}.items()
    ]
    (tmp_path / "r.json").write_text("\n".join(report_json(rows, "run", "m.yaml")))
    words = ("recommend", str(tmp_path / "r.json"), "--cells", "*/int4_wo", "--format", "json")
    assert pipeline(*words)[0] == 0
    code, out, _ = pipeline(*words, "--min-accuracy", "-1%")
    assert code == 3
    (candidate,) = json.loads(out)["candidates"]
    assert candidate["reason"] == "exact 0.400 is 55.6% below the 0.900 of fp16, 1.0% allowed"


def test_measurements_that_are_not_valid_have_no_figures_and_cannot_be_compared(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    finding = {"severity": "invalid", "check": "failures", "concurrency": 1, "message": "4 of 4 requests failed"}
    perf = {"schema": 1, "valid": False, "levels": [{"concurrency": 1}], "findings": [finding]}
    for name in ("a", "b", "perf"):
        (tmp_path / f"{name}.json").write_text(json.dumps(perf))
    (cell_,) = load_measured(str(tmp_path), None).cells
    assert (cell_.levels, cell_.unfit) == ((), "the measurement is not valid: 4 of 4 requests failed")
    good = report(tmp_path / "good.json", level())
    for one, other_ in (("a.json", "b.json"), (good, "b.json"), ("a.json", good)):
        code, out, err = pipeline("compare", one, other_)
        assert code == 1
        assert "the measurement is not valid: 4 of 4 requests failed" in out
        assert "error: nothing was compared: " in err
        assert "have no valid measurement in common" in err
        assert pipeline("compare", one, other_, "--fail-on", "e2e_p50:+5%")[0] == 1
    assert pipeline("compare", good, good)[0] == 0


def test_a_metric_that_one_side_lacks_has_a_column() -> None:
    """A server without streaming has no TPOT, and no p99 of few requests."""
    known = level()
    unary = dataclasses.replace(known, latencies={"e2e_ms": {"n": 40, "p50": 100.0, "p99": None}}, repeats=())
    for new, base in ((known, unary), (unary, known)):
        compared = compare(Side("n", (cell("fp16", new),)), Side("b", (cell("fp16", base),)))
        lines = writers.to_markdown(Judgement(compared, None)).splitlines()
        place = next(index for index, line in enumerate(lines) if line.startswith("| cell @load"))
        heads, values = ([each.strip() for each in lines[at].split("|")] for at in (place, place + 2))
        columns = dict(zip(heads, values, strict=True))
        assert columns["TPOT p50"] == "n/a"
        assert columns["e2e p50"] not in {"", "n/a"}
    compared = compare(Side("n", (cell("fp16", unary),)), Side("b", (cell("fp16", unary),)))
    assert "TPOT" not in writers.to_markdown(Judgement(compared, None)), "neither side has it"


@pytest.mark.parametrize("named", ["perf.json", "events.jsonl"])
@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"findings": None}, "findings: expected a list of objects"),
        ({"findings": [1]}, "findings: expected a list of objects"),
        ({"token_count": 5}, "token_count: expected an object"),
        ({"levels": None}, "levels: expected a list"),
    ],
)
def test_parts_of_a_load_run_have_their_types(
    pipeline: Pipeline, tmp_path: Path, part: dict[str, Any], words: str, named: str
) -> None:
    (tmp_path / "perf.json").write_text(json.dumps({"levels": [], **part}))
    (tmp_path / "events.jsonl").touch()
    code, out, err = pipeline("compare", named, named)
    assert (code, out) == (2, "")
    assert "perf.json" in err
    assert words in err


def test_event_files_of_any_server(tmp_path: Path) -> None:
    counts = [counted(i * 100, [(i * 100 + 50, " a b", 2)], request_rate=2.5, concurrency=None) for i in range(6)]
    write(tmp_path / "vllm.jsonl", *counts)
    (cell_,) = load_measured(str(tmp_path / "vllm.jsonl"), None).cells
    (figures,) = cell_.levels
    assert figures.key == "2.5/s"
    assert figures.value("ttft_p50") == 50
    assert len(cell_.samples(figures.key)) == 6
    silent = [request(i * 100, [(i * 100 + 50, " a b")]) for i in range(6)]
    write(tmp_path / "other.jsonl", *silent)
    with pytest.raises(UsageError, match="did not count its tokens"):
        load_measured(str(tmp_path / "other.jsonl"), None)
    with pytest.raises(UsageError, match=r"^--tokenizer .*not-there: "):
        load_measured(str(tmp_path / "other.jsonl"), None, tokenizer=tmp_path / "not-there")


LoadRun = Callable[..., Side]


@pytest.fixture
def load_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadRun:
    """Analyzes requests, and reads what came of them."""
    monkeypatch.setattr(measured, "tokenizer_at", lambda _path: Words())

    def made(name: str, *records: dict[str, Any]) -> Side:
        folder = tmp_path / name
        folder.mkdir()
        events = write(folder / "events.jsonl", *records)
        (folder / "perf.json").write_text(json.dumps(analyze(events, Words())))
        return load_measured(str(folder), None, tokenizer=tmp_path / "tokenizer.json")

    return made


def test_requests_of_one_repeat_give_intervals(load_run: LoadRun) -> None:
    def requests(ttft_ms: float) -> list[dict[str, Any]]:
        times = [(i * 1000, i * 1000 + ttft_ms + i % 7) for i in range(30)]
        return [counted(sent, [(first, " a", 1), (first + 60, " b", 2)]) for sent, first in times]

    result = compare(
        load_run("after", *requests(60)),
        load_run("before", *requests(50)),
        ["ttft_p50", "ttft_p99", "tpot_mean", "e2e_mean", "output_tps"],
        allow={"system", "workload"},
    )
    ttft = found(result, "ttft_p50")
    assert (ttft.method, ttft.verdict) == ("paired_requests", ChangeVerdict.WORSE)
    assert ttft.interval[0] > 0.1
    assert found(result, "ttft_p99").verdict is ChangeVerdict.MISSING, (
        "30 requests say nothing of the slowest in a hundred"
    )
    assert found(result, "tpot_mean").verdict is ChangeVerdict.NOISE
    assert found(result, "e2e_mean").verdict is ChangeVerdict.WORSE


def test_a_rate_is_not_surer_than_the_intervals_of_both_sides(load_run: LoadRun) -> None:
    """Requests in flight together are slow together, so drawing them one by one finds differences that are noise."""

    def run(name: str, token_ms: float) -> Side:
        took = [50 + token_ms + i % 7 for i in range(30)]
        starts = accumulate((time + 1 for time in took), initial=0.0)
        timed = zip(starts, took, strict=False)
        return load_run(name, *(counted(at, [(at + 50, " a", 1), (at + time, " b", 2)]) for at, time in timed))

    def within(side: Side, factor: float) -> Side:
        (cell_,) = side.cells
        (figures,) = cell_.levels
        rate = figures.output_tokens_per_s
        assert rate
        known = dataclasses.replace(figures, intervals={"output_tps": (rate / factor, rate * factor)})
        return dataclasses.replace(side, cells=(dataclasses.replace(cell_, levels=(known,)),))

    after, before = run("after", 60), run("before", 80)
    for factor, expected in (
        (1.000001, ("paired_requests", ChangeVerdict.BETTER)),
        (1.5, ("intervals", ChangeVerdict.NOISE)),
    ):
        result = compare(within(after, factor), within(before, factor), ["output_tps"], allow={"system", "workload"})
        rate = found(result, "output_tps")
        assert (rate.method, rate.verdict) == expected


def test_what_was_measured_again_under_the_same_key_is_not_what_an_earlier_run_reported(tmp_path: Path) -> None:
    perf = tmp_path / "perf"
    perf.mkdir()
    now = dataclasses.replace(CONDITIONS, measured_s=2000.0)
    (perf / "perf.json").write_text(json.dumps({"measured_s": 2000.0, "levels": []}))
    made = {"c": {"perf": perf, "download": tmp_path}}
    rows = [
        CellResult(CellId("c"), {"model": "m"}, CellStatus.DONE, levels=(level(tps=tps),), conditions=conditions)
        for tps, conditions in ((60.0, now), (50.0, dataclasses.replace(now, measured_s=1000.0)))
    ]
    new, base = (measured._cells([row], made)[0] for row in rows)
    assert (new.perf, base.perf) == (perf, None)
    assert base.events is None, "its requests are gone"
    found = compare(Side("new", (new,)), Side("base", (base,)), ["output_tps"])
    ((delta,),) = (pair.deltas for pair in found.pairs)
    assert delta.method == "repeats" or delta.method == "paired_repeats"
    assert delta.change == pytest.approx(0.2)
