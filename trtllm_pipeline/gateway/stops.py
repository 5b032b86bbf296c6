"""Stop words in a text that arrives in parts: they end it, and nothing of them is passed on."""

from __future__ import annotations

from collections.abc import Sequence


class StopWords:
    """Passes text on as soon as it cannot be the beginning of one of `words`. `found` is the word that ended it."""

    def __init__(self, words: Sequence[str]) -> None:
        self.found: str | None = None
        self._words = tuple(words)
        self._held = ""

    def feed(self, text: str) -> str:
        """What can be passed on now. Nothing after a word was found."""
        if not self._words:
            return text
        if self.found is not None:
            return ""
        text = self._held + text
        at = len(text)
        for word in self._words:
            position = text.find(word)
            if 0 <= position < at:
                at, self.found = position, word
        if self.found is not None:
            self._held = ""
            return text[:at]
        held = max(_overlap(text, word) for word in self._words)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def end(self) -> str:
        """What was held back when the text ended."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, word: str) -> int:
    """Length of the longest end of `text` that `word` begins with."""
    for size in range(min(len(text), len(word) - 1), 0, -1):
        if word.startswith(text[-size:]):
            return size
    return 0
