"""Downloads a pinned model from Hugging Face or ModelScope: the listing, the small files, then the weights listed in
them.
"""

from __future__ import annotations

import logging
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import DownloadError, FailureClass, Json
from trtllm_pipeline.models.files.model_files import share
from trtllm_pipeline.models.hub import hub_errors, hugging_face, local, modelscope
from trtllm_pipeline.models.hub.files import (
    CONFIGURATION,
    INDEX,
    MODEL,
    Progress,
    RemoteFile,
    code_files,
    copy_code,
    described,
    hex_digest,
    is_licence,
    lacking,
    listed_code,
    trusted_code,
    weight_files,
)
from trtllm_pipeline.models.hub.sources import resolve
from trtllm_pipeline.models.hub.transfer import RepositoryCopy, Transfer

logger = logging.getLogger(__name__)

_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_MOST_READ_BYTES: Final = 100_000_000
"""Size limit of files that are read for a digest before the download. The largest vocabularies are 40 MB."""
_WORKERS: Final = 4


@dataclass(frozen=True, slots=True)
class _Repository:
    """A pinned model as listed by its hub."""

    hub: hub_errors.Hub
    model: str
    files: Mapping[str, RemoteFile]
    """By name."""
    headers: Mapping[str, str]
    lookup: Callable[[str], Path | None] | None
    """Finds a file in the user's cache."""


def _repository(pinned: Mapping[str, Json]) -> _Repository:
    if "hugging_face" in pinned:
        model, commit = str(pinned["hugging_face"]), str(pinned["revision"])
        files = hugging_face.listing(model, commit)
        headers, lookup = hugging_face.headers(), partial(hugging_face.cached_file, model, commit)
        return _Repository(hub_errors.HUGGING_FACE, model, {file.path: file for file in files}, headers, lookup)
    model, revision = str(pinned["modelscope"]), str(pinned["revision"])
    files = modelscope.listing(model, revision)
    return _Repository(hub_errors.MODELSCOPE, model, {file.path: file for file in files}, modelscope.headers(), None)


def _cached(pinned: Mapping[str, Json], *, offline: bool) -> Path | None:
    """The model in the user's cache in offline mode. None in online mode. Raises DownloadError."""
    if "modelscope" in pinned:
        if offline:
            raise hub_errors.offline(hub_errors.MODELSCOPE, str(pinned["modelscope"]))
        return None
    if not offline and not hugging_face.offline_by_environment():
        return None
    model = str(pinned["hugging_face"])
    cached = hugging_face.cached_folder(model, str(pinned["revision"]))
    if cached is None:
        raise hub_errors.offline(hub_errors.HUGGING_FACE, model)
    return cached


def content(pinned: Mapping[str, Json], *, offline: bool, form: str = MODEL) -> dict[str, str] | None:
    """See `sources.content_of`. Small files for which the hub has no SHA-256 are read, which takes a moment."""
    cached = _cached(pinned, offline=offline)
    if cached is not None:
        files = local.needed_files(cached, str(pinned["hugging_face"]), form=form)
        return {name: _cached_digest(path) for name, path in files.items() if not is_licence(name)}
    repository = _repository(pinned)
    try:
        small = [repository.files[name] for name in described(repository.files, form) if not is_licence(name)]
    except DownloadError:
        return None
    # Small files are in git itself, with another digest. The index also lists the weight files.
    with _read(repository, [file for file in small if _listed_sha256(file) is None or file.path == INDEX]) as folder:
        if folder is None:
            return None
        try:
            weights = [repository.files[name] for name in weight_files(folder, repository.files, repository.model)]
        except DownloadError:
            return None
        if not all(map(_listed_sha256, weights)):
            return None
        return {file.path: _listed_sha256(file) or hex_digest(folder / file.path) for file in (*small, *weights)}


def code(pinned: Mapping[str, Json], *, offline: bool) -> dict[str, str] | None:
    """See `sources.code_of`."""
    cached = _cached(pinned, offline=offline)
    if cached is not None:
        return local.code(cached)
    repository = _repository(pinned)
    sources = [repository.files[name] for name in code_files(repository.files)]
    with _read(repository, sources) as folder:
        return None if folder is None else {file.path: hex_digest(folder / file.path) for file in sources}


@contextmanager
def _read(repository: _Repository, files: Sequence[RemoteFile]) -> Iterator[Path | None]:
    """A directory with these files while the context lasts. None if they are too large to be read for their digests."""
    if sum(file.size for file in files) > _MOST_READ_BYTES:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="trtllm-pipeline-") as temporary:
        with _transfer(repository, Path(temporary), progress=lambda *_: None, max_workers=_WORKERS) as transfer:
            transfer.fetch(files)
        yield Path(temporary)


def _listed_sha256(file: RemoteFile) -> str | None:
    digest = (file.digest or "").lower()
    return digest if _SHA256.fullmatch(digest) else None


def _cached_digest(path: Path) -> str:
    """SHA-256 of a file in Hugging Face's cache, which names large files by it."""
    name = path.resolve().name
    return name if _SHA256.fullmatch(name) else hex_digest(path)


def _transfer(
    repository: _Repository,
    folder: Path,
    *,
    progress: Progress,
    max_workers: int,
    others: Sequence[RepositoryCopy] = (),
) -> Transfer:
    own = RepositoryCopy(repository.hub, repository.model, lambda: repository.headers, lambda file: file)
    return Transfer([own, *others], folder, lookup=repository.lookup, progress=progress, max_workers=max_workers)


