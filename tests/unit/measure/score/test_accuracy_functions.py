from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from trtllm_pipeline.base.errors import FailureClass, StageError
from trtllm_pipeline.measure.load.prompts import Prompt
from trtllm_pipeline.measure.score import functions
from trtllm_pipeline.measure.score.scores import Metric, Question

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
        ("f = eval", "f", "f is not a function that .*py defines"),
        ("from os import system as f", "f", "f is not a function that .*py defines"),
        ("from shutil import copyfile as f", "f", "f is not a function that .*py defines"),
        ("from functools import partial\nf = partial(print)", "f", "f is not a function that .*py defines"),
        ("class f:\n    def __init__(self, answer, row): ...", "f", "f is not a function that .*py defines"),
        ("def f(answer): return 1", "f", r"f\(answer\) cannot be called with an answer and a row"),
        ("def f(answer, row, more): return 1", "f", r"cannot be called with an answer and a row"),
        ("def f(*, answer, row): return 1", "f", r"cannot be called with an answer and a row"),
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


@pytest.mark.parametrize(
    "name", ["builtins:eval", "os:system", "os.path:exists", "subprocess:getoutput", "..x:f", "a/b:f", ":f"]
)
def test_what_was_never_made_for_it_is_not_even_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(functions.importlib, "import_module", lambda name: pytest.fail(f"{name} was imported"))
    for file in (None, tmp_path / "own.py"):
        with pytest.raises(StageError, match=r"is not a module name|does not exist") as error:
            functions.load(name, file)
        assert error.value.failure is FailureClass.USER


def test_a_module_that_python_has_already_is_told(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("def dumps(answer, row): return 1\n")
    with pytest.raises(StageError, match=r"Python already has a module json, from .*json/__init__\.py"):
        functions.load("json:dumps", tmp_path / "json.py")
    (tmp_path / "builtins.py").write_text("def eval(answer, row): return 1\n")
    with pytest.raises(StageError, match="Python already has a module builtins, from Python itself"):
        functions.load("builtins:eval", tmp_path / "builtins.py")


def test_a_function_may_take_more_than_it_needs_to(tmp_path: Path) -> None:
    assert score(load(tmp_path, "def f(answer, row=None, *rest, strict=True):\n    return 1\n")) == 1
    assert score(load(tmp_path, "f = lambda answer, row: 0.25\n")) == 0.25
