"""Tokens of a served model, for stand-ins of servers: those of its tokenizer.json. Without that file a token is a character."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path


class Tokens:
    """The tokenizer in `folder`."""

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        self._tokenizer = None
        if file.is_file() and "model" in json.loads(file.read_text(encoding="utf-8")):
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(file))

    def count(self, prompt: str) -> int:
        """Tokens of a prompt, special ones included."""
        return len(prompt) if self._tokenizer is None else len(self._tokenizer.encode(prompt).ids)

    def split(self, text: str) -> list[str]:
        """The text of each token without special ones. A character of several tokens is the text of its first one."""
        if self._tokenizer is None:
            return list(text)
        parts, done = [], 0
        for start, end in self._tokenizer.encode(text, add_special_tokens=False).offsets:
            parts.append(text[max(start, done) : end])
            done = max(end, done)
        return parts

    def next(self, prompt: str, wanted: int, shift: int = 1) -> list[str]:
        """An answer: its token i is token i + `shift` of the prompt, round and round."""
        parts = self.split(prompt) or ["?"]
        return [parts[(index + shift) % len(parts)] for index in range(wanted)]

    @staticmethod
    def until(made: Sequence[str], stops: Sequence[str]) -> tuple[Sequence[str], bool]:
        """The tokens of an answer before the first of `stops`, and whether it has one."""
        text, kept = "".join(made), []
        found = [text.index(stop) for stop in stops if stop in text]
        if not found:
            return made, False
        left = min(found)
        for part in made:
            if left > 0:
                kept.append(part[:left])
            left -= len(part)
        return kept, True
