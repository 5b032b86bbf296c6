"""Every recipe and matrix that ships loads, expands, fits its schema, and says the same as its own arithmetic."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import trtllm_pipeline
from tests.helpers import trtllm_cells
from tests.standins import templates
from trtllm_pipeline.base.errors import MatrixError, UsageError
from trtllm_pipeline.base.machine.assume import parse
from trtllm_pipeline.measure.load.prompts import BUILT_IN_PROMPTS
from trtllm_pipeline.orchestrate.matrix import matrices, recipe_files
from trtllm_pipeline.orchestrate.matrix.document import read
from trtllm_pipeline.orchestrate.matrix.expand import expand
from trtllm_pipeline.orchestrate.matrix.matrices import TEMPLATE
from trtllm_pipeline.orchestrate.matrix.models import Recipe, Settings, json_schema
from trtllm_pipeline.orchestrate.matrix.recipe_files import load_recipe, matrices_folder, recipes_folder
from trtllm_pipeline.orchestrate.matrix.validate import load_matrix
from trtllm_pipeline.tensorrt.toolchains import catalog as toolchains

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(trtllm_pipeline.__file__).parent
RECIPES = sorted(path for path in recipes_folder().rglob("*") if path.is_file())
MATRICES = sorted(path for path in matrices_folder().rglob("*") if path.is_file())
CELLS = {
    "gpt2": 1,
    "backends": 8,
    "migration": 4,
    "llama2": 1,
    "nightly": 6,
    "phi3": 1,
    "quickstart": 3,
    "qwen2": 18,
    "qwen2-tp4": 1,
    "tiny": 2,
}
EMBEDDED = {"quickstart", "tiny"}
"""Matrices for machines without a GPU; the others are for TensorRT-LLM."""
TIED = {
    "gemma-2-9b-it",
    "gemma-3-1b-it",
    "gemma-3-27b-it",
    "llama-3.2-1b-instruct",
    "phi-4-mini-instruct",
    "qwen2.5-0.5b-instruct",
    "qwen3-0.6b",
    "smollm2-135m-instruct",
    "smollm2-360m-instruct",
}
"""Models whose output weights are their embedding; GPT-2's always are."""
MIXTRAL_EXPERTS = 8
UNEQUAL = {"glm_moe_dsa": 192}
"""Family with latent attention -> qk_nope_head_dim, where it is not that of a value."""


def name(path: Path) -> str:
    return path.stem


def test_all_are_found() -> None:
    assert {path.suffix for path in (*RECIPES, *MATRICES)} == {".yaml"}
    assert sorted(path.stem for path in MATRICES) == sorted(CELLS)


