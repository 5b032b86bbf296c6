"""The model among a stage's inputs: its directory, and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from trtllm_pipeline.models import SETTINGS, Fields, has_tokenizer, names, read_tokenizer


def model_folder(inputs: Mapping[str, Path]) -> Path:
    """The directory with tokenizer and chat template; by hand that of the engine, where no other was named."""
    return inputs.get("model") or inputs["engine"]


def encoder(model: Path) -> Callable[[str], tuple[int, ...]] | None:
    """Text to tokens, without special ones, as the tokenizer of a directory does it; None where there is none."""
    if not has_tokenizer(names(model), Fields.read_optional(model, SETTINGS).values):
        return None
    tokenizer = read_tokenizer(model)
    return lambda text: tuple(tokenizer.encode(text, add_special_tokens=False).ids)
