"""Stop words in a text that arrives in parts: they end it, and are not passed on themselves."""

from __future__ import annotations

from collections.abc import Sequence


class StopWords:
    """Passes text on as soon as it cannot be the start of one of `words`. `found` is the word that ended it.

    Words are short and few (`parsed_request`), so the text that is held back can be read again for each part.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.found: str | None = None
        self._words = tuple(word for word in words if word)
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that can be passed on now. Empty after a stop word."""
        if not self._words:
            return text
        if self.found is not None:
            return ""
        text = self._held + text
        places = [(at, word) for word in self._words if (at := text.find(word)) >= 0]
        if places:
            end, self.found = min(places)
            self._held = ""
        else:
            end = min(_start_at_end(word, text) for word in self._words)
            self._held = text[end:]
        return text[:end]

    def end(self) -> str:
        held, self._held = self._held, ""
        return held


def _start_at_end(word: str, text: str) -> int:
    """Where `text` ends with the longest start of `word`. The length of `text` if it ends with none."""
    at = text.find(word[0], max(0, len(text) - len(word) + 1))
    while at >= 0 and not word.startswith(text[at:]):
        at = text.find(word[0], at + 1)
    return len(text) if at < 0 else at
