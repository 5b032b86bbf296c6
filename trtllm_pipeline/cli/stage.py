"""`pipeline download|convert|build|...`: one stage, for cells of a matrix or for explicit files.

The options of a stage are its inputs, its files and its parameters, whichever toolchain has them; they follow from the
tables of the toolchains. `__getattr__` makes the command of a stage.
"""

from __future__ import annotations

import inspect
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import MISSING, is_dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, TextIO, get_args, get_origin

from trtllm_pipeline.cli import options
from trtllm_pipeline.cli.output import emit, emit_json, note
from trtllm_pipeline.domain import Json, Scope
from trtllm_pipeline.errors import MatrixError, StageError, UsageError
from trtllm_pipeline.processes.process import allow_open_files
from trtllm_pipeline.stages.base import SERVICE_FILE, Stage, StageContext
from trtllm_pipeline.stages.params import Objectives, ParamField, load, table
from trtllm_pipeline.toolchains import base as toolchains
from trtllm_pipeline.worker import run_program, write_job

if TYPE_CHECKING:
    from trtllm_pipeline.planning.plan import Plan
    from trtllm_pipeline.store.store import Store

_BY_HAND = "On explicit files"
_PARAMETERS = "Parameters"
_EXAMPLES = {
    "download": ("download Qwen/Qwen2.5-0.5B-Instruct --output-dir model",),
    "quantize": ("quantize --model model --precision fp8 --family qwen2 --output-dir checkpoint",),
    "convert": ("convert --model model --precision int8_wo --output-dir checkpoint",),
    "build": (
        "build --checkpoint checkpoint --max-batch-size 4 --max-input-len 512 --max-seq-len 640 --output-dir engine",
    ),
    "check": ("check --engine engine --model model --output-dir checked",),
    "repository": ("stage repository --engine engine --max-batch-size 4 --output-dir repository",),
    "launch": ("launch --repository repository", "launch --repository repository --format json > service.json"),
    "smoke": ("smoke --service service.json --repository repository --engine engine --output-dir smoke",),
    "perf": ("perf --service service.json --repository repository --engine engine --output-dir perf",),
    "accuracy": ("accuracy --service service.json --engine engine --output-dir accuracy",),
    "score": ("score --perf perf --engine engine --input-data questions.jsonl --output-dir scores",),
}
_OF_ANOTHER = {("score", "input_data"): "perf"}
"""Files that are another stage's setting: by hand nobody knows what that stage was given."""


_SHARED: tuple[tuple[str, Any, Any], ...] = (
    ("matrix", options.OptionalMatrix, None),
    ("cells", options.Cells, None),
    ("sets", options.Sets, None),
    ("toolchain", options.Toolchain, None),
    ("workspace", options.Workspace, options.WORKSPACE),
    ("format", options.TextOrJson, "text"),
)


def __getattr__(name: str) -> Callable[..., int]:
    stages = [stage for each in toolchains.names() for stage in toolchains.load(each).stages if stage.name == name]
    if not stages:
        raise AttributeError(name)
    return _verb(name, stages)


# -------------------------------------------------------------------------------------------------- the command


def _verb(name: str, stages: list[Stage]) -> Callable[..., int]:
    """The command of a stage that several toolchains may have, each with some of its options."""

    def command(**values: Any) -> int:
        typed = {each: value for each, value in values.items() if value not in (None, [])}
        return _run(name, typed)

    own = [_parameter(*each) for each in _SHARED]
    if name == "download":
        about = options.argument("MODEL", "ORGANISATION/NAME[@REVISION], a recipe, or a folder.")
        own.append(_parameter("model", Annotated[str | None, about]))
    for place in dict.fromkeys(each for stage in stages for each in stage.inputs):
        upstream = " or ".join(next(stage for stage in stages if place in stage.inputs).upstream(place))
        if place == "service":
            text, metavar = f"What pipeline {upstream} --format json printed.", "FILE"
        else:
            text, metavar = f"What {upstream} left.", "DIR"
        own.append(_text(f"in_{place}", flag(place), metavar, text))
    own += [
        _text(f"file_{file}", flag(file), "FILE", _about_file(name, file))
        for file in dict.fromkeys(each for stage in stages for each in stage.file_names)
    ]
    if stages[0].scope is not Scope.SERVICE:
        own.append(_text("output_dir", "--output-dir", "DIR", "New or empty folder for the result."))
    known: dict[str, list[ParamField]] = {}
    for each in (each for stage in stages for each in _flat(stage.params)):
        known.setdefault(each.name, []).append(each)
    own += [_option(same) for each, same in known.items() if name != "download" or each not in {"source", "folder"}]
    vars(command)["__signature__"] = inspect.Signature(own, return_annotation=int)
    matrix = "--matrix quickstart --cells 'smollm2*/int8_wo/*/bs4'"
    lines = (*_EXAMPLES[name], f"{'stage ' * (name == 'repository')}{name} {matrix}")
    command.__doc__ = (
        f"{_capital(stages[0].summary)}.\n\n"
        "With --matrix: for the selected cells, after all earlier stages, in the workspace. Without: on the files you "
        "name; nothing else is read or written.\n\nexamples:\n" + "\n".join(f"  pipeline {line}" for line in lines)
    )
    return command


