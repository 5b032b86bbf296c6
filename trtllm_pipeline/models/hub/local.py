"""A model in a directory on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from trtllm_pipeline.models.files import model_files
from trtllm_pipeline.models.hub.files import (
    CONFIGURATION,
    MODEL,
    Progress,
    code_files,
    described,
    hex_digest,
    lacking,
    weight_files,
)
from trtllm_pipeline.models.hub.hub_errors import UnavailableError
from trtllm_pipeline.models.hub.verify import check_folder

_COPIED_BYTES: Final = 64 << 20


def needed_files(folder: Path, model: str, *, form: str = MODEL) -> dict[str, Path]:
    """The files in `folder` that belong to the model, with their paths by name. Raises DownloadError."""
    if not folder.is_dir():
        raise UnavailableError(f"{model}: directory {folder} does not exist")
    names = model_files.names(folder)
    if CONFIGURATION[form] not in names:
        raise UnavailableError(f"{model}: {folder} {lacking(form, names)}")
    wanted = sorted({*described(names, form), *weight_files(folder, names, model, form)})
    return {name: path for name in wanted if (path := model_files.find(folder, name)) is not None}


def contents(folder: Path, digest: Callable[[Path], str], *, form: str = MODEL) -> dict[str, str]:
    """Check the model in `folder`, see `check_folder`. Returns the digest of each of its files, by name."""
    files = needed_files(folder, folder.name, form=form)
    check_folder(folder, folder.name, form=form)
    return {name: digest(path) for name, path in files.items()}


def code(folder: Path) -> dict[str, str]:
    """SHA-256 of the Python files in `folder`, by name. Raises DownloadError for a link that leads elsewhere."""
    paths = {name: model_files.find(folder, name) for name in code_files(model_files.names(folder))}
    return {name: hex_digest(path) for name, path in paths.items() if path is not None}


def content_digest(digests: Mapping[str, str]) -> str:
    """The digest of the names and contents of a model's files."""
    from blake3 import blake3

    whole = blake3()
    for name, paths in digests.items():
        whole.update(f"{name}\0{paths}\n".encode())
    return whole.hexdigest()


def take(folder: Path, out: Path, *, progress: Progress, form: str = MODEL) -> None:
    """Put the model's files into `out`. Large files share their bytes with the originals if possible.

    Small files are copied, because people edit them in place. Weights are cloned copy-on-write or, if the file system
    cannot do that, hard linked: rewriting them in place changes both.
    """
    files = needed_files(folder, folder.name, form=form)
    total = sum(path.stat().st_size for path in files.values())
    done = 0
    for name, path in files.items():
        size = path.stat().st_size
        (model_files.share if size > _COPIED_BYTES else model_files.copy)(path, out / name)
        done += size
        progress(done, total, "bytes")


def shared_bytes(folder: Path, near: Path) -> int:
    """Bytes of the files in `folder` that need no additional disk space when the model is linked to the disk of
    `near`.
    """
    stats = [path.stat() for path in folder.iterdir() if path.is_file()]
    device = near.stat().st_dev
    return sum(stat.st_size for stat in stats if stat.st_size > _COPIED_BYTES and stat.st_dev == device)
