"""What people see of needs: the table of a plan, and what would fit."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.helpers import fabricated, trtllm_cells
from tests.unit.execution.test_forecast import cell
from trtllm_pipeline.domain import CellId
from trtllm_pipeline.execution.forecast import forecast
from trtllm_pipeline.report.document import as_markdown
from trtllm_pipeline.report.fits import Fit, Fits
from trtllm_pipeline.report.plan_text import plan_markdown, plan_text

PLAN = fabricated.plan(cell(), cell(precision="int4_wo"))


def test_a_plan_shows_what_its_stages_need_beside_what_there_is() -> None:
    text = plan_text(PLAN, forecast(PLAN, None), verbose=False)
    rows = [line.split() for line in text.splitlines() if "host memory" in line]
    assert [row[0] for row in rows] == ["convert", "build", "launch"]
    assert all("±15%" in row for row in rows)
    assert max(map(len, text.partition("needs")[2].partition("why:")[0].splitlines())) <= 80
    assert "all         disk" in text
    times = [line.split() for line in text.splitlines() if " time " in line and "±" in line]
    stages = ["download", "convert", "build", "repository", "launch", "smoke", "perf", "accuracy"]
    assert [row[0] for row in times] == stages, "of every stage, in the order of the work"
    assert all("±60%" in row for row in times)


def test_every_stage_run_has_a_row_when_asked() -> None:
    text = plan_text(PLAN, forecast(PLAN, None), verbose=True)
    assert sum("host memory" in line for line in text.splitlines()) == 6
    assert str(PLAN.cells[1].id) in text


def test_a_summary_has_the_table_too() -> None:
    assert "| headroom |" in plan_markdown(PLAN, forecast(PLAN, None), "Plan")


def test_a_plan_says_what_ids_do_not() -> None:
    quantized = replace(cell(precision="as_is"), recipe={**cell().recipe, "quantization": "fp8"})
    seeing = trtllm_cells.cell(toolchain=trtllm_cells.PYTORCH, recipe={"images": True})
    served = trtllm_cells.cell(
        toolchain=trtllm_cells.PYTORCH, recipe={"images": True}, settings={"serve.frontend": "trtllm_serve"}
    )
    plan = replace(fabricated.plan(cell()), cells=(quantized, quantized, seeing, served))
    model = quantized.model
    lines = plan_text(plan, forecast(PLAN, None), verbose=False).splitlines()
    assert lines[1] == f"as_is (fp8): {model}"
    assert lines[2].startswith("model: it is asked with text alone")
    assert lines[2].endswith("settings.serve.frontend: trtllm_serve takes them")
    assert not lines[3]
    assert f"as_is (fp8): {model}" in plan_markdown(plan, forecast(PLAN, None), "Plan").replace("\\", "")


def shown(*fits: Fit) -> str:
    return as_markdown(Fits(4, fits).blocks())


def test_cells_that_the_same_change_helps_stand_together() -> None:
    change = ("axes.parallel=[tp2]", "axes.max_batch_size=[4]")
    text = shown(
        *(Fit(CellId(name), "launch: needs much", change) for name in "ab"), Fit(CellId("c"), "needs more", None)
    )
    assert "2 cells need more memory" in text
    assert "--set axes.parallel=[tp2] --set axes.max_batch_size=[4]" in text
    assert "1 cell needs more memory than there is, and no smaller batch" in text


@pytest.mark.parametrize(("cells", "words"), [(1, "the cell"), (4, "all 4 cells")])
def test_enough_memory_is_said(cells: int, words: str) -> None:
    assert as_markdown(Fits(cells, ()).blocks()).strip().endswith(f"enough for {words}")


def test_the_json_has_settings_to_paste() -> None:
    found = Fits(1, (Fit(CellId("a"), "why", ("axes.max_batch_size=[2]",)),)).to_json()
    assert json.loads(json.dumps(found)) == {
        "schema": 1,
        "cells": 1,
        "fits": [{"cell": "a", "reason": "why", "set": ["axes.max_batch_size=[2]"]}],
    }
