from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fuzz_wire import json_text
from trtllm_pipeline.base.errors import MatrixError, UsageError
from trtllm_pipeline.measure.score.drift import compare, first_difference, read


def row(id_: str, answer: str, score: float, tokens: list[int] | None = None, **place: Any) -> dict[str, Any]:
    return {"id": id_, "input": "?", "answer": answer, "tokens": tokens, "scores": {"exact": score}, **place}


@pytest.mark.parametrize(
    ("a", "b", "index"),
    [("abc", "abc", None), ("abc", "abd", 2), ("ab", "abc", 2), ("", "x", 0), ([1, 2], [1, 3], 1), ("", "", None)],
)
def test_first_difference(a: Any, b: Any, index: int | None) -> None:
    assert first_difference(a, b) == index


def test_drift_of_a_few_answers() -> None:
    reference = [row(str(number), " Paris", 1.0, [5, 6]) for number in range(10)]
    other = [*reference[:6], *(row(str(number), " Parma", 0.0, [5, 7]) for number in range(6, 10))]
    drift_found = compare(reference, other)
    assert (drift_found.pairs, drift_found.unpaired, drift_found.agreement) == (10, 0, 0.6)
    assert drift_found.interval[0] < 0.6 < drift_found.interval[1]
    assert (drift_found.first_divergence_chars["n"], drift_found.first_divergence_chars["p50"]) == (4, 4)
    assert drift_found.first_divergence_tokens["p50"] == 1
    drift = drift_found.scores["exact"]
    assert (drift.questions, drift.reference, drift.score, drift.difference) == (10, 1.0, 0.6, -0.4)
    assert (drift.better, drift.worse) == (0, 4)
    assert -0.75 < drift.interval[0] < -0.4 < drift.interval[1] < 0
    assert json.loads(json.dumps(drift_found.to_json()))["scores"]["exact"]["interval"] == list(drift.interval)


def test_pairs_tell_more_than_two_means() -> None:
    """Questions differ more than models do: the interval of the difference is narrower than that of either score."""
    reference = [row(str(number), "x", number % 2) for number in range(100)]
    other = [row(str(number), "y" if number == 1 else "x", 0 if number == 1 else number % 2) for number in range(100)]
    drift = compare(reference, other).scores["exact"]
    assert drift.difference == -0.01
    assert drift.interval[1] - drift.interval[0] < 0.05


def test_the_same_answers_still_leave_doubt() -> None:
    rows = [row(str(number), "x", 1.0) for number in range(28)]
    drift_found = compare(rows, rows)
    assert (drift_found.agreement, drift_found.scores["exact"].difference) == (1, 0)
    assert drift_found.first_divergence_chars["n"] == 0
    assert drift_found.first_divergence_tokens is None, "these answers have no tokens"
    low, high = drift_found.scores["exact"].interval
    assert low == -high
    assert 0.1 < high < 0.15


def test_answers_of_load_runs_pair_by_their_place() -> None:
    def run(*answers: str) -> list[dict[str, Any]]:
        return [
            row("q", answer, 0.0, concurrency=level, request_rate=None, repeat=0, time=time)
            for (level, time), answer in zip(((1, 0), (4, 0), (4, 1)), answers, strict=False)
        ]

    drift_found = compare(run("a", "b", "c"), run("a", "b", "d"))
    assert (drift_found.pairs, drift_found.agreement) == (3, 0.666667)
    assert drift_found.scores["exact"].questions == 1, "answers to one question are no independent evidence"
    assert compare(run("a", "b", "c"), run("a")).unpaired == 2


def test_metrics_of_one_side_alone_are_left_out() -> None:
    other = {**row("1", "x", 1.0), "scores": {"chrf": 1.0}}
    assert compare([row("1", "x", 1.0)], [other]).scores == {}


def test_what_cannot_be_compared() -> None:
    with pytest.raises(UsageError, match="no question in common"):
        compare([row("1", "x", 1)], [row("2", "x", 1)])
    with pytest.raises(UsageError, match="question '1' is not the same"):
        compare([row("1", "x", 1)], [{**row("1", "x", 1), "input": "other"}])


def test_reading_keeps_odd_line_separators_of_answers(tmp_path: Path) -> None:
    rows = [row("1", "a\u2028b\x85c", 1.0), row("2", "d", 0.0)]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in rows))
    assert read(tmp_path) == rows
    assert read(tmp_path / "answers.jsonl") == rows


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "there is no such file"), ("{}", ":1: not an answer"), ('{"id": 1}', ":1: not"), ("x", ":1: not")],
)
def test_what_cannot_be_read(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "answers.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises((MatrixError, UsageError), match=message):
        read(path)


GOOD = [
    {
        "id": "a",
        "input": "x",
        "answer": "y",
        "tokens": [1, 2],
        "concurrency": 1,
        "repeat": 0,
        "time": 0,
        "scores": {"exact": 1.0},
    },
    {"id": "b", "input": "x", "answer": "y", "tokens": None, "scores": {}},
]


def answers(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"id": 5}, "id: input should be a valid string, got 5"),
        ({"answer": None}, "answer: input should be a valid string, got None"),
        ({"scores": [1]}, "scores: input should be an object"),
        ({"scores": {"exact": "1"}}, "scores.exact: input should be a valid number, got '1'"),
        ({"scores": {"exact": 2}}, "scores.exact: input should be less than or equal to 1"),
        ({"scores": {"exact": float("nan")}}, "scores.exact: input should be a finite number"),
        ({"tokens": 5}, "tokens: input should be a valid array, got 5"),
        ({"tokens": [-1]}, "tokens.0: input should be greater than or equal to 0"),
        ({"repeat": {}}, "repeat: input should be a valid integer"),
        ({"id": "a", "concurrency": 1, "repeat": 0, "time": 0}, "the answer to 'a' is in line 1 already"),
    ],
)
def test_what_is_no_answer_is_refused_with_its_line(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    path = answers(tmp_path / "answers.jsonl", json.dumps(GOOD[0]), json.dumps({**GOOD[1], **change}))
    with pytest.raises(UsageError) as caught:
        read(tmp_path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert told in str(caught.value)


def test_broken_answers_are_compared_or_refused(tmp_path: Path) -> None:
    good = read(answers(tmp_path / "good", *map(json.dumps, GOOD)))
    compared = 0
    for number in range(400):
        draw = random.Random(f"answers 20261122 {number}")
        lines = [json_text(draw, row) if draw.random() < 0.5 else json.dumps(row) for row in GOOD]
        if draw.random() < 0.2:
            lines.insert(
                draw.randrange(3), draw.choice(("", "null", "[]", "7", "{}", "[" * 5000, lines[0], lines[0][:9]))
            )
        path = tmp_path / "other"
        path.write_bytes("\n".join(lines).encode("latin-1", "replace"))
        try:
            json.dumps(compare(good, read(path)).to_json(), allow_nan=False)
            compared += 1
        except UsageError:
            continue
    assert 50 < compared < 350
