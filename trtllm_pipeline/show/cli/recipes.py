"""`pipeline models`: recipes of models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from trtllm_pipeline.base import text_tables
from trtllm_pipeline.show.cli import options
from trtllm_pipeline.show.cli.output import emit_as


def list_(format: options.TextOrJson = "text") -> None:
    """List the recipes: your own in ./recipes, and the shipped ones.

    examples:
      pipeline models list
    """
    from trtllm_pipeline.orchestrate import recipe_files

    recipes = [recipe_files.load_recipe(path) for path in recipe_files.list_recipes(Path()).values()]
    keys = {"name", "summary", "family", "license"}
    data = {"schema": 1, "recipes": [recipe.model_dump(mode="json", include=keys) for recipe in recipes]}
    emit_as(format, data, text=lambda _: text_tables.aligned({recipe.name: recipe.summary for recipe in recipes}))


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
