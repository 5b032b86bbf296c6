from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from trtllm_pipeline.accuracy import functions
from trtllm_pipeline.accuracy.scores import Metric, Question
from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.perf.prompts import Prompt

NUMBERS = itertools.count()


def load(folder: Path, source: str, function: str = "f", package: str = "") -> Metric:
    """A metric from a module of a name that no other test has."""
    module = f"own_metric_{next(NUMBERS)}"
    file = folder / package / f"{module}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(source)
    return functions.load(f"{package + '.' if package else ''}{module}:{function}", file)


def score(metric: Metric) -> float:
    return metric.score("yes", Question(Prompt("q1", "?"), (), row={"input": "?", "wanted": "yes"}))


@pytest.mark.parametrize("package", ["", "inner"])
def test_a_function_gets_the_answer_and_the_row(tmp_path: Path, package: str) -> None:
    metric = load(tmp_path, "def f(answer, row):\n    return answer == row['wanted']\n", package=package)
    assert score(metric) == 1
    assert metric.lacks(Question(Prompt("q1", "?"), ())) is None


def test_a_module_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "own_neighbour.py").write_text("HALF = 0.5\n")
    assert score(load(tmp_path, "from own_neighbour import HALF\ndef f(answer, row):\n    return HALF\n")) == 0.5


def test_where_a_module_lies() -> None:
    assert str(functions.module_file("a.b:f")) == "a/b.py"


@pytest.mark.parametrize(
    ("source", "function", "message"),
    [
        ("raise RuntimeError('broken')", "f", "cannot be imported: RuntimeError: broken"),
        ("def f(:", "f", "cannot be imported: SyntaxError"),
        ("def g(answer, row): return 1", "f", "has no function 'f'"),
        ("f = 3", "f", "has no function 'f'"),
    ],
)
def test_what_cannot_be_loaded(tmp_path: Path, source: str, function: str, message: str) -> None:
    with pytest.raises(StageError, match=message) as error:
        load(tmp_path, source, function)
    assert error.value.failure is FailureClass.USER


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return {}['x']", r"row 'q1': KeyError: 'x'"),
        ("return 2", r"row 'q1': expected a number from 0 to 1, got 2"),
        ("return float('nan')", r"got nan"),
        ("return 'good'", r"got 'good'"),
        ("return None", r"got None"),
    ],
)
def test_what_a_function_may_not_do(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(StageError, match=message) as error:
        score(load(tmp_path, f"def f(answer, row):\n    {body}\n"))
    assert error.value.failure is FailureClass.USER
