"""What is beside a cell's own model counts: adapters, draft models, layers that draft, what reads images."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.trtllm_cells import PYTORCH, RECIPE, cell, machine
from trtllm_pipeline.base.domain import Cell
from trtllm_pipeline.orchestrate.matrix.recipe_files import load_recipe, recipe_document, recipes_folder
from trtllm_pipeline.tensorrt.toolchains import companions, vision
from trtllm_pipeline.tensorrt.toolchains.common_stages import DOWNLOAD
from trtllm_pipeline.tensorrt.toolchains.model_shape import Shape
from trtllm_pipeline.tensorrt.trtllm import needs
from trtllm_pipeline.tensorrt.trtllm.engine_backend import REPOSITORY

ADAPTER: dict[str, Any] = {"max_lora_rank": 8, "lora_target_modules": ["attn_q", "attn_v"]}


def asked(companion: str, found: dict[str, Any], settings: dict[str, Any]) -> Cell:
    return dataclasses.replace(cell(toolchain=PYTORCH, settings=settings), companions={companion: found})


def test_an_adapter_has_two_narrow_matrices_for_each_that_it_changes() -> None:
    wanted = asked(companions.ADAPTER, ADAPTER, {"lora.adapter": "some/adapter"})
    assert companions.weights_bytes(wanted, companions.ADAPTER) == 2 * 8 * 32 * ((4096 + 4096) + (4096 + 1024))
    plain = needs.serving(cell(toolchain=PYTORCH), machine())
    served = needs.serving(wanted, machine())
    assert served.gpu - plain.gpu == companions.weights_bytes(wanted, companions.ADAPTER)
    assert served.host - plain.host == 1 << 30, "a cache for adapters"


def test_an_eagle_head_is_as_large_as_the_one_that_is_published() -> None:
    """yuhuili/EAGLE3-LLaMA3.1-Instruct-8B has 425 million weights, for this very shape."""
    settings = {"speculative.method": "eagle3", "speculative.model": "some/head", "speculative.max_draft_len": 4}
    wanted = asked(companions.DRAFT, {"source": {"hugging_face": "some/head"}}, settings)
    assert companions.weights_bytes(wanted, companions.DRAFT) == pytest.approx(2 * 425e6, rel=0.01)
    assert companions.FETCH_DRAFT.needs(wanted, machine()).leaves == companions.weights_bytes(wanted, companions.DRAFT)
    assert companions.FETCH_DRAFT.takes(wanted, machine()) == pytest.approx(17, rel=0.01)
    weights, per_token = needs.drafting_bytes(wanted)
    assert weights == companions.weights_bytes(wanted, companions.DRAFT)
    assert per_token == 2 * 8 * 128 * 2, "the cache of one layer"


def test_a_draft_model_is_as_large_as_its_recipe_says() -> None:
    settings = {"speculative.method": "draft_target", "speculative.model": "llama-3.2-1b-instruct"}
    numbers = load_recipe(recipes_folder() / "llama-3.2-1b-instruct.yaml").model_dump(mode="json")
    wanted = asked(companions.DRAFT, {"source": {"hugging_face": "some/draft"}, "numbers": numbers}, settings)
    assert companions.weights_bytes(wanted, companions.DRAFT) == 2 * 1_235_814_400
    assert needs.drafting_bytes(wanted)[1] == 2 * 16 * 8 * 64 * 2


def test_layers_of_its_own_that_draft_are_as_large_as_the_others() -> None:
    drafting, _ = needs.drafting_bytes(cell("bf16", toolchain=PYTORCH, settings={"speculative.method": "mtp"}))
    assert drafting == pytest.approx(2 * 218_112_000, rel=0.01)


TOWERS = {
    # depth x (attention, MLP, norms) + patches + projection, of vision_config; in all as published beside the language model
    "qwen2.5-vl-7b-instruct": (8_292_166_656, 7_615_616_512),
    "gemma-3-27b-it": (27_432_406_640, 27_009_346_304),
    "llama-4-scout-17b-16e-instruct": (108_641_793_536, 107_769_861_120),
    "qwen2-vl-7b-instruct": (8_291_375_616, 7_615_616_512),
    "llava-v1.6-mistral-7b": (7_566_747_648, 7_242_256_384),
}


@pytest.mark.parametrize("name", TOWERS)
def test_what_reads_images_is_fetched_and_served(name: str) -> None:
    recipe = load_recipe(recipes_folder() / f"{name}.yaml").model_dump(mode="json")
    whole, language = TOWERS[name]
    shape = Shape.of(recipe)
    assert (shape.weights, shape.vision_parameters) == (language, whole - language)
    with_images = dataclasses.replace(cell("bf16", toolchain=PYTORCH), recipe=recipe)
    text_only = dataclasses.replace(with_images, recipe={**recipe, "vision_parameters": None})
    assert DOWNLOAD.needs(with_images, machine()).leaves == 2 * whole
    added = needs.serving(with_images, machine()).gpu - needs.serving(text_only, machine()).gpu
    assert added == 2 * (whole - language), "whole on each GPU"


def seeing(family: str, batch: int) -> Cell:
    return cell(batch=batch, recipe={"family": family, "vision_parameters": 600_000_000, "images": True})


@pytest.mark.parametrize(
    ("family", "activations"),
    # patches x 2 x (4 x width of the MLP + 7 x width), and the mask of all patches with all
    [
        ("llava_onevision", 4 * 37 * 729 * 2 * (4 * 4304 + 7 * 1152)),
        ("qwen2_vl", 4 * 5184 * 2 * (4 * 5120 + 7 * 1280) + 2 * (4 * 5184) ** 2),
    ],
)
def test_a_visual_engine_takes_memory_where_it_is_built_and_served(family: str, activations: int) -> None:
    wanted, text_only = seeing(family, 4), dataclasses.replace(cell(batch=4), recipe=RECIPE)
    tower = 1_200_000_000
    building = needs.building_visual(wanted, machine())
    assert (building.leaves, building.gpu) == (tower, 2 * tower + activations + needs.CONTEXT)
    assert building.host > 2 * 8_030_261_248 * (2 if family == "qwen2_vl" else 1), "the whole model is loaded"
    assert {"host", "gpu"} <= set(building.assumed), "nothing is refused for it"
    served, without = needs.served(wanted, machine()), needs.served(text_only, machine())
    seen = tower + activations + 300_000_000 + 2 * 4096 * 4 * 128
    assert served.fixed - without.fixed == seen
    more = needs.serving(seeing(family, 64), machine())
    assert more.error > 0.3, "most of it is what nobody measured"


def test_a_visual_engine_fits_into_what_the_cache_leaves() -> None:
    wanted = seeing("qwen2_vl", 4)
    parts, seen = needs.served(wanted, machine()), 1_200_000_000 + needs.visual_bytes(wanted)
    for share, asked in ((vision.SHARE, None), (0.9, 0.9), (1.0, 1.0)):
        settings = {**wanted.settings["repository"], "kv_cache_free_gpu_mem_fraction": asked}
        changed = dataclasses.replace(wanted, settings={**wanted.settings, "repository": settings})
        cache = parts.fixed + int(parts.kv_token * 4 * 192 / share)
        crowded = parts.fixed - seen + seen / (1 - share) if share < 1 else 0
        assert needs.serving(changed, machine()).gpu == pytest.approx(max(cache, crowded), abs=2)
        assert REPOSITORY.read(changed).kv_cache_free_gpu_mem_fraction == share


CLIP = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "hidden_act": "quick_gelu"}
QWEN2_VL = {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "hidden_act": "quick_gelu"}
QWEN25_VL = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "hidden_act": "silu", "out_hidden_size": 3584}


@pytest.mark.parametrize(
    ("vision_config", "recipe"),
    [(CLIP, "llava-v1.6-mistral-7b"), (QWEN2_VL, "qwen2-vl-7b-instruct"), (QWEN25_VL, "qwen2.5-vl-7b-instruct")],
)
def test_what_reads_images_of_a_local_folder_is_known_within_a_tenth(
    tmp_path: Path, vision_config: dict[str, Any], recipe: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_vl", "vision_config": vision_config}))
    made = recipe_document("./.", tmp_path / "matrix.yaml", offline=True)[0].data
    known = load_recipe(recipes_folder() / f"{recipe}.yaml").vision_parameters
    assert isinstance(made, dict)
    assert 0.9 * known < made["vision_parameters"] < known


@pytest.mark.parametrize(
    "vision_config",
    [{}, None, {**CLIP, "hidden_size": "wide"}, {"depth": 32, "hidden_size": 8}, {**CLIP, "num_hidden_layers": -1}],
)
def test_a_vision_config_of_another_form_says_nothing(tmp_path: Path, vision_config: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", "vision_config": vision_config}))
    made = recipe_document("./.", tmp_path / "matrix.yaml", offline=True)[0].data
    assert isinstance(made, dict)
    assert (made["images"], made["vision_parameters"]) == (True, None)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (1, 3)])
def test_ranks_have_at_least_their_part_of_the_weights(tp: int, pp: int) -> None:
    shape = Shape.of(dict(RECIPE))
    rank = needs.rank_bytes(shape, "bf16", tp, pp)
    whole = needs.rank_bytes(shape, "bf16", 1, 1)
    assert whole == 2 * shape.weights
    assert whole / (tp * pp) <= rank < 1.25 * whole / (tp * pp)


def test_more_gpus_than_kv_heads_hold_copies() -> None:
    shape = Shape.of({**RECIPE, "num_key_value_heads": 4, "parameters": 7_900_000_000})
    even = needs.rank_bytes(shape, "bf16", 4, 1) / 2
    assert needs.rank_bytes(shape, "bf16", 8, 1) - even == pytest.approx(2 * 2 * 32 * 4096 * 128 / 2, rel=0.01)
