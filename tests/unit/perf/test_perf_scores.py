from __future__ import annotations

import pytest

from trtllm_pipeline.perf.scores import contains, exact, normalise


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
    assert exact(" Paris!", ["London", "paris"]) == 1
    assert exact("Paris is", ["Paris"]) == 0


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("It is Paris.", "paris", 1),
        ("14", "4", 0),
        ("-4", "4", 0),
        ("4.5", "4", 0),
        ("4. Next", "4", 1),
        ("York, NY", "new york", 0),
    ],
)
def test_contains_wants_whole_words(answer: str, reference: str, score: float) -> None:
    assert contains(answer, ["nothing", reference]) == score
