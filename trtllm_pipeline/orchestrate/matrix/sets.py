"""`--set KEY=VALUE`: changes to matrix and recipes from the command line. VALUE is YAML on one line. KEY is one of

settings.SECTION.KEY       for every cell, overrides the matrix's settings and overrides
axes.AXIS                  the values of an axis
recipes.NAME.FIELD         a field of a recipe; NAME may be * for all; `sources.0.revision` is a path into lists
name, description          of the matrix
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from trtllm_pipeline.base import Fault, Json, UsageError
from trtllm_pipeline.orchestrate.matrix.document import Document, KeyPath, Origin, child, key_text, nearest, parse


@dataclass(frozen=True, slots=True)
class Assignment:
    """One `--set`: the path, and the value as a document that has the argument as its name."""

    path: KeyPath
    value: Document


def parse_set(argument: str) -> Assignment:
    """The change of one `--set` argument. Raises UsageError, or MatrixError for a value that is not YAML."""
    key, value = _split(argument)
    top, _, rest = key.partition(".")
    if top == "axes" and rest:
        return Assignment(("axes", rest), value)
    if top == "settings" and "." in rest:
        return Assignment(("settings", *rest.split(".")), value)
    if top == "recipes" and "." in rest:
        return Assignment(("recipes", rest), value)
    if key in ("name", "description"):
        return Assignment((key,), value)
    raise UsageError(
        f"--set {argument}: unknown key {key!r}{_nearest_key(key)}",
        hint="set settings.SECTION.KEY, axes.AXIS, recipes.NAME.FIELD, name or description",
    )


def _nearest_key(key: str) -> str:
    """Known keys that contain `key` or are similar to it."""
    from trtllm_pipeline.orchestrate.matrix.models import Axes, Settings

    sections = {name: (f"settings.{name}", value) for name, value in Settings()}
    whole = [f"axes.{key}"] if key in Axes.model_fields else []
    first, _, rest = key.partition(".")
    whole += [f"settings.{key}"] if rest and first in sections else []
    whole += [f"{at}.{key}" for at, section in sections.values() if key in getattr(type(section), "model_fields", ())]
    if whole:
        return f"; did you mean {' or '.join(map(repr, whole[:4]))}?"
    close = difflib.get_close_matches(first, ("settings", "axes", "recipes", "name", "description"), n=1, cutoff=0.6)
    return f"; did you mean {'.'.join(filter(None, (close[0], rest)))!r}?" if close else ""


def apply(document: Document, change: Assignment) -> list[Fault]:
    """Insert a change's value into `document`. Faults in it are then reported under the argument's name."""
    if not isinstance(document.data, dict):
        return []  # already a fault: the file is not a mapping
    origin = Origin(change.value.name, None)
    nowhere = [Fault(origin.path, None, key_text(change.path), "this key does not exist")]
    target: Json = document.data
    for depth, step in enumerate(change.path[:-1]):
        if isinstance(target, dict):
            target.setdefault(str(step), {})
            document.origins.setdefault(change.path[: depth + 1], origin)
        try:
            target = child(target, step)
        except KeyError:
            return nowhere
    last = change.path[-1]
    value = copy.deepcopy(change.value.data)
    if isinstance(target, dict):
        target[str(last)] = value
    elif isinstance(target, list) and isinstance(last, int) and last < len(target):
        target[last] = value
    else:
        return nowhere
    for known in [known for known in document.origins if known[: len(change.path)] == change.path]:
        del document.origins[known]
    document.origins[change.path] = origin
    return []


def apply_to_recipes(files: Mapping[str, Document], change: Assignment) -> list[Fault]:
    """Apply a `recipes.NAME.FIELD` change to the recipes of a matrix, which are keyed by value of its model axis."""
    rest = str(change.path[1])
    # Names may contain dots, so the key is matched with the names of the matrix's models. The longest match wins.
    fitting = [model for model in files if rest.startswith(f"{model}.")]
    model = "*" if rest.startswith("*.") else max(fitting, key=len, default="")
    if not model:
        message = f"this key starts with no model of the matrix{nearest(rest.partition('.')[0], files)}"
        return [Fault(change.value.name, None, f"recipes.{rest}", message)]
    inner = Assignment(_steps(rest[len(model) + 1 :]), change.value)
    chosen = list(files.values()) if model == "*" else [files[model]]
    return [fault for file in chosen for fault in apply(file, inner)]


def _split(argument: str) -> tuple[str, Document]:
    key, equals, text = argument.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UsageError(f"--set {argument}: write KEY=VALUE", hint="for example --set settings.perf.concurrency=[1,8]")
    name = f"--set {argument}"
    return key, parse(text, name, lines=False) if text.strip() else Document(name, None)


def _steps(key: str) -> KeyPath:
    return tuple(int(step) if re.fullmatch(r"[0-9]{1,6}", step) else step for step in key.split("."))