def _parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _text(name: str, option: str, metavar: str, text: str, panel: str = _BY_HAND, **more: Any) -> inspect.Parameter:
    about = options.option(option, metavar, text, rich_help_panel=panel, show_default=False, **more)
    return _parameter(name, Annotated[str | None, about])


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def flag(name: str) -> str:
    """The command-line flag of an input, file or parameter."""
    return "--" + name.replace("_", "-")


def _about_file(stage: str, name: str) -> str:
    if of := _OF_ANOTHER.get((stage, name)):
        return f"The file, or builtin:NAME, that {of} was given (required)."
    return "Your own file, or builtin:NAME."


def _flat(cls: Any, prefix: str = "") -> Iterator[ParamField]:
    """The parameters of a class; those of one inside it with its name before them."""
    for each in table(cls):
        if is_dataclass(each.type):
            yield from _flat(each.type, f"{each.name}_")
        else:
            yield each._replace(name=f"{prefix}{each.name}")


def _option(same: list[ParamField]) -> inspect.Parameter:
    """The option of a parameter of one or more toolchains; all but switches are read as text, and checked together."""
    field = same[0]
    name, option, text = field.name, flag(field.name), f"{_capital(field.about.help)}{_default(field)}."
    if field.type is bool:
        about = options.switch(option, text, rich_help_panel=_PARAMETERS, show_default=False)
        return _parameter(name, Annotated[bool | None, about])
    if _is_mapping(field):
        about = options.option(option, "NAME=VALUE", text, rich_help_panel=_PARAMETERS, show_default=False)
        return _parameter(name, Annotated[list[str] | None, about])
    every = all(each.choices for each in same)  # where one takes any text, there is nothing to choose from
    choices = list(dict.fromkeys(word for each in same for word in each.choices)) if every else []
    metavar = "|".join(choices) if 0 < len(choices) < 4 else _metavar(field)
    if len(choices) > 3:
        text = f"{_capital(field.about.help)}: {', '.join(choices)}{_default(field)}."
    return _text(name, option, metavar, text, _PARAMETERS, complete=(lambda: choices) if choices else None)


def _is_mapping(field: ParamField) -> bool:
    return get_origin(field.type) is dict and field.type != Objectives


def _metavar(field: ParamField) -> str:
    if field.type == Objectives:
        return "ttft=300ms,..."
    if get_origin(field.type) is tuple:
        return "N,..." if get_args(field.type)[0] in {int, float} else "NAME,..."
    return {int: "N", float: "SECONDS" if field.name.endswith("_s") else "NUMBER"}.get(field.type, "TEXT")


def _default(field: ParamField) -> str:
    if field.default is MISSING:
        return " (required)"
    if field.default is None:
        return f" (default: {field.about.unset})" if field.about.unset else ""
    if field.default in ((), {}):
        return ""
    if isinstance(field.default, bool):
        return f" (default: {'yes' if field.default else 'no'})"
    value = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
    return f" (default: {value:g})" if isinstance(value, float) else f" (default: {value})"


# ---------------------------------------------------------------------------------------------------- what was typed


