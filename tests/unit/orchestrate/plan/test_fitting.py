"""The smallest change with which a cell fits into a machine's memory, by what it costs the user."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.helpers import openai_cells, trtllm_cells
from trtllm_pipeline.base.domain import Cell, CellId, Json
from trtllm_pipeline.base.machine.assume import parse
from trtllm_pipeline.base.machine.model import Machine
from trtllm_pipeline.base.text_blocks import as_markdown
from trtllm_pipeline.orchestrate.memory import estimates, fitting
from trtllm_pipeline.orchestrate.plan import planner
from trtllm_pipeline.orchestrate.plan.planner import Request
from trtllm_pipeline.orchestrate.results import fits
from trtllm_pipeline.orchestrate.results.fits import Fits
from trtllm_pipeline.tensorrt.toolchains import catalog as toolchains

MACHINES = {
    "H100": "sm=90,gpus=8,gpu_memory_gib=80,memory_gib=1024",
    "one H100": "sm=90,gpus=1,gpu_memory_gib=80,memory_gib=256",
    "L40S": "sm=89,gpus=4,gpu_memory_gib=48,memory_gib=512",
    "A10": "sm=86,gpus=4,gpu_memory_gib=24,memory_gib=192",
    "one A10": "sm=86,gpus=1,gpu_memory_gib=24,memory_gib=64",
    "T4": "sm=75,gpus=2,gpu_memory_gib=16,memory_gib=64",
}


def llama(batch: int = 8, *, tp: int = 1) -> Cell:
    return trtllm_cells.cell("fp16", tp=tp, batch=batch, osl=1408)


def gpus(number: int, gib: float) -> Machine:
    return parse(f"tensorrt_llm==1.0.0,sm=90,gpus={number},gpu_memory_gib={gib}")


def with_setting(cell: Cell, section: str, **values: Json) -> Cell:
    return dataclasses.replace(cell, settings={**cell.settings, section: {**cell.settings[section], **values}})


def fitted(cell: Cell, machine: Machine) -> tuple[str, ...] | None:
    def wrong(changed: Cell) -> bool:
        toolchain = toolchains.load(changed.toolchain)
        lacks = estimates.lacking(changed, toolchain.stages, machine, estimates.Corrections((), machine))
        return lacks is not None or toolchain.infeasible(changed, machine) is not None

    assert wrong(cell)
    found = fitting.fit(cell, machine, wrong)
    assert found is None or not wrong(found[1])
    return None if found is None else found[0]


def test_gpus_that_are_there_cost_less_than_a_smaller_batch() -> None:
    assert fitted(llama(64), gpus(4, 24)) == ("axes.parallel=[tp2pp1]",)
    alone = fitted(llama(64), gpus(1, 24))
    assert alone[0] == "axes.max_batch_size=[32]"


def test_a_share_of_the_cache_costs_nothing() -> None:
    low = with_setting(llama(16), "repository", kv_cache_free_gpu_mem_fraction=0.3)
    assert fitted(low, gpus(4, 24)) == ("settings.repository.kv_cache_free_gpu_mem_fraction=0.95",)


def test_other_servers_are_given_no_settings_that_they_do_not_read() -> None:
    large = openai_cells.cell("vllm", recipe={**trtllm_cells.RECIPE, "parameters": 50_000_000_000})
    assert fitted(large, gpus(2, 80)) == ("axes.parallel=[tp2pp1]",)


def test_a_smaller_share_of_the_cache_makes_room_for_a_visual_engine() -> None:
    recipe = {"family": "qwen2_vl", "vision_parameters": 675_759_104, "images": True, "vocab_size": 152064}
    seeing = dataclasses.replace(trtllm_cells.cell("fp16", batch=4, recipe=recipe), isl=2048)
    assert fitted(seeing, gpus(1, 26)) == ("settings.repository.kv_cache_free_gpu_mem_fraction=0.4",)
    asked = with_setting(seeing, "repository", kv_cache_free_gpu_mem_fraction=0.3)
    assert fitted(asked, gpus(1, 20)) == ("axes.max_batch_size=[1]",), "no share is smaller than what was asked for"


def test_the_batch_is_halved_no_further_than_is_enough_with_all_gpus() -> None:
    found = fitted(llama(256), gpus(2, 24))
    assert found[:2] == ("axes.max_batch_size=[128]", "axes.parallel=[tp2pp1]")


def test_fewer_tokens_at_a_time_cost_less_than_a_smaller_batch() -> None:
    assert fitted(llama(8), gpus(1, 18.3)) == ("settings.build.max_num_tokens=4096",)


def test_nothing_is_proposed_where_nothing_helps() -> None:
    assert fitted(llama(2), gpus(4, 1)) is None


def test_the_largest_batch_is_proposed_where_a_cell_works_on_less(tmp_path: Path) -> None:
    axes = "model: [qwen3-8b], precision: [bf16], max_batch_size: [256], lengths: ['32768,1024']"
    for gpus, proposal in (
        (1, ("axes.max_batch_size=[16]",)),
        (8, ("axes.max_batch_size=[128]", "axes.parallel=[tp8pp1]")),
    ):
        (fit,) = proposed(tmp_path, axes, f"tensorrt_llm==1.2.0,gpu=H200,sm=90,gpus={gpus},gpu_memory_gib=140").fits
        assert (fit.works, fit.proposal) == (True, proposal)


def test_a_layout_that_the_model_cannot_be_divided_over_is_passed_over() -> None:
    heads = {**llama().recipe, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 128}
    cell = dataclasses.replace(llama(64), recipe=heads)
    assert fitted(cell, gpus(8, 10)) == ("axes.parallel=[tp2pp2]",), "6 heads cannot be divided over tp4"


def test_a_layout_keeps_what_the_cell_has_of_others() -> None:
    cell = dataclasses.replace(llama(2), tp=2, pp=2, ep=2)
    assert [change.setting for change in fitting._layouts(cell, gpus(8, 13))] == [
        "axes.parallel=[tp4pp2ep2]",
        "axes.parallel=[tp2pp4ep2]",
    ]


def test_rows_calibrated_at_a_time_are_halved() -> None:
    cell = with_setting(llama(), "quantize", batch_size=5)
    assert [change.setting for change in fitting._rows(cell)] == [
        "settings.quantize.batch_size=2",
        "settings.quantize.batch_size=1",
    ]


def test_cells_of_another_toolchain_than_the_usual_one_are_looked_at_too(tmp_path: Path) -> None:
    """No script converts glm4_moe: without a toolchain in the matrix, it runs on PyTorch."""
    axes = "model: [glm-4.5-air], precision: [bf16], max_batch_size: [8], lengths: ['128,32']"
    found = proposed(tmp_path, axes, "tensorrt_llm==1.2.0,sm=90,gpus=8,gpu_memory_gib=80")
    assert [each.proposal for each in found.fits] == [("axes.parallel=[tp4pp1]",)]


def proposed(folder: Path, axes: str, machine: str, *sets: str, cells: tuple[CellId, ...] = ()) -> Fits:
    matrix = folder / "matrix.yaml"
    matrix.write_text(f"name: other\naxes: {{{axes}}}\n", encoding="utf-8")
    return fits.fits_of(Request(matrix, assume=machine, sets=sets, cells=cells), None)


def test_an_added_cell_is_changed_where_it_is_added(tmp_path: Path) -> None:
    """`--set` changes axes, and an added cell is on none."""
    axes = "model: [llama-2-7b-chat], precision: [fp16], max_batch_size: [8], lengths: ['1024,512']"
    added = "model: qwen2-72b-instruct, precision: fp16, parallel: tp1, max_batch_size: 64, lengths: '1024,512'"
    found = proposed(tmp_path, f"{axes}}}\nadd: [{{{added}}}]\nsettings: {{", "tensorrt_llm==1.0.0,sm=90,gpus=2")
    (fit,) = found.fits
    assert (fit.added, fit.works) == (True, False)
    assert fit.proposal is not None
    text = as_markdown(found.blocks())
    assert "n \\`add\\` of the matrix: max_batch_size: 32, parallel: tp2pp1**" in text
    assert "`--set settings.build.max_num_tokens=4096 --cells qwen2-72b-instruct/fp16/tp2pp1/bs32/" in text


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("toolchain", ["tensorrt_llm", "tensorrt_llm_pytorch"])
def test_what_is_proposed_fits_when_it_is_pasted(machine: str, toolchain: str, tmp_path: Path) -> None:
    models = ["llama-3.1-8b-instruct", "qwen2-72b-instruct", "qwen2.5-0.5b-instruct", "mixtral-8x7b-instruct-v0.1"]
    axes = (
        f"model: [{', '.join(models)}], precision: [fp16, fp8, int4_awq], max_batch_size: [8, 256], "
        f"lengths: ['1024,512'], toolchain: [{toolchain}]"
    )
    assume = f"tensorrt_llm==1.0.0,{machine}"
    found = proposed(tmp_path, axes, assume)
    assert found.fits
    for fit in found.fits:
        if fit.proposal is not None:
            pasted = proposed(tmp_path, axes, assume, *fit.proposal, cells=(fit.changed_id,))
            assert (pasted.cells, pasted.fits) == (1, ()), fit.proposal


def test_what_a_draft_model_takes_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    matrix = tmp_path / "drafted.yaml"
    matrix.write_text(
        "name: drafted\n"
        "axes: {model: [llama-3.1-8b-instruct], precision: [fp16], max_batch_size: [1], lengths: ['1024,256']}\n"
        "settings:\n"
        "  speculative: {method: draft, model: llama-3.1-8b-instruct}\n"
        "  repository: {decoupled: false, enable_kv_cache_reuse: true}\n"
    )

    def asked(gib: int) -> Request:
        machine = f"tensorrt_llm==1.0.0,sm=90,gpus=1,gpu_memory_gib={gib},memory_gib=256"
        return Request(matrix, assume=machine, toolchain="tensorrt_llm")

    (reason,) = (cell.reason for cell in planner.plan_of(asked(24), None, guess=True).cells)
    assert "of memory on each GPU, 24.0 GiB available" in reason
    (lacking,) = fits.fits_of(asked(24), None).fits
    assert lacking.proposal is None, "the one fits, both do not"
    assert planner.plan_of(asked(80), None, guess=True).feasible
    assert fits.fits_of(asked(80), None).fits == ()


TOO_LARGE = "model: [llama-3.1-8b-instruct], max_batch_size: [8], lengths: ['8192,1024'], toolchain: [tensorrt_llm]"
TWO_GPUS = "tensorrt_llm==1.0.0,sm=90,gpus=2,gpu_memory_gib=20,memory_gib=64"


@pytest.mark.parametrize(
    "more",
    [
        "",
        "}\nadd: [{model: qwen2-7b, precision: fp16, max_batch_size: 8, lengths: '8192,1024', toolchain: tensorrt_llm, settings.build.max_num_tokens: 65536}]\nsettings: {",
    ],
)
def test_a_setting_that_is_an_axis_is_changed_as_one(more: str, tmp_path: Path) -> None:
    axes = f"{TOO_LARGE}, precision: [fp16], settings.build.max_num_tokens: [65536]{more}"
    found = proposed(tmp_path, axes, TWO_GPUS)
    change = ("axes.parallel=[tp2pp1]", "axes.settings.build.max_num_tokens=[32768]")
    fit, *others = found.fits
    assert (fit.proposal, fit.added) == (change, False)
    assert fit.changed_id == "llama-3.1-8b-instruct/fp16/tp2pp1/bs8/isl8192-osl1024/tensorrt_llm/max_num_tokens=32768"
    assert not proposed(tmp_path, axes, TWO_GPUS, *change, cells=(fit.changed_id,)).fits
    for added in others:
        assert (added.added, added.changed_id.startswith("qwen2-7b/fp16/tp2pp1")) == (True, True)
        text = as_markdown(found.blocks())
        assert "n \\`add\\` of the matrix: parallel: tp2pp1, settings.build.max_num_tokens: 32768**" in text


def test_a_layout_that_the_matrix_excludes_is_passed_over(tmp_path: Path) -> None:
    axes = f"{TOO_LARGE}, precision: [fp16], parallel: [tp1, tp2]}}\nexclude: [{{precision: fp16, parallel: tp2}}]\n"
    found = proposed(tmp_path, f"{axes}settings: {{build: {{max_num_tokens: 65536}}", TWO_GPUS)
    (fit,) = found.fits
    assert not any("tp2" in each for each in fit.proposal), fit.proposal
    assert not fit.added


def test_a_change_for_selected_cells_names_them(tmp_path: Path) -> None:
    axes = f"{TOO_LARGE}, precision: [fp16, bf16], settings.build.max_num_tokens: [65536]"
    found = proposed(tmp_path, axes, TWO_GPUS, cells=(CellId("*/fp16/*"),))
    (fit,) = found.fits
    assert f"--cells {fit.changed_id}" in as_markdown(found.blocks()), "the others of the matrix stay as they are"


def test_what_cannot_work_for_another_reason_is_not_said_to_have_enough(tmp_path: Path) -> None:
    axes = "model: [llama-3.1-8b-instruct], precision: [fp16], max_batch_size: [8], lengths: ['8192,1024'], parallel: [tp4]"
    assert proposed(tmp_path, axes, TWO_GPUS).cells == 0
