"""Plans for the models that came after engines' best days, on both backends, at the first release that has each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import yaml

from tests.helpers.trtllm_cells import ENGINES, PYTORCH, cell, infeasible
from trtllm_pipeline.orchestrate.matrix.recipe_files import load_recipe, recipes_folder
from trtllm_pipeline.orchestrate.matrix.validate import load_matrix
from trtllm_pipeline.orchestrate.plan import planner
from trtllm_pipeline.orchestrate.plan.plan import Plan
from trtllm_pipeline.orchestrate.plan.planner import Request
from trtllm_pipeline.orchestrate.run.run_folder import write_lock


class First(NamedTuple):
    """The first release that has a recipe's model on a backend, one before it, and a GPU for it."""

    recipe: str
    lane: str
    precision: str
    release: str
    before: str
    sm: int = 90


HAVE: Final = [
    First("llama-3.1-8b-instruct-fp8", ENGINES, "as_is", "0.13.0", "0.12.0", 89),
    First("llama-3.1-8b-instruct-fp8", PYTORCH, "as_is", "1.0.0", "0.21.0", 89),
    First("llama-3.1-8b-instruct-fp4", PYTORCH, "as_is", "1.0.0", "0.21.0", 100),
    First("llama-3.1-70b-instruct-fp8", ENGINES, "as_is", "0.13.0", "0.12.0"),
    First("llama-3.1-70b-instruct-fp8", PYTORCH, "as_is", "1.0.0", "0.21.0"),
    First("qwen2.5-7b-instruct-awq", ENGINES, "as_is", "0.16.0", "0.15.0", 80),
    First("qwen2.5-7b-instruct-gptq", ENGINES, "as_is", "0.17.0", "0.16.0", 80),
    First("gpt-oss-20b", PYTORCH, "as_is", "1.1.0", "1.0.0"),
    First("gpt-oss-120b", PYTORCH, "as_is", "1.1.0", "1.0.0", 120),
    First("deepseek-v3", PYTORCH, "as_is", "1.0.0", "0.21.0", 100),
    First("qwen3-30b-a3b", ENGINES, "bf16", "0.20.0", "0.19.0"),
    First("qwen3-30b-a3b", PYTORCH, "bf16", "1.0.0", "0.21.0"),
    First("qwen3-30b-a3b", PYTORCH, "fp8", "1.0.0", "0.21.0", 89),
    First("qwen3-30b-a3b", PYTORCH, "nvfp4", "1.0.0", "0.21.0", 100),
    First("gemma-3-1b-it", PYTORCH, "bf16", "1.0.0", "0.21.0"),
    First("gemma-3-27b-it", PYTORCH, "bf16", "1.0.0", "0.21.0"),
    First("gemma-3-1b-it", PYTORCH, "fp8", "1.0.0", "0.21.0", 89),
    First("gemma-3-27b-it", PYTORCH, "fp8", "1.0.0", "0.21.0"),
    First("gemma-3-27b-it", PYTORCH, "nvfp4", "1.0.0", "0.21.0", 100),
    First("qwen2.5-vl-7b-instruct", PYTORCH, "fp8", "1.0.0", "0.21.0", 89),
    First("qwen2.5-vl-7b-instruct", PYTORCH, "nvfp4", "1.0.0", "0.21.0", 100),
    First("llama-4-scout-17b-16e-instruct", PYTORCH, "bf16", "1.0.0", "0.21.0"),
    First("llama-4-scout-17b-16e-instruct", PYTORCH, "fp8", "1.0.0", "0.21.0", 89),
    First("llama-4-scout-17b-16e-instruct", PYTORCH, "nvfp4", "1.0.0", "0.21.0", 100),
    First("llama-3.1-nemotron-nano-8b", ENGINES, "fp8", "0.12.0", "0.11.0"),
    First("llama-3.1-nemotron-nano-8b", PYTORCH, "fp8", "1.0.0", "0.21.0"),
    First("phi-4-mini-instruct", ENGINES, "bf16", "0.19.0", "0.18.2"),
    First("phi-4-mini-instruct", PYTORCH, "bf16", "1.1.0", "1.0.0"),
    First("qwen2.5-vl-7b-instruct", PYTORCH, "bf16", "1.0.0", "0.21.0"),
    First("qwen2-vl-7b-instruct", PYTORCH, "bf16", "1.0.0", "0.21.0"),
    First("qwen2-vl-7b-instruct", ENGINES, "fp16", "0.19.0", "0.18.2"),
    First("llava-onevision-qwen2-7b", ENGINES, "fp16", "0.16.0", "0.15.0"),
    First("llava-v1.6-mistral-7b", PYTORCH, "bf16", "1.0.0", "0.21.0"),
    First("glm-4.5-air", PYTORCH, "bf16", "1.2.0", "1.1.0"),
    First("deepseek-v3.2", PYTORCH, "as_is", "1.2.1", "1.2.0"),
    First("glm-5-fp8", PYTORCH, "as_is", "1.3.0rc20", "1.2.1", 100),
    First("kimi-k2-instruct", PYTORCH, "as_is", "1.3.0rc20", "1.2.1", 100),
    First("qwen3.5-397b-a17b", PYTORCH, "bf16", "1.3.0rc20", "1.2.1"),
    First("nemotron-3-nano-30b-a3b", PYTORCH, "bf16", "1.2.1", "1.2.0"),
    First("glm-4-9b-chat", ENGINES, "bf16", "0.12.0", "0.11.0", 80),
    First("internlm2.5-7b-chat", ENGINES, "bf16", "0.11.0", "0.10.0", 80),
]
LARGE: Final = frozenset(
    (
        *("deepseek-v3", "deepseek-v3.2", "glm-4.5-air", "glm-5-fp8", "kimi-k2-instruct"),
        *("llama-4-scout-17b-16e-instruct", "qwen3.5-397b-a17b"),
    )
)
BRING_CODE: Final = ("glm-4-9b-chat", "internlm2.5-7b-chat")
_OF = {lane: {each.recipe for each in HAVE if each.lane == lane} for lane in (ENGINES, PYTORCH)}
LATER: Final = {each.recipe for each in HAVE if each.release in ("1.2.1", "1.3.0rc20")}
"""Models that came after 1.2.0, the release at which the others are planned."""
ONLY_PYTORCH: Final = sorted(_OF[PYTORCH] - _OF[ENGINES])


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HF_ENDPOINT", "MODELSCOPE_ENDPOINT"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")


