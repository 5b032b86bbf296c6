"""Finds the workspace directories that a repository refers to, and checks whether they still exist after a move.

Engines and weights stay in the workspace's `store/`, so repositories contain their absolute paths. No other artifact
does, and a repository can be rewritten in a second.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import FailureClass, ServerError, user_files
from trtllm_pipeline.models.triton_repository import model_config

_STORE: Final = "store"
_STAGE: Final = "repository"


def check(repository: Path, command: Sequence[str] = ()) -> None:
    """Raise ServerError if `repository`, or its `command`, refers to a workspace directory that does not exist.

    Other paths are left to the server, which reports missing files itself.
    """
    for text in _of_workspaces(repository, command):
        if not os.path.exists(text):
            raise ServerError(
                f"{repository} refers to {text}, which does not exist: the workspace was moved, or the directory removed",
                failure=FailureClass.USER,
                hint=_way_on(repository.absolute()),
            )


def folders(repository: Path, command: Sequence[str] = ()) -> tuple[Path, ...]:
    """The existing workspace directories that `repository` or its `command` refers to."""
    return tuple(Path(text) for text in _of_workspaces(repository, command) if os.path.isdir(text))


def _of_workspaces(repository: Path, command: Sequence[str]) -> Iterator[str]:
    for text in dict.fromkeys((*command, *_settings(repository))):
        if Path(text).is_absolute() and _STORE in Path(text).parts:
            yield text


def _way_on(repository: Path) -> str:
    """How to rewrite the repository. Those in a workspace are in store/repository/FINGERPRINT/out."""
    of_stage = next((each for each in repository.parents if (each.parent.name, each.name) == (_STORE, _STAGE)), None)
    if of_stage is None:
        return "write it again with `pipeline stage repository`, from the current directory of the engine or model"
    return (
        f"rm -r {shlex.quote(str(of_stage))}, then repeat `pipeline run` with --until {_STAGE}: "
        "this writes the repositories again and keeps everything else"
    )


def _settings(repository: Path) -> Iterator[str]:
    """The string parameters of every config.pbtxt, and the text of every model.yaml."""
    for path in sorted(repository.glob(f"*/{model_config.FILE_NAME}")):
        try:
            if f"/{_STORE}/" in path.read_text(encoding="utf-8"):
                yield from model_config.string_parameters(model_config.read(path)).values()
        except (OSError, ValueError, model_config.ModelConfigError):
            continue  # the server reports the fault
    for path in sorted(repository.glob("*/*/model.yaml")):
        try:
            settings = user_files.decode_yaml(path.read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(settings, dict):
            yield from (value for value in settings.values() if isinstance(value, str))
