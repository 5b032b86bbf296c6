"""Downloads files over HTTP, several at once. Resumes interrupted transfers, from another place if necessary, and
verifies the files.

The hubs' own clients only list the files. They do not download them, because recent releases of huggingface_hub discard
partly received files when their process ends, and shards have gigabytes. Here they are kept as NAME.part until they are
complete.
"""

from __future__ import annotations

import email.utils
import logging
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from trtllm_pipeline.base import DownloadError, FailureClass
from trtllm_pipeline.models.files.model_files import share
from trtllm_pipeline.models.hub import hub_errors
from trtllm_pipeline.models.hub.files import Progress, RemoteFile, Sha256, mismatch, size_bytes

logger = logging.getLogger(__name__)

_GAIN_BYTES: Final = 1 << 20
"""A connection that receives this much resets the count of failures."""
_TRIES_BEFORE_ANOTHER: Final = 2
"""Consecutive failures after which another place takes over, if there is one."""
_LONGEST_WAIT_S: Final = 120.0
"""The attempt fails if the hub asks for a longer wait. The next one continues from there."""


@dataclass(frozen=True, slots=True)
class RepositoryCopy:
    """A repository that has the files."""

    hub: hub_errors.Hub
    model: str
    headers: Callable[[], Mapping[str, str]]
    """Headers for requests to this hub only."""
    find: Callable[[RemoteFile], RemoteFile | None]
    """The same file there. None if it is missing, or the hub does not respond."""

    def __str__(self) -> str:
        return f"{self.hub.name} ({self.model})"


