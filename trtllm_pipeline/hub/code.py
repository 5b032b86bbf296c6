"""Python files in a model's repository, and configurations without them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from trtllm_pipeline.domain import Json
from trtllm_pipeline.errors import DownloadError, FailureClass
from trtllm_pipeline.files import model_files
from trtllm_pipeline.files.writing import write_json
from trtllm_pipeline.hub.files import RemoteFile

KEY: Final = "code"
"""Key of a pinned source: file name -> SHA-256 of trusted code."""
_NAMES_CODE: Final = "auto_map"
_CONFIGURATIONS: Final = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")


def trusted(pinned: Mapping[str, Json]) -> dict[str, str]:
    """Name and SHA-256 of the code files of a pinned source."""
    found = pinned.get(KEY)
    return {str(name): str(digest) for name, digest in found.items()} if isinstance(found, dict) else {}


def remote(pinned: Mapping[str, Json], named: Mapping[str, RemoteFile], model: str) -> list[RemoteFile]:
    """The code files of a pinned source in the hub's listing, to be verified by the recipe's digests.

    Raises DownloadError for a file that the hub does not have.
    """
    wanted = trusted(pinned)
    if missing := sorted(wanted.keys() - named.keys()):
        raise _missing(model, missing[0])
    return [RemoteFile(name, named[name].size, digest, named[name].url) for name, digest in sorted(wanted.items())]


def take(pinned: Mapping[str, Json], folder: Path, out: Path, model: str) -> None:
    """Copy the code files of a pinned source from `folder`. Raises DownloadError for one that differs from the recipe."""
    from trtllm_pipeline.hub.transfer import mismatch

    for name, digest in sorted(trusted(pinned).items()):
        source = model_files.find(folder, name)
        if source is None:
            raise _missing(model, name)
        wrong = mismatch(source, RemoteFile(name, source.stat().st_size, digest, ""))
        if wrong is not None:
            raise DownloadError(
                f"{model}: {name} is not the code that the recipe pins: {wrong}",
                failure=FailureClass.USER,
                hint="review the file, then put its SHA-256 into the recipe",
            )
        model_files.copy(source, out / name)


def drop_references(out: Path) -> None:
    """Remove `auto_map` from a folder without code: transformers looks for those files even if it does not need them.

    With it, TensorRT-LLM's scripts end with "does not appear to have a file named configuration_phi3.py". Without it,
    transformers takes the class of its own that `model_type` names.
    """
    for name in _CONFIGURATIONS:
        path = out / name
        if not path.is_file():
            continue
        config = model_files.read_json(out, name)
        if isinstance(config, dict) and _NAMES_CODE in config:
            rest = {key: value for key, value in config.items() if key != _NAMES_CODE}
            write_json(path, rest, indent=2)  # a new file: this one may share its bytes with the original


def _missing(model: str, name: str) -> DownloadError:
    return DownloadError(
        f"{model} has no file {name}, which the recipe lists under `code`",
        failure=FailureClass.USER,
        hint="list the files of the revision that the recipe pins",
    )
