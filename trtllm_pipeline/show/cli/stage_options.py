"""The options of a stage's command: its inputs, files and parameters, for all toolchains.

They follow from the tables of the toolchains, which also parse the typed values.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, is_dataclass
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin

from trtllm_pipeline.base import Json, Scope, UsageError
from trtllm_pipeline.show.cli import options
from trtllm_pipeline.tensorrt import Stage, companions, lora, params
from trtllm_pipeline.tensorrt import catalog as toolchains

T = TypeVar("T")
_BY_HAND = "Explicit files"
_PARAMETERS = "Parameters"
_MOST_LEVELS: Final = 100
"""Maximum numbers in a range."""
FETCHING = ("download", *companions.NAMES)
"""Stages with a model as argument."""
OF_ANOTHER = {("score", "input_data"): "perf"}
"""Files that are another stage's setting. Without a matrix, they are unknown."""
SHARED: tuple[tuple[str, Any, Any], ...] = (
    ("matrix", options.OptionalMatrix, None),
    ("cells", options.Cells, None),
    ("sets", options.Sets, None),
    ("toolchain", options.Toolchain, None),
    ("workspace", options.Workspace, options.WORKSPACE),
    ("format", options.TextOrJson, "text"),
)


def of_name(name: str) -> list[Stage]:
    return [stage for each in toolchains.every_name() for stage in toolchains.load(each).stages if stage.name == name]


def signature(name: str, stages: list[Stage]) -> inspect.Signature:
    """The options of a stage. Several toolchains may have it, each with some of them."""
    own = [_parameter(*each) for each in SHARED]
    if name in FETCHING:
        about = options.argument("MODEL", "ORGANIZATION/NAME[@REVISION], a recipe, or a directory.")
        own.append(_parameter("model", Annotated[str | None, about]))
    for place in dict.fromkeys(each for stage in stages for each in stage.inputs):
        upstream = " or ".join(next(stage for stage in stages if place in stage.inputs).upstream(place))
        if place in lora.ADAPTERS:
            upstream = companions.ADAPTER
        if place == "service":
            own.append(_text("in_service", "--service", "FILE", f"Output of pipeline stage {upstream} --format json."))
        else:
            own.append(_text(f"in_{place}", flag(place), "DIR", f"Output of {upstream}."))
    for file in dict.fromkeys(each for stage in stages for each in stage.file_names):
        of = OF_ANOTHER.get((name, file))
        text = f"The file or builtin:NAME used for {of} (required)." if of else "Your own file, or builtin:NAME."
        own.append(_text(f"file_{file}", flag(file), "FILE", text))
    if stages[0].scope is Scope.SERVICE:
        about = options.switch(
            "--print", "Print the server's command, with environment and ports, without starting it."
        )
        own.append(_parameter("print", Annotated[bool, about], default=False))
    else:
        own.append(_text("output_dir", "--output-dir", "DIR", "New or empty directory for the result."))
    known: dict[str, list[params.ParamField]] = {}
    for path, field in (each for stage in stages for each in _flat(stage.params)):
        known.setdefault("_".join(path), []).append(field)
    of_the_model = {"source", "folder", "copies", "content", "form"} if name in FETCHING else {}
    own += [_option(each, same) for each, same in known.items() if each not in of_the_model]
    return inspect.Signature(own, return_annotation=int)


def _parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _text(name: str, option: str, metavar: str, text: str, panel: str = _BY_HAND, **more: Any) -> inspect.Parameter:
    about = options.option(option, metavar, text, rich_help_panel=panel, show_default=False, **more)
    return _parameter(name, Annotated[str | None, about])


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _flat(cls: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], params.ParamField]]:
    """The parameters of a class that can be typed, each by its path: some are classes themselves."""
    for each in params.table(cls):
        inner = (*path, each.name)
        if each.about.of_matrix:
            continue
        if is_dataclass(each.type):
            yield from _flat(each.type, inner)
        else:
            yield inner, each


def _option(name: str, same: list[params.ParamField]) -> inspect.Parameter:
    """The option of a parameter of one or more toolchains. All except switches are read as text, and checked together."""
    field = same[0]
    option, text = flag(name), f"{capital(field.about.help)}{_default(field)}."
    if field.type is bool:
        about = options.switch(option, text, rich_help_panel=_PARAMETERS, show_default=False)
        return _parameter(name, Annotated[bool | None, about])
    if _is_mapping(field) or name in _TEXTS:
        metavar = "TEXT" if name in _TEXTS else "NAME=VALUE"
        text = f"{text} Repeatable."
        about = options.option(option, metavar, text, rich_help_panel=_PARAMETERS, show_default=False)
        return _parameter(name, Annotated[list[str] | None, about])
    every = all(each.choices for each in same)  # if one accepts any text, there are no choices
    choices = list(dict.fromkeys(word for each in same for word in each.choices)) if every else []
    few = 0 < len(choices) < 4 and name not in _METAVARS
    metavar = "|".join(choices) if few else _metavar(field)
    if choices and not few:
        text = f"{capital(field.about.help)}: {', '.join(choices)}{_default(field)}."
    return _text(name, option, metavar, text, _PARAMETERS, complete=(lambda: choices) if choices else None)


