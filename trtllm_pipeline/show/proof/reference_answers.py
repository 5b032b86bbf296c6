"""What servers answered, against the float reference: token by token, after the very tokens that the server said before.

Greedy texts part for good at their first difference, so counting equal tokens says little. What is measured is how much
less likely than its favourite the reference holds each token that was said: nothing for a right server, little for a
coarse one, much for one that computes something else. It is the mean of

    max over v of ln p(v | said before) - ln p(said | said before)        nats a token, p of the float reference
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from trtllm_pipeline.base import Json, RowError, read_json_lines
from trtllm_pipeline.measure import ANSWERS
from trtllm_pipeline.models import read_tokenizer
from trtllm_pipeline.show.proof import families
from trtllm_pipeline.show.proof.material import MAX_TOKENS
from trtllm_pipeline.tensorrt import EMBEDDED, Reference, random_model

_TOLERANCES: Final = {
    **dict.fromkeys(("fp32", "fp16", "bf16", "int8_wo", "int4_wo", "int4_awq"), 0.05),
    "int8_sq": 0.15,
    **dict.fromkeys(("fp8", "w4a8_awq"), 0.3),
    "nvfp4": 0.9,
}
_EMBEDDED: Final = {"int4_wo": 0.6}
"""GGML's 4-bit grids reach further below zero than above: they hold only one of two equal magnitudes as it is."""


def tolerance_nats(toolchain: str, precision: str) -> float:
    """Most nats a token that a right server may lose.

    Precisions hold these models' weights as they are, but for the embedded 4-bit ones. What is left is the rounding of
    activations and caches. About three times what the float reference loses with activations rounded alike. Computing
    something else (another rotary base, a bias or norm left out, heads in another order) costs 0.65 and more.
    """
    return _EMBEDDED.get(precision, _TOLERANCES[precision]) if toolchain == EMBEDDED else _TOLERANCES[precision]


@dataclass(frozen=True, slots=True)
class Agreement:
    """How near the answers of one cell are to the reference."""

    questions: int
    tokens: int
    """That were said, all answers together."""
    favourites: int
    """Of these, the reference's own first choice after what was said before."""
    loss_nats: float
    """Mean over tokens, see above."""
    unreadable: tuple[str, ...]
    """Ids of questions whose answers are no text of the model, or not of the length that was asked for."""


def compare(answers: Path, model: Path) -> Agreement:
    """The agreement of what `answers`, the directory of an accuracy artifact, holds with the model in its directory.

    Raises MatrixError for answers that cannot be read, with every damaged line.
    """
    tokenizer, reference = read_tokenizer(model), families.reference(model)
    spellings = random_model.spellings(tokenizer)
    losses: list[float] = []
    unreadable = []
    rows = read_json_lines(answers / ANSWERS, _said, nothing="there is no answer in this file")
    for id_, asked, answer in rows:
        tokens = random_model.spoken(answer, spellings)
        if tokens is None or len(tokens) != MAX_TOKENS:
            unreadable.append(id_)
        else:
            losses += _losses(reference, tokenizer.encode(asked).ids, tokens)
    return Agreement(
        questions=len(rows),
        tokens=len(losses),
        favourites=sum(loss == 0 for loss in losses),
        loss_nats=float(np.mean(losses)) if losses else 0.0,
        unreadable=tuple(unreadable),
    )


def _said(row: Json, _number: int) -> tuple[str, str, str]:
    """Id, question and answer of a row. Raises RowError."""
    if not isinstance(row, dict):
        raise RowError("", "expected an object")
    for key in ("input", "answer"):
        if not isinstance(row.get(key), str):
            raise RowError(key, "expected a text")
    return str(row.get("id")), str(row["input"]), str(row["answer"])


def _losses(reference: Reference, prompt: list[int], tokens: list[int]) -> Iterator[float]:
    logits = reference.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :].astype(np.float64)
    for row, token in zip(logits, tokens, strict=True):
        yield float(row.max() - row[token])
