"""Models that accept images: which of them TensorRT-LLM's releases can serve, and why the others cannot be served.

With engines, a visual engine turns an image into features, which replace tokens in the prompt. Triton's template
`preprocessing` prepares the image and counts the features, `multimodal_encoders` runs the visual engine.

Sources: support matrices and lists of models of the PyTorch backend, 0.19 to candidates of 1.3; `multimodal_builder.py`
and `examples/multimodal`; `preprocessing` and `multimodal_encoders` of Triton's templates, and their
docs/multimodal.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from trtllm_pipeline.base import Cell
from trtllm_pipeline.models import model_names
from trtllm_pipeline.tensorrt.toolchains.catalog import ENGINES

TEMPLATE_SET: Final = "multimodal"
"""Directory of `all_models` with the encoders model, and with the ensemble that calls it."""
MODELS: Final = ("preprocessing", model_names.ENCODERS_MODEL, "tensorrt_llm", "postprocessing", "ensemble")
"""Models of a repository with images. `tensorrt_llm_bls` accepts only prepared images."""
PRECISIONS: Final = ("fp16", "int8_wo", "int4_wo")
"""The templates pass features on in FP16, so the engine computes in FP16."""


_ENGINE_PATCHES: Final = (128, 5184)
"""Minimum and maximum of a visual engine of Qwen2-VL: defaults of --min_hw_dims and --max_hw_dims."""


@dataclass(frozen=True, slots=True)
class Vision:
    """A family whose images Triton's templates support."""

    since: str
    """First release whose templates support them."""
    image: str
    """Synthetic image for a question without one: `WIDTHxHEIGHT`."""
    hidden: int
    """Width of its visual engine."""
    wide: int
    """Width of its MLP."""
    patches: int
    """Maximum tokens inside it, for one image that it encodes."""
    parts: int = 1
    """Maximum images that it encodes for one image of a request."""
    loaded_bits: int = 16
    """Bits per weight in which its script loads the whole model."""
    one_row: bool = False
    """True if all images of a batch are one row of patches, with a full mask."""
    vocabulary: int | None = None
    """The only vocabulary size that preprocessing supports, because it is hard-coded."""


FAMILIES: Final[Mapping[str, Vision]] = {
    # An image is cut into at most 6 x 6 squares, by image_grid_pinpoints of the models, and also encoded whole.
    "llava_onevision": Vision("0.16", "384x384", hidden=1152, wide=4304, patches=729, parts=37),
    "qwen2_vl": Vision(
        "0.19",
        "224x224",
        hidden=1280,
        wide=5120,
        patches=_ENGINE_PATCHES[1],
        loaded_bits=32,
        one_row=True,
        vocabulary=152064,
    ),
}
ENGINES_WITHOUT: Final[Mapping[str, str]] = {
    "llava": "Triton's templates take its images only as pixels that a client has prepared as the model's processor does, over "
    "gRPC; clients here send images as they are",
    "llava_next": "preprocessing of Triton's templates does not support its images in any release",
    "internvl_chat": "preprocessing of Triton's templates does not support its images in any release",
}
"""Family whose visual engine releases build -> why its images cannot be served with engines in any release."""
PYTORCH_WITHOUT: Final = frozenset({"llava", "llava_onevision", "internvl_chat"})
"""Families that are in no list of the PyTorch backend."""
SHARE: Final = 0.7
"""Default share for the KV cache of the memory that a language engine leaves: an assumption. Models load
concurrently, and a visual engine that comes last gets only the rest."""

_PATCH: Final = 14
_MERGED: Final = 2 * _PATCH
"""Pixels along the edge of one token of Qwen2-VL."""
_PIXELS: Final = (56 * 56, 12_845_056)
"""Minimum and maximum of Qwen2-VL's preprocessor_config.json."""
_TOKENS: Final = {"gemma3": 256}
"""Family -> tokens of an image, for any size."""
_SQUARE: Final = 384
_SIDE: Final = 27
"""Tokens along the edge of a square of LLaVA-OneVision."""
_MOST_SQUARES: Final = 9
_GRID: Final = 6