def _is_mapping(field: params.ParamField) -> bool:
    return get_origin(field.type) is dict and field.type != params.Objectives and field.type != params.Precisions


_TEXTS = ("stop_words",)
"""Lists whose values may contain a comma."""
_METAVARS = {
    **dict.fromkeys(("http_port", "grpc_port", "metrics_port"), "PORT"),
    **dict.fromkeys(
        ("family", "lora", "model_name", "precision", "protocol", "frontend", "kv_cache_precision"), "NAME"
    ),
    "host": "ADDRESS",
    "url": "URL",
}
"""Placeholders for options whose type does not describe their values."""


def _metavar(field: params.ParamField) -> str:
    if field.name in _METAVARS:
        return _METAVARS[field.name]
    if field.type == params.Objectives:
        return "OBJECTIVES"
    if field.type == params.Precisions:
        return "METRIC=PERCENT,..."
    if get_origin(field.type) is tuple:
        return "N,..." if get_args(field.type)[0] in {int, float} else "NAME,..."
    return {int: "N", float: "DURATION" if is_duration(field) else "NUMBER"}.get(field.type, "TEXT")


def is_duration(field: params.ParamField) -> bool:
    """True if the parameter is a number of seconds, typed as a duration."""
    return field.type is float and field.name.endswith("_s")


def _default(field: params.ParamField) -> str:
    if field.default is MISSING:
        return " (required)"
    if field.default is None:
        return f" (default: {field.about.null})" if field.about.null else ""
    if field.default in ((), {}):
        return ""
    if isinstance(field.default, bool):
        return f" (default: {'yes' if field.default else 'no'})"
    value = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
    return f" (default: {value:g})" if isinstance(value, float) else f" (default: {value})"


def with_class(
    function: Callable[..., Any],
    cls: Any,
    *,
    but: Sequence[str] = (),
    panels: Mapping[str, Sequence[str]] = MappingProxyType({}),
    panel: str = _PARAMETERS,
) -> Callable[..., Any]:
    """`function` as a command that also has the options of a class, which it receives as `**`, except those in `but`.

    `panels` groups options in the help, by title. Those of the class that are in none are in `panel`. All others come
    first.
    """
    signature = inspect.signature(function, eval_str=True)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    more = [_option(name, [field]) for path, field in _flat(cls) if (name := "_".join(path)) not in but]
    titles = {each.name: panel for each in more} | {name: title for title, names in panels.items() for name in names}
    places = ["", *panels, panel]
    parameters = [_in_panel(each.replace(kind=each.KEYWORD_ONLY), titles.get(each.name, "")) for each in (*own, *more)]
    parameters.sort(key=lambda each: places.index(titles.get(each.name, "")))
    vars(function)["__signature__"] = signature.replace(parameters=parameters)
    return function


def _in_panel(parameter: inspect.Parameter, title: str) -> inspect.Parameter:
    """A parameter with its option below `title` in the help, if there is one."""
    if not title:
        return parameter
    kind, about = get_args(parameter.annotation)
    about = copy(about)
    about.rich_help_panel = title
    return parameter.replace(annotation=Annotated[kind, about])


def read_class(cls: Callable[..., T], typed: Mapping[str, Any], *defaults: Mapping[str, Any]) -> T:
    """An object of a parameter class: typed values, `defaults`, else its own. Raises UsageError with all faults."""
    found, wrong = _values(cls, typed)
    wrong += [] if wrong else faults(cls, found)
    if wrong:
        raise UsageError("\n  ".join(wrong))
    try:
        return params.load(cls, found, *defaults)
    except ValueError as error:  # contradictory values
        raise UsageError(str(error)) from error


def values(stage: Stage, typed: Mapping[str, Any]) -> dict[str, Any]:
    """The typed parameters. Raises UsageError with all invalid ones."""
    found, wrong = _values(stage.params, typed)
    others = {name for each in of_name(stage.name) for name in _names(each)} - {*_names(stage)}
    wrong += [f"{flag_of(name)}: this toolchain does not have this option" for name in typed if name in others]
    if wrong:
        raise UsageError("\n  ".join(wrong))
    return found


