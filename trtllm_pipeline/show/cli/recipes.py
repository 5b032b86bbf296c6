"""`pipeline models`: recipes of models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from trtllm_pipeline.base import text_tables
from trtllm_pipeline.show.cli import options
from trtllm_pipeline.show.cli.output import emit_as

_UNSERVED = "not by TensorRT-LLM or the embedded toolchain; a plan gives the reason"


def list_(format: options.TextOrJson = "text") -> None:
    """List the recipes: your own in ./recipes, and the shipped ones. Models that neither TensorRT-LLM nor the embedded
    toolchain can serve are marked.

    examples:
      pipeline models list
    """
    from trtllm_pipeline.orchestrate import recipe_files
    from trtllm_pipeline.tensorrt import catalog

    recipes = [
        recipe_files.load_recipe(path).model_dump(mode="json") for path in recipe_files.list_recipes(Path()).values()
    ]
    rows = [
        {
            **{key: recipe[key] for key in ("name", "summary", "family", "license")},
            "toolchains": catalog.serving(recipe),
        }
        for recipe in recipes
    ]
    lines = {row["name"]: row["summary"] if row["toolchains"] else f"{row['summary']} ({_UNSERVED})" for row in rows}
    emit_as(format, {"schema": 1, "recipes": rows}, text=lambda _: text_tables.aligned(lines))


def show(
    name: Annotated[str, options.argument("NAME", "Name of a recipe.", complete=options.completion.recipes)],
    format: options.TextOrJson = "text",
) -> None:
    """Show the recipe of one model.

    examples:
      pipeline models show smollm2-135m-instruct
      pipeline models show smollm2-135m-instruct --format json
    """
    from trtllm_pipeline.orchestrate import recipe_files

    path = recipe_files.find_recipe(name, Path())
    recipe = recipe_files.load_recipe(path)
    data = {"schema": 1, "file": str(path), **recipe.model_dump(mode="json")}
    emit_as(format, data, text=lambda _: f"# {path}\n{path.read_text(encoding='utf-8-sig').rstrip()}")
