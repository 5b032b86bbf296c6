"""What people see of needs: the table of a plan, and what would fit."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest

from tests.helpers import fabricated, trtllm_cells
from tests.unit.orchestrate.run.test_forecast import cell
from trtllm_pipeline.base.text_blocks import as_markdown, on_terminal
from trtllm_pipeline.orchestrate.results.fits import Fit, Fits
from trtllm_pipeline.orchestrate.run.forecast import forecast
from trtllm_pipeline.show.cli.output import rendered
from trtllm_pipeline.show.report.plan_text import plan_markdown, plan_text

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
    plan = replace(
        fabricated.plan(cell()), cells=(quantized, quantized, seeing, replace(seeing, model="another"), seeing, served)
    )
    model = quantized.model
    lines = plan_text(plan, forecast(PLAN, None), verbose=False).splitlines()
    assert lines[1] == f"as_is (fp8): {model}"
    assert lines[2].startswith("model, another: checked with text alone")
    assert lines[2].endswith("settings.serve.frontend: trtllm_serve takes them")
    assert not lines[3]
    assert f"as_is (fp8): {model}" in plan_markdown(plan, forecast(PLAN, None), "Plan").replace("\\", "")


def shown(*fits: Fit) -> str:
    return as_markdown(Fits(4, fits).blocks())


def fit(batch: int, *settings: str, works: bool = False) -> Fit:
    asked = trtllm_cells.cell("fp16", batch=batch)
    changed = replace(asked, tp=2, max_batch_size=4) if settings else None
    return Fit(asked, "launch: needs much", works, proposal=settings or None, changed=changed)


def test_cells_that_the_same_change_helps_stand_together_with_a_line_to_paste() -> None:
    change = ("axes.parallel=[tp2pp1]", "axes.max_batch_size=[4]")
    text = shown(fit(8, *change), fit(16, *change), fit(2))
    assert "2 cells need more memory" in text
    (line,) = (line for line in text.splitlines() if "--set" in line)
    words = shlex.split(line.strip("`"))
    assert words[:4] == ["--set", change[0], "--set", change[1]]
    assert words[4:] == ["--cells", str(fit(8, *change).changed_id)], "the others stay as they are"
    assert "/tp2pp1/bs4/" in words[5]
    assert "1 cell needs more memory than available, and no smaller batch" in text


def test_the_line_to_paste_stays_one_line_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    lines = rendered(on_terminal(Fits(4, (fit(8, "axes.parallel=[tp2pp1]"),)).blocks())).splitlines()
    (line,) = (line for line in lines if "--set" in line)
    assert "axes.parallel=[tp2pp1]" in line
    assert str(fit(8, "x").changed_id) in line


def test_a_cell_that_works_on_less_at_a_time_is_not_said_to_fail() -> None:
    text = shown(fit(8, works=True), fit(16, "axes.parallel=[tp2pp1]", works=True))
    assert "1 cell works with fewer requests or rows at a time than configured, and no parallelism" in text
    assert "1 cell works with fewer requests or rows at a time than configured; with this it fits" in text


@pytest.mark.parametrize(("cells", "words"), [(1, "the cell"), (4, "all 4 cells")])
def test_enough_memory_is_said(cells: int, words: str) -> None:
    assert as_markdown(Fits(cells, ()).blocks()).strip().endswith(f"enough memory for {words}")


def test_no_memory_is_enough_for_what_cannot_work() -> None:
    assert "no cell can work, independent of memory" in as_markdown(Fits(0, ()).blocks())


def test_the_json_has_settings_to_paste() -> None:
    asked = fit(8, "axes.max_batch_size=[2]")
    assert json.loads(json.dumps(Fits(1, (asked,)).to_json())) == {
        "schema": 1,
        "cells": 1,
        "fits": [
            {"cell": asked.cell.id, "reason": asked.why, "works": False, "set": ["axes.max_batch_size=[2]"]},
        ],
    }
