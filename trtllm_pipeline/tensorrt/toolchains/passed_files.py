"""Passes files on from stage to stage: linked rather than copied, if possible."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import DownloadError
from trtllm_pipeline.models import model_files

BESIDE_WEIGHTS: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files of a model directory that accompany the weights of a Hugging Face checkpoint, which is served as a whole."""


def link(folder: Path, name: str, target: Path) -> None:
    """Make `target` the file `name` of `folder`, or a copy of it if they are on different file systems.

    Raises DownloadError if `folder` has no such file, or one that must not be used.
    """
    # Hub caches hold symbolic links, and a link to one would be a link to a link.
    source = model_files.find(folder, name)
    if source is None:
        raise DownloadError(f"{folder / name} is missing")
    try:
        os.link(source, target)
    except OSError:
        model_files.copy(source, target)
