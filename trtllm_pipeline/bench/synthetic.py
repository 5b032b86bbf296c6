"""Prompts of a wanted length, for when there are none of the user's own. Text that reads as text, cut out of a corpus.

Random tokens would be no prompt any model was made for: they change what is generated, and how much of it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Final, Protocol

from trtllm_pipeline.bench.prompts import Prompt, Tokenizer
from trtllm_pipeline.errors import FailureClass, StageError

CORPUS: Final = Path(__file__).parents[1] / "data" / "calibration" / "general.jsonl"
_TRIES: Final = 20


class Decoder(Tokenizer, Protocol):
    """A tokenizer that also gives the text of tokens."""

    def decode(self, ids: list[int]) -> str: ...  # noqa: D102


def prompts(tokenizer: Decoder, count: int, *, mean: int, stddev: float = 0.0, seed: int = 0) -> tuple[Prompt, ...]:
    """`count` prompts of `mean` tokens, special ones included; normally distributed with `stddev`, never below one.

    Each begins at another place of the corpus, so that none shares a prefix with another. The same seed gives the same
    prompts. A length is exact where cutting at tokens allows it, and never more than asked for.
    Raises StageError when a prompt cannot be that short.
    """
    rows = CORPUS.read_text(encoding="utf-8").splitlines()
    corpus = tokenizer.encode("\n".join(json.loads(row)["text"] for row in rows), add_special_tokens=False).ids
    special = len(tokenizer.encode("").ids)
    draw = random.Random(seed)  # noqa: S311 - not a secret
    made = []
    for number in range(count):
        wanted = max(1, round(draw.gauss(mean, stddev))) - special
        if wanted < 1:
            raise StageError(
                f"a prompt cannot have {mean} tokens: {special} are special ones", failure=FailureClass.USER
            )
        made.append(Prompt(f"synthetic-{number + 1}", _text(tokenizer, corpus, draw, wanted)))
    return tuple(made)


def _text(tokenizer: Decoder, corpus: list[int], draw: random.Random, wanted: int) -> str:
    """Text that encodes to `wanted` tokens, or the nearest below that cutting gives."""
    best = ""
    for _ in range(_TRIES):
        start = draw.randrange(len(corpus))
        around = corpus[start:] + corpus * (wanted // len(corpus) + 1)
        # Cut between tokens, text may encode to other tokens: a few more or fewer until it fits.
        length = wanted
        for _ in range(_TRIES):
            text = tokenizer.decode(around[:length])
            found = len(tokenizer.encode(text, add_special_tokens=False).ids)
            if found == wanted and text.strip():
                return text
            if found < wanted and len(text) > len(best):
                best = text
            length = max(1, length + wanted - found)
    if not best.strip():
        raise StageError(f"this tokenizer gives no text of {wanted} tokens", failure=FailureClass.USER)
    return best
