"""Files that stages of every toolchain pass on: the tokenizer beside the weights, never copied where a link will do."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
"""Whatever of these a model folder has goes with its weights."""


def link(source: Path, target: Path) -> None:
    """Make `target` the same file as `source`, or a copy of it where they lie on different file systems."""
    source = source.resolve()  # hub caches hold symbolic links, and a link to one would be a link to a link
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def link_tokenizer(source: Path, target: Path) -> None:
    """Put the tokenizer of the folder `source` into the folder `target`."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            link(source / name, target / name)
