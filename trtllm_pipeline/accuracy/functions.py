"""A user's own metric: `module:name`, a Python function `f(answer: str, row: dict) -> float` from 0 to 1.

`row` is the line of the prompt file as it was written. It runs in the process of the stage that scores.
"""

from __future__ import annotations

import importlib
import math
import sys
import traceback
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, Final

from trtllm_pipeline.accuracy.scores import Metric, Question
from trtllm_pipeline.errors import FailureClass, StageError

DEFINITION: Final = "mean of what the user's own function says"


def module_file(name: str) -> PurePosixPath:
    """`my/metrics.py` for `my.metrics:polite`: where the module lies, from the folder it is imported from."""
    return PurePosixPath(*name.partition(":")[0].split(".")).with_suffix(".py")


def load(name: str, file: Path | None) -> Metric:
    """The metric `module:name`, from `file` or else from the current folder. Raises StageError when it cannot be."""
    module_name, _, function_name = name.partition(":")
    folder = Path.cwd() if file is None else file.absolute().parents[module_name.count(".")]
    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a user's module may raise
        traceback.print_exc()
        raise StageError(
            f"metric {name}: {folder / module_file(name)} cannot be imported: {type(error).__name__}: {error}",
            failure=FailureClass.USER,
            hint="a metric is MODULE:FUNCTION; the module lies in the matrix's folder, or in settings.accuracy.python_path",
        ) from error
    finally:
        sys.path.remove(str(folder))
    function = getattr(module, function_name, None)
    if not callable(function):
        raise StageError(
            f"metric {name}: {module.__file__} has no function {function_name!r}", failure=FailureClass.USER
        )
    return Metric(DEFINITION, _scoring(name, function), lambda _question: None)


def _scoring(name: str, function: Callable[[str, dict[str, Any]], object]) -> Callable[[str, Question], float]:
    def score(answer: str, question: Question) -> float:
        try:
            value = function(answer, dict(question.row))
        except Exception as error:  # whatever a user's function may raise
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
