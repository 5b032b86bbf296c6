"""Errors for refused hub requests, with the user's next step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from trtllm_pipeline.base import DownloadError, FailureClass

CONNECT_TIMEOUT_S: Final = 3.0
"""A hub without any response in this time counts as unreachable."""
BACKOFF_S = 0.5
"""First wait between tries. Doubles up to `MAX_BACKOFF_S`."""
MAX_BACKOFF_S: Final = 20.0
TRIES: Final = 6
"""Tries without progress before giving up."""

_Result = TypeVar("_Result")


class UnavailableError(DownloadError):
    """A source that cannot be used here and now: unreachable, not installed, or without this model. Another may work.

    `unreachable` is the name of a hub that does not respond at all, regardless of the model.
    """

    unreachable: str | None = None


class OfflineError(UnavailableError):
    """A source that requires a hub request, which offline mode forbids."""


@dataclass(frozen=True, slots=True)
class Hub:
    """Names and addresses of a hub, for messages."""

    name: str
    page: str
    """URL of a model's page, with {model}."""
    files: str
    """URL of its files, also with {revision} if the hub accepts one."""
    log_in: str
    endpoint_variable: str


HUGGING_FACE: Final = Hub(
    "Hugging Face",
    "https://huggingface.co/{model}",
    "https://huggingface.co/{model}/tree/{revision}",
    "run `hf auth login` or set HF_TOKEN",
    "HF_ENDPOINT",
)
MODELSCOPE: Final = Hub(
    "ModelScope",
    "https://modelscope.cn/models/{model}",
    "https://modelscope.cn/models/{model}/files",
    "set MODELSCOPE_API_TOKEN",
    "MODELSCOPE_ENDPOINT",
)


def refusal(hub: Hub, model: str, status: int, headers: Mapping[str, str]) -> DownloadError:
    """The error for an HTTP status of 400 or more. Hugging Face adds details in response headers."""
    code, message = headers.get("x-error-code", ""), headers.get("x-error-message", "").strip()[:200]
    detail = f": {message}" if message else ""
    if code == "GatedRepo":
        return DownloadError(
            f"{model} is gated on {hub.name}: its owner grants access on request",
            hint=f"accept its terms on {hub.page.format(model=model)}, then {hub.log_in} with the same account",
        )
    if code == "RevisionNotFound":
        return DownloadError(
            f"{model} does not have this revision on {hub.name}",
            hint=f"see {hub.page.format(model=model)} for its branches and tags",
        )
    if status == 404 or code == "RepoNotFound":
        what = "this file of it" if code == "EntryNotFound" else "it"
        return UnavailableError(
            f"{model}: {hub.name} does not have {what}, or it is private (HTTP {status})",
            hint=f"check the name; if it is private, {hub.log_in}",
        )
    if status == 401:
        return DownloadError(
            f"{model}: {hub.name} does not accept the token (HTTP 401{detail})",
            hint=f"the token is wrong or has expired: {hub.log_in} with a new one, or remove it",
        )
    if status == 403:
        return DownloadError(
            f"{model}: {hub.name} refuses access (HTTP 403{detail})",
            hint=f"open {hub.page.format(model=model)} with your account, then {hub.log_in}; "
            "the token needs permission to read this model",
        )
    if status == 429:
        return UnavailableError(
            f"{model}: {hub.name} is rate limiting requests (HTTP 429)",
            failure=FailureClass.TRANSIENT,
            hint=f"wait a few minutes; a token raises the limit: {hub.log_in}",
        )
    if status >= 500 or status == 408:
        return UnavailableError(
            f"{model}: {hub.name} reports a server error (HTTP {status})",
            failure=FailureClass.TRANSIENT,
            hint="try again later",
        )
    return DownloadError(f"{model}: {hub.name} returned HTTP {status}{detail}", failure=FailureClass.BUG)


def unreachable(hub: Hub, model: str, endpoint: str, error: Exception) -> UnavailableError:
    error_shown = UnavailableError(
        f"{model}: {hub.name} cannot be reached at {endpoint}: {str(error).strip() or type(error).__name__}",
        failure=FailureClass.TRANSIENT,
        hint=f"check the network, HTTPS_PROXY and {hub.endpoint_variable}, or name another source",
    )
    error_shown.unreachable = hub.name
    return error_shown


def offline(hub: Hub, model: str, *, instead: str = "name a local directory as a source") -> OfflineError:
    """The error for a model that would have to be downloaded in offline mode, with what to do `instead`."""
    return OfflineError(
        f"{model} is not on this machine, and offline mode forbids requests to {hub.name}",
        hint=f"run once without offline mode, or {instead}",
    )


def backoff_s(failures: int) -> float:
    """Seconds to wait after this many failures in a row."""
    return min(BACKOFF_S * 2.0 ** (failures - 1), MAX_BACKOFF_S)


def patiently(request: Callable[[], _Result]) -> _Result:
    """Call `request`, and retry it while it fails for a transient reason."""
    for failures in range(1, TRIES):
        try:
            return request()
        except DownloadError as error:
            if error.failure is not FailureClass.TRANSIENT:
                raise
            time.sleep(backoff_s(failures))
    return request()
