"""The download stage's program: a pinned source in, a verified Hugging Face directory out."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import DownloadError, FailureClass
from trtllm_pipeline.tensorrt.stage.base import StageContext
from trtllm_pipeline.tensorrt.stage.params import DownloadParams

PARTIAL: Final = "partial"
"""Directory next to the attempts that keeps partial transfers."""


def run(context: StageContext[DownloadParams]) -> None:
    """Fetch or generate the source into `context.out`."""
    from trtllm_pipeline.models import MODEL, fetch, kind_of

    asked = context.params
    if kind_of(asked.source) == "generated":
        _generate(context.out, asked.source["generated"], asked.source.get("seed", 0))
        return
    fetch(
        asked.source,
        context.out,
        progress=context.progress,
        offline=asked.offline,
        max_workers=asked.max_workers,
        partial=context.attempt.parent / PARTIAL,
        folder=None if asked.folder is None else Path(asked.folder),
        content=asked.content,
        copies=asked.copies or (),
        form=asked.form or MODEL,
    )
    if asked.quantization is not None:
        _check_quantization(context.out, asked.quantization)


def _check_quantization(folder: Path, expected: str) -> None:
    """Raise DownloadError if the model's files specify other weights than planned."""
    from trtllm_pipeline.models import FILES, Fields, quantization

    found = quantization({name: Fields.read_optional(folder, name).values for name in FILES})
    if found is None or found.form != expected:
        says = "weights that are not quantized" if found is None else f"{found.form} ({found.said})"
        raise DownloadError(
            f"the model has {says}, expected {expected} as in its recipe's quantization",
            failure=FailureClass.USER,
            hint="correct the recipe",
        )


def _generate(out: Path, architecture: str, seed: int) -> None:
    from trtllm_pipeline.models import check_folder

    try:
        tiny = importlib.import_module("trtllm_pipeline.tensorrt.embedded.random_model")
    except ImportError as error:
        raise DownloadError(
            f"generating a model needs a package that is not installed: {error.name}",
            hint="pip install 'trtllm-pipeline[embedded]'",
        ) from error
    tiny.write_model(out, architecture, seed)
    check_folder(out, f"generated {architecture}")
