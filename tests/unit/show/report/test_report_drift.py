from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import fabricated
from trtllm_pipeline.base.domain import CellId, Json
from trtllm_pipeline.measure.score.drift import ScoreDrift
from trtllm_pipeline.orchestrate.results.report_file import CellResult, CellStatus, drifts_of, references, rows
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.show.report.columns import columns
from trtllm_pipeline.show.report.comparison import first_of
from trtllm_pipeline.show.report.writers import losses_of, to_csv

ANSWERS = [{"id": str(n), "input": "?", "answer": "Paris", "scores": {"exact": 1.0}} for n in range(8)]
WORSE = [*ANSWERS[:6], *({**row, "answer": "Lyon", "scores": {"exact": 0.0}} for row in ANSWERS[6:])]


def lines(answers: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in answers).encode()


def axes(precision: str, batch: int = 4, **more: Json) -> dict[str, Json]:
    return {"model": "m", "precision": precision, "max_batch_size": batch, **more}


def test_the_reference_is_the_unquantized_cell_equal_otherwise() -> None:
    cells = {
        CellId("a"): axes("bf16"),
        CellId("b"): axes("fp16"),
        CellId("c"): axes("int8_wo"),
        CellId("d"): axes("int8_wo", 8),
        CellId("e"): axes("int4_wo", 8),
        CellId("f"): axes("int8_wo", toolchain="other"),
    }
    assert references(cells) == {"a": "b", "c": "b"}, "the others have no unquantized counterpart"


def test_cells_without_comparable_answers_have_no_drift(tmp_path: Path) -> None:
    for name, answers in {"fp16": ANSWERS, "other": [{**ANSWERS[0], "input": "other"}], "old": [{"id": 1}]}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "answers.jsonl").write_bytes(lines(answers))
    cells = {CellId("fp16"): axes("fp16"), CellId("other"): axes("fp8"), CellId("old"): axes("int8_wo")}
    cells[CellId("none")] = axes("int4_wo")
    answered = {CellId(name): tmp_path / name for name in ("fp16", "other", "old")}
    assert drifts_of(cells, answered) == {}


@pytest.fixture
def reported(tmp_path: Path) -> Iterator[tuple[CellResult, ...]]:
    cells = (fabricated.cell("fp16"), fabricated.cell("int8_wo"), fabricated.cell("int4_wo"))
    plan = fabricated.plan(*cells)
    store = Store(tmp_path / "ws")
    for cell, answers in zip(cells, (ANSWERS, WORSE), strict=False):
        about = {"schema": 1, "total": 8, "scores": {"exact": 0.75}, "intervals": {"exact": [0.4, 1.0]}}
        files = {"accuracy.json": about, "answers.jsonl": lines(answers)}
        fabricated.publish(store, fabricated.stage_run(plan, cell, "accuracy"), files)
    yield rows(plan, store)
    store.close()


def test_rows_tell_drift_and_intervals(reported: tuple[CellResult, ...]) -> None:
    full, eight, four = reported
    assert full.accuracy_drift is None
    assert four.accuracy_drift is None
    assert eight.accuracy_intervals == {"exact": (0.4, 1.0)}
    assert eight.accuracy_drift.reference == full.id
    assert eight.accuracy_drift.agreement == 0.75
    assert eight.accuracy_drift.scores["exact"].difference == -0.25
    assert eight.accuracy_drift.first_divergence_chars["p50"] == 0
    assert CellResult.from_json(json.loads(json.dumps(eight.to_json()))).accuracy_drift == eight.accuracy_drift


def test_tables_show_them(reported: tuple[CellResult, ...]) -> None:
    values = {column.head: [column.value(row) for row in reported] for column in columns(reported)}
    assert values["exact"] == ["0.75 (0.40 to 1.00)", "0.75 (0.40 to 1.00)", None]
    assert values["agree"] == [None, "0.75", None]
    assert values["exact change"][1].startswith("-0.25 (-0.")
    parsed = list(csv.DictReader(io.StringIO(to_csv(reported))))
    assert (parsed[1]["drift_agreement"], parsed[1]["drift_exact"], parsed[0]["drift_exact"]) == ("0.75", "-0.25", "")
    assert (parsed[1]["accuracy_exact_low"], parsed[1]["accuracy_exact_high"]) == ("0.4", "1.0")
    assert parsed[1]["drift_reference"] == reported[0].id


def test_a_change_in_words() -> None:
    def drift(difference: float, low: float, high: float) -> ScoreDrift:
        return ScoreDrift(100, 0.5, 0.5 + difference, difference, (low, high), 1, 1)

    assert drift(-0.03, -0.07, 0.01).verdict == "no loss beyond noise"
    assert drift(-0.11, -0.2, -0.03).verdict == "loses 0.110 ± 0.085"
    assert drift(0.11, 0.03, 0.2).verdict == "gains 0.110 ± 0.085"


def test_full_reports_tell_the_largest_loss_of_each_precision(reported: tuple[CellResult, ...]) -> None:
    assert losses_of(reported) == [("exact against the unquantized cell", "int8_wo no loss beyond noise")]


def test_a_task_stands_for_its_first_score() -> None:
    scores = ["gsm8k.exact_match.strict_match", "gsm8k.exact_match.flexible_extract", "mmlu.acc"]
    assert first_of("gsm8k", scores) == scores[0]
    assert first_of("gsm8k.exact_match.flexible_extract", scores) == scores[1]
    assert first_of("mmlu", scores) == "mmlu.acc"
    assert first_of("mml", scores) == "mml"


def test_the_only_score_of_a_task_has_the_name_of_the_task() -> None:
    row = CellResult(CellId("a"), {}, CellStatus.DONE, accuracy={"mmlu.acc": 0.5, "gsm8k.a": 0.5, "gsm8k.b": 0.5})
    heads = [column.head for column in columns((row,))]
    assert heads == ["status", "mmlu", "gsm8k.a", "gsm8k.b"]
