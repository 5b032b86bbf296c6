"""The rows that activations are measured on, as tokens and in batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.toolchains.calibration_rows import Messages, Row, Selection, Tokens


def tokenize(folder: Path, rows: Sequence[Row], selection: Selection, *, trust_remote_code: bool) -> list[list[int]]:
    """Each row as the first `max_length` token ids of the model in `folder`.

    Raises StageError where a row needs the model's tokenizer or chat template and there is none.
    """
    tokenizer = None
    if any(row.tokens is None for row in rows):
        tokenizer = _tokenizer(folder, trust_remote_code=trust_remote_code)
    found = []
    for row in rows:
        if row.tokens is not None:
            tokens = list(row.tokens)
        elif row.messages is not None or selection.chat_template:
            tokens = _chat(folder, tokenizer, row.messages or [{"role": "user", "content": row.text}])
        else:
            assert tokenizer is not None
            tokens = tokenizer(row.text, truncation=True, max_length=selection.max_length)["input_ids"]
        if tokens:
            found.append(tokens[: selection.max_length])
    if not found:
        raise StageError("the calibration set holds no tokens", failure=FailureClass.USER)
    return found


def _tokenizer(folder: Path, *, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise StageError(
            f"the tokenizer in {folder} could not be loaded: {_first_line(error)}",
            failure=FailureClass.USER,
            hint="put the model's tokenizer files beside its weights, or give rows as input_ids",
        ) from error


def _chat(folder: Path, tokenizer: Any, messages: Messages) -> list[int]:
    from jinja2 import TemplateError

    try:
        found = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)
    except (ValueError, TemplateError) as error:
        raise StageError(
            f"the chat template in {folder} does not take the calibration rows: {_first_line(error)}",
            failure=FailureClass.INFEASIBLE,
            hint='set calibration.chat_template to false, and give rows as "text"',
        ) from error
    return list(found["input_ids"])


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def digest(rows: Sequence[Tokens]) -> str:
    """SHA-256 of the token ids as they are fed: what was calibrated on, whatever file it came from."""
    content = hashlib.sha256()
    for row in rows:
        content.update(json.dumps(list(row), separators=(",", ":")).encode() + b"\n")
    return f"sha256:{content.hexdigest()}"


def batches(rows: Sequence[Tokens], size: int, *, padded: bool) -> Iterator[list[Tokens]]:
    """Rows in batches of at most `size`, the longest first: what does not fit in memory shows at once.

    Neighbours in length share a batch, so that little of it is padding. With `padded` false only rows of equal length do.
    """
    batch: list[Tokens] = []
    for row in sorted(rows, key=len, reverse=True):
        if batch and (len(batch) == size or (not padded and len(row) != len(batch[0]))):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def counted(rows: Sequence[Tokens]) -> Mapping[str, int]:
    """How many rows and tokens there are."""
    return {"rows": len(rows), "tokens": sum(map(len, rows))}