def weights(recipe: Recipe) -> int:
    """Number of weights that follows from the architecture numbers; the sizes that safetensors files of these models have."""
    hidden, layers = recipe.hidden_size, recipe.num_hidden_layers
    if recipe.family == "gpt2":  # learnt positions; biases everywhere; norms have a bias too; two matrices in the MLP
        attention = 4 * hidden * hidden + 4 * hidden
        mlp = 2 * hidden * recipe.intermediate_size + recipe.intermediate_size + hidden
        embeddings = (recipe.vocab_size + recipe.max_position_embeddings) * hidden
        return embeddings + layers * (attention + mlp + 4 * hidden) + 2 * hidden
    layer = 2 * hidden * recipe.head_dim * (recipe.num_attention_heads + recipe.num_key_value_heads)
    expert = 3 * hidden * recipe.intermediate_size
    experts = recipe.num_experts or 0
    if recipe.kv_lora_rank is not None:  # latent attention; dense layers first; a shared expert; a bias of the router
        latent, rotated, dense = recipe.kv_lora_rank, recipe.qk_rope_head_dim or 0, recipe.first_k_dense_replace or 0
        heads, value, queries = recipe.num_attention_heads, recipe.head_dim, recipe.q_lora_rank or 0
        plain = UNEQUAL.get(recipe.family, value)
        attention = (hidden + 1) * queries + queries * heads * (plain + rotated)
        attention += hidden * (latent + rotated) + latent + latent * heads * (plain + value) + heads * value * hidden
        mixture = (experts + 1) * 3 * hidden * (recipe.moe_intermediate_size or 0) + experts * (hidden + 1)
        embeddings = 2 * recipe.vocab_size * hidden + hidden
        return embeddings + layers * (attention + 2 * hidden) + dense * expert + (layers - dense) * mixture
    if recipe.family == "glm4_moe":  # biases of q, k and v; one dense layer; a shared expert; a bias of the router
        layer += recipe.head_dim * (recipe.num_attention_heads + 2 * recipe.num_key_value_heads)
        mixture = (experts + 1) * 3 * hidden * (recipe.moe_intermediate_size or 0) + experts * (hidden + 1)
        return (2 * recipe.vocab_size + 1) * hidden + layers * (layer + 2 * hidden) + expert + (layers - 1) * mixture
    match recipe.family:
        case (
            "llama" | "mistral" | "phi3" | "llava" | "llava_next" | "internlm2"
        ):  # some only join q, k and v, and gate and up
            layer += expert + 2 * hidden
        case (
            "qwen2" | "qwen2_vl" | "qwen2_5_vl" | "llava_onevision" | "internvl_chat" | "chatglm"
        ):  # biases of q, k and v
            layer += expert + 2 * hidden
            layer += recipe.head_dim * (recipe.num_attention_heads + 2 * recipe.num_key_value_heads)
        case "qwen3":  # norms of q and k
            layer += expert + 2 * hidden + 2 * recipe.head_dim
        case "gemma2":  # norms before and after attention and MLP
            layer += expert + 4 * hidden
        case "gemma3" | "gemma3_text":  # the same, and norms of q and k
            layer += expert + 4 * hidden + 2 * recipe.head_dim
        case "qwen3_moe":  # norms of q and k, and the router
            layer += experts * (expert + hidden) + 2 * hidden + 2 * recipe.head_dim
        case "llama4":  # a shared expert, and the router
            layer += (experts + 1) * expert + experts * hidden + 2 * hidden
        case "gpt_oss":  # biases everywhere, and a sink for each head
            heads = recipe.num_attention_heads
            layer += recipe.head_dim * (heads + 2 * recipe.num_key_value_heads) + 3 * hidden + heads
            layer += experts * (expert + 2 * recipe.intermediate_size + 2 * hidden + 1)
        case "mixtral":  # and the router
            layer += MIXTRAL_EXPERTS * (expert + hidden) + 2 * hidden
        case _:
            pytest.fail(f"no formula for {recipe.family}")
    embeddings = recipe.vocab_size * hidden * (1 if recipe.name in TIED else 2)
    return embeddings + layers * layer + hidden


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_recipes(path: Path) -> None:
    recipe = load_recipe(path)
    jsonschema.validate(read(path).data, json_schema("recipe"))
    assert path.read_text(encoding="utf-8").startswith("# "), "opens with what it is for"
    assert recipe.num_attention_heads % recipe.num_key_value_heads == 0
    if recipe.parameters is not None:
        assert recipe.parameters == weights(recipe)
    assert max(recipe.eos_token_ids or (0,)) < recipe.vocab_size


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_recipes_say_what_tensorrt_llm_does_with_them(path: Path) -> None:
    recipe = load_recipe(path)
    assert isinstance(recipe.precisions, dict)
    for toolchain, precisions in recipe.precisions.items():
        if toolchain != "embedded":
            assert (toolchain in recipe.releases) == bool(precisions), "releases of each lane that runs it, of no other"
        assert set(recipe.precision_releases.get(toolchain, {})) <= set(precisions)
    assert {*recipe.releases, *recipe.precision_releases} <= set(recipe.precisions)
    if recipe.smoke and recipe.smoke.expected:
        assert all(recipe.precisions.get(toolchain) for toolchain in recipe.smoke.expected)
    if recipe.releases:
        data: Any = read(path).data
        kinds = [next(iter(source)) for source in data["sources"]]
        assert kinds in (["hugging_face", "modelscope"], ["hugging_face"])
        sources = path.read_text(encoding="utf-8").count("# From ")
        assert sources == 3 + bool(recipe.draft_heads), "of numbers, heads, precisions and releases"


