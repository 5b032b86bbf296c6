"""Stop words in a text that arrives in parts: they end it, and are not passed on themselves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopWords:
    """Passes text on as soon as it cannot be the start of one of `words`. `found` is the word that ended it.

    The average cost per character and word is constant, however much text is held back.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.found: str | None = None
        self._words = tuple(_Word(word) for word in words if word)
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that can be passed on now. Empty after a stop word."""
        if not self._words:
            return text
        if self.found is not None:
            return ""
        before, text = len(self._held), self._held + text
        at = len(text)
        for word in self._words:
            end = word.end_in(text, before)
            if end is not None and end - len(word.text) < at:
                at, self.found = end - len(word.text), word.text
        if self.found is not None:
            self._held = ""
            return text[:at]
        held = max(word.matched for word in self._words)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def end(self) -> str:
        held, self._held = self._held, ""
        return held


class _Word:
    """Searches for one word with the Knuth-Morris-Pratt algorithm: no character is read twice."""

    __slots__ = ("_shorter", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        """Length of the longest prefix of the word at the end of the text so far."""
        self._shorter = _shorter(text)

    def end_in(self, text: str, start: int) -> int | None:
        """Read `text` from `start`. Returns the first end position of the word, or None if it does not occur."""
        word, matched, shorter = self.text, self.matched, self._shorter
        if not matched:  # the usual case, at C speed
            start = text.find(word[0], start)
            if start < 0:
                return None
        for position in range(start, len(text)):
            matched = _longer(word, matched, text[position], shorter)
            if matched == len(word):
                return position + 1
        self.matched = matched
        return None


def _longer(word: str, matched: int, character: str, shorter: Sequence[int]) -> int:
    """Length of the matched prefix of `word` after one more character, given the length before it."""
    while matched and word[matched] != character:
        matched = shorter[matched]
    return matched + (word[matched] == character)


@lru_cache(maxsize=256)  # the choices of a request share their words
def _shorter(word: str) -> Sequence[int]:
    """For each prefix length of `word`, the length of the longest shorter prefix that it ends with."""
    lengths = [0, 0]
    for character in word[1:]:
        lengths.append(_longer(word, lengths[-1], character, lengths))
    return lengths
