"""Commits, file listings and the local cache of Hugging Face, through `huggingface_hub`.

HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE and the user's cache of downloaded models are respected as in that library.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trtllm_pipeline import __version__
from trtllm_pipeline.errors import DownloadError, FailureClass
from trtllm_pipeline.hub import hub_errors
from trtllm_pipeline.hub.files import RemoteFile

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

HUB: Final = hub_errors.HUGGING_FACE
COMMIT: Final = re.compile(r"[0-9a-f]{40}")


def pin(model: str, revision: str, *, offline: bool) -> str:
    """The current commit of `revision`; in offline mode that of the user's cache. Raises DownloadError.

    A gated model that this user may not read raises here already, not only when its files are requested.
    """
    if offline or offline_by_environment():
        folder = cached_folder(model, revision)
        if folder is None:
            raise hub_errors.offline(HUB, model)
        return folder.name
    info = _info(model, revision, files=False)
    if info.gated:
        from huggingface_hub import HfApi

        with errors_in_words(model):
            HfApi(endpoint=endpoint()).auth_check(model)
    if info.sha is None or not COMMIT.fullmatch(info.sha):
        raise DownloadError(
            f"{model}: {endpoint()} reports no commit for revision {revision}", failure=FailureClass.BUG
        )
    return info.sha


def listing(model: str, commit: str) -> list[RemoteFile]:
    """All files of the model at `commit`, with sizes and digests. Raises DownloadError."""
    siblings = _info(model, commit, files=True).siblings or ()
    if any(file.size is None for file in siblings):
        raise DownloadError(
            f"{model}: {endpoint()} reports no file sizes",
            hint="check HF_ENDPOINT: the mirror may be too old",
            failure=FailureClass.BUG,
        )
    return [
        RemoteFile(
            file.rfilename,
            file.size or 0,
            file.lfs.sha256 if file.lfs is not None else file.blob_id,
            file_url(model, commit, file.rfilename),
        )
        for file in siblings
    ]


def file_url(model: str, commit: str, name: str) -> str:
    """Address of one file of the model."""
    from huggingface_hub import hf_hub_url

    return hf_hub_url(model, name, revision=commit, endpoint=endpoint())


def headers() -> Mapping[str, str]:
    """Headers of requests for files: the user agent, and the user's token if there is one."""
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    return build_hf_headers(library_name="trtllm-pipeline", library_version=__version__)


def cached_folder(model: str, revision: str) -> Path | None:
    """The folder of this revision in the user's cache, named by its commit, if it has weights. Raises DownloadError."""
    from huggingface_hub import try_to_load_from_cache

    with errors_in_words(model):
        config = try_to_load_from_cache(model, "config.json", revision=revision)
    if not isinstance(config, str) or not any(Path(config).parent.glob("*.safetensors")):
        return None
    return Path(config).parent


def cached_file(model: str, commit: str, name: str) -> Path | None:
    """One file in the user's cache."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(model, name, revision=commit)
    return Path(path) if isinstance(path, str) else None


def _info(model: str, revision: str, *, files: bool) -> ModelInfo:
    from huggingface_hub import HfApi

    with errors_in_words(model):
        return HfApi(endpoint=endpoint(), library_name="trtllm-pipeline", library_version=__version__).model_info(
            model, revision=revision, files_metadata=files, timeout=hub_errors.CONNECT_TIMEOUT_S * (6 if files else 1)
        )


@contextmanager
def errors_in_words(model: str) -> Iterator[None]:
    """Turn errors of `huggingface_hub` about `model` into DownloadErrors."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    # What the client raises if the hub does not respond: HTTPError of httpx or httpx2, depending on the release.
    unreachable: tuple[type[Exception], ...] = (
        *(kind for kind in HfHubHTTPError.__bases__ if issubclass(kind, Exception)),
        OSError,
    )
    try:
        yield
    except HFValidationError as error:
        raise DownloadError(f"{model!r} is not a valid model name: {error}") from error
    except HfHubHTTPError as error:
        # The hub answers 401 for a model that does not exist when nobody is logged in.
        usual = {"x-error-code": "RepoNotFound"} if isinstance(error, RepositoryNotFoundError) else {}
        status, headers = error.response.status_code, {**usual, **error.response.headers}
        raise hub_errors.refusal(HUB, model, status, headers) from error
    except unreachable as error:
        raise hub_errors.unreachable(HUB, model, endpoint(), error) from error


def endpoint() -> str:
    """The hub's address, without a slash at its end."""
    from huggingface_hub import constants

    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or constants.ENDPOINT


def offline_by_environment() -> bool:
    """Whether HF_HUB_OFFLINE forbids requests."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
