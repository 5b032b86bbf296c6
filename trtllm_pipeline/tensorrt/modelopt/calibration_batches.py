"""The calibration rows as tokens and in batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trtllm_pipeline.base import FailureClass, StageError
from trtllm_pipeline.measure import chat_templates as chat
from trtllm_pipeline.tensorrt.stage.calibration_rows import Messages, Row, Tokens
from trtllm_pipeline.tensorrt.stage.params import Selection


def tokenize(folder: Path, rows: Sequence[Row], selection: Selection) -> list[list[int]]:
    """Each row as the first `max_length` token ids of the model in `folder`.

    Raises StageError if a row needs the model's tokenizer or chat template and the model has none.
    """
    tokenizer: Any = None
    if any(row.tokens is None for row in rows):
        tokenizer = _tokenizer(folder)
    chats = [row.messages or [{"role": "user", "content": row.text}] for row in rows if _is_chat(row, selection)]
    rendered = iter(_chats(folder, tokenizer, chats) if chats else ())
    tokenized = []
    for row in rows:
        if row.tokens is not None:
            tokens = list(row.tokens)
        elif _is_chat(row, selection):
            tokens = tokenizer(next(rendered), add_special_tokens=False)["input_ids"]
        else:
            tokens = tokenizer(row.text, truncation=True, max_length=selection.max_length)["input_ids"]
        if tokens:
            tokenized.append(tokens[: selection.max_length])
    if not tokenized:
        raise StageError("the calibration set has no tokens", failure=FailureClass.USER)
    return tokenized


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the exceptions of transformers and tokenizers are not documented
        raise StageError(
            f"the tokenizer in {folder} could not be loaded: {_first_line(error)}",
            failure=FailureClass.USER,
            hint="put the model's tokenizer files next to its weights, or use rows with input_ids",
        ) from error


def _is_chat(row: Row, selection: Selection) -> bool:
    return row.tokens is None and (row.messages is not None or selection.chat_template)


def _chats(folder: Path, tokenizer: Any, conversations: Sequence[Messages]) -> list[str]:
    """The texts of conversations, from the tokenizer's template, in a process with limits."""
    hint = 'set calibration.chat_template to false, and use rows with "text"'
    try:
        source = tokenizer.get_chat_template()
    except ValueError as error:
        raise StageError(
            f"the tokenizer in {folder} has no chat template: {_first_line(error)}",
            failure=FailureClass.INFEASIBLE,
            hint=hint,
        ) from error
    tokens = {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    template = chat.Template(source, tokens, f"the chat template in {folder}")
    try:
        with chat.Renderer(template) as renderer:
            return [renderer.render(chat.Chat(each, add_generation_prompt=False)) for each in conversations]
    except chat.TemplateError as error:
        refused = isinstance(error, chat.RefusedError)
        failure = FailureClass.INFEASIBLE if refused else error.failure
        lasting = failure is FailureClass.INFEASIBLE
        raise StageError(error.message, failure=failure, hint=hint if lasting else error.hint) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def digest(rows: Sequence[Tokens]) -> str:
    """SHA-256 of the token ids for calibration, independent of the file that they came from."""
    content = hashlib.sha256()
    for row in rows:
        content.update(json.dumps(list(row), separators=(",", ":")).encode() + b"\n")
    return f"sha256:{content.hexdigest()}"


def batches(rows: Sequence[Tokens], size: int, *, padded: bool) -> Iterator[list[Tokens]]:
    """Rows in batches of at most `size`, the longest first, so that running out of memory shows at once.

    Rows of similar length share a batch, which minimizes padding. If `padded` is false, only rows of equal length do.
    """
    batch: list[Tokens] = []
    for row in sorted(rows, key=len, reverse=True):
        if batch and (len(batch) == size or (not padded and len(row) != len(batch[0]))):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
