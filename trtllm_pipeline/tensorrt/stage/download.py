"""The download stage's program: a pinned source in, a verified Hugging Face directory out."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import DownloadError, FailureClass
from trtllm_pipeline.tensorrt.stage.base import StageContext
from trtllm_pipeline.tensorrt.stage.params import DownloadParams

PARTIAL: Final = "partial"
"""Directory next to the attempts with partial transfers."""


def run(context: StageContext[DownloadParams]) -> None:
    """Fetch or generate the source into `context.out`."""
    from trtllm_pipeline.models import MODEL, sources

    params = context.params
    if sources.kind_of(params.source) == "generated":
        _generate(context.out, params.source["generated"], params.source.get("seed", 0))
        return
    sources.fetch(
        params.source,
        context.out,
        progress=context.progress,
        offline=params.offline,
        max_workers=params.max_workers,
        partial=context.attempt.parent / PARTIAL,
        folder=None if params.folder is None else Path(params.folder),
        content=params.content,
        copies=params.copies or (),
        form=params.form or MODEL,
    )
    if params.quantization is not None:
        _check_quantization(context.out, params.quantization)


def _check_quantization(folder: Path, expected: str) -> None:
    """Raise DownloadError if the model's files specify other weights than planned."""
    from trtllm_pipeline.models import FILES, Fields, quantization

    weights = quantization({name: Fields.read_optional(folder, name).values for name in FILES})
    if weights is None or weights.form != expected:
        says = "weights that are not quantized" if weights is None else f"{weights.form} ({weights.said})"
        raise DownloadError(
            f"the model has {says}, expected {expected} as in its recipe's quantization",
            failure=FailureClass.USER,
            hint="correct the recipe",
        )


def _generate(out: Path, architecture: str, seed: int) -> None:
    from trtllm_pipeline.models import verify

    try:
        tiny = importlib.import_module("trtllm_pipeline.tensorrt.embedded.random_model")
    except ImportError as error:
        raise DownloadError(
            f"generating a model needs a package that is not installed: {error.name}",
            hint="pip install 'trtllm-pipeline[embedded]'",
        ) from error
    tiny.write_model(out, architecture, seed)
    verify.check_folder(out, f"generated {architecture}")
