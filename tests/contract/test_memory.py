"""Estimates of memory beside what programs of TensorRT-LLM said of themselves in public, and what Model Optimizer took.

`tests/data/tensorrt_llm/memory.json` has the figures with their sources; `docs/memory.md` shows them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trtllm_pipeline.config.recipes import load_recipe, recipes_folder
from trtllm_pipeline.domain import CellId
from trtllm_pipeline.machine.assume import parse
from trtllm_pipeline.toolchains.tensorrt_llm import needs
from trtllm_pipeline.toolchains.tensorrt_llm.memory import Shape, kv_bytes_per_token, kv_element_bytes

FILE = Path(__file__).parents[1] / "data" / "tensorrt_llm" / "memory.json"
FIGURES: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))["figures"]
WITHIN = {"engine": 0.03, "kv_token": 0.01, "build_gpu": 0.05, "build_host": 0.15, "logits": 0.05}
"""Share by which an estimate may be off. Of activations see below: nobody knows what TensorRT makes of a graph."""
CASES = [(figure, quantity) for figure in FIGURES for quantity in figure["said"]]


def name(case: tuple[dict[str, Any], str]) -> str:
    return f"{case[0]['source'].rstrip('/').rpartition('/')[2]}-{case[0]['precision']}-{case[1]}"


def expected(figure: dict[str, Any], quantity: str) -> float:
    model, precision = figure["model"], figure["precision"]
    recipe = (
        load_recipe(recipes_folder() / f"{model['recipe']}.yaml").model_dump()
        if "recipe" in model
        else model["numbers"]
    )
    shape = Shape.of(recipe)
    engine = needs.engine_bytes(shape, precision, 1, 1)
    if quantity == "kv_token":
        return kv_bytes_per_token(shape, kv_element_bytes(precision, "fp8" if precision == "fp8" else None), 1, 1)
    if quantity == "activations":
        return needs.activation_bytes(shape, figure["max_num_tokens"], 1)
    if quantity == "logits":
        return needs.logits_bytes(figure["max_batch_size"], shape, engines=True)
    return {"engine": engine, "build_gpu": engine, "build_host": needs.build_host_bytes(engine)}[quantity]


@pytest.mark.parametrize(("figure", "quantity"), CASES, ids=map(name, CASES))
def test_what_was_said_in_public_is_what_is_expected(figure: dict[str, Any], quantity: str) -> None:
    ratio = expected(figure, quantity) / figure["said"][quantity]
    if quantity == "activations":
        assert 1 / 2 < ratio < 2
    else:
        assert ratio == pytest.approx(1, abs=WITHIN[quantity])


def test_every_figure_has_its_source_and_release() -> None:
    for figure in FIGURES:
        assert figure["source"].startswith("https://github.com/")
        assert figure["release"]
        assert figure["said"]


MIXTURES: list[dict[str, Any]] = json.loads((FILE.parent / "mixtures.json").read_text(encoding="utf-8"))["models"]


@pytest.mark.parametrize("model", MIXTURES, ids=lambda model: model["model"])
def test_a_mixture_has_the_weights_that_its_makers_publish(model: dict[str, Any]) -> None:
    shape = Shape.of(model["numbers"])
    assert shape.weights / 1e9 == pytest.approx(model["weights"], rel=0.012)
    embedding = shape.vocab_size * shape.hidden_size / 1e9
    for_a_token = shape.computed_weights / 1e9
    assert for_a_token == pytest.approx(model["for_a_token"], rel=0.02) or for_a_token + embedding == pytest.approx(
        model["for_a_token"], rel=0.02
    ), "some count the embedding"


MEASURED: list[dict[str, Any]] = json.loads((FILE.parent / "quantizing.json").read_text(encoding="utf-8"))["runs"]


@pytest.mark.parametrize("run", MEASURED, ids=lambda run: f"{run['model']}-{run['run']}")
def test_quantizing_took_on_an_h200_what_is_expected(run: dict[str, Any]) -> None:
    """Measured by `benchmarks/needs.py`."""
    from trtllm_pipeline.config.models import Settings
    from trtllm_pipeline.domain import Cell

    settings: dict[str, Any] = Settings().model_dump(mode="json")
    asked = {"samples": run["samples"], "max_length": run["max_length"]}
    settings["quantize"] |= {
        "batch_size": run["batch_size"],
        "calibration": settings["quantize"]["calibration"] | asked,
    }
    cell = Cell(
        CellId("random"), "random", "tensorrt_llm_pytorch", run["precision"], 1, 1, 8, 1024, 128, run["shape"], settings
    )
    on = parse("tensorrt_llm==1.2.0,sm=90,gpus=2,gpu=NVIDIA H200,gpu_memory_gib=140.4")
    told = needs.quantizing_on(cell, on, run.get("gpus", 1))
    assert told.gpu == pytest.approx(run["gpu_bytes"], rel=0.15)
    assert told.host == pytest.approx(run["host_bytes"], rel=0.15)
    assert told.leaves == pytest.approx(run["artifact_bytes"], rel=0.05)
