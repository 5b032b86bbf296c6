"""The download stage's program: a pinned source in, a verified Hugging Face folder out."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Final, cast

from trtllm_pipeline.domain import Json
from trtllm_pipeline.errors import DownloadError, FailureClass
from trtllm_pipeline.stages.base import Work

PARTIAL: Final = "partial"
"""Folder beside the attempts that keeps what broken transfers have brought."""


def run(work: Work) -> None:
    """Fetch or generate `params["source"]` into `work.out`.

    Advice: `max_workers` (files at once), `offline`, and `folder`, where a local source lies.
    """
    from trtllm_pipeline.hub.sources import fetch, kind_of

    kind = kind_of(work.params["source"])
    source = cast("dict[str, Json]", work.params["source"])
    if kind == "generated":
        _generate(work.out, str(source["generated"]), int(cast("int", source.get("seed", 0))))
        return
    folder = work.params.get("folder")
    fetch(
        source,
        work.out,
        progress=work.progress,
        offline=bool(work.params.get("offline", False)),
        max_workers=int(cast("int", work.params.get("max_workers", 4))),
        partial=work.attempt.parent / PARTIAL,
        folder=None if folder is None else Path(str(folder)),
    )


def _generate(out: Path, architecture: str, seed: int) -> None:
    from trtllm_pipeline.hub.verify import check_folder

    try:
        tiny = importlib.import_module("trtllm_pipeline.toolchains.embedded.random_model")
    except ImportError as error:
        raise DownloadError(
            f"generating a model needs a package that is not installed: {error.name}",
            failure=FailureClass.USER,
            hint="pip install 'trtllm-pipeline[embedded]'",
        ) from error
    tiny.write_model(out, architecture, seed)
    check_folder(out, f"generated {architecture}")
