"""Commits and file listings of ModelScope, through its client.

MODELSCOPE_ENDPOINT and MODELSCOPE_API_TOKEN work as in that library. ModelScope has a commit per file, not one for the
whole repository, and need not keep its branches' history. So a pinned source also contains a digest of the listing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import httpx

from trtllm_pipeline.base import DownloadError, FailureClass
from trtllm_pipeline.models.hub import hub_errors
from trtllm_pipeline.models.hub.files import RemoteFile

if TYPE_CHECKING:
    from modelscope_hub import HubApi

HUB: Final = hub_errors.MODELSCOPE
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_DIGEST: Final = re.compile(r"[0-9a-fA-F]{40}|[0-9a-fA-F]{64}")


def pin(model: str, revision: str, *, offline: bool) -> tuple[str, str]:
    """The current commit of `revision` (or its name, if the hub reports no commit) and the digest of its listing.

    Raises DownloadError.
    """
    if offline:
        raise hub_errors.offline(HUB, model)
    api = _api()
    endpoint = str(api.legacy.endpoint)
    try:  # the client retries for a long time before it reports an unreachable hub
        httpx.head(endpoint, timeout=hub_errors.CONNECT_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise hub_errors.unreachable(HUB, model, endpoint, error) from error
    entries = _entries(api, model, revision)
    if not _COMMIT.fullmatch(revision):
        # The newest commit of any entry keeps every file in its current state. The branch might change.
        newest = max(entries, key=lambda entry: int(entry.get("CommittedDate") or 0), default={})
        commit = str(newest.get("Revision") or "")
        if _COMMIT.fullmatch(commit):
            revision, entries = commit, _entries(api, model, commit)
    return revision, listing_digest(_files(api, model, revision, entries))


def listing(model: str, revision: str) -> list[RemoteFile]:
    """The files in the model's top directory at `revision`, with sizes and digests. Raises DownloadError."""
    api = _api()
    return _files(api, model, revision, _entries(api, model, revision))


def listing_digest(files: Sequence[RemoteFile]) -> str:
    """Digest of a listing: names, sizes and digests of the files."""
    text = json.dumps(sorted((file.path, file.size, file.digest) for file in files))
    return blake2b(text.encode(), digest_size=16).hexdigest()


def headers() -> Mapping[str, str]:
    """Headers of requests for files: the user's token if there is one, in both forms that the hub accepts."""
    token = _api().legacy.token
    return {"authorization": f"Bearer {token}", "cookie": f"m_session_id={token}"} if token else {}


def _api() -> HubApi:
    from modelscope_hub import HubApi, HubConfig

    return HubApi(HubConfig())


def _entries(api: HubApi, model: str, revision: str) -> list[dict[str, Any]]:
    from modelscope_hub import APIError, HubError

    try:
        entries: list[dict[str, Any]] = api.legacy.list_repo_files(model, "model", revision, recursive=False)
    except APIError as error:
        if error.status_code is None:
            raise hub_errors.unreachable(HUB, model, str(api.legacy.endpoint), error) from error
        raise hub_errors.refusal(HUB, model, error.status_code, {"x-error-message": error.message}) from error
    except (HubError, ValueError) as error:
        raise hub_errors.unreachable(HUB, model, str(api.legacy.endpoint), error) from error
    except (TypeError, AttributeError, KeyError, RecursionError) as error:  # the client does not validate the response
        raise _unreadable(model, error) from error
    if not entries:
        raise hub_errors.refusal(HUB, model, 404, {})
    try:
        # Numbers may be strings there.
        for entry in entries:
            if int(entry.get("CommittedDate") or 0) < 0 or int(entry.get("Size") or 0) < 0:
                raise ValueError("a number below 0")
    except (TypeError, AttributeError, ValueError) as error:
        raise _unreadable(model, error) from error
    return entries


def _unreadable(model: str, error: Exception) -> DownloadError:
    return DownloadError(f"{model}: cannot parse the listing from {HUB.name}: {error!r}", failure=FailureClass.BUG)


def _files(api: HubApi, model: str, revision: str, entries: Sequence[Mapping[str, Any]]) -> list[RemoteFile]:
    try:
        return [
            RemoteFile(
                str(entry["Path"]),
                int(entry["Size"]),
                # Small files have the SHA-1 of their git blob in the field for SHA-256. Its length reveals it.
                digest if _DIGEST.fullmatch(digest := str(entry.get("Sha256") or "")) else None,
                api.legacy.get_download_url(model, "model", str(entry["Path"]), revision),
            )
            for entry in entries
            if entry.get("Type") != "tree"
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(model, error) from error
