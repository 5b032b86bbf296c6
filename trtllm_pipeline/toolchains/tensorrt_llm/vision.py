"""Models that take images: what of them TensorRT-LLM's releases serve, and why not the rest.

Sources: support matrices and lists of models of the PyTorch backend, 0.19 to candidates of 1.3; `multimodal_builder.py` and
`examples/multimodal`; `preprocessing` and `multimodal_encoders` of Triton's templates, and docs/multimodal.md beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

ENGINES_WITHOUT: Final[Mapping[str, str]] = {
    "llava": "Triton's templates take its images only as pixels that the client has prepared, which ours does not do",
    "llava_next": "preprocessing of Triton's templates does not know it",
    "internvl_chat": "preprocessing of Triton's templates does not know it",
}
"""Family whose engines a release builds -> why its images cannot be served with them."""
PYTORCH_WITHOUT: Final = frozenset({"llava", "llava_onevision", "internvl_chat"})
"""Families that no list of the PyTorch backend has."""