def plan(tmp_path: Path, models: list[str], precision: str, release: str, sm: int, lane: str | None = None) -> Plan:
    axes: dict[str, Any] = {"model": models, "precision": [precision], "max_batch_size": [4], "lengths": ["2048,512"]}
    # Of a mixture that one GPU does not hold, eight have a share.
    axes["parallel"] = ["tp8" if LARGE & {*models} else "tp1"]
    if lane is not None:
        axes["toolchain"] = [lane]
    matrix = {"name": "matrix", "axes": axes}
    if trusted := {model: {"modeling.py": "0" * 64} for model in BRING_CODE if model in models}:
        matrix["settings"] = {"download": {"trust_remote_code": trusted}}
    (tmp_path / "matrix.yaml").write_text(yaml.safe_dump(matrix))
    machine = f"tensorrt_llm=={release},sm={sm},gpus=8,gpu_memory_gib=141"
    return planner.plan_of(Request(tmp_path / "matrix.yaml", assume=machine), None, guess=True)


@pytest.mark.parametrize("has", HAVE, ids=lambda has: f"{has.recipe}-{has.lane}")
def test_the_first_release_has_it_and_the_one_before_has_not(tmp_path: Path, has: First) -> None:
    (planned,) = plan(tmp_path, [has.recipe], has.precision, has.release, has.sm, has.lane).cells
    assert planned.reason is None
    (planned,) = plan(tmp_path, [has.recipe], has.precision, has.before, has.sm, has.lane).cells
    assert planned.reason is not None


@pytest.mark.parametrize("recipe", BRING_CODE)
def test_pytorch_says_why_it_does_not_have_it(tmp_path: Path, recipe: str) -> None:
    (planned,) = plan(tmp_path, [recipe], "bf16", "1.2.0", 90, PYTORCH).cells
    assert planned.reason == f"{PYTORCH} does not have {recipe}: its recipe lists no precision for it"


@pytest.mark.parametrize("recipe", ONLY_PYTORCH)
def test_engines_say_why_they_do_not_have_it(tmp_path: Path, recipe: str) -> None:
    precision = "as_is" if load_recipe(recipes_folder() / f"{recipe}.yaml").quantization else "bf16"
    (planned,) = plan(tmp_path, [recipe], precision, "1.2.0", 100, ENGINES).cells
    said = (
        "does not support its images in any release"
        if "llava" in recipe
        else "no known script of TensorRT-LLM converts"
    )
    assert said in str(planned.reason)


@pytest.mark.parametrize("recipe", ONLY_PYTORCH)
def test_auto_takes_pytorch_where_engines_lack_the_family(tmp_path: Path, recipe: str) -> None:
    precision = "as_is" if load_recipe(recipes_folder() / f"{recipe}.yaml").quantization else "bf16"
    release = "1.3.0rc29" if recipe in LATER else "1.2.0"
    planned = plan(tmp_path, [recipe], precision, release, 100)
    (only,) = planned.cells
    assert (only.toolchain, only.reason) == (PYTORCH, None)
    assert PYTORCH not in only.id or recipe in LATER
    (named,) = plan(tmp_path, [recipe], precision, release, 100, "auto").cells
    assert (named.toolchain, named.reason) == (PYTORCH, None)
    assert named.id == f"{only.id}/{PYTORCH}", "an axis is in the id"
    assert {run.toolchain for run in planned.stage_runs.values()} == {PYTORCH}


