"""The model among a stage's inputs: its directory, and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from trtllm_pipeline.models import SETTINGS, Fields, has_tokenizer, model_files, read_tokenizer


def model_folder(inputs: Mapping[str, Path]) -> Path:
    """The directory with tokenizer and chat template. In a manual run, the engine's unless another is given."""
    return inputs.get("model") or inputs["engine"]


def encoder(model: Path) -> Callable[[str], tuple[int, ...]] | None:
    """Converts text to tokens, without special ones, with the tokenizer in a directory. None without a tokenizer."""
    if not has_tokenizer(model_files.names(model), Fields.read_optional(model, SETTINGS).values):
        return None
    tokenizer = read_tokenizer(model)
    return lambda text: tuple(tokenizer.encode(text, add_special_tokens=False).ids)
