"""Stop words over any cut of a text into parts."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_pipeline.serve.gateway.stops import StopWords

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


@given(st.lists(st.text("ab", min_size=1, max_size=6), max_size=4), st.lists(st.text("ab", max_size=4), max_size=12))
def test_no_more_is_held_back_than_can_begin_a_word(words: list[str], parts: list[str]) -> None:
    stops, whole, sent = StopWords(words), "", ""
    for part in parts:
        whole += part
        sent += stops.feed(part)
        if stops.found is not None:
            return
        held = whole[len(sent) :]
        longest = max((size for word in words for size in range(len(word)) if whole.endswith(word[:size])), default=0)
        assert len(held) == longest


def steps(tokens: int) -> int:
    """Lines of Python that stop words take for an answer that one of them starts with, and the others never fit."""
    answer = "".join("abcdefghij"[number * number % 97 % 10] for number in range(tokens * 4))
    stops = StopWords([answer + "X", *[letter * (len(answer) + 1) for letter in "ABCDEFGHIJKLMNO"], "a" * len(answer)])
    lines = 0

    def count(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        for at in range(0, len(answer), 4):
            assert stops.feed(answer[at : at + 4]) == ""
    finally:
        sys.settrace(before)
    assert stops.end() == answer
    return lines


def test_the_cost_grows_with_the_length_of_the_answer_and_not_with_its_square() -> None:
    assert steps(512) < 2.2 * steps(256)