def _values(stage: Stage, typed: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that were typed. Raises UsageError for those that cannot be, all at once."""
    found: dict[str, Any] = {}
    wrong: list[str] = []
    for outer in table(stage.params):
        inner = is_dataclass(outer.type)
        for each in _flat(outer.type, f"{outer.name}_") if inner else (outer,):
            if each.name not in typed:
                continue
            try:
                value = _read(each, typed[each.name])
            except ValueError as error:
                wrong.append(f"{flag(each.name)}: {error}")
                continue
            if inner:
                found.setdefault(outer.name, {})[each.name.removeprefix(f"{outer.name}_")] = value
            else:
                found[outer.name] = value
    stages = [each for name in toolchains.names() for each in toolchains.load(name).stages if each.name == stage.name]
    others = {name for each in stages for name in _names(each)} - {*_names(stage)}
    wrong += [f"{_flag_of(name)}: this toolchain has no such option" for name in typed if name in others]
    if wrong:
        raise UsageError("\n  ".join(wrong))
    return found


def _names(stage: Stage) -> Iterator[str]:
    """The names under which inputs, files and parameters of a stage are typed."""
    yield from (f"in_{each}" for each in stage.inputs)
    yield from (f"file_{each}" for each in stage.file_names)
    yield from (each.name for each in _flat(stage.params))


def _flag_of(typed: str) -> str:
    return flag(typed.removeprefix("in_").removeprefix("file_"))


def _read(field: ParamField, text: Any) -> Any:
    """The value of what was typed. Raises ValueError."""
    if isinstance(text, bool):
        return text
    if field.type == Objectives:
        from trtllm_pipeline.bench.objectives import per_request

        return {f"{name}_ms": limit for name, limit in per_request(text).items()}
    if _is_mapping(field):
        return _mapping(text)
    if get_origin(field.type) is tuple:
        return [_scalar(get_args(field.type)[0], part.strip()) for part in text.split(",") if part.strip()]
    return _scalar(field.type, text)


def _scalar(kind: Any, text: str) -> Json:
    if kind not in {int, float}:
        return text
    try:
        return int(text) if kind is int else float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not {'a whole number' if kind is int else 'a number'}") from None


def _mapping(pairs: list[str]) -> dict[str, Any]:
    """`a.b=1` and `c=text` as a mapping; values are YAML."""
    from trtllm_pipeline.files.user_files import decode_yaml

    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise ValueError(f"{pair!r} is not of the form NAME=VALUE")
        inner: Any = found
        *path, last = name.split(".")
        for step in path:
            inner = inner.setdefault(step, {}) if isinstance(inner, dict) else None
        if not isinstance(inner, dict) or last in inner:
            raise ValueError(f"{pair!r}: {name}, or what it is part of, has a value already")
        inner[last] = decode_yaml(text.encode())
        try:
            json.dumps(inner[last], allow_nan=False)
        except (TypeError, ValueError):
            raise ValueError(f"{pair!r}: {text} is no value of JSON; to give it as text: {name}='\"{text}\"'") from None
    return found


def _wrong(stage: Stage, values: Mapping[str, Any]) -> list[str]:
    """What is missing of the parameters of a stage, and what no matrix could have."""
    from trtllm_pipeline.config.check import check
    from trtllm_pipeline.config.derive import model_of
    from trtllm_pipeline.config.document import Document

    _, faults = check(model_of(stage.params), Document("", dict(values)))
    return [f"{flag(str(fault.key).replace('.', '_'))} {fault.message}" for fault in faults]


# ------------------------------------------------------------------------------------------------------------- runs


def _run(name: str, typed: dict[str, Any]) -> int:
    stage = _stage(name, typed.get("toolchain"))
    if typed.get("matrix") is not None:
        return _for_cells(stage, typed)
    if only := [option for each, option in (("cells", "--cells"), ("sets", "--set")) if each in typed]:
        raise UsageError(f"{' and '.join(only)} need a matrix", hint="give --matrix FILE as well")
    values = _values(stage, typed)
    settled: dict[str, Any] = {"source": {}} if name == "download" else {}
    _refuse(
        name,
        _wrong_paths(stage, typed) + _wrong(stage, {**settled, **values}),
        "; or give a matrix: --matrix FILE --cells ID",
    )
    if name == "download":
        options.empty_folder(typed["output_dir"])  # before a hub is asked
        values = _download(typed, values)
    try:
        asked = load(stage.params, values)
    except ValueError as error:
        raise UsageError(f"pipeline {name}: {error}", hint=f"pipeline help {name} lists all options") from error
    return _by_hand(stage, typed, asked)


def _refuse(name: str, wrong: list[str], or_else: str = "") -> None:
    """Raise UsageError if anything is wrong."""
    if wrong:
        hint = f"pipeline help {name} lists all options{or_else}"
        raise UsageError(f"pipeline {name}: " + "\n  ".join(wrong), hint=hint)


def _stage(name: str, toolchain: str | None) -> Stage:
    """The stage of the toolchain that is named, or else of the first that has it.

    Those this machine can use come first, then the embedded one, which any machine can have.
    """
    if toolchain is not None:
        return toolchains.load(toolchain).stage(name)
    from trtllm_pipeline.machine.probe import machine

    known = [toolchains.load(each) for each in toolchains.names()]
    usable = [each for each in known if each.missing(machine()) is None]
    for each in (*usable, *reversed(known)):
        for stage in each.stages:
            if stage.name == name:
                return stage
    raise UsageError(f"no toolchain of this release has a stage {name!r}")


def _for_cells(stage: Stage, typed: dict[str, Any]) -> int:
    from trtllm_pipeline import flow
    from trtllm_pipeline.progress import observer
    from trtllm_pipeline.store.store import Store

    service = stage.scope is Scope.SERVICE
    shared = {name for name, _, _ in _SHARED}
    if more := [name for name in typed if name not in shared and not (service and not name.startswith("in_"))]:
        raise UsageError(
            f"{_flag_of(more[0])} is for a stage on explicit files, without --matrix", hint=_instead(stage, more[0])
        )
    until = stage.upstream("repository")[0] if service else stage.name
    request = options.request(
        typed["matrix"], typed.get("cells"), typed.get("sets"), until, typed.get("toolchain"), assume=None
    )
    values: dict[str, Any] = {}
    if service:
        machine = flow.machine_of(request)
        cells = [cell for cell in flow.select_cells(request, flow.load(request), machine) if cell.reason is None]
        if len(cells) > 1:
            ids = ", ".join(cell.id for cell in cells[:8]) + (", ..." if len(cells) > 8 else "")
            raise UsageError(
                f"{len(cells)} cells are selected, a server is launched for one", hint=f"--cells ID; one of {ids}"
            )
        for only in cells:
            # The cell's own toolchain may be another than the one that the command line was read for.
            stage = toolchains.load(only.toolchain).stage(stage.name)
            values = _values(stage, typed)
            _refuse(stage.name, _wrong(stage, values))
    store = Store(Path(typed["workspace"]))
    plan, outcome = flow.bring_up_to_date(request, store, observer(sys.stderr, mode="auto"))
    if outcome.exit_code:
        return outcome.exit_code
    if service:
        return _serve_cell(stage, typed, values, plan, store)
    folders = {
        cell.id: str(store.folder(until, found.fingerprint) / "out")
        for cell in plan.feasible
        for found in (plan.stage_runs[run] for run in plan.by_cell[cell.id])
        if found.stage.name == until
    }
    if typed["format"] == "json":
        emit_json({"schema": 1, "stage": stage.name, "cells": folders})
    else:
        for cell, folder in folders.items():
            emit(f"{cell}\t{folder}")
    return 0


def _instead(stage: Stage, typed: str) -> str:
    """What to do with a matrix instead of typing this option of the stage."""
    from pydantic import BaseModel

    from trtllm_pipeline.config.models import Axes, Settings

    name = typed.removeprefix("file_")
    section = _OF_ANOTHER.get((stage.name, name), stage.section or stage.name)
    settings: BaseModel = getattr(Settings(), section)
    keys = {key: key for key in type(settings).model_fields}
    for outer, value in settings:
        if isinstance(value, BaseModel):
            keys |= {f"{outer}_{key}": f"{outer}.{key}" for key in type(value).model_fields}
    if name in keys:
        return f"--set settings.{section}.{keys[name]}=VALUE changes this setting of the matrix"
    if name in Axes.model_fields:
        return f"--set axes.{name}=[VALUE] changes an axis of the matrix"
    return "leave it out: the matrix says what its cells are made of"


def _serve_cell(stage: Stage, typed: dict[str, Any], values: Mapping[str, Any], plan: Plan, store: Store) -> int:
    """Serve the plan's one cell by hand: with what its stages left and the matrix's settings, and `values` over them."""
    (cell,) = plan.feasible
    made = {plan.stage_runs[run].stage.name: plan.stage_runs[run] for run in plan.by_cell[cell.id]}
    for place in stage.inputs:
        found = next(made[upstream] for upstream in stage.upstream(place) if upstream in made)
        typed[f"in_{place}"] = str(store.folder(found.stage.name, found.fingerprint) / "out")
    of_matrix = replace(stage.read(cell), restarts=stage.params().restarts)
    return _by_hand(stage, typed, replace(of_matrix, **values))


def _download(typed: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a download by hand: a model as people name it, its revision resolved."""
    from trtllm_pipeline.config.recipes import find_recipe, list_recipes, load_recipe
    from trtllm_pipeline.hub.sources import local_folder, resolve

    model = typed.get("model")
    if model is None:
        raise UsageError(
            "pipeline download: which model?", hint="pipeline download Qwen/Qwen2.5-0.5B-Instruct --output-dir model"
        )
    name, _, revision = model.partition("@")
    recipes = list_recipes(Path())
    sources: list[Mapping[str, Json]]
    if model in recipes:
        recipe = load_recipe(find_recipe(model, Path()))
        sources = [source.model_dump(mode="json", exclude={"note"}) for source in recipe.sources]
    elif Path(model).is_dir() or model.startswith(("./", "../", "/", "~")):
        sources = [{"local": str(Path(model).expanduser().absolute())}]
    elif name in recipes:
        raise UsageError(
            f"{model}: {name} is a recipe, which says itself where its model is and in which revision",
            hint=f"pipeline recipes show {name} shows it; ORGANISATION/NAME@REVISION is one revision of a model",
        )
    elif name.count("/") == 1:
        sources = [{"hugging_face": name, "revision": revision or "main"}]
    else:
        raise UsageError(
            f"{model}: there is no such recipe or folder",
            hint="pipeline recipes list shows the recipes; ORGANISATION/NAME is a model of the Hugging Face Hub",
        )
    source = resolve(sources, prefer="auto", offline=values.get("offline", False), base_dir=Path())
    kind, *_ = source
    note(f"{kind}: {source[kind]}" + (f", revision {source['revision']}" if "revision" in source else ""))
    folder = local_folder(sources, Path())
    return {**values, "source": source, "folder": None if folder is None else str(folder)}


def _program(stage: Stage, context: StageContext[Any]) -> None:
    if stage.program is not None:
        run_program(stage.program, stage.name, context)


def _commands(stage: Stage, context: StageContext[Any]) -> None:
    """Run what other programs do of a stage; their output is the log. Raises StageError when one fails."""
    if stage.commands is None:
        return
    import subprocess

    from trtllm_pipeline.machine.probe import machine

    write_job(stage.name, stage.program, context)  # which programs of ours among them read
    for command in stage.commands(context, machine()):
        note(shlex.join(command))
        code = subprocess.run(command, check=False, stdout=sys.stderr).returncode
        if code:
            raise StageError(f"{stage.name}: {command[0]} ended with exit code {code}; what it said is above")


def _by_hand(stage: Stage, typed: Mapping[str, Any], asked: Any) -> int:
    """Run for a person: say where the results are, or keep a service until Ctrl-C. The program's own log is for stderr."""
    if stage.scope is not Scope.ARTIFACT:
        allow_open_files()
    as_json = typed["format"] == "json"
    with _scratch(stage.name) as scratch:
        context = _context(stage, typed, asked, scratch)
        if stage.scope is Scope.SERVICE:
            with _announced_when_ready(context, sys.stdout, as_json=as_json), redirect_stdout(sys.stderr):
                _program(stage, context)
            return 0
        with redirect_stdout(sys.stderr):
            _commands(stage, context)
            _program(stage, context)
    if as_json:
        emit_json({"schema": 1, "stage": stage.name, "output_dir": str(context.out)})
        return 0
    emit(str(context.out))
    if stage.name == "perf":
        from trtllm_pipeline.report.load_tables import to_text
        from trtllm_pipeline.stages.perf import measured

        note(to_text(measured(context)))
    return 0


def _wrong_paths(stage: Stage, typed: Mapping[str, Any]) -> list[str]:
    """What is missing of the inputs and files of a stage, or cannot be read."""
    from trtllm_pipeline.files.user_files import check

    inputs = {name: typed.get(f"in_{name}") for name in stage.inputs}
    wrong = [f"{flag(name)} is required" for name, path in inputs.items() if path is None]
    wrong += [
        f"{flag(name)} is required: the file, or builtin:NAME, that {of} was given"
        for (each, name), of in _OF_ANOTHER.items()
        if each == stage.name and f"file_{name}" not in typed
    ]
    for name, path in (*inputs.items(), *_files(stage, typed).items()):
        if path and name in inputs and name != "service":
            there = os.path.exists(path)  # noqa: PTH110  (Path.exists raises for a name that is too long)
            wrong += [] if there else [f"{flag(name)}: {path} does not exist"]
        elif path:
            try:
                check(Path(path))
            except MatrixError as error:
                wrong.append(f"{flag(name)}: {error.message}")
    if typed.get("output_dir") is None and stage.scope is not Scope.SERVICE:
        wrong.append("--output-dir is required")
    return wrong


def _context(stage: Stage, typed: Mapping[str, Any], asked: Any, scratch: Path) -> StageContext[Any]:
    """What the stage's program is given."""
    output = typed.get("output_dir")
    return StageContext(
        params=asked,
        inputs={name: Path(typed[f"in_{name}"]).absolute() for name in stage.inputs},
        files={name: Path(path).absolute() for name, path in _files(stage, typed).items()},
        out=scratch / "out" if output is None else options.empty_folder(output),
        attempt=scratch.absolute(),
    )


def _files(stage: Stage, typed: Mapping[str, Any]) -> dict[str, str]:
    found = {name: _file(stage, name, typed.get(f"file_{name}")) for name in stage.file_names}
    return {name: path for name, path in found.items() if path is not None}


def _file(stage: Stage, name: str, given: str | None) -> str | None:
    """Path of a file: what was typed, a `builtin:NAME`, or else what a matrix would take."""
    from trtllm_pipeline.config.models import Settings
    from trtllm_pipeline.hub.dataset_file import data_file

    defaults = getattr(Settings(), stage.section or stage.name, None)
    given = given or getattr(defaults, name, None)
    return None if given is None else str(data_file(given, Path()))


@contextmanager
def _scratch(name: str) -> Iterator[Path]:
    """A folder for the time being. It stays where an error names a log in it."""
    folder = Path(tempfile.mkdtemp(prefix=f"pipeline-{name}-"))
    kept = False
    try:
        yield folder
    except StageError as error:
        kept = error.log is not None and error.log.is_relative_to(folder)
        raise
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)


