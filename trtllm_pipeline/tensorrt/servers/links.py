"""Links to a repository and to the backends for a Triton, without paths that would be misread.

Triton starts each Python model with `bash -c`, and writes the paths of the model and of the backend into that line
unquoted: a space would end them, and `;` or `$()` would run. The Python in that process supports only ASCII paths,
whatever the locale. And Python stores compiled code next to the code that it imports: in the repository, it would write
into an artifact and trust the files there.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import FailureClass, ServerError, user_files
from trtllm_pipeline.models import model_config

COMPILED: Final = "__pycache__"
_PLAIN: Final = re.compile(r"[A-Za-z0-9_./+@%=-]*")
"""True if no character is special to a shell, mpirun or a list of directories."""


def plain(path: Path) -> Path:
    """A name of the existing file or directory `path` that every program accepts: its own, or one through this process.

    The second name needs no file that would have to be removed. It is valid for this user until this process ends, like its
    servers. Raises ServerError if there is no /proc.
    """
    path = path.absolute()
    if _PLAIN.fullmatch(str(path)):
        return path
    named = Path(f"/proc/{os.getpid()}/fd/{os.open(path, os.O_PATH)}")
    if not named.exists():
        raise ServerError(
            f"a server cannot use the path {path}, and without /proc there is no other name for it",
            failure=FailureClass.USER,
            hint="use a directory whose path has only ASCII letters, digits and . _ - +",
        )
    return named


def link_repository(repository: Path, folder: Path) -> None:
    """Make `folder` look like `repository`, with links to its files.

    Compiled Python is omitted, and a file whose settings contain a path that is not `plain` is rewritten.
    """
    shutil.rmtree(folder, ignore_errors=True)
    repository = repository.absolute()
    for root, folders, files in os.walk(repository):
        copy = folder / os.path.relpath(root, repository)
        copy.mkdir(parents=True)
        linked = [name for name in folders if os.path.islink(os.path.join(root, name))]
        folders[:] = [name for name in folders if name not in linked and name != COMPILED]
        for name in (*files, *linked):
            text = _with_plain_paths(Path(root, name))
            if text is None:
                (copy / name).symlink_to(os.path.join(root, name))
            else:
                (copy / name).write_text(text, encoding="ascii")


def _with_plain_paths(path: Path) -> str | None:
    """New content for a file of a repository; None if it can be linked as it is."""
    import yaml

    try:
        if path.name == model_config.FILE_NAME:
            config = model_config.read(path)
            paths = model_config.string_parameters(config)
            named = _plain_values(paths)
            for key in paths:
                config.parameters[key].string_value = named[key]
            return None if named == paths else model_config.to_text(config, as_utf8=False)
        if path.name == "model.yaml":
            paths = user_files.decode_yaml(path.read_bytes())
            named = _plain_values(paths)
            return None if named == paths else str(yaml.safe_dump(named, sort_keys=False))
    except (OSError, ValueError, model_config.ModelConfigError):
        pass  # the server reports the error
    return None


def _plain_values(value: Any) -> Any:
    """`value` with the absolute paths in it that exist replaced by `plain` ones."""
    if isinstance(value, dict):
        return {key: _plain_values(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain_values(each) for each in value]
    if isinstance(value, str) and value.startswith("/") and os.path.exists(value):
        return str(plain(Path(value)))
    return value
