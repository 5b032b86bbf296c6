"""Uploads a bundle to Hugging Face with `huggingface_hub`; by default it only reports what it would upload."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from trtllm_pipeline import __version__
from trtllm_pipeline.base import DownloadError, UsageError
from trtllm_pipeline.models import endpoint, errors_in_words
from trtllm_pipeline.serve.export.bundle import largest


def check_repository(name: str | None) -> None:
    """Raise UsageError for an invalid repository name."""
    if name is None:
        raise UsageError("--to hub: which repository?", hint="--repository ORGANIZATION/NAME")
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
        if "/" not in name:
            raise UsageError(f"--repository {name}: expected ORGANIZATION/NAME")
    except HFValidationError as error:
        raise UsageError(f"--repository {name}: {error}", hint="--repository ORGANIZATION/NAME") from error


def publish(folder: Path, repository: str, *, message: str, upload: bool, private: bool) -> dict[str, Any]:
    """Upload the bundle in `folder`, or only report what would be uploaded.

    Returns `repository`, `url` of the commit (None when nothing was uploaded) and `files` with their sizes. The
    repository is created if it is missing. Raises DownloadError with our own message.
    """
    report = {"repository": repository, "url": None, "files": dict(largest(folder))}
    if not upload:
        return report
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi(endpoint=endpoint(), library_name="trtllm-pipeline", library_version=__version__)
    try:
        with errors_in_words(repository):
            api.create_repo(repository, private=private, exist_ok=True)
            done = api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
    except DownloadError as error:
        hint = f"the bundle is in {folder}; {error.hint}" if error.hint else f"the bundle is in {folder}"
        raise DownloadError(f"not uploaded: {error.message}", failure=error.failure, hint=hint) from error
    return {**report, "url": str(done.commit_url)}
