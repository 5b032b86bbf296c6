"""YAML and JSON files as plain data with the line of every value: read, changed by `--set`, and checked against a
model.

All faults are reported at once, each with file, line, key and the nearest known name. Values that can be written in
several ways have one canonical spelling.

The schema is YAML 1.2's core schema, so `no`, `on`, `1:30` and dates are text and `1e-3` is a number. Constructs that
are often misread or may be harmful are errors: repeated keys, numbers with leading zeros, tags, merge keys, several
documents, infinities, and files beyond the limits below. Files may be untrusted, and a few aliases of aliases can
expand to billions of values. JSON is read by the same rules.
"""

from __future__ import annotations

import copy
import difflib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_args, get_origin

from trtllm_pipeline.base import Fault, Json, UsageError, layout_name, parse_parallel, user_files

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic_core import ErrorDetails

KeyPath = tuple[str | int, ...]
"""Path of a value: keys and list positions from the top."""

MAX_BYTES: Final = 4 * 1024 * 1024
SUFFIXES: Final = (".yaml", ".yml", ".json")
SETTINGS_PREFIX: Final = "settings."
"""Prefix of an axis that varies a setting: `settings.perf.concurrency`."""
_LENGTHS: Final = re.compile(r"([1-9]\d{0,8}), ?([1-9]\d{0,8})")


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a value: a file and a line, or a command-line argument without a line."""

    path: str
    line: int | None


@dataclass(slots=True)
class Document:
    """Plain data with the origin of each part."""

    name: str
    data: Json
    origins: dict[KeyPath, Origin] = field(default_factory=dict)

    def fault(self, at: KeyPath, message: str, *, key: KeyPath | None = None) -> Fault:
        """A fault at `at`, or at the nearest enclosing value with an origin."""
        for end in range(len(at), -1, -1):
            origin = self.origins.get(at[:end])
            if origin is not None:
                return Fault(origin.path, origin.line, key_text(at if key is None else key), message)
        return Fault(self.name, None, key_text(at if key is None else key), message)

    def get(self, at: KeyPath) -> Json:
        value = self.data
        try:
            for step in at:
                value = child(value, step)
        except KeyError:
            return None
        return value


def child(value: Json, step: str | int) -> Json:
    """The item of `value` under a key or at a position. Raises KeyError if there is none."""
    if isinstance(value, dict) and isinstance(step, str):
        return value[step]
    if isinstance(value, list) and isinstance(step, int) and 0 <= step < len(value):
        return value[step]
    raise KeyError(step)


def key_text(at: KeyPath) -> str:
    """`override[0].where.model` for ("override", 0, "where", "model")."""
    text = ""
    for step in at:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


_MOST_SHOWN: Final = 8


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'X'?` for the most similar of `known`, or the list of known names, or an empty text if there are
    many.

    A prefix or a part of several names, such as `qwen` of `qwen2` and `qwen3`, or `awq` of `int4_awq` and `w4a8_awq`, may
    mean any of them. Case does not count.
    """
    names = sorted({*known} - {name})  # a refused name is not a suggestion
    plain, lowered = name.lower(), {each.lower(): each for each in names}
    longer = [
        each for low, each in lowered.items() if plain and low.startswith(plain) and not low[len(plain) :][:1].isalpha()
    ]
    longer = longer or [each for low, each in lowered.items() if plain in low.split("_")]
    if len(longer) > 1:
        shown = longer[:_MOST_SHOWN]
        return f"; did you mean one of {', '.join(shown)}{', ...' if shown != longer else ''}?"
    close = difflib.get_close_matches(plain, lowered, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {lowered[close[0]]!r}?"
    return f"; known are {', '.join(names)}" if 0 < len(names) <= 20 else ""


def read(path: Path) -> Document:
    """The data of a YAML or JSON file. Raises MatrixError with all faults."""
    name = os.fspath(path)
    text = user_files.read_text(path, limit=MAX_BYTES)
    return parse(text, name, json=path.suffix == ".json")


def parse(text: str, name: str, *, lines: bool = True, json: bool = False) -> Document:
    """The data of YAML or JSON text. Faults use `name`. Raises MatrixError with all faults."""
    from trtllm_pipeline.orchestrate.matrix.yaml_reader import parsed  # it imports this module

    return parsed(text, name, lines=lines, json=json)


# ------------------------------------------------------------------------------------------------------ against a model

M = TypeVar("M", bound="BaseModel")
_SCALARS = {"bool_type", "int_type", "float_type", "string_type"}
"""Errors of a value that must be a scalar and is not, one for each member of the union."""
_LISTS = {"tuple_type", "too_short"}
"""Errors of a value that may also be a list."""
_INSTEAD = {"literal_error": list, "string_type": dict}
"""Other types that a value may have. If the value has one of them, the fault of that type is reported instead."""
_OF_ALL = {"too_short", "too_long", "value_error"}
"""Errors of a list or a mapping itself, not of its items."""


def check(model: type[M], document: Document, at: KeyPath = ()) -> tuple[M | None, list[Fault]]:
    """`document`'s value at `at` as `model`, or None, and its faults.

    The data passes through JSON, since strict mode accepts lists for tuples and text for enums only from JSON.
    """
    from pydantic import ValidationError  # a list of recipes needs no model

    data = document.get(at)
    try:
        return model.model_validate_json(json.dumps(data)), []
    except ValidationError as error:
        # pydantic also reports a list with only invalid items as empty.
        details = [each for each in error.errors(include_url=False) if each["type"] != "too_short" or not each["input"]]
    paths = [(_path(data, each["loc"]), each["type"]) for each in details]
    details = [
        each
        for each, (path, kind) in zip(details, paths, strict=True)
        if not isinstance(each["input"], _INSTEAD.get(kind, ()))
        or not any(other[: len(path)] == path and (len(other) > len(path) or of in _OF_ALL) for other, of in paths)
    ]
    tried = Counter(_path(data, each["loc"]) for each in details if each["type"] in _SCALARS)
    no_scalar = [path for path, members in tried.items() if members == len(_SCALARS)]
    # The value may also be a list: report the invalid items instead.
    items = {path[:-1] for path in no_scalar if isinstance(document.get(at + path[:-1]), list)}
    listed = {_path(data, each["loc"]) for each in details if each["type"] in _LISTS}
    return None, [
        *(
            document.fault(
                at + path,
                f"must be one value{' or a list of values' * (path in listed)}, not {_show(document.get(at + path))}",
            )
            for path in no_scalar
            if path not in items
        ),
        *(_fault(model, document, at, data, each) for each in details if _path(data, each["loc"]) not in no_scalar),
    ]


def parameter_faults(cls: type, given: Mapping[str, Json]) -> list[Fault]:
    """Faults of parameters that are given for an object of the parameter class `cls`."""
    from trtllm_pipeline.orchestrate.matrix.derive import model_of

    return check(model_of(cls), Document("", dict(given)))[1]


def _fault(model: type[BaseModel], document: Document, at: KeyPath, data: Json, error: ErrorDetails) -> Fault:
    where = at + _path(data, error["loc"])
    match error["type"]:
        case "missing":
            return document.fault(where, "is required", key=(*where, str(error["loc"][-1])))
        case "extra_forbidden":
            name, known = str(error["loc"][-1]), _keys(model, error["loc"][:-1])
            siblings = document.get(where[:-1])
            if name in known and isinstance(siblings, dict):  # a key of another member of a union
                return document.fault(
                    where, f"cannot be combined with {', '.join(key for key in siblings if key != name)}"
                )
            return document.fault(where, f"unknown key{nearest(name, known)}")
        case "literal_error":
            known = error["ctx"]["expected"].replace(" or ", ", ").replace("'", "").split(", ")
            return document.fault(where, f"{_show(error['input'])} is not allowed{nearest(str(error['input']), known)}")
        case "value_error" | "source_kind" | "precisions_form":
            return document.fault(where, error["msg"].removeprefix("Value error, "))
        case "dict_type" | "model_type" | "model_attributes_type":
            return document.fault(where, f"must be a mapping of keys to values, not {_show(error['input'])}")
        case "tuple_type" | "list_type":
            value = error["input"]
            shown = _show(value)
            if isinstance(value, str) and where[-1:] != ("lengths",):  # "16, 64" is meant as a list
                shown = ", ".join(each if each.isdecimal() else _show(each) for each in re.split(r"\s*,\s*", value))
            example = "" if value is None or isinstance(value, dict) else f", such as [{shown}]"
            return document.fault(where, f"must be a list{example}")
        case "string_type":
            value = error["input"]
            advice = ", write it in quotes" if isinstance(value, int | float) else ""
            if advice and where[:2] in _WRITTEN and not isinstance(value, bool):
                advice = f", write {_WRITTEN[where[:2]].format(value)}"
            return document.fault(where, f"must be text, not {_show(value)}{advice}")
        case "int_type" | "int_from_float":
            return document.fault(where, f"must be a whole number, not {_show(error['input'])}")
        case "string_pattern_mismatch":
            form = (
                "the model_type of config.json, such as qwen2" if where[-1:] == ("family",) else error["ctx"]["pattern"]
            )
            return document.fault(where, f"{_show(error['input'])} is not of the form {form}")
        case "too_short":
            return document.fault(where, "must not be empty")
        case "too_long":
            return document.fault(where, f"must not have more than {error['ctx']['max_length']}")
        case _:
            message = error["msg"].removeprefix("Input ")
            return document.fault(where, f"{message[:1].lower()}{message[1:]}, not {_show(error['input'])}")


_WRITTEN: Final[Mapping[KeyPath, str]] = {
    ("axes", "lengths"): 'each pair in quotes, such as "2048,512"',
    ("axes", "parallel"): "tp{}",
}
"""How values that look like numbers are written."""


def _show(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _path(data: Json, location: tuple[str | int, ...]) -> KeyPath:
    """The part of pydantic's location that exists in the data. The location also has members of unions."""
    path: list[str | int] = []
    for step in location:
        with suppress(KeyError):
            data = child(data, step)
            path.append(step)
    return tuple(path)


def _keys(model: type[BaseModel], location: tuple[str | int, ...]) -> list[str]:
    """Known keys at a location of `model`, for a union those of all members."""
    models = [model]
    for step in location:
        inner = [member for each in models if step in each.model_fields for member in _models(each, str(step))]
        models = inner or models
    return [name for each in models for name in each.model_fields]


def _models(model: type[BaseModel], name: str) -> list[type[BaseModel]]:
    from pydantic import BaseModel

    def dig(annotation: Any) -> list[type[BaseModel]]:
        if get_origin(annotation) is None:
            return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []
        return [model for argument in get_args(annotation) for model in dig(argument)]

    return dig(model.model_fields[name].annotation)


# ------------------------------------------------------------------------------------------------------ changed by --set


@dataclass(frozen=True, slots=True)
class Assignment:
    """One `--set`: the path, and the value as a document that has the argument as its name."""

    path: KeyPath
    value: Document


def parse_set(argument: str) -> Assignment:
    """The change of one `--set KEY=VALUE`. VALUE is YAML on one line. KEY is one of

    settings.SECTION.KEY       for every cell, overrides the matrix's settings and overrides
    axes.AXIS                  the values of an axis
    recipes.NAME.FIELD         a field of a recipe; NAME may be * for all; `sources.0.revision` is a path into lists
    name, description          of the matrix

    Raises UsageError, or MatrixError for a value that is not YAML.
    """
    key, equals, text = argument.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UsageError(f"--set {argument}: write KEY=VALUE", hint="for example --set settings.perf.concurrency=[1,8]")
    name = f"--set {argument}"
    value = parse(text, name, lines=False) if text.strip() else Document(name, None)
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


def apply_set(document: Document, change: Assignment) -> list[Fault]:
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


def apply_set_to_recipes(files: Mapping[str, Document], change: Assignment) -> list[Fault]:
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
    return [fault for file in chosen for fault in apply_set(file, inner)]


def _steps(key: str) -> KeyPath:
    return tuple(int(step) if re.fullmatch(r"[0-9]{1,6}", step) else step for step in key.split("."))


def parse_lengths(text: str) -> tuple[int, int]:
    """Input and output tokens of `2048,1024`. Raises ValueError for other text."""
    match = _LENGTHS.fullmatch(text)
    if match is None:
        raise ValueError(
            f'{text!r} is not a pair of lengths: write "ISL,OSL", each from 1 to 999999999 tokens, such as "2048,1024"'
        )
    return int(match[1]), int(match[2])


def canonical_parallel(text: str) -> str:
    """`tp4pp1` for `tp4`, `tp4pp1ep4` for `tp4ep4`: the spelling in ids and comparisons."""
    return layout_name(*parse_parallel(text))


def canonical_lengths(text: str) -> str:
    """`2048,1024` for `2048, 1024`."""
    isl, osl = parse_lengths(text)
    return f"{isl},{osl}"


def setting_axes(axes: Mapping[str, object]) -> list[str]:
    """Names of the axes that vary a setting, in the order of the file."""
    return [name for name in axes if name.startswith(SETTINGS_PREFIX)]


def nested(name: str, value: Json) -> dict[str, Json]:
    """`{"perf": {"concurrency": value}}` for the axis `settings.perf.concurrency`."""
    first, *rest = name.removeprefix(SETTINGS_PREFIX).split(".")
    for key in reversed(rest):
        value = {key: value}
    return {first: value}
