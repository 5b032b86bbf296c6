from __future__ import annotations

import re
import sys
from decimal import Decimal
from typing import Any

import pytest

from trtllm_pipeline.base.errors import StageError
from trtllm_pipeline.measure.load.prompts import Prompt
from trtllm_pipeline.measure.score.scores import (
    SCORE_METRICS,
    NumericTolerance,
    Question,
    chosen,
    last_number,
    normalise,
)


def question(*references: str, **more: Any) -> Question:
    if "pattern" in more:
        more["pattern"] = re.compile(more["pattern"])
    return Question(Prompt("q", "?", references=references), (), **more)


def score(metric: str, answer: str, *references: str, **more: Any) -> float:
    return SCORE_METRICS[metric].score(answer, question(*references, **more))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" Paris.\n\nThe answer", "paris the answer"),
        ("\uff30aris!", "paris"),
        ("-1, 2.5 and 1,000.", "-1 2.5 and 1,000"),
        ("well-known [snake_case]", "well known snake case"),
        ("STRASSE Straße", "strasse strasse"),
    ],
)
def test_normalise(text: str, expected: str) -> None:
    assert normalise(text) == expected


def test_exact_wants_the_whole_answer() -> None:
    assert score("exact", " Paris!", "London", "paris") == 1
    assert score("exact", "Paris is", "Paris") == 0


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("It is Paris.", "paris", 1),
        ("14", "4", 0),
        ("-4", "4", 0),
        ("4.5", "4", 0),
        ("4. Next", "4", 1),
        ("York, NY", "new york", 0),
    ],
)
def test_contains_wants_whole_words(answer: str, reference: str, expected: float) -> None:
    assert score("contains", answer, "nothing", reference) == expected


@pytest.mark.parametrize(
    ("answer", "pattern", "references", "expected"),
    [
        ("It is 42 km", r"\d+ km", (), 1),
        ("It is far", r"\d+ km", (), 0),
        ("ANSWER: Paris, of course", r"ANSWER: (\w+)", ("paris",), 1),
        ("ANSWER: Rome", r"ANSWER: (\w+)", ("paris",), 0),
        ("ANSWER: Rome", r"ANSWER: (\w+)", (), 1),
        ("it is Rome", r"it is (Rome)|(Paris)", ("rome",), 1),
        ("it is Paris", r"it is Rome|(Lima)|Paris", ("lima",), 0),  # found, but the group took no part
    ],
)
def test_regex(answer: str, pattern: str, references: tuple[str, ...], expected: float) -> None:
    assert score("regex", answer, *references, pattern=pattern) == expected


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7.", "7"),
        ("1,234,567.5 in all", "1234567.5"),
        ("1,2,3", "3"),
        ("a range of 3-5", "5"),
        ("it is -5", "-5"),
        ("it is \u22125", "-5"),
        ("6.02e23 of them", "6.02e23"),
        (".5", ".5"),
        ("$12", "12"),
        ("12kg", "12"),
        ("H2O and x23", None),
        ("none", None),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("answer", "reference", "more", "expected"),
    [
        ("the sum is 42.0", "42", {}, 1),
        ("first 42, then 43", "42", {}, 0),
        ("#### 1,000 dollars", "#### 1000", {}, 1),
        ("2.1", "2.0", {"tolerance": NumericTolerance(Decimal("0.1"))}, 1),  # exactly at the limit, unlike in floats
        ("2.11", "2.0", {"tolerance": NumericTolerance(Decimal("0.1"))}, 0),
        ("101", "100", {"tolerance": NumericTolerance(Decimal("0.01"), relative=True)}, 1),
        ("-102", "-100", {"tolerance": NumericTolerance(Decimal("0.01"), relative=True)}, 0),
        ("answer: 5, out of 9", "5", {"pattern": r"answer: (\d+)"}, 1),
        ("out of 9", "9", {"pattern": r"answer: (\d+)"}, 0),
        ("1e999999999", "1", {}, 0),
        ("no idea", "1", {}, 0),
    ],
)
def test_numeric(answer: str, reference: str, more: dict[str, Any], expected: float) -> None:
    assert score("numeric", answer, reference, **more) == expected


CITIES = ("Paris", "Rome", "New York", "York")


@pytest.mark.parametrize(
    ("answer", "place"),
    [
        ("B", 1),
        (" (B) Rome", 1),
        ("**C**", 2),
        ("B. It was founded", 1),
        ("The answer is B", 1),
        ("Answer: **D**", 3),
        ("I think option A is right", 0),
        ("A city in Italy: Rome", 1),  # an article, no letter
        ("Rome, not Paris", 1),
        ("It is new york!", 2),  # not York, which starts later
        ("The answer is a secret", None),
        ("Romea", None),
        ("E", None),
        ("", None),
    ],
)
def test_chosen(answer: str, place: int | None) -> None:
    assert chosen(answer, CITIES) == place


def test_choice_takes_letters_and_texts_as_references() -> None:
    assert score("choice", "B)", "Rome", choices=CITIES) == 1
    assert score("choice", "Rome", "B", choices=CITIES) == 1
    assert score("choice", "A", "B", "D", choices=CITIES) == 0
    assert score("choice", "none of them", "B", choices=CITIES) == 0


def test_rouge_l_is_the_longest_common_subsequence_of_words() -> None:
    # LCS "the cat the mat": 4 of 6 and of 5 words, F1 = 8 / 11
    assert score("rouge_l", "the cat sat on the mat", "the cat under the mat") == pytest.approx(8 / 11)
    assert score("rouge_l", "The CAT!", "a dog", "the cat") == 1
    assert score("rouge_l", "собака бежит", "собака спит") == 0.5, "words of any script"
    assert score("rouge_l", "", "a dog") == 0


def test_chrf_is_what_sacrebleu_says() -> None:
    from sacrebleu.metrics import CHRF

    assert score("chrf", "the cat", "the cat") == 1
    expected = CHRF().sentence_score("the cat sat", ["the cats sat down"]).score / 100
    assert 0 < expected < 1
    assert score("chrf", "the cat sat", "the cats sat down") == pytest.approx(expected)
    assert score("chrf", "", "the cat") == 0


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from trtllm_pipeline.measure.score import scores

    scores._chrf.cache_clear()
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(StageError, match="needs the package sacrebleu") as error:
        SCORE_METRICS["chrf"].lacks(question("a"))
    assert error.value.hint == "pip install 'trtllm-pipeline[accuracy]'"
    scores._chrf.cache_clear()


@pytest.mark.parametrize(
    ("metric", "of", "wrong"),
    [
        ("exact", question(), "output"),
        ("exact", question("a"), None),
        ("regex", question("a"), "pattern"),
        ("regex", question(pattern="a"), None),
        ("numeric", question("1", "none"), "output"),
        ("numeric", question(), "output"),
        ("choice", question("A"), "choices"),
        ("choice", question("Lima", choices=CITIES), "output"),
        ("choice", question("E", choices=CITIES), "output"),
        ("choice", question("D", "rome", choices=CITIES), None),
        ("rouge_l", question(), "output"),
        ("chrf", question(), "output"),
    ],
)
def test_what_a_question_lacks(metric: str, of: Question, wrong: str | None) -> None:
    fault = SCORE_METRICS[metric].lacks(of)
    assert (fault and fault[0]) == wrong
