"""Scores of an answer against its references."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Final

NORMALISATION: Final = "Unicode NFKC, case folded, punctuation and symbols to spaces, runs of spaces to one, stripped"

# A sign or a point that belongs to a number is no punctuation: -1 is not 1 and 2.5 is not 25.
_NOISE: Final = re.compile(r"(?:(?<!\d)[.,]|[.,](?!\d)|-(?!\d)|[^\w\s.,-]|_)")


def normalise(text: str) -> str:
    """`text` without what does not make an answer right or wrong: see NORMALISATION. Numbers keep sign and point."""
    return " ".join(_NOISE.sub(" ", unicodedata.normalize("NFKC", text).casefold()).split())


def exact(answer: str, references: Sequence[str]) -> float:
    """1 if the normalised answer is one of the normalised references, else 0."""
    return float(normalise(answer) in map(normalise, references))


def contains(answer: str, references: Sequence[str]) -> float:
    """1 if one of the normalised references stands in the normalised answer as whole words, else 0."""
    said = f" {normalise(answer)} "
    return float(any(f" {normalise(reference)} " in said for reference in references))


SCORES: Final[Mapping[str, Callable[[str, Sequence[str]], float]]] = {"exact": exact, "contains": contains}
"""Name of a metric -> score of one answer, from 0 to 1."""