def _copy(source: Mapping[str, Json]) -> RepositoryCopy:
    """A repository of a recipe that may have the same files. Its hub is not queried until another one fails."""
    hub = hub_errors.HUGGING_FACE if "hugging_face" in source else hub_errors.MODELSCOPE
    model = str(source.get("hugging_face") or source["modelscope"])
    lock = threading.Lock()

    @cache
    def found() -> _Repository | None:
        try:
            return _repository(resolve([source]))
        except DownloadError as error:
            logger.warning("%s (%s) cannot continue: %s", hub.name, model, error.message)
            return None

    def headers() -> Mapping[str, str]:
        repository = found()
        assert repository is not None
        return repository.headers

    def find(file: RemoteFile) -> RemoteFile | None:
        with lock:
            repository = found()
        listed = None if repository is None else repository.files.get(file.path)
        if listed is None or listed.size != file.size:
            return None
        digests = [(each.digest or "").lower() for each in (listed, file)]
        # Digests of different kinds cannot be compared. Received files are verified in any case.
        return None if len(digests[0]) == len(digests[1]) and digests[0] != digests[1] else listed

    return RepositoryCopy(hub, model, headers, find)


def _reached(
    pinned: Mapping[str, Json], copies: Sequence[Mapping[str, Json]]
) -> tuple[_Repository, list[RepositoryCopy]]:
    """The pinned repository, and its copies. If its hub is unreachable now or no longer has it, the first copy takes
    its place. Raises DownloadError.
    """
    if not copies:
        return hub_errors.patiently(lambda: _repository(pinned)), []
    try:
        return _repository(pinned), [*map(_copy, copies)]
    except DownloadError as error:
        if error.failure is not FailureClass.TRANSIENT and not isinstance(error, hub_errors.UnavailableError):
            raise
        for place, copy in enumerate(copies):
            others = [pinned, *copies[:place], *copies[place + 1 :]]
            with suppress(DownloadError):
                copied = _repository(resolve([copy]))
                logger.warning("%s; using %s (%s) instead", error.message, copied.hub.name, copied.model)
                return copied, [*map(_copy, others)]
    return hub_errors.patiently(lambda: _repository(pinned)), [*map(_copy, copies)]


def fetch(
    pinned: Mapping[str, Json],
    out: Path,
    kept: Path,
    *,
    progress: Progress,
    offline: bool,
    max_workers: int,
    content: Mapping[str, str] | None = None,
    copies: Sequence[Mapping[str, Json]] = (),
    form: str = MODEL,
) -> None:
    """Fill `out`. `kept` has the received files, complete or not. Raises DownloadError.

    `copies` are repositories on hubs that may have the same files; `content` decides.
    """
    cached = _cached(pinned, offline=offline)
    if cached is not None:
        model = str(pinned["hugging_face"])
        local.take(cached, out, progress=progress, form=form)
        copy_code(pinned, cached, out, model)
        if content is not None:
            read = {path.name: path for path in out.iterdir() if not is_licence(path.name)}
            _check_names(model, read, content)
            for name, path in read.items():
                if hex_digest(path) != content[name]:
                    raise DownloadError(f"{model}: {name} in the cache of Hugging Face is not the planned file")
        return
    repository, others = _reached(pinned, copies if content is not None else ())
    model = repository.model
    files = repository.files
    if content is not None:
        # The plan decides, not the hub's current listing.
        files = {name: replace(file, digest=content.get(name, file.digest)) for name, file in files.items()}
    elif "listing" in pinned and modelscope.listing_digest([*files.values()]) != pinned["listing"]:
        raise DownloadError(
            f"{model} has changed on ModelScope since the run was planned", hint="run the command again"
        )
    small = described(files, form)
    if CONFIGURATION[form] not in small:
        raise DownloadError(f"{model} {lacking(form, files)}")
    with _transfer(repository, kept, progress=progress, max_workers=max_workers, others=others) as transfer:
        transfer.fetch([files[name] for name in small if not (others and is_licence(name))])
        # The index, if there is one, is among the small files and lists the others.
        weights = weight_files(kept, files, model, form)
        trusted = listed_code(pinned, files, model)
        wanted = {*small, *weights, *trusted_code(pinned)}
        if content is not None:
            _check_names(model, {name for name in wanted if not is_licence(name)}, content)
        transfer.fetch([*trusted, *(files[name] for name in weights)])
        if others:
            wanted -= _fetch_licences(transfer, [files[name] for name in small if is_licence(name)])
    for name in wanted:
        share(kept / name, out / name)


def _fetch_licences(transfer: Transfer, licences: Iterable[RemoteFile]) -> set[str]:
    """Fetch licences, which copies may lack. Returns the names of those that are unavailable on all hubs. Raises
    DownloadError.
    """
    missing = set()
    for file in licences:
        try:
            transfer.fetch([file])
        except DownloadError as error:
            if error.failure is not FailureClass.TRANSIENT:
                raise
            logger.warning("%s: not fetched, no stage reads it: %s", file.path, error.message)
            missing.add(file.path)
    return missing


def _check_names(model: str, names: Iterable[str], content: Mapping[str, str]) -> None:
    """Raise DownloadError if the model's files are not the planned ones."""
    if other := sorted({*names} ^ content.keys()):
        raise DownloadError(
            f"{model} has other files than were planned: {other[0]}",
            hint="pipeline run --refresh queries the hub again; a lock file has the files of its run",
        )
