"""Stop words over any cut of a text into parts."""

from __future__ import annotations

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
