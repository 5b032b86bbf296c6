from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from trtllm_pipeline.base.errors import MatrixError, StageError
from trtllm_pipeline.measure.score.answers import questions_of
from trtllm_pipeline.measure.score.questions import read_questions, scorable
from trtllm_pipeline.measure.score.scores import SCORE_METRICS, NumericTolerance, Question


def read_rows(folder: Path, *rows: dict[str, Any], default: tuple[str, ...] = ("exact",)) -> tuple[Question, ...]:
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return read_questions(path, SCORE_METRICS, default)


def test_rows_say_how_they_are_scored(tmp_path: Path) -> None:
    first, second, third = read_rows(
        tmp_path,
        {"input": "a", "output": "b"},
        {"id": "x", "input": "a", "output": "B", "metric": "choice", "choices": ["c", "d"]},
        {"input": "a", "output": "7", "metric": ["numeric", "regex"], "pattern": r"(\d)", "tolerance": "5%"},
    )
    assert (first.prompt.id, first.metrics, first.references) == ("1", ("exact",), ("b",))
    assert (second.prompt.id, second.metrics, second.choices) == ("x", ("choice",), ("c", "d"))
    assert (third.prompt.id, third.metrics) == ("5", ("numeric", "regex"))
    assert third.pattern.pattern == r"(\d)"
    assert third.tolerance == NumericTolerance(Decimal("0.05"), relative=True)
    assert third.row["pattern"] == r"(\d)"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"metric": "bleu"}, r":1: metric: unknown metric 'bleu'; known: exact, .*chrf$"),
        ({"metric": "mine:f"}, "name it in settings.accuracy.metrics too"),
        ({"metric": []}, "metric: expected the name"),
        ({"metric": 1}, "metric: expected the name"),
        ({"choices": "a"}, "choices: expected a list of texts"),
        ({"choices": ["a", "A."]}, "choices: expected at most 26 texts, all different"),
        ({"pattern": "("}, "pattern: not a regular expression: missing"),
        ({"pattern": 1}, "pattern: not a regular expression"),
        ({"tolerance": "x"}, 'tolerance: expected a number from 0, or a share as "1%"'),
        ({"tolerance": -1}, "tolerance: expected"),
        ({"tolerance": True}, "tolerance: expected"),
        ({"tolerance": "nan"}, "tolerance: expected"),
    ],
)
def test_faulty_rows_are_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(MatrixError, match=message):
        read_rows(tmp_path, {"input": "a", "output": "b", **row})


def test_all_faulty_rows_are_named(tmp_path: Path) -> None:
    with pytest.raises(MatrixError) as error:
        read_rows(tmp_path, {"input": "a", "metric": 1}, {"input": "a"}, {"input": "a", "pattern": "["})
    assert [fault.line for fault in error.value.faults] == [1, 5]


def test_what_cannot_be_scored_is_told_apart(tmp_path: Path) -> None:
    questions = read_rows(tmp_path, {"input": "a", "output": "b"}, {"id": "bare", "input": "a"})
    good, faults = scorable(questions, SCORE_METRICS)
    assert [question.prompt.id for question in good] == ["1"]
    assert [str(fault) for fault in faults] == ["row 'bare': output: the row has no reference answer"]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [(1, r"rows\.jsonl: 1 row cannot be scored: row '1': "), (2, "2 rows cannot be scored; the first: row '1': ")],
)
def test_rows_that_cannot_be_scored_are_counted(tmp_path: Path, wrong: int, told: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input": "x"}\n' * wrong + '{"input": "y", "output": "z"}\n')
    with pytest.raises(StageError, match=told):
        questions_of(path, SCORE_METRICS, ("exact",), None)
