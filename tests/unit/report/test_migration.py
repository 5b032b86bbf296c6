"""Lanes of one model: which is taken, what pays back after how many tokens, and what is not compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.helpers.fabricated_conditions import CONDITIONS, other
from tests.unit.report.test_compare import level
from trtllm_pipeline.domain import CellId
from trtllm_pipeline.report.measured import Measured, Side
from trtllm_pipeline.report.migration import Memory, Migration, blocks, migrations
from trtllm_pipeline.report.rows import CellStatus
from trtllm_pipeline.text_blocks import as_markdown


def lane(toolchain: str, tps: float, *, build: float = 0.0, repeats: int = 3, **changes: Any) -> Measured:
    axes = {"model": "m", "precision": "bf16", "tp": 1, "pp": 1, "max_batch_size": 4, "toolchain": toolchain}
    given: dict[str, Any] = {
        "levels": (level(1, tps=tps / 2, repeats=repeats), level(8, tps=tps, repeats=repeats)),
        "accuracy": {"exact": 0.5},
        "accuracy_intervals": {"exact": (0.45, 0.55)},
        "seconds": {"build": build} if build else {},
        "conditions": CONDITIONS,
        **changes,
    }
    status = given.pop("status", CellStatus.DONE)
    return Measured(CellId(f"m/bf16/bs4/{toolchain}"), given.pop("axes", axes), status, **given)


def of(*lanes: Measured, memory: dict[CellId, Memory] | None = None) -> Migration:
    (found,) = migrations(Side("run", lanes), memory or {})
    return found


def test_an_engine_that_is_faster_is_taken_and_pays_back_after_so_many_tokens() -> None:
    found = of(lane("tensorrt_llm", 1200.0, build=300.0), lane("tensorrt_llm_pytorch", 1000.0), lane("vllm", 900.0))
    assert found.base == "tensorrt_llm_pytorch"
    assert found.what == "m/bf16/bs4"
    assert found.level == "8"
    engine, pytorch, vllm = found.lanes
    assert engine.payback is not None
    assert engine.payback.tokens is not None
    # 300 s / (1/1000 - 1/1200) s a token
    assert round(engine.payback.tokens) == 1_800_000
    assert pytorch.payback is None
    assert vllm.payback is None
    assert found.advice.startswith("Take tensorrt_llm at concurrency 8: 20 % more output tokens/s than ")
    assert "its 300 s of preparation pay back after 1.8 million output tokens, 25 min at that load" in found.advice
    assert "33.3 % more output tokens/s than vllm" in found.advice


def test_of_equals_the_one_that_needs_no_build_is_taken() -> None:
    found = of(lane("tensorrt_llm", 1001.0, build=300.0), lane("vllm", 1000.0))
    assert found.advice.startswith("Take vllm at concurrency 8: no difference in output tokens/s to tensorrt_llm")
    assert found.advice.endswith("it needs no preparation, unlike tensorrt_llm.")


def test_a_faster_lane_with_longer_latencies_says_so() -> None:
    slow = (level(1, tps=600.0), level(8, tps=1200.0, ttft=300.0))
    found = of(lane("sglang", 1200.0, levels=slow), lane("vllm", 1000.0))
    assert found.advice.startswith("Take sglang")
    assert "its TTFT is 200 % longer than that of vllm" in found.advice


def test_without_intervals_nothing_is_decided() -> None:
    found = of(lane("tensorrt_llm", 5000.0, build=300.0, repeats=1), lane("vllm", 1000.0, repeats=1))
    assert found.advice.startswith("Not decided: the difference between tensorrt_llm and vllm at concurrency 8")
    assert "settings.perf.repeats: 3" in found.advice


def test_what_answers_worse_is_not_taken_however_fast() -> None:
    bad = lane("tensorrt_llm", 5000.0, accuracy={"exact": 0.2}, accuracy_intervals={"exact": (0.15, 0.25)})
    found = of(bad, lane("vllm", 1000.0), lane("sglang", 900.0))
    assert found.advice.startswith("Take vllm")
    assert "tensorrt_llm answers worse than another lane, beyond noise" in found.advice
    alone = of(bad, lane("vllm", 1000.0))
    assert alone.advice == "Take vllm at concurrency 8: tensorrt_llm answers worse than another lane, beyond noise."


def test_without_scores_it_says_that_they_are_not_known() -> None:
    found = of(lane("sglang", 1200.0, accuracy={}, accuracy_intervals={}), lane("vllm", 1000.0))
    assert "whether it answers as well as vllm is not known" in found.advice


def test_other_conditions_are_not_compared() -> None:
    elsewhere = lane("tensorrt_llm", 1200.0, conditions=other("system", cpu="another CPU"))
    found = of(elsewhere, lane("vllm", 1000.0))
    assert found.advice.startswith("Not comparable: vllm: CPU: another CPU in the baseline")
    assert "another CPU" in found.advice
    third = of(elsewhere, lane("vllm", 1000.0, conditions=other("system", cpu="another CPU")), lane("sglang", 900.0))
    assert third.advice.startswith("Take tensorrt_llm")
    assert "sglang is not compared" in third.advice


def test_lanes_without_a_load_in_common_or_that_failed_are_not_compared() -> None:
    apart = of(lane("vllm", 1000.0, levels=(level(2),)), lane("sglang", 1000.0, levels=(level(4),)))
    assert apart.advice.startswith("Not comparable: ")
    failed = lane("tensorrt_llm", 1.0, levels=(), status=CellStatus.FAILED, failed_stage="build", reason="no memory")
    found = of(failed, lane("vllm", 1000.0), lane("sglang", 900.0))
    assert found.base == "vllm"
    assert "tensorrt_llm is not compared (build failed: no memory)" in found.advice


def test_only_cells_that_are_equal_otherwise_are_lanes_of_one_model() -> None:
    fp8 = lane("vllm", 1.0)
    fp8 = lane("vllm", 1.0, axes={**fp8.axes, "precision": "fp8"})
    assert migrations(Side("run", (lane("tensorrt_llm", 1.0), fp8)), {}) == []
    assert "axes.toolchain" in as_markdown(list(blocks([])))


def test_the_table_has_memory_agreement_and_payback(tmp_path: Path) -> None:
    said = {"a": ["Paris.", "Rome"], "b": ["Paris", "Milan"]}
    for name, answers in said.items():
        (tmp_path / name).mkdir()
        rows = [
            {"id": str(place), "input": "x", "answer": answer, "scores": {"exact": 1.0}}
            for place, answer in enumerate(answers)
        ]
        (tmp_path / name / "answers.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    engine = lane("tensorrt_llm", 1200.0, build=300.0, answers=tmp_path / "a")
    vllm = lane("vllm", 1000.0, answers=tmp_path / "b", findings=("warning: the server was not started by us",))
    found = of(engine, vllm, memory={engine.id: Memory(3_000_000_000, 20_000_000_000)})
    text = as_markdown(list(blocks([found])))
    (row,) = (line for line in text.splitlines() if line.startswith("| `tensorrt_llm`"))
    # A full stop that one server leaves at the end is no other answer.
    assert [each.strip() for each in row.split("|")[7:12]] == ["0.5", "300", "3.0 GB", "20 GB", "1.8 million tokens"]
    assert "vllm: warning: the server was not started by us" in text
    assert "tok/s +20.0 % (better)" in text
