"""Estimates of time beside what programs of TensorRT-LLM said of themselves in public, and what Model Optimizer took on an H200."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import trtllm_cells
from trtllm_pipeline.base.domain import Cell, CellId
from trtllm_pipeline.base.machine.assume import parse
from trtllm_pipeline.orchestrate.matrix.models import Settings
from trtllm_pipeline.orchestrate.matrix.recipe_files import load_recipe, recipes_folder
from trtllm_pipeline.tensorrt.toolchains import catalog as toolchains
from trtllm_pipeline.tensorrt.trtllm import durations

DATA = Path(__file__).parents[1] / "data" / "tensorrt_llm"
FIGURES: list[dict[str, Any]] = json.loads((DATA / "durations.json").read_text(encoding="utf-8"))["figures"]
CASES = [(figure, stage) for figure in FIGURES for stage in figure["said"]]
STARTING_S = 15.0
"""Python and TensorRT-LLM, which are in a stage's time and not in what the programs say."""


@pytest.mark.parametrize(
    ("figure", "stage"), CASES, ids=lambda case: case if isinstance(case, str) else case["release"]
)
def test_what_was_said_in_public_is_what_is_expected(figure: dict[str, Any], stage: str) -> None:
    model = figure["model"]
    recipe = (
        load_recipe(recipes_folder() / f"{model['recipe']}.yaml").model_dump()
        if "recipe" in model
        else model["numbers"]
    )
    toolchain = figure.get("toolchain", trtllm_cells.ENGINES)
    cell = dataclasses.replace(trtllm_cells.cell(figure["precision"], toolchain=toolchain), recipe=recipe)
    row = toolchains.load(cell.toolchain).stage(stage)
    assert row.takes is not None
    expected = row.expected_s + row.takes(cell, parse(f"tensorrt_llm=={figure['release']},sm=90,gpus=1"))
    if stage != "launch":
        expected -= STARTING_S
    assert 0.5 < expected / figure["said"][stage] < 2.1


RUNS: list[dict[str, Any]] = [
    run for run in json.loads((DATA / "quantizing.json").read_text(encoding="utf-8"))["runs"] if "seconds" in run
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['model']}-{run['run']}")
def test_quantizing_took_on_an_h200_what_is_expected(run: dict[str, Any]) -> None:
    """Measured by `benchmarks/needs.py`."""
    settings: dict[str, Any] = Settings().model_dump(mode="json")
    asked = {"samples": run["samples"], "max_length": run["max_length"]}
    settings["quantize"]["calibration"] |= asked
    cell = Cell(
        CellId("random"), "random", "tensorrt_llm_pytorch", run["precision"], 1, 1, 8, 1024, 128, run["shape"], settings
    )
    on = parse("tensorrt_llm==1.2.0,sm=90,gpus=1,gpu=NVIDIA H200,gpu_memory_gib=140.4")
    stage = toolchains.load(cell.toolchain).stage("quantize")
    expected = stage.expected_s + durations.quantizing(cell, on)
    assert expected == pytest.approx(run["seconds"], rel=0.25)
