"""One file of a data set on the Hugging Face Hub, such as calibration rows: `hub:ORGANISATION/NAME/PATH[@REVISION]`.

`huggingface_hub` downloads it into the user's cache, verified and resumable. Fingerprints contain its content, not its origin.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from trtllm_pipeline import __version__
from trtllm_pipeline.errors import DownloadError, UsageError
from trtllm_pipeline.hub import hub_errors, hugging_face

PREFIX: Final = "hub:"
_DATA: Final = Path(__file__).parents[1] / "data"
NAME: Final = re.compile(r"hub:(?P<repo>[\w.-]+/[\w.-]+)/(?P<path>[^@\s]+?)(?:@(?P<revision>[\w./-]+))?")
FORM: Final = "hub:ORGANISATION/NAME/PATH, and @REVISION for another branch or a commit"


def data_file(name: str, base_dir: Path) -> Path:
    """The file a setting means: "builtin:NAME", "hub:ORGANISATION/NAME/PATH", or a path from the matrix file's folder.

    Raises UsageError for a built-in data set that does not exist, DownloadError for a file that cannot be fetched.
    """
    if name.startswith(PREFIX):
        return fetch(name)
    if not name.startswith("builtin:"):
        return (base_dir / name).absolute()
    known = {f"builtin:{file.stem}": file for file in _DATA.glob("*/*.jsonl")}
    if name not in known:
        raise UsageError(
            f"there is no data set {name}",
            hint=f"the built-in ones are {', '.join(sorted(known))}; or name a JSONL file of yours",
        )
    return known[name]


def fetch(name: str) -> Path:
    """The local path of the file `name`, downloaded if necessary. Raises UsageError for an invalid name, and DownloadError."""
    match = NAME.fullmatch(name)
    if match is None:
        raise UsageError(f"{name!r} does not name a data set file on the Hub", hint=f"write {FORM}")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    repo, path, revision = match["repo"], match["path"], match["revision"] or "main"
    with hugging_face.errors_in_words(repo):
        try:
            found = hf_hub_download(
                repo,
                path,
                repo_type="dataset",
                revision=revision,
                library_name="trtllm-pipeline",
                library_version=__version__,
                endpoint=hugging_face.endpoint(),
            )
        except LocalEntryNotFoundError as error:  # neither in the cache nor, for whatever reason, on the hub
            raise hub_errors.unreachable(hub_errors.HUGGING_FACE, repo, hugging_face.endpoint(), error) from error
        except EntryNotFoundError as error:
            raise DownloadError(f"the data set {repo} has no file {path}") from error
    return Path(found)
