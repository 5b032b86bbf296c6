"""Checks a matrix file and its recipes against their models. All faults of all files are raised at once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import DownloadError, Fault, Json, MatrixError, UsageError
from trtllm_pipeline.orchestrate.matrix.document import (
    SETTINGS_PREFIX,
    Assignment,
    Document,
    KeyPath,
    apply_set,
    apply_set_to_recipes,
    check,
    key_text,
    nearest,
    nested,
    parse_set,
    read,
    setting_axes,
)
from trtllm_pipeline.orchestrate.matrix.models import Axes, Matrix, Recipe, Settings
from trtllm_pipeline.orchestrate.matrix.recipe_files import check_recipe, is_recipe_name, recipe_document

AXES: Final = tuple(Axes.model_fields)
"""Names of the axes other than settings, in the order of a cell id's segments."""
_OPTIONAL: Final = ("toolchain", "gpu")
"""Axes that a matrix may lack."""
_SETTINGS: Final = "settings"


@dataclass(frozen=True)
class LoadedMatrix:
    """A checked matrix with its recipes. Its plain data is dumped on first use."""

    path: Path
    document: Document
    """The file with `--set` changes, with the line of every value."""
    matrix: Matrix
    set_settings: Settings
    """Settings given with `--set`."""
    models: Mapping[str, Recipe]
    """Recipes by value of the model axis: a recipe's name, the path of a local directory, or a model on the hub."""
    axes_changed: bool
    """`--set` changed an axis, so it is not an error if a rule matches nothing."""

    @cached_property
    def written(self) -> Mapping[str, Any]:
        """The file with `--set` changes, values in canonical spelling, without defaults."""
        return self.matrix.model_dump(mode="json", exclude_unset=True)

    @cached_property
    def axes(self) -> Mapping[str, Sequence[Any] | None]:
        """Values of all axes, those over settings last. None for an optional axis that is missing."""
        return self.matrix.axes.model_dump(mode="json")

    @cached_property
    def added(self) -> Sequence[Mapping[str, Json]]:
        """The cells of `add`, with a value for each axis."""
        return [added.model_dump(mode="json") for added in self.matrix.add]

    @cached_property
    def defaults(self) -> Mapping[str, Any]:
        """Default settings."""
        return Settings().model_dump(mode="json")

    @cached_property
    def command_line(self) -> Mapping[str, Any]:
        """Settings given with `--set`. They override all others."""
        return self.set_settings.model_dump(mode="json", exclude_unset=True)

    @cached_property
    def recipes(self) -> Mapping[str, Mapping[str, Any]]:
        """The recipes with every key except notes, which must not affect a stage."""
        notes = {"sources": {"__all__": {"note"}}}
        return {model: recipe.model_dump(mode="json", exclude=notes) for model, recipe in self.models.items()}

    @cached_property
    def written_recipes(self) -> Mapping[str, Mapping[str, Any]]:
        """The recipes as in their files."""
        return {model: recipe.model_dump(mode="json", exclude_unset=True) for model, recipe in self.models.items()}

    @property
    def names_toolchains(self) -> bool:
        """The toolchain axis has a value other than `auto`."""
        named = {*(self.axes["toolchain"] or ()), *(cell.get("toolchain") for cell in self.added)}
        return not named <= {None, "auto"}

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """Types of GPU of the cells. Empty if the matrix has no such axis."""
        added = [str(cell["gpu"]) for cell in self.added if cell["gpu"] is not None]
        return tuple(dict.fromkeys((*(self.axes["gpu"] or ()), *added)))

    def of_cluster(self, key: str) -> Any:
        """A setting of the cluster: from the command line, the matrix or its default."""
        layers = (self.command_line, self.written.get("settings", {}), self.defaults)
        given = [layer["cluster"][key] for layer in layers if key in layer.get("cluster", {})]
        return next(filter(None, given), given[-1])


def load_matrix(path: Path, sets: Sequence[str] = ()) -> LoadedMatrix:
    """The matrix in a file with its recipes, changed by `sets` (see `parse_set`). Raises MatrixError with all faults, UsageError."""
    document, final, changes, faults = _changed(path, sets)
    matrix, matrix_faults = check(Matrix, document)
    faults += matrix_faults
    command_line, settings_faults = check(Settings, final)
    faults += [Fault(fault.path, fault.line, f"{_SETTINGS}.{fault.key}", fault.message) for fault in settings_faults]
    axes = document.get(("axes",))
    named = axes if isinstance(axes, dict) else {}
    faults += [*_unknown_axes(document, named), *_setting_axes(document, final, named)]
    recipes, recipe_faults = _recipes(document, path, [change for change in changes if change.path[0] == "recipes"])
    faults += recipe_faults
    if matrix is not None:
        faults += _repeated(document, matrix.axes)
    if faults or matrix is None or command_line is None:
        raise MatrixError(tuple(faults))
    axes_changed = any(change.path[0] == "axes" for change in changes)
    return LoadedMatrix(path, document, matrix, command_line, recipes, axes_changed)


def _changed(path: Path, sets: Sequence[str]) -> tuple[Document, Document, list[Assignment], list[Fault]]:
    """Returns a matrix file with its `--set` changes, the settings that override all others, the changes, and their faults."""
    changes = [parse_set(argument) for argument in sets]
    document = read(path)
    final = Document("--set", {})
    faults: list[Fault] = []
    for change in changes:
        if change.path[0] == _SETTINGS:
            faults += apply_set(final, Assignment(change.path[1:], change.value))
        elif change.path[0] != "recipes":
            faults += apply_set(document, change)
    return document, final, changes, faults


