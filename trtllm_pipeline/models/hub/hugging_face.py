"""Commits and file listings of Hugging Face, and its local cache, through `huggingface_hub`.

HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE and the user's cache of downloaded models work as in that library.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from trtllm_pipeline import __version__
from trtllm_pipeline.base import DownloadError, FailureClass
from trtllm_pipeline.models.hub import hub_errors
from trtllm_pipeline.models.hub.files import RemoteFile

if TYPE_CHECKING:
    from trtllm_pipeline.models.hub.model_info import ModelInfo

HUB: Final = hub_errors.HUGGING_FACE
COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_MOST_BYTES: Final = 64 << 20
"""Size limit of a response. A listing of 100,000 files has 20 MB."""
_LONGEST_S: Final = 120.0
_NOT_ACCEPTED: Final = "Invalid credentials in Authorization header"


def pin(model: str, revision: str, *, offline: bool) -> str:
    """The current commit of `revision`, in offline mode the one in the user's cache. Raises DownloadError.

    A gated model that this user may not read already raises here, not only when its files are requested.
    """
    if offline or offline_by_environment():
        folder = cached_folder(model, revision)
        if folder is None:
            raise hub_errors.offline(HUB, model)
        return folder.name
    info = _info(model, revision, files=False)
    if info.gated:
        _answer(model, "/auth-check", hub_errors.CONNECT_TIMEOUT_S)
    if info.sha is None or not COMMIT.fullmatch(info.sha):
        raise DownloadError(
            f"{model}: {endpoint()} reports no commit for revision {revision}", failure=FailureClass.BUG
        )
    return info.sha


def listing(model: str, commit: str) -> list[RemoteFile]:
    """All files of the model at `commit`, with sizes and digests. Raises DownloadError."""
    siblings = _info(model, commit, files=True).siblings
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
    from huggingface_hub import hf_hub_url

    return hf_hub_url(model, name, revision=commit, endpoint=endpoint())


def headers() -> Mapping[str, str]:
    """Headers of requests for files: the user agent, and the user's token if there is one."""
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    return build_hf_headers(library_name="trtllm-pipeline", library_version=__version__)


def cached_folder(model: str, revision: str) -> Path | None:
    """The directory of this revision in the user's cache, named by its commit, if it has weights. Raises DownloadError."""
    from huggingface_hub import try_to_load_from_cache

    with errors_in_words(model):
        config = try_to_load_from_cache(model, "config.json", revision=revision)
    if not isinstance(config, str) or not any(Path(config).parent.glob("*.safetensors")):
        return None
    return Path(config).parent


def cached_file(model: str, commit: str, name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(model, name, revision=commit)
    return Path(path) if isinstance(path, str) else None


def _info(model: str, revision: str, *, files: bool) -> ModelInfo:
    from pydantic import ValidationError

    from trtllm_pipeline.models.hub.model_info import ModelInfo

    path = f"/revision/{quote(revision, safe='')}{'?blobs=True' if files else ''}"
    content = _answer(model, path, hub_errors.CONNECT_TIMEOUT_S * (6 if files else 1))
    try:
        return ModelInfo.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the answer"
        raise DownloadError(
            f"{model}: {endpoint()} does not list a model: {where[:100]}: {first['msg'][:200]}",
            hint="check HF_ENDPOINT, or name another source",
            failure=FailureClass.BUG,
        ) from error


def _answer(model: str, path: str, timeout_s: float) -> bytes:
    """The hub's response about a model. Raises DownloadError, also for a response that is too large or too slow."""
    import httpx
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    with errors_in_words(model):
        validate_repo_id(model)
    url, content, until = f"{endpoint()}/api/models/{model}{path}", bytearray(), time.monotonic() + _LONGEST_S
    asking = {**headers(), "accept-encoding": "identity"}  # a compressed response can decompress to any size
    try:
        with httpx.stream("GET", url, headers=asking, timeout=timeout_s, follow_redirects=True) as response:
            if (status := response.status_code) >= 400:
                answered = dict(response.headers)
                # Without a login, the hub responds with 401 for a model that does not exist.
                if status == 401 and answered.get("x-error-message") != _NOT_ACCEPTED:
                    answered = {"x-error-code": "RepoNotFound", **answered}
                raise hub_errors.refusal(HUB, model, status, answered)
            for piece in response.iter_raw():
                content += piece
                if len(content) > _MOST_BYTES or time.monotonic() > until:
                    raise DownloadError(
                        f"{model}: {endpoint()} sends more than {_MOST_BYTES >> 20} MiB, or for more than "
                        f"{_LONGEST_S:.0f} s, in place of a listing",
                        hint="check HF_ENDPOINT, or name another source",
                        failure=FailureClass.BUG,
                    )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise hub_errors.unreachable(HUB, model, endpoint(), error) from error
    return bytes(content)


@contextmanager
def errors_in_words(model: str) -> Iterator[None]:
    """Turn errors of `huggingface_hub` about `model` into DownloadErrors."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    # The client's error if the hub does not respond: HTTPError of httpx or httpx2, depending on the release.
    unreachable: tuple[type[Exception], ...] = (
        *(kind for kind in HfHubHTTPError.__bases__ if issubclass(kind, Exception)),
        OSError,
    )
    try:
        yield
    except HFValidationError as error:
        raise DownloadError(f"{model!r} is not a valid model name: {error}") from error
    except HfHubHTTPError as error:
        # Without a login, the hub responds with 401 for a model that does not exist.
        usual = {"x-error-code": "RepoNotFound"} if isinstance(error, RepositoryNotFoundError) else {}
        status, headers = error.response.status_code, {**usual, **error.response.headers}
        raise hub_errors.refusal(HUB, model, status, headers) from error
    except unreachable as error:
        raise hub_errors.unreachable(HUB, model, endpoint(), error) from error


def endpoint() -> str:
    """The hub's address, without a trailing slash."""
    from huggingface_hub import constants

    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or constants.ENDPOINT


def offline_by_environment() -> bool:
    """True if HF_HUB_OFFLINE forbids requests."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
