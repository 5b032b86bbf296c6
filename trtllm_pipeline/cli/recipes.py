"""`pipeline recipes`: what is known of the models."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

EXAMPLE: Final = """examples:
  pipeline recipes list
  pipeline recipes show smollm2-135m-instruct --format json"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `pipeline recipes`."""
    parser.description = "List and show model recipes: your own in recipes/ here, and those that come with the project."
    parser.epilog = EXAMPLE
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    listing = verbs.add_parser("list", help="names and one line each")
    show = verbs.add_parser("show", help="all that is known of one model")
    show.add_argument("name", metavar="NAME", help="of a recipe")
    for verb in (listing, show):
        verb.add_argument("--format", choices=("text", "json"), default="text", help="default text")


def run(args: argparse.Namespace) -> int:
    """List recipes, or show one."""
    from trtllm_pipeline.cli.output import emit, emit_json
    from trtllm_pipeline.config.recipes import find_recipe, list_recipes, load_recipe

    if args.verb == "list":
        recipes = [load_recipe(path) for path in list_recipes(Path()).values()]
        if args.format == "json":
            rows = [
                recipe.model_dump(mode="json", include={"name", "summary", "family", "license"}) for recipe in recipes
            ]
            emit_json({"schema": 1, "recipes": rows})
        else:
            width = max((len(recipe.name) for recipe in recipes), default=0)
            for recipe in recipes:
                emit(f"{recipe.name:<{width}}  {recipe.summary}")
        return 0
    path = find_recipe(args.name, Path())
    recipe = load_recipe(path)
    if args.format == "json":
        emit_json({"schema": 1, "file": str(path), **recipe.model_dump(mode="json")})
    else:
        emit(f"# {path}\n{path.read_text(encoding='utf-8-sig').rstrip()}")
    return 0