@pytest.mark.parametrize("lane", [None, "auto"])
def test_auto_decides_model_by_model_and_a_lock_file_decides_the_same(tmp_path: Path, lane: str | None) -> None:
    planned = plan(tmp_path, ["llama-3.1-8b-instruct", "gemma-3-1b-it"], "bf16", "1.2.0", 90, lane)
    chosen = {cell.model: cell.toolchain for cell in planned.cells}
    assert chosen == {"llama-3.1-8b-instruct": ENGINES, "gemma-3-1b-it": PYTORCH}
    request = Request(tmp_path / "matrix.yaml", assume="tensorrt_llm==1.2.0,sm=90,gpus=1,gpu_memory_gib=80")
    (tmp_path / "lock").mkdir()
    write_lock(request, load_matrix(request.matrix), planned, tmp_path / "lock", default_toolchain=ENGINES)
    locked = planner.plan_of(Request(tmp_path / "lock" / "matrix.yaml", assume=request.assume), None, guess=True)
    assert {cell.model: cell.toolchain for cell in locked.cells} == chosen
    assert [cell.id for cell in locked.cells] == [cell.id for cell in planned.cells]


def test_a_toolchain_that_is_named_is_kept(tmp_path: Path) -> None:
    (planned,) = plan(tmp_path, ["gemma-3-1b-it"], "bf16", "1.2.0", 90, ENGINES).cells
    assert (planned.toolchain, planned.reason is None) == (ENGINES, False)


@pytest.mark.parametrize(
    "recipe",
    [
        *("qwen2-vl-7b-instruct", "qwen2.5-vl-7b-instruct", "llava-v1.6-mistral-7b"),
        *("gemma-3-27b-it", "llama-4-scout-17b-16e-instruct"),
    ],
)
def test_a_model_that_takes_images_is_asked_with_some(tmp_path: Path, recipe: str) -> None:
    planned = plan(tmp_path, [recipe], "bf16", "1.2.0", 100, PYTORCH)
    (smoke,) = (run for run in planned.stage_runs.values() if run.stage.name == "smoke")
    assert smoke.params.images is None, "Triton is asked with text alone"
    matrix = (tmp_path / "matrix.yaml").read_text()
    settings = "settings: { serve: { frontend: trtllm_serve }, perf: { images: 1@64x64 } }\n"
    (tmp_path / "matrix.yaml").write_text(matrix + settings)
    machine = "tensorrt_llm==1.2.0,sm=100,gpus=8,gpu_memory_gib=141"
    planned = planner.plan_of(Request(tmp_path / "matrix.yaml", assume=machine), None, guess=True)
    asked = {run.stage.name: run.params for run in planned.stage_runs.values()}
    assert (asked["smoke"].images, asked["perf"].images) == ("1@64x64", "1@64x64")


def test_auto_takes_engines_with_a_visual_one_where_pytorch_has_not_the_family(tmp_path: Path) -> None:
    for release, recipe, lane in (
        ("0.19.0", "qwen2-vl-7b-instruct", ENGINES),
        ("1.2.0", "llava-onevision-qwen2-7b", ENGINES),
        ("1.2.0", "qwen2-vl-7b-instruct", PYTORCH),
    ):
        precision = "fp16" if lane == ENGINES else "bf16"
        planned = plan(tmp_path, [recipe], precision, release, 90)
        assert [(cell.toolchain, cell.reason) for cell in planned.cells] == [(lane, None)]
        assert ("visual" in {run.stage.name for run in planned.stage_runs.values()}) == (lane == ENGINES)


@pytest.mark.parametrize(
    ("lane", "said"),
    [
        (ENGINES, "no visual engine is built for family llama"),
        ("embedded", "only the TensorRT-LLM toolchains support images"),
    ],
)
def test_where_images_are_not_taken_a_plan_says_so(lane: str, said: str) -> None:
    asked = cell(toolchain=lane, recipe={"images": True}, settings={"perf.images": "1@64x64"})
    assert said in str(infeasible(asked))


