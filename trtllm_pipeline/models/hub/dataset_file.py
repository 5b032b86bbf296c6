"""One file of a data set on the Hugging Face Hub, such as calibration rows: `hub:ORGANIZATION/NAME[/PATH][@REVISION]`.

`huggingface_hub` downloads it into the user's cache, verified and resumable. Fingerprints contain its content, not its
origin. For a data set, or one of its directories, the first file of rows is used, with training files before others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Final

from trtllm_pipeline import PACKAGE, __version__
from trtllm_pipeline.base import DownloadError, UsageError
from trtllm_pipeline.models.hub import hub_errors, hugging_face

PREFIX: Final = "hub:"
_DATA: Final = PACKAGE / "data"
NAME: Final = re.compile(r"hub:(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<path>[^@\s]+?))?(?:@(?P<revision>[\w./-]+))?")
FORM: Final = "hub:ORGANIZATION/NAME"
FILE_FORM: Final = f"{FORM}/PATH"
_FILE: Final = re.compile(r"\.[A-Za-z]\w*$")
"""Suffix of a data file. A directory may be named 3.0.0."""
_ROWS: Final = (".jsonl", ".parquet", ".csv")
_SPLITS: Final = ("train", "validation", "valid", "dev", "test")


def data_file(name: str, base_dir: Path) -> Path:
    """The file for a setting: "builtin:NAME", "hub:ORGANIZATION/NAME", or a path relative to the matrix file's
    directory.

    Raises UsageError for a built-in data set that does not exist, DownloadError for a file that cannot be fetched.
    """
    if name.startswith(PREFIX):
        return fetch(name)
    if not name.startswith("builtin:"):
        return (base_dir / name).absolute()
    known = {f"builtin:{file.stem}": file for file in _DATA.glob("*/*.jsonl")}
    if name not in known:
        raise UsageError(
            f"data set {name} does not exist",
            hint=f"the built-in ones are {', '.join(sorted(known))}; or specify your own JSONL file",
        )
    return known[name]


def fetch(name: str) -> Path:
    """The local path of the file `name`, downloaded if necessary. Raises UsageError for an invalid name, and
    DownloadError.

    A copy in the user's cache is used if the hub cannot be reached.
    """
    match = NAME.fullmatch(name)
    if match is None:
        raise UsageError(f"{name!r} does not name a data set on the Hub", hint=f"write {FORM}")
    repo, path, revision = match["repo"], match["path"], match["revision"] or "main"
    is_file = path is not None and _FILE.search(path) is not None
    try:
        folder, names = None, _listed(repo, revision)
    except hub_errors.UnavailableError:
        folder = _cached(repo, revision)
        if folder is None:
            raise
        names = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
        if is_file and path not in names:
            raise
    if not is_file:
        path = choose(names, repo, path)
    elif path not in names:
        raise DownloadError(f"the data set {repo} does not have a file {path}")
    return _downloaded(repo, path, revision) if folder is None else folder / path


def _downloaded(repo: str, path: str, revision: str) -> Path:
    from huggingface_hub import hf_hub_download

    with hugging_face.errors_in_words(repo):
        downloaded = hf_hub_download(
            repo,
            path,
            repo_type="dataset",
            revision=revision,
            library_name="trtllm-pipeline",
            library_version=__version__,
            endpoint=hugging_face.endpoint(),
        )
    return Path(downloaded)


def choose(names: Iterable[str], repo: str, folder: str | None = None) -> str:
    """The file to read rows from, in a data set or one of its directories: the first of `_SPLITS` that it has.

    Raises DownloadError if there is none, and if directories contain several data sets.
    """
    within = "" if folder is None else f"{folder.rstrip('/')}/"
    matching = [name for name in names if name.startswith(within) and name.endswith(_ROWS)]
    what = f"the data set {repo}" if folder is None else f"{folder} of the data set {repo}"
    if not matching:
        raise DownloadError(f"{what} has no file with rows: {', '.join(_ROWS)}", hint=f"name a file: {FILE_FORM}")
    folders = sorted({str(PurePosixPath(name).parent) for name in matching})
    if len(folders) > 1:
        listed = ", ".join(folders[:8]) + (", ..." if len(folders) > 8 else "")
        raise DownloadError(
            f"{what} has rows in {len(folders)} directories: {listed}", hint=f"name one: hub:{repo}/{folders[0]}"
        )

    def order(name: str) -> tuple[int, int, str]:
        stem = PurePosixPath(name).name.lower()
        split = next((place for place, word in enumerate(_SPLITS) if word in stem), len(_SPLITS))
        return split, _ROWS.index(PurePosixPath(name).suffix), name

    return min(matching, key=order)


def _listed(repo: str, revision: str) -> list[str]:
    """The files of a data set, from the hub's listing. Raises DownloadError."""
    from huggingface_hub import HfApi

    if hugging_face.offline_by_environment():
        raise hub_errors.offline(hub_errors.HUGGING_FACE, repo, instead="name a file on this machine")
    with hugging_face.errors_in_words(repo):
        api = HfApi(endpoint=hugging_face.endpoint(), library_name="trtllm-pipeline", library_version=__version__)
        info = api.dataset_info(repo, revision=revision, timeout=hub_errors.CONNECT_TIMEOUT_S * 6)
    return [file.rfilename for file in info.siblings or ()]


def _cached(repo: str, revision: str) -> Path | None:
    """The directory of a data set in the user's cache. Raises DownloadError for an invalid name."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with hugging_face.errors_in_words(repo):
        try:
            return Path(snapshot_download(repo, repo_type="dataset", revision=revision, local_files_only=True))
        except LocalEntryNotFoundError:
            return None
