"""Without a toolchain axis, a cell runs on engines, or on PyTorch if the release makes no engine in its precision or layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from trtllm_pipeline.base.domain import Cell
from trtllm_pipeline.base.machine.assume import parse
from trtllm_pipeline.orchestrate.plan import planner
from trtllm_pipeline.orchestrate.plan.planner import Request

AXES: dict[str, Any] = {"parallel": ["tp1"], "max_batch_size": [8], "lengths": ["1024,256"]}
ENGINES, PYTORCH = "tensorrt_llm", "tensorrt_llm_pytorch"
CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "eos_token_id": 151645,
}


def cells(folder: Path, release: str, axes: Mapping[str, Any], sm: int = 90, **more: Any) -> tuple[Cell, ...]:
    path = folder / "matrix.yaml"
    path.write_text(yaml.safe_dump({"name": "auto", "axes": {**AXES, **axes}, **more}), encoding="utf-8")
    request = Request(path)
    machine = parse(f"tensorrt_llm=={release},sm={sm},gpus=16,gpu_memory_gib=640")
    return planner.select_cells(request, planner.load(request), machine)


@pytest.mark.parametrize(
    ("release", "model", "precision", "parallel", "sm", "toolchain"),
    [
        ("1.2.0", "qwen2-72b-instruct", "int4_awq", "tp1", 90, ENGINES),
        ("1.2.0", "qwen2-72b-instruct", "w4a8_awq", "tp1", 90, PYTORCH),  # the recipe has it for PyTorch alone
        ("0.16.0", "qwen2-72b-instruct", "w4a8_awq", "tp1", 90, ENGINES),  # PyTorch is for use since 1.0
        ("1.2.0", "qwen2-72b-instruct", "int4_awq", "tp4", 90, ENGINES),  # neither has it
        ("1.2.0", "llama-3.1-8b-instruct", "bf16", "tp1pp4", 90, ENGINES),
        ("1.2.0", "llama-3.1-8b-instruct", "bf16", "tp1pp3", 90, PYTORCH),  # 32 layers in three stages
        ("1.2.0", "deepseek-v3", "as_is", "tp8pp2", 90, PYTORCH),
        ("1.2.0", "llama-3.1-8b-instruct-fp8", "as_is", "tp1", 90, ENGINES),
        ("1.2.0", "llama-3.1-8b-instruct-fp4", "as_is", "tp1", 100, PYTORCH),  # no script converts its files
        ("1.3.0rc20", "llama-3.1-8b-instruct", "nvfp4", "tp1", 90, PYTORCH),  # Marlin, on PyTorch alone
        ("1.3.0rc20", "llama-3.1-8b-instruct", "nvfp4", "tp1", 100, ENGINES),
    ],
)
def test_precision_and_layout_decide(
    tmp_path: Path, release: str, model: str, precision: str, parallel: str, sm: int, toolchain: str
) -> None:
    axes = {"model": [model], "precision": [precision], "parallel": [parallel]}
    for named in ({}, {"toolchain": ["auto"]}):
        (cell,) = cells(tmp_path, release, {**axes, **named}, sm)
        assert cell.toolchain == toolchain
        assert (cell.id.split("/")[-1] == toolchain) is bool(named)


@pytest.mark.parametrize(
    ("quantization", "toolchain"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, PYTORCH),  # no script converts its files
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, ENGINES),  # PyTorch does not read it
    ],
)
def test_the_weights_in_a_directory_decide(tmp_path: Path, quantization: Mapping[str, Any], toolchain: str) -> None:
    config = {**CONFIG, "quantization_config": quantization}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (cell,) = cells(tmp_path, "1.2.0", {"model": ["./mine"], "precision": ["as_is"]})
    assert (cell.toolchain, cell.reason) == (toolchain, None)


def test_cells_of_one_model_may_differ(tmp_path: Path) -> None:
    axes = {"model": ["llama-3.1-8b-instruct"], "precision": ["bf16", "int8_sq"], "parallel": ["tp1", "tp1pp3"]}
    found = {(cell.precision, cell.pp): cell.toolchain for cell in cells(tmp_path, "1.2.0", axes)}
    assert found == {
        ("bf16", 1): ENGINES,
        ("bf16", 3): PYTORCH,
        ("int8_sq", 1): ENGINES,
        ("int8_sq", 3): ENGINES,  # which PyTorch does not have either
    }


@pytest.mark.parametrize(
    ("release", "sm", "precision", "said"),
    [
        ("1.2.0", 100, "int4_awq", "the PyTorch backend supports it on SM 100 from 1.2.1 on, this is 1.2.0"),
        ("1.2.0", 90, "nvfp4", "precision nvfp4 needs SM 100 or newer before TensorRT-LLM 1.3.0rc20, this is SM 90"),
    ],
)
def test_what_only_pytorch_has_is_refused_with_its_reason(
    tmp_path: Path, release: str, sm: int, precision: str, said: str
) -> None:
    (cell,) = cells(tmp_path, release, {"model": ["qwen3-8b"], "precision": [precision]}, sm)
    assert said in str(cell.reason)


def test_a_family_without_engines_comes_before_its_parallelism(tmp_path: Path) -> None:
    axes = {"model": ["deepseek-v3"], "precision": ["as_is"], "parallel": ["tp4pp2"]}
    (cell,) = cells(tmp_path, "1.2.0", axes, toolchain=ENGINES)
    assert "family deepseek_v3: no known script" in str(cell.reason)


def test_a_precision_that_only_engines_have_is_said_where_there_are_none(tmp_path: Path) -> None:
    axes = {"model": ["llama-3.1-8b-instruct"], "precision": ["int8_wo"]}
    (cell,) = cells(tmp_path, "1.4.0rc0", axes)
    assert "not int8_wo; it lists int8_wo for tensorrt_llm, which needs a release up to 1.3.0rc20" in str(cell.reason)


def test_a_toolchain_that_is_named_stays(tmp_path: Path) -> None:
    axes = {"model": ["llama-3.1-8b-instruct"], "precision": ["bf16"], "parallel": ["tp1pp3"]}
    (cell,) = cells(tmp_path, "1.2.0", axes, toolchain=ENGINES)
    assert cell.toolchain == ENGINES
    assert cell.reason == "pp3: 32 layers cannot be split evenly into 3 stages; use another tp and pp"


def test_a_mistake_in_settings_changes_no_toolchain(tmp_path: Path) -> None:
    axes = {"model": ["llama-3.1-8b-instruct"], "precision": ["bf16"]}
    (cell,) = cells(tmp_path, "1.2.0", axes, settings={"repository": {"max_beam_width": 4}})
    assert cell.toolchain == ENGINES