def _places(document: Document, at: KeyPath) -> list[KeyPath]:
    """Paths of the items in a list. Empty if the value is not a list."""
    value = document.get(at)
    return [(*at, index) for index in range(len(value))] if isinstance(value, list) else []


def _rules(document: Document, *sections: str) -> Iterator[tuple[KeyPath, Mapping[str, Json]]]:
    """Every rule in `sections` that names axes, with its path."""
    for section in sections:
        for item in _places(document, (section,)):
            place = (*item, "where") if section == "override" else item
            value = document.get(place)
            if isinstance(value, dict):
                yield place, value


def _unknown_axes(document: Document, named: Mapping[str, Json]) -> Iterator[Fault]:
    """Faults of unknown axes. The models accept any name, because of `settings.` axes."""
    known = {*AXES, *setting_axes(named)}
    for name in named:
        if name not in known:
            yield document.fault(("axes", name), f"unknown axis{_meant(name) or nearest(name, AXES)}")
    for place, rule in _rules(document, "exclude", "add", "override"):
        of_rules = {"release"} if place[0] != "add" else set()
        if place[0] == "add" and "gpu" in named and "gpu" not in rule:
            yield document.fault(place, "is required", key=(*place, "gpu"))
        for name in rule:
            if name not in known | of_rules:
                yield document.fault((*place, name), f"unknown axis{_meant(name) or nearest(name, known)}")
            elif name in _OPTIONAL and name not in named:
                yield document.fault((*place, name), f"the matrix has no axis {name}")


def _meant(name: str) -> str:
    """A hint if another axis combines this name with others."""
    if name in {"tp", "pp", "ep", "tp_size", "pp_size", "ep_size"}:
        return "; tensor, pipeline and expert parallelism are one axis: parallel: [tp1, tp2, tp4pp2, tp4ep4]"
    if name in {"isl", "osl"}:
        return '; input and output lengths are one axis: lengths: ["2048,1024", "128,128"]'
    return ""


def _setting_axes(document: Document, final: Document, named: Mapping[str, Json]) -> Iterator[Fault]:
    """Faults of the axes over settings: an invalid value, or a second place that sets it."""
    setters: list[tuple[Document, KeyPath]] = [(document, (_SETTINGS,)), (final, ())]
    setters += [(document, (*place, _SETTINGS)) for place in _places(document, ("override",))]
    added = list(_rules(document, "add"))
    for name in setting_axes(named):
        steps = name.removeprefix(SETTINGS_PREFIX).split(".")
        if steps[0] == "cluster":
            yield document.fault(("axes", name), "is the same for all cells: set it in the matrix's own settings")
        for written, at in setters:
            holder = written.get((*at, *steps[:-1]))
            if isinstance(holder, dict) and steps[-1] in holder:
                yield written.fault((*at, *steps), f"{name} is an axis, change axes.{name} instead")
        for place in (*_places(document, ("axes", name)), *((*place, name) for place, cell in added if name in cell)):
            value = document.get(place)
            if isinstance(value, dict):
                yield document.fault(place, "is a mapping, name one setting to vary")
            else:
                _, value_faults = check(Settings, Document("", nested(name, value)))
                yield from (document.fault(place, fault.message) for fault in value_faults)
        for place, cell in added:
            if name not in cell:
                yield document.fault(place, "is required", key=(*place, name))


def _repeated(document: Document, axes: Axes) -> Iterator[Fault]:
    """Faults of repeated values of an axis, including different spellings (tp4 and tp4pp1)."""
    for name, values in axes.model_dump(mode="json").items():
        first: dict[str, int] = {}
        for index, value in enumerate(values or ()):
            same = first.setdefault(json.dumps(value, sort_keys=True), index)
            if same != index:
                yield document.fault(("axes", name, index), f"the same value as {key_text(('axes', name, same))}")


def _recipes(document: Document, matrix: Path, changes: Sequence[Assignment]) -> tuple[dict[str, Recipe], list[Fault]]:
    """The recipes of all models by their names in the matrix, and their faults."""
    faults: list[Fault] = []
    places = _models(document)
    files: dict[str, Document] = {}
    paths: dict[str, Path | None] = {}
    offline = document.get((_SETTINGS, "download", "offline")) is True
    for model, place in places.items():
        try:
            files[model], paths[model] = recipe_document(model, matrix, offline=offline)
        except (UsageError, DownloadError) as error:
            mark = " " if error.message.endswith("?") else ": "
            faults.append(document.fault(place, mark.join(filter(None, (error.message, error.hint)))))
        except MatrixError as error:
            about_model = [document.fault(place, str(fault)) for fault in error.faults]
            faults += error.faults if is_recipe_name(model) else about_model
    for change in changes:
        faults += apply_set_to_recipes(files, change)
    recipes: dict[str, Recipe] = {}
    for model, file in files.items():
        recipe, recipe_faults = check_recipe(file, paths[model])
        faults += recipe_faults
        if recipe is not None:
            same = next((other for other, known in recipes.items() if known.name == recipe.name), None)
            if same is not None:
                faults.append(document.fault(places[model], f"has the same name in cell ids as {same}: {recipe.name}"))
            recipes[model] = recipe
    return recipes, faults


def _models(document: Document) -> dict[str, KeyPath]:
    """Models of a matrix, with the path of their first use."""
    places = [*_places(document, ("axes", "model")), *((*place, "model") for place, _ in _rules(document, "add"))]
    models: dict[str, KeyPath] = {}
    for place in places:
        value = document.get(place)
        if isinstance(value, str) and value:
            models.setdefault(value, place)
    return models
