"""Downloads a pinned model from Hugging Face or ModelScope: the listing, the small files, then the weights they name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from trtllm_pipeline.domain import Json
from trtllm_pipeline.errors import DownloadError
from trtllm_pipeline.files.model_files import share
from trtllm_pipeline.hub import hub_errors, hugging_face, local, modelscope
from trtllm_pipeline.hub.files import Progress, copy_code, description_files, listed_code, weight_files
from trtllm_pipeline.hub.transfer import Transfer


def fetch(
    pinned: Mapping[str, Json], out: Path, kept: Path, *, progress: Progress, offline: bool, max_workers: int
) -> None:
    """Fill `out`; `kept` has the received files, complete or not. Raises DownloadError."""
    if "hugging_face" in pinned:
        hub, model, commit = hub_errors.HUGGING_FACE, str(pinned["hugging_face"]), str(pinned["revision"])
        if offline or hugging_face.offline_by_environment():
            cached = hugging_face.cached_folder(model, commit)
            if cached is None:
                raise hub_errors.offline(hub, model)
            local.take(cached, out, progress=progress)
            copy_code(pinned, cached, out, model)
            return
        files = hub_errors.patiently(lambda: hugging_face.listing(model, commit))
        headers = hugging_face.headers()
        lookup = partial(hugging_face.cached_file, model, commit)
    else:
        hub, model, revision = hub_errors.MODELSCOPE, str(pinned["modelscope"]), str(pinned["revision"])
        if offline:
            raise hub_errors.offline(hub, model)
        files = hub_errors.patiently(lambda: modelscope.listing(model, revision))
        if modelscope.listing_digest(files) != pinned["listing"]:
            raise DownloadError(
                f"{model} has changed on ModelScope since the run was planned", hint="run the command again"
            )
        headers, lookup = modelscope.headers(), None
    named = {file.path: file for file in files}
    small = description_files(named)
    if "config.json" not in small:
        raise DownloadError(f"{model} has no config.json, so it is not a transformers model")
    with Transfer(
        hub, model, kept, headers=headers, lookup=lookup, progress=progress, max_workers=max_workers
    ) as transfer:
        transfer.fetch([named[name] for name in small])
        # The index, if there is one, is among the small files and tells which the others are.
        weights = weight_files(kept, named, model)
        trusted = listed_code(pinned, named, model)
        transfer.fetch([*trusted, *(named[name] for name in weights)])
    for name in {*small, *weights, *(file.path for file in trusted)}:
        share(kept / name, out / name)
