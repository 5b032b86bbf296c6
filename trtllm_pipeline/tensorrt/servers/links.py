"""Links to a repository and to the backends for a Triton, without paths that would be misread.

Triton starts each Python model with `bash -c`, and writes the paths of the model and of the backend into that line as
they are: a space would end them, and `;` or `$()` would be obeyed. The Python in that process takes no path beyond ASCII,
whatever the locale. And Python keeps compiled code beside the code that it imports: on the repository itself it would
write into an artifact, and believe what it finds there.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import FailureClass, ServerError, decode_yaml
from trtllm_pipeline.models import model_config

COMPILED: Final = "__pycache__"
_PLAIN: Final = re.compile(r"[A-Za-z0-9_./+@%=-]*")
"""No character that is special to a shell, mpirun or a list of directories."""


def plain(path: Path) -> Path:
    """A name of the existing file or directory `path` that anything takes as it is: its own, or one by way of this process.

    The second needs no file that somebody would have to remove. It holds for this user, and until this process ends,
    as its servers do. Raises ServerError where there is no /proc.
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
    """Make `directory` look like `repository`, with links to its files.

    Compiled Python is left out, and a file whose settings name a path that is not `plain` is written anew.
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
            found = model_config.string_parameters(config)
            named = _plain_values(found)
            for key in found:
                config.parameters[key].string_value = named[key]
            return None if named == found else model_config.to_text(config, as_utf8=False)
        if path.name == "model.yaml":
            found = decode_yaml(path.read_bytes())
            named = _plain_values(found)
            return None if named == found else str(yaml.safe_dump(named, sort_keys=False))
    except (OSError, ValueError, model_config.ModelConfigError):
        pass  # the server says what is wrong with it
    return None


def _plain_values(value: Any) -> Any:
    """`value` with `plain` paths in place of the absolute paths in it that exist."""
    if isinstance(value, dict):
        return {key: _plain_values(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain_values(each) for each in value]
    if isinstance(value, str) and value.startswith("/") and os.path.exists(value):
        return str(plain(Path(value)))
    return value