@pytest.mark.parametrize(
    ("toolchain", "release", "precision", "refused"),
    [
        (trtllm_cells.ENGINES, "0.8.0", "fp16", True),
        (trtllm_cells.ENGINES, "0.9.0", "fp16", False),
        (trtllm_cells.ENGINES, "0.9.0", "fp8", True),
        (trtllm_cells.ENGINES, "0.10.0", "fp8", False),
        (trtllm_cells.ENGINES, "0.18.2", "int4_awq", True),
        (trtllm_cells.ENGINES, "0.19.0rc1.post1", "fp8", False),
        (trtllm_cells.PYTORCH, "1.0.0rc6", "fp16", True),
        (trtllm_cells.PYTORCH, "1.2.0rc6", "fp16", False),
    ],
)
def test_releases_of_a_recipe(toolchain: str, release: str, precision: str, refused: bool) -> None:
    mixtral = load_recipe(recipes_folder() / "mixtral-8x7b-instruct-v0.1.yaml").model_dump(mode="json")
    mixtral["source"] = mixtral["sources"][0]
    cell = trtllm_cells.cell(toolchain=toolchain, precision=precision, recipe=mixtral)
    reason = trtllm_cells.infeasible(cell, trtllm_cells.machine(release))
    assert ("in releases" in (reason or "")) == refused, reason


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("releases={tensorrt_llm: newest}", "releases.tensorrt_llm: 'newest' is not a version specifier"),
        ("releases={tensorrt: '>=1'}", "releases.tensorrt"),
        (
            "precision_releases={tensorrt_llm: {fp8: '=>1'}}",
            "precision_releases.tensorrt_llm.fp8: '=>1' is not a version specifier",
        ),
    ],
)
def test_releases_are_checked(change: str, told: str) -> None:
    with pytest.raises(MatrixError) as error:
        load_matrix(matrices_folder() / "tiny.yaml", [f"recipes.*.{change}"])
    assert told in "\n".join(map(str, error.value.faults))


