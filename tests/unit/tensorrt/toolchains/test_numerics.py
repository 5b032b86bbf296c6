"""What a precision means in a cell of each toolchain."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from tests.helpers.openai_cells import cell as of_server
from tests.helpers.trtllm_cells import ENGINES, PYTORCH
from tests.helpers.trtllm_cells import cell as of_trtllm
from tests.unit.show.report.test_comparison import cell as measured
from tests.unit.show.report.test_comparison import level
from trtllm_pipeline.base.domain import Cell
from trtllm_pipeline.orchestrate.plan.plan_file import about
from trtllm_pipeline.show.report.measured import Side
from trtllm_pipeline.show.report.recommendation import Goals, advise
from trtllm_pipeline.show.report.report_formats import Report
from trtllm_pipeline.show.report.writers import flat, mixed, to_markdown
from trtllm_pipeline.tensorrt.toolchains import catalog as toolchains

AT_LOAD = "quantized by the server when it loads, without calibration"


def of(cell: Cell) -> list[str]:
    return list(asdict(toolchains.load(cell.toolchain).numerics(cell)).values())


@pytest.mark.parametrize(
    ("cell", "means"),
    [
        (of_trtllm(precision="fp8"), ["fp8", "fp8", "fp8", "calibrated with Model Optimizer"]),
        (
            of_trtllm(precision="fp8", settings={"quantize.kv_cache_precision": "bf16"}, toolchain=PYTORCH),
            ["fp8", "fp8", "16-bit", "calibrated with Model Optimizer"],
        ),
        (
            of_trtllm(settings={"repository.llm_args": {"kv_cache_config": {"dtype": "fp8"}}}, toolchain=PYTORCH),
            ["fp16", "fp16", "fp8", "not quantized"],
        ),
        (of_trtllm(precision="int8_wo"), ["int8", "16-bit", "16-bit", "rounded to nearest, without calibration"]),
        (of_trtllm(precision="bf16"), ["bf16", "bf16", "bf16", "not quantized"]),
        (of_server("vllm", "fp8"), ["fp8", "fp8, scaled at run time", "16-bit", AT_LOAD]),
        (
            of_server("sglang", "fp8", openai__options={"kv-cache-dtype": "fp8_e5m2"}),
            ["fp8", "fp8, scaled at run time", "fp8_e5m2", AT_LOAD],
        ),
        (
            of_server("llama_cpp", "int8_wo"),
            ["GGUF Q8_0", "int8 blocks", "fp16", "rounded to nearest, without calibration"],
        ),
        (of_server("vllm", "bf16"), ["bf16", "bf16", "bf16", "not quantized"]),
        (
            of_server("openai", "fp8", openai__command="mine --port {port}"),
            ["fp8, as in the matrix", "not known", "not known", "not known"],
        ),
    ],
)
def test_what_a_precision_means(cell: Cell, means: list[str]) -> None:
    assert of(cell) == means


def test_published_weights_mean_what_their_form_says() -> None:
    cell = of_trtllm(precision="as_is", toolchain=ENGINES)
    form = replace(cell, recipe={**cell.recipe, "quantization": "awq"})
    assert of(form) == ["int4", "16-bit", "16-bit", "quantized by its publisher"]
    assert of(cell)[:2] == ["not known", "not known"]


def test_a_table_that_mixes_meanings_of_a_precision_says_so() -> None:
    made: list[Any] = [about(each)["numerics"] for each in (of_trtllm(precision="fp8"), of_server("vllm", "fp8"))]
    cells = [
        replace(measured("fp8", level()), id=f"m/{number}", numerics=numerics) for number, numerics in enumerate(made)
    ]
    ((text, number),) = mixed(cells)
    assert number == 2
    assert text.startswith(
        "fp8 is not the same in all cells: weights fp8, activations fp8, KV cache fp8, calibrated with"
    )
    assert AT_LOAD in text
    assert mixed(cells[:1]) == []
    shown = to_markdown(Report(rows=cells))
    assert text in shown
    assert f"precision fp8: weights fp8, activations fp8, scaled at run time, KV cache 16-bit, {AT_LOAD}" in shown
    assert [line["made"] for line in flat(cells)] == ["calibrated with Model Optimizer", AT_LOAD]
    advice = advise(Side("r", tuple(cells)), (), Goals("throughput"), {"system"})
    assert advice.to_json()["mixed_precisions"] == text
