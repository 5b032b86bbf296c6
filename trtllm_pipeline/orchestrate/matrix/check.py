"""Checks plain data against a model. Reports all faults at once, each with file, line, key and the nearest known name."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from trtllm_pipeline.base import Fault, Json
from trtllm_pipeline.orchestrate.matrix.derive import model_of
from trtllm_pipeline.orchestrate.matrix.document import Document, KeyPath, child, nearest

M = TypeVar("M", bound=BaseModel)
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
            example = "" if value is None or isinstance(value, dict) else f", such as [{_show(value)}]"
            return document.fault(where, f"must be a list{example}")
        case "string_type":
            quote = ", write it in quotes" if isinstance(error["input"], int | float) else ""
            return document.fault(where, f"must be text, not {_show(error['input'])}{quote}")
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
    def dig(annotation: Any) -> list[type[BaseModel]]:
        if get_origin(annotation) is None:
            return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []
        return [model for argument in get_args(annotation) for model in dig(argument)]

    return dig(model.model_fields[name].annotation)