def test_the_tiny_recipe_describes_the_generated_model(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from trtllm_pipeline.tensorrt.embedded.random_model import write_model

    recipe = load_recipe(recipes_folder() / "tiny.yaml").model_dump()
    write_model(tmp_path, recipe["sources"][0]["generated"])
    config = json.loads((tmp_path / "config.json").read_text())
    shared = recipe.keys() & config.keys()
    assert len(shared) == 9
    assert {key: recipe[key] for key in shared} == {key: config[key] for key in shared}
    assert recipe["family"] == config["model_type"]


@pytest.mark.parametrize("path", [*MATRICES, TEMPLATE], ids=name)
def test_matrices(path: Path) -> None:
    toolchain = "embedded" if path == TEMPLATE or path.stem in EMBEDDED else "tensorrt_llm"
    cells = expand(load_matrix(path), default_toolchain=toolchain)
    jsonschema.validate(read(path).data, json_schema("matrix"))
    assert [(cell.id, cell.reason) for cell in cells if cell.reason is not None] == []
    if path in MATRICES:
        assert len(cells) == CELLS[path.stem]


@pytest.mark.parametrize("path", MATRICES, ids=name)
def test_matrices_open_with_their_own_command(path: Path) -> None:
    opening = path.read_text(encoding="utf-8").split("\nname: ", 1)[0]
    assert f"#   pipeline run --matrix matrices/{path.name}\n" in opening


def test_what_recipes_open_with_can_be_run() -> None:
    """Each recipe's own command, as far as a plan of it goes: the matrix is there, and some cell of it is feasible."""
    for path in RECIPES:
        command = next(
            line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#   pipeline ")
        )
        words = re.sub(r"^#   pipeline (run|plan) --matrix matrices/", "", command).split(" --set ")
        toolchain = "embedded" if Path(words[0]).stem in EMBEDDED else "tensorrt_llm"
        cells = expand(load_matrix(matrices_folder() / words[0], words[1:]), default_toolchain=toolchain)
        assert any(cell.model == path.stem and cell.reason is None for cell in cells), path.stem


def test_qwen2_is_the_well_known_script_row_by_row() -> None:
    cells = expand(load_matrix(matrices_folder() / "qwen2.yaml"), default_toolchain="embedded")
    assert {cell.toolchain for cell in cells} == {"tensorrt_llm"}
    rows = {(cell.model, cell.tp, cell.pp, cell.precision, cell.max_batch_size, cell.isl, cell.osl) for cell in cells}
    layouts = (("qwen2-7b", 1, 1), *(("qwen2-72b-instruct", tp, pp) for tp, pp in ((4, 1), (4, 2), (8, 1))))
    precisions = ("fp8", "fp16", "int8_wo")
    script = {
        (*layout, precision, batch, 2048, 1024) for layout in layouts for precision in precisions for batch in (4, 8)
    }
    never = {row for row in script if row[0] == "qwen2-72b-instruct" and row[3] == "int8_wo"}
    assert rows == script - never
    assert len(never) == 6, "29568 / 4 and 29568 / 8 are no multiples of 64"


@pytest.mark.parametrize("release", ["0.16.0", "1.2.0"])
def test_every_cell_of_qwen2_can_work(release: str) -> None:
    machine = parse(f"tensorrt_llm=={release},sm=90,gpus=8,gpu_memory_gib=80")
    cells = expand(load_matrix(matrices_folder() / "qwen2.yaml"), default_toolchain="embedded")
    toolchain = toolchains.load("tensorrt_llm")
    assert [said for cell in cells if (said := toolchain.infeasible(cell, machine)) is not None] == []


def test_qwen2_has_the_script_s_settings() -> None:
    cells = expand(load_matrix(matrices_folder() / "qwen2.yaml"), default_toolchain="embedded")
    caches = {"fp8": "fp8", "fp16": None, "int8_wo": "int8"}
    for cell in cells:
        settings = cell.settings
        assert settings["quantize"]["kv_cache_precision"] == caches[cell.precision]
        assert settings["quantize"]["calibration"]["samples"] == 32
        attention = settings["build"].get("use_fp8_context_fmha")
        assert attention == ("disable" if cell.precision == "fp8" else None)
        assert settings["perf"]["max_tokens"] == 300
        repository = settings["repository"]
        for switch in ("decoupled", "accumulate_tokens", "exclude_input_in_output", "add_special_tokens"):
            assert repository[switch] is True
        assert repository["skip_special_tokens"] is True
        assert repository["enable_kv_cache_reuse"] is False
        assert (repository["max_tokens_in_paged_kv_cache"], repository["max_attention_window_size"]) == (8560, [8560])
        assert repository["kv_cache_free_gpu_mem_fraction"] == 0.5
        assert repository["batching_strategy"] == "inflight_fused_batching"
        assert repository["max_queue_delay_microseconds"] == 0


def test_lanes_are_an_axis() -> None:
    cells = expand(load_matrix(matrices_folder() / "backends.yaml"), default_toolchain="embedded")
    by_lane = {
        lane: {(cell.model, cell.precision, cell.isl, cell.osl) for cell in cells if cell.toolchain == lane}
        for lane in ("tensorrt_llm", "tensorrt_llm_pytorch")
    }
    assert by_lane["tensorrt_llm"] == by_lane["tensorrt_llm_pytorch"]
    assert len(by_lane["tensorrt_llm"]) * 2 == len(cells)


def test_the_quickstart_is_three_precisions_of_one_engine_each() -> None:
    cells = expand(load_matrix(matrices_folder() / "quickstart.yaml"), default_toolchain="embedded")
    assert {cell.precision for cell in cells} == {"fp16", "int8_wo", "int4_wo"}
    assert len({(cell.isl, cell.osl, cell.max_batch_size) for cell in cells}) == 1


@pytest.mark.parametrize("kind", ["matrix", "recipe"])
def test_schemas_refuse_what_the_loader_refuses(kind: str) -> None:
    schema = json_schema("matrix" if kind == "matrix" else "recipe")
    jsonschema.Draft202012Validator.check_schema(schema)
    folder, file = (matrices_folder(), "quickstart") if kind == "matrix" else (recipes_folder(), "tiny")
    data = read(folder / f"{file}.yaml").data
    assert isinstance(data, dict)
    jsonschema.validate(data, schema)
    for broken in ({**data, "nmae": "x"}, {key: value for key, value in data.items() if key != "name"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, schema)


def test_every_field_of_the_matrix_schema_is_described() -> None:
    schema = json_schema("matrix")
    models = {"matrix": schema, **schema["$defs"]}
    plain = {"Where", "AddedCell", "Settings"}  # their fields are the axes and sections, described there
    missing = [
        f"{model}.{key}"
        for model, definition in models.items()
        if model not in plain
        for key, value in definition.get("properties", {}).items()
        if "description" not in value
    ]
    assert missing == []


def test_every_built_in_data_set_named_by_a_default_ships() -> None:
    shipped = {f"builtin:{file.stem}" for file in (PACKAGE / "data").glob("*/*.jsonl")}
    defaults = Settings().model_dump()
    named = {
        defaults["quantize"]["calibration"]["data"],
        BUILT_IN_PROMPTS,
        defaults["accuracy"]["input_data"],
    }
    assert named <= shipped


def test_an_installed_package_has_its_own_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data" / "recipes").mkdir(parents=True)
    monkeypatch.setattr(recipe_files, "PACKAGE", tmp_path)
    assert recipe_files.recipes_folder() == tmp_path / "data" / "recipes"
    assert recipe_files.matrices_folder() == tmp_path.parent / "matrices"


def test_a_shipped_matrix_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert list(matrices.list_matrices()) == [path.stem for path in MATRICES]
    for name, path in matrices.list_matrices().items():
        assert matrices.find_matrix(name) == path
        assert matrices.summary(path)
    for here in ("tiny.yaml", "./tiny", "folder/tiny"):
        assert matrices.find_matrix(here) == Path(here), "a path is one, whether or not there is a file"
    with pytest.raises(UsageError, match="'qwen3-8b' is a model, not a matrix"):
        matrices.find_matrix("qwen3-8b")
    with pytest.raises(UsageError, match=r"there is no matrix 'quikstart'; did you mean 'quickstart'\?"):
        matrices.find_matrix("quikstart")
    (tmp_path / "tiny").write_text("mine")
    assert matrices.find_matrix("tiny") == Path("tiny"), "a file of that name goes first"


@pytest.mark.parametrize("name", sorted(matrices.list_matrices()))
def test_a_copy_of_a_shipped_matrix_makes_the_same_cells(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "mine.yaml"
    matrices.write_matrix(copy, shipped=name, force=False)
    assert f"--matrix {copy}" in copy.read_text()
    ids = [
        [cell.id for cell in expand(load_matrix(path), default_toolchain="auto")]
        for path in (copy, matrices.find_matrix(name))
    ]
    assert ids[0] == ids[1]
    with pytest.raises(UsageError, match="already exists"):
        matrices.write_matrix(copy, shipped=name, force=False)


@pytest.mark.thorough
def test_names_work_where_the_package_is_installed(tmp_path: Path) -> None:
    """The layout of a wheel: shipped files are in the package's own data."""
    included = re.findall(
        r'^"(\w+)" = "(trtllm_pipeline/data/\w+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert len(included) == 2
    shutil.copytree(PACKAGE, tmp_path / "site" / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    for source, target in included:
        shutil.copytree(ROOT / source, tmp_path / "site" / target)
    (tmp_path / "here").mkdir()

    def pipeline(*words: str) -> str:
        command = [sys.executable, "-m", "trtllm_pipeline", *words]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
        return subprocess.run(
            command, cwd=tmp_path / "here", env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert str(tmp_path / "site") in pipeline("matrix", "list", "--format", "json")
    assert pipeline("matrix", "show", "quickstart").startswith("smollm2-135m-instruct/fp16/")
    plan = json.loads(pipeline("plan", "--matrix", "tiny", "--toolchain", "embedded", "--format", "json"))
    assert {cell["id"].split("/")[0] for cell in plan["cells"]} == {"tiny"}
    pipeline("matrix", "init", "--from", "tiny")
    assert "2 cells" in pipeline("matrix", "check", "matrix.yaml")


def test_the_sampling_of_a_script_can_be_measured() -> None:
    """docs/coming-from-other-tools.md: its load client's sampling are settings, and inputs of every release's models."""
    page = (ROOT / "docs" / "coming-from-other-tools.md").read_text(encoding="utf-8")
    (others,) = re.findall(r"`extra_inputs: (\{[^}]*\})`", page)
    sets = [f"settings.perf.{each}" for each in ("temperature=1.0", "top_k=40", "top_p=0.9", f"extra_inputs={others}")]
    sets += ["settings.perf.measurement_interval_ms=30000", "settings.repository.triton_max_batch_size=2"]
    cells = expand(load_matrix(matrices_folder() / "qwen2.yaml", sets), default_toolchain="tensorrt_llm")
    perf = cells[0].settings["perf"]
    assert perf["extra_inputs"].keys() == {"beam_width", "repetition_penalty", "length_penalty"}
    for release in templates.releases():
        inputs = templates.names(templates.model(release, "ensemble")["inputs"])
        assert {"temperature", "top_k", "top_p", *perf["extra_inputs"]} <= {*inputs}, release
