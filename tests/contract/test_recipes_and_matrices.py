"""Every recipe and matrix that ships loads, expands, fits its schema, and says the same as its own arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

import trtllm_pipeline
from trtllm_pipeline.matrix import recipes
from trtllm_pipeline.matrix.document import read
from trtllm_pipeline.matrix.expand import expand
from trtllm_pipeline.matrix.load import TEMPLATE, load_matrix
from trtllm_pipeline.matrix.models import Settings, json_schema
from trtllm_pipeline.matrix.recipes import load_recipe, matrices_folder, recipes_folder

PACKAGE = Path(trtllm_pipeline.__file__).parent
RECIPES = sorted(path for path in recipes_folder().rglob("*") if path.is_file())
MATRICES = sorted(path for path in matrices_folder().rglob("*") if path.is_file())
CELLS = {"quickstart": 6, "tiny": 2}


def name(path: Path) -> str:
    return path.stem


def test_all_are_found() -> None:
    assert [path.name for path in RECIPES] == [
        "qwen2.5-0.5b-instruct.yaml",
        "qwen3-0.6b.yaml",
        "smollm2-135m-instruct.yaml",
        "smollm2-360m-instruct.yaml",
        "tiny.yaml",
    ]
    assert [path.stem for path in MATRICES] == list(CELLS)


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_recipes(path: Path) -> None:
    recipe = load_recipe(path)
    jsonschema.validate(read(path).data, json_schema("recipe"))
    assert path.read_text(encoding="utf-8").startswith("# "), "opens with what it is for"
    attention = 2 * recipe.hidden_size * recipe.head_dim * (recipe.num_attention_heads + recipe.num_key_value_heads)
    layer = attention + 3 * recipe.hidden_size * recipe.intermediate_size + 2 * recipe.hidden_size
    if recipe.family == "qwen2":  # biases of q, k and v
        layer += recipe.head_dim * (recipe.num_attention_heads + 2 * recipe.num_key_value_heads)
    if recipe.family == "qwen3":  # norms of q and k
        layer += 2 * recipe.head_dim
    embedding = recipe.vocab_size * recipe.hidden_size  # tied in all of these models
    if recipe.parameters is not None:
        assert recipe.parameters == embedding + recipe.num_hidden_layers * layer + recipe.hidden_size


def test_the_tiny_recipe_describes_the_generated_model(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from trtllm_pipeline.toolchains.embedded.tiny import write_model

    recipe = load_recipe(recipes_folder() / "tiny.yaml").model_dump()
    write_model(tmp_path, recipe["sources"][0]["generated"])
    config = json.loads((tmp_path / "config.json").read_text())
    shared = recipe.keys() & config.keys()
    assert len(shared) == 8
    assert {key: recipe[key] for key in shared} == {key: config[key] for key in shared}
    assert recipe["family"] == config["model_type"]


@pytest.mark.parametrize("path", [*MATRICES, TEMPLATE], ids=name)
def test_matrices(path: Path) -> None:
    cells = expand(load_matrix(path), default_toolchain="embedded")
    jsonschema.validate(read(path).data, json_schema("matrix"))
    assert [cell.id for cell in cells if cell.reason is not None] == []
    if path in MATRICES:
        assert len(cells) == CELLS[path.stem]


def test_the_quickstart_is_three_precisions_at_two_points() -> None:
    cells = expand(load_matrix(matrices_folder() / "quickstart.yaml"), default_toolchain="embedded")
    assert {cell.precision for cell in cells} == {"fp16", "int8_wo", "int4_wo"}
    assert len({(cell.max_batch_size, cell.isl, cell.osl) for cell in cells}) == 2


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
        defaults["perf"]["input_data"],
        defaults["accuracy"]["input_data"],
    }
    assert named <= shipped


def test_an_installed_package_has_its_own_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data" / "recipes").mkdir(parents=True)
    monkeypatch.setattr(recipes, "_PACKAGE", tmp_path)
    assert recipes.recipes_folder() == tmp_path / "data" / "recipes"
    assert recipes.matrices_folder() == tmp_path.parent / "matrices"
