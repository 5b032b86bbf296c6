"""Rules for the options of every command: switches, and the matrix as the first word."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from copy import copy
from typing import Annotated, Any, Final, get_args

from typer.models import ArgumentInfo, OptionInfo

from trtllm_pipeline.base import UsageError, terminal
from trtllm_pipeline.show.cli import completion, options

MATRIX_WORD: Final = "matrix_word"
_Matrix = Annotated[str | None, options.argument("MATRIX", "Matrix, same as --matrix.", complete=completion.matrices)]


def complete(function: Callable[..., Any], path: str) -> Callable[..., Any]:
    """The command `path`, with switches listed once, and a matrix as its first argument if it has no other."""
    signature = inspect.signature(function, eval_str=True)
    parameters = [_listed_once(each).replace(kind=each.KEYWORD_ONLY) for each in signature.parameters.values()]
    matrix = signature.parameters.get("matrix")
    words = any(isinstance(_about(each), ArgumentInfo) for each in parameters)
    if matrix is None or words:
        return _typed_as(function, function, signature.replace(parameters=parameters))
    required = matrix.default is matrix.empty
    parameters = [each.replace(default=None) if each.name == "matrix" and required else each for each in parameters]
    parameters.append(inspect.Parameter(MATRIX_WORD, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_Matrix))

    def command(**values: Any) -> Any:
        word, option = values.pop(MATRIX_WORD), values["matrix"]
        if word is not None and option is not None:
            raise UsageError(f"{word} and --matrix {option} are two matrices", hint=f"pipeline {path} {word}")
        values["matrix"] = option if word is None else word
        if required and values["matrix"] is None:
            raise UsageError(
                f"pipeline {path}: no matrix given",
                hint=f"pipeline {path} FILE; create a matrix with pipeline matrix init",
            )
        return function(**values)

    return _typed_as(command, function, signature.replace(parameters=parameters))


def _typed_as(
    command: Callable[..., Any], function: Callable[..., Any], signature: inspect.Signature
) -> Callable[..., Any]:
    @functools.wraps(function)
    def typed(**values: Any) -> Any:
        terminal.clean_streams()
        return command(**values)

    vars(typed)["__signature__"] = signature
    return typed


def _about(parameter: inspect.Parameter) -> Any:
    return next(
        (each for each in get_args(parameter.annotation)[1:] if isinstance(each, OptionInfo | ArgumentInfo)), None
    )


def _listed_once(parameter: inspect.Parameter) -> inspect.Parameter:
    """A switch that is off by default has no `--no-` form, unless an environment variable can turn it on."""
    about = _about(parameter)
    if parameter.default is not False or not isinstance(about, OptionInfo):
        return parameter
    about = copy(about)
    about.show_default = False
    if about.envvar is None:
        # Typer keeps the first flag of an annotation as its default.
        first, *more = (str(each).partition("/--no-")[0] for each in (about.default, *(about.param_decls or ())))
        about.default, about.param_decls = first, tuple(more)
    return parameter.replace(annotation=Annotated[get_args(parameter.annotation)[0], about])
