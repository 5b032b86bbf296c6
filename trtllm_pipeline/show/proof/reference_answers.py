"""Server answers compared with the float reference, token by token, given the server's own previous tokens.

Greedy texts diverge permanently at their first difference, so counting equal tokens is not informative. The loss measures
how much less likely each generated token is than the reference's favorite: zero for a correct server, small for a coarse
one, large for a wrong computation. It is the mean of

    max over v of ln p(v | previous) - ln p(token | previous)        nats per token, p of the float reference
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from trtllm_pipeline.base import Json, user_files
from trtllm_pipeline.measure import accuracy_result
from trtllm_pipeline.models import read_tokenizer
from trtllm_pipeline.show.proof.material import MAX_TOKENS
from trtllm_pipeline.tensorrt import Reference, catalog, families, random_model

_TOLERANCES: Final = {
    **dict.fromkeys(("fp32", "fp16", "bf16", "int8_wo", "int4_wo", "int4_awq"), 0.05),
    "int8_sq": 0.15,
    **dict.fromkeys(("fp8", "w4a8_awq"), 0.3),
    "nvfp4": 0.9,
}
_EMBEDDED: Final = {"int4_wo": 0.6}
"""GGML's 4-bit grids reach further below zero than above, so only one of two equal magnitudes is exact."""


def tolerance_nats(toolchain: str, precision: str) -> float:
    """Maximum loss of a correct server, in nats per token.

    All precisions except the embedded 4-bit ones represent these models' weights exactly. The remaining loss comes from
    rounding activations and caches. The limit is about three times the loss of the float reference with the same
    rounding. A wrong computation (another rotary base, a missing bias or norm, reordered heads) costs 0.65 or more.
    """
    return _EMBEDDED.get(precision, _TOLERANCES[precision]) if toolchain == catalog.EMBEDDED else _TOLERANCES[precision]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of the answers of one cell with the reference."""

    questions: int
    tokens: int
    """Generated tokens of all answers."""
    favourites: int
    """Generated tokens that are the reference's first choice."""
    loss_nats: float
    """Mean over tokens, see above."""
    unreadable: tuple[str, ...]
    """Ids of questions whose answers the model cannot generate, or whose length is wrong."""


def compare(answers: Path, model: Path) -> Agreement:
    """Agreement of the answers in an accuracy artifact with the model. Raises MatrixError with all damaged lines."""
    tokenizer, reference = read_tokenizer(model), families.reference(model)
    spellings = random_model.spellings(tokenizer)
    losses: list[float] = []
    unreadable = []
    rows = user_files.read_json_lines(
        answers / accuracy_result.ANSWERS, _answer_row, nothing="the file contains no answers"
    )
    for id_, questions, answer in rows:
        tokens = random_model.spoken(answer, spellings)
        if tokens is None or len(tokens) != MAX_TOKENS:
            unreadable.append(id_)
        else:
            losses += _losses(reference, tokenizer.encode(questions).ids, tokens)
    return Agreement(
        questions=len(rows),
        tokens=len(losses),
        favourites=sum(loss == 0 for loss in losses),
        loss_nats=float(np.mean(losses)) if losses else 0.0,
        unreadable=tuple(unreadable),
    )


def _answer_row(row: Json, _number: int) -> tuple[str, str, str]:
    """Id, question and answer of a row. Raises RowError."""
    if not isinstance(row, dict):
        raise user_files.RowError("", "expected an object")
    for key in ("input", "answer"):
        if not isinstance(row.get(key), str):
            raise user_files.RowError(key, "expected a text")
    return str(row.get("id")), str(row["input"]), str(row["answer"])


def _losses(reference: Reference, prompt: list[int], tokens: list[int]) -> Iterator[float]:
    logits = reference.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :].astype(np.float64)
    for row, token in zip(logits, tokens, strict=True):
        yield float(row.max() - row[token])
