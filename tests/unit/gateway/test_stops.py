"""Stop words over any cut of a text into parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_pipeline.gateway.stops import StopWords

TEXTS = st.text("ab\n", max_size=12)


def passed(words: list[str], parts: list[str]) -> tuple[str, str | None]:
    stops = StopWords(words)
    text = "".join([stops.feed(part) for part in parts])
    return text + stops.end(), stops.found


@given(st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3), st.lists(TEXTS, max_size=8))
def test_the_text_ends_before_the_first_word_however_it_is_cut(words: list[str], parts: list[str]) -> None:
    whole = "".join(parts)
    # A word is known when it is whole: the one that ends first.
    ends = [(at + len(word), at, word) for word in words if (at := whole.find(word)) >= 0]
    text, found = passed(words, parts)
    if not ends:
        assert (text, found) == (whole, None)
    else:
        assert found in words
        assert text in {whole[:at] for _, at, _ in ends}
        assert not any(word in text for word in words)


@pytest.mark.parametrize(
    ("words", "parts", "expected"),
    [
        (["</s>"], ["a<", "/", "s>b"], ("a", "</s>")),
        (["</s>"], ["a<", "/", "t>b"], ("a</t>b", None)),
        (["aab"], ["a", "a", "a", "b", "c"], ("a", "aab")),
        (["b", "ab"], ["xab"], ("x", "ab")),
        (["END"], ["xEN"], ("xEN", None)),
        ([], ["a", "b"], ("ab", None)),
    ],
)
def test_examples(words: list[str], parts: list[str], expected: tuple[str, str | None]) -> None:
    assert passed(words, parts) == expected


def test_text_that_can_be_no_word_is_passed_on_at_once() -> None:
    stops = StopWords(["stop"])
    assert stops.feed("one s") == "one "
    assert stops.feed("t") == ""
    assert stops.feed("ar") == "star"
    assert stops.feed("stop it") == ""
    assert stops.feed("more") == stops.end() == ""