def sees(cell: Cell) -> bool:
    """True if a cell has a visual engine."""
    return cell.toolchain == ENGINES and cell.recipe["family"] in FAMILIES


def activation_bytes(family: str, batch: int) -> int:
    """Activations of a visual engine built for `batch` requests, in bytes: for `N` patches `2 N (4 i + 7 h)`, as in a
    language engine, and the mask, `2 N^2`.

    TensorRT reserves memory for the largest input. Scores of attention, `2 N^2` for each head if all images are one row,
    are assumed to be fused.
    """
    value = FAMILIES[family]
    rows = batch * value.parts * value.patches
    return 2 * rows * (4 * value.wide + 7 * value.hidden) + (2 * rows**2 if value.one_row else 0)


def image_tokens(family: str, width: int, height: int) -> int:
    """Tokens of an image of this many pixels. Raises ValueError for an image that the family's visual engine does not
    support.

    Source: `smart_resize` of transformers' Qwen2-VL; `_get_number_of_features` of LlavaOnevisionProcessor.
    """
    if family != "qwen2_vl":
        return _llava_onevision(width, height)
    patches = _qwen2_vl(width, height)
    fewest, largest = _ENGINE_PATCHES
    if not fewest <= patches <= largest:
        raise ValueError(
            f"it has {patches} patches of {_PATCH} x {_PATCH} pixels, the visual engine supports {fewest} to {largest}"
        )
    return patches // 4


def pytorch_image_tokens(family: str, width: int, height: int) -> int | None:
    """The same on the PyTorch backend, which supports the images of the model's own processor. None for a family
    without known numbers. Source: Qwen2.5-VL has the processor of Qwen2-VL; `mm_tokens_per_image` in config.json of the
    Gemma 3 models.
    """
    return _qwen2_vl(width, height) // 4 if family in {"qwen2_vl", "qwen2_5_vl"} else _TOKENS.get(family)


def _qwen2_vl(width: int, height: int) -> int:
    """Patches of an image."""
    if max(width, height) > 200 * min(width, height):
        raise ValueError("one side is more than 200 times the other")
    wide, high = (max(_MERGED, round(side / _MERGED) * _MERGED) for side in (width, height))
    least, most = _PIXELS
    if wide * high > most:
        scale = math.sqrt(width * height / most)
        wide, high = (max(_MERGED, math.floor(side / scale / _MERGED) * _MERGED) for side in (width, height))
    elif wide * high < least:
        scale = math.sqrt(least / (width * height))
        wide, high = (math.ceil(side * scale / _MERGED) * _MERGED for side in (width, height))
    return wide * high // _PATCH**2


def _llava_onevision(width: int, height: int) -> int:
    grids = [(across, down) for across in range(1, _GRID + 1) for down in range(1, _GRID + 1)]

    def fit(grid: tuple[int, int]) -> tuple[int, int]:
        room = tuple(_SQUARE * each for each in grid)
        scale = min(room[0] / width, room[1] / height)
        used = min(int(width * scale) * int(height * scale), width * height)
        return used, used - room[0] * room[1]

    across, down = max(grids, key=fit)
    wide, high = _SIDE * across, _SIDE * down
    if width / height > wide / high:  # remove the padding above and below
        high -= 2 * ((high - int(round(height * (wide / width), 7))) // 2)
    else:
        wide -= 2 * ((wide - int(round(width * (high / height), 7))) // 2)
    shrink = math.sqrt(wide * high / (_MOST_SQUARES * _SIDE**2))
    if shrink > 1.1:
        wide, high = int(wide // shrink), int(high // shrink)
    return _SIDE**2 + wide * high + high  # each line ends with a separate token