def _values(cls: Any, typed: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    found: dict[str, Any] = {}
    wrong: list[str] = []
    for path, field in _flat(cls):
        if (name := "_".join(path)) in typed:
            try:
                _put(found, path, _read(field, typed[name]))
            except ValueError as error:
                wrong.append(f"{flag(name)}: {error}")
    return found, wrong


def faults(cls: Any, given: Mapping[str, Any]) -> list[str]:
    """Missing parameters of a class, and values that are invalid in a matrix."""
    from trtllm_pipeline.orchestrate import parameter_faults

    return [f"{flag(str(fault.key).replace('.', '_'))} {fault.message}" for fault in parameter_faults(cls, given)]


def _names(stage: Stage) -> Iterator[str]:
    yield from (f"in_{each}" for each in stage.inputs)
    yield from (f"file_{each}" for each in stage.file_names)
    yield from ("_".join(path) for path, _ in _flat(stage.params))


def flag_of(typed: str) -> str:
    return flag(typed.removeprefix("in_").removeprefix("file_"))


def _read(field: params.ParamField, text: Any) -> Any:
    """The value of typed text. Raises ValueError."""
    if isinstance(text, bool):
        return text
    if field.type == params.Objectives:
        from trtllm_pipeline.measure import objectives

        return {f"{name}_ms": limit for name, limit in objectives.per_request(text).items()}
    if field.type == params.Precisions:
        from trtllm_pipeline.measure import stopping

        return stopping.parse_precisions(text, get_args(params.StopMetric))
    if _is_mapping(field):
        return _mapping(text)
    if isinstance(text, list):
        return text
    if get_origin(field.type) is tuple:
        kind = get_args(field.type)[0]
        parts = [part.strip() for part in text.split(",") if part.strip()]
        return [_scalar(kind, each) for part in parts for each in (_spread(part) if kind is int else [part])]
    return options.seconds(text) if is_duration(field) else _scalar(field.type, text)


def _spread(part: str) -> list[str]:
    """The numbers in FIRST:LAST[:STEP], or `part` itself. Raises ValueError."""
    if ":" not in part:
        return [part]
    words = [int(word) if word.isdecimal() and len(word) < 10 else 0 for word in part.split(":")]
    first, last, step = (*words, 1)[:3] if len(words) < 4 else (0, 0, 0)
    values = range(first, last + 1, step) if first and step else range(0)
    if not 0 < len(values) <= _MOST_LEVELS:
        raise ValueError(
            f"expected FIRST:LAST:STEP with at most {_MOST_LEVELS} levels, such as 2:8:2 for 2,4,6,8, got {part!r}"
        )
    return list(map(str, values))


def _scalar(kind: Any, text: str) -> Json:
    if kind not in {int, float}:
        return text
    try:
        if "_" in text:  # a separator in Python only
            raise ValueError
        return int(text) if kind is int else float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not {'a whole number' if kind is int else 'a number'}") from None


_SIGN: Final = re.compile("[=:]")


def _mapping(pairs: list[str]) -> dict[str, Any]:
    """`a.b=1` and `c=text` as a mapping. Values are YAML. `c:text`, the syntax of other load clients, means the same."""
    from trtllm_pipeline.base import user_files

    found: dict[str, Any] = {}
    for pair in pairs:
        name, *texts = _SIGN.split(pair, maxsplit=1)
        if not texts or not name:
            raise ValueError(f"{pair!r} is not of the form NAME=VALUE")
        (text,) = texts
        value = user_files.decode_yaml(text.encode())
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise ValueError(f"{pair!r}: {text} is not a JSON value; to set it as text: {name}='\"{text}\"'") from None
        if not _put(found, name.split("."), value):
            raise ValueError(f"{pair!r}: {name}, or its parent, already has a value")
    return found


def _put(found: dict[str, Any], path: Sequence[str], value: Any) -> bool:
    """Set a value in nested mappings, unless it or its parent has one. Returns whether it was set."""
    inner: Any = found
    for step in path[:-1]:
        inner = inner.setdefault(step, {}) if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or path[-1] in inner:
        return False
    inner[path[-1]] = value
    return True


def instead(stage: Stage, typed: str) -> str:
    """The equivalent of a typed option for a stage with a matrix."""
    from pydantic import BaseModel

    from trtllm_pipeline.orchestrate import Axes, Settings

    name = typed.removeprefix("file_")
    section = OF_ANOTHER.get((stage.name, name), stage.section or stage.name)
    settings: BaseModel = getattr(Settings(), section)
    keys = {key: key for key, _ in settings}
    keys |= {
        f"{outer}_{key}": f"{outer}.{key}"
        for outer, value in settings
        if isinstance(value, BaseModel)
        for key, _ in value
    }
    if name in keys:
        return f"--set settings.{section}.{keys[name]}=VALUE changes this setting of the matrix"
    if name in Axes.model_fields:
        return f"--set axes.{name}=[VALUE] changes an axis of the matrix"
    return "leave it out: the matrix determines the inputs of its cells"
