"""What people see of needs: the table of a plan, and what would fit."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace

import pytest

from tests.helpers import fabricated, trtllm_cells
from tests.unit.orchestrate.run.test_forecast import cell
from trtllm_pipeline.base.domain import CellId
from trtllm_pipeline.base.machine.assume import parse
from trtllm_pipeline.base.text_blocks import as_markdown, on_terminal
from trtllm_pipeline.orchestrate.memory.estimates import GPU, Estimate, Need
from trtllm_pipeline.orchestrate.plan.plan import Plan
from trtllm_pipeline.orchestrate.results.fits import Fit, Fits
from trtllm_pipeline.orchestrate.run.forecast import forecast
from trtllm_pipeline.show.cli.output import rendered
from trtllm_pipeline.show.phrases import wrapped
from trtllm_pipeline.show.report.plan_text import doubts, plan_markdown, plan_text

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
    few = Need("launch", plan.cells[0].id, GPU, Estimate(40 << 30, 0.15), 24 << 30, least=8 << 30)
    seen = replace(forecast(plan, None), needs=(few,))
    first, *others = plan_text(plan, seen, verbose=False).splitlines()
    assert first.endswith("; 1 cell too large")
    assert (
        "launch needs up to 40.0 GiB of GPU memory (±15%), 24.0 GiB available: works on fewer requests or rows at a time; "
        "pipeline plan --fit proposes changes" in others
    )
    assert rows("\n".join([first, *others]))["launch"][-3:] == ["40.0", "of", "24.0"]
    near = replace(few, estimate=Estimate(25 << 30, 0.15))
    assert "too large" not in plan_text(plan, replace(seen, needs=(near,)), verbose=False)
    tight = replace(few, estimate=Estimate(23 << 30, 0.15), least=None)
    assert "24.0 GiB available: tight" in plan_text(plan, replace(seen, needs=(tight,)), verbose=False)


def test_what_probably_does_not_fit_comes_first_with_a_way_on() -> None:
    plan = fabricated.plan(cell(), cell(precision="int4_wo"))
    first, second = (each.id for each in plan.cells)
    tight = Need("build", first, GPU, Estimate(23 << 30, 0.15), 24 << 30)
    needs = [
        Need("launch", each, GPU, Estimate(gib << 30, 0.15), 24 << 30) for each, gib in ((first, 25), (second, 27))
    ]
    seen = replace(forecast(plan, None), needs=(tight, *needs))
    text = plan_text(plan, seen, verbose=False)
    title = (
        "launch needs up to 27.0 GiB of GPU memory (±15%), 24.0 GiB available: probably does not fit; pipeline plan --fit "
        "looks for changes"
    )
    assert f"\n\n{title}\n  {first}\n  {second}\n\nbuild needs up to 23.0 GiB" in text
    assert text.splitlines()[0].endswith("; 2 cells too large")
    assert title.removeprefix("launch") in plan_markdown(plan, seen, "Plan")
    assert doubts(plan, seen) == [title, f"  {first}", f"  {second}"], "a run says no more than this"


def test_what_may_take_longer_than_its_limit_is_named_with_the_setting() -> None:
    plan = fabricated.plan(cell(), cell(precision="int4_wo"))
    seen = forecast(plan, None)
    launches = [run.id for run in plan.stage_runs.values() if run.stage.name == "launch"]
    times = {**seen.times, **{each: Estimate(550_000 + number, 0.3) for number, each in enumerate(launches)}}
    lines = plan_text(plan, replace(seen, times=times), verbose=False).splitlines()
    title = "launch may take 11:55, its time limit is 10:00: raise settings.serve.ready_timeout_s"
    place = lines.index(title)
    assert lines[place + 1 : place + 3] == [f"  {each.id}" for each in plan.cells]


def on_toolchains(*names: str) -> Plan:
    """A plan of cells whose ids do not name their toolchains."""
    cells = [trtllm_cells.cell(toolchain=name, batch=batch) for batch, name in enumerate(names, 1)]
    return trtllm_cells.plan(*(replace(each, id=CellId(f"model/bs{each.max_batch_size}")) for each in cells))


def test_cells_on_another_toolchain_than_the_others_are_named() -> None:
    mixed = on_toolchains(trtllm_cells.ENGINES, trtllm_cells.ENGINES, trtllm_cells.PYTORCH)
    lines = plan_text(mixed, forecast(mixed, None), verbose=False).splitlines()
    assert (
        "1 cell, bs3: on tensorrt_llm_pytorch instead of tensorrt_llm, because of the model, precision or parallelism; "
        "--toolchain tensorrt_llm shows why. Set axes.toolchain to compare cells on one toolchain" in lines
    )
    for name in (trtllm_cells.ENGINES, trtllm_cells.PYTORCH):
        alike = on_toolchains(name, name)
        assert "instead of tensorrt_llm" not in plan_text(alike, forecast(alike, None), verbose=False)


def test_loads_are_told_apart_by_the_toolchain() -> None:
    mixed = on_toolchains(*[trtllm_cells.ENGINES] * 2, *[trtllm_cells.PYTORCH] * 2)
    settings = trtllm_cells.settings_of({"perf.concurrency": [1]})
    cells = [replace(each, settings=settings) for each in mixed.cells]
    plan = trtllm_cells.plan(*cells)
    lines = plan_text(plan, forecast(plan, None), verbose=False).splitlines()
    loads = [line.partition(": ") for line in lines if line.startswith("load of ")]
    assert [head for head, _, _ in loads] == ["load of 2 cells, tensorrt_llm", "load of 2 cells, tensorrt_llm_pytorch"]


def test_sentences_are_wrapped_to_a_terminal_and_tables_are_not() -> None:
    table = "convert     host memory  33.5 GiB"
    long = "  qwen3-8b: 2 cells need more than the machine has"
    assert wrapped(f"{table}\n{long}\n", 36).splitlines() == [
        table,
        "  qwen3-8b: 2 cells need more than",
        "    the machine has",
    ]
    assert wrapped(long, None) == long


def test_every_stage_run_has_a_row_when_asked() -> None:
    text = plan_text(PLAN, forecast(PLAN, None), verbose=True)
    assert sum("host memory" in line for line in text.splitlines()) == 6
    assert str(PLAN.cells[1].id) in text
    assert "all         disk" in text
    assert "first cell, and why" in text
    assert "first cell, and why" not in plan_text(PLAN, forecast(PLAN, None), verbose=False)


def test_a_summary_has_the_table_too() -> None:
    text = plan_markdown(PLAN, forecast(PLAN, None), "Plan")
    (heads,) = (line for line in text.splitlines() if "| headroom |" in line)
    assert heads.endswith("| verdict | cell |")
    assert any(f"| {PLAN.cells[1].id} |" in line for line in text.replace("\\", "").splitlines())


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
    assert "1 cell works with fewer requests or rows at a time than configured, and no smaller batch" in text
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
