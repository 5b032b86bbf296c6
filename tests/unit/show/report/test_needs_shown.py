"""What people see of needs: the table of a plan, and what would fit."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace

import pytest

from tests.helpers import fabricated, trtllm_cells
from tests.unit.orchestrate.run.test_forecast import cell
from trtllm_pipeline.base.machine.assume import parse
from trtllm_pipeline.base.text_blocks import as_markdown, on_terminal
from trtllm_pipeline.orchestrate.memory.estimates import GPU, Estimate, Need
from trtllm_pipeline.orchestrate.results.fits import Fit, Fits
from trtllm_pipeline.orchestrate.run.forecast import forecast
from trtllm_pipeline.show.cli.output import rendered
from trtllm_pipeline.show.report.plan_text import plan_markdown, plan_text

PLAN = fabricated.plan(cell(), cell(precision="int4_wo"))


def rows(text: str) -> dict[str, list[str]]:
    """Rows of the table of stages by their first word."""
    lines = text.partition("\nstage ")[2].partition("\nwhy:")[0].splitlines()[1:]
    return {words[0]: words for words in map(str.split, lines) if words}


def test_totals_come_before_the_table_of_stages() -> None:
    text = plan_text(PLAN, forecast(PLAN, None), verbose=False)
    before, _, table = text.partition("\nstage ")
    assert before.startswith("2 cells; ")
    assert "machine: " in before
    assert "time: about" in before
    assert "disk: " in before
    assert max(map(len, table.splitlines())) <= 80
    assert "GiB" not in "".join(table.splitlines()[1:]), "the unit is in the header"
    with_memory = [stage for stage, words in rows(text).items() if len(words) > 5 and words[-1].count(".") == 1]
    assert with_memory == ["convert", "build", "launch"]
    assert "24 h" not in text, "time limits are no news"


def test_a_machine_without_a_gpu_is_named_as_such() -> None:
    text = plan_text(PLAN, forecast(PLAN, None), verbose=False)
    (machine,) = (line for line in text.splitlines() if line.startswith("machine: "))
    assert re.fullmatch(r"machine: no GPU, \d+ CPUs?(, .*)?", machine)


def test_an_assumed_machine_without_an_engine_for_its_gpus_is_named_as_such() -> None:
    def line(text: str) -> str:
        plan = replace(fabricated.plan(cell()), machine=parse(text))
        shown = plan_text(plan, forecast(plan, None), verbose=False).splitlines()
        return next(each for each in shown if each.startswith("assumed machine: "))

    advice = "; its GPUs are not used: add tensorrt_llm==1.2 to --assume, or choose a toolchain"
    assert line("2xH100").endswith(advice)
    assert "not used" not in line("gpus=0")


def test_a_cell_that_does_not_fit_by_more_than_the_error_is_in_the_headline() -> None:
    plan = fabricated.plan(cell())
    (run,) = (each for each in plan.stage_runs.values() if each.stage.name == "launch")
    few = Need("launch", plan.cells[0].id, GPU, Estimate(40 << 30, 0.15), 24 << 30, least=8 << 30)
    seen = replace(forecast(plan, None), needs=(few,))
    first, *others = plan_text(plan, seen, verbose=False).splitlines()
    assert first.endswith(f"; too large: {run.first_cell.id}")
    assert (
        "launch needs up to 40.0 GiB of GPU memory (±15%), 24.0 GiB available: works on fewer requests or rows at a time; "
        "pipeline plan --fit proposes changes" in others
    )
    assert rows("\n".join([first, *others]))["launch"][-3:] == ["40.0", "of", "24.0"]
    near = replace(few, estimate=Estimate(25 << 30, 0.15))
    assert "too large" not in plan_text(plan, replace(seen, needs=(near,)), verbose=False)
    tight = replace(few, estimate=Estimate(23 << 30, 0.15), least=None)
    assert "24.0 GiB available: tight" in plan_text(plan, replace(seen, needs=(tight,)), verbose=False)


def test_every_stage_run_has_a_row_when_asked() -> None:
    text = plan_text(PLAN, forecast(PLAN, None), verbose=True)
    assert sum("host memory" in line for line in text.splitlines()) == 6
    assert str(PLAN.cells[1].id) in text
    assert "all         disk" in text
    assert "first cell, and why" in text
    assert "first cell, and why" not in plan_text(PLAN, forecast(PLAN, None), verbose=False)


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
    assert lines[3] == f"as_is (fp8): {model}"
    assert lines[4].startswith("model, another: checked with text alone")
    assert lines[4].endswith("settings.serve.frontend: trtllm_serve takes them")
    assert not lines[5]
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


def test_enough_memory_names_the_machine_and_what_is_unknown_of_it() -> None:
    assumed = replace(parse("2xH100,tensorrt_llm==1.2"), assumed=True)
    words = "the assumed machine has enough GPU memory for all 4 cells; its host memory is unknown"
    assert as_markdown(Fits(4, (), machine=assumed).blocks()).strip().endswith(words)
    known = replace(parse("2xH100,memory_gib=512"), assumed=True)
    words = "the assumed machine has enough memory for all 4 cells"
    assert as_markdown(Fits(4, (), machine=known).blocks()).strip().endswith(words)


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
