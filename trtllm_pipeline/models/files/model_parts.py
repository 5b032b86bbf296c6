"""The purpose of each file of a model, by name. A file that a stage does not read cannot affect its result."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from enum import Enum
from typing import Final


class ModelPart(str, Enum):
    """A kind of file in a model's directory."""

    WEIGHTS = "weights"
    CONFIG = "config"
    TOKENIZER = "tokenizer"
    """Includes tokenizer_config.json, which contains most models' chat template."""
    CHAT_TEMPLATE = "chat_template"
    """Chat template in a separate file."""
    GENERATION_CONFIG = "generation_config"
    PROCESSOR = "processor"
    """For images and videos."""
    OTHER = "other"
    """Unknown files, such as code. Any stage may read them, so every stage depends on them."""


CONVERTED: Final = frozenset({ModelPart.WEIGHTS, ModelPart.CONFIG})
"""The parts that a checkpoint is built from."""
_NAMES: Final = {
    ModelPart.WEIGHTS: r".*\.safetensors|.*\.safetensors\.index\.json",
    ModelPart.CONFIG: r"(adapter_)?config\.json|hf_quant_config\.json|quantize_config\.json",
    ModelPart.TOKENIZER: r"tokenizer\.(json|model)|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json"
    r"|vocab\.(json|txt)|merges\.txt|spiece\.model|sentencepiece\.bpe\.model|.*\.tiktoken",
    ModelPart.CHAT_TEMPLATE: r"chat_template\.(jinja|json)",
    ModelPart.GENERATION_CONFIG: r"generation_config\.json",
    ModelPart.PROCESSOR: r"(video_)?(pre)?processor_config\.json",
}
_PATTERNS: Final = {part: re.compile(names, re.IGNORECASE) for part, names in _NAMES.items()}


def part_of(name: str) -> ModelPart:
    """The part that the file `name` of a model directory belongs to."""
    return next((part for part, names in _PATTERNS.items() if names.fullmatch(name)), ModelPart.OTHER)


def files_of(names: Iterable[str], parts: Collection[ModelPart]) -> tuple[str, ...]:
    """The `names` that belong to `parts`, and the unknown ones, sorted."""
    return tuple(sorted(name for name in names if (part := part_of(name)) in parts or part is ModelPart.OTHER))
