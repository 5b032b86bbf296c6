"""Downloads a pinned model from Hugging Face or ModelScope: the listing, the small files, then the weights they name."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from trtllm_pipeline.domain import Json
from trtllm_pipeline.errors import DownloadError
from trtllm_pipeline.files.model_files import share
from trtllm_pipeline.hub import hub_errors, hugging_face, local, modelscope
from trtllm_pipeline.hub.files import (
    CONFIGURATION,
    INDEX,
    MODEL,
    Progress,
    RemoteFile,
    copy_code,
    described,
    hex_digest,
    is_licence,
    listed_code,
    trusted_code,
    weight_files,
)
from trtllm_pipeline.hub.transfer import Transfer

_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_MOST_READ_BYTES: Final = 100_000_000
"""Of files that are read for a digest before the download; the largest vocabularies have 40 MB."""
_WORKERS: Final = 4


@dataclass(frozen=True, slots=True)
class _Repository:
    """A pinned model as its hub lists it."""

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
    """The model in the user's cache, where nobody may be asked; None where the hub may be. Raises DownloadError."""
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
    """See `sources.content_of`. Small files of which the hub tells no SHA-256 are read, which takes a moment."""
    cached = _cached(pinned, offline=offline)
    if cached is not None:
        files = local.needed_files(cached, str(pinned["hugging_face"]), form=form)
        return {name: _cached_digest(path) for name, path in files.items() if not is_licence(name)}
    repository = _repository(pinned)
    try:
        small = [repository.files[name] for name in described(repository.files, form) if not is_licence(name)]
    except DownloadError:
        return None
    # Small files are in git itself, which tells another digest. The index also says which files the weights are.
    read = [file for file in small if _listed_sha256(file) is None or file.path == INDEX]
    if sum(file.size for file in read) > _MOST_READ_BYTES:
        return None
    with tempfile.TemporaryDirectory(prefix="trtllm-pipeline-") as temporary:
        folder = Path(temporary)
        with _transfer(repository, folder, progress=lambda *_: None, max_workers=_WORKERS) as transfer:
            transfer.fetch(read)
        try:
            weights = [repository.files[name] for name in weight_files(folder, repository.files, repository.model)]
        except DownloadError:
            return None
        if not all(map(_listed_sha256, weights)):
            return None
        return {file.path: _listed_sha256(file) or hex_digest(folder / file.path) for file in (*small, *weights)}


def _listed_sha256(file: RemoteFile) -> str | None:
    digest = (file.digest or "").lower()
    return digest if _SHA256.fullmatch(digest) else None


def _cached_digest(path: Path) -> str:
    """SHA-256 of a file in Hugging Face's cache, where large ones are called by it."""
    name = path.resolve().name
    return name if _SHA256.fullmatch(name) else hex_digest(path)


def _transfer(repository: _Repository, folder: Path, *, progress: Progress, max_workers: int) -> Transfer:
    return Transfer(
        repository.hub,
        repository.model,
        folder,
        headers=repository.headers,
        lookup=repository.lookup,
        progress=progress,
        max_workers=max_workers,
    )


def fetch(
    pinned: Mapping[str, Json],
    out: Path,
    kept: Path,
    *,
    progress: Progress,
    offline: bool,
    max_workers: int,
    content: Mapping[str, str] | None = None,
    form: str = MODEL,
) -> None:
    """Fill `out`; `kept` has the received files, complete or not. Raises DownloadError."""
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
                    raise DownloadError(f"{model}: {name} in the cache of Hugging Face is not what was planned")
        return
    repository = hub_errors.patiently(lambda: _repository(pinned))
    model = repository.model
    files = repository.files
    if content is not None:
        # What was planned decides, whatever the hub lists now.
        files = {name: replace(file, digest=content.get(name, file.digest)) for name, file in files.items()}
    elif "listing" in pinned and modelscope.listing_digest([*files.values()]) != pinned["listing"]:
        raise DownloadError(
            f"{model} has changed on ModelScope since the run was planned", hint="run the command again"
        )
    small = described(files, form)
    if CONFIGURATION[form] not in small:
        what = "a LoRA adapter" if form == "adapter" else "a transformers model"
        raise DownloadError(f"{model} has no {CONFIGURATION[form]}, so it is not {what}")
    with _transfer(repository, kept, progress=progress, max_workers=max_workers) as transfer:
        transfer.fetch([files[name] for name in small])
        # The index, if there is one, is among the small files and tells which the others are.
        weights = weight_files(kept, files, model)
        trusted = listed_code(pinned, files, model)
        wanted = {*small, *weights, *trusted_code(pinned)}
        if content is not None:
            _check_names(model, {name for name in wanted if not is_licence(name)}, content)
        transfer.fetch([*trusted, *(files[name] for name in weights)])
    for name in wanted:
        share(kept / name, out / name)


def _check_names(model: str, found: Iterable[str], content: Mapping[str, str]) -> None:
    """Raise DownloadError where other files belong to the model than were planned."""
    if other := sorted({*found} ^ content.keys()):
        raise DownloadError(
            f"{model} has other files than were planned: {other[0]}",
            hint="pipeline run --refresh asks the hub again; a lock file has the files of its run",
        )
