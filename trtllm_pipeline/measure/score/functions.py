"""A user's metric: `module:name`, a Python function `f(answer: str, row: dict) -> float`, from 0 to 1.

`row` is the unmodified line of the prompt file. The function runs in the process of the scoring stage.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from types import FunctionType
from typing import Any, Final

from trtllm_pipeline.base import FailureClass, StageError
from trtllm_pipeline.measure.score.scores import SCORE_METRICS, Metric, Question

DEFINITION: Final = "mean of what the user's own function says"


def metrics_of(names: Sequence[str], module: Path | None = None) -> dict[str, Metric]:
    """All metrics that rows may name: the built-in ones, and the functions `names` of `module`. Raises StageError."""
    metrics = {**SCORE_METRICS, **{name: load(name, module) for name in names if ":" in name}}
    wrong = [f"unknown metric {name!r}" for name in names if name not in metrics]
    if wrong or not names:
        raise StageError(
            f"metrics: {wrong[0] if wrong else 'empty list'}",
            failure=FailureClass.USER,
            hint=f"there are {', '.join(SCORE_METRICS)}, and your own functions as module:name",
        )
    return metrics


def module_file(name: str) -> PurePosixPath:
    """`my/metrics.py` for `my.metrics:polite`: the module's path, relative to its import directory."""
    return PurePosixPath(*name.partition(":")[0].split(".")).with_suffix(".py")


def load(name: str, file: Path | None) -> Metric:
    """The metric `module:name`, from `file` or else from the current directory.

    It processes untrusted server output, so it must be written for that purpose: a Python function that is defined in
    the module's file in that directory, with an answer and a row as parameters. Functions that the module imports, and
    other modules with the same name, are rejected. Raises StageError for anything else.
    """
    module_name, _, function_name = name.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise _refused(name, f"{module_name!r} is not a module name")
    folder = Path.cwd() if file is None else file.absolute().parents[module_name.count(".")]
    file = folder / module_file(name)
    if not file.is_file():
        raise _refused(name, f"{file} does not exist")
    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        traceback.print_exc()
        raise _refused(name, f"{file} cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(folder))
    taken = getattr(module, "__file__", None)
    if taken is None or not Path(taken).samefile(file):
        where = taken or "Python itself"
        raise _refused(name, f"Python already has a module {module_name}, from {where}: give {file} another name")
    function = getattr(module, function_name, None)
    if not callable(function):
        raise _refused(name, f"{file} has no function {function_name!r}")
    if not isinstance(function, FunctionType) or function.__module__ != module_name:
        raise _refused(name, f"{function_name} is not a function that {file} defines")
    try:
        inspect.signature(function).bind("", {})
    except TypeError as error:
        raise _refused(
            name, f"{function_name}{inspect.signature(function)} cannot be called with an answer and a row"
        ) from error
    return Metric(DEFINITION, _scoring(name, function), lambda _question: None)


def _refused(name: str, reason: str) -> StageError:
    return StageError(
        f"metric {name}: {reason}",
        failure=FailureClass.USER,
        hint="a metric is MODULE:FUNCTION, a function f(answer, row) defined in MODULE.py; the module is in the matrix's "
        "directory, or in settings.accuracy.python_path",
    )


def _scoring(name: str, function: Callable[[str, dict[str, Any]], object]) -> Callable[[str, Question], float]:
    def score(answer: str, question: Question) -> float:
        try:
            value = function(answer, dict(question.row))
        except Exception as error:  # a user's function may raise anything
            traceback.print_exc()
            raise StageError(
                f"metric {name}, row {question.prompt.id!r}: {type(error).__name__}: {error}",
                failure=FailureClass.USER,
                hint="the log has the traceback",
            ) from error
        if not isinstance(value, (bool, int, float)) or not math.isfinite(value) or not 0 <= value <= 1:
            raise StageError(
                f"metric {name}, row {question.prompt.id!r}: expected a number from 0 to 1, got {value!r}",
                failure=FailureClass.USER,
            )
        return float(value)

    return score