def _example(service: Mapping[str, str]) -> str:
    """A command line that asks the service."""
    if service["kind"] == "openai":
        body = {"model": service["model"], "prompt": "The capital of France is", "max_tokens": 8}
        return (
            f"curl -s {service['url']}/v1/completions -H 'Content-Type: application/json' "
            f"-d {shlex.quote(json.dumps(body))}"
        )
    body = {"text_input": "The capital of France is", "max_tokens": 8, "bad_words": "", "stop_words": ""}
    return f"curl -s http://{service['http']}/v2/models/{service['model']}/generate -d {shlex.quote(json.dumps(body))}"


@contextmanager
def _announced_when_ready(context: StageContext[Any], stream: TextIO, *, as_json: bool) -> Iterator[None]:
    """Print the endpoints to `stream` as soon as the service has written them."""

    def look(_signal: int, _frame: FrameType | None) -> None:
        path = context.attempt / SERVICE_FILE
        if not path.exists():
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            return
        service = json.loads(path.read_text(encoding="utf-8"))
        with redirect_stdout(stream):
            if as_json:
                emit_json(service)
            else:
                named = ("url", "model") if service["kind"] == "openai" else ("http", "grpc", "metrics")
                emit("\n".join(f"{name:<8} {service[name]}" for name in named))
            stream.flush()
        if not as_json:
            note("ready; Ctrl-C stops it. For instance:")
            note(f"  {_example(service)}")

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # before the handler goes: an alarm that nobody handles kills
        signal.signal(signal.SIGALRM, before)