class _BrokenOffError(Exception):
    """A connection that ended early, or a response that asks for a later retry."""

    def __init__(self, reason: str, error: DownloadError | None = None, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.error = error
        self.wait_s = wait_s


class Transfer:
    """Downloads files of one model into one directory, which also keeps incomplete files."""

    def __init__(
        self,
        places: Sequence[RepositoryCopy],
        folder: Path,
        *,
        progress: Progress,
        max_workers: int,
        lookup: Callable[[str], Path | None] | None = None,
    ) -> None:
        """The first of `places` is used. If it fails, the others continue, file by file.

        `lookup` finds a file by name in the user's cache. If it is found and verified, it is not downloaded.
        """
        self._places, self._folder = tuple(places), folder
        self._model, self._first = places[0].model, places[0]
        self._progress, self._max_workers, self._lookup = progress, max_workers, lookup
        self._received = 0
        self._total = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        # Compressed responses could not be resumed: ranges count the bytes as sent.
        self._client = httpx.Client(
            headers={"accept-encoding": "identity"},
            follow_redirects=True,
            timeout=httpx.Timeout(30.0, connect=hub_errors.CONNECT_TIMEOUT_S * 3, pool=None),
        )

    def __enter__(self) -> Transfer:  # noqa: PYI034 - typing.Self is younger than Python 3.10
        return self

    def __exit__(self, *_error: object) -> None:
        self._client.close()

    def fetch(self, files: Sequence[RemoteFile]) -> None:
        """Download `files` completely and verify them. Raises DownloadError."""
        self._stop.clear()  # an earlier call may have failed
        self._total += sum(file.size for file in files)
        missing = sum(file.size - self._present(file) for file in files)
        free = shutil.disk_usage(self._folder).free
        if missing > free:
            raise DownloadError(
                f"{self._model} does not fit on the disk: {missing / 1e9:.2f} GB remain to be downloaded, "
                f"{free / 1e9:.2f} GB are free at {self._folder}",
                hint="free some space, or choose a workspace on another disk with --workspace; "
                "files that are complete are not downloaded again",
            )
        with ThreadPoolExecutor(self._max_workers) as pool:
            futures = [pool.submit(self._fetch_one, file) for file in files]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                self._stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _present(self, file: RemoteFile) -> int:
        target = self._folder / file.path
        return file.size if target.exists() else size_bytes(_part(target))

    def _fetch_one(self, file: RemoteFile) -> None:
        target = self._folder / file.path
        if target.exists():  # only a verified file has this name
            self._count(file.size)
            return
        cached = self._lookup(file.path) if self._lookup else None
        if cached is not None and mismatch(cached, file) is None:
            share(cached.resolve(), target)
            self._count(file.size)
            return
        part, sha256 = _part(target), Sha256()
        self._count(size_bytes(part))
        place, remote = self._begin(file)
        refused: set[RepositoryCopy] = set()
        failures = mismatches = 0
        furthest = size_bytes(part)  # a restarted file makes no progress until it is longer than ever before
        while not self._stop.is_set():
            try:
                if size_bytes(part) != file.size:
                    self._receive(place, remote, part, sha256)
                wrong = mismatch(part, file, sha256)
                if wrong is None:
                    part.replace(target)
                    return
                self._discard(part)
                mismatches += 1
                if mismatches == 2:  # the first time may be a bad partial file, the second time is the hub's content
                    raise DownloadError(
                        f"{self._model}: {file.path} from {place.hub.name} failed verification: {wrong}",
                        failure=FailureClass.BUG,
                        hint="name another source; if the error persists, report it to the model's owner",
                    )
            except (httpx.RequestError, _BrokenOffError) as reason:
                failures = 1 if size_bytes(part) >= furthest + _GAIN_BYTES else failures + 1
                furthest = max(furthest, size_bytes(part))
                stated = reason.error if isinstance(reason, _BrokenOffError) else None
                wait_s = reason.wait_s if isinstance(reason, _BrokenOffError) else None
                if (wait_s or 0.0) > _LONGEST_WAIT_S or (stated and stated.failure is not FailureClass.TRANSIENT):
                    refused.add(place)
                other = None
                if place in refused or failures % _TRIES_BEFORE_ANOTHER == 0:
                    other = self._another(place, file, refused)
                if failures >= hub_errors.TRIES * len(self._places) or (place in refused and other is None):
                    raise stated or DownloadError(
                        f"{self._model}: the download of {file.path} from {place.hub.name} stopped at "
                        f"{size_bytes(part)} of {file.size} bytes: {str(reason) or type(reason).__name__}",
                        failure=FailureClass.TRANSIENT,
                        hint="check the network; the next attempt continues from there",
                    ) from reason
                if other is not None:
                    logger.warning("%s: %s; %s continues from byte %d", file.path, reason, other[0], size_bytes(part))
                    (place, remote), self._first = other, other[0]
                    continue
                self._stop.wait(hub_errors.backoff_s(failures) if wait_s is None else wait_s)

    def _begin(self, file: RemoteFile) -> tuple[RepositoryCopy, RemoteFile]:
        """The first place to request a file from: the last one that delivered another file."""
        place = self._first
        remote = place.find(file)
        return (self._places[0], file) if remote is None else (place, remote)

    def _another(
        self, place: RepositoryCopy, file: RemoteFile, refused: Collection[RepositoryCopy]
    ) -> tuple[RepositoryCopy, RemoteFile] | None:
        """The next place with the same file. None if there is none."""
        after = self._places.index(place) + 1
        for each in (*self._places[after:], *self._places[: after - 1]):
            if each not in refused and (remote := each.find(file)) is not None:
                return each, remote
        return None

    def _receive(self, place: RepositoryCopy, file: RemoteFile, part: Path, sha256: Sha256) -> None:
        """Append the data from one connection to `part` and to `sha256`."""
        offset = size_bytes(part)
        if offset > file.size:
            self._discard(part)
            offset = 0
        sha256.catch_up(part)  # before the hub waits
        headers = {**place.headers(), **({"range": f"bytes={offset}-"} if offset else {})}
        with self._client.stream("GET", file.url, headers=headers) as response:
            status = response.status_code
            if status == 416:
                self._discard(part)
                raise _BrokenOffError(f"range from {offset} refused")
            if status >= 400:
                error = hub_errors.refusal(place.hub, place.model, status, response.headers)
                if error.failure is FailureClass.TRANSIENT or place is not self._places[0]:
                    raise _BrokenOffError(error.message, error, _retry_after_s(response.headers.get("retry-after")))
                raise error
            if offset and (
                status != 206 or not response.headers.get("content-range", "").startswith(f"bytes {offset}-")
            ):
                self._discard(part)
                offset = 0
                if status == 206:
                    raise _BrokenOffError("another range than requested")
            sha256.catch_up(part)
            with part.open("ab") as sink:
                for chunk in response.iter_bytes():
                    offset += len(chunk)
                    if offset > file.size:
                        break  # never store more than announced
                    sink.write(chunk)
                    sha256.update(chunk)
                    self._count(len(chunk))
                    if self._stop.is_set():
                        break
        if offset > file.size:
            self._discard(part)
            raise _BrokenOffError(f"the hub sends more than the {file.size} bytes it lists")
        if offset < file.size:
            raise _BrokenOffError(f"the hub sent only {offset} of the {file.size} bytes it lists")

    def _discard(self, part: Path) -> None:
        self._count(-size_bytes(part))
        part.unlink(missing_ok=True)

    def _count(self, size: int) -> None:
        with self._lock:
            self._received += size
            self._progress(self._received, self._total, "bytes")


def _retry_after_s(value: str | None) -> float | None:
    """Seconds in a Retry-After header, which has seconds or a date. None if it has neither."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        try:
            return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
        except ValueError:
            return None


def _part(target: Path) -> Path:
    return target.with_name(f"{target.name}.part")