@pytest.mark.parametrize("section", ["perf", "accuracy"])
@pytest.mark.parametrize(
    ("lane", "said"),
    [
        (ENGINES, "no visual engine is built for family llama"),
        (PYTORCH, "trtllm-serve accepts images"),
        ("embedded", "only the TensorRT-LLM toolchains support images"),
    ],
)
def test_images_in_rows_are_refused_before_anything_is_downloaded(
    tmp_path: Path, section: str, lane: str, said: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    settings = {f"{section}.input_data": "rows.jsonl"}
    asked = replace(cell(toolchain=lane, recipe={"images": True}, settings=settings), base_dir=str(tmp_path))
    rows.write_text('{"input": "What is it?", "output": "a cat"}')
    assert infeasible(asked) is None
    rows.write_text('{"input": "What is it?", "image": "cat.png", "output": "a cat"}\n')
    assert f"settings.{section}.input_data rows.jsonl, whose rows have images: " in str(infeasible(asked))
    assert said in str(infeasible(asked))
    scored_elsewhere = {**asked.settings, "accuracy": {**asked.settings["accuracy"], "answers": "perf"}}
    assert (infeasible(replace(asked, settings=scored_elsewhere)) is None) == (section == "accuracy")


@pytest.mark.parametrize(
    ("recipe", "lane", "said"),
    [
        ("llava-1.5-7b", ENGINES, "only as pixels that a client has prepared"),
        (
            "llava-onevision-qwen2-7b",
            PYTORCH,
            "the PyTorch backend's list of models does not include it in any release",
        ),
        ("llava-1.5-7b", PYTORCH, "the PyTorch backend's list of models does not include it in any release"),
        ("internvl3-8b", ENGINES, "preprocessing of Triton's templates does not support its images in any release"),
        ("internvl3-8b", PYTORCH, "the PyTorch backend's list of models does not include it in any release"),
        (
            "llava-v1.6-mistral-7b",
            ENGINES,
            "preprocessing of Triton's templates does not support its images in any release",
        ),
    ],
)
def test_what_no_release_serves_is_said_with_the_reason(tmp_path: Path, recipe: str, lane: str, said: str) -> None:
    (planned,) = plan(tmp_path, [recipe], "fp16", "1.2.0", 90, lane).cells
    assert said in str(planned.reason)


def test_triton_s_llm_api_model_takes_no_images() -> None:
    asked = cell("bf16", toolchain=PYTORCH, recipe={"images": True}, settings={"perf.images": "1@64x64"})
    assert "Triton's LLM API model only accepts text" in str(infeasible(asked))


def test_a_quantized_model_has_no_other_precision(tmp_path: Path) -> None:
    (planned,) = plan(tmp_path, ["gpt-oss-20b"], "fp8", "1.2.0", 100, PYTORCH).cells
    assert "already quantized (mxfp4): use precision as_is" in str(planned.reason)


def test_latent_attention_keeps_less_than_its_heads_say(tmp_path: Path) -> None:
    from trtllm_pipeline.tensorrt.toolchains.model_shape import Shape, kv_bytes_per_token

    shape = Shape.of(load_recipe(recipes_folder() / "deepseek-v3.yaml").model_dump(mode="json"))
    # 61 layers of 512 + 64 numbers, on each GPU.
    assert kv_bytes_per_token(shape, 2, 8, 1) == kv_bytes_per_token(shape, 2, 1, 1) == 61 * 576 * 2


def test_an_indexer_caches_its_keys_beside_latent_attention() -> None:
    from trtllm_pipeline.tensorrt.toolchains.model_shape import Shape, kv_bytes_per_token

    shape = Shape.of(load_recipe(recipes_folder() / "deepseek-v3.2.yaml").model_dump(mode="json"))
    # 61 layers of 512 + 64 numbers, and of 128 bytes with a scale of 4.
    assert kv_bytes_per_token(shape, 2, 8, 1) == 61 * (576 * 2 + 128 + 4)
    assert kv_bytes_per_token(shape, 1, 8, 1) == 61 * (576 + 128 + 4)


@pytest.mark.parametrize("method", ["medusa", "eagle"])
@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("llama-3.1-8b-instruct", "scales its rotary embeddings (rope_scaling of its recipe)"),
        ("smollm2-360m-instruct", "has rope_theta 100000 in its recipe"),
        ("llama-2-7b-chat", None),
    ],
)
def test_heads_are_refused_by_what_recipes_say_where_no_hub_is_reached(
    tmp_path: Path, method: str, recipe: str, said: str | None
) -> None:
    plan(tmp_path, [recipe], "fp16", "1.2.0", 90, ENGINES)
    heads = f"settings: {{ speculative: {{ method: {method}, model: some/heads }} }}\n"
    (tmp_path / "matrix.yaml").write_text((tmp_path / "matrix.yaml").read_text() + heads)
    machine = "tensorrt_llm==1.2.0,sm=90,gpus=1,gpu_memory_gib=141"
    (planned,) = planner.plan_of(Request(tmp_path / "matrix.yaml", assume=machine), None, guess=True).cells
    assert planned.reason is None if said is None else said in str(planned.reason)
